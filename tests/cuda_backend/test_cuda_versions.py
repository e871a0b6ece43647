"""Which CUDA serves a model of GPU."""

import warnings

import ml_dtypes
import numpy as np
import pytest

import lowprec
from lowprec import errors
from lowprec.backends.cuda import compiling
from support import oracles

A = np.random.default_rng(0).integers(-3, 4, (16, 16)).astype(np.float32)


@pytest.fixture
def install(install):
    """Kernels are compiled again."""
    compiling._load.cache_clear()
    return install


@pytest.mark.parametrize("capability", [(7, 0), (7, 2)], ids=str)
def test_a_v100_needs_cuda_12(install, capability):
    gpu = install(capability)
    x = gpu.put(A)
    for mode in ("fp16", "fp32"):
        with pytest.raises(lowprec.UnsupportedError, match=r"V100.*lowprec's extra cuda12"):
            lowprec.matmul(x, x, math_mode=mode)


def test_a_v100_has_it_in_cuda_12(install):
    gpu = install((7, 0), version=120900)
    x = gpu.put(A)
    found = gpu.get(lowprec.matmul(x, x, math_mode="fp16"))
    np.testing.assert_array_equal(found, oracles.product(A, A))


@pytest.mark.parametrize(
    ("capability", "version", "warns"),
    [
        ((10, 0), 120800, True), ((10, 3), 130002, True), ((10, 0), 130100, False), ((10, 0), 120700, False),
        ((9, 0), 130000, False), ((12, 0), 130000, False),
    ],
)  # fmt: skip
def test_a_cublas_that_may_be_wrong_gives_a_warning(
    install, monkeypatch, capability, version, warns
):
    monkeypatch.setattr(errors, "_given", set())
    gpu = install(capability, version=version)
    x = gpu.put(A)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            np.testing.assert_array_equal(gpu.get(lowprec.matmul(x, x)), oracles.product(A, A))
    words = [str(x.message) for x in caught]
    assert [
        "may compute wrong results on compute capability 10.x; install cuBLAS 13.1.0.3" in x
        for x in words
    ] == ([True] * warns)


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (10, 0), (12, 0)], ids=str)
def test_fp8_is_widened_before_8_9(install, capability):
    gpu = install(capability)
    x = gpu.put(A.astype(ml_dtypes.float8_e4m3fn))
    for out in ("float32", "float8_e5m2"):
        found = gpu.get(lowprec.matmul(x, x, out_dtype=out))
        np.testing.assert_array_equal(found, oracles.product(A, A).astype(found.dtype))
    packed = [copy.operand for copy in lowprec.plan(x, x, out_dtype="float32").copies]
    assert packed == (["a", "b"] if capability < (8, 9) else ["b"])
