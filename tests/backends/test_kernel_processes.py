"""First products that are interrupted, in forked children or short of memory; forks next to other threads.

No process hangs, no later product raises, and no number is wrong.
"""

import sys

import pytest

from lowprec.backends.cpu import library
from support.programs import posix, run_python

needs_kernels = pytest.mark.skipif(library.library() is None, reason="lowprec has no kernels")

#: Functions of the programs: products of small integers, which are exact in every mode, and children with a deadline.
_COMMON = """
import faulthandler, os, random, signal, sys, threading, traceback
import ml_dtypes
import numpy as np
import numpy.random  # not by the threads, during a fork
import lowprec

MODES = ("fp32", "tf32", "bf16", "fp16", "bf16x3", "bf16x9", "tf32x3", "fp16x3", "fp16_karatsuba", "int8", "bfloat16")

def product(rng):
    # A product, and its result.
    mode, n = rng.choice(MODES), rng.choice((8, 33, 130, 200))
    numbers = np.random.default_rng(rng.randrange(1 << 30))
    a, b = (numbers.integers(-4, 5, (n, n)).astype(np.float32) for _ in range(2))
    want = a.astype(np.int64) @ b.astype(np.int64)  # not by NumPy's BLAS, which a fork may stop
    if mode in ("int8", "bfloat16"):
        a, b = (x.astype(np.int8 if mode == "int8" else ml_dtypes.bfloat16) for x in (a, b))
        given = {} if mode == "int8" else {"out_dtype": "float32"}
    else:
        given = {"math_mode": mode, "activation": rng.choice((None, "relu"))}
        want = np.maximum(want, 0) if given["activation"] else want
    return (lambda: lowprec.matmul(a, b, **given)), want

def check(rng):
    multiply, want = product(rng)
    for _ in range(2):
        assert np.array_equal(multiply(), want), "a wrong number"

def check_in_two_threads(rng):
    failures = []
    def work():
        try:
            check(random.Random(seed))
        except BaseException:
            failures.append(traceback.format_exc())
    seed = rng.random()
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    check(rng)
    thread.join(60)
    assert not thread.is_alive(), "the other thread hangs"
    assert not failures, failures[0]

def interrupted(rng, longest):
    # Products into which a signal handler raises, once each. CPython may make another exception of it.
    # The handler of a signal may run after the product, and after the timer is stopped.
    error, came, is_expected = rng.choice((KeyboardInterrupt, TimeoutError)), [], []
    def handler(*_):
        if is_expected:
            came.append(1)
            raise error("of a handler")
    signal.signal(signal.SIGALRM, handler)
    if rng.random() < 0.3:
        threading.Thread(target=product(random.Random(rng.random()))[0], daemon=True).start()
    for _ in range(3):
        multiply, want = product(rng)
        found = None
        came.clear()
        try:
            is_expected.append(1)
            signal.setitimer(signal.ITIMER_REAL, longest * rng.random() ** 3 + 1e-5)
            found = multiply()
            is_expected.clear()
        except BaseException:
            if not came:
                raise
        is_expected.clear()
        assert found is None or np.array_equal(found, want), "a wrong number"
    signal.signal(signal.SIGALRM, signal.SIG_IGN)

def child_of(work, *arguments):
    # Fork a child; return a function that waits for it and returns what went wrong, with tracebacks if it hangs.
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        status = 3
        try:
            faulthandler.dump_traceback_later(60, exit=True, file=writing)
            work(*arguments)
            status = 0
        except BaseException:
            os.write(writing, traceback.format_exc().encode()[-3000:])
        finally:
            os._exit(status)
    os.close(writing)
    def finished():
        with open(reading, "rb") as file:
            said = file.read().decode()
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        return said or (f"a child ended with {code}" if code else "")
    return finished
"""

_FRESH = (
    _COMMON
    + """
rng = random.Random(sys.argv[1])
interrupted(rng, float(sys.argv[2]))
check_in_two_threads(rng)
print("right")
"""
)

