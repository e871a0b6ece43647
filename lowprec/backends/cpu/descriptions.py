"""The description of a product for the compiled library: types, strides, scheme and unit, without addresses."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np

from lowprec.arrays.view import data_pointer
from lowprec.backends.cpu import library, quantizing
from lowprec.backends.cpu.library import Matrix, Product, Scheme
from lowprec.formats import BFLOAT16, FLOAT16, TF32, BlockFormat
from lowprec.modes import row
from lowprec.planning import ACTIVATIONS, GemmPlan, GemmProblem, MatrixStack
from lowprec.planning.layout import GemmLayout, addend_layout, stacked_layout
from lowprec.recipes import Rule
from lowprec.util.strides import coalesce

#: ``lp_format``.
_FORMATS = {TF32: 1, BFLOAT16: 2, FLOAT16: 3}
#: ``lp_activation``, which has the order of the members; 0 is none.
_ACTIVATIONS = [None, *ACTIVATIONS]


def describe(plan: GemmPlan, given: GemmProblem) -> tuple[Product, list[Any]]:
    """Return the description of a product, and the arrays of offsets of which it has the addresses.

    Some operands of the plan may be rounded from those of the ``given`` problem. Dimensions of a batch along which
    ``b`` is one matrix become rows, by offsets unless they have one stride.
    """
    problem = plan.problem
    layout = stacked_layout(problem.a, problem.b, problem.out, plan.out_dtype)
    addend = None
    if problem.c is not None:
        addend = addend_layout(problem.c, problem.a, problem.b, layout)
    batch, shared = _batch_axes(layout)
    kept: list[Any] = []
    a = _matrix(layout.a, batch, shared, kept)
    _describe_codes(a, kept, problem.a.blocks, layout.k)
    if problem.a.inner_offsets is not None:
        inner = np.array(problem.a.inner_offsets)
        a.inner_offsets = data_pointer(inner)
        kept.append(inner)
    of_b: list[Any] = []
    b = _matrix(layout.b, batch, (), of_b)
    _describe_codes(b, of_b, problem.b.blocks, layout.k)
    kept += of_b
    out = _matrix(layout.out, batch, shared, kept)
    c = _matrix(addend, batch, shared, kept)
    bias = Matrix(type=-1)
    if problem.bias:
        bias = Matrix(col=problem.bias.strides[0], type=library.TYPES[problem.bias.dtype])
    rows = prod(layout.batch_shape[i] for i in shared)
    batches = prod(layout.batch_shape[i] for i in batch)
    product = Product(
        rows * layout.m, layout.n, layout.k, batches, a, b, out, c, bias, scheme_of(plan)
    )
    product.unit = library.UNITS.index(plan.kernel_row.requires or "")
    product.activation = _ACTIVATIONS.index(problem.activation)
    _describe_roundings(product, plan, given, layout, kept)
    return product, kept


def _batch_axes(layout: GemmLayout) -> tuple[list[int], list[int]]:
    """Return the axes of products, and those along which ``b`` is one matrix."""
    axes = [i for i, extent in enumerate(layout.batch_shape) if extent > 1]
    batch = [i for i in axes if layout.b.batch_strides[i]]
    shared = [i for i in axes if not layout.b.batch_strides[i]]
    return batch, shared


def _matrix(
    x: MatrixStack | None, batch: Sequence[int], shared: Sequence[int], kept: list[Any]
) -> Matrix:
    """Return a matrix with offsets of products along axes of its batch, and of rows along the others.

    The arrays of the offsets are appended to ``kept``.
    """
    if x is None:
        return Matrix(type=-1)
    matrix = Matrix(row=x.row_stride, col=x.col_stride, type=library.TYPES[x.dtype])
    if any(x.batch_strides[i] for i in batch):
        offsets = library.offsets((x.batch_shape[i], x.batch_strides[i]) for i in batch)
        matrix.batch_offsets = data_pointer(offsets)
        kept.append(offsets)
    if not shared:
        return matrix
    rows = [(x.batch_shape[i], x.batch_strides[i]) for i in shared]
    rows.append((x.rows, x.row_stride))
    coalesced = coalesce([(extent, (stride,)) for extent, stride in rows])
    if len(coalesced) == 1:
        matrix.row = coalesced[0][1][0]
        return matrix
    offsets = library.offsets(rows)
    matrix.row_offsets = data_pointer(offsets)
    kept.append(offsets)
    return matrix


def _describe_codes(x: Matrix, offsets: list[Any], blocks: Any, k: int) -> None:
    """Change strides between elements to those between bytes of contiguous codes and scales."""
    if not blocks or blocks.format not in library.BLOCK_TYPES:
        return
    fmt: BlockFormat = blocks.row.of_length(k)
    x.type = library.block_type(fmt)
    x.block = fmt.block
    x.scale_col = x.col // fmt.block
    if fmt.has_float_scales:
        x.scale_col *= 4
    x.row = x.row * fmt.bits // 8
    x.col = x.col * fmt.bits // 8
    for array in offsets:
        array *= fmt.bits
        array //= 8


def _describe_roundings(
    product: Product, plan: GemmPlan, given: GemmProblem, layout: GemmLayout, kept: list[Any]
) -> None:
    """Describe the rounding of the operands to narrow formats."""
    quantized = plan.quantized
    if quantized is None:
        return
    product.piece = quantized.k_piece
    product.last_unit = library.UNITS.index(quantized.last.kernel_row.requires or "")
    source = stacked_layout(given.a, given.b)
    batch, shared = _batch_axes(layout)
    of_a, of_b = quantized.rules
    if of_a is not None:
        kept += _describe_rounding(product, 0, of_a, source.a, layout.a, [*batch, *shared])
    if of_b is not None:
        kept += _describe_rounding(product, 1, of_b, source.b, layout.b, batch)


def _describe_rounding(
    product: Product,
    operand: int,
    rule: Rule,
    source: MatrixStack,
    to: MatrixStack,
    axes: Sequence[int],
) -> list[Any]:
    """Describe the rounding of ``a`` (0) or ``b`` (1), and the order of its scales along axes of the batch."""
    matrix = product.b if operand else product.a
    to_codes = matrix.type in library.CODES
    product.rounding[operand], kept = quantizing.describe(
        source, to, operand, rule, to_codes=to_codes
    )
    if to_codes:
        return kept
    extents = [(to.batch_shape[i], to.batch_strides[i] // product.k) for i in axes]
    extents.append((to.cols if operand else to.rows, 1))
    order = library.offsets(extents)
    if (order != np.arange(order.size)).any():
        product.scale_order[operand] = data_pointer(order)
        kept.append(order)
    return kept


def scheme_of(plan: GemmPlan) -> Scheme:
    """Return how the operands of a plan are rounded, split and multiplied."""
    mode = row(plan.runs_as)
    fmt = plan.operand_format
    is_rounded = any(plan.rounded)
    scheme = Scheme(scaled=any(plan.scaled), pair_count=len(plan.schedule))
    if fmt and (is_rounded or plan.kernel_row.parts > 1):
        scheme.format = _FORMATS[fmt]
    if plan.rounded[0]:
        scheme.parts_a = min(plan.split[0], mode.parts)
    if plan.rounded[1]:
        scheme.parts_b = min(plan.split[1], mode.parts)
    if is_rounded:
        scheme.part_exponent = mode.part_exponent
    scheme.sums_parts = mode.sums_parts and all(plan.rounded)
    for i, product in enumerate(plan.schedule):
        scheme.pair_a[i], scheme.pair_b[i] = product.pairs[0]
        scheme.factor[i] = product.factor
    return scheme
