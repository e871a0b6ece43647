"""Warm products: what is queued for each, and that only what a call names is its own."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import lowprec
from cuda_backend.cuda_reset import reset
from cuda_backend.device_fixture import SoftwareGpu
from lowprec.backends.cuda import epilogue, packing
from lowprec.core import executors
from software_cuda.cupy import Cupy
from support import oracles

BF16 = np.dtype(ml_dtypes.bfloat16)
MODES = ("fp32", "tf32", "bf16", "fp16")


def draw(seed: int, *shape: int, dtype: Any = np.float32) -> Any:
    return np.random.default_rng(seed).integers(-3, 4, shape).astype(dtype)


A, B, C, BIAS = draw(0, 24, 32), draw(1, 32, 16), draw(2, 24, 16), draw(3, 16)
TRUE = oracles.product(A, B)


# -- calls of the libraries -----------------------------------------------------------------------

ONE = {"cuCtxGetDevice": 1, "matmul": 1}
BLOCK = {"cudaMallocFromPoolAsync": 1, "cudaFreeAsync": 1}
#: What is staged asks before it queues anything.
STAGED = ONE | BLOCK | {"cudaStreamIsCapturing": 1}

#: By mode, or the type that all operands have. Their block has room for the workspace, too.
CALLS: dict[str, dict[str, int]] = {
    "fp32": ONE | BLOCK,
    "tf32": ONE | BLOCK,
    "bf16": STAGED | {"cuLaunchKernel": 2},
    # a, the exponents of b's columns, b, and the result.
    "fp16": STAGED | {"cuLaunchKernel": 4, "cudaMemsetAsync": 1},
    # b and the result, which has another number of columns.
    "int8": STAGED | {"cuLaunchKernel": 2},
    "bfloat16": ONE | BLOCK,
}


@pytest.mark.parametrize("name", CALLS)
def test_calls_of_a_warm_product(software: SoftwareGpu, cupy: Cupy, name: str) -> None:
    dtype = {"int8": np.int8, "bfloat16": BF16}.get(name, np.float32)
    mode = name if name in MODES else "fp32"
    a, b = A.astype(dtype), B.astype(dtype)
    b = b[:, :15].copy() if name == "int8" else b
    like = np.int32 if name == "int8" else dtype
    x, y, out = (cupy.asarray(z) for z in (a, b, np.zeros((24, b.shape[1]), like)))
    for _ in range(3):
        before = software.calls_made()
        lowprec.matmul(x, y, out=out, math_mode=mode)
        calls = software.software.calls[before:]
    assert Counter(x.partition(".")[2] for x in calls) == CALLS[name]
    np.testing.assert_array_equal(oracles.widen(cupy.asnumpy(out)), TRUE[:, : b.shape[1]])


# -- what a call names ----------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("dtype", "name"),
    [
        *((np.float32, name) for name in ("alpha", "c", "bias", "activation", "all")),
        *((np.complex64, name) for name in ("alpha", "c", "bias", "all")),
    ],
)
@pytest.mark.sampled(2)
def test_each_call_has_its_own_factors_and_arrays(software: SoftwareGpu, mode: str, name: str, dtype: Any) -> None:
    x, y = software.put(A.astype(dtype)), software.put(B.astype(dtype))
    for alpha in (1.0, 2.0, -0.5, 1.0):
        given: dict[str, Any] = {}
        true = TRUE.astype(dtype)
        if name in ("alpha", "all"):
            given["alpha"], true = alpha, true * alpha
        if name in ("c", "all"):
            given |= {"c": software.put((C * alpha).astype(dtype)), "beta": alpha}
            true = true + alpha * alpha * C
        if name in ("bias", "all"):
            given["bias"] = software.put((BIAS * alpha).astype(dtype))
            true = true + BIAS * alpha
        if name == "activation" or (name == "all" and dtype is np.float32):
            given["activation"], true = "relu", np.maximum(true, 0)
        found = lowprec.matmul(x, y, math_mode=mode, **given)
        np.testing.assert_array_equal(software.get(found), true)


@pytest.mark.parametrize("mode", ["bf16", "fp16"])
def test_a_call_within_a_launch_has_arguments_of_its_own(
    software: SoftwareGpu, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a signal handler, or another thread, may come between the arguments and the launch."""
    x, y, z = software.put(A), software.put(B), software.put(-A)
    queue, found = software.software.driver.cuLaunchKernel, []
    left = [0]

    def interrupted(*arguments: Any) -> Any:
        left[0] -= 1
        if not left[0]:
            found.append(lowprec.matmul(z, y, math_mode=mode))
        return queue(*arguments)

    monkeypatch.setattr(software.software.driver, "cuLaunchKernel", interrupted)
    for cache in (packing.prepare_packing, epilogue.prepare_epilogue):
        cache.cache_clear()  # launches keep the function of the driver
    lowprec.matmul(x, y, math_mode=mode)
    for position in range(1, 1 + (2 if mode == "bf16" else 4)):
        left[0] = position
        outer = lowprec.matmul(x, y, math_mode=mode)
        np.testing.assert_array_equal(software.get(outer), TRUE)
        np.testing.assert_array_equal(software.get(found.pop()), -TRUE)


# -- workspaces -----------------------------------------------------------------------------------


def test_a_measured_algorithm_has_its_workspace_from_the_first_call(
    software: SoftwareGpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The block of a warm product has room for the workspace of the algorithm before."""
    monkeypatch.setenv("LOWPREC_CACHE_DIR", str(tmp_path))
    executors.clear_caches()
    reset()
    x, y = software.put(A), software.put(B)
    for _ in range(2):
        lowprec.matmul(x, y, math_mode="bf16")
    assert lowprec.autotune(x, y, math_mode="bf16").timed
    for _ in range(3):
        found = lowprec.matmul(x, y, math_mode="bf16")
        np.testing.assert_array_equal(software.get(found), TRUE)


def test_measuring_at_the_first_use_keeps_a_fused_bias(
    software: SoftwareGpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOWPREC_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("LOWPREC_AUTOTUNE", "1")
    executors.clear_caches()
    reset()
    x, y, bias = software.put(A), software.put(B), software.put(BIAS)
    found = lowprec.matmul(x, y, bias=bias)
    np.testing.assert_array_equal(software.get(found), TRUE + BIAS)
    assert "fallback" not in dict(lowprec.plan(x, y, bias=bias).algorithm)
