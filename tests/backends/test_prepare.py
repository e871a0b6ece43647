"""Prepared operands: the bits of the array itself, in every mode, from the copy that the first product packed."""

import ctypes
import functools
import gc
import pickle
import weakref

import numpy as np
import pytest

import lowprec
from lowprec.backends.cpu import library, numpy_products, products
from lowprec.modes import available_modes
from lowprec.planning import ReasonKind
from lowprec.policy import environment
from support import machines, oracles
from support.programs import in_threads

MODES = [str(mode) for mode in available_modes()]
DTYPES = ("float32", "complex64", "float64", "bfloat16", "float16", "int8")


@pytest.fixture(autouse=True, params=machines.MACHINES)
def machine(request):
    with machines.on(request.param):
        yield request.param


def numbers(rng, dtype, *shape):
    return oracles.random_matrix(rng, shape, dtype)


def same(x, y):
    """Assert equality to the bit, NaN included."""
    assert (x.dtype, x.shape) == (y.dtype, y.shape)
    assert x.tobytes() == y.tobytes()


def check(a, b, mode, **given):
    """Assert the bits of the array itself, from the product that packs it and from the next; return it prepared."""
    prepared = lowprec.prepare(b, math_mode=mode)
    want = lowprec.matmul(a, b, math_mode=mode, **given)
    for _ in range(2):
        same(lowprec.matmul(a, prepared, math_mode=mode, **given), want)
    return prepared


def view_of(prepared):
    return prepared._view


def spoil(prepared):
    """Write NaN over the copy: later products must read the packed operand."""
    memory = view_of(prepared).owner.base
    ctypes.memset(memory.ctypes.data, 0xFF, memory.nbytes)


def is_kept(plan):
    return plan.prepared is not None and plan.prepared.kind is ReasonKind.KEPT


#: A mode acts on single precision alone.
CASES = [
    (dtype, mode)
    for dtype in DTYPES
    for mode in (MODES if dtype in ("float32", "complex64") else ["bf16"])
]


@pytest.mark.parametrize(("dtype", "mode"), CASES)
def test_the_bits_of_the_array(rng, dtype, mode):
    b = numbers(rng, dtype, 220, 100)
    for m in (1, 5, 150):
        a = numbers(rng, dtype, m, 220)
        prepared = check(a, b, mode)
        plan = lowprec.plan(a, prepared, math_mode=mode)
        kept = len(view_of(prepared).packed)
        # A mode that quantises keeps the rounded operand, and what the kernel makes of it.
        assert kept in ((1, 2) if plan.quantized else (is_kept(plan),))
        assert is_kept(plan) or not plan.kernel_row.packs


@pytest.mark.parametrize("mode", ["fp64", "tf32", "bf16", "fp16", "bf16x3", "bf16x9", "fp16x3"])
@pytest.mark.parametrize("dtype", ["float32", "complex64"])
def test_the_next_product_reads_the_packed_operand(rng, dtype, mode):
    b = numbers(rng, dtype, 170, 130)
    prepared = lowprec.prepare(b, math_mode=mode)
    first = numbers(rng, dtype, 100, 170)
    assert is_kept(lowprec.plan(first, prepared, math_mode=mode))
    lowprec.matmul(first, prepared, math_mode=mode)
    # The next one has other extents, another epilogue and another result.
    a, bias = numbers(rng, dtype, 200, 170), numbers(rng, dtype, 130)
    want = lowprec.matmul(a, b, math_mode=mode, bias=bias, alpha=0.5)
    spoil(prepared)
    kept = dict(view_of(prepared).packed)
    same(lowprec.matmul(a, prepared, math_mode=mode, bias=bias, alpha=0.5), want)
    assert view_of(prepared).packed == kept  # nothing is made
    prepared.release()
    assert not np.isfinite(lowprec.matmul(a, prepared, math_mode=mode)).all()


def test_a_matrix_without_columns(rng):
    check(numbers(rng, "float32", 40, 128), numbers(rng, "float32", 128, 0), "bf16")


