"""The threads that share a product: lowprec's own workers, or those of the OpenMP runtime that PyTorch uses.

A worker is a Python thread that stays inside one compiled function: after each job it polls its mailbox for
`AWAKE_SECONDS`, then it sleeps on a semaphore. A caller puts the address of a job into the mailboxes of idle workers,
does its own share, takes the job back from workers that have not begun, and waits for the others. A worker that is
awake begins within a microsecond; a caller never waits for one that is asleep.

In a process that has imported PyTorch, compiled kernels run on the threads of its OpenMP runtime, which stay awake
after each operation of PyTorch and would compete with own workers for the CPUs. No runtime is loaded for this. It is
not used in a forked child, where libgomp waits for threads that do not exist, nor inside a parallel region.
`LOWPREC_THREADS=own` selects own workers everywhere.
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
from lowprec.util import forking

T = TypeVar("T")

#: How long a worker looks for the next job before it sleeps.
AWAKE_SECONDS = 150e-6

_KERNELS = "lowprec.backends.cpu.team_kernels"

# --- words of a job; the counters that threads share are on cache lines of their own --------------
NEXT_THREAD, NEXT_ROW = 0, 8
FUNCTION, ARGUMENT, SCRATCH, SCRATCH_BYTES, WORKERS, TABLE, ROWS, A, B, C, RESULTS = range(16, 27)
_Job = ctypes.c_int64 * 32

# --- words of a team, and of each of its workers, which follow ------------------------------------
COUNT, WAIT, POST, YIELD, LOOKS, TEAM_WORDS = 0, 1, 2, 3, 4, 8
MAILBOX, ASLEEP, SEMAPHORE, TEAM, _SEMAPHORE_MEMORY, WORKER_WORDS = 0, 8, 9, 10, 11, 16


def address_of(function: Any) -> int:
    """Return the address of a function of ctypes."""
    # `ctypes.cast` would make a cycle of references.
    return ctypes.c_void_p.from_address(ctypes.addressof(function)).value or 0


def _semaphores(memory: Sequence[int]) -> tuple[list[int], list[int]]:
    """Return semaphores, one for each piece of 32 bytes; and the functions that wait, post and yield the CPU."""
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
        # Workers look at it for as long as the process lives, also while Python ends.
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
        """Start workers until there are so many, or the system has no thread to give."""
        while self._words[COUNT] < min(count, len(self._workers)):
            at = self._workers[self._words[COUNT]]
            try:
                _thread.start_new_thread(self._serve, (self.address + 8 * at,))
            except RuntimeError:
                return
            self._words[COUNT] += 1

    def abandon(self) -> None:
        """Have a caller in a forked child wait for no worker of its parent."""
        for at in self._workers:
            self._words[at + MAILBOX] = 0


def _looks(look: Callable[[int], int]) -> int:
    """Return how often a worker looks at its mailbox in `AWAKE_SECONDS`."""
    seconds = []
    for _ in range(3):
        begin = time.perf_counter()
        look(2000)
        seconds.append(time.perf_counter() - begin)
    return max(100, int(2000 * AWAKE_SECONDS / min(seconds)))


_team: _Team | None = None
_starting = threading.RLock()
forking.register_lock(_starting)
_is_child = False


def _after_fork_in_child() -> None:
    global _team, _is_child
    if _team is not None:
        _team.abandon()
    _team, _is_child = None, True


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork_in_child)


def _own_team(workers: int) -> _Team:
    """Return the own workers, of which at least ``workers - 1`` are there if the system has threads to give."""
    global _team
    found = _team
    if found is None or found._words[COUNT] < workers - 1:
        with _starting:
            found = _team = _team or _Team()
            found.start(workers - 1)
    return found


class _Local(threading.local):
    #: Whether this thread runs its part of `call`: an OpenMP runtime would start more threads for it.
    is_sharing = False


_local = _Local()


def openmp() -> threads.OpenMP | None:
    """Return the OpenMP runtime whose threads run compiled kernels; None where the own workers do."""
    return None if _is_child or _local.is_sharing else threads.openmp()


def is_sharing() -> bool:
    """Whether this thread runs its part of :func:`call`."""
    return _local.is_sharing


def description() -> str:
    """Return which threads share products, for ``info()``."""
    return "lowprec's own workers" if openmp() is None else "PyTorch's OpenMP threads"


#: Multiplications that take a library as long as numba's import takes, some 0.1 s on one thread.
_IMPORT_PAYS = 1 << 32
_spent = 0


def is_ready(multiplications: int) -> bool:
    """Whether compiled kernels can share a library's product of so many multiplications.

    Numba is imported for a product that takes longer than the import, and in the background once products together have
    taken that long; until then the calling thread works alone.
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

    ``kernel(argument, scratch)`` is called with a piece of ``scratch_bytes`` of its own in each thread, from the
    address ``scratch`` on. It must divide the work among its callers, and one call must be enough to complete it.
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
    """Call a function for each row of a table, shared among threads.

    ``table`` holds int64 (rows, 1 + len(signature)): in each row the address of a function and its arguments, as
    :func:`team_kernels.rows_kernel` reads the ``signature``. ``bases`` are addresses to which arguments ``a``, ``b``
    and ``c`` are relative; ``results`` is the address of a word for the result of each row, 0 to ignore them.
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

    `work` must divide the work among its callers, and one call must be enough to complete it. An exception of any
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
    # No worker may outlive this call, whatever a signal handler raises. Python looks for signals where functions begin,
    # where loops go back and after calls, so none comes between the beginning of `finally` and the wait.
    try:
        team.offer(address, team.address)
        _local.is_sharing = True
        if team is _team:  # a handler has not just forked
            work()
    finally:
        team.finish(address, team.address)
        _local.is_sharing = is_inner
    if team is not _team:
        raise BackendError(
            "a signal handler forked this process in the middle of a product, and the threads that computed parts of "
            "it are not here; multiply again"
        )
    if errors:
        raise errors.pop()


def share(run_one: Callable[[T], None], items: Sequence[T]) -> None:
    """Call `run_one` with each item, the products of a batch; few items use all threads each, many are shared out."""
    workers = threads.num_threads() if len(items) > 1 else 1
    if workers == 1 or len(items) < 2 * workers:
        for item in items:
            run_one(item)
        return
    queue = iter(items)

    def work() -> None:
        # Taking the next element of a list's iterator is atomic.
        for item in queue:
            run_one(item)

    call(work, workers)
