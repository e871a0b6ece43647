"""Products by the compiled library.

The product of a plan is described once by an ``lp_product``: types, strides, scheme and unit. A call passes its address
and the addresses of the arrays; rounding, splitting, scaling, decoding, batches, threads and the epilogue are in C.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from math import prod
from typing import Any

import numpy as np

from lowprec.arrays.numpy_library import host_view
from lowprec.arrays.prepared_view import copy_of
from lowprec.arrays.view import NUMPY_DTYPES, ArrayView, PackedOperand, data_pointer
from lowprec.backends.cpu import kernel_codes, library, quantizing, threads
from lowprec.backends.cpu.library import Matrix, Product, Scheme
from lowprec.backends.interface import Arguments, Executor
from lowprec.errors import BackendError
from lowprec.formats import BFLOAT16, FLOAT16, TF32, BlockFormat, DType
from lowprec.modes import row
from lowprec.planning import Activation, GemmPlan, GemmProblem, MatrixStack, OperandSpec, Summation, plan_gemm
from lowprec.planning.layout import GemmLayout, addend_layout, stacked_layout
from lowprec.planning.stored import kept_modes, reads_codes_of_b
from lowprec.recipes import Rule
from lowprec.util.strides import coalesce

#: ``lp_format``; ``lp_activation``, which has the order of the members.
_FORMATS = {TF32: 1, BFLOAT16: 2, FLOAT16: 3}
_ACTIVATIONS: dict[Activation | None, int] = {None: 0, **{activation: i for i, activation in enumerate(Activation, 1)}}

_call = library.call_bytes

#: Flops up to which a product runs in the calling thread.
_ALONE = 1 << 19

#: Bytes of offsets up to which they are kept with the executor.
_KEPT_BYTES = 1 << 20


def prepare(plan: GemmPlan) -> Executor:
    """Return the executor of a plan whose kernel is a unit of the library."""
    problem = plan.problem
    whole = _of_rounded(plan)
    wide = whole.accumulator
    reads_a = plan.kernel_row.summation is Summation.BLOCKS
    reads_codes = reads_a or reads_codes_of_b(whole)
    a = whole.problem.a
    b = whole.problem.b
    if not reads_a:
        a = _as_numbers(a)
    if not reads_codes:
        b = _as_numbers(b)
    narrows = plan.out_dtype.is_float8
    given = replace(whole.problem, a=a, b=b, c=problem.c if problem.has_beta else None)
    if narrows:
        given = replace(given, out=None, out_dtype=wide)
    execute = _executor(replace(whole, problem=given, out_dtype=wide if narrows else plan.out_dtype), problem)
    widens_b = problem.b.blocks is not None and not reads_codes
    if (problem.a.blocks is not None and not reads_a) or widens_b:
        execute = functools.partial(_execute_widened, execute, widens_b)
    if narrows:
        return functools.partial(_execute_narrowed, execute, NUMPY_DTYPES[wide])
    one_is_real = wide.is_complex and not (a.dtype.is_complex and b.dtype.is_complex)
    return _with_imaginary_parts(plan, execute) if one_is_real else execute


def _of_rounded(plan: GemmPlan) -> GemmPlan:
    """Return the plan of the product of the operands as they are rounded, over all of k and with the epilogue."""
    if plan.quantized is None:
        return plan
    inner, problem = plan.quantized.inner, plan.problem
    a, b = replace(inner.problem.a, shape=problem.a.shape), replace(inner.problem.b, shape=problem.b.shape)
    return replace(
        inner, problem=replace(problem, a=a, b=b, is_scaled=True), mode=plan.mode, mode_has_effect=True,
        quantized=plan.quantized, layout=plan.layout, out_dtype=plan.out_dtype,
    )  # fmt: skip


def _as_numbers(operand: OperandSpec) -> OperandSpec:
    return operand if operand.blocks is None else replace(operand, blocks=None)


def _execute_widened(execute: Executor, widens_b: bool, arguments: Arguments) -> None:
    execute(arguments.widened(b=widens_b))


def _execute_narrowed(execute: Executor, dtype: np.dtype[Any], arguments: Arguments) -> None:
    out = arguments.out.ndarray()
    product = np.empty(out.shape, dtype)
    execute(arguments._replace(out=host_view(product)))
    with np.errstate(all="ignore"):
        out[...] = product


def _with_imaginary_parts(plan: GemmPlan, execute: Executor) -> Executor:
    """Return an executor of a complex by a real operand that recomputes non-finite elements of the result.

    With an imaginary part of zero, as NumPy promotes the real operand, Inf and NaN times zero are NaN.
    """
    problem, dtype = plan.problem, NUMPY_DTYPES[plan.accumulator]
    a, b = (OperandSpec.contiguous(plan.accumulator, x.shape) for x in (problem.a, problem.b))
    whole = prepare(plan_gemm(replace(problem, a=a, b=b, out=None), plan.capabilities, plan.mode))

    def recompute(arguments: Arguments) -> None:
        out, c = arguments.out.ndarray(), arguments.c
        if problem.has_beta and c is not None and c.address == arguments.out.address:
            arguments = arguments._replace(c=copy_of(c, None))
        execute(arguments)
        lost = ~np.isfinite(out)
        if lost.any():
            a, b = (host_view(x.ndarray().astype(dtype, order="C")) for x in arguments[:2])
            product = np.empty(out.shape, dtype)
            whole(arguments._replace(a=a, b=b, out=host_view(product)))
            np.copyto(out, product, where=lost)

    return recompute


def _executor(plan: GemmPlan, given: GemmProblem) -> Executor:
    """Return the executor of a product, of whose operands some may be rounded from those of the ``given`` problem."""
    product, offsets = _describe(plan, given)
    if sum(x.nbytes for x in offsets) > _KEPT_BYTES:
        return lambda arguments: _executor_of(plan, *_describe(plan, given))(arguments)
    return _executor_of(plan, product, offsets)


def _executor_of(plan: GemmPlan, product: Product, offsets: list[Any]) -> Executor:
    functions, modes = library.functions(), kept_modes(plan)
    is_alone = plan.flops * len(plan.schedule) <= _ALONE
    gemm = functions.gemm_holding_gil if is_alone else functions.gemm
    of_stored, has_codes = ctypes.byref(product), product.b.type in library.BLOCK_TYPES.values()
    source = Product.from_buffer_copy(product)
    keeps_float8 = _keeps_float8(plan, product)
    if keeps_float8:
        source.b.type, source.b.block = library.BLOCK_TYPES["fp8_rows"], product.k
    by_panels = Product.from_buffer_copy(source)
    by_panels.b.packed = 1
    rule = plan.quantized and plan.quantized.rules[1]
    kept: tuple[Any, ...] = ("packed", product.unit, product.a.type, bytes(product.scheme), rule, product.piece)
    if (has_codes and rule is None) or keeps_float8:
        kept = ("codes", library.lanes(product.unit))
    key = *kept, plan.problem.b.shape, plan.problem.b.strides
    of_panels = ctypes.byref(by_panels)
    reads_a = product.a.type in library.BLOCK_TYPES.values()
    # A product of a batch that must be computed again needs c, which other products may have overwritten.
    keeps_c = not (plan.fallbacks and plan.problem.has_beta and product.batches > 1)

    def execute(arguments: Arguments, keep: Any = offsets) -> None:
        a, b, out, c, bias, alpha, beta, _, _, _, _, _, draw = arguments
        description, at, scales, zeros, at_a, scales_a = of_stored, b.address, 0, 0, a.address, 0
        if reads_a and a.blocks:
            (at_a, scales_a, _), _ = a.packed_operand("codes", functools.partial(_codes, a))
        if b.is_prepared and (
            (b.mode in modes and (keeps_c or c is None or c.address != out.address))
            or (has_codes and b.blocks) or keeps_float8
        ):  # fmt: skip
            at, _ = b.packed_operand(key, functools.partial(_pack, source, b, draw))
            description = of_panels
        elif has_codes and b.blocks:
            (at, scales, zeros), _ = b.packed_operand("codes", functools.partial(_codes, b))
        status = gemm(
            description,
            _call(
                at_a, at, scales_a, scales, zeros,
                out.address, 0 if c is None else c.address, 0 if bias is None else bias.address, 0, 0,
                alpha.real, alpha.imag, beta.real, beta.imag, 1 if is_alone else threads.num_threads(), draw,
            ),
        )  # fmt: skip
        if not status:
            return
        if status == library.NOT_FINITE:
            execute(arguments._replace(b=b.strided(b.shape, b.strides)))
        elif status == library.NO_MEMORY:
            raise MemoryError("no memory for the packed operands of a product")
        else:
            raise BackendError(f"the compiled library returned status {status} for a product that was planned for it")

    return execute


def _keeps_float8(plan: GemmPlan, product: Product) -> bool:
    """Whether a prepared ``b`` of E4M3 numbers is kept as codes with scales of 1, which FP32 units decode faster."""
    is_e4m3 = plan.problem.b.dtype is DType.FLOAT8_E4M3FN and product.scheme.parts_b == product.piece == 0
    along_k = product.b.row == 1 and not product.b.row_offsets
    return is_e4m3 and along_k and plan.kernel_row.decodes_b >= {"fp8_rows"} and not plan.compute_dtype.is_complex


def _batch_axes(layout: GemmLayout) -> tuple[list[int], list[int]]:
    """Return the axes of products, and those along which ``b`` is one matrix."""
    axes = [i for i, extent in enumerate(layout.batch_shape) if extent > 1]
    shared = [i for i in axes if not layout.b.batch_strides[i]]
    return [i for i in axes if layout.b.batch_strides[i]], shared


def _pack(product: Product, b: ArrayView, draw: int) -> PackedOperand:
    kept = b.kept
    if kept is not None and kept.lanes == library.lanes(product.unit):
        return PackedOperand((kept.address, kept.memory), 0)
    addresses, keep = _codes(b).value if b.blocks and b.blocks.row.block else ((b.address, 0, 0), b)
    memory = kernel_codes.packed(product, addresses, draw)
    del keep
    return PackedOperand((data_pointer(memory), memory), memory.nbytes)


def _codes(b: ArrayView) -> PackedOperand:
    """Return the addresses of codes, scales and zeros, which are contiguous, and their arrays."""
    stored = [np.asarray(x) for x in (b.quantized.codes, b.quantized.scales, b.quantized.zeros) if x is not None]
    arrays = [np.ascontiguousarray(x) for x in stored]
    copied = sum(x.nbytes for x, y in zip(arrays, stored, strict=True) if x is not y)
    return PackedOperand(((*map(data_pointer, arrays), 0)[:3], arrays), copied)


def _describe(plan: GemmPlan, given: GemmProblem) -> tuple[Product, list[Any]]:
    """Return the description of a product, and the arrays of offsets of which it has the addresses.

    Dimensions of a batch along which ``b`` is one matrix become rows, by offsets unless they have one stride.
    """
    problem, unit = plan.problem, plan.kernel_row.requires
    layout = stacked_layout(problem.a, problem.b, problem.out, plan.out_dtype)
    c = None if problem.c is None else addend_layout(problem.c, problem.a, problem.b, layout)
    batch, shared = _batch_axes(layout)
    matrices = [_matrix(x, batch, () if x is layout.b else shared) for x in (layout.a, layout.b, layout.out, c)]
    (a, b, out, addend), offsets = zip(*matrices, strict=True)
    for spec, matrix, of_batch in zip((problem.a, problem.b), (a, b), offsets, strict=False):
        if spec.blocks and spec.blocks.format in library.BLOCK_TYPES:
            _describe_codes(matrix, of_batch, spec.blocks.row.of_length(layout.k))
    bias = Matrix(type=-1)
    if problem.bias:
        bias = Matrix(col=problem.bias.strides[0], type=library.TYPES[problem.bias.dtype])
    rows, batches = (prod(layout.batch_shape[i] for i in some) for some in (shared, batch))
    product = Product(
        rows * layout.m, layout.n, layout.k, batches, a, b, out, addend, bias,
        scheme_of(plan), library.UNITS.index(unit or ""), _ACTIVATIONS[problem.activation],
    )  # fmt: skip
    kept = list(chain.from_iterable(offsets))
    if plan.quantized is not None:
        product.piece = plan.quantized.k_piece
        product.last_unit = library.UNITS.index(plan.quantized.last.kernel_row.requires or "")
        of_a, of_b = plan.quantized.rules
        source = stacked_layout(given.a, given.b)
        kept += _describe_rounding(product, 0, of_a, source.a, layout.a, [*batch, *shared])
        kept += _describe_rounding(product, 1, of_b, source.b, layout.b, batch)
    return product, kept


def _describe_rounding(
    product: Product, operand: int, rule: Rule | None, source: MatrixStack, to: MatrixStack, axes: Sequence[int]
) -> list[Any]:
    """Describe the rounding of ``a`` (0) or ``b`` (1), and the order of its scales along axes of the batch."""
    if rule is None:
        return []
    to_codes = (product.b if operand else product.a).type in library.BLOCK_TYPES.values()
    product.rounding[operand], kept = quantizing.describe(source, to, operand, rule, to_codes=to_codes)
    if to_codes:
        return kept
    extents = [(to.batch_shape[i], to.batch_strides[i] // product.k) for i in axes]
    order = library.offsets([*extents, (to.cols if operand else to.rows, 1)])
    if (order != np.arange(order.size)).any():
        product.scale_order[operand] = data_pointer(order)
        kept.append(order)
    return kept


def _matrix(x: MatrixStack | None, batch: Sequence[int], shared: Sequence[int]) -> tuple[Matrix, list[Any]]:
    """Return a matrix with offsets of products along axes of its batch, and of rows along the others."""
    if x is None:
        return Matrix(type=-1), []
    matrix, offsets = Matrix(row=x.row_stride, col=x.col_stride, type=library.TYPES[x.dtype]), []
    if any(x.batch_strides[i] for i in batch):
        offsets.append(library.offsets((x.batch_shape[i], x.batch_strides[i]) for i in batch))
        matrix.batch_offsets = data_pointer(offsets[-1])
    if shared:
        rows = [*((x.batch_shape[i], x.batch_strides[i]) for i in shared), (x.rows, x.row_stride)]
        coalesced = coalesce([(extent, (stride,)) for extent, stride in rows])
        if len(coalesced) > 1:
            offsets.append(library.offsets(rows))
            matrix.row_offsets = data_pointer(offsets[-1])
        else:
            matrix.row = coalesced[0][1][0]
    return matrix, offsets


def _describe_codes(x: Matrix, offsets: list[Any], fmt: BlockFormat) -> None:
    """Change strides between elements to those between bytes of contiguous codes and scales."""
    x.type = library.block_type(fmt)
    x.block = fmt.block
    x.scale_col = x.col // fmt.block * (4 if fmt.has_float_scales else 1)
    x.row = x.row * fmt.bits // 8
    x.col = x.col * fmt.bits // 8
    for array in offsets:
        array *= fmt.bits
        array //= 8


def scheme_of(plan: GemmPlan) -> Scheme:
    mode, pairs = row(plan.runs_as), [product.pairs[0] for product in plan.schedule]
    parts = [min(count, mode.parts) if rounded else 0 for count, rounded in zip(plan.split, plan.rounded, strict=True)]
    is_rounded, fmt = any(plan.rounded), plan.operand_format
    scheme = Scheme(
        _FORMATS[fmt] if fmt and (is_rounded or plan.kernel_row.parts > 1) else 0, *parts,
        mode.part_exponent if is_rounded else 0, mode.sums_parts and all(plan.rounded), any(plan.scaled), len(pairs),
    )  # fmt: skip
    for i, (pair, product) in enumerate(zip(pairs, plan.schedule, strict=True)):
        (scheme.pair_a[i], scheme.pair_b[i]), scheme.factor[i] = pair, product.factor
    return scheme
