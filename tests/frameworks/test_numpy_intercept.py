"""Products of programs of NumPy and SciPy that do not use lowprec."""

import asyncio
import gc
import os
import signal
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

import lowprec
import lowprec.numpy as ln
from lowprec.backends.cpu import library
from lowprec.core import blas
from lowprec.core.interception_report import PassedBy
from support.programs import in_threads, run_python

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or library.library() is None,
    reason="interception needs Linux and the compiled kernels",
)

#: Unit roundoff of bfloat16, to which both operands of a product are rounded.
UNIT = 2.0**-8


@pytest.fixture(autouse=True)
def _restored():
    yield
    assert not ln.intercept._holders
    x = np.full((4, 4), 1 + 2.0**-9, np.float32)
    assert min((x @ x)[0, 0], np.dot(x, x)[0, 0], x.dot(x)[0, 0]) > 4


def draw(*shape, dtype=np.float32, seed=0):
    x = np.random.default_rng(seed).standard_normal((2, *shape))
    return (x[0] + 1j * x[1] if np.dtype(dtype).kind == "c" else x[0]).astype(dtype)


def test_float64_is_cast_only_on_request():
    x = draw(4, 4, dtype=np.float64)
    with ln.intercept("bf16") as seen:
        assert np.array_equal(x @ x, x.copy() @ x)
    assert {p.passed_by for p in seen.report().passed} == {PassedBy.ELEMENT_TYPE}
    with ln.intercept("fp64_emulated") as seen:
        x @ x
    assert [(p.mode, p.count) for p in seen.report().taken] == [("fp64_emulated", 1)]


@pytest.mark.parametrize(("mode", "says"), [("bf16", True), ("fp64_emulated", False)])
def test_the_report_says_whether_float64_was_rounded(mode, says):
    with ln.intercept(mode, cast=True) as seen:
        np.eye(4) @ np.eye(4)
    report = seen.report()
    assert len(report.products) == 1
    assert any("were rounded once" in x for x in report.remarks) is says


def test_float64_is_rounded_once():
    """Half a unit of bfloat16 and a bit that float32 lacks: rounding to float32 first gives a tie, and 1."""
    x = np.diag([1 + 2.0**-8 + 2.0**-40, 1])
    one = np.eye(2)
    with ln.intercept("bf16", cast=True):
        for value in (x, -x):
            assert abs(float((value @ one)[0, 0])) == 1 + 2.0**-7
        with np.errstate(over="ignore"):
            assert float((np.diag([2.0**200, 1]) @ one)[0, 0]) == np.inf
    with ln.intercept("fp32", cast=True):
        assert float((x @ one)[0, 0]) == np.float32(x[0, 0])


def test_rules_by_routine():
    x = np.full((4, 4), 1 + 2.0**-9, np.float32)
    with ln.intercept({"dot": "bf16", "gemv": "fp32", "*": "bf16"}) as seen:
        assert x[0] @ x[0] == (x @ x)[0, 0] == 4
        assert (x @ x[0])[0] > 4
    assert {p.operator: p.mode for p in seen.report().taken} == {
        "dot": "bf16",
        "gemv": "fp32",
        "gemm": "bf16",
    }


def test_modes_that_quantise_leave_vectors_in_bf16():
    x = draw(32, 32)
    with ln.intercept("mxfp8") as seen:
        x @ x, x @ x[0], x[0] @ x[0]
    report = seen.report()
    assert {p.operator: p.mode for p in report.taken} == {"gemm": "mxfp8", "gemv": "bf16"}
    assert {p.operator: p.passed_by for p in report.passed} == {"dot": PassedBy.VECTORS}


def test_the_guard_takes_precedence():
    x = np.full((4, 4), 1 + 2.0**-9, np.float32)
    with ln.intercept("bf16") as seen:
        with lowprec.fp32_guard(frameworks=False):
            assert (x @ x)[0, 0] > 4
        assert (x @ x)[0, 0] == 4
    assert {(p.operator, p.mode, p.count) for p in seen.report().taken} == {
        ("gemm", "fp32", 1),
        ("gemm", "bf16", 1),
    }


def test_a_pattern_without_a_routine_is_refused():
    with pytest.raises(
        lowprec.ModeError, match=r"^'net' matches no routine; they are gemm, gemv, symm"
    ):
        ln.intercept({"net": "bf16"})


def test_a_mode_without_one_kernel_is_refused():
    with pytest.raises(
        lowprec.UnsupportedError, match="not taken in fp64, which has no compiled kernel"
    ):
        ln.intercept("fp64").__enter__()


