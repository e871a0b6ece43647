"""The threads that share a product: lowprec's own workers, or those of PyTorch's OpenMP runtime.

A worker is a Python thread that stays inside one compiled function: after each job it polls its mailbox for
`AWAKE_SECONDS`, then sleeps on a semaphore. A caller puts the address of a job into the mailboxes of idle workers, does
its own share, withdraws the job from workers that have not begun, and waits for the others. An awake worker begins
within a microsecond; a caller never waits for a sleeping one.

If PyTorch has been imported, compiled kernels run on the threads of its OpenMP runtime instead, which stay awake after
each operation of PyTorch and would compete with own workers for the CPUs. The runtime is not loaded for this. It is not
used inside a parallel region or in a forked child, where libgomp waits for threads that do not exist.
`LOWPREC_THREADS=own` selects own workers always.
"""

from __future__ import annotations

import _thread
import ctypes
import functools
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from lowprec.arrays.view import data_pointer
from lowprec.backends.cpu import numba_import, threads
from lowprec.backends.execution import imported
from lowprec.errors import BackendError
from lowprec.util.lock import locked

T = TypeVar("T")

#: Time for which a worker polls for the next job before it sleeps.
AWAKE_SECONDS = 150e-6

_KERNELS = "lowprec.backends.cpu.team_kernels"

# --- words of a job; each counter shared by threads has its own cache line ------------------------
NEXT_THREAD, NEXT_ROW = 0, 8
FUNCTION, ARGUMENT, SCRATCH, SCRATCH_BYTES, WORKERS, TABLE, ROWS, A, B, C, RESULTS = range(16, 27)
_Job = ctypes.c_int64 * 32

# --- words of a team, followed by those of each worker --------------------------------------------
COUNT, WAIT, POST, YIELD, LOOKS, TEAM_WORDS = 0, 1, 2, 3, 4, 8
MAILBOX, ASLEEP, SEMAPHORE, TEAM, _SEMAPHORE_MEMORY, WORKER_WORDS = 0, 8, 9, 10, 11, 16


def address_of(function: Any) -> int:
    """Return the address of a ctypes function."""
    # `ctypes.cast` would create a reference cycle.
    return ctypes.c_void_p.from_address(ctypes.addressof(function)).value or 0


def _semaphores(memory: Sequence[int]) -> tuple[list[int], list[int]]:
    """Return a semaphore for each piece of 32 bytes, and the functions that wait, post and yield the CPU."""
    if sys.platform == "win32":
        library: Any = ctypes.WinDLL("kernel32")
        library.CreateSemaphoreW.restype = ctypes.c_void_p
        made = [library.CreateSemaphoreW(None, 0, 1 << 30, None) for _ in memory]
        names = "WaitForSingleObject", "ReleaseSemaphore", "SwitchToThread"
    elif sys.platform == "darwin":
        library = ctypes.CDLL(None)
        library.dispatch_semaphore_create.restype = ctypes.c_void_p
        made = [library.dispatch_semaphore_create(ctypes.c_ssize_t(0)) for _ in memory]
        names = "dispatch_semaphore_wait", "dispatch_semaphore_signal", "sched_yield"
    else:
        library, made = ctypes.CDLL(None), list(memory)
        for address in memory:
            library.sem_init(ctypes.c_void_p(address), 0, 0)
        names = "sem_wait", "sem_post", "sched_yield"
    return made, [address_of(getattr(library, name)) for name in names]


def _kernel(kind: str, name: str) -> Any:
    return imported(f"{_KERNELS}:{kind}")(name)


