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

import lowprec
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


def test_a_mode_from_other_places_is_noticed(stress: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    class Ignored(lowprec.math_mode):
        def __init__(self, name: str) -> None:
            super().__init__("tf32")

    monkeypatch.setattr(lowprec, "math_mode", Ignored)
    result = stress.run_threads(calls=6)
    others = sum(mode != "tf32" for mode in result["modes"])
    assert result["wrong"] == 6 * others


@pytest.mark.parametrize("shape", [(8, 16, 8), (33, 17, 20), (5, 1024, 6)])
def test_operands_have_one_right_result(
    stress: ModuleType, rng: np.random.Generator, shape: tuple[int, int, int]
) -> None:
    a, b = stress.exact_operands(rng, *shape)
    for mode in sys.modules["exact"].ROUNDINGS:
        forward = stress.reference(a, b, mode)
        backward = stress.reference(a[:, ::-1], b[::-1], mode)
        assert forward.tobytes() == backward.tobytes()
        # Exact in float64, and float32 holds it: nothing was rounded on the way.
        rounded = sys.modules["exact"].ROUNDINGS[mode](a).astype(np.float64) @ b.astype(np.float64)
        assert (rounded == forward).all()


def test_inexact_operands_are_refused(stress: ModuleType, rng: np.random.Generator) -> None:
    with pytest.raises(ValueError, match="more than 1024 products"):
        stress.exact_operands(rng, 2, 1025, 2)


# -- the storm ------------------------------------------------------------------------------------


@posix
@pytest.mark.parametrize(("program", "kind"), [("os.abort()", "crash"), ("time.sleep(60)", "hang"), ("", "crash")])
def test_a_round_that_does_not_end_well_is_noticed(
    stress: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, program: str, kind: str
) -> None:
    script = tmp_path / "round.py"
    script.write_text(f"import os, time\n{program}\n")
    monkeypatch.setattr(stress.storm, "__file__", str(script))
    monkeypatch.setattr(stress.storm, "GRACE_SECONDS", 1.0 if kind == "hang" else 60.0)
    result = stress.storm.run(seconds=0.01)
    assert result["rounds"] >= 1
    assert result["failures"] == dict.fromkeys(stress.storm.FAILURES, 0) | {kind: result["rounds"]}
    assert [claim["met"] for claim in stress.storm.claims(result)].count(False) == 1


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
