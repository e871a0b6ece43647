"""NVIDIA GPUs: the same plans, executed by cuBLASLt. Loaded with the first array in CUDA memory."""

from lowprec.backends.cuda.backend import (
    allocate,
    aside_dtype,
    capabilities,
    copy,
    describe,
    prepare,
    ran,
    reset,
    stopwatch,
    tune,
)
from lowprec.backends.cuda.info import info

__all__ = [
    "allocate",
    "aside_dtype",
    "capabilities",
    "copy",
    "describe",
    "info",
    "prepare",
    "ran",
    "reset",
    "stopwatch",
    "tune",
]
