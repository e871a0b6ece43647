"""The thread pool and the scratch memory."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import textwrap
import threading
import time
import weakref
from collections.abc import Callable

import numpy as np
import pytest
import threadpoolctl

from cpu_units import needs
from lowprec.backends.cpu import buffers, casting, threads
from lowprec.backends.cpu.gate import Gate, close
from lowprec.backends.cpu.packed.micro_kernels import AVX512_FP32


def spread(count: int, workers: int) -> tuple[list[int], set[int]]:
    """Take `count` numbers with several threads; return the numbers and the threads that took part."""
    numbers, taken, who = iter(range(count)), [], set()

    def work() -> None:
        who.add(threading.get_ident())
        for i in numbers:
            taken.append(i)
            time.sleep(0.0005)

    threads.run(work, workers)
    return taken, who


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_all_work_is_done_once(workers: int) -> None:
    taken, who = spread(200, workers)
    assert sorted(taken) == list(range(200))
    assert threading.get_ident() in who
    assert len(who) <= workers


def test_helpers_take_part() -> None:
    # A helper may come too late for one job, but not for twenty in a row of 50 ms each.
    assert any(len(spread(200, 2)[1]) == 2 for _ in range(20))


def test_one_worker_is_the_caller() -> None:
    seen: list[int] = []
    threads.run(lambda: seen.append(threading.get_ident()), 1)
    assert seen == [threading.get_ident()]


def test_an_exception_of_the_caller_is_raised_after_all_have_ended() -> None:
    running = []

    def work() -> None:
        if threading.current_thread() is caller:
            time.sleep(0.05)
            raise ValueError("of the caller")
        running.append(1)
        time.sleep(0.2)
        running.pop()

    caller = threading.current_thread()
    with pytest.raises(ValueError, match="of the caller"):
        threads.run(work, 2)
    assert running == []


def test_an_exception_of_a_helper_reaches_the_caller() -> None:
    caller, helped = threading.current_thread(), threading.Event()

    def work() -> None:
        if threading.current_thread() is caller:
            assert helped.wait(10), "no helper came"
            return
        helped.set()
        raise ValueError("of a helper")

    with pytest.raises(ValueError, match="of a helper"):
        threads.run(work, 2)
    # The helper is still there for the next job.
    assert sorted(spread(50, 2)[0]) == list(range(50))


def test_many_concurrent_callers() -> None:
    results: list[list[int]] = []
    callers = [threading.Thread(target=lambda: results.append(spread(40, 3)[0])) for _ in range(8)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert [sorted(taken) for taken in results] == [list(range(40))] * 8


def test_a_job_is_not_kept_alive() -> None:
    class Work:
        def __call__(self) -> None:
            time.sleep(0.01)

    alive: list[int] = []

    class Sentinel:
        def __del__(self) -> None:
            alive.pop()

    work = Work()
    work.sentinel = Sentinel()  # type: ignore[attr-defined]
    alive.append(1)
    threads.run(work, 2)
    del work
    deadline = time.monotonic() + 10
    while alive and time.monotonic() < deadline:
        gc.collect()
        time.sleep(0.01)
    assert alive == []


def run_python(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "ignore::DeprecationWarning", "-c", textwrap.dedent(code)],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.strip() + done.stderr.strip()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_the_pool_works_after_fork() -> None:
    code = """
        import os, threading, time
        from lowprec.backends.cpu import threads

        def both():
            who, came = set(), threading.Event()
            def work():
                who.add(threading.get_ident())
                came.set() if len(who) == 2 else came.wait(10)
            threads.run(work, 2)
            return len(who)

        assert both() == 2
        child = os.fork()
        if child == 0:
            os._exit(0 if both() == 2 else 3)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), both())
    """
    assert run_python(code) == "0 2"


def test_exit_is_quiet_while_workers_sleep_or_work() -> None:
    code = """
        import threading, time
        from lowprec.backends.cpu import threads
        threads.run(lambda: time.sleep(0.01), 3)
        threading.Thread(target=lambda: threads.run(lambda: time.sleep(0.5), 3), daemon=True).start()
        time.sleep(0.05)
        print("end")
    """
    assert run_python(code) == "end"


# --- how many threads -------------------------------------------------------------------------


def test_num_threads_is_within_the_machine() -> None:
    assert 1 <= threads.num_threads() <= threads.cpu_limit() <= (os.cpu_count() or 1)


def test_threadpoolctl_acts_on_it() -> None:
    if threads.num_threads() == 1:
        pytest.skip("this machine has a single CPU, so that there is nothing to limit")
    before = threads.num_threads()
    with threadpoolctl.threadpool_limits(1):
        assert threads.num_threads() == 1
    assert threads.num_threads() == before


@pytest.mark.skipif(threads.cpu_limit() < 2, reason="this machine has a single CPU")
def test_variables_of_blas_act_on_it() -> None:
    code = "import numpy; from lowprec.backends.cpu import threads; print(threads.num_threads())"
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], env=variables, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "1"


@pytest.mark.skipif(
    not hasattr(os, "sched_setaffinity"), reason="this system has no affinity masks"
)
def test_affinity_acts_on_it() -> None:
    code = """
        import os
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
        from lowprec.backends.cpu import threads
        done = []
        threads.run(lambda: done.append(1), 4)
        print(threads.num_threads(), bool(done))
    """
    assert run_python(code) == "1 True"


@pytest.mark.skipif(
    not hasattr(os, "sched_setaffinity") or threads.num_threads() < 2, reason="one CPU, or no masks"
)
@pytest.mark.parametrize("pinned_first", [True, False])
def test_the_affinity_is_the_calling_threads(
    pinned_first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pinned thread leaves others their CPUs, and has no helper outside its mask."""
    free = threads.num_threads()
    monkeypatch.setattr(threads, "_limits", threads._Limits())
    found: list[object] = []

    def pinned() -> None:
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
        found.extend((threads.num_threads(), threads._limits.cpus_without_current()))

    if not pinned_first:
        assert threads.num_threads() == free
    thread = threading.Thread(target=pinned)
    thread.start()
    thread.join()
    assert found == [1, frozenset()]
    assert threads.num_threads() == free
    assert threads._limits.cpus_without_current()