STACKS = {
    "a stack": lambda b: np.stack([b, b + 1, b - 1]),
    "a stack, backwards": lambda b: np.stack([b, b + 1, b - 1])[::-1],
    "stacks of stacks": lambda b: np.stack([b, b + 1, b - 1, b, b * 2, -b]).reshape(2, 3, *b.shape),
    "every second": lambda b: np.stack([b, b, b + 1, b, b - 1, b])[::2],
    "one for all": lambda b: np.broadcast_to(b, (3, *b.shape)),
    "windows": lambda b: np.lib.stride_tricks.sliding_window_view(b, b.shape[0] - 2, 0).swapaxes(1, 2),
    "a matrix": lambda b: b,
}  # fmt: skip


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "complex64"])
@pytest.mark.parametrize("extents", [(40, 60, 70), (70, 190, 350)], ids=["small", "large"])
@pytest.mark.parametrize("layout", STACKS)
def test_each_matrix_of_a_stack_is_kept_packed(rng, layout, extents, dtype):
    m, n, k = extents
    b = STACKS[layout](numbers(rng, dtype, k, n))
    prepared = lowprec.prepare(b, math_mode="bf16")
    # Gaps between the matrices keep the batch from becoming one matrix.
    shape = (*np.broadcast_shapes((3,), b.shape[:-2]), m, b.shape[-2])
    a = numbers(rng, dtype, *shape[:-2], m + 1, shape[-1])[..., 1:, :]
    want = lowprec.matmul(a, b, math_mode="bf16")
    same(lowprec.matmul(a, prepared, math_mode="bf16"), want)
    plan = lowprec.plan(a, prepared, math_mode="bf16")
    assert plan.layout.batch_count > 1
    assert is_kept(plan) or not plan.kernel_row.packs
    if is_kept(plan):
        spoil(prepared)
        same(lowprec.matmul(a, prepared, math_mode="bf16"), want)


MATRICES = {
    "rows": lambda b: b,
    "columns": np.asfortranarray,
    "neither": lambda b: np.repeat(b, 2, 1)[:, ::2],
    "backwards": lambda b: b[::-1, ::-1],
    "a vector": lambda b: b[:, 0].copy(),
    "a stack": lambda b: np.stack([b, b + 1]),
    "a stack of one": lambda b: b[None],
}


@pytest.mark.parametrize("mode", ["fp32", "fp64", "tf32", "bf16", "fp16"])
@pytest.mark.parametrize("layout", MATRICES)
def test_few_rows_read_the_packed_operand(rng, layout, mode):
    small = np.float32(1e-6)  # of float16 these are subnormal
    b = MATRICES[layout](numbers(rng, "float32", 50, 33) * small)
    prepared = lowprec.prepare(b, math_mode=mode)
    # Matrices, a batch that becomes rows, one that does not, and a vector.
    rows = [numbers(rng, "float32", *shape) for shape in ((6, 50), (1, 50), (2, 3, 50))]
    rows.append(numbers(rng, "float32", 2, 5, 50)[:, 1:])
    given = {"math_mode": mode, "alpha": 0.5}
    if b.ndim > 1:
        rows.append(numbers(rng, "float32", 50))
        given["bias"] = numbers(rng, "float32", 33) * small
    wanted = [lowprec.matmul(a, b, **given) for a in rows]
    for _ in range(2):
        for a, want in zip(rows, wanted, strict=True):
            same(lowprec.matmul(a, prepared, **given), want)
            plan = lowprec.plan(a, prepared, **given)
            assert is_kept(plan) == (mode != "fp32" or plan.kernel_row.packs)
        if is_kept(plan):
            spoil(prepared)


@pytest.mark.parametrize("strides", oracles.STRIDES)
def test_a_matrix_that_must_be_scaled_meets_vectors_in_one_order(rng, strides):
    """Sums that are rounded depend on the order, which follows from the strides of the matrix as it was given."""
    numbers_apart = np.ldexp(rng.standard_normal((300, 130)), rng.integers(-45, 45, (300, 1)))
    _, b = oracles.STRIDES[strides](numbers_apart.astype(np.float32))
    check(rng.standard_normal((1, 300)).astype(np.float32), b, "fp16")


