"""What a GPU must be seen to do with a library's own arrays, streams and graphs; software plays it where there is none.

Operands are small whole numbers, so that every mode has one right result; and they are written by work that is still
queued when lowprec is called, so that a product that does not wait for it is wrong.
"""

import gc
import itertools
from concurrent.futures import ThreadPoolExecutor

import ml_dtypes
import numpy as np
import pytest

import lowprec
from cuda_backend.cuda_reset import reset
from cuda_backend.device_fixture import draw, has_real_gpu
from cuda_backend.device_libraries import OnlyDLPack
from lowprec.backends.cuda import runtime
from support import oracles

MODES = ("fp32", "tf32", "bf16", "fp16")
every_mode = pytest.mark.parametrize("mode", MODES)
#: From 512 on a device runs TF32 on its tensor cores.
N = 512 if has_real_gpu() else 24


A, B, C = draw(0, N, N), draw(1, N, N), draw(2, N, N)
TRUE = oracles.product(A, B)


# -- streams --------------------------------------------------------------------------------------


@pytest.mark.feature("{library}: operands still being written")
@every_mode
def test_operands_that_are_still_being_written(library, mode):
    with library.stream():
        a = library.late(A)
        found = lowprec.matmul(a, library.late(B), math_mode=mode)
        assert type(found) is type(a)
        np.testing.assert_array_equal(library.get(found), TRUE)


@pytest.mark.feature("{library}: operands dropped at once")
@every_mode
def test_operands_may_go_while_the_product_waits(library, mode):
    with library.stream():
        a, b = library.late(A), library.late(B)
        found = lowprec.matmul(a, b, math_mode=mode)
        del a, b
        gc.collect()
        others = [library.late(C) for _ in range(3)]  # take the memory, in the order of the stream
        np.testing.assert_array_equal(library.get(found), TRUE)
        np.testing.assert_array_equal(library.get(others[0]), C)


@pytest.mark.feature("{library}: threads on streams of their own")
def test_threads_on_streams_of_their_own(library):
    def work(number):
        right = True
        with library.stream():
            x, y = library.late(A + number), library.late(B)
            true = oracles.product(A + number, B)
            for mode in MODES * 5:
                found = lowprec.matmul(x, y, math_mode=mode)
                right &= np.array_equal(library.get(found), true)
        return bool(right)

    with ThreadPoolExecutor(6) as pool:
        assert all(pool.map(work, range(6)))


@pytest.mark.feature("{library}: with another library's operand")
@every_mode
def test_two_libraries_in_one_product(library, mode):
    for first in (True, False):
        b = library.other(B)
        with library.stream():
            a = library.late(A)
            found = lowprec.matmul(*((a, b) if first else (b, a)), math_mode=mode)
            del a, b
            gc.collect()  # what was read is held until the product is done
            result = library.get(found) if first else library.adopt(found)
            np.testing.assert_array_equal(result, TRUE if first else oracles.product(B, A))


@pytest.mark.feature("JAX: operands still being computed")
@every_mode
def test_jax_operands_that_are_still_being_computed(mode):
    jax = pytest.importorskip("jax", reason="JAX is not installed")
    if has_real_gpu() and jax.devices()[0].platform != "gpu":
        pytest.skip("JAX sees no GPU")
    side = 8192 if has_real_gpu() else 64

    @jax.jit
    def after_a_long_product(long, x):
        # Products of zeros, on which the operand depends; the compiler does not know that they are zeros.
        for _ in range(8):
            long = long @ long
        return x + long[: x.shape[0], : x.shape[1]]

    long = jax.numpy.zeros((side, side), "float32")
    a, b = (after_a_long_product(long, jax.numpy.asarray(x)) for x in (A, B))
    found = jax.jit(lambda x: x + 1)(lowprec.matmul(a, b, math_mode=mode))
    assert isinstance(found, jax.Array)
    np.testing.assert_array_equal(np.asarray(found), TRUE + 1)


@pytest.mark.feature("arrays known by DLPack alone")
@every_mode
def test_arrays_known_by_dlpack_alone(library, mode):
    with library.stream():
        a, b = OnlyDLPack(library.late(A)), OnlyDLPack(library.late(B))
        found = lowprec.matmul(a, b, math_mode=mode)
        assert found.device == (2, 0)
        np.testing.assert_array_equal(library.adopt(found), TRUE)


