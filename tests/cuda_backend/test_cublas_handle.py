"""lowprec's own cuBLAS handles: one per thread and device, and their math mode under the guard."""

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import lowprec
from cuda_backend.cuda_reset import reset
from cuda_backend.device_fixture import has_real_gpu
from lowprec.backends.cuda import bindings, cublas
from lowprec.core import executors

DEFAULT, PEDANTIC, TF32, FLAG = 0, 2, 3, 16


def reported(guard):
    (found,) = [row for row in guard.report() if row.library == "cublas"]
    return found


def test_a_thread_has_one_handle(software):
    mine = lowprec.cublas_handle()
    assert mine == lowprec.cublas_handle() == lowprec.cublas_handle(0)
    barrier = threading.Barrier(2)

    def other():
        found = lowprec.cublas_handle()
        barrier.wait()
        return found

    with ThreadPoolExecutor(2) as pool:
        theirs = [task.result() for task in [pool.submit(other), pool.submit(other)]]
    assert len({mine, *theirs}) == 3
    # Handles of threads that ended are reused.
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(lowprec.cublas_handle).result() in theirs


def test_after_a_failed_destruction_the_rest_is_destroyed(software):
    with ThreadPoolExecutor(2) as pool:
        barrier = threading.Barrier(3)
        others = [pool.submit(lambda: (lowprec.cublas_handle(), barrier.wait())) for _ in "ab"]
        lowprec.cublas_handle()
        barrier.wait()
        assert len({task.result()[0] for task in others}) == 2
    a = np.eye(16, dtype=np.float32)
    x = software.put(a)
    with lowprec.profile():  # so that there are events, and memory
        np.testing.assert_array_equal(software.get(lowprec.matmul(x, x, math_mode="bf16")), a)
    executors.clear_caches()
    del x
    assert software.live()["cublas_handles"] == 3
    with (
        software.failing_call("cublas.destroy"),
        pytest.raises(lowprec.BackendError, match="cannot destroy a handle of cublas"),
    ):
        reset()
    assert {name for name, count in software.live().items() if count} <= {"streams"}


def test_the_device_is_the_current_one(software):
    with pytest.raises(lowprec.DeviceError, match="is cuda:0, not cuda:1"):
        lowprec.cublas_handle(1)
    with pytest.raises(lowprec.DeviceError, match="there is no device cuda:7"):
        lowprec.cublas_handle(7)


#: Emulation, which cuBLAS accepts on some devices only.
EMULATED = () if has_real_gpu() else (4, 8 | FLAG)


@pytest.mark.feature("`cublas_handle` and the guard")
@pytest.mark.parametrize("raw", [DEFAULT, PEDANTIC, TF32, TF32 | FLAG, FLAG, *EMULATED])
def test_the_guard_saves_sets_and_restores_the_raw_mode(gpu, raw):
    handle = lowprec.cublas_handle()
    bindings.set_math_mode(handle, raw)
    with lowprec.fp32_guard() as guard:
        assert bindings.math_mode(handle) == raw & FLAG
        assert reported(guard).status == "protected"
        with lowprec.math_mode("tf32", frameworks=True):
            assert bindings.math_mode(handle) == raw & FLAG
    assert bindings.math_mode(handle) == raw


def test_a_mode_for_the_libraries(software):
    handle = lowprec.cublas_handle()
    bindings.set_math_mode(handle, FLAG)
    with lowprec.math_mode("tf32", frameworks=True):
        assert bindings.math_mode(handle) == TF32 | FLAG
        with lowprec.fp32_guard():
            assert bindings.math_mode(handle) == FLAG
        assert bindings.math_mode(handle) == TF32 | FLAG
    assert bindings.math_mode(handle) == FLAG


def test_a_handle_that_is_made_in_the_scope(software):
    lowprec.cublas_handle()

    def make():
        made = lowprec.cublas_handle()
        return made, bindings.math_mode(made)

    with ThreadPoolExecutor(1) as pool:
        with lowprec.math_mode("tf32", frameworks=True):
            made, mode = pool.submit(make).result()
            assert mode == TF32
        assert bindings.math_mode(made) == DEFAULT


def test_the_mode_changes_products(software):
    rng = np.random.default_rng(0)
    a, b = rng.standard_normal((2, 32, 32)).astype(np.float32)
    true = a.astype(float) @ b
    handle = lowprec.cublas_handle()
    bindings.set_math_mode(handle, TF32)
    rough = np.linalg.norm(software.sgemm(handle, a, b) - true) / np.linalg.norm(true)
    with lowprec.fp32_guard():
        fine = np.linalg.norm(software.sgemm(handle, a, b) - true) / np.linalg.norm(true)
    assert fine < 1e-6 < 1e-4 < rough


def test_a_failing_setter_is_reported(software):
    handle = lowprec.cublas_handle()
    bindings.set_math_mode(handle, TF32)
    guard = lowprec.fp32_guard()
    reports = []

    def enter():
        # Twice, as a single failure would be an interrupt; in between is the call that restores the mode.
        name = "cublas.set_math_mode"
        with software.failing_call(name), software.failing_call(name, at=2), guard:
            reports.append(reported(guard))

    with pytest.warns(lowprec.LowprecWarning, match=r"does not protect cublas .*math mode"):
        enter()
    assert reports[0].status == "not protected"
    assert "cannot set the math mode 0 of a cuBLAS handle" in reports[0].reason
    software.forgive()
    assert bindings.math_mode(handle) == TF32


def test_the_controller_is_registered():
    from lowprec.policy.controllers import controllers

    assert cublas.CublasController.name in [c.name for c in controllers()]
