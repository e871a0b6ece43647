"""Signal handlers that raise in the middle of a product, and forks next to first products."""

import pytest

from support.programs import posix, run_python


@posix
@pytest.mark.parametrize("mode", ["fp32", "tf32", "bf16x6"])
def test_signals_at_any_time(mode):
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


@posix
@pytest.mark.parametrize("delay_ms", [0, 5, 20, 50])
@pytest.mark.sampled(2)
def test_a_child_that_is_forked_while_other_threads_import(delay_ms):
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


@posix
@pytest.mark.parametrize("what", ["q.T", "q._view", "plan.bound"])
def test_a_child_that_is_forked_while_another_thread_computes_a_property(what):
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
        for module, name in ((quantized, "part_shapes"), (quantized, "codes_view"), (planning, "error_bound")):
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


def test_a_subinterpreter_is_refused():
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
