"""Rounding of operands in host memory to narrow formats, by the compiled library or by NumPy with the same bits."""

from __future__ import annotations

import ctypes
from math import prod
from typing import Any

import ml_dtypes
import numpy as np

from lowprec.arrays import block_codes
from lowprec.arrays.block_codes import Rule
from lowprec.arrays.numpy_library import host_view
from lowprec.arrays.view import ArrayView, data_pointer
from lowprec.backends.cpu import library, threads
from lowprec.errors import BackendError
from lowprec.formats import DType

__all__ = ["Rule", "quantize_view"]

#: ``lp_elements`` and ``lp_scaling``.
_ELEMENTS = {"e4m3": 0, "e5m2": 1, "e2m1": 2, "int8": 3}
_SCALINGS = {"tensor": 0, "vector": 1, "floor": 2, "rceil": 3, "e4m3": 4, "float32": 5}

_TYPES = (DType.FLOAT32, DType.BFLOAT16, DType.FLOAT16)


def quantize_view(view: ArrayView, inner: int, rule: Rule) -> tuple[ArrayView, Any, float]:
    """Round the matrices of a view to narrow numbers along an axis, that of k.

    Parameters
    ----------
    view : ArrayView, shape (..., m, n)
        float32, bfloat16 or float16 numbers in host memory, with any strides.
    inner : {-1, -2}
        The axis of k.
    rule : Rule
        Format and rounding.

    Returns
    -------
    values : ArrayView
        bfloat16 numbers, with the scales of their blocks but without float32 scales, or int8; in new memory, whose axes
        have the order of the source's strides.
    scales : ndarray of float32 or None
        Of vectors, the shape of the view without the inner axis; or of blocks, (..., blocks along k, vector blocks).
    scale : float
        Scale of the tensor, 1 without one.
    """
    functions = library.library() if library.units() else None
    if functions is None or 0 in view.shape or view.ndim < 2 or view.dtype not in _TYPES:
        with np.errstate(all="ignore"):
            values, scales, scale = block_codes.rounded(view.ndarray(), inner, rule, np)
        ordered = _empty_in_order(view, values.dtype)
        ordered[...] = values
        return host_view(ordered), None if scales is None else np.ascontiguousarray(scales), float(scale)
    values = _empty_in_order(view, np.dtype(np.int8 if rule.elements == "int8" else ml_dtypes.bfloat16))
    to = host_view(values)
    vectors, k = (view.shape[-1], view.shape[-2]) if inner == -2 else view.shape[-2:]
    high, wide = rule.block if rule.scaling == "block" else (1, 1)
    scaling, strides, batch = rule.scaling, (0, 0, 0), view.shape[:-2]
    scales = None
    if scaling == "vector":
        scales, strides = np.empty((*batch, vectors), np.float32), (vectors, 1, 0)
    elif rule.block_scale == "float32":
        scales = np.empty((*batch, -(-k // wide), -(-vectors // high)), np.float32)
        strides = prod(scales.shape[-2:]), 1, scales.shape[-1]
    offsets = [None, None]
    if batch:
        offsets = [_offsets(batch, x.strides[:-2]) for x in (view, to)]
    last, other = inner, -3 - inner
    scale = ctypes.c_float()
    described = library.Quantizer(
        prod(batch), vectors, k, view.strides[other], view.strides[last], to.strides[other], to.strides[last],
        *(None if x is None else data_pointer(x) for x in offsets), *strides, high, wide, rule.seed, rule.stream,
        library.TYPES[view.dtype], _ELEMENTS[rule.elements],
        _SCALINGS[rule.block_scale if scaling == "block" else scaling], rule.rounding == "stochastic",
        rule.hadamard > 0, 0,
    )  # fmt: skip
    status = functions.quantize(
        ctypes.addressof(described), view.address, data_pointer(values),
        None if scales is None else data_pointer(scales), ctypes.addressof(scale), threads.num_threads(),
    )  # fmt: skip
    if status == library.NO_MEMORY:
        raise MemoryError("no memory for rounding an operand")
    if status:
        raise BackendError(f"the compiled library returned status {status} for the rounding of an operand")
    return to, scales, scale.value


def _empty_in_order(view: ArrayView, dtype: np.dtype[Any]) -> Any:
    """Return new memory without gaps; of the last two axes that with the smaller stride in the view is contiguous."""
    if view.ndim < 2 or _is_along_last(view):
        return np.empty(view.shape, dtype)
    return np.empty((*view.shape[:-2], view.shape[-1], view.shape[-2]), dtype).swapaxes(-1, -2)


def _is_along_last(view: ArrayView) -> bool:
    """Whether numbers along the last axis are neighbours, or none are."""
    row, column = view.strides[-2:]
    return column == 1 or row != 1


def _offsets(shape: tuple[int, ...], strides: tuple[int, ...]) -> Any:
    found = np.zeros(1, np.int64)
    for extent, stride in zip(shape, strides, strict=True):
        found = np.add.outer(found, np.arange(extent) * stride).ravel()
    return found