@pytest.mark.feature("several devices")
@every_mode
def test_a_device_that_is_not_current(gpu, mode):
    if runtime.call("cudaGetDeviceCount") < 2:
        pytest.skip("there is one device")
    found = lowprec.matmul(gpu.put(A, 1), gpu.put(B, 1), math_mode=mode)
    assert found.__dlpack_device__() == (2, 1)
    np.testing.assert_array_equal(gpu.get(found), TRUE)
    assert runtime.current_device() == 0
    with pytest.raises(lowprec.DeviceError, match="a is on cuda:0 and b on cuda:1"):
        lowprec.matmul(gpu.put(A), gpu.put(B, 1))


# -- graphs ---------------------------------------------------------------------------------------

#: Element type of the operands, and arguments; by what the backend has to do for it.
CAPTURED = {
    "fp32": (np.float32, {"math_mode": "fp32"}),
    "tf32": (np.float32, {"math_mode": "tf32"}),
    "bf16": (np.float32, {"math_mode": "bf16"}),
    "fp16": (np.float32, {"math_mode": "fp16"}),
    "float16, bias and relu": (np.float16, {"bias": np.float16, "activation": "relu"}),
    "int8": (np.int8, {}),
    "a bias of another type": (np.float16, {"bias": np.float32, "activation": "relu"}),
    "complex64 in bf16": (np.complex64, {"math_mode": "bf16"}),
}


@pytest.mark.feature("CUDA graph of {library}, prepared operand")
@pytest.mark.parametrize("warm", [True, False])
def test_captured_products_of_a_prepared_operand_replay(library, warm):
    """What is there when the graph is captured is the graph's for good, what is not is made by the graph."""
    with library.stream():
        a, b = library.late(A), library.late(B)
        prepared, other = (lowprec.prepare(b, math_mode="bf16") for _ in range(2))
        eager = lowprec.matmul(a, prepared if warm else other, math_mode="bf16")
        library.get(eager)
        out = {} if library.allocates_while_capturing else {"out": eager}
        lowprec.matmul(a, prepared if warm else other, math_mode="bf16", **out)
        replay, result = library.capture(
            lambda: lowprec.matmul(a, prepared, math_mode="bf16", **out)
        )
        assert bool(prepared.packed_bytes) == warm
        prepared.release()
        library.write(b, draw(5, N, N))
        for seed in range(10, 13):
            x = draw(seed, N, N)
            library.write(a, x)
            lowprec.matmul(b, b, math_mode="bf16")
            lowprec.release_memory()
            replay()
            np.testing.assert_array_equal(library.get(result), oracles.product(x, B))


@pytest.mark.feature("CUDA graph of {library}: {case}")
@pytest.mark.parametrize("case", CAPTURED)
def test_captured_products_replay(library, case):
    dtype, given = CAPTURED[case]
    keywords, host_bias = dict(given), draw(3, N)
    with library.stream():
        a, b = library.late(A.astype(dtype)), library.late(B.astype(dtype))
        if "bias" in keywords:
            keywords["bias"] = library.late(host_bias.astype(keywords["bias"]))
        eager = lowprec.matmul(a, b, **keywords)
        right = library.get(eager)
        out = {} if library.allocates_while_capturing else {"out": eager}
        lowprec.matmul(a, b, **keywords, **out)
        replay, result = library.capture(lambda: lowprec.matmul(a, b, **keywords, **out))
        for seed in range(10, 13):
            x, y = (draw(s, N, N) for s in (seed, seed + 10))
            library.write(a, x.astype(dtype))
            library.write(b, y.astype(dtype))
            # Other products take whatever memory is free between two replays.
            lowprec.matmul(b, b, **keywords)
            replay()
            true = oracles.product(x, y) + (host_bias if "bias" in keywords else 0)
            true = np.maximum(true, 0) if "activation" in keywords else true
            np.testing.assert_array_equal(library.get(result), true.astype(right.dtype))


# -- modes, plans and messages --------------------------------------------------------------------


@pytest.mark.feature("scopes, guard and `rtol`")
def test_scopes_guard_and_rtol(gpu, rng):
    a, b = rng.standard_normal((2, 512, 512), dtype=np.float32)
    x, y, true = gpu.put(a), gpu.put(b), oracles.product(a, b)

    def error(result):
        return float(np.linalg.norm(gpu.get(result) - true) / np.linalg.norm(true))

    # Rounding two operands to 8 bits costs about 2^-8 / sqrt(6) each, FP32 sums stay below 1e-5.
    with lowprec.math_mode("bf16"):
        assert 1e-4 < error(lowprec.matmul(x, y)) < 1e-2
        with lowprec.fp32_guard():
            assert error(lowprec.matmul(x, y, math_mode="bf16")) < 1e-5
    assert str(lowprec.plan(x, y, rtol=1e-2).mode) in ("tf32", "bf16", "fp16")
    assert error(lowprec.matmul(x, y, rtol=1e-2)) < 1e-2
    # Parts of 8 or 11 bits do, where they are summed; one part does not.
    assert str(lowprec.plan(x, y, rtol=1e-4).mode) not in ("tf32", "bf16", "fp16")
    assert error(lowprec.matmul(x, y, rtol=1e-4)) < 1e-4