# --- scratch memory ---------------------------------------------------------------------------


def test_buffers_are_aligned_and_used_again() -> None:
    buffers.release_all()
    with buffers.borrow(1 << 20) as first, buffers.borrow(1 << 20) as second:
        assert first % 4096 == 0
        assert second % 4096 == 0
        assert abs(first - second) >= 1 << 20
    with buffers.borrow((1 << 20) - 100) as again:
        assert again in (first, second)
        # Both are free again, and still two.
        with buffers.borrow(1 << 20) as other:
            assert {again, other} == {first, second}


def test_buffers_return_when_the_block_raises() -> None:
    buffers.release_all()
    before = buffers.retained_bytes()
    with pytest.raises(KeyError, match="inside"), buffers.borrow(1 << 20):
        raise KeyError("inside")
    assert buffers.retained_bytes() >= before + (1 << 20)
    buffers.release_all()
    assert buffers.retained_bytes() == before


def test_retained_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    buffers.release_all()
    monkeypatch.setattr(buffers, "RETAINED_LIMIT_BYTES", buffers.retained_bytes() + (3 << 20))
    for nbytes in (1 << 20, 5 << 20, 1 << 20, 2 << 20, 300_000):
        with buffers.borrow(nbytes), buffers.borrow(nbytes):
            pass
        assert buffers.retained_bytes() <= buffers.RETAINED_LIMIT_BYTES
    buffers.release_all()


