"""Threads and tasks, each in its own mode: every result is that of its own mode. Memory stays flat."""

import gc
import time
from contextlib import ExitStack

import numpy as np
import pytest

import lowprec
from lowprec.backends.cpu import backend
from support import oracles
from support.programs import in_threads

#: How each thread selects its mode: by a scope, a guard and an argument; and the mode in force.
WAYS = [
    ("fp32_pedantic", False, None, "fp32_pedantic"),
    ("tf32", False, None, "tf32"),
    (None, False, "bf16", "bf16"),
    ("fp16", False, None, "fp16"),
    ("bf16", False, "tf32", "tf32"),
    ("bf16", True, None, "fp32"),
    (None, True, "fp16", "fp32"),
    (None, False, None, "fp32"),
]


@pytest.fixture
def operands():
    """Return numbers that each mode rounds differently, and an identity, so that the result is the rounding."""
    values = 1 + np.arange(1, 65, dtype=np.float64) / 64 + 2.0**-9 + 2.0**-12 + 2.0**-20
    values[:8:2] *= 2.0**-30  # too small for float16 next to the others of their row
    a = values.astype(np.float32).reshape(8, 8)
    results = {
        oracles.round_to(a, mode, -1).tobytes() for mode in ("fp32", *oracles.ROUNDING_MODES)
    }
    assert len(results) == 4
    return a, np.eye(8, dtype=np.float32)


def expected(a, mode):
    """Return what ``a @ identity`` is in a mode; overflowed elements make NaN of their rows' other elements."""
    with np.errstate(invalid="ignore"):
        return oracles.product(oracles.round_to(a, mode, -1), np.eye(a.shape[1])).astype(np.float32)


def wrong_results(scope, is_guarded, argument, mode, calls, a, b, out):
    want = expected(a, mode).tobytes()
    wrong = 0
    with ExitStack() as stack:
        if scope:
            stack.enter_context(lowprec.math_mode(scope))
        if is_guarded:
            stack.enter_context(lowprec.fp32_guard())
        for _ in range(calls):
            lowprec.matmul(a, b, out=out, math_mode=argument)
            wrong += not same(out, want)
    return wrong


def same(got, want):
    """Compare bits, which is quick; where they differ, NaN with any NaN and -0 with 0 will do."""
    if got.tobytes() == want:
        return True
    wanted = np.frombuffer(want, np.float32).reshape(got.shape)
    return np.array_equal(got, wanted, equal_nan=True)


@pytest.mark.parametrize(("turns", "calls"), [(1, 2500), (200, 3)], ids=["one mode", "many modes"])
def test_threads_each_in_their_own_mode(turns, calls, operands):
    a, b = operands

    def rotate(first):
        out = np.empty_like(a)
        ways = (WAYS[(first + i) % len(WAYS)] for i in range(turns))
        return sum(wrong_results(*way, calls, a, b, out) for way in ways)

    assert in_threads(len(WAYS), rotate) == [0] * len(WAYS)


def test_threads_on_matrices_that_share_the_workers(rng):
    n = 300
    a = rng.standard_normal((n, n), dtype=np.float32)
    shift = np.roll(np.eye(n, dtype=np.float32), 1, axis=1)

    def work(number):
        mode = oracles.ALL_MODES[number % len(oracles.ALL_MODES)]
        want = np.roll(oracles.round_to(a, mode, -1), 1, axis=1)
        return sum(
            not np.array_equal(lowprec.matmul(a, shift, math_mode=mode), want) for _ in range(10)
        )

    assert in_threads(8, work) == [0] * 8


def resident_bytes():
    try:
        with open("/proc/self/statm") as statm:
            return int(statm.read().split()[1]) * 4096
    except OSError:
        pytest.skip("this system shows no size of a process in /proc")


def test_memory_stays_flat(operands):
    a, b = operands
    bias = np.ones(8, np.float32)

    def calls(count):
        for _ in range(count):
            for mode in oracles.ALL_MODES:
                lowprec.matmul(a, b, math_mode=mode)
            lowprec.matmul(a, b, bias=bias, activation="relu", alpha=0.5)

    calls(500)
    growths = []
    for _ in range(3):
        gc.collect()
        before = resident_bytes()
        calls(2000)
        gc.collect()
        growths.append(resident_bytes() - before)
    # The allocator may take a page now and then, but a leak grows in every window: 16 bytes lost in each of its 12,000
    # calls are 192 kB.
    assert min(growths) < 1 << 17


@pytest.mark.usefixtures("fresh_executors")
def test_threads_with_one_new_product_share_its_executor(monkeypatch):
    made, prepare = [], backend.prepare

    def slow(plan):
        made.append(plan)
        time.sleep(0.02)
        return prepare(plan)

    monkeypatch.setattr(backend, "prepare", slow)
    x = np.ones((3, 5), np.float32)
    in_threads(6, lambda _: lowprec.matmul(x, x.T))
    assert len(made) == 1
