"""Compiled functions of the team: offer jobs to workers, wait for them, call a function for each row of a table.

A worker's mailbox contains 0 while it is idle, the address of an offered job, or that address plus 1 while it runs the
job. Importing this module imports numba.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from llvmlite import ir
from numba import types

from lowprec.backends.cpu import team as T
from lowprec.backends.cpu.packed.compilation import compile_kernel, inlined
from lowprec.backends.cpu.packed.native import (
    F32,
    F64,
    I32,
    I64,
    atomic_add,
    atomic_exchange,
    atomic_load,
    atomic_store,
    call,
    compiled,
    emitted,
    exchange_if,
    field,
    pause,
    pointer,
    store,
)

_WORKERS, _WORKER_BYTES, _ASLEEP = 8 * T.TEAM_WORDS, 8 * T.WORKER_WORDS, 8 * T.ASLEEP

#: Polls of a mailbox after which a waiting caller yields its CPU after each poll.
_PATIENCE = 4000


def enter(job):
    """Do a thread's share of a job; an OpenMP runtime calls it in each thread."""
    number = atomic_add(job + 8 * T.NEXT_THREAD, 1)
    scratch = field(job, T.SCRATCH) + number * field(job, T.SCRATCH_BYTES)
    call(field(job, T.FUNCTION), (field(job, T.ARGUMENT), scratch))
    return 0


def offer(job, team):
    """Put a job into the mailboxes of idle workers, and wake sleeping ones."""
    wanted = field(job, T.WORKERS) - 1
    for i in range(field(team, T.COUNT)):
        worker = team + _WORKERS + i * _WORKER_BYTES
        if wanted > 0 and exchange_if(worker, 0, job) != 0:
            wanted -= 1
            if atomic_exchange(worker + _ASLEEP, 0) != 0:
                call(field(team, T.POST), (field(worker, T.SEMAPHORE), 1, 0))
    return 0


def finish(job, team):
    """Withdraw a job from workers that have not begun, and wait for the others."""
    for i in range(field(team, T.COUNT)):
        worker = team + _WORKERS + i * _WORKER_BYTES
        exchange_if(worker, job, 0)
        looks = 0
        while atomic_load(worker) == job + 1:
            looks += 1
            if looks < _PATIENCE:
                pause()
            else:
                call(field(team, T.YIELD), (0,))
    return 0


_enter, _offer, _finish = (inlined(types.intp)(function) for function in (enter, offer, finish))


def run(job, team):
    """Run a job in this thread and in workers."""
    _offer(job, team)
    _enter(job)
    _finish(job, team)
    return 0


def serve(worker):
    """Run the jobs that arrive in a mailbox, until the process ends."""
    team = field(worker, T.TEAM)
    while field(team, T.LOOKS) > 0:
        looks, job = field(team, T.LOOKS), 0
        while looks > 0 and job == 0:
            job = atomic_load(worker)
            looks -= 1
            pause()
        if job == 0:
            atomic_exchange(worker + _ASLEEP, 1)
            # A job offered before is found here; later callers find that the worker sleeps.
            if atomic_add(worker, 0) == 0:
                call(field(team, T.WAIT), (field(worker, T.SEMAPHORE), -1))
            atomic_exchange(worker + _ASLEEP, 0)
            job = atomic_load(worker)
        if job != 0 and exchange_if(worker, job, job + 1) != 0:
            _enter(job)
            atomic_store(worker, 0)
    return 0


def look(count):
    """Poll ``count`` times as a worker does, to measure the time."""
    for _ in range(count):
        pause()
    return 0


_KERNELS: dict[str, Any] = {x.__name__: x for x in (enter, run, serve, look, offer, finish)}


@cache
def kernel(name: str) -> int:
    """Return the address of a function above."""
    return compile_kernel(_KERNELS[name])


@cache
def callable_kernel(name: str) -> Callable[..., int]:
    """Return a function above as a Python callable; the GIL is released while it runs."""
    return compiled(_KERNELS[name])


_BASES = {"a": T.A, "b": T.B, "c": T.C}


def _row_call(signature: str) -> Any:
    def call_row(builder, row, job, scratch):
        def word(base: Any, index: int) -> Any:
            at = builder.add(base, ir.Constant(I64, 8 * index))
            return builder.load(pointer(builder, at, I64), align=8)

        parameters = []
        for i, letter in enumerate(signature, 1):
            value = scratch if letter == "s" else word(row, i)
            if letter in _BASES:
                value = builder.add(value, word(job, _BASES[letter]))
            elif letter in "if":
                value = builder.trunc(value, I32)
            if letter in "fd":
                value = builder.bitcast(value, F32 if letter == "f" else F64)
            parameters.append(value)
        kind = ir.FunctionType(I64, [x.type for x in parameters])
        return builder.call(pointer(builder, word(row, 0), kind), parameters)

    call_row.__name__ = f"call_row {signature}"
    return emitted(types.intp)(call_row)


@cache
def rows_kernel(signature: str) -> int:
    """Return the address of the kernel that calls the function of each row of a table, for :func:`team.run_rows`.

    The first word of a row is the function's address, the others are its arguments by the letters of ``signature``: an
    int ``i``, a word ``l``, the bits of a float ``f`` or a double ``d``, an address relative to the first, second or
    third base ``a``, ``b``, ``c``; ``s`` passes the thread's scratch memory, and its word is ignored.
    """
    call_row, row_bytes = _row_call(signature), 8 * (len(signature) + 1)

    def rows(job, scratch):
        table, results = field(job, T.TABLE), field(job, T.RESULTS)
        while True:
            index = atomic_add(job + 8 * T.NEXT_ROW, 1)
            if index >= field(job, T.ROWS):
                break
            found = call_row(table + index * row_bytes, job, scratch)
            if results != 0:
                store(results + 8 * index, found, "i64")
        return 0

    return compile_kernel(rows)
