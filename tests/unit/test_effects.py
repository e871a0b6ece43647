"""Libraries are asked, once and where their switches are set, whether these change anything on this device."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest

from lowprec.errors import LowprecWarning
from lowprec.modes import MathMode
from lowprec.policy import effects, fp32_guard, math_mode, register_controller
from lowprec.policy.controllers import unregister_controller

FULL = "float32 products on this CPU stay in full FP32"


class Library:
    """A library whose switch may do nothing."""

    name = module = "library"
    tier = "process"
    modes = (MathMode.FP32, MathMode.TF32, MathMode.BF16)

    def __init__(self) -> None:
        self.word = "highest"
        self.answer: Any = FULL
        self.asked: list[str] = []
        self.switches = {"word": "products"}

    def save(self) -> dict[str, str]:
        return {"word": self.word}

    def set_mode(self, mode: MathMode) -> dict[str, str]:
        self.word = mode.value
        return self.save()

    def restore(self, saved: Any) -> None:
        self.word = saved["word"]

    describe = save

    def without_effect(self, mode: MathMode) -> Any:
        self.asked.append(self.word)
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Iterator[Library]:
    monkeypatch.setitem(sys.modules, "library", ModuleType("library"))
    monkeypatch.setattr(effects, "_known", {})
    monkeypatch.setattr(effects, "_reported", set())
    made = Library()
    register_controller(made)
    yield made
    unregister_controller("library")


def said(mode: str) -> list[str]:
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        with math_mode(mode, frameworks=["library"]):
            pass
    assert all(w.category is LowprecWarning and w.filename == __file__ for w in told)
    return [str(w.message) for w in told]


def test_a_switch_without_effect_is_reported_once_and_reported_always(library: Library) -> None:
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


def test_a_switch_with_effect_is_asked_once(library: Library) -> None:
    library.answer = ""
    assert said("bf16") == said("bf16") == []
    assert library.asked == ["bf16"]


@pytest.mark.parametrize("answer", [None, RuntimeError("tracing")])
def test_unknown_answers_are_asked_again(library: Library, answer: Any) -> None:
    library.answer = answer
    assert said("bf16") == []
    library.answer = FULL
    assert len(said("bf16")) == 1


def test_an_answer_while_another_thread_changes_the_switch_does_not_count(library: Library) -> None:
    def interfere(mode: MathMode) -> str:
        library.word = "highest"
        return FULL

    library.without_effect = interfere  # type: ignore[method-assign]
    assert not any("changes nothing" in text for text in said("bf16"))
    assert effects.known("library", MathMode.BF16) is None


def test_processes_without_the_guard_are_left_alone(library: Library) -> None:
    with fp32_guard(), math_mode("bf16"), math_mode("bf16", frameworks=["library"]):
        pass
    with math_mode("fp32", frameworks=["library"]), math_mode("bf16"):
        pass
    assert library.asked == []
