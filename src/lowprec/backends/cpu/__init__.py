"""The CPU backend."""

from __future__ import annotations

from lowprec.backends.cpu.backend import (
    allocate,
    copy,
    describe,
    execution_info,
    prepare,
    staging_dtype,
    stopwatch,
    tune,
)
from lowprec.backends.cpu.device import capabilities
from lowprec.backends.cpu.info import info

__all__ = [
    "allocate",
    "capabilities",
    "copy",
    "describe",
    "execution_info",
    "info",
    "prepare",
    "staging_dtype",
    "stopwatch",
    "tune",
]