@pytest.mark.parametrize("mode", ["bf16", "fp16"])
def test_nan_that_needs_more_than_16_bits(rng, mode):
    a, b = numbers(rng, "float32", 1, 250), numbers(rng, "float32", 250, 300)
    b[3, 7], b[5, 8], b[9, 9] = np.nan, np.inf, -1e38
    for payload in (0x7FC00000, 0x7FC00001, 0xFFF23456):
        b.view(np.uint32)[3, 7] = payload
        check(a, b, mode)


def test_later_writes_to_the_array_have_no_effect(rng):
    a, b = numbers(rng, "float32", 64, 128), numbers(rng, "float32", 128, 96)
    before = b.copy()
    prepared = lowprec.prepare(b, math_mode="bf16")
    b[...] = 7
    for mode in ("bf16", "fp32"):  # the packed operand, and the copy itself
        same(lowprec.matmul(a, prepared, math_mode=mode), lowprec.matmul(a, before, math_mode=mode))


@pytest.mark.parametrize("first", range(0, 70, 23))
@pytest.mark.parametrize("step", [1, -1, 2])
def test_the_copy_has_the_layout_of_the_array_and_is_read_only(rng, first, step):
    """The result of a BLAS may depend on the alignment of its operands."""
    b = numbers(rng, "float32", 200, 96)[first :: abs(step)][::step, 3:]
    copy = view_of(lowprec.prepare(b)).owner
    np.testing.assert_array_equal(copy, b)
    assert copy.strides == b.strides
    assert (copy.ctypes.data - b.ctypes.data) % 256 == 0
    assert not copy.flags.writeable


def test_the_mode_in_force_decides(rng, monkeypatch):
    a, b = numbers(rng, "float32", 64, 128), numbers(rng, "float32", 128, 96)
    prepared = lowprec.prepare(b, math_mode="tf32")
    lowprec.matmul(a, prepared, math_mode="tf32")
    held = prepared.nbytes

    def in_full(**given):
        same(lowprec.matmul(a, prepared, **given), lowprec.matmul(a, b, math_mode="fp32"))
        reason = lowprec.plan(a, prepared, **given).prepared
        assert reason is not None
        assert reason.kind is ReasonKind.PREPARED_FOR_ANOTHER_MODE
        assert "prepared for tf32, but the mode is fp32" in str(reason)

    in_full()
    in_full(math_mode="fp32")
    with lowprec.fp32_guard():
        in_full(math_mode="tf32")
    with monkeypatch.context() as patch:
        patch.setenv("LOWPREC_FORCE_MATH_MODE", "fp32")
        environment.refresh()
        in_full(math_mode="tf32")
    with monkeypatch.context() as patch:
        patch.setenv("NVIDIA_TF32_OVERRIDE", "0")
        environment.refresh()
        in_full(math_mode="tf32")
    environment.refresh()
    assert prepared.nbytes == held
    with lowprec.math_mode("tf32"):
        assert lowprec.plan(a, prepared).prepared.kind is not ReasonKind.PREPARED_FOR_ANOTHER_MODE
        same(lowprec.matmul(a, prepared), lowprec.matmul(a, b))
        assert lowprec.prepare(b).math_mode is lowprec.MathMode.TF32


def test_rtol_and_emulation(rng):
    a, b = numbers(rng, "float32", 64, 128), numbers(rng, "float32", 128, 96)
    prepared = lowprec.prepare(b, math_mode="bf16")
    same(lowprec.matmul(a, prepared, rtol=1e-2), lowprec.matmul(a, b, rtol=1e-2))
    with lowprec.emulate("hopper"):
        want = lowprec.matmul(a, b, math_mode="bf16")
        same(lowprec.matmul(a, prepared, math_mode="bf16"), want)


@pytest.mark.parametrize("mode", ["bf16", "tf32", "bf16x3", "fp16x3"])
@pytest.mark.parametrize("n", [32, 96])
def test_the_transpose_of_a_square_matrix_is_packed_separately(rng, n, mode):
    a, b = numbers(rng, "float32", 150, n), numbers(rng, "float32", n, n)
    prepared = lowprec.prepare(b, math_mode=mode)
    for _ in range(2):
        same(lowprec.matmul(a, prepared, math_mode=mode), lowprec.matmul(a, b, math_mode=mode))
        same(lowprec.matmul(a, prepared.T, math_mode=mode), lowprec.matmul(a, b.T, math_mode=mode))


