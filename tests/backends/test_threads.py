"""The team of threads, how many of them there are, and the scratch memory."""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import time
import weakref

import numpy as np
import pytest
import threadpoolctl

from lowprec.arrays.view import data_pointer
from lowprec.backends.cpu import buffers, casting, openblas, team, threads
from support.programs import in_threads, run_python

needs_numba = pytest.mark.skipif(not casting.can_compile(), reason="numba is not installed, or switched off")


def spread(count: int, workers: int) -> tuple[list[int], set[int]]:
    """Take `count` numbers with several threads; return the numbers and the threads that took part."""
    numbers, taken, who = iter(range(count)), [], set()

    def work() -> None:
        who.add(threading.get_ident())
        for i in numbers:
            taken.append(i)
            time.sleep(0.0005)

    team.call(work, workers)
    return taken, who


@pytest.mark.parametrize("workers", [1, 2, 4])
def test_all_work_is_done_once(workers: int) -> None:
    taken, who = spread(200, workers)
    assert sorted(taken) == list(range(200))
    assert threading.get_ident() in who
    assert len(who) <= workers


@needs_numba
def test_workers_take_part() -> None:
    # A worker may come too late for one job, but not for twenty in a row of 50 ms each.
    assert any(len(spread(200, 2)[1]) == 2 for _ in range(20))


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
        team.call(work, 2)
    assert running == []


@needs_numba
def test_an_exception_of_a_worker_reaches_the_caller() -> None:
    caller, came = threading.current_thread(), threading.Event()

    def work() -> None:
        if threading.current_thread() is caller:
            assert came.wait(10), "no worker came"
            return
        came.set()
        raise ValueError("of a worker")

    with pytest.raises(ValueError, match="of a worker"):
        team.call(work, 2)
    # The worker is still there for the next job.
    assert sorted(spread(50, 2)[0]) == list(range(50))


def test_many_concurrent_callers() -> None:
    results = in_threads(8, lambda _: spread(40, 3)[0])
    assert [sorted(taken) for taken in results] == [list(range(40))] * 8


@needs_numba
@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_the_team_works_after_fork() -> None:
    code = """
        import os, threading, time
        from lowprec.backends.cpu import numba_import, team
        assert not numba_import.fails()

        def both():
            who, came = set(), threading.Event()
            def work():
                who.add(threading.get_ident())
                came.set() if len(who) == 2 else came.wait(10)
            team.call(work, 2)
            return len(who)

        assert both() == 2
        child = os.fork()
        if child == 0:
            os._exit(0 if both() == 2 else 3)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), both())
    """
    assert run_python(code) == "0 2"


@needs_numba
def test_exit_is_quiet_while_workers_sleep_or_work() -> None:
    code = """
        import threading, time
        from lowprec.backends.cpu import numba_import, team
        numba_import.fails()
        team.call(lambda: time.sleep(0.01), 3)
        threading.Thread(target=lambda: team.call(lambda: time.sleep(0.5), 3), daemon=True).start()
        time.sleep(0.05)
        print("end")
    """
    assert run_python(code) == "end"


# --- how many threads -------------------------------------------------------------------------


def test_threadpoolctl_acts_on_it() -> None:
    if threads.num_threads() == 1:
        pytest.skip("this machine has a single CPU, so that there is nothing to limit")
    before = threads.num_threads()
    with threadpoolctl.threadpool_limits(1):
        assert threads.num_threads() == 1
    assert threads.num_threads() == before


