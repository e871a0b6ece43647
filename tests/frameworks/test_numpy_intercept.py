"""Products of NumPy programs that do not use lowprec."""

import ctypes
import pickle
import threading

import numpy as np
import pytest
from numpy import dot as dot_before

import lowprec
import lowprec.numpy as ln
from lowprec.core import interception
from lowprec.core.interception_report import PassedBy
from support import interrupts
from support.programs import in_threads, posix, run_python

#: Unit roundoff of bfloat16, to which both operands of a product are rounded.
UNIT = 2.0**-8
TYPES = (np.float32, np.float64, np.complex64, np.complex128)


@pytest.fixture(autouse=True)
def _restored():
    before = np.dot, np.einsum, np.vdot
    yield
    assert (np.dot, np.einsum, np.vdot) == before
    assert not ln.intercept._holders
    for (name, code), (own, _) in ln._loops.items():
        now = ctypes.c_void_p()
        ln._exchange(name, code, own, now)
        assert now.value == own.value


def draw(*shape, dtype=np.float32, seed=0):
    x = np.random.default_rng(seed).standard_normal((2, *shape))
    return (x[0] + 1j * x[1] if np.dtype(dtype).kind == "c" else x[0]).astype(dtype)


def stacked(x, n=2):
    return np.stack([x * (i + 1) for i in range(n)])


#: Functions of a (6, 8), b (8, 5).
ROUTES = {
    "@": lambda a, b: a @ b,
    "batch": lambda a, b: stacked(a) @ b,
    "batches": lambda a, b: np.matmul(stacked(a)[:, None], stacked(b, 3)),
    "views": lambda a, b: a[::-1, ::2] @ b[::2, ::-2],
    "transposed": lambda a, b: b.T @ a.T,
    "out": lambda a, b: np.matmul(a, b, out=np.empty((6, 5), a.dtype)),
    "in place": lambda a, b: (c := a @ a.T, np.matmul(c, c, out=c))[1],
    "vectors": lambda a, b: a[0] @ b[:, 0],
    "dot": lambda a, b: np.dot(a, b),
    "dot, out": lambda a, b: np.dot(a, b, out=np.empty((6, 5), a.dtype)),
    "dot of vectors": lambda a, b: np.dot(a[0], b[:, 0]),
    "dot of stacks": lambda a, b: np.dot(stacked(a), stacked(b, 3)),
    "dot of a stack": lambda a, b: np.dot(stacked(a), b[:, 0]),
    "inner": lambda a, b: np.inner(a, b.T),
    "inner of stacks": lambda a, b: np.inner(stacked(a), stacked(b.T, 3)),
    "vdot": lambda a, b: np.vdot(a[0], b[:, 0]),
    "tensordot": lambda a, b: np.tensordot(stacked(a), b, 1),
    "einsum": lambda a, b: np.einsum("ij,jk->ik", a, b),
    "einsum, batched": lambda a, b: np.einsum("bij,bjk->kbi", stacked(a), stacked(b)),
    "einsum of three": lambda a, b: np.einsum("ij,jk,lk->il", a, b, b),
    "multi_dot": lambda a, b: np.linalg.multi_dot([a, b, b.T]),
    "matvec": lambda a, b: np.matvec(a, b[:, 0]),
    "vecmat": lambda a, b: np.vecmat(a[0], b),
    "vecdot": lambda a, b: np.vecdot(a, a[::-1]),
    "matrix_power": lambda a, b: np.linalg.matrix_power(a @ a.T, 3),
    "pinv": lambda a, b: np.linalg.pinv(a),
}


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("name", ROUTES)
def test_a_product_is_taken(name, dtype):
    if name in ("matvec", "vecmat") and not hasattr(np, name):
        pytest.skip("since NumPy 2.2")
    if name == "einsum, batched" and not hasattr(np._core.einsumfunc, "bmm_einsum"):
        pytest.skip("older versions of NumPy sum batched products without matmul, which the report shows")
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


def test_float64_is_cast_only_on_request():
    x = draw(4, 4, dtype=np.float64)
    with ln.intercept("bf16") as seen:
        assert np.array_equal(x @ x, x.copy() @ x)
        np.dot(np.eye(2, dtype=int), np.eye(2, dtype=int))
    assert {p.passed_by for p in seen.report().passed} == {PassedBy.ELEMENT_TYPE}
    with ln.intercept("fp64_emulated") as seen:
        x @ x
    assert [(p.mode, p.count) for p in seen.report().taken] == [("fp64_emulated", 1)]


def test_float64_is_rounded_once():
    """Half a unit of bfloat16 and a bit that float32 lacks: rounding to float32 first gives a tie, and 1."""
    x = np.array([[1 + 2.0**-8 + 2.0**-40]])
    one = np.ones((1, 1))
    with ln.intercept("bf16", cast=True):
        for value in (x, -x):
            assert abs(float((value @ one)[0, 0])) == 1 + 2.0**-7
        assert float((np.array([[2.0**200]]) @ one)[0, 0]) == np.inf
        assert np.isnan(np.array([[np.nan]]) @ one)
    with ln.intercept("fp32", cast=True):
        assert float((x @ one)[0, 0]) == np.float32(x[0, 0])


