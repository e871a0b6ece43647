"""Other libraries' switches under the guard, with libraries made up for it: order, failures, threads, tasks."""

import contextvars
import os
import random
import sys
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from types import ModuleType, SimpleNamespace

import pytest

from lowprec.errors import LowprecWarning, SettingError, UnsupportedError
from lowprec.modes import MathMode
from lowprec.policy import controllers as registry
from lowprec.policy import fp32_guard, get_math_mode, math_mode
from support.programs import in_threads

FP32, TF32 = MathMode.FP32, MathMode.TF32


@pytest.fixture(autouse=True)
def everything_comes_back(register):
    yield
    assert [library.name for library in register.made if not library.is_as_before] == []


def statuses(guard):
    return {row.library: row.status for row in guard.report()}


def reason(guard, library):
    return next(row.reason for row in guard.report() if row.library == library)


def test_nested_blocks_set_once_and_an_exception_restores(library):
    guard = fp32_guard()

    @fp32_guard()
    def solve():
        with guard, guard:
            assert library.is_full
            raise KeyError("boom")

    assert library.is_as_before
    with pytest.raises(KeyError, match="boom"):
        solve()
    assert library.is_as_before
    assert library.calls.count("set_mode") == library.calls.count("restore") == 1


@pytest.mark.parametrize("blocked", [False, True])
def test_a_library_that_is_not_loaded_is_left_alone(register, monkeypatch, blocked):
    library = register(loaded=False)
    if blocked:
        monkeypatch.setitem(sys.modules, library.module, None)
    with fp32_guard() as guard:
        assert statuses(guard) == {"one": "not loaded"}
    assert library.calls == []


def test_a_library_imported_inside_waits_for_the_next_entry(register):
    library, guard = register(loaded=False), fp32_guard()
    with guard:
        register.load(library)
        assert statuses(guard) == {"one": "not protected"}
        assert "imported inside" in reason(guard, "one")
        with math_mode("tf32", frameworks=True):
            assert library.is_as_before, "the floor holds for it, too"
        with guard:
            assert library.is_full
            assert statuses(guard) == {"one": "protected"}
        assert library.is_as_before
    assert statuses(guard) == {"one": "not protected"}
    assert "not entered in this thread" in reason(guard, "one")


def test_frameworks_chooses(register):
    one, two = register("one"), register("two")
    with fp32_guard(frameworks=["two"]) as guard:
        assert one.is_as_before
        assert two.is_full
        assert statuses(guard) == {"one": "not protected", "two": "protected"}
        assert "frameworks=" in reason(guard, "one")
        assert repr(guard) == "fp32_guard(frameworks=['two'])"
    with fp32_guard(frameworks=False):
        assert one.is_as_before
        assert two.is_as_before
        assert get_math_mode() is FP32
    with fp32_guard(frameworks=True):
        assert one.is_full


def test_frameworks_that_make_no_sense(register):
    register("one")
    with pytest.raises(SettingError, match="no controller for two; choose among one, or"):
        fp32_guard(frameworks=["one", "two"])
    with pytest.raises(TypeError, match="True, False or a list of names"):
        fp32_guard(frameworks="one")
    with pytest.raises(TypeError, match="got 3"):
        math_mode("tf32", frameworks=3)


def test_settings_made_inside_are_kept_and_reported(library):
    outer = fp32_guard().__enter__()
    library.values["products"] = "mine"
    with fp32_guard():
        assert library.is_full, "a guard inside protects from them"
    assert library.values["products"] == "mine"
    with pytest.warns(LowprecWarning, match=r"one: products = 'mine' was set inside.*kept"):
        outer.__exit__()
    assert library.values == {"products": "mine", "convolutions": "lower"}
    library.values["products"] = "low"


@pytest.mark.parametrize("step", ["save", "set_mode"])
def test_a_library_that_fails_is_reported_and_the_others_act(register, step):
    bad, good = register("bad"), register("good")
    bad.fails[step] = OSError("no driver")
    guard = fp32_guard()
    with pytest.warns(LowprecWarning, match=r"does not protect bad \(OSError: no driver\)"):
        guard.__enter__()
    assert good.is_full
    assert statuses(guard) == {"bad": "not protected", "good": "protected"}
    assert reason(guard, "bad") == "OSError: no driver"
    guard.__exit__()
    assert good.is_as_before


def test_a_library_that_cannot_be_put_back_is_reported(register):
    bad, good = register("bad"), register("good")
    bad.fails["restore"] = OSError("gone")
    with (
        pytest.warns(LowprecWarning, match="bad could not be restored: OSError: gone"),
        fp32_guard(),
    ):
        pass
    assert good.is_as_before
    bad.fails.clear()
    bad.restore({"products": "low", "convolutions": "lower"})
    with fp32_guard():
        assert bad.is_full


