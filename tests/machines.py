"""Machines to pretend to be."""

from __future__ import annotations

import pytest

from lowprec import dispatch
from lowprec.backends.cpu import device
from lowprec.planning import Capabilities


def numpy_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plan from now on as on a machine that has NumPy and nothing else."""
    plain = Capabilities("cpu", "a machine with NumPy alone")
    monkeypatch.setattr(device, "_capabilities", lambda: plain)
    # Its keys do not hold the capabilities, which are those of the process.
    monkeypatch.setattr(dispatch, "_prepared", {})
