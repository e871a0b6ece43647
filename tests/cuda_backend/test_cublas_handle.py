"""lowprec's own cuBLAS handles: one per thread and device, and their math mode under the guard."""

import threading

import pytest

import lowprec
from cuda_backend.device_fixture import has_real_gpu
from lowprec.arrays import Device
from lowprec.backends.cuda import bindings, libraries, memory
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


#: Names of a handle's getters and setters, with a value that a thread sets.
STATE = {
    "stream": None,
    "math_mode": TF32,
    "pointer_mode": 1,
    "atomics_mode": 1,
    "sm_count_target": 4,
}


def state(handle):
    return {
        name: int(getattr(libraries.libraries().cublas, f"get_{name}")(handle)) for name in STATE
    }


def change(handle, stream):
    """Set everything that a user may set, as a thread that then ends."""
    for name, value in STATE.items():
        getattr(libraries.libraries().cublas, f"set_{name}")(
            handle, stream if value is None else value
        )
    if not has_real_gpu():
        libraries.libraries().cublas.set_workspace(handle, 1 << 20, 1 << 20)
    return handle


def reused_handle(used):
    """Return a handle for another thread, which must be one that a thread has used."""
    (handle,) = in_threads(1, lambda _: lowprec.cublas_handle())
    assert handle in used
    return handle


@pytest.mark.feature("`cublas_handle` and the guard")
def test_a_reused_handle_has_the_state_of_a_new_one(gpu):
    stream = memory.own_stream(Device(2, 0))

    def new_and_changed(_):
        handle = lowprec.cublas_handle()
        return state(handle), change(handle, stream)

    ((at_start, used),) = in_threads(1, new_and_changed)
    assert state(used) != at_start
    assert at_start == dict.fromkeys(STATE, 0)
    assert reused_handle({used}) == used
    assert state(used) == at_start
    if not has_real_gpu():
        assert gpu.software.cublas._get(used).workspace == (0, 0)
    change(used, stream)
    with lowprec.math_mode("tf32", frameworks=True):  # the mode of an open scope is set last
        reused_handle({used})
        assert state(used) == {**at_start, "math_mode": TF32}


def test_a_scope_does_not_restore_the_mode_of_a_thread_that_ended(software):
    (used,) = in_threads(1, lambda _: change(lowprec.cublas_handle(), 0))
    with lowprec.fp32_guard():
        assert state(used)["math_mode"] == DEFAULT
        reused_handle({used})
    assert state(used)["math_mode"] == DEFAULT


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


def test_a_guard_that_begins_while_a_handle_is_made_protects_it(software, monkeypatch):
    real = bindings.reset_handle
    has_begun, may_end = threading.Event(), threading.Event()

    def guard():
        with lowprec.fp32_guard():
            has_begun.set()
            may_end.wait()

    def reset(handle, mode):
        thread.start()
        has_begun.wait(0.2)
        real(handle, mode)

    thread = threading.Thread(target=guard, daemon=True)
    monkeypatch.setattr(bindings, "reset_handle", reset)
    with lowprec.math_mode("tf32", frameworks=True):
        handle = lowprec.cublas_handle()
        assert has_begun.wait(60)
        assert bindings.math_mode(handle) == DEFAULT
        may_end.set()
        thread.join()


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
