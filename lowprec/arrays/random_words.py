"""Words of a counter-based generator for stochastic rounding, and the Hadamard transform, in any array library."""

from __future__ import annotations

from typing import Any

import numpy as np

from lowprec.arrays.namespaces import converted
from lowprec.recipes import STEP_BIT, Rule


def _multiplied(x: Any, factor: int) -> tuple[Any, Any]:
    """Return the high and low halves of the products of int32 numbers, taken as unsigned, and a factor."""
    low = x & 0xFFFF
    high = _high_half(x)
    first = factor & 0xFFFF
    second = factor >> 16
    carry = high * first + _high_half(low * first)
    middle = low * second + (carry & 0xFFFF)
    signed = factor - (1 << 32)
    return high * second + _high_half(carry) + _high_half(middle), x * signed


def _high_half(x: Any) -> Any:
    return (x >> 16) & 0xFFFF


def _signed(x: int) -> int:
    return (x & 0xFFFFFFFF) - ((x & 0x80000000) << 1)


def philox(counter: tuple[Any, Any, Any, Any], seed: int) -> tuple[Any, ...]:
    """Return four words of Philox4x32-10 (Salmon and others, 2011) for counters of four int32 arrays."""
    c0, c1, c2, c3 = counter
    for i in range(10):
        key0 = _signed(seed + i * 0x9E3779B9)
        key1 = _signed((seed >> 32) + i * 0xBB67AE85)
        high0, low0 = _multiplied(c0, 0xD2511F53)
        high1, low1 = _multiplied(c2, 0xCD9E8D57)
        c0 = high1 ^ c1 ^ key0
        c1 = low1
        c2 = high0 ^ c3 ^ key1
        c3 = low0
    return c0, c1, c2, c3


def words_of(x: Any, rule: Rule, xp: Any, step: Any) -> Any:
    """Return a word for each number: the counter is its k / 4, its vector in the batch and the stream."""
    batches, vectors, k = x.shape
    count = batches * vectors
    quarters = -(-k // 4)
    shape = (count, quarters)
    like: dict[str, Any] = {"dtype": xp.int32}
    if hasattr(x, "to"):
        like["device"] = x.device
    along_k = xp.broadcast_to(xp.arange(quarters, **like), shape)
    vector = xp.arange(count, **like)
    vector = xp.broadcast_to(vector[:, None], shape)
    low = xp.full_like(along_k, _signed(rule.stream))
    high = xp.full_like(along_k, _signed(rule.stream >> 32))
    if step is not None:
        low = low | (step << STEP_BIT)
        above = step >> (32 - STEP_BIT)
        high = high | (above & ((1 << STEP_BIT) - 1))
    words = xp.stack(philox((along_k, vector, low, high), rule.seed), -1)
    words = words.reshape((batches, vectors, 4 * quarters))
    return words[..., :k]


def transformed(x: Any, seed: int, xp: Any) -> Any:
    """Transform whole groups of 16 along the last axis: random signs, then the Hadamard matrix, times 1/4."""
    minus_one = np.full(1, -1, np.int32)
    zero = np.zeros(1, np.int32)
    with np.errstate(over="ignore"):
        words = philox((minus_one, minus_one, zero, zero), seed)
    signs = int(words[0][0])
    factors = np.full(16, 0.25, np.float32)
    for i in range(16):
        if signs >> i & 1:
            factors[i] = -0.25
    like = x.device if hasattr(x, "to") else np.float32
    factors = converted(xp.asarray(factors), like)
    outer = x.shape[:-1]
    groups = x.shape[-1] // 16
    end = 16 * groups
    part = x[..., :end].reshape((*outer, groups, 16))
    part = part * factors
    for half in (1, 2, 4, 8):
        pairs = part.reshape((*outer, groups, 8 // half, 2, half))
        low = pairs[..., 0, :]
        high = pairs[..., 1, :]
        sums = xp.stack((low + high, low - high), -2)
        part = sums.reshape(part.shape)
    whole = part.reshape((*outer, end))
    return xp.concatenate((whole, x[..., end:]), -1)
