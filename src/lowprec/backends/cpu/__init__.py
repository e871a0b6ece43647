"""The CPU backend."""

from __future__ import annotations

from lowprec.backends.cpu.backend import allocate, copy, describe, prepare, ran, stopwatch, tune
from lowprec.backends.cpu.device import capabilities

__all__ = ["allocate", "capabilities", "copy", "describe", "prepare", "ran", "stopwatch", "tune"]