@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="this machine has a single CPU")
def test_variables_of_blas_act_on_it() -> None:
    code = "import numpy; from lowprec.backends.cpu import threads; print(threads.num_threads())"
    assert run_python(code, OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1") == "1"


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity") or threads.num_threads() < 2, reason="one CPU, or no masks")
@pytest.mark.parametrize("pinned_first", [True, False])
def test_the_affinity_is_the_calling_threads(pinned_first: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pinned thread works alone and leaves others their CPUs."""
    free = threads.num_threads()
    monkeypatch.setattr(threads, "_limits", threads._Limits())
    found: list[object] = []

    def pinned() -> None:
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
        found.append(threads.num_threads())

    if not pinned_first:
        assert threads.num_threads() == free
    thread = threading.Thread(target=pinned)
    thread.start()
    thread.join()
    assert found == [1]
    assert threads.num_threads() == free


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


def test_contents_do_not_leak_between_borrowers() -> None:
    """Two borrowers at a time never share memory, also in many threads."""

    def use(value: int) -> None:
        for _ in range(50):
            with buffers.borrow(200_000) as address:
                view = np.ctypeslib.as_array((ctypes.c_uint8 * 200_000).from_address(address))
                view[:] = value
                time.sleep(0)
                assert (view == value).all()

    in_threads(6, use)


def test_a_finished_job_holds_nothing() -> None:
    """An operand must not be freed by a worker that lets go of it late."""
    operand = np.zeros(3)
    alive = weakref.ref(operand)

    def work(operand: np.ndarray = operand) -> None:
        if operand is None:
            raise ValueError

    team.call(work, 2)
    del work, operand
    assert alive() is None


@pytest.mark.parametrize("count", [0, 1, 3, 50])
def test_share_runs_each_item_once(count: int) -> None:
    seen: list[int] = []
    team.share(seen.append, list(range(count)))
    assert sorted(seen) == list(range(count))


def test_share_raises_the_error_of_an_item() -> None:
    def fail(item: int) -> None:
        if item == 30:
            raise ValueError("item 30")

    with pytest.raises(ValueError, match="item 30"):
        team.share(fail, list(range(60)))


# --- compiled kernels -------------------------------------------------------------------------


def triple_address() -> int:
    """Return the address of a compiled function that multiplies an integer by three."""
    from lowprec.backends.cpu.packed.compilation import compile_kernel

    def triple(x: int, scratch: int) -> int:
        return 3 * x

    return compile_kernel(triple)


@needs_numba
@pytest.mark.parametrize("workers", [1, 2, 5])
@pytest.mark.parametrize("rows", [0, 1, 7, 400])
def test_each_row_is_called_once(rows: int, workers: int) -> None:
    table = np.empty((rows, 3), np.int64)
    table[:] = triple_address(), 0, 0
    table[:, 1] = np.arange(rows)
    results = np.full(rows, -1)
    team.run_rows(
        "as", table, workers, bases=(1000, 0, 0),
        results=data_pointer(results), scratch=data_pointer(results), scratch_bytes=0,
    )  # fmt: skip
    np.testing.assert_array_equal(results, 3 * (1000 + np.arange(rows)))


@needs_numba
def test_many_callers_share_compiled_rows() -> None:
    """Thousands of short jobs of several callers: none is lost, run twice or left in a mailbox."""
    table = np.empty((9, 3), np.int64)
    table[:] = triple_address(), 0, 0
    table[:, 1] = np.arange(9)

    def call(number: int) -> None:
        results = np.empty(9, np.int64)
        for i in range(3000):
            results[:] = -1
            base = number * 10_000 + i
            team.run_rows("al", table, 3, bases=(base, 0, 0), results=data_pointer(results))
            np.testing.assert_array_equal(results, 3 * (base + np.arange(9)))

    in_threads(5, call)


@needs_numba
def test_an_idle_process_uses_no_cpu_time() -> None:
    """Workers look for jobs for some 150 us; a fiftieth of the time is left to other threads of this process."""
    code = """
        import time
        import numpy as np
        import lowprec
        a = np.ones((512, 512), np.float32)
        for _ in range(50):
            lowprec.matmul(a, a, math_mode="bf16")
            lowprec.matmul(a, a)
        time.sleep(0.01)
        before = time.process_time()
        time.sleep(0.5)
        print(time.process_time() - before < 0.01)
    """
    assert run_python(code) == "True"


@needs_numba
def test_numba_is_imported_in_the_background() -> None:
    """Products that need no kernel begin without it; the first ones are worth its import together."""
    code = """
        import sys, time
        import numpy as np
        import lowprec
        from lowprec.backends.cpu import openblas
        a = np.ones((256, 256), np.float32)
        want = lowprec.matmul(a, a)
        assert "numba" not in sys.modules or openblas.openblas() is None
        deadline = time.monotonic() + 30
        while "lowprec.backends.cpu.team_kernels" not in sys.modules and time.monotonic() < deadline:
            assert np.array_equal(lowprec.matmul(a, a), want)
        print("numba" in sys.modules)
    """
    if openblas.openblas() is None:
        pytest.skip("scipy-openblas64 is not installed")
    assert run_python(code, OMP_NUM_THREADS="2", OPENBLAS_NUM_THREADS="2") == "True"


# --- PyTorch's threads ------------------------------------------------------------------------

needs_openmp = pytest.mark.skipif(sys.platform != "linux" or threads.num_threads() < 2, reason="one CPU, or not Linux")


@needs_numba
@needs_openmp
def test_products_run_on_the_threads_of_pytorch() -> None:
    """With the same bits as before; not in a forked child, and not with LOWPREC_THREADS=own."""
    pytest.importorskip("torch", reason="torch is not installed")
    code = """
        import os
        import numpy as np
        import lowprec
        from lowprec.backends.cpu import team, threads
        a = np.random.default_rng(1).standard_normal((512, 512), np.float32)
        b = np.arange(600 * 600, dtype=np.float64).reshape(600, 600) % 7
        modes = ("fp32", "tf32", "bf16", "bf16x6")
        before = [lowprec.matmul(a, a, math_mode=mode) for mode in modes]
        def same():
            return all(np.array_equal(lowprec.matmul(a, a, math_mode=m), x) for m, x in zip(modes, before))
        import torch
        torch.ones(600, 600) @ torch.ones(600, 600)
        assert same() and np.array_equal(lowprec.matmul(b, b), b.astype(int) @ b.astype(int))
        torch.set_num_threads(1)
        print(team.openmp() is not None, team.description(), threads.num_threads())
        child = os.fork()
        if child == 0:
            os._exit(0 if same() and team.openmp() is None else 3)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        torch.set_num_threads(2)
        os.environ["LOWPREC_THREADS"], threads._limits = "own", threads._Limits()
        print(same(), team.openmp() is not None, team.description())
    """
    found = run_python(code).split("\n")
    assert found[:2] == ["True PyTorch's OpenMP threads 1", "0"]
    assert found[2].startswith("True False lowprec's own workers")


@needs_numba
def test_an_illegal_choice_of_threads_is_an_error() -> None:
    code = """
        import os
        import numpy as np
        import lowprec
        from lowprec.backends.cpu import threads
        for value in ("two", "OWN", "1"):
            os.environ["LOWPREC_THREADS"], threads._limits = value, threads._Limits()
            lowprec.info()
            try:
                lowprec.matmul(np.ones((300, 300)), np.ones((300, 300)))
            except lowprec.EnvironmentVariableError as error:
                print(error)
    """
    lines = run_python(code).splitlines()
    for value, line in zip(("two", "OWN", "1"), lines, strict=True):
        assert f"LOWPREC_THREADS must be one of own, openmp, got '{value}'" in line
