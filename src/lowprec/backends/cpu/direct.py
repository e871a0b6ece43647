"""Small products, and batches of them, in one call of native code: rounded, multiplied, finished and written.

What a product is made of follows from the plan but for the addresses, so it is written down once, as a job of 64-bit
words. The kernels need numba; where it does not work, NumPy computes the same bits.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import threading
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from lowprec.arrays.numpy_library import host_view
from lowprec.arrays.prepared_view import Form, PreparedView
from lowprec.arrays.view import NUMPY_DTYPES, data_pointer
from lowprec.backends.cpu import (
    casting,
    direct_gelu,
    epilogue,
    numba_import,
    splitting,
    threads,
)
from lowprec.backends.cpu.direct_job import (
    ACTIVATIONS,
    AT_EXPONENTS,
    BATCH_A,
    BATCH_B,
    BATCH_BIAS,
    BATCH_C,
    BATCH_COUNT,
    BATCH_DIMENSIONS,
    BATCH_FACTORS,
    BATCH_JOB,
    BATCH_KEPT_B,
    BATCH_OUT,
    BATCH_PRODUCT,
    BATCH_RUN,
    BATCH_RUN_A,
    BATCH_RUN_B,
    BATCH_SHARE,
    BATCH_WORDS,
    CAST_SCRATCH,
    DIMENSION_WORDS,
    PAD,
    job_of,
    rounding_of,
)
from lowprec.backends.cpu.fp32_units import whole_operands
from lowprec.backends.cpu.kernel_rows import DIRECT
from lowprec.backends.cpu.splitting import Split
from lowprec.backends.cpu.stacks import Stacks, apply_epilogue, stacks_of
from lowprec.backends.execution import Arguments, Executor
from lowprec.formats import DType, NumberFormat
from lowprec.planning import Activation, GemmLayout, GemmPlan, MatrixStack
from lowprec.planning.layout import addend_layout, stacked_layout
from lowprec.planning.prepared import kept_modes

#: For each element of a, b and the result: at most 8 bytes, and as float32 4; a bias has no more of them. In three
#: parts, an element of a or b has 16; and there are as many of the result, or few rows and columns with exponents.
_SCRATCH_BYTES = CAST_SCRATCH + 20 * (DIRECT.maximum_elements or 0) + 32 * PAD

#: Behind that, operands of several products of a batch that are cast at a time, so many bytes of each. It pays for
#: small ones; larger ones are better read from memory while the product before is computed.
_RUN_AT, _RUN_BYTES, _SMALL_BYTES = _SCRATCH_BYTES, 4 << 10, 1 << 10

_KERNELS = "lowprec.backends.cpu.direct_kernels"

#: Multiplications of a batch that pay for waking a thread, those that a thread takes at a time, and as many as take the
#: time of what each product costs besides.
_PAYS_TO_SHARE, _SHARE, _EACH = 1 << 22, 1 << 20, 1 << 10

_Factors = ctypes.c_double * 2

#: Finds what a prepared ``b`` keeps, made with the first product, and its address; 0 for nothing.
Kept = Callable[[PreparedView], tuple[Any, int]]


class Kind(NamedTuple):
    """What differs between small products: of whole operands, and of parts."""

    kernel: Callable[[GemmPlan, DType], int]  # address of that which writes a type
    job: Callable[[GemmPlan, GemmLayout, MatrixStack | None], Any]
    kept: Callable[[GemmPlan], Kept]
    casts_runs: bool  # whether the operands of several products of a batch may be cast together
    sum_by_numpy: Callable[[GemmPlan, Arguments, Stacks, Any], None]  # to an array of zeros


class _Scratch(threading.local):
    """Each thread's, which it lends to one call of a kernel: the product of a signal handler comes before or after."""

    def __init__(self) -> None:
        self.memory = np.empty(_RUN_AT + 2 * (_RUN_BYTES + PAD), np.uint8)
        self.address = int(self.memory.ctypes.data)


_scratch = _Scratch()


