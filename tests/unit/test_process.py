"""A mode or the guard for the rest of the process: what ``lowprec run`` sets when a library is imported."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest

from lowprec.modes import MathMode
from lowprec.policy import environment, fp32_guard, math_mode, process, register_controller
from lowprec.policy.controllers import unregister_controller
from lowprec.policy.protocol import Tier


class Library:
    """A library with one switch, which is its mode."""

    name = module = "library"
    modes = (MathMode.FP32, MathMode.TF32)
    switches = {"precision": "products"}  # noqa: RUF012 - as a user writes it

    def __init__(self, tier: Tier = Tier.PROCESS) -> None:
        self.tier = tier
        self.default = "its own"
        self.fails = False

    def save(self) -> dict[str, Any]:
        if self.fails:
            raise RuntimeError("no driver")
        return {"precision": self.default}

    def set_mode(self, mode: MathMode) -> dict[str, Any]:
        self.default = str(mode)
        return self.save()

    def restore(self, saved: dict[str, Any]) -> None:
        self.default = saved["precision"]

    describe = save


class ThreadLibrary(Library):
    """One whose switch belongs to the thread, with a default for all."""

    def __init__(self) -> None:
        super().__init__(Tier.THREAD)

    def set_default(self, mode: MathMode) -> dict[str, Any]:
        return self.set_mode(mode)


@pytest.fixture(autouse=True)
def _loaded(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setitem(sys.modules, "library", ModuleType("library"))
    monkeypatch.setattr(process, "_guarded", {})
    environment.refresh()
    yield
    unregister_controller("library")
    environment.refresh()


@pytest.fixture(params=[Library, ThreadLibrary])
def library(request: pytest.FixtureRequest) -> Library:
    made: Library = request.param()
    register_controller(made)
    return made


@pytest.mark.parametrize(("order", "precision"), [("tf32", "tf32"), ("fp32_guard", "fp32")])
def test_it_is_set_for_good(library: Library, order: str, precision: str) -> None:
    thread = threading.Thread(target=process.set_library, args=("library", order))
    thread.start()
    thread.join()
    assert library.default == precision
    assert process.changes() == []


def test_a_mode_without_a_switch_is_reported(library: Library) -> None:
    assert process.set_library("library", "bf16") == "library has no switch for bf16"
    assert library.default == "its own"


def test_exceptions_of_the_library_are_reported(library: Library) -> None:
    library.fails = True
    assert process.set_library("library", "tf32") == "RuntimeError: no driver"


def test_switches_of_a_thread_without_a_default_are_reported() -> None:
    register_controller(Library(Tier.THREAD))
    said = process.set_library("library", "tf32")
    assert said == "library's switches belong to the thread"


def test_a_mode_does_not_lower_inside_a_guard(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    # The library is imported inside the block, which has not seen it.
    module = sys.modules.pop("library")
    with fp32_guard():
        monkeypatch.setitem(sys.modules, "library", module)
        assert "nothing lowers it" in str(process.set_library("library", "tf32"))
        assert library.default == "its own"


def test_a_mode_does_not_lower_under_the_variable(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOWPREC_FP32_GUARD", "1")
    assert "nothing lowers it" in str(process.set_library("library", "tf32"))
    assert library.default == "its own"


def test_blocks_come_back_to_it() -> None:
    library = Library()
    register_controller(library)
    process.set_library("library", "tf32")
    with fp32_guard(frameworks=["library"]):
        assert library.default == "fp32"
    assert library.default == "tf32"


def test_no_block_goes_below_the_guard() -> None:
    library = Library()
    register_controller(library)
    process.set_library("library", "fp32_guard")
    with math_mode("tf32", frameworks=["library"]):
        assert library.default == "fp32"


def test_settings_of_the_program_under_the_guard_are_kept_and_reported(library: Library) -> None:
    process.set_library("library", "fp32_guard")
    library.default = "tf32"
    (said,) = process.changes()
    assert said == "library: precision = 'tf32' was set by the program, and is kept"
    library.fails = True
    (said,) = process.changes()
    assert said == "the switches of library cannot be read: RuntimeError: no driver"
    assert library.default == "tf32"


def test_what_the_program_sets_under_a_mode_is_its_own_affair(library: Library) -> None:
    process.set_library("library", "tf32")
    library.default = "its own"
    assert process.changes() == []
