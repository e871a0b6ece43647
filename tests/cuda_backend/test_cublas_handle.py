"""lowprec's own cuBLAS handles: one per thread and device, and their math mode under the guard."""

import threading

import pytest

import lowprec
from cuda_backend.device_fixture import has_real_gpu
from lowprec.backends.cuda import bindings
from support.programs import in_threads

DEFAULT, PEDANTIC, TF32, FLAG = 0, 2, 3, 16


def reported(guard):
    (found,) = [row for row in guard.report() if row.library == "cublas"]
    return found


def test_a_thread_has_one_handle(software):
    mine = lowprec.cublas_handle()
    assert mine == lowprec.cublas_handle() == lowprec.cublas_handle(0)
    together = threading.Barrier(2)

    def other(_):
        found = lowprec.cublas_handle()
        together.wait()
        return found

    theirs = in_threads(2, other)
    assert len({mine, *theirs}) == 3
    # Handles of threads that ended are reused.
    assert in_threads(1, lambda _: lowprec.cublas_handle())[0] in theirs


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
    with lowprec.math_mode("tf32", frameworks=True):
        (made,) = in_threads(1, lambda _: lowprec.cublas_handle())
        assert bindings.math_mode(made) == TF32
    assert bindings.math_mode(made) == DEFAULT


def test_a_failing_setter_is_reported(software):
    handle = lowprec.cublas_handle()
    bindings.set_math_mode(handle, TF32)
    # Twice, as a single failure would be an interrupt; in between is the call that restores the mode.
    name = "cublas.set_math_mode"
    with (
        pytest.warns(lowprec.LowprecWarning, match=r"does not protect cublas .*math mode"),
        software.failing_call(name),
        software.failing_call(name, at=2),
        lowprec.fp32_guard() as guard,
    ):
        row = reported(guard)
    assert row.status == "not protected"
    assert "cannot set the math mode 0 of a cuBLAS handle" in row.reason
    software.forgive()
    assert bindings.math_mode(handle) == TF32
