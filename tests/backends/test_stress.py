"""Threads in modes of their own, and memory over many calls: the short form of `benchmarks/stress.py`."""

import numpy as np
import pytest

from support import benchmark_modules
from support.benchmark_modules import BENCHMARKS
from support.programs import posix, run_python


@pytest.fixture
def stress():
    with benchmark_modules.imports() as load:
        yield load("stress")


@pytest.mark.parametrize("shape", [(8, 16, 8), (33, 17, 20), (160, 96, 80)])
def test_modes_have_different_results(stress, shape):
    modes = ("fp32", "tf32", "bf16", "fp16")
    jobs = [stress.job(np.random.default_rng(0), shape, mode) for mode in modes]
    assert all(np.array_equal(job.a, jobs[0].a) for job in jobs)
    assert len({job.expected.tobytes() for job in jobs}) == len(modes)


# -- the storm ------------------------------------------------------------------------------------


@posix
def test_violations_are_noticed():
    code = """
        import contextlib, signal, time
        import numpy as np
        import stress

        this = stress.Round(0, seconds=0)

        def swallow(*given, **more):
            with contextlib.suppress(BaseException):
                while this.armed is not None:
                    time.sleep(0.001)

        def other(*given, out=False):
            if out:
                raise KeyError("not of a handler")

        def late(*given, out=False):
            if out:
                this.left_alone.append(np.zeros(3))
            else:
                this.left_alone[0].fill(0)

        signal.signal(signal.SIGALRM, this.on_signal)
        for failures, this.multiply in enumerate((swallow, other, late)):
            while len(this.failures) == failures:  # some handlers multiply instead, or raise before it begins
                this.interrupted()
        print(*(kind for kind, _ in this.failures))
    """
    assert run_python(code, PYTHONPATH=str(BENCHMARKS)) == "lost error late"
