"""Rounding of operands in host memory to narrow formats by the compiled library."""

from __future__ import annotations

import ctypes
from math import prod
from typing import Any

import numpy as np

from lowprec.arrays.numpy_library import aligned_empty
from lowprec.arrays.view import NUMPY_DTYPES, ArrayView, data_pointer
from lowprec.backends.cpu import library, threads
from lowprec.errors import BackendError
from lowprec.formats import ELEMENTS, INT4_CODES, BlockFormat, DType
from lowprec.planning.layout import MatrixStack
from lowprec.recipes import FORMATS, Rule

#: ``lp_elements`` and ``lp_scaling``.
_ELEMENTS = {name: i for i, name in enumerate((*ELEMENTS, "int4"))}
_SCALINGS = {"tensor": 0, "vector": 1, "floor": 2, "rceil": 3, "e4m3": 4, "float32": 5, "even": 6}

#: Elements below which the library rounds in the calling thread.
_ALONE = 1 << 16

_TYPES = (DType.FLOAT32, DType.BFLOAT16, DType.FLOAT16)


def describe(
    source: MatrixStack, to: MatrixStack, operand: int, rule: Rule, *, to_codes: bool = False
) -> tuple[library.Quantizer, list[Any]]:
    """Return the rounding of ``a`` (0) or ``b`` (1), and the arrays of offsets of which it has the addresses.

    ``source`` has float32, bfloat16 or float16 numbers. ``to`` has no gaps, and bfloat16 numbers with the scales of
    their blocks but without float32 scales, or int8; or codes, in whole blocks along k, whose scales are apart.
    Matrices of a batch along which ``to`` is broadcast are rounded once.
    """
    if operand:
        source = source.transposed
        to = to.transposed
    batch = [n if stride else 1 for n, stride in zip(to.batch_shape, to.batch_strides, strict=True)]
    offsets = [library.offsets(zip(batch, x.batch_strides, strict=True)) for x in (source, to)]
    q = library.Quantizer(batches=prod(batch), vectors=source.rows, k=source.cols, codes=to_codes)
    q.vector = source.row_stride
    q.inner = source.col_stride
    q.to_vector = to.row_stride
    q.to_inner = to.col_stride
    q.offsets, q.to_offsets = map(data_pointer, offsets)
    blocks = -(-q.k // (rule.block[1] or q.k))
    if to_codes:
        q.to_vector = blocks * rule.block[1]
        q.to_inner = 1
        _set_scales(q, blocks)
        q.scale_batch *= q.vectors
    elif rule.block_scale == "float32":
        across = -(-q.vectors // rule.block[0])
        q.scale_batch = blocks * across
        q.scale_vector = 1
        q.scale_inner = across
    else:
        q.scale_batch = q.vectors
        q.scale_vector = 1
    add_rule(q, rule, source.dtype)
    return q, offsets


def _set_scales(q: library.Quantizer, blocks: int) -> None:
    """Set the strides of the scales of codes, of blocks along k."""
    q.scale_batch = blocks
    q.scale_vector = blocks
    q.scale_inner = 1


def encodes(view: ArrayView, row: BlockFormat) -> bool:
    """Whether the compiled library rounds the numbers of a view to a format."""
    return (row.is_mode or row.elements is INT4_CODES) and reads(view)


def reads(view: ArrayView) -> bool:
    """Whether the compiled library rounds the numbers of a view."""
    is_host = view.device.is_host and view.dtype in _TYPES and 0 not in view.shape
    return is_host and library.library() is not None and bool(library.units())


def encode(
    view: ArrayView, axis: int, row: BlockFormat, scale_rule: str, shapes: tuple[Any, ...]
) -> tuple[tuple[Any, Any], float]:
    """Return codes along an axis as uint8, scales as codes or float32, of these shapes, and the scale of the array."""
    rule = Rule("int4", "block", (1, row.block), "float32")
    if row.is_mode:
        rule = FORMATS[row.name][0]
    if rule.block_scale == "floor":
        rule = rule._replace(block_scale=scale_rule)
    of_codes, of_scales = shapes
    codes = aligned_empty(of_codes, np.dtype(np.uint8))
    scales = None
    if of_scales is not None:
        scales = aligned_empty(
            of_scales, np.dtype(np.float32 if row.has_float_scales else np.uint8)
        )
    q = library.Quantizer(codes=1, to_vector=of_codes[-1] * 8 // row.bits)
    _set_scales(q, 0 if of_scales is None else of_scales[-1])
    return (codes, scales), _round_along(q, view, axis, rule, codes, scales)


def rounded(view: ArrayView, axis: int, rule: Rule) -> tuple[Any, Any, float]:
    """Return bfloat16 numbers, their axis last, float32 scales of vectors, and the scale of the array."""
    shape = np.moveaxis(view.ndarray(), axis, -1).shape
    values = aligned_empty(shape, NUMPY_DTYPES[DType.BFLOAT16])
    scales = None
    if rule.scaling == "vector":
        scales = aligned_empty(shape[:-1], np.dtype(np.float32))
    q = library.Quantizer(to_vector=shape[-1])
    _set_scales(q, 1)
    return values, scales, _round_along(q, view, axis, rule, values, scales)


def _round_along(
    q: library.Quantizer, view: ArrayView, axis: int, rule: Rule, to: Any, scales: Any
) -> float:
    """Round the numbers of a view along an axis, which is the last one of the result; return the scale of the array."""
    extents = list(view.shape)
    strides = list(view.strides)
    q.vectors = 1
    q.to_inner = 1
    q.k = extents.pop(axis)
    q.inner = strides.pop(axis)
    if extents:
        q.vectors = extents.pop()
        q.vector = strides.pop()
    q.batches = prod(extents)
    offsets = library.offsets(zip(extents, strides, strict=True))
    to_offsets = np.arange(q.batches) * (q.vectors * q.to_vector)
    q.offsets = data_pointer(offsets)
    q.to_offsets = data_pointer(to_offsets)
    q.scale_batch *= q.vectors
    add_rule(q, rule, view.dtype)
    return _quantize(q, view, to, scales)


def add_rule(q: library.Quantizer, rule: Rule, dtype: DType) -> None:
    """Set how numbers of a type are rounded."""
    q.block_vectors, q.block_k = rule.block
    q.seed = rule.seed
    q.stream = rule.stream
    q.hadamard = rule.hadamard > 0
    q.type = library.TYPES[dtype]
    q.elements = _ELEMENTS[rule.elements]
    scaling = rule.scaling
    if scaling == "block":
        scaling = rule.block_scale
    q.scaling = _SCALINGS[scaling]
    q.stochastic = rule.rounding == "stochastic"
    q.powers = rule.power_scales


def _quantize(described: library.Quantizer, view: ArrayView, to: Any, scales: Any) -> float:
    """Call the library with the description of a rounding; return the scale of the tensor."""
    scale = ctypes.c_float()
    count = threads.num_threads()
    if described.batches * described.vectors * described.k < _ALONE:
        count = 1
    of_scales = None
    if scales is not None:
        of_scales = data_pointer(scales)
    quantize = library.functions().quantize
    addresses = (
        ctypes.addressof(described),
        view.address,
        data_pointer(to),
        of_scales,
        ctypes.addressof(scale),
    )
    status = quantize(*addresses, count)
    if status == library.NO_MEMORY:
        raise MemoryError("no memory for rounding an operand")
    if status:
        raise BackendError(
            f"the compiled library returned status {status} for the rounding of an operand"
        )
    return scale.value
