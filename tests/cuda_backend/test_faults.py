"""Every call of every library made to fail, one by one: a typed error, nothing left over, the next call right."""

import gc
from collections.abc import Callable
from itertools import count
from typing import Any, NamedTuple

import numpy as np
import pytest

import lowprec
from cuda_backend.cuda_reset import reset
from cuda_backend.device_fixture import draw
from lowprec.core import executors
from software_cuda import cublaslt
from support import oracles

A, B, BIAS, C = draw(0, 16, 16), draw(1, 16, 16), draw(2, 16), draw(3, 16, 16)
STACK = draw(4, 3, 2, 16, 16).swapaxes(0, 1)
SPARSE = B * (np.arange(16)[:, None] % 4 < 2)
HALVES = tuple(x.astype(np.float16) for x in (A, SPARSE, BIAS))
TRUE = oracles.product(A, B)


class Case(NamedTuple):
    """A product that uses certain parts of the backend: its arrays, their device, the call, and what it gives."""

    arrays: tuple[Any, ...]
    call: Callable[..., Any]
    true: Any
    device: int = 0

    def put(self, gpu):
        return [gpu.put(x, self.device) for x in self.arrays]


def plain(x, y):
    return lowprec.matmul(x, y)


def fused(x, y, bias, c):
    return lowprec.matmul(x, y, bias=bias, activation="relu", c=c, beta=2.0)


def prepared(x, y):
    return lowprec.matmul(x, lowprec.prepare(y, math_mode="fp16"), math_mode="fp16")


def sparse(x, y, bias):
    return lowprec.matmul(x, lowprec.prepare(y, sparsity="2:4"), bias=bias)


CASES = {
    "in place": Case((A, B), plain, TRUE),
    "fused epilogue": Case((A, B, BIAS, C), fused, np.maximum(TRUE + 2 * C + BIAS, 0)),
    "rounded": Case((A, B), lambda x, y: lowprec.matmul(x, y, math_mode="bf16"), TRUE),
    "scaled, staged": Case((A, B), lambda x, y: lowprec.matmul(x, y, math_mode="fp16"), TRUE),
    "prepared": Case((A, B), prepared, TRUE),
    "several calls": Case((STACK, np.stack([[B] * 3] * 2)), plain, oracles.product(STACK, B)),
    "2:4 sparse": Case(HALVES, sparse, oracles.product(A, SPARSE) + BIAS),
    "int8": Case((A.astype(np.int8), B[:, :7].astype(np.int8)), plain, TRUE[:, :7]),
    "fixed-point emulation": Case(
        (A.astype(np.float64), B.astype(np.float64)),
        lambda x, y: lowprec.matmul(x, y, math_mode="fp64_emulated"),
        TRUE,
    ),
    "no inner dimension": Case(
        (A[:, :0], B[:0], BIAS),
        lambda x, y, z: lowprec.matmul(x, y, bias=z),
        np.broadcast_to(BIAS, (16, 16)),
    ),
    "another device": Case((A, B), plain, TRUE, device=1),
    "out over an operand": Case((A, B), lambda x, y: lowprec.matmul(x, y, out=x), TRUE),
}


def start_again():
    """Forget prepared products, and give back all that the backend keeps."""
    executors.clear_caches()
    gc.collect()  # an exception and its frames may hold each other
    reset()


def right(gpu, found, case):
    return np.array_equal(oracles.widen(gpu.get(found)), case.true)


def run(gpu, case):
    assert right(gpu, case.call(*case.put(gpu)), case)


def run_with_a_fault(gpu, case, position):
    """Run a product of which one call fails.

    Return whether it came to that call, and what was said; if nothing was, the product must be right.
    """
    arrays = case.put(gpu)
    with gpu.failing(position) as fault:
        try:
            found, said = case.call(*arrays), ""
        except lowprec.LowprecError as error:
            found, said = None, f"{type(error).__name__}: {error}"
    gpu.forgive()
    assert said or right(gpu, found, case)
    return fault.happened, said


def each_call_fails(gpu, case, check):
    """Make a product's first call fail, then its second, and so on to the last; check after each."""
    failures = 0
    for position in count(1):
        happened, said = run_with_a_fault(gpu, case, position)
        if not happened:
            break
        failures += bool(said)
        check(f"after a fault in call {position}: {said}")
    # Some calls may fail without an effect: memory is requested twice, and a device whose query fails becomes current.
    assert failures >= (position - 1) * 2 // 5 > 1


@pytest.mark.parametrize("name", CASES)
def test_every_call_may_fail(software, name):
    case = CASES[name]
    run(software, case)  # compiles the kernels
    start_again()
    empty = software.live()

    def check(when):
        # The very next call is right, and nothing of either is left.
        run(software, case)
        start_again()
        assert software.live() == empty, when

    each_call_fails(software, case, check)


@pytest.mark.parametrize("name", ["in place", "fused epilogue", "scaled, staged"])
def test_every_call_of_a_warm_product_may_fail(software, name):
    case = CASES[name]
    run(software, case)
    each_call_fails(software, case, lambda when: run(software, case))


def test_a_missing_algorithm_is_reported(software, monkeypatch):
    start_again()
    monkeypatch.setattr(cublaslt, "search", lambda *_, **__: [])
    with pytest.raises(
        lowprec.UnsupportedError, match="has no algorithm on this device for float32"
    ):
        run(software, CASES["in place"])
    software.forgive()