def test_the_guard_takes_precedence():
    x = np.full((4, 4), 1 + 2.0**-9, np.float32)
    with ln.intercept("bf16") as seen, lowprec.fp32_guard(frameworks=False):
        assert (x @ x)[0, 0] > 4
    assert [(p.operator, p.mode, p.count) for p in seen.report().taken] == [("matmul", "fp32", 1)]


def test_a_mapping_of_layers_is_refused():
    with pytest.raises(lowprec.ModeError, match=r"^math_mode \{'net': 'bf16'\} is not a math mode"):
        ln.intercept({"net": "bf16"})


def test_threads_have_their_scopes():
    x = np.full((4, 4), 1 + 2.0**-9, np.float32)
    found = {}

    def other():
        found["outside"] = (x @ x)[0, 0], np.dot(x, x)[0, 0]
        with ln.intercept("bf16"):
            found["inside"] = (x @ x)[0, 0], np.dot(x, x)[0, 0]

    with ln.intercept("fp32"):
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        assert (x @ x)[0, 0] > 4
    assert min(found["outside"]) > 4
    assert found["inside"] == (4, 4)


def test_unreached_functions_are_reported():
    x = draw(4, 4)
    with ln.intercept("bf16") as seen:
        x.dot(x)
        dot_before(x, x)
        np.einsum("ij,ij,ij->", x, x, x)
    report = seen.report()
    assert "ndarray.dot" in str(report)
    assert f"{__name__}.dot_before" in str(report).replace("\n", " ")


@pytest.mark.filterwarnings("ignore:the matrix subclass:PendingDeprecationWarning")
def test_errors_and_other_arrays_are_numpys():
    x = draw(4, 4)
    with ln.intercept("bf16"):
        for call in (np.matmul, np.dot, np.inner):
            with pytest.raises(ValueError, match=r"mismatch|not aligned"):
                call(x, x[:, :3] if call is np.inner else x[:3])
        assert isinstance(np.dot(np.matrix(x), x), np.matrix)
        assert np.dot(3, 4) == 12
        assert np.dot([1, 2], [3, 4]) == 11
        assert np.dot(x[:0], x).shape == (0, 4)


def test_functions_are_pickled_by_their_names():
    with ln.intercept("bf16"):
        pickles = [pickle.dumps(f) for f in (np.dot, dot_before, np.einsum, np.sum, len, [1].append)]
    assert [pickle.loads(p) for p in pickles[:5]] == [np.dot, np.dot, np.einsum, np.sum, len]


@posix
def test_an_exception_of_a_signal_handler_is_raised_after_the_product():
    printed = run_python("""
        import time
        import numpy as np
        from lowprec import numpy as ln
        from lowprec.core import dispatch

        def interrupted(*args, **keywords):
            raise KeyboardInterrupt

        x = np.full((4, 4), 1 + 2.0**-9, np.float32)
        with ln.intercept("bf16"):
            dispatch.matmul, original = interrupted, dispatch.matmul
            try:
                found = x @ x
                time.sleep(0.1)
                print("lost", end=" ")
            except KeyboardInterrupt:
                print("raised", found[0, 0] > 4, end=" ")
            dispatch.matmul = original
            print((x @ x)[0, 0])
    """)
    assert printed == "raised True 4.0"


def test_an_interrupt_at_any_step_leaves_numpy_usable():
    x = np.full((4, 4), 1 + 2.0**-9, np.float32)

    def block():
        with ln.intercept("bf16"):
            pass

    def check():
        for entry in ln.intercept._stack.get():
            entry.close()
        assert min((x @ x)[0, 0], np.dot(x, x)[0, 0]) > 4
        with ln.intercept("bf16") as seen:
            assert (x @ x)[0, 0] == np.dot(x, x)[0, 0] == 4
        assert sum(p.count for p in seen.report().taken) == 2

    for start in (dict.clear, lambda loops: None):  # the first block of a process, and later ones
        for holder in ln.intercept._holders:
            ln.intercept("fp32")._release(holder)
        start(ln._loops)
        assert interrupts.count(block, check, KeyboardInterrupt) > 50
    for holder in ln.intercept._holders:
        ln.intercept("fp32")._release(holder)


def test_a_fork_while_other_threads_enter_blocks():
    """The hook of a fork iterates over the scopes to which the other threads add theirs."""

    def work(number):
        for _ in range(20):
            if number == 0:
                for _ in range(1000):
                    interception._each(lambda ledger: None)
            else:
                for scope in [ln.intercept("bf16") for _ in range(200)]:
                    with scope:
                        pass

    in_threads(3, work)


def test_the_products_of_lowprec_are_not_taken():
    x = np.full((64, 64), 1 + 2.0**-12)
    plain, y = x @ x, x.astype(np.float32)
    with ln.intercept("bf16", cast=True) as seen:
        assert np.array_equal(lowprec.matmul(x, x), plain)
        assert np.array_equal(lowprec.matmul(y, y, math_mode="fp64"), plain.astype(np.float32))
        lowprec.linalg.solve(draw(8, 8), draw(8), method="refine")
    assert not seen.report().products


def test_callers_are_the_layers():
    x = draw(4, 4)
    with ln.intercept("bf16") as seen:
        x @ x
        np.linalg.matrix_power(x, 2)
    layers = {p.layer.rpartition(".")[2]: p.count for p in seen.report().taken}
    assert layers == {"test_callers_are_the_layers": 2}