def prepare(plan: GemmPlan) -> Executor:
    """Return the executor of a plan for small products."""
    return executor(plan, Kind(_kernel, _job, _kept_rows, True, _sum_by_numpy))


def prepare_int8(plan: GemmPlan) -> Executor:
    """Return the executor of a plan for small products of int8; bias and activation are NumPy's, in integers."""
    problem = replace(plan.problem, bias=None, activation=None)
    multiply = prepare(replace(plan, problem=problem))
    if not plan.problem.has_epilogue:
        return multiply

    def execute(arguments: Arguments) -> None:
        multiply(arguments._replace(bias=None))
        stacks = stacks_of(plan, arguments)
        apply_epilogue(plan, arguments, stacks.out, stacks)

    return execute


def executor(plan: GemmPlan, kind: Kind) -> Executor:
    """Return the executor of a plan for small products of a kind."""
    return _native(plan, kind) if _has_kernels() else partial(_multiply_by_numpy, plan, kind)


def _has_kernels() -> bool:
    """Import the kernels; False where numba does not work."""
    if numba_import.fails():
        return False
    try:
        importlib.import_module(_KERNELS)
    except ImportError:
        return False
    return True


# --- with the kernels -------------------------------------------------------------------------


def _native(plan: GemmPlan, kind: Kind) -> Executor:
    """Return what calls the kernels for a plan."""
    problem, wide = plan.problem, plan.accumulator is DType.FLOAT64
    # Without the kernels' own, and for GELU of float64, it is NumPy's, on numbers not yet rounded to the result's type.
    activation = problem.activation
    is_apart = activation not in ACTIVATIONS or (activation is Activation.GELU and wide)
    staged = is_apart and plan.out_dtype is not plan.accumulator
    dtype = plan.accumulator if staged else plan.out_dtype
    layout = stacked_layout(problem.a, problem.b, None if staged else problem.out, dtype)
    c = None
    if problem.c is not None and problem.has_beta:
        c = addend_layout(problem.c, problem.a, problem.b, layout)
    job, product = kind.job(plan, layout, c), kind.kernel(plan, dtype)
    kept = kind.kept(plan)
    multiply = (
        _one(plan, job, product, kept)
        if layout.batch_count == 1
        else _all(plan, job, product, kept, layout, c, kind.casts_runs)
    )
    if not is_apart:
        return multiply

    def execute(arguments: Arguments) -> None:
        out = arguments.out.ndarray()
        if staged:
            numbers = np.empty(plan.out_shape, NUMPY_DTYPES[dtype])
            multiply(arguments._replace(out=host_view(numbers)))
        else:
            numbers = out
            multiply(arguments)
        _apply(numbers, out, activation)

    return execute


def _apply(product: Any, out: Any, activation: Activation | None) -> None:
    """Apply an activation, and round to the result's type."""
    epilogue.apply(product, out, alpha=1, beta=0, c=None, bias=None, activation=activation)


def _kernel(plan: GemmPlan, dtype: DType) -> int:
    from lowprec.backends.cpu.direct_kernels import product_kernel

    return product_kernel(plan.accumulator is DType.FLOAT64, dtype.label)


def _job(plan: GemmPlan, layout: GemmLayout, c: MatrixStack | None) -> Any:
    """Return the words of a product of whole operands."""
    exponents = 2 * (1 + layout.m + layout.n) if plan.accumulator is not DType.FLOAT64 else 0
    return job_of(plan, layout, c, rounding_of(plan), {AT_EXPONENTS: 4 * exponents})