def test_a_warning_made_an_error_leaves_nothing_behind(register):
    bad, good = register("bad"), register("good")
    bad.fails["save"] = UnsupportedError("version 99 has other switches")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(LowprecWarning, match=r"bad \(version 99 has other"):
            fp32_guard().__enter__()
    assert good.is_as_before
    with math_mode("tf32"):
        assert get_math_mode() is TF32


# -- threads and tasks ----------------------------------------------------------------------------


def test_a_thread_switch_is_each_thread_s_own(register):
    library = register(tier="thread")
    with ThreadPoolExecutor(1) as pool, fp32_guard() as guard:
        assert pool.submit(lambda: library.is_as_before).result()
        assert pool.submit(guard.wrap(lambda: library.is_full)).result()
        assert pool.submit(lambda: library.is_as_before).result()
        context = contextvars.copy_context()
        assert pool.submit(context.run, statuses, guard).result() == {"one": "not protected"}
        assert library.is_full


def test_a_generator_that_another_thread_closes(register):
    process, thread = register("process"), register("thread", tier="thread")

    def steps():
        with fp32_guard():
            yield

    running = steps()
    next(running)
    with ThreadPoolExecutor(1) as pool, pytest.warns(LowprecWarning) as warned:
        pool.submit(running.close).result()
    assert any("thread's switch belongs to the thread" in str(w.message) for w in warned)
    assert process.is_as_before
    assert not thread.is_as_before, "no thread reaches another one's switch"
    with fp32_guard():
        assert thread.is_full
    assert thread.is_as_before, "the next block in the thread puts it right"


@pytest.mark.parametrize("moment", ["save", "set_mode", "restore"])
@pytest.mark.parametrize(
    "make", [fp32_guard, lambda: math_mode("tf32", frameworks=True)], ids=["guard", "mode"]
)
def test_a_finalizer_in_the_midst_of_a_change(register, make, moment):
    """It leaves one block and runs another; all blocks act as otherwise."""
    library, waiting, seen = register(), make().__enter__(), list[bool]()

    def finalize():
        library.during.clear()
        waiting.__exit__()
        with fp32_guard():
            seen.append(library.is_full)

    library.during[moment] = finalize
    with fp32_guard():
        assert library.is_full
    if not seen:  # a guard inside another sets nothing
        finalize()
    assert library.is_as_before
    assert seen == [True]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_a_child_that_is_forked_while_another_thread_changes_switches(register):
    library, busy, go = register(), threading.Event(), threading.Event()

    def hold():
        library.during.clear()
        busy.set()
        go.wait(0.2)

    library.during["save"] = hold
    with ThreadPoolExecutor(1) as pool:
        entering = pool.submit(lambda: fp32_guard().__enter__())
        assert busy.wait(10)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Python and JAX advise against forking with threads
            child = os.fork()
        if child == 0:
            with fp32_guard():
                os._exit(0 if library.is_full else 1)
        go.set()
        _, status = os.waitpid(child, 0)
        assert status == 0
        pool.submit(entering.result().__exit__).result()


def test_sixteen_threads_overlap_at_random(register):
    process, thread = register("process"), register("thread", tier="thread")
    guard = fp32_guard()

    def run(seed):
        rng, mistakes = random.Random(seed), 0

        def nest(depth):
            nonlocal mistakes
            with guard if rng.random() < 0.5 else fp32_guard():
                mistakes += not (process.is_full and thread.is_full)
                if depth and rng.random() < 0.5:
                    nest(depth - 1)
                mistakes += not (process.is_full and thread.is_full)
                if rng.random() < 0.2:
                    raise KeyError(depth)

        for _ in range(300):
            try:
                nest(3)
            except KeyError:
                continue
        return mistakes + (not thread.is_as_before)

    assert in_threads(16, run) == [0] * 16
    assert process.is_as_before
    assert not guard._open


# -- math_mode(..., frameworks=True) --------------------------------------------------------------


def test_a_mode_reaches_other_libraries_only_if_asked(library):
    with math_mode("tf32"):
        assert library.calls == []
    with math_mode("tf32", frameworks=True) as mode:
        assert repr(mode) == "math_mode('tf32', frameworks=True)"
        assert set(library.values.values()) == {"tf32"}
        assert statuses(mode) == {"one": "set"}
        with fp32_guard():
            assert library.is_full
        assert set(library.values.values()) == {"tf32"}
    assert library.is_as_before


