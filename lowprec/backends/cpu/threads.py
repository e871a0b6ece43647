"""A small pool of worker threads, and how many of them to use.

The kernels of this backend are native code that releases the GIL and shares work among its callers by an atomic
counter: `run(work, workers)` calls `work()` in the calling thread and in up to `workers - 1` idle workers. A worker
that has not started when the caller is done is not waited for: it finds the job closed.

A worker is kept off the CPU that its caller runs on: a scheduler that sees one thread wake another likes to put the two
on one CPU (measured: in half of all products of 2 ms). There is no OpenMP in this: a second OpenMP runtime beside a
framework's would oversubscribe the machine, and its threads spin after each parallel region.

`num_threads` follows the CPUs that this process may use and the setting of the BLAS library in this process, so
`OMP_NUM_THREADS`, `MKL_NUM_THREADS`, `OPENBLAS_NUM_THREADS` and `threadpoolctl.threadpool_limits` act on this pool too.
"""

from __future__ import annotations

import _thread
import ctypes
import io
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Any, TypeVar

from lowprec.backends.cpu.gate import Gate, close
from lowprec.errors import BackendError
from lowprec.policy import environment
from lowprec.policy.interrupts import raised_in

T = TypeVar("T")

_REFRESH_SECONDS = 1.0
_RTLD_NOLOAD = getattr(os, "RTLD_NOLOAD", 0)

# --- the pool ---------------------------------------------------------------------------------


class _Job:
    """One `run`: the work, the gate that helpers pass to come to it, and what they raised."""

    __slots__ = ("errors", "gate", "work")

    def __init__(self, work: Callable[[], None], gate: Gate) -> None:
        self.work = work
        self.gate = gate
        self.errors: list[BaseException] = []


def _nothing() -> None:
    """The work of a job that is over."""


class _Worker:
    """A thread that waits for jobs at an inbox of its own."""

    __slots__ = ("_cpus", "_native_id", "idle", "inbox")

    def __init__(self, job: _Job) -> None:
        self.inbox: SimpleQueue[_Job] = SimpleQueue()
        self.inbox.put(job)
        # Written by the thread itself, which no signal interrupts, so it is never left wrong.
        self.idle = False
        self._native_id = 0
        self._cpus: frozenset[int] = frozenset()

    def hand(self, job: _Job, cpus: frozenset[int]) -> None:
        """Wake the thread for a job, on one of these CPUs (any, if empty)."""
        if cpus and cpus != self._cpus:
            self._move(cpus)
        self.inbox.put(job)

    def serve(self, workers: dict[int, _Worker], number: int, cpus: frozenset[int]) -> None:
        """Be the worker of this number, unless there is one."""
        if workers.setdefault(number, self) is not self:
            return
        self._native_id = threading.get_native_id()
        if cpus:
            self._move(cpus)
        while True:
            self._help(self.inbox.get())

    def _move(self, cpus: frozenset[int]) -> None:
        try:
            os.sched_setaffinity(self._native_id, cpus)
        except OSError as error:
            # It fails if the CPUs have changed; a second later the new ones are known.
            if not raised_in(error, __name__):
                raise
        self._cpus = cpus

    def _help(self, job: _Job) -> None:
        self.idle = False
        if not job.gate.enter():
            self.idle = True
            return
        try:
            job.work()
        except BaseException as error:  # noqa: BLE001 - handed to the caller, raised there
            job.errors.append(error)
        # Idle first: a caller that returns and calls again must find this worker.
        self.idle = True
        job.gate.leave()


#: Waits a moment for those inside a gate, in native code and awake; None where nothing was compiled.
_linger: Callable[[int], object] | None = None


def linger_by(wait: Callable[[int], object]) -> None:
    """Have a caller that has come to the end of its work wait so for its helpers, before it goes to sleep."""
    global _linger
    _linger = wait


