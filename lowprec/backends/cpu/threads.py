"""The number of threads of a product, from the process's CPUs and the settings of loaded libraries.

`LOWPREC_NUM_THREADS`, `OMP_NUM_THREADS`, `MKL_NUM_THREADS`, `OPENBLAS_NUM_THREADS`,
`threadpoolctl.threadpool_limits` and `torch.set_num_threads` apply to products of this backend.
"""

from __future__ import annotations

import ctypes
import io
import math
import os
import sys
import time
from collections.abc import Callable
from typing import Any

from lowprec.backends.cpu import library
from lowprec.policy import environment
from lowprec.util.per_thread import PerThread

_REFRESH_SECONDS = 1.0
_RTLD_NOLOAD = getattr(os, "RTLD_NOLOAD", 0)


def _read(path: str) -> str:
    """Return the text of a file of the system, empty if there is none."""
    try:
        with io.open(path, "rb") as file:  # noqa: UP020 - `open` is deleted during Python's exit
            return os.fsdecode(file.read())
    except OSError:
        return ""


def _cgroup_cpus() -> int:
    """The least CPU quota of this process's control group and of those around it (version 2), rounded up."""
    own = next(
        (line[3:] for line in _read("/proc/self/cgroup").splitlines() if line.startswith("0::")), ""
    )
    groups = own.strip("/").split("/")
    quotas = [sys.maxsize]
    for depth in range(len(groups) + 1):
        quota, _, period = (
            _read("/".join(["/sys/fs/cgroup", *groups[:depth], "cpu.max"])).strip().partition(" ")
        )
        if quota.isdigit() and period.isdigit():
            quotas.append(max(1, math.ceil(int(quota) / int(period))))
    return min(quotas)


def affinity() -> int:
    """Return the number of CPUs that the calling thread may run on, all if the system does not report it."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def loaded(path: str) -> ctypes.PyDLL | None:
    """Return a handle of a library that is already loaded; None otherwise, without loading it."""
    try:
        return ctypes.PyDLL(path, mode=_RTLD_NOLOAD | ctypes.DEFAULT_MODE) if _RTLD_NOLOAD else None
    except OSError:
        return None


def _mapped(name: str) -> set[str]:
    """Return the paths of files mapped into this process whose name contains ``name``."""
    lines = _read("/proc/self/maps").splitlines()
    return {line.split(maxsplit=5)[-1] for line in lines if name in line}


def openblas_paths() -> list[str]:
    """Return the paths of the OpenBLAS copies in this process, NumPy's first."""
    return sorted(_mapped("openblas"), key=lambda path: ("numpy" not in path, path))


def openblas_function(path: str, name: str) -> Any | None:
    """A function of an OpenBLAS in this process, by its name without the prefix and suffix of the build."""
    blas = loaded(path)
    variants = (f"{prefix}{name}{suffix}" for prefix in ("scipy_", "") for suffix in ("64_", ""))
    return next(
        (function for x in variants if (function := getattr(blas, x, None)) is not None), None
    )


def _openblas_getter() -> Callable[[], int] | None:
    for path in openblas_paths():
        getter = openblas_function(path, "openblas_get_num_threads")
        if getter is not None:
            getter.restype = ctypes.c_int
            return getter  # type: ignore[no-any-return]
    return None


def _torch_openmp() -> Callable[[], int] | None:
    """Let products run on the threads of PyTorch's OpenMP runtime, and return its ``omp_get_max_threads``.

    Return None if PyTorch is not loaded or has no such runtime.
    """
    path = next(iter(_mapped("/libtorch_cpu.so")), "") if "torch" in sys.modules else ""
    torch_cpu = loaded(path) if path else None
    # The handle of a library also finds the symbols of its dependencies.
    names = ("GOMP_parallel", "omp_in_parallel", "omp_get_max_threads")
    parallel, in_parallel, max_threads = (getattr(torch_cpu, name, None) for name in names)
    if not (parallel and in_parallel and max_threads):
        return None
    _use_openmp(parallel, in_parallel)
    return max_threads  # type: ignore[no-any-return]


def _use_openmp(parallel: Any, in_parallel: Any) -> None:
    kernels = library.library()
    if kernels is not None:
        kernels.use_openmp(parallel, in_parallel)


class _Limits:
    """The limits of `num_threads`, read once a second; other calls take half a microsecond."""

    def __init__(self) -> None:
        self.cpus = 1  # of the process
        #: The CPUs in the affinity mask of the calling thread.
        self.affinity = PerThread(cpus=1, expires=-math.inf)
        self.getter: Callable[[], int] | None = None
        self.openmp: Callable[[], int] | None = None  # threads of PyTorch's OpenMP runtime
        self.has_torch = False
        self.expires = -math.inf

    def refresh(self, now: float) -> None:
        by_workers = environment.THREADS.current() == "own"
        if self.getter is None:
            self.getter = _openblas_getter()
        self.cpus = min(_cgroup_cpus(), environment.thread_limit(of_blas=self.getter is None))
        self.has_torch = "torch" in sys.modules
        if by_workers and self.openmp is not None:
            _use_openmp(None, None)
        self.openmp = None if by_workers else self.openmp or _torch_openmp()
        self.expires = now + _REFRESH_SECONDS


_limits = _Limits()


def description() -> str:
    """Describe the threads that share products, for ``info()``."""
    return "lowprec's own workers" if _limits.openmp is None else "PyTorch's OpenMP threads"


def num_threads() -> int:
    """Return the number of threads that a product may use now, including the calling one.

    It is the minimum of the CPUs in the thread's affinity mask, the control group's quota, ``LOWPREC_NUM_THREADS``,
    ``MKL_NUM_THREADS``, and the threads of NumPy's OpenBLAS and of PyTorch. Without OpenBLAS, its variables are read.
    The threads of libraries are read at each product, the others once a second.
    """
    limits, mask = _limits, _limits.affinity
    now = time.monotonic()
    if now >= limits.expires or ("torch" in sys.modules) != limits.has_torch:
        limits.refresh(now)
    if now >= mask.expires:
        mask.cpus = affinity()
        mask.expires = now + _REFRESH_SECONDS
    cpus: int = min(limits.cpus, mask.cpus)
    if limits.getter is not None:
        cpus = min(cpus, limits.getter())
    if limits.openmp is not None:
        cpus = min(cpus, limits.openmp())
    return max(1, cpus)