@pytest.mark.feature("the plan names algorithm and units, `info` the device")
def test_reported_fields(gpu, rng):
    x = gpu.put(rng.standard_normal((512, 512), dtype=np.float32))
    units = {mode: dict(lowprec.plan(x, x, math_mode=mode).algorithm)["units"] for mode in MODES}
    # Which kernel runs is cuBLAS's choice, and on a device it may choose FMA for TF32, or report no instruction.
    assert all(" on " in text and ", summed in " in text for text in units.values()), units
    if not has_real_gpu():
        assert units["fp32"].endswith("no tensor cores")
        assert all(units[mode].endswith(": tensor cores") for mode in ("tf32", "bf16", "fp16")), (
            units
        )
    text = str(lowprec.plan(x, x))
    assert "cuda:0" in text
    found = lowprec.info()
    assert found["gpu"]["used"] is True
    (device, *_) = (d for d in found["devices"] if d["device"] == "cuda:0")
    if not has_real_gpu():
        assert "cuda:0: Software H200" in text
        assert "split-K" in text
        assert (device["compute_capability"], found["gpu"]["cublas"]) == ("9.0", "13.1.0")
        assert device["peak_tflops"]["bfloat16"] > device["peak_tflops"]["tf32"]
        assert "cuda:1" in [d["device"] for d in found["devices"]]


@pytest.mark.feature("`profile`")
def test_a_profile_takes_times_by_events(gpu, rng):
    x = gpu.put(rng.standard_normal((512, 512), dtype=np.float32))
    with lowprec.profile() as profile:
        for mode in ("fp32", "tf32"):
            lowprec.matmul(x, x, math_mode=mode)
    full, fast = profile.records
    assert full.elapsed_ms is not None
    assert full.elapsed_ms > 0
    assert str(fast.algorithm) == dict(lowprec.plan(x, x, math_mode="tf32").algorithm)["algorithm"]
    if not has_real_gpu():  # on a device cuBLAS may choose FMA for TF32
        assert (full.units_used, fast.units_used) == (False, True)


@pytest.mark.feature("`autotune`, and its choice on disk")
@pytest.mark.parametrize("mode", ["fp32", "bf16"])
def test_a_measured_choice(gpu, tmp_path, monkeypatch, mode):
    monkeypatch.setenv("LOWPREC_CACHE_DIR", str(tmp_path))
    reset()
    x, y = gpu.put(A), gpu.put(B)
    found = lowprec.autotune(x, y, math_mode=mode, candidates=4)
    assert found.timed
    assert found.speedup >= 1
    taken = found.timed[0].algorithm
    assert dict(lowprec.plan(x, y, math_mode=mode).algorithm)["algorithm"] == taken
    np.testing.assert_array_equal(gpu.get(lowprec.matmul(x, y, math_mode=mode)), TRUE)
    assert "algorithm" in (tmp_path / "autotune.json").read_text()


@pytest.mark.feature("what cannot be done is refused")
def test_refusals(gpu):
    x = gpu.put(A)
    with pytest.raises(lowprec.DeviceError, match="a is on cuda:0 and b on cpu"):
        lowprec.matmul(x, B)
    with pytest.raises(lowprec.ShapeError, match="mismatch in its core dimension"):
        lowprec.matmul(x, gpu.put(B[1:]))


@pytest.mark.feature("memory does not grow")
def test_memory_does_not_grow(gpu):
    """Once every kind of product has run, more of them take no memory of the device."""
    dtypes = (np.float32, ml_dtypes.bfloat16, np.int8)
    arrays = [gpu.put(A[:n, :n].astype(dtype)) for n in (16, 20, 24) for dtype in dtypes]

    def work():
        for x, mode in itertools.product(arrays, MODES):
            gpu.get(lowprec.matmul(x, x, math_mode=mode))
        gc.collect()
        lowprec.release_memory()
        return gpu.free_bytes()

    for _ in range(3):
        before = work()
    for _ in range(10 if has_real_gpu() else 3):
        after = work()
    # Another process of the device may take some.
    assert before - after <= (4 << 20 if has_real_gpu() else 0)
