"""Products by the compiled library.

The product of a plan is described once by an ``lp_product``: types, strides, scheme and unit. A call passes its address
and the addresses of the arrays; rounding, splitting, scaling, decoding, batches, threads and the epilogue are in C.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from lowprec.arrays.numpy_library import host_view
from lowprec.arrays.prepared_view import copy_of
from lowprec.arrays.view import NUMPY_DTYPES, ArrayView, PackedOperand, data_pointer
from lowprec.backends.cpu import kernel_codes, library, threads
from lowprec.backends.cpu.descriptions import describe
from lowprec.backends.cpu.library import Product
from lowprec.backends.interface import Arguments, Executor
from lowprec.errors import BackendError
from lowprec.formats import DType
from lowprec.planning import GemmPlan, GemmProblem, OperandSpec, plan_gemm
from lowprec.planning.stored import kept_modes, reads_codes_of_b

_call = library.call_bytes

#: Flops up to which a product runs in the calling thread.
_ALONE = 1 << 19

#: Bytes of offsets up to which they are kept with the executor.
_KEPT_BYTES = 1 << 20


def prepare(plan: GemmPlan) -> Executor:
    """Return the executor of a plan whose kernel is a unit of the library."""
    problem = plan.problem
    whole = _of_rounded(plan)
    reads_a = plan.kernel_row.summation == "blocks"
    reads_codes = reads_a or reads_codes_of_b(whole)
    a = whole.problem.a
    b = whole.problem.b
    widens_a = problem.a.blocks is not None and not reads_a
    widens_b = problem.b.blocks is not None and not reads_codes
    if not reads_a:
        a = replace(a, blocks=None)
    if not reads_codes:
        b = replace(b, blocks=None)
    given = replace(whole.problem, a=a, b=b)
    if not problem.has_beta:
        given = replace(given, c=None)
    wide = whole.accumulator
    out_dtype = plan.out_dtype
    if plan.out_dtype.is_float8:
        given = replace(given, out=None, out_dtype=wide)
        out_dtype = wide
    execute = _executor(replace(whole, problem=given, out_dtype=out_dtype), problem)
    if widens_a or widens_b:
        execute = functools.partial(_execute_widened, execute, widens_b)
    if plan.out_dtype.is_float8:
        return functools.partial(_execute_narrowed, execute, NUMPY_DTYPES[wide])
    if wide.is_complex and not (a.dtype.is_complex and b.dtype.is_complex):
        return _with_imaginary_parts(plan, execute)
    return execute


def _of_rounded(plan: GemmPlan) -> GemmPlan:
    """Return the plan of the product of the operands as they are rounded, over all of k and with the epilogue."""
    if plan.quantized is None:
        return plan
    inner = plan.quantized.inner
    problem = plan.problem
    a = replace(inner.problem.a, shape=problem.a.shape)
    b = replace(inner.problem.b, shape=problem.b.shape)
    return replace(
        inner,
        problem=replace(problem, a=a, b=b, is_scaled=True),
        mode=plan.mode,
        mode_has_effect=True,
        quantized=plan.quantized,
        layout=plan.layout,
        out_dtype=plan.out_dtype,
    )


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
    problem = plan.problem
    dtype = NUMPY_DTYPES[plan.accumulator]
    a = OperandSpec.contiguous(plan.accumulator, problem.a.shape)
    b = OperandSpec.contiguous(plan.accumulator, problem.b.shape)
    whole = prepare(plan_gemm(replace(problem, a=a, b=b, out=None), plan.capabilities, plan.mode))

    def recompute(arguments: Arguments) -> None:
        out = arguments.out.ndarray()
        c = arguments.c
        if problem.has_beta and c is not None and c.address == arguments.out.address:
            arguments = arguments._replace(c=copy_of(c, None))
        execute(arguments)
        lost = ~np.isfinite(out)
        if not lost.any():
            return
        x = host_view(arguments.a.ndarray().astype(dtype, order="C"))
        y = host_view(arguments.b.ndarray().astype(dtype, order="C"))
        product = np.empty(out.shape, dtype)
        whole(arguments._replace(a=x, b=y, out=host_view(product)))
        np.copyto(out, product, where=lost)

    return recompute


def _executor(plan: GemmPlan, given: GemmProblem) -> Executor:
    """Return the executor of a product, of whose operands some may be rounded from those of the ``given`` problem."""
    product, offsets = describe(plan, given)
    if sum(x.nbytes for x in offsets) > _KEPT_BYTES:
        return lambda arguments: _executor_of(plan, *describe(plan, given))(arguments)
    return _executor_of(plan, product, offsets)


def _executor_of(plan: GemmPlan, product: Product, offsets: list[Any]) -> Executor:
    functions = library.functions()
    is_alone = plan.flops * len(plan.schedule) <= _ALONE
    gemm = functions.gemm_holding_gil if is_alone else functions.gemm
    keeps_float8 = _keeps_float8(plan, product)
    has_codes = product.b.type in library.CODES
    reads_a = product.a.type in library.CODES
    source, by_panels = _with_kept_b(product, keeps_float8)
    keeps = _keeper(plan, product, has_codes, keeps_float8)
    key = _key_of_packed(plan, product, has_codes, keeps_float8)
    of_stored = ctypes.byref(product)
    of_panels = ctypes.byref(by_panels)

    def execute(arguments: Arguments, keep: Any = offsets) -> None:
        a, b, out, c, bias, alpha, beta, _, _, _, _, _, draw = arguments
        description = of_stored
        at_a, scales_a = a.address, 0
        at, scales, zeros = b.address, 0, 0
        if reads_a and a.blocks:
            (at_a, scales_a, _), _ = a.packed_operand("codes", functools.partial(_codes, a))
        if b.is_prepared and keeps(b, c, out):
            at, _ = b.packed_operand(key, functools.partial(_pack, source, b, draw))
            description = of_panels
        elif has_codes and b.blocks:
            (at, scales, zeros), _ = b.packed_operand("codes", functools.partial(_codes, b))
        of_c = 0 if c is None else c.address
        of_bias = 0 if bias is None else bias.address
        count = 1 if is_alone else threads.num_threads()
        numbers = _call(
            at_a, at, scales_a, scales, zeros, out.address, of_c, of_bias, 0, 0,
            alpha.real, alpha.imag, beta.real, beta.imag, count, draw,
        )  # fmt: skip
        status = gemm(description, numbers)
        if status == library.NOT_FINITE:
            execute(arguments._replace(b=b.strided(b.shape, b.strides)))
        elif status:
            raise _error_of(status)

    return execute


def _with_kept_b(product: Product, keeps_float8: bool) -> tuple[Product, Product]:
    """Return the description from which a prepared ``b`` is packed, and that of the product with it."""
    source = Product.from_buffer_copy(product)
    if keeps_float8:
        source.b.type = library.BLOCK_TYPES["fp8_rows"]
        source.b.block = product.k
    by_panels = Product.from_buffer_copy(source)
    by_panels.b.packed = 1
    return source, by_panels


def _keeper(
    plan: GemmPlan, product: Product, has_codes: bool, keeps_float8: bool
) -> Callable[[ArrayView, ArrayView | None, ArrayView], bool]:
    """Return the function of ``b``, ``c`` and the result that decides whether a prepared ``b`` is kept packed."""
    modes = kept_modes(plan)
    # A product of a batch that must be computed again needs c, which other products may have overwritten.
    keeps_c = not (plan.fallbacks and plan.problem.has_beta and product.batches > 1)

    def keeps(b: ArrayView, c: ArrayView | None, out: ArrayView) -> bool:
        if (has_codes and b.blocks) or keeps_float8:
            return True
        return b.mode in modes and (keeps_c or c is None or c.address != out.address)

    return keeps


def _error_of(status: int) -> Exception:
    if status == library.NO_MEMORY:
        return MemoryError("no memory for the packed operands of a product")
    return BackendError(
        f"the compiled library returned status {status} for a product that was planned for it"
    )


def _key_of_packed(
    plan: GemmPlan, product: Product, has_codes: bool, keeps_float8: bool
) -> tuple[Any, ...]:
    """Return the key of the packed ``b``: everything that it depends on."""
    b = plan.problem.b
    rule = plan.quantized and plan.quantized.rules[1]
    if (has_codes and rule is None) or keeps_float8:
        return "codes", library.lanes(product.unit), b.shape, b.strides
    scheme = bytes(product.scheme)
    return "packed", product.unit, product.a.type, scheme, rule, product.piece, b.shape, b.strides


def _keeps_float8(plan: GemmPlan, product: Product) -> bool:
    """Whether a prepared ``b`` of E4M3 numbers is kept as codes with scales of 1, which FP32 units decode faster."""
    is_e4m3 = plan.problem.b.dtype is DType.FLOAT8_E4M3FN
    is_whole = product.scheme.parts_b == product.piece == 0
    along_k = product.b.row == 1 and not product.b.row_offsets
    decodes = "fp8_rows" in plan.kernel_row.decodes_b and not plan.compute_dtype.is_complex
    return is_e4m3 and is_whole and along_k and decodes


def _pack(product: Product, b: ArrayView, draw: int) -> PackedOperand:
    kept = b.kept
    if kept is not None and kept.lanes == library.lanes(product.unit):
        return (kept.address, kept.memory), 0
    addresses, keep = (b.address, 0, 0), None
    if b.blocks and b.blocks.row.block:
        (addresses, keep), _ = _codes(b)
    memory = kernel_codes.packed(product, addresses, draw)
    del keep
    return (data_pointer(memory), memory), memory.nbytes


def _codes(x: ArrayView) -> PackedOperand:
    """Return the addresses of codes, scales and zeros, which are contiguous, and their arrays."""
    array = x.quantized
    arrays = []
    copied = 0
    for part in (array.codes, array.scales, array.zeros):
        if part is None:
            continue
        stored = np.asarray(part)
        contiguous = np.ascontiguousarray(stored)
        if contiguous is not stored:
            copied += contiguous.nbytes
        arrays.append(contiguous)
    addresses = [*map(data_pointer, arrays), 0]
    return (tuple(addresses[:3]), arrays), copied
