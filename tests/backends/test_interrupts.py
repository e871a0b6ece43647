"""Signal handlers that raise in the middle of a product, and forks next to first products."""

from __future__ import annotations

import gc
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import numpy as np
import pytest

import lowprec
from lowprec.backends.cpu import threads
from support import interrupts
from support.programs import posix, run_python


@contextmanager
def raising(number: int) -> Iterator[None]:
    def handler(*_: object) -> None:
        raise interrupts.Interrupt("of a handler")

    before = signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, before)


def operands(n: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return small whole numbers, of which every mode makes the same product, and that product."""
    rng = np.random.default_rng(n)
    a, b = (rng.integers(-4, 5, (n, n)).astype(np.float32) for _ in range(2))
    return a, b, (a.astype(np.float64) @ b.astype(np.float64)).astype(np.float32)


@posix
@pytest.mark.parametrize("mode", ["fp32", "tf32", "bf16x6"])
def test_signals_at_any_time(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "num_threads", lambda: 3)
    a, b, want = operands(300)
    out = np.zeros_like(want)
    rng = np.random.default_rng(5)
    # Hypothesis has a callback of the garbage collector, in which Python ignores the exception of a signal handler.
    gc.disable()
    try:
        with raising(signal.SIGALRM):
            for delay in rng.uniform(1e-5, 3e-3, 80):
                with suppress(interrupts.Interrupt):
                    signal.setitimer(signal.ITIMER_REAL, delay)
                    while True:
                        lowprec.matmul(a, b, out=out, math_mode=mode)
                out[...] = 7
                np.testing.assert_array_equal(lowprec.matmul(a, b, math_mode=mode), want)
                assert (out == 7).all()
    finally:
        gc.enable()


@posix
@pytest.mark.parametrize("delay_ms", [0, 5, 20, 50])
@pytest.mark.sampled(2)
def test_a_child_that_is_forked_while_other_threads_import(delay_ms: int) -> None:
    code = """
        import os, signal, sys, threading, time
        import numpy as np
        import lowprec

        a = np.ones((40, 40), np.float32)  # too small for NumPy's threads, which a fork stops in the parent too
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


def test_a_subinterpreter_is_refused() -> None:
    code = """
        try:
            import _interpreters as interpreters
        except ImportError:
            import _xxsubinterpreters as interpreters
        script = "import warnings; warnings.simplefilter('ignore'); import lowprec"  # NumPy warns, too
        try:
            found = interpreters.run_string(interpreters.create(), script)
        except RuntimeError as error:
            found = error
        print("cannot be imported in a subinterpreter" in str(found))
    """
    assert run_python(code) == "True"