class _Pool:
    """Workers by number. A job goes to those that are idle, low numbers first: these slept least."""

    def __init__(self) -> None:
        self.is_forked = False
        self._workers: dict[int, _Worker] = {}
        self._gates: list[Gate] = []

    def run(
        self, work: Callable[[], None], workers: int, own: Callable[[], object] | None = None
    ) -> None:
        try:
            gate = self._gates.pop()
        except IndexError:
            gate = Gate()
        job = _Job(work, gate)
        # No helper may outlive this call, whatever a signal handler raises. Python looks for signals where functions
        # begin, where loops go back and after calls, so none comes between the beginning of `finally` and the wait.
        try:
            self._offer(job, workers - 1)
            # In a child that a handler has just forked, the parts that helpers have begun are never completed.
            if not self.is_forked:
                (own or work)()
            if _linger is not None:
                _linger(gate.address)
        finally:
            if not self.is_forked:
                close(gate.address)
        if self.is_forked:
            raise BackendError(
                "a signal handler forked this process in the middle of a product, and the threads that computed parts "
                "of it are not here; multiply again"
            )
        # A helper that comes late holds the job a moment longer than its caller does. It must not be the last to hold
        # an operand: at the end of the process, Python may stop the thread in the middle of a C++ destructor.
        job.work = _nothing
        gate.reopen()
        self._gates.append(gate)
        if job.errors:
            raise job.errors.pop()

    def _offer(self, job: _Job, wanted: int) -> None:
        """Wake up to ``wanted`` helpers."""
        cpus = _limits.cpus_without_current()
        count = len(self._workers)
        waking = wanted
        for worker in tuple(self._workers.values()):
            if waking and worker.idle:
                worker.hand(job, cpus)
                waking -= 1
        # No more workers than that in all keeps concurrent callers from oversubscribing the machine.
        for number in range(count, wanted):
            try:
                _thread.start_new_thread(_Worker(job).serve, (self._workers, number, cpus))
            except RuntimeError as error:
                if not raised_in(error, __name__):
                    raise
                return  # the system has no thread to give; the next product asks again


_pool = _Pool()


def _after_fork_in_child() -> None:
    """Only the forking thread lives on in the child: begin with an empty pool."""
    global _pool, _limits
    _pool.is_forked = True
    _pool = _Pool()
    _limits = _Limits()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)


def run(work: Callable[[], None], workers: int, own: Callable[[], object] | None = None) -> None:
    """Call `work()` in this thread and in up to ``workers - 1`` pool threads at the same time.

    With ``own`` this thread calls that instead.

    Returns when every call that began has returned, or raises an exception of one of them. `work` must divide the work
    among its callers itself, and one call must be enough to complete all of it.
    """
    if workers <= 1 or sys.is_finalizing():
        (own or work)()
    else:
        _pool.run(work, workers, own)


def share(run_one: Callable[[T], None], items: Sequence[T]) -> None:
    """Call `run_one` with each item, the products of a batch; few items use all threads each, many are shared out."""
    workers = num_threads() if len(items) > 1 else 1
    if workers == 1 or len(items) < 2 * workers:
        for item in items:
            run_one(item)
        return
    queue = iter(items)

    def work() -> None:
        # Taking the next element of a list's iterator is atomic.
        for item in queue:
            run_one(item)

    run(work, workers)


# --- how many threads -------------------------------------------------------------------------


def _cgroup_cpus() -> int | None:
    """The CPU quota of this process's control group (version 2), rounded up; None if unlimited."""
    try:
        with io.open("/sys/fs/cgroup/cpu.max", "rb") as file:  # noqa: UP020 - `open` is gone while Python exits
            quota, period = file.read().split()
        return None if quota == b"max" else max(1, math.ceil(int(quota) / int(period)))
    except (OSError, ValueError) as error:
        if not raised_in(error, __name__):
            raise
        return None


def _affinity() -> frozenset[int]:
    """The CPUs that the calling thread may run on; empty if the system does not tell."""
    if not hasattr(os, "sched_getaffinity"):
        return frozenset()
    return frozenset(os.sched_getaffinity(0))


def cpu_limit() -> int:
    """CPUs that this thread may use: its affinity mask and its control group's quota."""
    cpus = len(_affinity()) or os.cpu_count() or 1
    quota = _cgroup_cpus()
    return cpus if quota is None else min(cpus, quota)


def _current_cpu_getter() -> Callable[[], int] | None:
    """``sched_getcpu`` of the C library."""
    try:
        return getattr(ctypes.PyDLL(None), "sched_getcpu", None)
    except (OSError, TypeError):
        return None


