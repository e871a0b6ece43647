"""Products by the compiled library.

The product of a plan is described once by an ``lp_product``: types, strides, scheme and unit. A call passes its address
and the addresses of the arrays; rounding, splitting, scaling, decoding, batches, threads and the epilogue are in C.
"""

from __future__ import annotations

import ctypes
import functools
import struct
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import chain
from math import prod
from typing import Any

import numpy as np

from lowprec.arrays.numpy_library import host_view
from lowprec.arrays.prepared_view import copy_of
from lowprec.arrays.view import NUMPY_DTYPES, ArrayView, PackedOperand, data_pointer
from lowprec.backends.cpu import library, threads
from lowprec.backends.cpu.library import Matrix, Product, Scheme
from lowprec.backends.cpu.numpy_products import scales_of_batch
from lowprec.backends.interface import Arguments, Executor
from lowprec.errors import BackendError
from lowprec.formats import BFLOAT16, BLOCK_FORMATS, FLOAT16, TF32
from lowprec.modes import row
from lowprec.planning import Activation, GemmPlan, MatrixStack, OperandSpec, plan_gemm
from lowprec.planning.layout import GemmLayout, addend_layout, stacked_layout
from lowprec.planning.stored import kept_modes, reads_codes_of_b
from lowprec.util.strides import coalesce

#: ``lp_format``; ``lp_activation``, which has the order of the members.
_FORMATS = {TF32: 1, BFLOAT16: 2, FLOAT16: 3}
_ACTIVATIONS: dict[Activation | None, int] = {None: 0, **{activation: i for i, activation in enumerate(Activation, 1)}}

#: Returns an ``lp_call``, in a tenth of the time of ctypes.
_call = struct.Struct("@8P4di4x").pack

#: Flops up to which a product runs in the calling thread.
_ALONE = 1 << 19

#: Bytes of offsets up to which they are kept with the executor.
_KEPT_BYTES = 1 << 20

#: Of packed operands.
_ALIGNMENT = 64


def prepare(plan: GemmPlan) -> Executor:
    """Return the executor of a plan whose kernel is a unit of the library."""
    problem, wide, reads_codes = plan.problem, plan.accumulator, reads_codes_of_b(plan)
    a, b = _as_numbers(problem.a), problem.b if reads_codes else _as_numbers(problem.b)
    narrows = plan.out_dtype.is_float8
    given = replace(problem, a=a, b=b, c=problem.c if problem.has_beta else None)
    if narrows:
        given = replace(given, out=None, out_dtype=wide)
    execute = _executor(replace(plan, problem=given, out_dtype=wide if narrows else plan.out_dtype))
    if a is not problem.a or b is not problem.b:
        execute = functools.partial(_execute_widened, execute, not reads_codes)
    if narrows:
        return functools.partial(_execute_narrowed, execute, NUMPY_DTYPES[wide])
    one_is_real = wide.is_complex and not (a.dtype.is_complex and b.dtype.is_complex)
    return _with_imaginary_parts(plan, execute) if one_is_real else execute


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


def _executor(plan: GemmPlan) -> Executor:
    product, offsets = _describe(plan)
    if sum(x.nbytes for x in offsets) > _KEPT_BYTES:
        return lambda arguments: _executor_of(plan, *_describe(plan))(arguments)
    return _executor_of(plan, product, offsets)


