"""Small products, and batches of them, in one call of native code: rounded, multiplied, finished and written.

What a product is made of follows from the plan but for the addresses, so it is written down once, as a job of 64-bit
words. The kernels need numba, which takes longer to import than ten thousand small products: until somebody has
imported it, or as much time went by without, NumPy computes the same bits.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import sys
import threading
from collections.abc import Callable
from typing import Any

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
from lowprec.backends.cpu.batches import KEPT, addresses_of, offsets_of
from lowprec.backends.cpu.direct_job import (
    A_K_STEP,
    A_ROW_STEP,
    ACTIVATION,
    AT_A,
    AT_B,
    AT_BIAS,
    AT_BLOCK,
    AT_C,
    AT_EXPONENTS,
    BATCH_BIAS,
    BATCH_COUNT,
    BATCH_FACTORS,
    BATCH_JOB,
    BATCH_KEPT_B,
    BATCH_PRODUCT,
    BATCH_SHARE,
    BATCH_TABLE,
    BATCH_WORDS,
    BIAS,
    CAST_SCRATCH,
    GELU,
    OUT_COL_STRIDE,
    OUT_ROW_STRIDE,
    PLAIN,
    RELU,
    TO_FLOAT16,
    WORDS,
    A,
    B,
    C,
    K,
    M,
    N,
)
from lowprec.backends.cpu.fp32_units import rounding_format, whole_operands
from lowprec.backends.cpu.kernel_rows import DIRECT
from lowprec.backends.cpu.scaling import FLOAT16_DIGITS
from lowprec.backends.cpu.splitting import Split
from lowprec.backends.cpu.stacks import stacks_of
from lowprec.backends.execution import Arguments, Executor
from lowprec.formats import FLOAT16, DType, NumberFormat
from lowprec.planning import Activation, GemmLayout, GemmPlan, MatrixStack
from lowprec.planning.layout import addend_layout, stacked_layout
from lowprec.planning.prepared import kept_modes

_ACTIVATIONS = {None: 0, Activation.RELU: RELU, Activation.GELU: GELU}

#: Vectors are read and written as a whole, and may begin with the last element of a matrix.
_PAD = 256

#: For each element of a, b and the result: at most 8 bytes, and as float32 4; a bias has no more of them.
_SCRATCH_BYTES = CAST_SCRATCH + 20 * (DIRECT.maximum_elements or 0) + 16 * _PAD

_KERNELS = "lowprec.backends.cpu.direct_kernels"

#: Seconds without the kernels that pay for importing numba.
_PAYS_TO_IMPORT = 0.5

#: Multiplications of a batch that pay for waking a thread, and those that a thread takes at a time.
_PAYS_TO_SHARE, _SHARE = 1 << 22, 1 << 17

_Job, _Batch = ctypes.c_int64 * WORDS, ctypes.c_int64 * BATCH_WORDS
_Factors = ctypes.c_double * 2

_waited, _is_broken = 0.0, False


class _Scratch(threading.local):
    """Each thread's, which it lends to one call of a kernel: the product of a signal handler comes before or after."""

    def __init__(self) -> None:
        self.memory = np.empty(_SCRATCH_BYTES, np.uint8)
        self.address = int(self.memory.ctypes.data)


_scratch = _Scratch()


def prepare(plan: GemmPlan) -> Executor:
    """Return the executor of a plan for small products."""
    seconds, native = _seconds_without(plan), None

    def execute(arguments: Arguments) -> None:
        nonlocal native
        if native is None:
            if not _pays(seconds):
                _multiply_by_numpy(plan, arguments)
                return
            native = _native(plan)
        native(arguments)

    return _native(plan) if _pays(0.0) else execute


def _seconds_without(plan: GemmPlan) -> float:
    """Return about how much longer a product takes without the kernels."""
    layout = plan.layout
    return 2e-5 + layout.k * (2e-6 + 1e-9 * layout.batch_count * layout.m * layout.n)


def _pays(seconds: float) -> bool:
    """Whether kernels are in the process, or as much was spent without them as it takes to get them there."""
    global _waited
    if _is_broken:
        return False
    if "lowprec.backends.cpu.packed.native" in sys.modules or _waited + seconds >= _PAYS_TO_IMPORT:
        return _has_kernels()
    _waited += seconds
    return False


def _has_kernels() -> bool:
    """Import the kernels; False where numba is installed but does not work."""
    global _is_broken
    if numba_import.fails():
        _is_broken = True
        return False
    try:
        importlib.import_module(_KERNELS)
    except ImportError:
        _is_broken = True
    return not _is_broken


# --- with the kernels -------------------------------------------------------------------------


