"""Rounding of operands in host memory to narrow formats, by the compiled library or by NumPy with the same bits."""

from __future__ import annotations

import ctypes
from math import prod
from typing import Any

import ml_dtypes
import numpy as np

from lowprec.arrays import block_codes
from lowprec.arrays.numpy_library import aligned_empty, host_view
from lowprec.arrays.view import ArrayView, data_pointer
from lowprec.backends.cpu import library, threads
from lowprec.errors import BackendError
from lowprec.formats import ELEMENTS, BlockFormat, DType
from lowprec.recipes import FORMATS, Rule

#: ``lp_elements`` and ``lp_scaling``.
_ELEMENTS = {name: i for i, name in enumerate(ELEMENTS)}
_SCALINGS = {"tensor": 0, "vector": 1, "floor": 2, "rceil": 3, "e4m3": 4, "float32": 5}

_TYPES = (DType.FLOAT32, DType.BFLOAT16, DType.FLOAT16)


def quantize_view(view: ArrayView, inner: int, rule: Rule, empty: Any = np.empty) -> tuple[ArrayView, Any, float]:
    """Round the matrices of a view to narrow numbers along an axis, that of k.

    Parameters
    ----------
    view : ArrayView, shape (..., m, n)
        float32, bfloat16 or float16 numbers in host memory, with any strides.
    inner : {-1, -2}
        The axis of k.
    rule : Rule
        Format and rounding.
    empty : function
        Returns the memory of the values, as ``numpy.empty``.

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
    if not encodes(view) or view.ndim < 2:
        with np.errstate(all="ignore"):
            values, scales, scale = block_codes.rounded(view.ndarray(), inner, rule, np)
        ordered = _empty_in_order(view, values.dtype, empty)
        ordered[...] = values
        return host_view(ordered), None if scales is None else np.ascontiguousarray(scales), float(scale)
    values = _empty_in_order(view, np.dtype(np.int8 if rule.elements == "int8" else ml_dtypes.bfloat16), empty)
    to = host_view(values)
    vectors, k = (view.shape[-1], view.shape[-2]) if inner == -2 else view.shape[-2:]
    high, wide = rule.block
    strides, batch, other = (0, 0, 0), view.shape[:-2], -3 - inner
    scales = None
    if rule.scaling == "vector":
        scales, strides = np.empty((*batch, vectors), np.float32), (vectors, 1, 0)
    elif rule.block_scale == "float32":
        scales = np.empty((*batch, -(-k // wide), -(-vectors // high)), np.float32)
        strides = prod(scales.shape[-2:]), 1, scales.shape[-1]
    offsets = [library.offsets(zip(batch, x.strides, strict=False)) for x in (view, to)]
    described = library.Quantizer(
        prod(batch), vectors, k, view.strides[other], view.strides[inner], to.strides[other], to.strides[inner],
        *map(data_pointer, offsets), *strides,
    )  # fmt: skip
    return to, scales, _quantize(described, rule, view, values, scales)


def encodes(view: ArrayView) -> bool:
    """Whether the compiled library rounds the numbers of a view."""
    is_host = view.device.is_host and view.dtype in _TYPES and 0 not in view.shape
    return is_host and library.library() is not None and bool(library.units())


def encode(
    view: ArrayView, axis: int, row: BlockFormat, scale_rule: str, shapes: tuple[Any, ...]
) -> tuple[tuple[Any, Any], float]:
    """Return codes along an axis and those of scales, as uint8 of these shapes, and the scale of the array."""
    rule = FORMATS[row.name][0]
    if rule.block_scale == "floor":
        rule = rule._replace(block_scale=scale_rule)
    codes, scales = (None if shape is None else aligned_empty(shape, np.dtype(np.uint8)) for shape in shapes)
    extents, strides, padded = list(view.shape), list(view.strides), shapes[0][-1] * 8 // row.bits
    k, inner = extents.pop(axis), strides.pop(axis)
    vectors, vector = (extents.pop(), strides.pop()) if extents else (1, 0)
    batches, blocks = prod(extents), 0 if scales is None else scales.shape[-1]
    offsets = library.offsets(zip(extents, strides, strict=True)), np.arange(batches) * (vectors * padded)
    described = library.Quantizer(
        batches, vectors, k, vector, inner, padded, 1, *map(data_pointer, offsets), vectors * blocks, blocks, 1, codes=1
    )
    return (codes, scales), _quantize(described, rule, view, codes, scales)


def _quantize(described: library.Quantizer, rule: Rule, view: ArrayView, to: Any, scales: Any) -> float:
    """Call the library with a description of matrices, to which the rule is added; return the scale of the tensor."""
    scale = ctypes.c_float()
    described.block_vectors, described.block_k = rule.block
    described.seed, described.stream, described.hadamard = rule.seed, rule.stream, rule.hadamard > 0
    described.type, described.elements = library.TYPES[view.dtype], _ELEMENTS[rule.elements]
    described.scaling = _SCALINGS[rule.block_scale if rule.scaling == "block" else rule.scaling]
    described.stochastic = rule.rounding == "stochastic"
    status = library.functions().quantize(
        ctypes.addressof(described), view.address, data_pointer(to), None if scales is None else data_pointer(scales),
        ctypes.addressof(scale), threads.num_threads(),
    )  # fmt: skip
    if status == library.NO_MEMORY:
        raise MemoryError("no memory for rounding an operand")
    if status:
        raise BackendError(f"the compiled library returned status {status} for the rounding of an operand")
    return scale.value


def _empty_in_order(view: ArrayView, dtype: np.dtype[Any], empty: Any) -> Any:
    """Return new memory without gaps; of the last two axes that with the smaller stride in the view is contiguous."""
    if view.ndim < 2 or _is_along_last(view):
        return empty(view.shape, dtype)
    return empty((*view.shape[:-2], view.shape[-1], view.shape[-2]), dtype).swapaxes(-1, -2)


def _is_along_last(view: ArrayView) -> bool:
    """Whether numbers along the last axis are neighbours, or none are."""
    row, column = view.strides[-2:]
    return column == 1 or row != 1
