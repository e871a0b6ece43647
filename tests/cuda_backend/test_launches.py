"""Warm products: the calls of each, and the arguments and workspaces that calls do not share."""

import ml_dtypes
import numpy as np
import pytest

import lowprec
from cuda_backend.device_fixture import draw
from lowprec.backends.cuda import epilogue, packing
from support import oracles

BF16 = np.dtype(ml_dtypes.bfloat16)
MODES = ("fp32", "tf32", "bf16", "fp16")


A, B, C, BIAS = draw(0, 24, 32), draw(1, 32, 16), draw(2, 24, 16), draw(3, 16)
TRUE = oracles.product(A, B)


KERNEL, TAKE, GIVE = "cuLaunchKernel", "cudaMallocFromPoolAsync", "cudaFreeAsync"
#: One block holds operands, exponents, product and workspace; a staged product asks before it queues anything.
AS_STORED = ["cuCtxGetDevice", TAKE, "matmul", GIVE]
STAGED = ["cuCtxGetDevice", "cudaStreamIsCapturing", TAKE]

#: By mode, or the type that all operands have.
CALLS = {
    "fp32": AS_STORED,
    "tf32": AS_STORED,
    "bf16": [*STAGED, KERNEL, KERNEL, "matmul", GIVE],
    # a, the exponents of b's columns, b, and the result.
    "fp16": [*STAGED, KERNEL, "cudaMemsetAsync", KERNEL, KERNEL, "matmul", KERNEL, GIVE],
    # b and the result, which has another number of columns.
    "int8": [*STAGED, KERNEL, "matmul", KERNEL, GIVE],
    "bfloat16": AS_STORED,
    "bias": AS_STORED,
}


def calls_of(software, call):
    before = software.calls_made()
    call()
    return [x.partition(".")[2] for x in software.software.calls[before:]]


@pytest.mark.parametrize("name", CALLS)
def test_calls_of_a_warm_product(software, cupy, name):
    software.software.switches.first_algorithm = False
    dtype = {"int8": np.int8, "bfloat16": BF16}.get(name, np.float32)
    a, b = A.astype(dtype), B.astype(dtype)
    b = b[:, :15].copy() if name == "int8" else b
    n = b.shape[1]
    like = np.int32 if name == "int8" else dtype
    x, y, out, first, second = (
        cupy.asarray(z) for z in (a, b, np.zeros((24, n), like), BIAS, 2 * BIAS)
    )
    given = {"math_mode": name if name in MODES else "fp32", "out": out}
    if name == "bias":
        given |= {"bias": first, "activation": "relu"}
    for _ in range(3):
        calls = calls_of(software, lambda: lowprec.matmul(x, y, **given))
    assert calls == CALLS[name]
    true = np.maximum(TRUE + BIAS, 0) if name == "bias" else TRUE[:, :n]
    np.testing.assert_array_equal(oracles.widen(cupy.asnumpy(out)), true)
    if name == "bias":  # its pointer is a part of the descriptor, set where it has changed
        calls = calls_of(software, lambda: lowprec.matmul(x, y, **given | {"bias": second}))
        assert calls == ["cuCtxGetDevice", "matmul_desc_set_attribute", TAKE, "matmul", GIVE]
        np.testing.assert_array_equal(cupy.asnumpy(out), np.maximum(TRUE + 2 * BIAS, 0))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("dtype", "name"),
    [
        *((np.float32, name) for name in ("alpha", "c", "bias", "activation", "all")),
        *((np.complex64, name) for name in ("alpha", "c", "bias", "all")),
    ],
)
@pytest.mark.sampled(2)
def test_each_call_has_its_own_factors_and_arrays(software, mode, name, dtype):
    x, y = software.put(A.astype(dtype)), software.put(B.astype(dtype))
    for alpha in (1.0, 2.0, -0.5, 1.0):
        given = {}
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
def test_a_call_within_a_launch_has_arguments_of_its_own(software, mode, monkeypatch):
    """As a signal handler, or another thread, may come between the arguments and the launch."""
    x, y, z = software.put(A), software.put(B), software.put(-A)
    queue, found = software.software.driver.cuLaunchKernel, []
    left = [0]

    def interrupted(*arguments):
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


@pytest.mark.usefixtures("cache")
def test_a_measured_algorithm_has_its_workspace_from_the_first_call(software):
    """The block of a warm product includes the workspace of the algorithm before."""
    x, y = software.put(A), software.put(B)
    for _ in range(2):
        lowprec.matmul(x, y, math_mode="bf16")
    assert lowprec.autotune(x, y, math_mode="bf16").timed
    for _ in range(3):
        np.testing.assert_array_equal(software.get(lowprec.matmul(x, y, math_mode="bf16")), TRUE)


@pytest.mark.usefixtures("cache")
def test_measuring_keeps_a_fused_bias(software):
    x, y, bias = software.put(A), software.put(B), software.put(BIAS)
    assert lowprec.autotune(x, y, bias=bias).timed
    np.testing.assert_array_equal(software.get(lowprec.matmul(x, y, bias=bias)), TRUE + BIAS)
    assert "fallback" not in dict(lowprec.plan(x, y, bias=bias).algorithm)