def test_the_report(rng):
    prepared = lowprec.prepare(numbers(rng, "float32", 128, 96).T, math_mode="fp16x3")
    assert (prepared.shape, prepared.dtype, prepared.device) == ((96, 128), "float32", "cpu")
    assert (prepared.order, prepared.T.order, prepared.math_mode) == ("col", "row", "fp16x3")
    assert (prepared.nbytes, prepared.packed_bytes) == (4 * 96 * 128, 0)
    lowprec.matmul(numbers(rng, "float32", 300, 96), prepared, math_mode="fp16x3")
    packed = prepared.packed_bytes
    assert 2 * 4 * 96 * 128 <= packed < 3 * 4 * 96 * 128  # two parts, held in float32
    assert prepared.nbytes == 4 * 96 * 128 + packed
    assert prepared.T.packed_bytes == packed, "the transpose shares them"
    assert repr(prepared) == (
        f"PreparedOperand(float32 (96, 128), col, for fp16x3, on cpu, {packed:,} bytes packed in addition to 49,152)"
    )
    prepared.release()
    assert prepared.packed_bytes == 0
    with pytest.raises(AttributeError, match="cannot assign"):
        prepared._view = None


def test_wrong_uses(rng):
    a, b = numbers(rng, "float32", 64, 128), numbers(rng, "float32", 128, 96)
    prepared = lowprec.prepare(b, math_mode="bf16")
    c = lowprec.prepare(numbers(rng, "float32", 64, 96))
    for call in (lowprec.matmul, lowprec.plan):
        with pytest.raises(
            lowprec.ArrayError, match="a: expected an array, got a prepared operand, which"
        ):
            call(prepared, b)
        with pytest.raises(
            lowprec.ArrayError, match="a: expected an array, got a prepared operand"
        ):
            call(prepared, prepared)
        with pytest.raises(
            lowprec.ArrayError, match="c: expected an array, got a prepared operand"
        ):
            call(a, b, c=c, beta=1.0)
        with pytest.raises(
            lowprec.ArrayError, match="out: expected an array, got a prepared operand"
        ):
            call(a, prepared, out=c)
        with pytest.raises(lowprec.ShapeError, match="mismatch in its core dimension"):
            call(a[:, 1:], prepared)
    with pytest.raises(lowprec.ModeError, match="'bf17' is not a math mode"):
        lowprec.prepare(b, math_mode="bf17")
    with pytest.raises(lowprec.DTypeError, match="int32"):
        lowprec.prepare(np.ones((3, 4), np.int32))
    with pytest.raises(lowprec.ShapeError, match="b has no axes"):
        lowprec.prepare(np.ones(()))
    with pytest.raises(lowprec.ArrayError, match="expected an array"):
        lowprec.prepare([[1.0]])
    with pytest.raises(lowprec.ShapeError, match=r"weight has shape \(n, k\), got \(128,\)"):
        lowprec.linear(a, lowprec.prepare(b[:, 0].copy()))
    with pytest.raises(lowprec.ShapeError, match="has no transpose"):
        _ = lowprec.prepare(b[0]).T


def test_pickle(rng):
    a, b = numbers(rng, "float32", 64, 128), numbers(rng, "float32", 128, 96)
    prepared = lowprec.prepare(np.asfortranarray(b), math_mode="bf16")
    want = lowprec.matmul(a, prepared, math_mode="bf16")
    loaded = pickle.loads(pickle.dumps(prepared))
    assert (loaded.math_mode, loaded.order, loaded.packed_bytes) == ("bf16", "col", 0)
    same(lowprec.matmul(a, loaded, math_mode="bf16"), want)


@pytest.mark.parametrize(
    ("mode", "m", "batch"),
    [("bf16x3", 64, ()), ("bf16", 64, ()), ("bf16", 64, (4,)), ("tf32", 8, ()), ("bf16", 1, ())],
    ids=["parts", "panels", "a stack", "rows", "16 bits"],
)
def test_first_use_in_eight_threads(rng, mode, m, batch):
    a, b = numbers(rng, "float32", *batch, m, 150), numbers(rng, "float32", *batch, 150, 200)
    prepared = lowprec.prepare(b, math_mode=mode)
    want = lowprec.matmul(a, b, math_mode=mode)

    def work(_):
        for _ in range(5):
            same(lowprec.matmul(a, prepared, math_mode=mode), want)
            prepared.release()

    in_threads(8, work)