def test_a_thread_has_the_scope_of_the_thread_that_starts_it():
    x = np.full((4, 4), 1 + 2.0**-9, np.float32)
    found = {}

    def product():
        return float((x @ x)[0, 0])

    with ThreadPoolExecutor(1) as before:
        before.submit(product).result()
        with ln.intercept("bf16") as seen:
            thread = threading.Thread(target=lambda: found.update(started=product()))
            thread.start()
            thread.join()
            found["before"] = before.submit(product).result()
    assert found["started"] == 4
    assert found["before"] > 4
    report = seen.report()
    assert [p.count for p in report.taken] == [1]
    assert [p.passed_by for p in report.passed] == [PassedBy.OTHER_THREAD]


def test_a_thread_that_outlives_the_scope_is_outside():
    x = np.full((4, 4), 1 + 2.0**-9, np.float32)
    found, ended = [], threading.Event()

    def work():
        ended.wait(60)
        found.append((x @ x)[0, 0])

    with ln.intercept("tf32"):
        with ln.intercept("bf16"):
            thread = threading.Thread(target=work)
            thread.start()
        ended.set()
        thread.join()
    assert found[0] > 4


def test_errors_and_other_arrays_are_numpys():
    x = draw(4, 4)
    with ln.intercept("bf16"):
        for call in (np.matmul, np.dot, np.inner):
            with pytest.raises(ValueError, match=r"mismatch|not aligned"):
                call(x, x[:, :3] if call is np.inner else x[:3])
        with pytest.raises(ValueError, match=r"einsum|operand"):
            np.einsum("i,jk->ik", x, x)
        with pytest.raises(ValueError, match="acceptable"):
            np.dot(x, x, out=np.empty((4, 4), np.float16))
        with pytest.raises(ValueError, match="acceptable"):
            np.dot(x, x, out=np.empty((2, 4, 4), np.float32))
        with pytest.raises(TypeError, match="keyword"):
            np.vdot(x, x, out=x)
        assert np.dot(3, 4) == 12
        assert np.dot([1, 2], [3, 4]) == 11
        assert np.dot(x[:0], x).shape == (0, 4)
        assert np.vecdot(x, x).shape == (4,)


def test_an_array_with_a_function_of_its_own_keeps_it():
    """Units of astropy and unyt are tables of NumPy's functions, and may be imported in a block."""
    handled = {}

    class Quantity:
        def __array_function__(self, function, types, args, kwargs):
            return handled[function]

    with ln.intercept("bf16"):
        handled.update({np.dot: "dot", np.einsum: "einsum"})
        assert (np.dot(Quantity(), 1), np.einsum("i", Quantity())) == ("dot", "einsum")
    assert (np.dot(Quantity(), 1), np.einsum("i", Quantity())) == ("dot", "einsum")


@pytest.mark.parametrize("size", [4, 200])
def test_an_interrupt_is_raised_and_the_result_is_whole(size):
    """SIGINT in a product is raised after it, by CPython; none is lost, and no result is left unwritten."""
    x, out = np.full((size, size), 1 + 2.0**-9, np.float32), np.empty((size, size), np.float32)
    lost = unwritten = 0
    with ln.intercept("bf16"):
        for number in range(100):
            out.fill(np.nan)
            timer = threading.Timer(number % 10 * 1e-4, signal.raise_signal, [signal.SIGINT])
            try:
                timer.start()
                for _ in range(2_000_000):
                    np.matmul(x, x, out=out)
                lost += 1
            except KeyboardInterrupt:
                timer.join()
            unwritten += bool(not np.isnan(out[0, 0]) and (out != size).any())
    assert (lost, unwritten) == (0, 0)


INTERRUPTED = """
import numpy as np
import lowprec.numpy as ln
from lowprec.core import blas

own, calls = blas.set_loop, []


def interrupted(*arguments):
    calls.append(arguments)
    if len(calls) == 5:
        raise KeyboardInterrupt
    own(*arguments)


blas.set_loop = interrupted
try:
    with ln.intercept("bf16"):
        raise AssertionError
except KeyboardInterrupt:
    print("interrupted")
types = sorted({kind[0] for kind in np.matmul.types} - {"O"})
x = np.full((3, 3), 1 + 2.0**-9, np.float32)
for _ in range(2):
    for kind in types:
        one = np.ones((3, 3), kind)
        assert ((one @ one) == (1 if kind == "?" else 3)).all(), kind
    assert (x @ x)[0, 0] > 3
    with ln.intercept("bf16"):
        assert (x @ x)[0, 0] == 3
print(len(types))
"""


