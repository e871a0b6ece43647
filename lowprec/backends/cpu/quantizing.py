"""Rounding of operands in host memory to narrow formats by the compiled library."""

from __future__ import annotations

import ctypes
from math import prod
from typing import Any

import numpy as np

from lowprec.arrays.numpy_library import aligned_empty
from lowprec.arrays.view import ArrayView, data_pointer
from lowprec.backends.cpu import library, threads
from lowprec.errors import BackendError
from lowprec.formats import ELEMENTS, BlockFormat, DType
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
    strides = source.row_stride, source.col_stride, to.row_stride, to.col_stride
    vectors, k = source.rows, source.cols
    if operand:
        vectors, k = k, vectors
        strides = source.col_stride, source.row_stride, to.col_stride, to.row_stride
    steps = vectors, 1, 0
    if to_codes:
        blocks = -(-k // rule.block[1])
        steps = vectors * blocks, blocks, 1
        strides = (*strides[:2], blocks * rule.block[1], 1)
    elif rule.block_scale == "float32":
        along_k, across = -(-k // rule.block[1]), -(-vectors // rule.block[0])
        steps = along_k * across, 1, across
    batch = [n if stride else 1 for n, stride in zip(to.batch_shape, to.batch_strides, strict=True)]
    offsets = [library.offsets(zip(batch, x.batch_strides, strict=True)) for x in (source, to)]
    described = library.Quantizer(prod(batch), vectors, k, *strides, *map(data_pointer, offsets), *steps)
    described.codes = to_codes
    add_rule(described, rule, source.dtype)
    return described, offsets


def encodes(view: ArrayView) -> bool:
    """Whether the compiled library rounds the numbers of a view."""
    is_host = view.device.is_host and view.dtype in _TYPES and 0 not in view.shape
    return is_host and library.library() is not None and bool(library.units())


def encode(
    view: ArrayView, axis: int, row: BlockFormat, scale_rule: str, shapes: tuple[Any, ...]
) -> tuple[tuple[Any, Any], float]:
    """Return codes along an axis as uint8, scales as codes or float32, of these shapes, and the scale of the array."""
    rule = FORMATS[row.name][0] if row.is_mode else Rule("int4", "block", (1, row.block), "float32")
    if rule.block_scale == "floor":
        rule = rule._replace(block_scale=scale_rule)
    of_scales = np.float32 if row.has_float_scales else np.uint8
    codes = aligned_empty(shapes[0], np.dtype(np.uint8))
    scales = None if shapes[1] is None else aligned_empty(shapes[1], np.dtype(of_scales))
    extents, strides, padded = list(view.shape), list(view.strides), shapes[0][-1] * 8 // row.bits
    k, inner = extents.pop(axis), strides.pop(axis)
    vectors, vector = (extents.pop(), strides.pop()) if extents else (1, 0)
    batches, blocks = prod(extents), 0 if scales is None else scales.shape[-1]
    offsets = library.offsets(zip(extents, strides, strict=True)), np.arange(batches) * (vectors * padded)
    described = library.Quantizer(
        batches, vectors, k, vector, inner, padded, 1, *map(data_pointer, offsets), vectors * blocks, blocks, 1, codes=1
    )
    add_rule(described, rule, view.dtype)
    return (codes, scales), _quantize(described, view, codes, scales)


def add_rule(described: library.Quantizer, rule: Rule, dtype: DType) -> None:
    described.block_vectors, described.block_k = rule.block
    described.seed, described.stream, described.hadamard = rule.seed, rule.stream, rule.hadamard > 0
    described.type, described.elements = library.TYPES[dtype], _ELEMENTS[rule.elements]
    described.scaling = _SCALINGS[rule.block_scale if rule.scaling == "block" else rule.scaling]
    described.stochastic = rule.rounding == "stochastic"
    described.powers = rule.power_scales


def _quantize(described: library.Quantizer, view: ArrayView, to: Any, scales: Any) -> float:
    """Call the library with the description of a rounding; return the scale of the tensor."""
    scale = ctypes.c_float()
    is_alone = described.batches * described.vectors * described.k < _ALONE
    status = library.functions().quantize(
        ctypes.addressof(described), view.address, data_pointer(to), None if scales is None else data_pointer(scales),
        ctypes.addressof(scale), 1 if is_alone else threads.num_threads(),
    )  # fmt: skip
    if status == library.NO_MEMORY:
        raise MemoryError("no memory for rounding an operand")
    if status:
        raise BackendError(f"the compiled library returned status {status} for the rounding of an operand")
    return scale.value