def _native(plan: GemmPlan) -> Executor:
    """Return what calls the kernels for a plan."""
    problem, wide = plan.problem, plan.accumulator is DType.FLOAT64
    # Without the kernels' own, and for GELU of float64, it is NumPy's, on numbers not yet rounded to the result's type.
    activation = problem.activation
    is_apart = activation not in _ACTIVATIONS or (activation is Activation.GELU and wide)
    staged = is_apart and plan.out_dtype is not plan.accumulator
    dtype = plan.accumulator if staged else plan.out_dtype
    layout = stacked_layout(problem.a, problem.b, None if staged else problem.out, dtype)
    c = None
    if problem.c is not None and problem.has_beta:
        c = addend_layout(problem.c, problem.a, problem.b, layout)
    job = _job(plan, layout, c)
    from lowprec.backends.cpu.direct_kernels import product_kernel

    product = product_kernel(wide, dtype.label)
    multiply = (
        _one(plan, job, product) if layout.batch_count == 1 else _all(plan, job, product, layout, c)
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


def _job(plan: GemmPlan, layout: GemmLayout, c: MatrixStack | None) -> Any:
    """Return the words of a product."""
    problem, to = plan.problem, _rounding(plan)
    m, n, k, item = layout.m, layout.n, layout.k, plan.accumulator.itemsize
    # A is read number by number, so it may stay in columns.
    in_columns = abs(layout.a.row_stride) < abs(layout.a.col_stride)
    a = layout.a.transposed if in_columns else layout.a
    matrices = {A: (a, to), B: (layout.b, to)}
    if c is not None:
        matrices[C] = c, None
    if problem.bias is not None:
        (stride,) = problem.bias.strides
        matrices[BIAS] = MatrixStack.of(problem.bias.dtype, 1, n, 0, stride), None
    words = {
        M: m, N: n, K: k,
        A_ROW_STEP: item if in_columns else k * item,
        A_K_STEP: m * item if in_columns else item,
        OUT_ROW_STRIDE: layout.out.row_stride * layout.out.dtype.itemsize,
        OUT_COL_STRIDE: layout.out.col_stride * layout.out.dtype.itemsize,
        ACTIVATION: _ACTIVATIONS.get(problem.activation, 0),
        PLAIN: not problem.has_epilogue and layout.out.dtype is plan.accumulator and layout.out.col_stride == 1,
    }  # fmt: skip
    for first, (matrix, fmt) in matrices.items():
        words |= {first + i: word for i, word in enumerate(_cast_words(matrix, fmt))}
    if to is FLOAT16_DIGITS:
        words[TO_FLOAT16] = _cast_address(DType.FLOAT32, FLOAT16)
    place = CAST_SCRATCH
    if item == 8:
        place += 4 * max(m * k, k * n, m * n) + _PAD
    sizes = ((AT_A, m * k), (AT_B, k * n), (AT_C, m * n), (AT_BIAS, n))
    exponents = 2 * (1 + m + n) if item == 4 else 0
    for at, elements in (*sizes, (AT_EXPONENTS, exponents), (AT_BLOCK, 0)):
        words[at] = place
        place += elements * item + _PAD
    job = _Job()
    for index, word in words.items():
        job[index] = word
    return job


def _rounding(plan: GemmPlan) -> NumberFormat | None:
    """Return the format to which operands are rounded that need not be scaled."""
    return FLOAT16_DIGITS if any(plan.scaled) else rounding_format(plan)


def _cast_words(matrix: MatrixStack, to: NumberFormat | None) -> tuple[int, ...]:
    """Return how a matrix is read, from `ROWS` to `WIDEN`; one without gaps as a single row."""
    rows, cols, item = matrix.rows, matrix.cols, matrix.dtype.itemsize
    row_stride, col_stride = matrix.row_stride, matrix.col_stride
    if col_stride == 1 and row_stride == cols:
        rows, cols = 1, rows * cols
    cast = widen = 0
    if matrix.dtype is not DType.FLOAT64:
        cast = _cast_address(matrix.dtype, to)
    if to is FLOAT16_DIGITS:
        widen = _cast_address(matrix.dtype, None)
    return rows, cols, row_stride * item, col_stride * item, cast, widen


def _cast_address(dtype: DType, to: NumberFormat | None) -> int:
    index = casting.cast_index(dtype.label, to)
    assert index is not None, "plans for this kernel multiply what it reads"
    address: int = casting.kernels().cast_address(index)
    return address


def _one(plan: GemmPlan, job: Any, product: int) -> Executor:
    """Return the executor of a single product."""
    from lowprec.backends.cpu.direct_kernels import PRODUCT_ARITY
    from lowprec.backends.cpu.packed.native import callable_at

    problem, kernel = plan.problem, callable_at(product, PRODUCT_ARITY)
    has_beta, has_bias = problem.has_beta, problem.bias is not None
    has_factors = problem.has_alpha or has_beta
    address_of, scratch, plain = ctypes.addressof, _scratch, _Factors(1.0, 0.0)
    kept = _kept_rows(plan)

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
            address,
            scratch.address,
        )

    return execute


