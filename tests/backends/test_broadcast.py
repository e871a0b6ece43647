"""Operands that repeat along their batch by strides of zero, without copies, and batches as rows of one product."""

import tracemalloc

import numpy as np
import pytest

import lowprec
from support import oracles
from support.machines import MACHINES, fixture

machine = fixture(*MACHINES)


def make(rng, *shape, dtype):
    return oracles.random_matrix(rng, shape, dtype)


@pytest.mark.parametrize("mode", ["bf16", "tf32", "fp16"])
@pytest.mark.parametrize("dtype", ["float32", "complex64", "float16", "int8"])
@pytest.mark.parametrize("order", ["C", "reversed"])
@pytest.mark.sampled(6)
def test_a_repeated_matrix_is_not_copied_for_every_product(mode, dtype, order, machine, rng):
    """Its copies would be 64 times 512 KiB; the operands that are copied once have 512 KiB and 64 KiB at most."""
    w = make(rng, 256, 256, dtype=dtype)
    b = np.broadcast_to(w if order == "C" else w[::-1, ::-1], (64, 256, 256))
    for a in (make(rng, 64, 2, 256, dtype=dtype), make(rng, 256, dtype=dtype)):
        lowprec.matmul(a, b, math_mode=mode)  # what is loaded and kept at the first use
        tracemalloc.start()
        try:
            lowprec.matmul(a, b, math_mode=mode)
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert peak < 16 * 256 * 256 * 8, f"{peak:,} bytes for a matrix of {w.nbytes:,}"


@pytest.mark.parametrize("shape", [(5, 1, 50), (5, 40, 1), (5, 1, 1), (40, 50), (5, 40, 50)])
def test_an_addend_of_a_batch_that_becomes_rows(shape, machine, rng):
    """One matrix for all products: their rows are one matrix, unless the addend is none then."""
    a, b = rng.integers(-3, 4, (5, 40, 64)), rng.integers(-3, 4, (64, 50))
    a, b, c = (x.astype(np.float32) for x in (a, b, rng.integers(-9, 9, shape)))
    got = lowprec.matmul(a, b, c=c, beta=2.0, math_mode="bf16")
    np.testing.assert_array_equal(got, a.astype(np.float64) @ b + 2 * c)


@pytest.mark.parametrize("mode", ["fp32", "bf16x3"])
def test_rows_of_a_batch_by_offsets(mode, machine, rng):
    """Operands, results and addends in orders that no single stride of rows expresses, one too long to keep."""
    cases = [
        ((6, 5, 8), (1, 0, 2)),
        ((3, 4, 2, 8), (2, 1, 0, 3)),
        ((3, 1, 2, 8), (2, 1, 0, 3)),
        ((300, 500, 8), (1, 0, 2)),
    ]
    for shape, order in cases:
        a = rng.integers(-3, 4, shape).astype(np.float32).transpose(order)
        out_shape = (*a.shape[:-1], 9)
        memory = np.zeros([out_shape[i] for i in np.argsort(order)], np.float32)
        out = memory.transpose(order)
        b, c = (
            rng.integers(-3, 4, (8, 9)).astype(np.float32),
            rng.integers(-3, 4, out_shape).astype(np.float32),
        )
        want = a.astype(np.float64) @ b + c
        for target, addend in ((out, c), (None, c.swapaxes(0, 1).copy().swapaxes(0, 1))):
            got = lowprec.matmul(a, b, out=target, c=addend, beta=1.0, math_mode=mode)
            np.testing.assert_array_equal(got, want)
            np.testing.assert_array_equal(
                lowprec.matmul(a[..., ::-1, :], b, math_mode=mode), (want - c)[..., ::-1, :]
            )
