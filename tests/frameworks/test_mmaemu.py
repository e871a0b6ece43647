"""FP8 products of emulated tensor cores against mmaemu, whose model was compared with cuBLASLt's products on GPUs."""

import itertools

import ml_dtypes
import numpy as np
import pytest

import lowprec

TYPES = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}
PAIRS = [("e4m3", "e4m3"), ("e5m2", "e4m3"), ("e4m3", "e5m2")]


def numbers(rng, shape, fmt, spread):
    x = rng.standard_normal(shape) * 2.0 ** rng.integers(-spread, 3, shape)
    return x.astype(TYPES[fmt])


@pytest.mark.parametrize(("arch", "pair"), [*itertools.product(["ada", "hopper"], PAIRS)], ids=str)
def test_sums_are_those_of_cublaslt(arch, pair, rng):
    """51,840 elements in all: k within a group and beyond several pieces, with fast accumulation and without."""
    mmaemu, torch = pytest.importorskip("mmaemu"), pytest.importorskip("torch")
    for k, spread in itertools.product((16, 208, 1040), (1, 12)):
        a = numbers(rng, (36, k), pair[0], spread)
        b = numbers(rng, (k, 20), pair[1], spread)
        x, y = (
            torch.from_numpy(np.ascontiguousarray(v).view(np.uint8)).view(
                getattr(torch, v.dtype.name)
            )
            for v in (a, b.T)
        )
        for fast in (False, True):
            expected = mmaemu.accumulate(x, y, use_fast_accum=fast, profile=arch, splitk=1)
            with lowprec.emulate(arch):
                chunk = {"k_chunk": k} if fast else {}
                found = lowprec.matmul(a, b, out_dtype="float32", **chunk)
            np.testing.assert_array_equal(found, expected.numpy(), f"{k} {spread} {fast}")