@pytest.mark.parametrize("batch", [(), (4,)], ids=["a matrix", "a stack"])
@pytest.mark.parametrize("m", [8, 150])
@pytest.mark.parametrize("mode", ["tf32", "bf16", "bf16x3", "fp16x3"])
def test_released_in_the_middle_of_a_product(rng, monkeypatch, mode, m, batch):
    """As by another thread: a product holds the packed operand until it ends."""
    a, b = numbers(rng, "float32", *batch, m, 350), numbers(rng, "float32", *batch, 350, 190)
    prepared = lowprec.prepare(b, math_mode=mode)
    want = lowprec.matmul(a, b, math_mode=mode)
    lowprec.matmul(a, prepared, math_mode=mode)
    values = [value for value, _ in view_of(prepared).packed.values()]
    # The parts of an operand by NumPy, or the memory of the compiled library's.
    arrays = [
        x for value in values for x in (value[0] if isinstance(value[0], list) else [value[1]])
    ]
    packed = [weakref.ref(x) for x in arrays]
    assert packed
    del values, arrays
    call, multiply = products._call, np.matmul

    def released(function, *arguments, **keywords):
        prepared.release()
        assert all(x() is not None for x in packed)
        return function(*arguments, **keywords)

    monkeypatch.setattr(products, "_call", functools.partial(released, call))
    monkeypatch.setattr(np, "matmul", functools.partial(released, multiply))
    same(lowprec.matmul(a, prepared, math_mode=mode), want)
    assert prepared.packed_bytes == 0


def test_its_memory_is_freed_with_it(rng):
    """Without the garbage collector: products keep no reference to it."""
    gc.collect()
    gc.disable()
    try:
        for m, batch in ((1, ()), (8, ()), (64, ()), (64, (3,))):
            a, b = (
                numbers(rng, "float32", *batch, m, 150),
                numbers(rng, "float32", *batch, 150, 200),
            )
            prepared = lowprec.prepare(b, math_mode="bf16")
            lowprec.matmul(a, prepared, math_mode="bf16")
            lowprec.matmul(a, prepared.T.T, math_mode="bf16")
            memory = weakref.ref(view_of(prepared).owner)
            del prepared
            assert memory() is None
    finally:
        gc.enable()


def test_a_product_that_cannot_be_split_keeps_nothing(rng, monkeypatch):
    """A MemoryError is raised as it is, and the next product packs again."""
    a, b = numbers(rng, "float32", 64, 128), numbers(rng, "float32", 128, 96)
    prepared = lowprec.prepare(b, math_mode="bf16x3")

    def fail(*_):
        raise MemoryError("none left")

    with monkeypatch.context() as patch:
        patch.setattr(numpy_products, "split", fail)
        patch.setattr(products, "_pack", fail)
        with pytest.raises(MemoryError, match="none left"):
            lowprec.matmul(a, prepared, math_mode="bf16x3")
    assert prepared.packed_bytes == 0
    want = lowprec.matmul(a, b, math_mode="bf16x3")
    same(lowprec.matmul(a, prepared, math_mode="bf16x3"), want)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("layout", ["rows", "columns", "strided"])
def test_16_bits_stay_16_bits(rng, machine, dtype, layout):
    k, n = 450, 96
    b = numbers(rng, dtype, k, n)
    if layout == "columns":
        b = np.asfortranarray(b)
    if layout == "strided":
        b = numbers(rng, dtype, 2 * k, 3 * n)[::2, ::3]
    for m in (1, 8, 31, 60):
        for element in ("float32", dtype):
            a = numbers(rng, element, m, k)
            prepared = check(a, b, None)
            # Tiles multiply float16 as two bfloat16 parts.
            parts = 2 if lowprec.plan(a, prepared).kernel.endswith("_pair") else 1
            # Whole blocks of 64 numbers along k.
            is_kept_so = machine == "this machine" and library.library() is not None
            assert not is_kept_so or prepared.packed_bytes <= 2 * parts * (k + 63) * n
