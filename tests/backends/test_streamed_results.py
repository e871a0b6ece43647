"""Results that are written past the caches, with rows that begin anywhere in a cache line.

Operands are small integers, so every product is exact in every type, and the rows are surrounded by guard bytes.
"""

import ml_dtypes
import numpy as np
import pytest

import lowprec
from support import machines
from support.cpu_units import UNITS, needs, units

LINE = 64
GUARD = 0xA5
#: Element types of results, and of operands, by kind of unit.
RESULTS = {
    "fp32": ("float32", "bfloat16", "float16"),
    "bf16": ("float32", "bfloat16", "float16"),
    "int8": ("int32",),
}

cases = pytest.mark.parametrize(
    ("unit", "dtype"),
    [
        pytest.param(x, dtype, marks=needs(x), id=f"{x}-{dtype}")
        for x in UNITS
        for dtype in RESULTS[x[:4]]
    ],
)


def integers(rng, shape, unit):
    return rng.integers(-3, 4, shape).astype(np.int8 if unit.startswith("int8") else np.float32)


def rows_at(m, n, gap, first, dtype):
    """Return bytes, and among them m rows of n elements, `gap` apart, the first `first` after a cache line."""
    stride = (n + gap) * dtype.itemsize
    memory = np.full(m * stride + 3 * LINE, GUARD, np.uint8)
    at = -memory.ctypes.data % LINE + first * dtype.itemsize
    return memory, np.ndarray((m, n), dtype, memory.data, at, (stride, dtype.itemsize))


def assert_exact(unit, dtype, size, gap, first, adds=False):
    """Multiply into rows that begin `first` elements after a cache line, `gap` elements apart; and the transposes."""
    m, n, k = size
    rng = np.random.default_rng(first)
    a, b = integers(rng, (m, k), unit), integers(rng, (k, n), unit)
    memory, out = rows_at(m, n, gap, first, np.dtype(getattr(ml_dtypes, dtype, dtype)))
    addend = integers(rng, (m, n), unit)
    want = a.astype(np.float64) @ b.astype(np.float64) + (addend if adds else 0)
    with machines.only(unit):
        for x, y, target in ((a, b, out), (b.T, a.T, out.T)):
            out[...] = addend
            how = {"beta": 1.0, "c": target} if adds else {}
            assert lowprec.plan(x, y, out=target, math_mode="bf16", **how).kernel == unit
            lowprec.matmul(x, y, out=target, math_mode="bf16", **how)
            np.testing.assert_array_equal(out.astype(np.float64), want)
            out.view(np.uint8)[...] = GUARD
            assert (memory == GUARD).all(), "memory around the rows was written"


#: Rows of results beyond the size from which they are streamed.
_BYTES = (1 << 20) + 4096


@cases
@pytest.mark.parametrize("gap", [0, 1, 16])
@pytest.mark.parametrize("n", [31, 64, 100, 300])
@pytest.mark.sampled(3)
def test_rows_begin_anywhere_in_a_line(unit, dtype, n, gap):
    size = np.dtype(getattr(ml_dtypes, dtype, dtype)).itemsize
    for first in range(0, LINE // size, 3):
        assert_exact(unit, dtype, (_BYTES // (n * size), n, 5), gap, first)


@units()
@pytest.mark.parametrize("first", [0, 5])
def test_tasks_that_share_rows_of_the_result(unit, first):
    # Several ranges of columns, and several chunks of k.
    assert_exact(unit, RESULTS[unit[:4]][0], (530, 1040, 1600), 1, first)


@units(*(x for x in UNITS if not x.startswith("int8")))  # which adds nothing
@pytest.mark.parametrize("first", [0, 5])
def test_addends_are_read_before_they_are_overwritten(unit, first):
    assert_exact(unit, "float32", (700, 800, 400), 0, first, adds=True)


@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, np.float64, np.complex64])
@pytest.mark.parametrize("n", [512, 700])
def test_large_results_begin_with_a_cache_line(n, dtype):
    a = np.ones((n, 3), dtype)
    b = np.ones((3, n), dtype)
    # Several are alive at once, so that luck cannot align them all.
    results = [lowprec.matmul(a, b) for _ in range(3)]
    for result in results:
        aligned = result.ctypes.data % LINE == 0
        assert aligned or result.nbytes < 1 << 20
        assert result.flags.c_contiguous
        assert result.flags.writeable
        assert (result == 3).all()


def test_a_result_without_room_is_named_by_its_shape():
    a, b = (np.broadcast_to(np.float32(1), shape) for shape in ((1 << 20, 1), (1, 1 << 22)))
    with pytest.raises(MemoryError, match=r"shape \(1048576, 4194304\) and data type float32"):
        lowprec.matmul(a, b)


@pytest.mark.parametrize("mode", ["tf32", "bf16", "fp16"])
@pytest.mark.parametrize(("n", "first"), [(64, 0), (64, 1), (80, 0), (72, 0)])
def test_batches_into_memory_between_guards(n, first, mode):
    """Only rows that all begin at cache lines are streamed: those of 64 or 80 float32, from the first of a line on."""
    rng = np.random.default_rng(n)
    a, b = (
        rng.integers(-3, 4, shape).astype(np.float32) for shape in ((100, 40, 50), (100, 50, n))
    )
    memory, rows = rows_at(100 * 40, n, 0, first, np.dtype(np.float32))
    out = rows.reshape(100, 40, n, copy=False)
    lowprec.matmul(a, b, out=out, math_mode=mode)
    np.testing.assert_array_equal(out, a @ b)
    start = out.ctypes.data - memory.ctypes.data
    assert (memory[:start] == GUARD).all()
    assert (memory[start + out.nbytes :] == GUARD).all()
