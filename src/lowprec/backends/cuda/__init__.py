"""NVIDIA GPUs: the same plans, executed by cuBLASLt. Loaded with the first array in CUDA memory."""

from lowprec.backends.cuda.backend import (
    capabilities,
    copy,
    describe,
    execution_info,
    prepare,
    release_memory,
    reset,
    staging_dtype,
    stopwatch,
    temporary,
    tune,
)
from lowprec.backends.cuda.info import info

__all__ = [
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
    "temporary",
    "tune",
]
