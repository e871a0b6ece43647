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
from numpy import dot as dot_before

import lowprec
import lowprec.numpy as ln
from lowprec.backends.cpu import library
from lowprec.core import blas
from lowprec.core.interception_report import PassedBy
from support.programs import in_threads, run_python

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or library.library() is None, reason="interception needs Linux and the compiled kernels"
)

#: Unit roundoff of bfloat16, to which both operands of a product are rounded.
UNIT = 2.0**-8
TYPES = (np.float32, np.float64, np.complex64, np.complex128)


@pytest.fixture(autouse=True)
def _restored():
    yield
    assert not ln.intercept._holders
    x = np.full((4, 4), 1 + 2.0**-9, np.float32)
    assert min((x @ x)[0, 0], np.dot(x, x)[0, 0], x.dot(x)[0, 0]) > 4


def draw(*shape, dtype=np.float32, seed=0):
    x = np.random.default_rng(seed).standard_normal((2, *shape))
    return (x[0] + 1j * x[1] if np.dtype(dtype).kind == "c" else x[0]).astype(dtype)


def stacked(x, n=2):
    return np.stack([x * (i + 1) for i in range(n)])


#: Functions of a (6, 8), b (8, 5) that the mode computes.
ROUTES = {
    "@": lambda a, b: a @ b,
    "batch": lambda a, b: stacked(a) @ b,
    "batches": lambda a, b: np.matmul(stacked(a)[:, None], stacked(b, 3)),
    "views": lambda a, b: a[::-1, ::2] @ b[::2, ::-2],
    "transposed": lambda a, b: b.T @ a.T,
    "by its transpose": lambda a, b: a @ a.T,
    "of a broadcast row": lambda a, b: np.broadcast_to(a[:1], a.shape) @ b,
    "out": lambda a, b: np.matmul(a, b, out=np.empty((6, 5), a.dtype)),
    "in place": lambda a, b: (c := a @ a.T, np.matmul(c, c, out=c))[1],
    "matrix and vector": lambda a, b: a @ b[:, 0],
    "vector and matrix": lambda a, b: b[:, 0] @ a.T,
    "dot": lambda a, b: np.dot(a, b),
    "dot, out": lambda a, b: np.dot(a, b, out=np.empty((6, 5), a.dtype)),
    "dot of a stack": lambda a, b: np.dot(a, b[:, 0]),
    "ndarray.dot": lambda a, b: a.dot(b),
    "a function imported by name": lambda a, b: dot_before(a, b),
    "inner": lambda a, b: np.inner(a, b.T),
    "tensordot": lambda a, b: np.tensordot(stacked(a), b, 1),
    "einsum, optimized": lambda a, b: np.einsum("ij,jk->ik", a, b, optimize=True),
    "multi_dot": lambda a, b: np.linalg.multi_dot([a, b, b.T]),
    "matvec": lambda a, b: np.matvec(a, b[:, 0]),
    "vecmat": lambda a, b: np.vecmat(a[0], b),
    "matrix_power": lambda a, b: np.linalg.matrix_power(a @ a.T, 3),
    "cov": lambda a, b: np.cov(a),
    "memmap": lambda a, b: a.view(np.memmap) @ b,
    "matrix": lambda a, b: np.asarray(a.view(np.matrix) * b.view(np.matrix)),
    "masked array": lambda a, b: np.ma.dot(np.ma.array(a), np.ma.array(b)).data,
}
#: Functions of vectors (8,), whose products keep their precision, and of a (6, 8) in LAPACK.
KEPT = {
    "vectors": lambda a: a[0] @ a[1],
    "dot of vectors": lambda a: np.dot(a[0], a[1]),
    "vdot": lambda a: np.vdot(a[0], a[1]),
    "inner of vectors": lambda a: np.inner(a[0], a[1]),
    "vecdot": lambda a: np.vecdot(a, a[::-1]),
    "convolve": lambda a: np.convolve(a[0], a[1]),
    "row and column": lambda a: a[:1] @ a[:1].T,
    "svd": lambda a: np.linalg.svd(a)[1],
    "qr": lambda a: np.linalg.qr(a)[1],
    "solve": lambda a: np.linalg.solve(a[:, :6], a[:, 6]),
    "inv": lambda a: np.linalg.inv(a[:, :6]),
    "lstsq": lambda a: np.linalg.lstsq(a, a[:, 0])[0],
    "eigvals": lambda a: np.linalg.eigvals(a[:, :6]),
    "eigh": lambda a: np.linalg.eigh(a[:, :6])[0],
    "cholesky": lambda a: np.linalg.cholesky(np.eye(6, dtype=a.dtype)),
    "det": lambda a: np.linalg.det(a[:, :6]),
}
#: Functions whose products NumPy's own loops multiply, which are in a remark of each report.
NOT_SEEN = {
    "einsum": lambda a, b: np.einsum("ij,jk->ik", a, b),
    "float16": lambda a, b: a.astype(np.float16) @ b.astype(np.float16),
    "integers": lambda a, b: a.astype(int) @ b.astype(int),
    "column and row": lambda a, b: a[:, :1] @ b[:1],
    "outer": lambda a, b: np.outer(a[0], b[0]),
}