def test_a_library_without_the_mode_is_left_as_it_is(library):
    with pytest.warns(LowprecWarning, match=r"does not reach one \(one has no switch for fp16\)"):
        mode = math_mode("fp16", frameworks=["one"]).__enter__()
    assert library.is_as_before
    assert get_math_mode() is MathMode.FP16
    assert statuses(mode) == {"one": "not set"}
    mode.__exit__()


def test_the_guard_is_a_floor_for_other_libraries_too(register):
    library = register()
    with ThreadPoolExecutor(1) as pool, fp32_guard():

        @math_mode("tf32", frameworks=True)
        def lower():
            return library.is_full, get_math_mode()

        assert lower() == (True, FP32)
        assert pool.submit(lower).result() == (True, TF32), "lowprec's own mode is the thread's"
        with math_mode("tf32", frameworks=True) as mode:
            assert "an open fp32_guard keeps it at full FP32" in reason(mode, "one")
    assert library.is_as_before


def test_a_mode_and_a_guard_of_two_threads_end_in_any_order(register):
    library = register()
    mode, guard = math_mode("tf32", frameworks=True), fp32_guard()
    with ThreadPoolExecutor(1) as pool:
        mode.__enter__()
        pool.submit(guard.__enter__).result()
        assert library.is_full
        mode.__exit__()
        assert library.is_full, "the other thread's guard is open"
        pool.submit(guard.__exit__).result()
    assert library.is_as_before


# -- the registry, and the controllers of libraries that are not here -----------------------------


def test_non_controllers_are_refused():
    with pytest.raises(TypeError, match=r"a controller needs describe, mod.*lacks .*save"):
        registry.register_controller(SimpleNamespace(name="x"))
    assert "x" not in {c.name for c in registry.controllers()}


@pytest.fixture
def cupy(register, monkeypatch):
    """CuPy's two functions, which set TF32 only where a driver says that the device has it."""
    from lowprec.policy.frameworks.switch_functions import CUPY

    state = SimpleNamespace(value=7, has_driver=True)

    # CuPy's errors come from a package of another name.
    backend = {"__name__": "cupy_backends.cuda.api.runtime"}
    exec("def fail(): raise RuntimeError('cudaErrorInsufficientDriver')", backend)

    def set_compute_type(dtype, value):
        assert dtype == "f"
        if value in (6, 7) and not state.has_driver:
            backend["fail"]()
        state.value = value

    def get_compute_type(dtype):
        assert dtype == "f"
        return state.value

    module = ModuleType("cupy")
    module._core = SimpleNamespace(
        get_compute_type=get_compute_type, set_compute_type=set_compute_type
    )
    monkeypatch.setitem(sys.modules, "cupy", module)
    registry.register_controller(CUPY)
    return state


def test_cupy_is_set_to_its_default_and_put_back(cupy):
    with fp32_guard() as guard:
        assert cupy.value == 1
        assert statuses(guard) == {"cupy": "protected"}
        with math_mode("tf32", frameworks=True):
            assert cupy.value == 1
    assert cupy.value == 7


def test_cupy_without_a_driver(cupy):
    cupy.value, cupy.has_driver = 1, False
    with fp32_guard():
        assert cupy.value == 1
    with pytest.warns(LowprecWarning, match=r"does not reach cupy .*InsufficientDriver"):
        mode = math_mode("tf32", frameworks=True).__enter__()
    mode.__exit__()
    assert cupy.value == 1


def test_every_switch_is_shown_and_none_that_cannot_be_read(register):
    one, bad = register("one"), register("bad", tier="thread")
    register("absent", loaded=False)
    bad.fails["save"] = OSError("no driver")
    rows = [tuple(row.values()) for row in registry.switch_rows()]
    assert rows == [
        ("one", "products", "low", "process", None),
        ("one", "convolutions", "lower", "process", None),
        ("bad", None, None, "thread", "OSError: no driver"),
    ]
    assert one.calls == ["save"]


def test_a_pytorch_with_other_switches_is_reported(register, monkeypatch):
    from lowprec.policy.frameworks import torch

    module = ModuleType("torch")
    module._C = SimpleNamespace()
    module.__version__ = "99.0"
    monkeypatch.setitem(sys.modules, "torch", module)
    registry.register_controller(torch)
    with pytest.warns(LowprecWarning, match=r"the switches of PyTorch 99\.0 are not those"):
        guard = fp32_guard().__enter__()
    assert statuses(guard) == {"torch": "not protected"}
    guard.__exit__()
