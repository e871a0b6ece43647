"""How COMPUTE_32F_FAST_TF32 rounds its FP32 operands: products of chosen bit patterns with 1."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np

from gpu.parts import Options, Part
from gpu.raw import LtProduct, told

#: Bits of a float32's mantissa that TF32 has no room for.
DROPPED = 13
_HALF = 1 << (DROPPED - 1)

#: With a short inner dimension the library may not take tensor cores; the others are padded with zeros.
INNER = (1, 16, 512)
COLUMNS = 512


def patterns(seed: int, count: int = 512) -> Any:
    """Return finite normal float32 numbers around the middle between two TF32 numbers, and exactly there."""
    rng = np.random.default_rng(seed)
    low = np.array([0, 1, _HALF - 1, _HALF, _HALF + 1, 2 * _HALF - 1], np.uint32)
    kept = rng.integers(0, 1 << 10, count, dtype=np.uint32)
    # Ties at odd and even last bits alike, both signs, exponents away from the ends.
    sign = rng.integers(0, 2, count, dtype=np.uint32) << np.uint32(31)
    exponent = rng.integers(64, 190, count, dtype=np.uint32) << np.uint32(23)
    bits = sign | exponent | (kept << np.uint32(DROPPED)) | low[np.arange(count) % len(low)]
    return bits.astype(np.uint32).view(np.float32)


def _truncated(x: Any) -> Any:
    return (x.view(np.uint32) & np.uint32(~((1 << DROPPED) - 1) & 0xFFFFFFFF)).view(np.float32)


def _away(x: Any) -> Any:
    return _truncated((x.view(np.uint32) + np.uint32(_HALF)).view(np.float32))


def _even(x: Any) -> Any:
    bits = x.view(np.uint32)
    odd = (bits >> np.uint32(DROPPED)) & np.uint32(1)
    return _truncated((bits + np.uint32(_HALF - 1) + odd).view(np.float32))


#: What may happen to an operand, by name.
RULES: dict[str, Callable[[Any], Any]] = {
    "not rounded": lambda x: x,
    "truncated": _truncated,
    "to nearest, ties away from zero": _away,
    "to nearest, ties to even": _even,
}


def classify(given: Any, returned: Any) -> dict[str, Any]:
    """Return which rule explains all products of float32 numbers and 1, and the share that each explains."""
    shares = {
        name: float(np.mean(rule(given).view(np.uint32) == returned.view(np.uint32))) for name, rule in RULES.items()
    }
    rule = next((name for name, share in shares.items() if share == 1.0), "none of these")
    return {"rule": rule, "shares": shares}


def run(part: Part, options: Options) -> None:
    """Look at both operands, in every inner dimension."""
    values = patterns(options.seed)
    computes = ("COMPUTE_32F_FAST_TF32", "COMPUTE_32F")
    for k, side, compute in product(INNER, ("a", "b"), computes):
        words = {"k": k, "operand": side, "compute_type": compute}
        # One that is refused is an answer.
        with part.attempt(ok=None, **words):
            bare = LtProduct(*operands(values, k, side), compute=compute, out_dtype="float32")
            (algorithm,) = bare.algorithms(1)
            result = bare.run(algorithm)
            returned = np.ascontiguousarray(result[:, 0] if side == "a" else result[0])
            found = classify(values, returned)
            # COMPUTE_32F rounds nothing; what FAST_TF32 does is the question.
            ok = found["rule"] == "not rounded" if compute == "COMPUTE_32F" else None
            part.row(ok=ok, **words, **found, **told(algorithm))


def operands(values: Any, k: int, side: str) -> tuple[Any, Any]:
    """Return operands whose product repeats the values, along rows (a) or columns (b)."""
    a = np.zeros((len(values), k) if side == "a" else (COLUMNS, k), np.float32)
    b = np.zeros((k, COLUMNS) if side == "a" else (k, len(values)), np.float32)
    a[:, 0] = values if side == "a" else 1
    b[0] = 1 if side == "a" else values
    return a, b
