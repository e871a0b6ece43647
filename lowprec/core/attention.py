"""Attention in host memory by one call of the compiled library."""

from __future__ import annotations

import ctypes
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lowprec.arrays import ArrayView, Device
from lowprec.arrays.view import data_pointer
from lowprec.backends import backend_of
from lowprec.backends.cpu import library, threads
from lowprec.backends.cpu.descriptions import describe
from lowprec.errors import BackendError
from lowprec.formats import DType
from lowprec.modes import MathMode, Mode, ResolvedMode
from lowprec.planning import Capabilities, GemmProblem, OperandSpec, plan_gemm


class Sequences(NamedTuple):
    """Float32 arrays of shape (images, heads, tokens, width); the last axis of a mask, of keys, is contiguous."""

    q: ArrayView
    k: ArrayView
    v: ArrayView
    mask: ArrayView | None
    out: ArrayView  # or the gradient of the result
    # of each query, (images, tokens, heads): its largest score and the sum of the exponentials relative to it; or the
    # logarithm of the sum of its exponentials, and the dot product of the result and its gradient
    largest: ArrayView
    sums: ArrayView


def product_of(resolved: ResolvedMode, device: Device) -> library.Product | None:
    """Return how float32 operands are multiplied; None if one call of the compiled library does not compute it."""
    if resolved.emulates is not None or resolved.mode is MathMode.FP32_EMULATED:
        return None
    return _product_of(resolved.mode, backend_of(device).capabilities(device))


@lru_cache(64)
def _product_of(mode: Mode, capabilities: Capabilities) -> library.Product | None:
    operand = OperandSpec.contiguous(DType.FLOAT32, (1, 1))
    plan = plan_gemm(GemmProblem(operand, operand), capabilities, mode)
    is_compiled = plan.kernel_row.packs and plan.quantized is None
    return describe(plan, plan.problem)[0] if is_compiled else None


def attend(
    product: library.Product,
    operands: Sequences,
    ranges: NDArray[np.int64],
    scale: float,
    is_causal: bool,
    chunk: int,
    gradients: tuple[ArrayView, ...] = (),
) -> None:
    """Compute attention in blocks, whose ``ranges`` are image, first and last query, first and last key.

    Products with values are summed over ``chunk`` keys at a time. With ``gradients``, that of the queries is written,
    and those of keys and values are added to the others.
    """
    q, k, v, mask, out, largest, sums = operands
    first_blocks = np.arange(len(ranges) + 1)
    if gradients:
        first_blocks = np.searchsorted(ranges[:, 0], np.arange(q.shape[0] + 1))
    found = library.AttentionHeads(
        *map(_heads, (q, k, v, mask, out, *(gradients or [None] * 3))),
        largest.address,
        sums.address,
        data_pointer(ranges),
        data_pointer(first_blocks),
        len(first_blocks) - 1,
        k.shape[1],
        q.shape[1] // k.shape[1],
        *q.shape[2:],
        chunk,
        scale,
        is_causal,
        product,
        threads.num_threads(),
    )
    status = library.functions().attend(ctypes.byref(found))
    if status == library.NO_MEMORY:
        raise MemoryError("no memory for the scores of attention")
    if status:
        raise BackendError(f"the compiled library returned status {status} for attention")


def _heads(x: ArrayView | None) -> library.Heads:
    return library.Heads() if x is None else library.Heads(x.address, *x.strides)
