"""Signal handlers that raise, multiply or fork in the middle of a product: no helper outlives it, nothing is lost."""

from __future__ import annotations

import ctypes
import gc
import sys
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lowprec.backends.cpu import buffers, casting, cpuinfo, openblas, team, threads
from lowprec.backends.cpu.packed.micro_kernels import AMX_BF16, unsupported_reason
from support import interrupts
from support.programs import posix, run_python

needs_openblas = pytest.mark.skipif(openblas.openblas() is None, reason="scipy-openblas64 is not installed")


class Slow:
    """Work that a helper is still busy with when the caller has long been done."""

    def __init__(self, seconds: float, *, meet: bool = False) -> None:
        self.caller = threading.get_ident()
        self.seconds = seconds
        self.meet = meet
        self.helped = threading.Event()
        self.inside: list[int] = []

    def __call__(self) -> None:
        if threading.get_ident() == self.caller:
            if self.meet:
                assert self.helped.wait(10), "no helper came"
            return
        self.inside.append(1)
        self.helped.set()
        time.sleep(self.seconds)
        self.inside.pop()


def a_helper_comes() -> bool:
    work = Slow(0, meet=True)
    team.call(work, 2)
    return work.helped.is_set()


needs_numba = pytest.mark.skipif(not casting.can_compile(), reason="numba is not installed, or switched off")