class _Team:
    def __init__(self) -> None:
        kernel = functools.partial(_kernel, "callable_kernel")
        self.run: Callable[[int, int], int] = kernel("run")
        self.offer: Callable[[int, int], int] = kernel("offer")
        self.finish: Callable[[int, int], int] = kernel("finish")
        self._serve: Callable[[int], int] = kernel("serve")
        count = os.cpu_count() or 1
        memory: Any = (ctypes.c_int64 * (TEAM_WORDS * 2 + WORKER_WORDS * count))()
        # Never freed: workers read it until the process ends, also during Python's exit.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(memory))
        self.address = -(-ctypes.addressof(memory) // 64) * 64
        words: Any = (ctypes.c_int64 * (len(memory) - TEAM_WORDS)).from_address(self.address)
        self._words = words
        self._workers = [TEAM_WORDS + WORKER_WORDS * i for i in range(count)]
        made, functions = _semaphores([self.address + 8 * (at + _SEMAPHORE_MEMORY) for at in self._workers])
        for at, semaphore in zip(self._workers, made, strict=True):
            self._words[at + SEMAPHORE], self._words[at + TEAM] = semaphore, self.address
        self._words[WAIT : YIELD + 1] = functions
        self._words[LOOKS] = _looks(kernel("look"))

    def start(self, count: int) -> None:
        """Start workers until there are ``count``, or no more threads are available."""
        while self._words[COUNT] < min(count, len(self._workers)):
            at = self._workers[self._words[COUNT]]
            try:
                _thread.start_new_thread(self._serve, (self.address + 8 * at,))
            except RuntimeError:
                return
            self._words[COUNT] += 1

    def abandon(self) -> None:
        """Remove the workers, which do not exist in a forked child."""
        for at in self._workers:
            self._words[at + MAILBOX] = 0


def _looks(look: Callable[[int], int]) -> int:
    """Return how often a worker polls its mailbox in `AWAKE_SECONDS`."""
    seconds = []
    for _ in range(3):
        begin = time.perf_counter()
        look(2000)
        seconds.append(time.perf_counter() - begin)
    return max(100, int(2000 * AWAKE_SECONDS / min(seconds)))


_team: _Team | None = None
_is_child = False


def _after_fork_in_child() -> None:
    global _team, _is_child
    if _team is not None:
        _team.abandon()
    _team, _is_child = None, True


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)


def _own_team(workers: int) -> _Team:
    """Return the own workers, at least ``workers - 1`` if threads are available."""
    found = _team
    return locked(_started, workers) if found is None or found._words[COUNT] < workers - 1 else found


def _started(workers: int) -> _Team:
    global _team
    found = _team = _team or _Team()
    found.start(workers - 1)
    return found


class _Local(threading.local):
    #: Whether this thread runs its part of `call`; an OpenMP runtime would start more threads in it.
    is_sharing = False


_local = _Local()


def openmp() -> threads.OpenMP | None:
    """Return the OpenMP runtime whose threads run compiled kernels; None if own workers do."""
    return None if _is_child or _local.is_sharing else threads.openmp()


def is_sharing() -> bool:
    """Whether this thread runs its part of :func:`call`."""
    return _local.is_sharing


def description() -> str:
    """Describe the threads that share products, for ``info()``."""
    return "lowprec's own workers" if openmp() is None else "PyTorch's OpenMP threads"


#: Multiplications that take a BLAS as long as importing numba takes, about 0.1 s on one thread.
_IMPORT_PAYS = 1 << 32
_spent = 0


def is_ready(multiplications: int) -> bool:
    """Whether compiled kernels are ready to distribute a BLAS product of so many multiplications to threads.

    numba is imported for a product that takes longer than the import, and in the background once all products together
    have taken that long; until then the calling thread works alone.
    """
    global _spent
    if numba_import.is_ready():
        return True
    _spent += multiplications
    if multiplications >= _IMPORT_PAYS:
        return not numba_import.fails()
    if _spent >= _IMPORT_PAYS:
        numba_import.begin()
    return False


def run(kernel: int, argument: int, workers: int, scratch: int = 0, scratch_bytes: int = 0) -> None:
    """Call a compiled function in up to ``workers`` threads at once, the calling one included, and wait for all.

    Each thread calls ``kernel(argument, scratch)`` with its own ``scratch_bytes`` of the memory at ``scratch``. The
    kernel must divide the work among its callers, and a single call must be able to complete it.
    """
    job = _Job()
    job[FUNCTION : WORKERS + 1] = [kernel, argument, scratch, scratch_bytes, workers]
    _run(job, workers)