def test_a_block_whose_entry_is_interrupted_leaves_numpys_loops():
    first, size = run_python(INTERRUPTED).split()
    assert first == "interrupted"
    assert int(size) > 10


def test_a_product_near_the_recursion_limit_is_written():
    x = np.full((4, 4), 1 + 2.0**-9, np.float32)
    found = []

    def at(depth):
        if depth:
            return at(depth - 1)
        return (x @ x)[0, 0]

    with ln.intercept("bf16"):
        for depth in range(sys.getrecursionlimit() - 150, sys.getrecursionlimit()):
            try:
                found.append(at(depth))
            except RecursionError:
                continue
    assert set(found) == {4}


def test_threads_and_forks_and_scopes():
    """Scopes open and close while other threads multiply and processes fork."""
    x = np.full((8, 8), 1 + 2.0**-9, np.float32)

    def work(number):
        for _ in range(30):
            if number == 0:
                child = os.fork()
                if not child:
                    with ln.intercept("bf16"):
                        os._exit(int((x @ x)[0, 0] != 8))
                assert os.waitpid(child, 0)[1] == 0
            elif number == 1:
                with ln.intercept("bf16"):
                    assert (x @ x)[0, 0] == 8
            else:
                assert all((x @ x)[0, 0] > 8 for _ in range(100))

    in_threads(4, work)


def test_a_scope_is_of_the_thread_not_of_a_task():
    """As the documentation says: a task that awaits in a block leaves it to the other tasks."""
    x = np.full((4, 4), 1 + 2.0**-9, np.float32)

    async def inside(ready, seen):
        with ln.intercept("bf16"):
            ready.set()
            await seen.wait()

    async def main():
        ready, seen = asyncio.Event(), asyncio.Event()
        task = asyncio.create_task(inside(ready, seen))
        await ready.wait()
        assert (x @ x)[0, 0] == 4
        seen.set()
        await task
        assert (x @ x)[0, 0] > 4

    asyncio.run(main())


def test_the_products_of_lowprec_are_not_taken():
    # its import is no part of the block
    pytest.importorskip("scipy.linalg", reason="scipy is not installed")
    x = np.full((64, 64), 1 + 2.0**-12)
    plain, y = x @ x, x.astype(np.float32)
    with ln.intercept("bf16", cast=True) as seen:
        assert np.array_equal(lowprec.matmul(x, x), plain)
        assert np.array_equal(lowprec.matmul(y, y, math_mode="fp64"), plain.astype(np.float32))
        lowprec.linalg.solve(draw(8, 8), draw(8), method="refine")
    assert not seen.report().products


def test_a_library_that_is_loaded_in_the_block_follows():
    code = """
        import numpy as np
        import lowprec
        x = np.full((4, 4), 1 + 2.0**-9, np.float32)
        with lowprec.numpy.intercept("bf16") as seen:
            import scipy.linalg.blas
            print(scipy.linalg.blas.sgemm(1, x, x)[0, 0])
        print(scipy.linalg.blas.sgemm(1, x, x)[0, 0] > 4)
    """
    pytest.importorskip("scipy", reason="scipy is not installed")
    assert run_python(code).split() == ["4.0", "True"]


def test_memory_of_scopes_is_freed():
    for _ in range(50):
        with ln.intercept("bf16"):
            pass
    gc.collect()
    assert not [x for x in gc.get_objects() if isinstance(x, blas.Scope)]


def test_a_subclass_of_a_script_is_the_same_scope():
    code = """
        import numpy as np
        import lowprec

        class Mine(lowprec.numpy.intercept):
            pass

        x = np.full((4, 4), 1 + 2.0**-12, np.float32)
        with Mine("bf16") as seen:
            print(float((x @ x)[0, 0]), repr(seen))
        print(float((x @ x)[0, 0]) > 4)
    """
    assert run_python(code).splitlines() == ["4.0 lowprec.numpy.intercept('bf16')", "True"]


def test_the_calling_functions_are_the_layers():
    x = draw(32, 32)

    def other():
        return x @ x

    with ln.intercept("bf16") as seen:
        x @ x[:, :16]
        np.linalg.matrix_power(x, 2)
        for _ in range(256):
            other()
    here = f"{__name__}.test_the_calling_functions_are_the_layers"
    assert {p.layer: p.count for p in seen.report().taken} == {here: 1, f"{here}...": 257}
