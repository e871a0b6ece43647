"""Threads in modes of their own, and memory over many calls: the short form of `benchmarks/stress.py`."""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from support.programs import posix

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def stress(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The script, imported without leaving its modules or its variable behind."""
    monkeypatch.setenv("OPENBLAS_THREAD_TIMEOUT", os.environ.get("OPENBLAS_THREAD_TIMEOUT", "4"))
    monkeypatch.syspath_prepend(BENCHMARKS)
    names = {path.stem for path in BENCHMARKS.glob("*.py")} - set(sys.modules)
    yield importlib.import_module("stress")
    for name in names & set(sys.modules):
        del sys.modules[name]


def test_inexact_operands_are_refused(stress: ModuleType, rng: np.random.Generator) -> None:
    with pytest.raises(ValueError, match="more than 1024 products"):
        stress.exact_operands(rng, 2, 1025, 2)


# -- the storm ------------------------------------------------------------------------------------


@posix
def test_violations_are_noticed(stress: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    this = stress.storm.Round(0, seconds=0)

    def swallow() -> None:
        with contextlib.suppress(BaseException):
            while this.armed is not None:
                time.sleep(0.001)

    def other() -> None:
        raise KeyError("not of a handler")

    def late() -> None:
        this.left_alone.append(np.zeros(3))
        monkeypatch.setattr(this, "multiply", lambda *_, **__: this.left_alone[0].fill(0))

    before = signal.signal(signal.SIGALRM, this.on_signal)
    try:
        while not this.failures:  # some handlers multiply instead, or raise before it begins
            this.interrupted(swallow, "in matmul")
        this.interrupted(other, "in matmul")
        this.interrupted(late, "in matmul")
    finally:
        signal.signal(signal.SIGALRM, before)
    assert [kind for kind, _ in this.failures] == ["lost", "error", "late"]
