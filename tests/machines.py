"""Machines to pretend to be."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from lowprec import prepared
from lowprec.backends import cpu
from lowprec.planning import Capabilities

#: Those on which a test that is parametrised by machine runs.
MACHINES = ("this machine", "NumPy alone")


@contextmanager
def on(machine: str) -> Iterator[None]:
    """Run on one of the machines."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        if machine == "NumPy alone":
            numpy_alone(monkeypatch)
        yield


def numpy_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plan from now on as on a machine that has NumPy and nothing else."""
    plain = Capabilities("cpu", "a machine with NumPy alone")
    monkeypatch.setattr(cpu, "capabilities", lambda device: plain)
    # Calls are remembered without the capabilities, which do not change while a process lives.
    monkeypatch.setattr(prepared, "_prepared", {})