def _all(
    plan: GemmPlan, job: Any, product: int, layout: GemmLayout, c: MatrixStack | None
) -> Executor:
    """Return the executor of a batch."""
    from lowprec.backends.cpu.direct_kernels import BATCH_ARITY, batch_kernel
    from lowprec.backends.cpu.packed.native import callable_at

    kernel = callable_at(batch_kernel(), BATCH_ARITY)
    stacks = (layout.a, layout.b, layout.out, c)
    count, products = layout.batch_count, layout.m * layout.n * layout.k
    offsets = offsets_of(stacks) if count <= KEPT else None
    kept = _kept_rows(plan)
    shared = count * products >= _PAYS_TO_SHARE

    def execute(arguments: Arguments) -> None:
        workers = min(threads.num_threads(), count) if shared else 1
        bias = arguments.bias
        factors = _Factors(arguments.alpha.real, arguments.beta.real)
        table = addresses_of(stacks, arguments, offsets)
        batch = _Batch()
        batch[BATCH_JOB], batch[BATCH_PRODUCT] = ctypes.addressof(job), product
        batch[BATCH_COUNT] = count
        batch[BATCH_SHARE] = min(-(-_SHARE // products), -(-count // workers))
        batch[BATCH_TABLE] = table.ctypes.data
        batch[BATCH_BIAS] = 0 if bias is None else bias.address
        batch[BATCH_FACTORS] = ctypes.addressof(factors)
        if type(arguments.b) is PreparedView:
            _rows, batch[BATCH_KEPT_B] = kept(arguments.b)  # as above
        address = ctypes.addressof(batch)

        def work() -> None:
            kernel(address, _scratch.address)

        threads.run(work, workers)

    return execute


def _kept_rows(plan: GemmPlan) -> Callable[[PreparedView], tuple[Any, int]]:
    """Return what finds the rows of a prepared ``b``, cast with the first product, and their address; 0 for none."""
    modes, spec, to = kept_modes(plan), plan.problem.b, _rounding(plan)
    dtype = NUMPY_DTYPES[plan.accumulator]
    key = ("rows", dtype, to, spec.shape, spec.strides)

    def find(view: PreparedView) -> tuple[Any, int]:
        if view.mode not in modes:
            return None, 0
        form = view.forms.get(key)
        rows = view.form(key, lambda: _rows_of(view, dtype, to)) if form is None else form.value
        return rows, 0 if rows is None else data_pointer(rows)

    return find


def _rows_of(view: PreparedView, dtype: np.dtype[Any], to: NumberFormat | None) -> Form:
    """Return the one matrix of a prepared operand as `_cast` of the kernels writes it, and what they read behind it.

    None where it must be scaled.
    """
    x = view.ndarray()
    x = x[:, None] if x.ndim == 1 else x[(0,) * (x.ndim - 2)]
    memory = np.zeros(x.size + _PAD // dtype.itemsize, dtype)
    rows = memory[: x.size].reshape(x.shape)
    (apart,) = casting.cast([(x, rows)], to)
    return Form(None, 0) if apart else Form(rows, memory.nbytes)


# --- without them -----------------------------------------------------------------------------


def _multiply_by_numpy(plan: GemmPlan, arguments: Arguments) -> None:
    """Run a plan with the operations of the kernels, in their order."""
    stacks, dtype = stacks_of(plan, arguments), NUMPY_DTYPES[plan.accumulator]
    kept = None
    if type(arguments.b) is PreparedView:
        kept, _ = _kept_rows(plan)(arguments.b)
    product, activation = np.zeros(stacks.out.shape, dtype), plan.problem.activation
    with contextlib.ExitStack() as stack, np.errstate(all="ignore"):
        arrays = (stacks.a, stacks.b) if kept is None else (stacks.a,)
        operands = whole_operands(plan, arrays, dtype, stack)
        operands += [] if kept is None else [Split([kept])]
        a, b = (x.parts[0] for x in operands)
        for i in range(plan.layout.k):
            product += a[..., i, None] * b[..., i, None, :]
        splitting.unscale(product, *operands)
        epilogue.apply(
            product, product, alpha=arguments.alpha, beta=arguments.beta, c=stacks.c, bias=stacks.bias, activation=None
        )  # fmt: skip
        if activation is Activation.RELU:
            product[product < 0] = 0
            activation = None
        elif activation is Activation.GELU and dtype == np.float32:
            product, activation = direct_gelu.gelu(product, direct_gelu.NUMPY), None
    _apply(product, stacks.out, activation)
