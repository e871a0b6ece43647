"""The CPU backend."""

from __future__ import annotations

from lowprec.backends.cpu.backend import (
    copy,
    describe,
    execution_info,
    prepare,
    release_memory,
    staging_dtype,
    stopwatch,
    temporary,
    tune,
)
from lowprec.backends.cpu.device import capabilities
from lowprec.backends.cpu.info import info

__all__ = [
    "capabilities",
    "copy",
    "describe",
    "execution_info",
    "info",
    "prepare",
    "release_memory",
    "staging_dtype",
    "stopwatch",
    "temporary",
    "tune",
]