def _loaded(path: str) -> ctypes.PyDLL | None:
    """A handle on a library that is in the process already; nothing is ever loaded by this."""
    try:
        return ctypes.PyDLL(path, mode=_RTLD_NOLOAD | ctypes.DEFAULT_MODE) if _RTLD_NOLOAD else None
    except OSError as error:
        if not raised_in(error, "ctypes"):
            raise
        return None


#: Paths of libraries that serve this pool, and so say nothing of how many threads there should be.
_ignored: set[str] = set()


def ignore_library(path: str) -> None:
    """Do not ask this OpenBLAS how many threads to use."""
    _ignored.add(path)


def openblas_paths() -> list[str]:
    """Where the OpenBLAS copies in this process lie, NumPy's before others'; without those to be ignored."""
    try:
        with io.open("/proc/self/maps", "rb") as file:  # noqa: UP020 - as above
            lines = os.fsdecode(file.read()).splitlines()
    except OSError as error:
        if not raised_in(error, __name__):
            raise
        return []
    paths = {line.split(maxsplit=5)[-1] for line in lines if "openblas" in line} - _ignored
    return sorted(paths, key=lambda path: ("numpy" not in path, path))


def openblas_function(path: str, name: str) -> Any | None:
    """A function of a copy of OpenBLAS in this process, without the prefix and the suffix that it was built with."""
    library = _loaded(path)
    for prefix in ("scipy_", ""):
        for suffix in ("64_", ""):
            function = getattr(library, f"{prefix}{name}{suffix}", None) if library else None
            if function is not None:
                return function
    return None


def _openblas_getter() -> Callable[[], int] | None:
    """``openblas_get_num_threads`` of the OpenBLAS in this process, NumPy's before others'."""
    for path in openblas_paths():
        getter = openblas_function(path, "openblas_get_num_threads")
        if getter is not None:
            getter.restype = ctypes.c_int
            return getter  # type: ignore[no-any-return]
    return None


class _Affinity(threading.local):
    """The affinity mask of the calling thread, looked up once a second."""

    def __init__(self) -> None:
        self.mask: frozenset[int] = frozenset()
        self.without: dict[int, frozenset[int]] = {}  # the mask without a CPU
        self.cpus = 1
        self.expires = -math.inf

    def refresh(self, now: float) -> None:
        mask = _affinity()
        self.cpus = len(mask) or os.cpu_count() or 1
        if mask != self.mask:
            self.mask, self.without = mask, {}
        self.expires = now + _REFRESH_SECONDS


class _Limits:
    """The limits in `num_threads`, looked up once a second: a call in between costs half a microsecond."""

    def __init__(self) -> None:
        self.cpus = 1  # of the process
        self.affinity = _Affinity()
        self.current_cpu = _current_cpu_getter()
        self.getter: Callable[[], int] | None = None
        self.expires = -math.inf

    def refresh(self, now: float) -> None:
        self.cpus = min(_cgroup_cpus() or sys.maxsize, environment.thread_limit() or sys.maxsize)
        if self.getter is None:
            self.getter = _openblas_getter()
        self.expires = now + _REFRESH_SECONDS

    def cpus_without_current(self) -> frozenset[int]:
        """The affinity mask without the CPU of the caller; empty if that leaves none."""
        if self.current_cpu is None:
            return frozenset()
        own, now = self.affinity, time.monotonic()
        if now >= own.expires:
            own.refresh(now)
        current = self.current_cpu()
        others = own.without.get(current)
        if others is None:
            others = own.without[current] = own.mask - {current}
        return others


_limits = _Limits()


def num_threads() -> int:
    """How many threads a product may use now, the calling one included.

    The least of the CPUs in the calling thread's affinity mask, the control group's quota, ``MKL_NUM_THREADS`` and the
    threads of NumPy's OpenBLAS. All but the last are looked up once a second.
    """
    limits, own = _limits, _limits.affinity
    now = time.monotonic()
    if now >= limits.expires:
        limits.refresh(now)
    if now >= own.expires:
        own.refresh(now)
    cpus = min(limits.cpus, own.cpus)
    getter = limits.getter
    return cpus if getter is None else max(1, min(cpus, getter()))