@pytest.mark.filterwarnings("ignore:the matrix subclass:PendingDeprecationWarning")
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("name", ROUTES)
def test_a_product_is_taken(name, dtype):
    if name in ("matvec", "vecmat") and not hasattr(np, name):
        pytest.skip("since NumPy 2.2")
    if name in ("views", "of a broadcast row") and np.lib.NumpyVersion(np.__version__) < "2.4.0":
        pytest.skip("older releases of NumPy multiply arrays of such strides by their own loops")
    a, b = draw(6, 8, dtype=dtype), draw(8, 5, dtype=dtype, seed=1)
    call, wide = ROUTES[name], np.result_type(dtype, np.float64)
    plain, true = call(a, b), call(a.astype(wide), b.astype(wide))
    size = float(np.linalg.norm(call(np.abs(a).astype(np.float64), np.abs(b).astype(np.float64))))
    for mode, unit in {"bf16": UNIT, "fp32": 2.0**-24}.items():
        with ln.intercept(mode, cast=True) as seen:
            found = call(a, b)
        report = seen.report()
        assert report.taken
        assert not report.passed
        assert {p.mode for p in report.taken} == {mode}
        assert type(found) is type(plain)
        assert (found.dtype, found.shape) == (plain.dtype, plain.shape)
        # Two operands rounded once, at most three products deep, and complex sums; FP32 sums 8 products.
        error = float(np.linalg.norm(found - true))
        assert error <= 8 * (2 * unit + 2.0**-20) * max(size, float(np.linalg.norm(true)))
        assert mode == "fp32" or error > 2.0**-8 * UNIT * float(np.linalg.norm(true))
    assert np.array_equal(call(a, b), plain)


#: NumPy convolves complex vectors by loops of its own.
KEPT_OF_TYPES = [(name, dtype) for name in KEPT for dtype in TYPES if name != "convolve" or np.dtype(dtype).kind == "f"]


@pytest.mark.parametrize(("name", "dtype"), KEPT_OF_TYPES)
def test_products_of_vectors_and_in_solvers_keep_their_precision(name, dtype):
    a = draw(6, 8, dtype=dtype)
    plain = KEPT[name](a)
    with ln.intercept("bf16", cast=True) as seen:
        found = KEPT[name](a)
    report = seen.report()
    assert np.array_equal(found, plain)
    assert not report.taken
    assert {p.passed_by for p in report.passed} <= {PassedBy.VECTORS, PassedBy.LINEAR_ALGEBRA, PassedBy.LAYER}
    assert all(p.multiplications for p in report.passed)


