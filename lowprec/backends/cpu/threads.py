"""The number of threads of a product, from the process's CPUs and the settings of loaded libraries.

`OMP_NUM_THREADS`, `MKL_NUM_THREADS`, `OPENBLAS_NUM_THREADS`, `threadpoolctl.threadpool_limits` and
`torch.set_num_threads` apply to products of this backend too.
"""

from __future__ import annotations

import ctypes
import io
import math
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from lowprec.policy import environment, variables
from lowprec.policy.protocol import raised_in

_REFRESH_SECONDS = 1.0
_RTLD_NOLOAD = getattr(os, "RTLD_NOLOAD", 0)


def _cgroup_cpus() -> int | None:
    """The CPU quota of this process's control group (version 2), rounded up; None if unlimited."""
    try:
        with io.open("/sys/fs/cgroup/cpu.max", "rb") as file:  # noqa: UP020 - `open` is deleted during Python's exit
            quota, period = file.read().split()
        return None if quota == b"max" else max(1, math.ceil(int(quota) / int(period)))
    except (OSError, ValueError) as error:
        if not raised_in(error, __name__):
            raise
        return None


def affinity() -> int:
    """Return the number of CPUs that the calling thread may run on, all if the system does not report it."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def loaded(path: str) -> ctypes.PyDLL | None:
    """Return a handle of a library that is already loaded; None otherwise, without loading it."""
    try:
        return ctypes.PyDLL(path, mode=_RTLD_NOLOAD | ctypes.DEFAULT_MODE) if _RTLD_NOLOAD else None
    except OSError as error:
        if not raised_in(error, "ctypes"):
            raise
        return None


#: Paths of libraries whose number of threads is not a limit.
_ignored: set[str] = set()


def ignore_library(path: str) -> None:
    """Ignore the number of threads of this OpenBLAS."""
    _ignored.add(path)


def _mapped(name: str) -> set[str]:
    """Return the paths of files mapped into this process whose name contains ``name``."""
    try:
        with io.open("/proc/self/maps", "rb") as file:  # noqa: UP020 - as above
            lines = os.fsdecode(file.read()).splitlines()
    except OSError as error:
        if not raised_in(error, __name__):
            raise
        return set()
    return {line.split(maxsplit=5)[-1] for line in lines if name in line}


def openblas_paths() -> list[str]:
    """Return the paths of the OpenBLAS copies in this process, NumPy's first, without ignored ones."""
    return sorted(_mapped("openblas") - _ignored, key=lambda path: ("numpy" not in path, path))


def openblas_function(path: str, name: str) -> Any | None:
    """A function of an OpenBLAS in this process, by its name without the prefix and suffix of the build."""
    library = loaded(path)
    for prefix in ("scipy_", ""):
        for suffix in ("64_", ""):
            function = getattr(library, f"{prefix}{name}{suffix}", None) if library else None
            if function is not None:
                return function
    return None


def _openblas_getter() -> Callable[[], int] | None:
    """``openblas_get_num_threads`` of an OpenBLAS in this process, preferably NumPy's."""
    for path in openblas_paths():
        getter = openblas_function(path, "openblas_get_num_threads")
        if getter is not None:
            getter.restype = ctypes.c_int
            return getter  # type: ignore[no-any-return]
    return None


class OpenMP(NamedTuple):
    """Functions of an OpenMP runtime."""

    #: Calls a function in several threads; arguments: function, its argument, threads, flags.
    parallel: Callable[[int, int, int, int], None]
    in_parallel: Callable[[], int]
    max_threads: Callable[[], int]  # of the calling thread


def _torch_openmp() -> OpenMP | None:
    """Return PyTorch's OpenMP runtime; None if PyTorch is not loaded or has none."""
    path = next(iter(_mapped("/libtorch_cpu.so")), "") if "torch" in sys.modules else ""
    library = loaded(path) if path else None
    if library is None:
        return None
    try:
        # The handle of a library also finds the symbols of its dependencies.
        parallel = ctypes.CDLL(path, mode=_RTLD_NOLOAD | ctypes.DEFAULT_MODE).GOMP_parallel
        found = OpenMP(parallel, library.omp_in_parallel, library.omp_get_max_threads)
    except AttributeError:
        return None
    parallel.restype = None
    parallel.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
    return found


class _Affinity(threading.local):
    """The number of CPUs in the affinity mask of the calling thread, read once a second."""

    def __init__(self) -> None:
        self.cpus = 1
        self.expires = -math.inf

    def refresh(self, now: float) -> None:
        self.cpus = affinity()
        self.expires = now + _REFRESH_SECONDS


class _Limits:
    """The limits of `num_threads`, read once a second; other calls take half a microsecond."""

    def __init__(self) -> None:
        self.cpus = 1  # of the process
        self.affinity = _Affinity()
        self.getter: Callable[[], int] | None = None
        self.openmp: OpenMP | None = None
        self.has_torch = False
        self.expires = -math.inf

    def refresh(self, now: float) -> None:
        own = variables.THREADS.current() == "own"
        self.cpus = min(_cgroup_cpus() or sys.maxsize, environment.thread_limit() or sys.maxsize)
        if self.getter is None:
            self.getter = _openblas_getter()
        self.has_torch = "torch" in sys.modules
        self.openmp = None if own else self.openmp or _torch_openmp()
        self.expires = now + _REFRESH_SECONDS


_limits = _Limits()


def openmp() -> OpenMP | None:
    """Return PyTorch's OpenMP runtime as found by the last `num_threads`; None with ``LOWPREC_THREADS=own``."""
    return _limits.openmp


def num_threads() -> int:
    """Return the number of threads that a product may use now, including the calling one.

    It is the minimum of the CPUs in the thread's affinity mask, the control group's quota, ``MKL_NUM_THREADS``, and the
    threads of NumPy's OpenBLAS and of PyTorch. The first three are read once a second.
    """
    limits, own = _limits, _limits.affinity
    now = time.monotonic()
    if now >= limits.expires or ("torch" in sys.modules) != limits.has_torch:
        limits.refresh(now)
    if now >= own.expires:
        own.refresh(now)
    cpus = min(limits.cpus, own.cpus)
    if limits.getter is not None:
        cpus = min(cpus, limits.getter())
    if limits.openmp is not None:
        cpus = min(cpus, limits.openmp.max_threads())
    return max(1, cpus)