def _one(plan: GemmPlan, job: Any, product: int, kept: Kept) -> Executor:
    """Return the executor of a single product."""
    from lowprec.backends.cpu.direct_kernels import PRODUCT_ARITY
    from lowprec.backends.cpu.packed.native import callable_at

    problem, kernel = plan.problem, callable_at(product, PRODUCT_ARITY)
    has_beta, has_bias = problem.has_beta, problem.bias is not None
    has_factors = problem.has_alpha or has_beta
    address_of, scratch, plain = ctypes.addressof, _scratch, _Factors(1.0, 0.0)

    def execute(arguments: Arguments) -> None:
        a, b, out, c, bias, alpha, beta = arguments[:7]
        factors = _Factors(alpha.real, beta.real) if has_factors else plain
        # Kept by name: another thread may release the operand meanwhile.
        _rows, address = kept(b) if type(b) is PreparedView else (None, 0)
        kernel(
            address_of(job),
            a.address,
            b.address,
            out.address,
            c.address if has_beta else 0,  # type: ignore[union-attr]
            bias.address if has_bias else 0,  # type: ignore[union-attr]
            address_of(factors),
            0,
            address,
            scratch.address,
        )

    return execute


def _all(
    plan: GemmPlan,
    job: Any,
    product: int,
    kept: Kept,
    layout: GemmLayout,
    c: MatrixStack | None,
    casts_runs: bool,
) -> Executor:
    """Return the executor of a batch; ``casts_runs`` as in :class:`Kind`."""
    from lowprec.backends.cpu.direct_kernels import BATCH_ARITY, batch_kernel
    from lowprec.backends.cpu.packed.native import callable_at

    kernel = callable_at(batch_kernel(), BATCH_ARITY)
    count, has_beta = layout.batch_count, c is not None
    each = _EACH + len(plan.schedule) * layout.m * layout.n * layout.k
    shared = count * each >= _PAYS_TO_SHARE
    dimensions = _dimensions((layout.a, layout.b, layout.out, c), layout.batch_shape)
    words = [0] * BATCH_WORDS + dimensions
    words[BATCH_PRODUCT], words[BATCH_COUNT] = product, count
    words[BATCH_DIMENSIONS] = len(dimensions) // DIMENSION_WORDS
    words[BATCH_RUN], words[BATCH_RUN_A], words[BATCH_RUN_B] = (
        _runs(plan, layout) if casts_runs else (1, 0, 0)
    )
    words_type = ctypes.c_int64 * len(words)

    def execute(arguments: Arguments) -> None:
        workers = min(threads.num_threads(), count) if shared else 1
        bias = arguments.bias
        factors = _Factors(arguments.alpha.real, arguments.beta.real)
        batch = words_type(*words)
        batch[BATCH_JOB] = ctypes.addressof(job)  # here, so that it lives as long as this function
        batch[BATCH_SHARE] = min(-(-_SHARE // each), -(-count // (4 * workers)))
        batch[BATCH_A], batch[BATCH_B] = arguments.a.address, arguments.b.address
        batch[BATCH_OUT] = arguments.out.address
        batch[BATCH_C] = arguments.c.address if has_beta else 0  # type: ignore[union-attr]
        batch[BATCH_BIAS] = 0 if bias is None else bias.address
        batch[BATCH_FACTORS] = ctypes.addressof(factors)
        if type(arguments.b) is PreparedView:
            _rows, batch[BATCH_KEPT_B] = kept(arguments.b)  # as above
        address = ctypes.addressof(batch)

        def work() -> None:
            kernel(address, _scratch.address)

        threads.run(work, workers)

    return execute


def _runs(plan: GemmPlan, layout: GemmLayout) -> tuple[int, int, int]:
    """Return how many products have their operands cast at a time, and where those of a and b are; 0: one by one."""
    largest = 4 * layout.k * max(layout.m, layout.n)
    if plan.accumulator is DType.FLOAT64 or not 0 < largest < _SMALL_BYTES:
        return 1, 0, 0
    # A may be in columns; B is cast to rows.
    a = _follows(layout.a) or _follows(layout.a.transposed)
    b = _follows(layout.b)
    run = _RUN_BYTES // largest if a or b else 1
    return run, _RUN_AT * a, (_RUN_AT + _RUN_BYTES + PAD) * b


def _follows(stack: MatrixStack) -> bool:
    """Whether the matrices of a batch follow one another without gaps, and so do their rows."""
    strides = *stack.batch_strides, stack.row_stride, stack.col_stride
    return strides == (stack.rows * stack.cols, stack.cols, 1)


def _dimensions(
    matrices: tuple[MatrixStack | None, ...], batch_shape: tuple[int, ...]
) -> list[int]:
    """Return the words of the dimensions of a batch, the innermost first."""
    words: list[int] = []
    for axis in reversed(range(len(batch_shape))):
        words.append(batch_shape[axis])
        words += [0 if x is None else x.batch_strides[axis] * x.dtype.itemsize for x in matrices]
    return words


def _kept_rows(plan: GemmPlan) -> Kept:
    """Return what finds the rows of a prepared ``b``."""
    to, dtype = rounding_of(plan), NUMPY_DTYPES[plan.accumulator]
    find = found_in(plan, ("rows", dtype, to), lambda view: _rows_of(view, dtype, to))

    def find_rows(view: PreparedView) -> tuple[Any, int]:
        rows = find(view)
        return rows, 0 if rows is None else data_pointer(rows)

    return find_rows


def found_in(
    plan: GemmPlan, name: tuple[Any, ...], make: Callable[[PreparedView], Form]
) -> Callable[[PreparedView], Any]:
    """Return what finds a form of a prepared ``b``, made with the first product; None where nothing is kept."""
    modes, spec = kept_modes(plan), plan.problem.b
    key = (*name, spec.shape, spec.strides)

    def find(view: PreparedView) -> Any:
        if view.mode not in modes:
            return None
        form = view.forms.get(key)
        return view.form(key, lambda: make(view)) if form is None else form.value

    return find


def _rows_of(view: PreparedView, dtype: np.dtype[Any], to: NumberFormat | None) -> Form:
    """Return the one matrix of a prepared operand as `_cast` of the kernels writes it, and what they read behind it.

    None where it must be scaled.
    """
    x = matrix_of(view)
    memory = np.zeros(x.size + PAD // dtype.itemsize, dtype)
    rows = memory[: x.size].reshape(x.shape)
    (apart,) = casting.cast([(x, rows)], to)
    return Form(None, 0) if apart else Form(rows, memory.nbytes)


def matrix_of(view: PreparedView) -> Any:
    """Return the one matrix of a prepared operand."""
    x = view.ndarray()
    return x[:, None] if x.ndim == 1 else x[(0,) * (x.ndim - 2)]


# --- without them -----------------------------------------------------------------------------


def _multiply_by_numpy(plan: GemmPlan, kind: Kind, arguments: Arguments) -> None:
    """Run a plan with the operations of the kernels, in their order."""
    stacks, dtype = stacks_of(plan, arguments), NUMPY_DTYPES[plan.accumulator]
    product, activation = np.zeros(stacks.out.shape, dtype), plan.problem.activation
    with np.errstate(all="ignore"):
        kind.sum_by_numpy(plan, arguments, stacks, product)
        epilogue.apply(
            product, product, alpha=arguments.alpha, beta=arguments.beta, c=stacks.c, bias=stacks.bias, activation=None
        )  # fmt: skip
        if activation is Activation.RELU:
            product[product < 0] = 0
            activation = None
        elif activation is Activation.GELU and dtype == np.float32:
            product, activation = direct_gelu.gelu(product, direct_gelu.NUMPY), None
    _apply(product, stacks.out, activation)


def _sum_by_numpy(plan: GemmPlan, arguments: Arguments, stacks: Stacks, product: Any) -> None:
    kept = None
    if type(arguments.b) is PreparedView:
        kept, _ = _kept_rows(plan)(arguments.b)
    with contextlib.ExitStack() as stack:
        arrays = (stacks.a, stacks.b) if kept is None else (stacks.a,)
        operands = whole_operands(plan, arrays, product.dtype, stack)
        operands += [] if kept is None else [Split([kept])]
        a, b = (x.parts[0] for x in operands)
        add_in_order(a, b, product)
        splitting.unscale(product, *operands)


def add_in_order(a: Any, b: Any, sums: Any) -> None:
    """Add the products of two stacks of matrices to their sums, one after the other in the order of k."""
    for i in range(a.shape[-1]):
        sums += a[..., i, None] * b[..., i, None, :]
