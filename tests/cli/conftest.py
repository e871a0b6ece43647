"""Running a command in this process, and ``.npy`` files to run it on."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from lowprec.cli import main
from lowprec.policy import environment


class Outcome(NamedTuple):
    code: int
    out: str
    err: str


@pytest.fixture(autouse=True)
def fresh_environment() -> Iterator[None]:
    """Let each test's variables act, and none survive it."""
    environment.refresh()
    yield
    environment.refresh()


@pytest.fixture(autouse=True)
def idle(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the machine be idle: the commands report a busy one."""
    monkeypatch.setattr(os, "getloadavg", lambda: (0.0, 0.0, 0.0), raising=False)


@pytest.fixture
def empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONPATH", raising=False)


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Callable[..., Outcome]:
    """Run ``lowprec`` with these words in this process."""

    def run(*words: object) -> Outcome:
        code = main([str(word) for word in words])
        return Outcome(code, *capsys.readouterr())

    return run


@pytest.fixture
def refused(command: Callable[..., Outcome]) -> Callable[..., str]:
    """Run a command that must be refused as a mistake of the user; return what it says."""

    def run(*words: object) -> str:
        code, out, err = command(*words)
        assert code == 2
        assert out == ""
        assert err.startswith("lowprec: ")
        assert err.endswith("\n")
        assert err.count("\n") == 1
        assert "Traceback" not in err
        return err

    return run


@pytest.fixture
def files(tmp_path: Path, rng: np.random.Generator) -> tuple[Path, Path]:
    """``A.npy`` (24, 40) and ``B.npy`` (40, 16), float32."""
    a, b = tmp_path / "A.npy", tmp_path / "B.npy"
    np.save(a, rng.standard_normal((24, 40), dtype=np.float32))
    np.save(b, rng.standard_normal((40, 16), dtype=np.float32))
    return a, b
