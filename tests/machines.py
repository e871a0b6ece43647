"""Machines to pretend to be."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

import software_tiles
from lowprec import prepared
from lowprec.backends import cpu
from lowprec.backends.cpu import amx
from lowprec.planning import Capabilities

#: Those on which a test that is parametrised by machine runs.
MACHINES = ("this machine", "NumPy alone")

#: One that takes every product to the tile kernels, which NumPy stands in for.
SOFTWARE_TILES = "tile units in software"


@contextmanager
def on(machine: str) -> Iterator[None]:
    """Run on one of the machines."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        if machine == "NumPy alone":
            numpy_alone(monkeypatch)
        if machine == SOFTWARE_TILES:
            able = Capabilities(
                "cpu", SOFTWARE_TILES, amx_bf16=True, amx_int8=True, numba=True,
                amx_minimum_elements=0, amx_complex_minimum_elements=0,
            )  # fmt: skip
            monkeypatch.setattr(amx, "gemm", software_tiles.gemm)
            _pretend(monkeypatch, able)
        yield


def numpy_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plan from now on as on a machine that has NumPy and nothing else."""
    _pretend(monkeypatch, Capabilities("cpu", "a machine with NumPy alone"))


def _pretend(monkeypatch: pytest.MonkeyPatch, able: Capabilities) -> None:
    monkeypatch.setattr(cpu, "capabilities", lambda device: able)
    # Calls are remembered without the capabilities, which do not change while a process lives.
    monkeypatch.setattr(prepared, "_prepared", {})