@pytest.fixture(autouse=True)
def _team_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Workers that another test has started may be more than these tests count on."""
    monkeypatch.setattr(team, "_team", None)


# -- no helper outlives the call ------------------------------------------------------------------


@needs_numba
@pytest.mark.parametrize("meet", [False, True], ids=["at once", "after a helper came"])
def test_an_exception_anywhere_waits_for_the_workers_and_loses_none(meet: bool) -> None:
    assert a_helper_comes()
    works: list[Slow] = []

    def call() -> None:
        works.append(Slow(0.002, meet=meet))
        team.call(works[-1], 2)

    def all_have_returned() -> None:
        assert not any(work.inside for work in works)

    assert interrupts.count(call, all_have_returned, interrupts.Interrupt) > 4
    assert not meet or any(work.helped.is_set() for work in works)
    assert a_helper_comes()
    assert team._own_team(2)._words[team.COUNT] == 1


@posix
@pytest.mark.parametrize("mode", ["fp32", "tf32", "bf16x6"])
def test_signals_at_any_time(mode: str) -> None:
    code = """
        import signal, sys
        import numpy as np
        import lowprec
        from lowprec.backends.cpu import threads

        class Interrupt(BaseException):
            pass

        def handler(*_):
            raise Interrupt

        threads.num_threads = lambda: 3
        rng, mode = np.random.default_rng(5), sys.argv[1]
        # Small whole numbers, of which every mode makes the same product.
        a, b = rng.integers(-4, 5, (2, 300, 300)).astype(np.float32)
        want = (a.astype(np.float64) @ b.astype(np.float64)).astype(np.float32)
        out = np.zeros_like(want)
        lowprec.matmul(a, b, math_mode=mode)  # imports and compiles
        signal.signal(signal.SIGALRM, handler)
        for delay in rng.uniform(1e-5, 3e-3, 80):
            try:
                signal.setitimer(signal.ITIMER_REAL, delay)
                while True:
                    lowprec.matmul(a, b, out=out, math_mode=mode)
            except Interrupt:
                pass
            out[...] = 7
            assert (lowprec.matmul(a, b, math_mode=mode) == want).all()
            assert (out == 7).all()
    """
    assert run_python(code, mode) == ""


# -- no worker is lost ----------------------------------------------------------------------------


@needs_numba
def test_where_no_thread_can_be_started_the_caller_works_alone() -> None:
    code = """
        import threading
        from lowprec.backends.cpu import numba_import, team
        assert not numba_import.fails()

        def both():
            who, came = set(), threading.Event()
            def work():
                who.add(threading.get_ident())
                came.set() if len(who) == 2 else came.wait(wait)
            team.call(work, 2)
            return len(who)

        threading.stack_size(1 << 46)  # more than any system gives
        wait = 0
        alone = both(), both()
        threading.stack_size(0)
        wait = 10
        print(alone, both())
    """
    assert run_python(code) == "(1, 1) 2"


@needs_numba
def test_at_the_end_of_the_interpreter_the_caller_works_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    assert a_helper_comes()
    monkeypatch.setattr(sys, "is_finalizing", lambda: True)
    seen: list[int] = []
    team.call(lambda: seen.append(threading.get_ident()), 4)
    assert seen == [threading.get_ident()]


@needs_numba
@posix
@pytest.mark.parametrize("when", ["before the caller begins", "while it works"])
def test_a_handler_that_forks_in_the_middle_of_a_product(when: str) -> None:
    """The child has no helper, and would wait for the rest of what one has begun forever."""
    code = """
        import os, signal, sys, threading, time
        import lowprec
        from lowprec.backends.cpu import numba_import, team
        assert not numba_import.fails()

        parent, main, came = os.getpid(), threading.get_ident(), threading.Event()
        children, early = [], sys.argv[1].startswith("before")
        signal.signal(signal.SIGUSR1, lambda *_: children.append(os.fork()))
        workers = team._own_team(2)
        offer = workers.offer

        def interrupted(*args):
            offer(*args)
            if early:
                signal.raise_signal(signal.SIGUSR1)

        def work():
            if threading.get_ident() != main:
                came.set()
                time.sleep(0.2)
            elif not early:
                assert came.wait(10)
                signal.raise_signal(signal.SIGUSR1)
            elif os.getpid() != parent:
                os._exit(1)

        workers.offer = interrupted
        try:
            team.call(work, 2)
        except lowprec.LowprecError as error:
            assert os.getpid() != parent and "forked" in str(error)
            early = True
            assert team._own_team(2) is not workers
            team.call(lambda: None, 2)
            os._exit(5)
        print(os.waitstatus_to_exitcode(os.waitpid(children[0], 0)[1]))
    """
    assert run_python(code, when) == "5"


# -- scratch memory -------------------------------------------------------------------------------


def retained_here() -> int:
    return sum(buffer.nbytes for buffer in buffers._free.buffers)


def test_buffers_interrupted_anywhere() -> None:
    buffers.release_all()
    others = buffers.retained_bytes()

    def call() -> None:
        with buffers.borrow(1 << 20):
            pass

    call()
    for _ in interrupts.interrupted(call):
        with buffers.borrow(1 << 20) as first, buffers.borrow(1 << 20) as second:
            assert abs(first - second) >= 1 << 20
        assert buffers.retained_bytes() - others == retained_here()
    buffers.release_all()
    assert buffers.retained_bytes() == others


# -- OpenBLAS is opened once ----------------------------------------------------------------------


@needs_openblas
@posix
def test_openblas_is_opened_once_by_threads_and_a_fork() -> None:
    """Several threads find one library; a fork waits, so that the child finds it, too, and the variables unchanged."""
    code = """
        import os, threading, time
        from lowprec.backends.cpu import openblas

        def inherited():
            return os.popen("echo $OPENBLAS_CORETYPE $OPENBLAS_NUM_THREADS").read()

        before, opened, inside = inherited(), openblas.ctypes.CDLL, threading.Event()
        def slow(*arguments, **keywords):
            if not keywords:
                inside.set()
                time.sleep(0.3)
            return opened(*arguments, **keywords)
        openblas.ctypes.CDLL = slow

        found, start = [], threading.Barrier(6)
        def ask():
            start.wait()
            found.append(openblas.openblas())
        asking = [threading.Thread(target=ask) for _ in range(6)]
        for thread in asking: thread.start()
        assert inside.wait(10)
        child = os.fork()
        if child == 0:
            as_before = inherited() == before
            os._exit(5 if as_before and openblas.openblas() is not None else 6)
        for thread in asking: thread.join()
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), inherited() == before)
        print(len(found), len(set(found)), None in found)
    """
    assert run_python(code) == "5 True\n6 1 False"


def expired_limits() -> int:
    threads._limits.expires = -1.0
    threads._limits.getter = None
    return threads.num_threads()


@pytest.mark.parametrize("error", [TimeoutError, ValueError, RuntimeError])
@pytest.mark.parametrize(
    "call",
    [
        pytest.param(openblas.openblas.__wrapped__, id="openblas"),
        pytest.param(casting.has_kernels.__wrapped__, id="casting"),
        pytest.param(lambda: unsupported_reason.__wrapped__(AMX_BF16), id="amx"),
        pytest.param(cpuinfo._cpuinfo.__wrapped__, id="cpuinfo"),
        pytest.param(expired_limits, id="threads", marks=pytest.mark.sweep),
        pytest.param(lambda: team.call(lambda: None, 3), id="team"),
    ],
)
@pytest.mark.sampled(3)
def test_exceptions_of_handlers_are_no_answers(call: Callable[[], Any], error: type[Exception]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # of files that an interrupt keeps from being closed
        for came in interrupts.interrupted(call, error, also=(ctypes.__file__,)):
            assert type(came) is error
        came = None
        gc.collect()


# -- locks ----------------------------------------------------------------------------------------


@posix
@pytest.mark.parametrize("delay_ms", [0, 5, 20, 50])
@pytest.mark.sampled(2)
def test_a_child_that_is_forked_while_other_threads_import(delay_ms: int) -> None:
    code = """
        import os, signal, sys, threading, time
        import numpy as np
        import lowprec

        a = np.ones((40, 40), np.float32)  # too small for OpenBLAS's threads, which a fork stops in the parent too
        def multiply():
            return lowprec.matmul(a, a, math_mode="bf16")
        threads = [threading.Thread(target=multiply) for _ in range(4)]
        for thread in threads: thread.start()
        time.sleep(float(sys.argv[1]) / 1000)
        child = os.fork()
        if child == 0:
            signal.alarm(60)
            os._exit(0 if (multiply() == 40).all() else 1)
        for thread in threads: thread.join()
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    """
    assert run_python(code, str(delay_ms)) == "0"


@posix
@pytest.mark.skipif(not casting.has_kernels(), reason="numba is not installed, or switched off")
def test_a_child_that_is_forked_while_another_thread_compiles(tmp_path: Path) -> None:
    code = """
        import os, signal, sys, threading, time
        os.environ["LOWPREC_CACHE_DIR"] = sys.argv[1]
        from lowprec.backends.cpu.packed import compilation, native

        make, inside = compilation._machine_code, threading.Event()
        def slow(*arguments):
            inside.set()
            time.sleep(0.3)
            return make(*arguments)
        compilation._machine_code = slow

        def double(x):
            return 2 * x
        def triple(x):
            return 3 * x
        def result(function):
            return native.compiled(function)(5)

        compiling = threading.Thread(target=result, args=(double,))
        compiling.start()
        assert inside.wait(10)
        child = os.fork()
        if child == 0:
            signal.alarm(30)
            os._exit(result(triple))
        compiling.join()
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), result(double), result(triple))
    """
    assert run_python(code, str(tmp_path)) == "15 10 15"


@posix
@pytest.mark.parametrize("what", ["q.T", "q._view", "plan.bound"])
def test_a_child_that_is_forked_while_another_thread_computes_a_property(what: str) -> None:
    code = """
        import os, signal, sys, threading, time
        import numpy as np
        import lowprec
        from lowprec.arrays import quantized
        from lowprec.planning import plan as planning

        def slowly(function):
            def call(*arguments, **keywords):
                if threading.current_thread() is not threading.main_thread():
                    inside.set()
                    time.sleep(0.3)
                return function(*arguments, **keywords)
            return call

        inside = threading.Event()
        for module, name in ((quantized, "_part_shapes"), (quantized, "codes_view"), (planning, "error_bound")):
            setattr(module, name, slowly(getattr(module, name)))
        q = lowprec.quantize(np.ones((32, 32), np.float32), "mxfp8")
        plan = lowprec.plan(q.codes.view("float8_e4m3fn"), q.codes.view("float8_e4m3fn"))
        thread = threading.Thread(target=eval, args=(sys.argv[1], globals()))
        thread.start()
        assert inside.wait(10)
        child = os.fork()
        if child == 0:
            signal.alarm(30)
            eval(sys.argv[1])
            os._exit(5)
        thread.join()
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    """
    assert run_python(code, what) == "5"


def test_a_subinterpreter_is_refused() -> None:
    code = """
        try:
            import _interpreters as interpreters
        except ImportError:
            import _xxsubinterpreters as interpreters
        script = "import warnings; warnings.simplefilter('ignore'); import lowprec"  # NumPy warns, too
        made = interpreters.create()
        try:
            found = interpreters.run_string(made, script)
        except RuntimeError as error:
            found = error
        interpreters.destroy(made)
        print("subinterpreter" in str(found))  # in some versions ml_dtypes refuses it first
    """
    assert run_python(code) == "True"
