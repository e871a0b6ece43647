"""Libraries are asked, once and where their switches are set, whether these change anything on this device."""

from __future__ import annotations

import threading
import warnings
from typing import Any

import pytest

from lowprec.errors import LowprecWarning
from lowprec.modes import MathMode
from lowprec.policy import effects, fp32_guard, math_mode
from support.synthetic_library import Library

FULL = "float32 products on this CPU stay in full FP32"


class Asked(Library):
    """A library whose switch may have no effect."""

    def __init__(self) -> None:
        super().__init__("library")
        self.modes = (MathMode.FP32, MathMode.TF32, MathMode.BF16)
        self.answer: Any = FULL
        self.asked: list[str] = []

    def without_effect(self, mode: MathMode) -> Any:
        self.asked.append(self.values["products"])
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


@pytest.fixture
def library(register: Any, monkeypatch: pytest.MonkeyPatch) -> Asked:
    monkeypatch.setattr(effects, "known", {})
    monkeypatch.setattr(effects, "_reported", set())
    return register(made=Asked())


def said(mode: str) -> list[str]:
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        with math_mode(mode, frameworks=["library"]):
            pass
    assert all(w.category is LowprecWarning and w.filename == __file__ for w in warned)
    return [str(w.message) for w in warned]


def test_a_switch_without_effect_is_warned_of_once_and_in_every_report(library: Asked) -> None:
    text = f"changes nothing in library ({FULL})"
    assert said("bf16") == [f"math_mode('bf16', frameworks=['library']) {text}"]
    assert said("bf16") == []
    assert library.asked == ["bf16"]
    assert len(said("tf32")) == 1
    with math_mode("bf16", frameworks=["library"]) as mode:
        assert [row.reason for row in mode.report() if row.library == "library"] == [
            f"its switches belong to the process; {FULL}"
        ]
    assert library.asked == ["bf16", "tf32"]


def test_a_switch_with_effect_is_asked_once(library: Asked) -> None:
    library.answer = ""
    assert said("bf16") == said("bf16") == []
    assert library.asked == ["bf16"]


@pytest.mark.parametrize("answer", [None, RuntimeError("tracing")])
def test_unknown_answers_are_asked_again(library: Asked, answer: Any) -> None:
    library.answer = answer
    assert said("bf16") == []
    library.answer = FULL
    assert len(said("bf16")) == 1


def test_an_answer_while_another_thread_changes_the_switch_does_not_count(library: Asked) -> None:
    def interfere(mode: MathMode) -> str:
        library.values["products"] = "mine"
        return FULL

    library.without_effect = interfere  # type: ignore[method-assign]
    assert not any("changes nothing" in text for text in said("bf16"))
    assert effects.known.get(("library", MathMode.BF16)) is None


def test_another_thread_does_not_set_the_switches_while_they_are_read(library: Asked) -> None:
    """To read PyTorch's own values, some of its switches are changed for a moment."""

    def guarded() -> None:
        with fp32_guard():
            pass

    def reading() -> None:
        if library.calls.count("save") == 2:  # after the question
            library.while_saving = None
            thread.start()
            thread.join(0.2)
            during.append(library.calls.count("set_mode"))

    thread, during = threading.Thread(target=guarded), list[int]()
    library.while_saving = reading
    assert len(said("bf16")) == 1
    thread.join()
    assert during == [1]
    assert library.is_as_before


def test_processes_without_the_guard_are_left_alone(library: Asked) -> None:
    with fp32_guard(), math_mode("bf16"), math_mode("bf16", frameworks=["library"]):
        pass
    with math_mode("fp32", frameworks=["library"]), math_mode("bf16"):
        pass
    assert library.asked == []