#: Functions of SciPy of a (32, 32), and the routines that are taken and that are passed by.
OF_SCIPY = {
    "sgemm": (lambda a, linalg: linalg.blas.sgemm(1, a, a), {"gemm"}, set()),
    "sgemv": (lambda a, linalg: linalg.blas.sgemv(1, a, a[0]), {"gemv"}, set()),
    "ssymm": (lambda a, linalg: linalg.blas.ssymm(1, a, a), {"symm"}, set()),
    "ssymv": (lambda a, linalg: linalg.blas.ssymv(1, a, a[0]), {"symv"}, set()),
    "ssyrk": (lambda a, linalg: linalg.blas.ssyrk(1, a), {"syrk"}, set()),
    "strmm": (lambda a, linalg: linalg.blas.strmm(1, a, a), {"trmm"}, set()),
    "ssyr2k": (lambda a, linalg: linalg.blas.ssyr2k(1, a, a), set(), {"syr2k"}),
    "strmv": (lambda a, linalg: linalg.blas.strmv(a, a[0]), set(), {"trmv"}),
    "sdot": (lambda a, linalg: linalg.blas.sdot(a[0], a[1]), set(), {"dot"}),
    "sger": (lambda a, linalg: linalg.blas.sger(1, a[0], a[1]), set(), {"ger"}),
    "cdotu": (lambda a, linalg: linalg.blas.cdotu(a[0] * 1j, a[1]), set(), {"dotu"}),
    "cdotc": (lambda a, linalg: linalg.blas.zdotc(a[0] * 1j, a[1]), set(), {"dotc"}),
    "lu_factor": (lambda a, linalg: linalg.lu_factor(a)[0], set(), {"getrf"}),
    "svd": (lambda a, linalg: linalg.svd(a)[1], set(), {"gesdd"}),
    "qr": (lambda a, linalg: linalg.qr(a)[1], set(), {"geqrf", "orgqr"}),
    "eigvals": (lambda a, linalg: linalg.eigvals(a), set(), {"geev"}),
    "cholesky": (lambda a, linalg: linalg.cholesky(np.eye(32, dtype="f")), set(), {"potrf"}),
}


@pytest.mark.parametrize("name", OF_SCIPY)
def test_calls_of_scipy_are_taken_or_counted(name):
    linalg = pytest.importorskip("scipy.linalg", reason="scipy is not installed")
    call, taken, passed = OF_SCIPY[name]
    a = draw(32, 32)
    plain = call(a, linalg)
    with ln.intercept("bf16") as seen:
        found = call(a, linalg)
    report = seen.report()
    assert {p.operator for p in report.taken} == taken
    assert {p.operator for p in report.passed} == passed
    assert all(p.count == 1 for p in report.products), "a query of the size of a workspace is no call"
    assert np.array_equal(found, plain) is not bool(taken)
    # Two operands rounded once.
    assert np.linalg.norm(found - plain) <= (2 * UNIT + UNIT**2) * np.linalg.norm(call(np.abs(a), linalg)) or not taken


@pytest.mark.parametrize("name", NOT_SEEN)
def test_products_of_numpys_loops_are_named(name):
    a, b = draw(6, 8), draw(8, 5, seed=1)
    plain = NOT_SEEN[name](a, b)
    with ln.intercept("bf16", cast=True) as seen:
        found = NOT_SEEN[name](a, b)
    assert np.array_equal(found, plain)
    assert " ".join(str(seen.report()).split()).endswith(ln._NOT_SEEN)


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
    assert {p.operator: p.mode for p in seen.report().taken} == {"dot": "bf16", "gemv": "fp32", "gemm": "bf16"}


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
    assert {(p.operator, p.mode, p.count) for p in seen.report().taken} == {("gemm", "fp32", 1), ("gemm", "bf16", 1)}


def test_a_pattern_without_a_routine_is_refused():
    with pytest.raises(lowprec.ModeError, match=r"^'net' matches no routine; they are gemm, gemv, symm"):
        ln.intercept({"net": "bf16"})


def test_a_mode_without_one_kernel_is_refused():
    with pytest.raises(lowprec.UnsupportedError, match="not taken in fp64, which has no compiled kernel"):
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
    pytest.importorskip("scipy.linalg", reason="scipy is not installed")  # its import is no part of the block
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