def run_rows(
    signature: str,
    table: Any,
    workers: int,
    *,
    bases: tuple[int, int, int] = (0, 0, 0),
    results: int = 0,
    scratch: int = 0,
    scratch_bytes: int = 0,
) -> None:
    """Call a function for each row of a table, distributed to threads.

    ``table`` is int64, shape (rows, 1 + len(signature)): in each row the address of a function and its arguments, by
    the ``signature`` of :func:`team_kernels.rows_kernel`. Arguments ``a``, ``b`` and ``c`` are relative to ``bases``;
    ``results`` is the address of one word per row for the results, 0 to ignore them.
    """
    job = _Job()
    job[FUNCTION : RESULTS + 1] = [
        _kernel("rows_kernel", signature), ctypes.addressof(job), scratch, scratch_bytes, workers,
        data_pointer(table), len(table), *bases, results,
    ]  # fmt: skip
    _run(job, workers)


def _run(job: Any, workers: int) -> None:
    address = ctypes.addressof(job)
    if workers <= 1 or sys.is_finalizing():
        _kernel("callable_kernel", "enter")(address)
        return
    runtime = openmp()
    if runtime is None:
        team = _own_team(workers)
        team.run(address, team.address)
    elif runtime.in_parallel():
        _kernel("callable_kernel", "enter")(address)
    else:
        runtime.parallel(_kernel("kernel", "enter"), address, workers, 0)


_CALLBACK = ctypes.CFUNCTYPE(ctypes.c_ssize_t, ctypes.c_ssize_t, ctypes.c_ssize_t)


def call(work: Callable[[], None], workers: int) -> None:
    """Call ``work()`` in this thread and in up to ``workers - 1`` own workers at once, and wait for all.

    `work` must divide the work among its callers, and a single call must be able to complete it. An exception of any
    caller is raised. Without compiled kernels this thread works alone.
    """
    if workers <= 1 or not numba_import.is_ready() or sys.is_finalizing():
        work()
        return
    errors: list[BaseException] = []

    def entered(argument: int, scratch: int) -> int:
        try:
            _local.is_sharing = True
            work()
        except BaseException as error:  # noqa: BLE001 - raised in the caller
            errors.append(error)
        return 0

    is_inner = _local.is_sharing
    team, job, callback = _own_team(workers), _Job(), _CALLBACK(entered)
    job[FUNCTION], job[WORKERS] = address_of(callback), workers
    address = ctypes.addressof(job)
    # No worker may outlive this call, even if a signal handler raises. Python handles signals at the start of a
    # function, at the end of a loop iteration and after a call, so not between the start of `finally` and the wait.
    try:
        team.offer(address, team.address)
        _local.is_sharing = True
        if team is _team:  # false if a signal handler has just forked
            work()
    finally:
        team.finish(address, team.address)
        _local.is_sharing = is_inner
    if team is not _team:
        raise BackendError(
            "a signal handler forked this process during a product, and the threads that computed parts of it do not "
            "exist in the child; multiply again"
        )
    if errors:
        raise errors.pop()


def share(run_one: Callable[[T], None], items: Sequence[T]) -> None:
    """Call `run_one` with each product of a batch: many are distributed to threads, few use all threads each."""
    workers = threads.num_threads() if len(items) > 1 else 1
    distribute(run_one, items, workers if len(items) >= 2 * workers else 1)


def distribute(run_one: Callable[[T], None], items: Sequence[T], workers: int) -> None:
    """Call `run_one` with each item, in up to ``workers`` threads."""
    queue = iter(items)

    def work() -> None:
        # `next` of a list iterator is atomic.
        for item in queue:
            run_one(item)

    call(work, min(workers, len(items)))
