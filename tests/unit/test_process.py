"""A mode or the guard for the rest of the process: what ``lowprec run`` sets when a library is imported."""

import sys
import threading

import pytest

from lowprec.policy import environment, fp32_guard, math_mode, process
from support.synthetic_library import Library, WithDefault

pytestmark = pytest.mark.usefixtures("clean_policy")


@pytest.fixture(params=[Library, WithDefault])
def library(request, register, monkeypatch):
    monkeypatch.setattr(process, "_guarded", {})
    return register(made=request.param("one"))


@pytest.mark.parametrize(("order", "precision"), [("tf32", "tf32"), ("fp32_guard", "fp32")])
def test_it_is_set_for_good(library, order, precision):
    thread = threading.Thread(target=process.set_library, args=("one", order))
    thread.start()
    thread.join()
    assert set(library.values.values()) == {precision}
    assert process.changes() == []


def test_reasons_for_which_it_is_not_set(library, register):
    assert process.set_library("one", "bf16") == "one has no switch for bf16"
    library.fails["set_mode"] = RuntimeError("no driver")
    assert process.set_library("one", "tf32") == "RuntimeError: no driver"
    register("two", tier="thread")
    assert process.set_library("two", "tf32") == "two's switches belong to the thread"
    assert all(made.is_as_before for made in register.made)


@pytest.mark.parametrize("guard", ["block", "variable"])
def test_a_mode_does_not_lower_below_a_guard(library, guard, monkeypatch):
    # The library is imported inside the block, which has not seen it.
    module = sys.modules.pop(library.module)
    with fp32_guard(frameworks=guard == "block"):
        monkeypatch.setitem(sys.modules, library.module, module)
        if guard == "variable":
            monkeypatch.setenv("LOWPREC_FP32_GUARD", "1")
            environment.refresh()
        assert "an open fp32_guard keeps it at full FP32" in str(process.set_library("one", "tf32"))
        assert library.is_as_before


def test_blocks_come_back_to_it_and_not_below_the_guard(register):
    library = register()
    process.set_library("one", "tf32")
    with fp32_guard(frameworks=["one"]):
        assert library.is_full
    assert set(library.values.values()) == {"tf32"}
    process.set_library("one", "fp32_guard")
    with math_mode("tf32", frameworks=["one"]):
        assert library.is_full


@pytest.mark.parametrize("order", ["tf32", "fp32_guard"])
def test_settings_of_the_program_are_kept_and_reported_under_the_guard(library, order):
    process.set_library("one", order)
    library.values["products"] = "mine"
    expected = ["one: products = 'mine' was set by the program, and is kept"]
    assert process.changes() == (expected if order == "fp32_guard" else [])
    library.fails["save"] = RuntimeError("no driver")
    expected = ["the switches of one cannot be read: RuntimeError: no driver"]
    assert process.changes() == (expected if order == "fp32_guard" else [])
    assert library.values["products"] == "mine"
