"""The CPU backend."""

from __future__ import annotations

from lowprec.backends.cpu.backend import (
    allocate,
    aside_dtype,
    copy,
    describe,
    prepare,
    ran,
    stopwatch,
    tune,
)
from lowprec.backends.cpu.device import capabilities

__all__ = [
    "allocate",
    "aside_dtype",
    "capabilities",
    "copy",
    "describe",
    "prepare",
    "ran",
    "stopwatch",
    "tune",
]
