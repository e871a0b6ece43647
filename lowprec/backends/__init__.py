"""Execution of plans on CPUs and NVIDIA GPUs."""

from __future__ import annotations

from lowprec.backends.interface import AlgorithmTiming, Arguments, Backend, Executor
from lowprec.backends.registry import backend_of, is_out_of_memory, predicted, release_memory
