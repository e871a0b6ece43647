"""NVIDIA GPUs: the same plans, executed by cuBLASLt. Loaded with the first array in CUDA memory."""

from lowprec.backends.cuda.backend import (
    allocate,
    capabilities,
    copy,
    describe,
    execution_info,
    prepare,
    release_memory,
    reset,
    staging_dtype,
    stopwatch,
    tune,
)
from lowprec.backends.cuda.info import info

__all__ = [
    "allocate",
    "capabilities",
    "copy",
    "describe",
    "execution_info",
    "info",
    "prepare",
    "release_memory",
    "reset",
    "staging_dtype",
    "stopwatch",
    "tune",
]