_FORKED = (
    _COMMON
    + """
def work(seed):
    rng = random.Random(seed)
    interrupted(rng, float(sys.argv[2]))
    check_in_two_threads(rng)

failures = []
for seed in range(int(sys.argv[1])):
    finished = child_of(work, seed)
    failures.append(finished())
print("\\n".join(sorted(filter(None, failures))) or "right")
"""
)

_FORKED_FROM_THREADS = (
    _COMMON
    + """
stop, failures = threading.Event(), []
def multiply(seed):
    rng = random.Random(seed)
    while not stop.is_set():
        try:
            check(rng)
        except BaseException:
            failures.append(traceback.format_exc())
def fork(seed):
    for number in range(int(sys.argv[1])):
        finished = child_of(check_in_two_threads, random.Random(seed + number))
        failures.append(finished())
multiplying = [threading.Thread(target=multiply, args=(i,)) for i in range(2)]
forking = [threading.Thread(target=fork, args=(1000 * i,)) for i in range(2)]
for thread in multiplying + forking: thread.start()
for thread in forking: thread.join()
stop.set()
for thread in multiplying: thread.join()
print("\\n".join(sorted(filter(None, failures))) or "right")
"""
)


def is_right(code, *arguments, timeout=120):
    """Run a program; exceptions that Python ignores are printed after its answer."""
    found = run_python(code, *arguments, timeout=timeout)
    assert found.startswith("right"), found
    return True


@posix
@needs_kernels
@pytest.mark.parametrize("seed", range(10))
def test_a_first_product_is_interrupted_in_a_fresh_process(seed):
    """The longest delay is that of the imports and of the first product."""
    assert is_right(_FRESH, str(seed), "0.2")


@posix
@needs_kernels
@pytest.mark.parametrize("count", [150, pytest.param(3000, marks=pytest.mark.sweep)])
def test_first_products_are_interrupted_in_forked_children(count):
    assert is_right(_FORKED, str(count), "0.1", timeout=30 + count)


@posix
@needs_kernels
@pytest.mark.parametrize("count", [20, pytest.param(500, marks=pytest.mark.sweep)])
def test_children_of_threads_that_multiply(count):
    assert is_right(_FORKED_FROM_THREADS, str(count), timeout=30 + 2 * count)


_UNDER_A_LIMIT = """
import resource, sys, threading
import numpy as np, lowprec
warm, megabytes, where = sys.argv[1:]
a = (np.arange(90000) % 7).reshape(300, 300).astype(np.float32)
large = np.tile(a, (4, 4))
want = a @ a  # from here on NumPy has its memory
large_want = 4 * np.tile(want, (4, 4))
if warm == "warm":
    lowprec.matmul(a, a)
else:
    lowprec.plan(a, a)
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
limit = used + (int(megabytes) << 20)

def multiply():
    for mode in ("fp32", "bf16x9", "fp16x3"):
        for x, right in ((a, want), (large, large_want)):
            try:
                assert (lowprec.matmul(x, x, math_mode=mode) == right).all()
            except MemoryError:  # C's allocator reserves 64 MB for a thread
                assert int(megabytes) < 100, "there is enough memory"
    print("done")

if where == "main":
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    multiply()
else:
    go = threading.Event()
    thread = threading.Thread(target=lambda: go.wait() and multiply())
    thread.start()
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    go.set()
    thread.join()
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="Linux enforces the limit")
@pytest.mark.parametrize("where", ["main", "thread"])
@pytest.mark.parametrize("megabytes", [300, 64, 16, 4, 1])
@pytest.mark.parametrize("warm", ["warm", "cold"])
@pytest.mark.sampled(3)
def test_a_limit_on_the_address_space(warm, megabytes, where):
    assert run_python(_UNDER_A_LIMIT, warm, str(megabytes), where) == "done"


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
        # In 3.12 ctypes refuses it first.
        print("lowprec cannot be imported in a subinterpreter" in str(found) or "module _ctypes" in str(found))
    """
    assert run_python(code) == "True"
