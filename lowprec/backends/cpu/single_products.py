"""Small single products: casts, a call of OpenBLAS and the epilogue, all prepared with the plan.

A call passes addresses to compiled code and creates no arrays.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from lowprec.arrays.prepared_view import PackedOperand, PreparedView
from lowprec.arrays.view import data_pointer
from lowprec.backends.cpu import buffers, casting, gemm
from lowprec.backends.cpu.openblas import has_memory
from lowprec.backends.cpu.packed import job as J
from lowprec.backends.cpu.packed.jobs import matrix_of
from lowprec.backends.cpu.packed.rows import Epilogue, epilogue_of, is_usable
from lowprec.backends.cpu.scaling import needs_scaling
from lowprec.backends.execution import Arguments, Executor
from lowprec.formats import DType, NumberFormat
from lowprec.planning import GemmPlan, MatrixStack
from lowprec.planning.layout import addend_layout
from lowprec.planning.prepared import kept_modes

#: Elements of a, b and the result up to which one thread casts them.
_MOST_ELEMENTS = 1 << 18

#: Alignment of arrays in a product's memory.
_ALIGNMENT = 64


class _Operand(NamedTuple):
    stack: MatrixStack
    #: Casts the operand, given the addresses of operand, cast numbers and scratch memory; returns whether it must be
    #: scaled instead. None for an operand that is multiplied in place.
    cast: Callable[[int, int, int], bool] | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the cast numbers."""
        return _aligned(4 * self.stack.rows * self.stack.cols) if self.cast else 0


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


def _operand(stack: MatrixStack, to: NumberFormat | None) -> _Operand:
    if stack.dtype is DType.FLOAT32 and to is None and stack.blas_expressible:
        return _Operand(stack)
    # In the order of the source, so that both are accessed sequentially.
    turned = abs(stack.row_stride) < abs(stack.col_stride)
    x = stack.transposed if turned else stack
    index = casting.cast_index(stack.dtype.label, to)
    assert index is not None, "real numbers of at most 32 bits have a kernel"
    kernel, item = casting.kernels().cast_kernel(index), x.dtype.itemsize
    rows, cols = x.rows, x.cols
    result = MatrixStack.of(DType.FLOAT32, rows, cols, cols, 1)
    if x.col_stride == 1 and x.row_stride == cols:
        rows, cols = 1, rows * cols
    steps = x.row_stride * item, x.col_stride * item

    def cast(source: int, target: int, scratch: int) -> bool:
        found = kernel(source, *steps, rows, cols, target, scratch)
        return bool(found) and needs_scaling(found)

    return _Operand(result.transposed if turned else result, cast)


def _kept_cast(operand: _Operand, view: PreparedView) -> PackedOperand:
    """Return the cast numbers of a prepared operand; None if they must be scaled."""
    assert operand.cast is not None, "nothing is kept of an operand that is multiplied in place"
    memory = np.empty(operand.nbytes + casting.SCRATCH_BYTES, np.uint8)
    address = data_pointer(memory)
    is_apart = operand.cast(view.address, address, address + operand.nbytes)
    return PackedOperand(None if is_apart else memory, operand.nbytes)


def prepare(plan: GemmPlan, to: NumberFormat | None, otherwise: Executor) -> Executor | None:
    """Return the executor of a small product by OpenBLAS with operands cast to ``to``; None for other products.

    ``otherwise`` executes products whose operands must be scaled.
    """
    product = _product(plan, to) if _is_small(plan) and casting.can_compile() else None
    if product is None:
        return None
    run, nbytes = product

    def execute(arguments: Arguments) -> None:
        if not has_memory():
            done = False
        elif nbytes < buffers.SMALLEST_BYTES:
            memory = np.empty(nbytes, np.uint8)
            done = run(arguments, _aligned(data_pointer(memory)))
        else:
            with buffers.borrow(nbytes) as address:
                done = run(arguments, address)
        if not done:
            otherwise(arguments)

    return execute


def _is_small(plan: GemmPlan) -> bool:
    layout = plan.layout
    m, n, k = layout.m, layout.n, layout.k
    return (
        layout.batch_count == 1
        and (layout.a.blas_expressible or not layout.collapsed)  # a collapsed a may have no strides
        and len(plan.schedule) == 1
        and plan.accumulator is DType.FLOAT32
        and plan.problem.activation in J.ACTIVATIONS
        and plan.out_dtype.label in J.KINDS
        and not plan.problem.has_blocks
        and m * k + k * n + m * n <= _MOST_ELEMENTS
    )


def _product(plan: GemmPlan, to: NumberFormat | None) -> tuple[Callable[[Arguments, int], bool], int] | None:
    """Return the function that runs a product in memory at an address, and the bytes of the memory.

    The function returns False if operands must be scaled. None if the epilogue has no kernel, or c does not have the
    result's shape.
    """
    layout = plan.layout
    # The single matrix of a batch of one.
    left, right, out = (replace(x, batch_shape=(), batch_strides=()) for x in (layout.a, layout.b, layout.out))
    of_a, of_b = _operand(left, to), _operand(right, to)
    cast_a, cast_b = of_a.cast, of_b.cast
    epilogue, size = None, 0
    if plan.problem.has_epilogue or out.dtype is not DType.FLOAT32 or not out.blas_expressible:
        epilogue = _epilogue(plan) if is_usable() else None
        if epilogue is None:
            return None
        size = _aligned(4 * layout.m * layout.n)
        out = MatrixStack.of(DType.FLOAT32, layout.m, layout.n, layout.n, 1)
    multiply = gemm.library_product(of_a.stack, of_b.stack, out)
    # The memory contains scratch of casts, cast operands, the product, and scratch of the epilogue.
    at_b = casting.SCRATCH_BYTES + of_a.nbytes
    at_product = at_b + of_b.nbytes
    at_block = at_product + size
    modes, key = kept_modes(plan), ("cast", to, layout.b)

    def run(arguments: Arguments, memory: int) -> bool:
        a, b, out, c, bias, alpha, beta = arguments[:7]
        x, y, to = a.address, b.address, out.address
        if cast_a is not None:
            source, x = x, memory + casting.SCRATCH_BYTES
            if cast_a(source, x, memory):
                return False
        if type(b) is PreparedView and b.mode in modes:
            kept = b.packed_operand(key, functools.partial(_kept_cast, of_b, b))
            if kept is None:
                return False
            y = data_pointer(kept)
        elif cast_b is not None:
            source, y = y, memory + at_b
            if cast_b(source, y, memory):
                return False
        if epilogue is None:
            multiply(x, y, to)
            return True
        product = memory + at_product
        multiply(x, y, product)
        epilogue(
            product, to, 0 if c is None else c.address, 0 if bias is None else bias.address, alpha.real, beta.real,
            memory + at_block,
        )  # fmt: skip
        return True

    return run, at_block + J.BLOCK_SCRATCH_BYTES + _ALIGNMENT


def _epilogue(plan: GemmPlan) -> Epilogue | None:
    problem, layout, c, bias = plan.problem, plan.layout, None, None
    if problem.c is not None and problem.has_beta:
        addend = addend_layout(problem.c, problem.a, problem.b, layout)
        if addend is None:
            return None
        c = matrix_of(addend)
    if problem.bias is not None:
        bias = problem.bias.dtype.label, problem.bias.strides[0]
    return epilogue_of(layout.m, layout.n, matrix_of(layout.out), c, bias, problem.activation, problem.has_epilogue)
