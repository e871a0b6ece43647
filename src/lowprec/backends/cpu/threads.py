"""A small pool of worker threads, and how many of them to use.

The kernels of this backend are native code that releases the GIL and shares work among its callers
by an atomic counter. So all that is needed here is to have several threads make the same call:
`run(work, workers)` calls `work()` in the calling thread and, as far as idle workers exist, in up
to `workers - 1` others. No worker is waited for that has not started: if the caller alone came to
the end of the work first, the others find the job closed.

A helper is kept off the CPU that its caller runs on: a scheduler that sees one thread wake another
likes to put the two on one CPU, where the helper waits until the caller is done (measured: in half
of all products of 2 ms). Its affinity mask is the caller's without that one CPU, for every job.

There is no OpenMP in this: a second OpenMP runtime beside a framework's would oversubscribe the
machine, and its threads spin after each parallel region.

`num_threads` follows the CPUs that this process may use and what the BLAS library in this process
was told, so `OMP_NUM_THREADS`, `MKL_NUM_THREADS`, `OPENBLAS_NUM_THREADS` and
`threadpoolctl.threadpool_limits` act on this pool as well.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from queue import SimpleQueue
from typing import TypeVar

from lowprec.policy import environment

__all__ = ["cpu_limit", "num_threads", "run", "share"]

T = TypeVar("T")

_REFRESH_SECONDS = 1.0
_RTLD_NOLOAD = getattr(os, "RTLD_NOLOAD", 0)

# --- the pool ---------------------------------------------------------------------------------


class _Job:
    """One `run`: the work, a ticket per helper that may still start, and what came of them."""

    __slots__ = ("done", "errors", "tickets", "work")

    def __init__(self, work: Callable[[], None], helpers: int) -> None:
        self.work = work
        self.tickets = [None] * helpers
        self.errors: list[BaseException] = []
        self.done: SimpleQueue[None] = SimpleQueue()

    def close(self) -> int:
        """Withdraw the tickets that no helper has taken; return how many were withdrawn."""
        withdrawn = 0
        # `list.pop` is atomic: each ticket goes either to a helper or back to the caller.
        while True:
            try:
                self.tickets.pop()
            except IndexError:
                return withdrawn
            withdrawn += 1

    def empty(self) -> list[BaseException]:
        """Drop the work and return the errors, so that no helper is the last to hold an operand.

        A helper may keep the job itself a moment longer than its caller does. Freeing the caller's
        arrays there would abort the process if it is just about to end: Python then stops a thread
        wherever it next needs the interpreter, be it in the middle of a C++ destructor.
        """
        errors = self.errors
        self.work, self.errors = _nothing, []
        return errors


def _nothing() -> None:
    """The work of a job that is over."""


class _Worker:
    """A daemon thread that sleeps on a lock of its own until it is handed a job."""

    __slots__ = ("_cpus", "_idle", "_job", "_thread", "_wake")

    def __init__(self, idle: list[_Worker], number: int) -> None:
        self._idle = idle
        self._job: _Job | None = None
        self._cpus: frozenset[int] = frozenset()
        self._wake = threading.Lock()
        self._wake.acquire()
        name = f"lowprec-{number}"
        self._thread = threading.Thread(target=self._loop, name=name, daemon=True)
        self._thread.start()

    def hand(self, job: _Job, cpus: frozenset[int]) -> None:
        """Wake the thread for a job, on one of these CPUs (any, if empty)."""
        if cpus and cpus != self._cpus and self._thread.native_id is not None:
            # It fails if the CPUs have changed; a second later the new ones are known.
            with contextlib.suppress(OSError):
                os.sched_setaffinity(self._thread.native_id, cpus)
            self._cpus = cpus
        self._job = job
        self._wake.release()

    def _loop(self) -> None:
        while True:
            self._wake.acquire()
            job, self._job = self._job, None
            if job is not None:
                self._help(job)
            del job

    def _help(self, job: _Job) -> None:
        try:
            job.tickets.pop()
        except IndexError:
            self._idle.append(self)
            return
        try:
            job.work()
        except BaseException as error:  # noqa: BLE001 - handed to the caller, raised there
            job.errors.append(error)
        # Idle first: a caller that returns and calls again must find this worker.
        self._idle.append(self)
        job.done.put(None)


class _Pool:
    """Idle workers as a stack; the one that slept least is woken first."""

    def __init__(self) -> None:
        self._idle: list[_Worker] = []
        self._count = 0
        self._lock = threading.Lock()

    def _take(self, limit: int) -> _Worker | None:
        try:
            return self._idle.pop()
        except IndexError:
            pass
        with self._lock:
            if self._count >= limit:
                return None
            self._count += 1
            number = self._count
        return _Worker(self._idle, number)

    def run(self, work: Callable[[], None], workers: int) -> None:
        helpers = []
        # The limit on all workers keeps concurrent callers from oversubscribing the machine.
        for _ in range(workers - 1):
            worker = self._take(workers - 1)
            if worker is None:
                break
            helpers.append(worker)
        if not helpers:
            work()
            return
        job = _Job(work, len(helpers))
        cpus = _limits.cpus_without_current()
        for worker in helpers:
            worker.hand(job, cpus)
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - raised again once the helpers are done
            job.errors.append(error)
        started = len(helpers) - job.close()
        for _ in range(started):
            job.done.get()
        errors = job.empty()
        if errors:
            raise errors[0]


_pool = _Pool()


def _after_fork_in_child() -> None:
    """Only the forking thread lives on in the child: begin with an empty pool."""
    global _pool, _limits
    _pool = _Pool()
    _limits = _Limits()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)


def run(work: Callable[[], None], workers: int) -> None:
    """Call `work()` in this thread and in up to ``workers - 1`` pool threads at the same time.

    Returns when every call that began has returned. `work` must divide the work among its callers
    itself, and one call must be enough to complete all of it: how many helpers take part is not
    promised.

    Parameters
    ----------
    work : callable
        Takes no argument; its result is ignored.
    workers : int
        Largest number of threads, the calling one included.

    Raises
    ------
    BaseException
        Whatever `work` raised, after all calls have ended. If several did, one of them.
    """
    if workers <= 1:
        work()
    else:
        _pool.run(work, workers)


def share(run_one: Callable[[T], None], items: Sequence[T]) -> None:
    """Call `run_one` with each item, the products of a batch, in this thread or in several.

    With few items each is left all threads to itself; with many, threads take whole items, which
    saves the meeting at the end of each.
    """
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
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        return None if quota == "max" else max(1, math.ceil(int(quota) / int(period)))
    except (OSError, ValueError):
        return None


def _affinity() -> frozenset[int]:
    """The CPUs that the calling thread may run on; empty if the system does not tell."""
    try:
        return frozenset(os.sched_getaffinity(0))
    except (AttributeError, OSError):
        return frozenset()


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
    except OSError:
        return None


def _openblas_getter() -> Callable[[], int] | None:
    """``openblas_get_num_threads`` of the OpenBLAS in this process, NumPy's before others'."""
    try:
        lines = Path("/proc/self/maps").read_text().splitlines()
    except OSError:
        return None
    paths = {line.split(maxsplit=5)[-1] for line in lines if "openblas" in line}
    for path in sorted(paths, key=lambda path: ("numpy" not in path, path)):
        library = _loaded(path)
        for prefix in ("scipy_", ""):
            for suffix in ("64_", ""):
                name = f"{prefix}openblas_get_num_threads{suffix}"
                getter = getattr(library, name, None) if library else None
                if getter is not None:
                    getter.restype = ctypes.c_int
                    return getter  # type: ignore[no-any-return]
    return None


class _Limits:
    """What `num_threads` needs, looked up now and then: a call in between costs half a microsecond."""

    def __init__(self) -> None:
        self.cpus = 1
        self.affinity: frozenset[int] = frozenset()
        self.current_cpu = _current_cpu_getter()
        self._others: dict[int, frozenset[int]] = {}
        self.getter: Callable[[], int] | None = None
        self.expires = -math.inf

    def refresh(self, now: float) -> None:
        self.cpus = min(cpu_limit(), environment.thread_limit() or sys.maxsize)
        affinity = _affinity()
        if affinity != self.affinity:
            self.affinity, self._others = affinity, {}
        if self.getter is None:
            self.getter = _openblas_getter()
        self.expires = now + _REFRESH_SECONDS

    def cpus_without_current(self) -> frozenset[int]:
        """The affinity mask without the CPU of the caller; empty if that leaves none."""
        if self.current_cpu is None:
            return frozenset()
        current = self.current_cpu()
        others = self._others.get(current)
        if others is None:
            others = self._others[current] = self.affinity - {current}
        return others


_limits = _Limits()


def num_threads() -> int:
    """How many threads a product may use now, the calling one included.

    The least of the CPUs in the affinity mask, the control group's quota, ``MKL_NUM_THREADS`` and
    what NumPy's OpenBLAS would use. All but the last are looked up once a second.
    """
    limits = _limits
    now = time.monotonic()
    if now >= limits.expires:
        limits.refresh(now)
    getter = limits.getter
    return limits.cpus if getter is None else max(1, min(limits.cpus, getter()))