def _executor_of(plan: GemmPlan, product: Product, offsets: list[Any]) -> Executor:
    functions, modes = library.functions(), kept_modes(plan)
    is_alone = plan.flops * len(plan.schedule) <= _ALONE
    gemm = functions.gemm_holding_gil if is_alone else functions.gemm
    of_stored, has_codes = ctypes.byref(product), product.b.type in library.BLOCK_TYPES.values()
    by_panels = Product.from_buffer_copy(product)
    by_panels.b.packed = 1
    key = "packed", product.unit, product.a.type, bytes(product.scheme), plan.problem.b.shape, plan.problem.b.strides
    of_panels = ctypes.byref(by_panels)
    # A product of a batch that must be computed again needs c, which other products may have overwritten.
    keeps_c = not (plan.fallbacks and plan.problem.has_beta and product.batches > 1)
    in_order = _scales_in_order(plan) if plan.problem.is_scaled else None

    def execute(arguments: Arguments, keep: Any = offsets) -> None:
        a, b, out, c, bias, alpha, beta, _, _, _, rows, cols, _ = arguments
        description, at, scales = of_stored, b.address, 0
        if has_codes and b.blocks:
            at, scales, _ = b.packed_operand("codes", functools.partial(_codes, b))
        elif b.is_prepared and b.mode in modes and (keeps_c or c is None or c.address != out.address):
            at, _ = b.packed_operand(key, functools.partial(_pack, product, b))
            description = of_panels
        if in_order is not None:
            rows, cols = in_order(arguments)
        status = gemm(
            description,
            _call(
                a.address, at, scales, out.address, 0 if c is None else c.address, 0 if bias is None else bias.address,
                0 if rows is None else data_pointer(rows), 0 if cols is None else data_pointer(cols),
                alpha.real, alpha.imag, beta.real, beta.imag, 1 if is_alone else threads.num_threads(),
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


def _scales_in_order(plan: GemmPlan) -> Callable[[Arguments], tuple[Any, Any]]:
    """Return the function that gives scales one for each row and column, in the order of `_describe`."""
    layout = stacked_layout(plan.problem.a, plan.problem.b)
    batch, shared = _batch_axes(layout)
    ones = [i for i, extent in enumerate(layout.batch_shape) if extent == 1]
    order = (*ones, *batch, *shared, len(layout.batch_shape))
    first = tuple(0 if i in (*ones, *shared) else slice(None) for i in range(len(layout.batch_shape)))

    def in_order(arguments: Arguments) -> tuple[Any, Any]:
        if not layout.batch_shape:
            return arguments.row_scales, arguments.col_scales
        rows, cols = scales_of_batch(layout, arguments)
        rows = None if rows is None else np.ascontiguousarray(rows.transpose(order))
        return rows, None if cols is None else np.ascontiguousarray(cols[first])

    return in_order


def _batch_axes(layout: GemmLayout) -> tuple[list[int], list[int]]:
    """Return the axes of products, and those along which ``b`` is one matrix."""
    axes = [i for i, extent in enumerate(layout.batch_shape) if extent > 1]
    shared = [i for i in axes if not layout.b.batch_strides[i]]
    return [i for i in axes if layout.b.batch_strides[i]], shared


def _pack(product: Product, b: ArrayView) -> PackedOperand:
    pack, address = library.functions().pack, ctypes.addressof(product)
    nbytes = pack(address, b.address, None, None, 1)
    if nbytes < 0:
        raise BackendError("the compiled library does not pack operands of this type")
    memory = np.empty(nbytes + _ALIGNMENT, np.uint8)
    at = -(-data_pointer(memory) // _ALIGNMENT) * _ALIGNMENT
    pack(address, b.address, None, at, threads.num_threads())
    return PackedOperand((at, memory), nbytes)


def _codes(b: ArrayView) -> PackedOperand:
    """Return the addresses of codes and scales, which are contiguous, and their arrays."""
    stored = [np.asarray(x) for x in (b.quantized.codes, b.quantized.scales)]
    arrays = [np.ascontiguousarray(x) for x in stored]
    copied = sum(x.nbytes for x, y in zip(arrays, stored, strict=True) if x is not y)
    return PackedOperand((*map(data_pointer, arrays), arrays), copied)


def _describe(plan: GemmPlan) -> tuple[Product, list[Any]]:
    """Return the description of a product, and the arrays of offsets of which it has the addresses.

    Dimensions of a batch along which ``b`` is one matrix become rows, by offsets unless they have one stride.
    """
    problem, unit = plan.problem, plan.kernel_row.requires
    layout = stacked_layout(problem.a, problem.b, problem.out, plan.out_dtype)
    c = None if problem.c is None else addend_layout(problem.c, problem.a, problem.b, layout)
    batch, shared = _batch_axes(layout)
    matrices = [_matrix(x, batch, () if x is layout.b else shared) for x in (layout.a, layout.b, layout.out, c)]
    (a, b, out, addend), offsets = zip(*matrices, strict=True)
    if problem.b.blocks and problem.b.blocks.format in library.BLOCK_TYPES:
        _describe_codes(b, offsets[1], problem.b.blocks.format)
    bias = Matrix(type=-1)
    if problem.bias:
        bias = Matrix(col=problem.bias.strides[0], type=library.TYPES[problem.bias.dtype])
    rows, batches = (prod(layout.batch_shape[i] for i in some) for some in (shared, batch))
    product = Product(
        rows * layout.m, layout.n, layout.k, batches, a, b, out, addend, bias,
        _scheme(plan), library.UNITS.index(unit or ""), _ACTIVATIONS[problem.activation],
    )  # fmt: skip
    return product, list(chain.from_iterable(offsets))


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


def _describe_codes(b: Matrix, offsets: list[Any], name: str) -> None:
    """Change strides between elements to those between bytes of contiguous codes and scales."""
    fmt = BLOCK_FORMATS[name]
    b.type, b.scale_col, b.col = library.BLOCK_TYPES[name], b.col // fmt.block, b.col * fmt.bits // 8
    for array in offsets:
        array *= fmt.bits
        array //= 8


def _scheme(plan: GemmPlan) -> Scheme:
    mode, pairs = row(plan.scheme), [product.pairs[0] for product in plan.schedule]
    parts = [min(count, mode.parts) if rounded else 0 for count, rounded in zip(plan.split, plan.rounded, strict=True)]
    is_rounded, fmt = any(plan.rounded), plan.operand_format
    scheme = Scheme(
        _FORMATS[fmt] if fmt and (is_rounded or plan.kernel_row.parts > 1) else 0, *parts,
        mode.part_exponent if is_rounded else 0, mode.sums_parts and all(plan.rounded), any(plan.scaled), len(pairs),
    )  # fmt: skip
    for i, (pair, product) in enumerate(zip(pairs, plan.schedule, strict=True)):
        (scheme.pair_a[i], scheme.pair_b[i]), scheme.factor[i] = pair, product.factor
    return scheme
