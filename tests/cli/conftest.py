"""Running a command in this process, and ``.npy`` files to run it on."""

import os
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
def fresh_environment():
    """Let each test's variables act, and none survive it."""
    environment.refresh()
    yield
    environment.refresh()


@pytest.fixture(autouse=True)
def idle(monkeypatch):
    """Let the machine be idle: the commands report a busy one."""
    monkeypatch.setattr(os, "getloadavg", lambda: (0.0, 0.0, 0.0), raising=False)


@pytest.fixture
def empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONPATH", raising=False)


@pytest.fixture
def command(capsys):
    """Run ``lowprec`` with these words in this process."""

    def run(*words):
        code = main([str(word) for word in words])
        return Outcome(code, *capsys.readouterr())

    return run


@pytest.fixture
def refused(command):
    """Run a command that must be refused as a mistake of the user; return what it says."""

    def run(*words):
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
def files(tmp_path, rng):
    """``A.npy`` (24, 40) and ``B.npy`` (40, 16), float32."""
    a, b = tmp_path / "A.npy", tmp_path / "B.npy"
    np.save(a, rng.standard_normal((24, 40), dtype=np.float32))
    np.save(b, rng.standard_normal((40, 16), dtype=np.float32))
    return a, b