def test_a_small_request_does_not_take_a_large_buffer() -> None:
    buffers.release_all()
    with buffers.borrow(64 << 20) as large:
        pass
    with buffers.borrow(1 << 20) as small:
        assert small != large
    buffers.release_all()


def test_a_dead_thread_keeps_nothing() -> None:
    before = buffers.retained_bytes()

    def use() -> None:
        with buffers.borrow(8 << 20):
            pass

    thread = threading.Thread(target=use)
    thread.start()
    thread.join()
    gc.collect()
    assert buffers.retained_bytes() <= before


def test_contents_do_not_leak_between_borrowers() -> None:
    """Two borrowers at a time never share memory, also in many threads."""
    wrong: list[int] = []

    def use(value: int) -> None:
        for _ in range(50):
            with buffers.borrow(200_000) as address:
                view = np.ctypeslib.as_array(
                    (__import__("ctypes").c_uint8 * 200_000).from_address(address)
                )
                view[:] = value
                time.sleep(0)
                wrong.extend([value] if (view != value).any() else [])

    users = [threading.Thread(target=use, args=(i,)) for i in range(6)]
    for user in users:
        user.start()
    for user in users:
        user.join()
    assert wrong == []


def test_a_finished_job_holds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A helper may be slow to let go of its job; the operands must not be freed by it."""
    jobs: list[threads._Job] = []

    class Recorded(threads._Job):
        def __init__(self, work: Callable[[], None], helpers: int) -> None:
            super().__init__(work, helpers)
            jobs.append(self)

    monkeypatch.setattr(threads, "_Job", Recorded)
    operand = np.zeros(3)
    alive = weakref.ref(operand)

    def work(operand: np.ndarray = operand) -> None:
        if operand is None:
            raise ValueError

    threads.run(work, 2)
    del work, operand
    assert len(jobs) == 1
    assert alive() is None


@pytest.mark.parametrize("count", [0, 1, 3, 50])
def test_share_runs_each_item_once(count: int) -> None:
    seen: list[int] = []
    threads.share(seen.append, list(range(count)))
    assert sorted(seen) == list(range(count))


def test_share_raises_what_an_item_raised() -> None:
    def fail(item: int) -> None:
        if item == 30:
            raise ValueError("item 30")

    with pytest.raises(ValueError, match="item 30"):
        threads.share(fail, list(range(60)))


@pytest.mark.skipif(not casting.has_kernels(), reason="numba is not installed, or switched off")
def test_numbas_target_is_made_under_the_compilers_lock() -> None:
    """Made with a first function instead, it could wait for a thread that compiles, which waits for it."""
    code = (
        "from lowprec.backends.cpu.packed import native\n"
        "from numba.core.registry import cpu_target\n"
        "print('_toplevel_target_context' in vars(cpu_target))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True"]


# -- lingering ------------------------------------------------------------------------------------


@needs(AVX512_FP32)
def test_lingering_ends_and_leaves_the_gate_as_it_was() -> None:
    """With somebody inside it gives up, with nobody it neither closes the gate nor keeps others out."""
    from lowprec.backends.cpu.packed import lingering

    lingering.use()
    wait, gate = threads._linger, Gate()
    assert wait is not None
    for _ in range(3):
        assert gate.enter()
        wait(gate.address)
        gate.leave()
        wait(gate.address)
    close(gate.address)
    assert not gate.enter()
    gate.reopen()
    assert gate.enter()
    gate.leave()


@needs(AVX512_FP32)
def test_a_caller_lingers_after_its_work_and_not_after_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[str] = []
    monkeypatch.setattr(threads, "_linger", lambda gate: seen.append("lingered"))
    threads.run(lambda: seen.append("worked"), 2)
    assert seen[-1] == "lingered"
    assert seen.count("lingered") == 1

    def fail() -> None:
        raise ZeroDivisionError

    seen.clear()
    with pytest.raises(ZeroDivisionError):
        threads.run(fail, 2)
    assert not seen
