"""``lowprec.linalg.solve`` by refinement: backward errors, fallbacks, the report, every library, and what is refused.

The bound of a refined solution, in 2-norms and the Frobenius norm of A: what is accepted is ``|r| <= u (|A| |x| +
|b|)``, of the scaled system less. The computed residual r is off by ``gamma(n + 1) (|A| |x| + |b|)`` in double
precision (Higham, *Accuracy and Stability of Numerical Algorithms*, 2nd edition, section 3.5; a complex operation
counts as six real ones); that of a single precision system is computed in double precision. A solution that is not
refined is the one of the library, bit by bit.
"""

import warnings

import numpy as np
import pytest

import lowprec
from frameworks.backends import Backend
from frameworks.conftest import load_or_skip
from lowprec import linalg
from lowprec.linalg import factors, refinement, solving
from lowprec.linalg.results import SolveReason
from lowprec.policy import environment

DTYPES = ("float64", "float32", "complex128", "complex64")
dtypes = pytest.mark.parametrize("dtype", DTYPES)


@pytest.fixture
def variables(monkeypatch):
    def put(values):
        for name, value in values.items():
            monkeypatch.setenv(name, value)
        environment.refresh()

    yield put
    monkeypatch.undo()
    environment.refresh()


def unit(dtype):
    return float(np.finfo(dtype).eps) / 2


def bound(n, dtype):
    u, k = unit(dtype), (n + 1) * (6 if np.dtype(dtype).kind == "c" else 1)
    # The norm of A is summed in float32: its relative error, and those of the other norms, are below 1 %.
    return 1.01 * u + (k * u / (1 - k * u) if u < 1e-9 else 0)


def backward_error(a, x, b):
    """Return the largest backward error of all columns, in extended precision."""
    exact = np.clongdouble if np.dtype(a.dtype).kind == "c" else np.longdouble
    a, x, b = (y.astype(exact) for y in (a, x, b))

    def norm(y, axis):
        return np.sqrt((abs(y) ** 2).sum(axis=axis))

    x, b = (y[..., None] if y.ndim == 1 else y for y in (x, b))
    size = norm(a, (-2, -1))[..., None] * norm(x, -2) + norm(b, -2)
    return float(np.max(norm(b - a @ x, -2) / np.where(size == 0, 1, size), initial=0.0))


def normal(rng, shape, dtype):
    x = rng.standard_normal(shape)
    return (x + 1j * rng.standard_normal(shape) if dtype.startswith("complex") else x).astype(dtype)


def conditioned(rng, n, kappa, dtype):
    """Return a matrix with singular values from 1 to 1 / kappa."""
    wide = "complex128" if dtype.startswith("complex") else "float64"
    left, right = (np.linalg.qr(normal(rng, (n, n), wide))[0] for _ in range(2))
    return ((left * np.geomspace(1, 1 / kappa, n)) @ right).astype(dtype)


def positive(rng, n, kappa, dtype):
    wide = "complex128" if dtype.startswith("complex") else "float64"
    vectors = np.linalg.qr(normal(rng, (n, n), wide))[0]
    a = (vectors * np.geomspace(1, 1 / kappa, n)) @ vectors.conj().T
    return ((a + a.conj().T) / 2).astype(dtype)


def check(a, b, **keywords):
    """Solve, and hold the result to the bound; where systems were not refined, to the library's own result."""
    before = a.copy(), b.copy()
    try:
        own = np.linalg.solve(a, b)
    except np.linalg.LinAlgError:
        with pytest.raises(np.linalg.LinAlgError, match="ingular"):
            linalg.solve(a, b, method="refine", **keywords)
        return None
    x, report = linalg.solve(a, b, method="refine", full_output=True, **keywords)
    np.testing.assert_array_equal(a, before[0])
    np.testing.assert_array_equal(b, before[1])
    assert (x.dtype, x.shape) == (own.dtype, own.shape)
    if report.method == "direct":
        assert report.fallbacks == report.systems or a.ndim == 2
        np.testing.assert_array_equal(x, own)
        return report
    limit = bound(a.shape[-1], x.dtype)
    if report.fallbacks:  # a stack of both kinds
        limit = max(limit, backward_error(a, own, b))
    found = backward_error(a, x, b)
    assert found <= limit, (found, limit, report)
    return report


# -- backward errors ------------------------------------------------------------------------------


@dtypes
@pytest.mark.parametrize("n", [1, 2, 3, 17, 33, 65, 150, 300])
@pytest.mark.parametrize("columns", [None, 1, 5])
@pytest.mark.sampled(3)
def test_random_matrices(dtype, n, columns, rng):
    a = normal(rng, (n, n), dtype)
    report = check(a, normal(rng, (n,) if columns is None else (n, columns), dtype))
    assert (report.method, report.fallbacks) == ("refine", 0)


# A factor of 4 bits is too inexact for the refinement of this matrix.
@pytest.mark.parametrize(
    "mode",
    [m for m in lowprec.MathMode if m not in ("fp64", "fp32_pedantic", "mxfp4", "nvfp4")],
    ids=str,
)
def test_every_mode_of_the_factor(mode, rng):
    # fp16 without scaling, too: the matrix is scaled into its range.
    a = conditioned(rng, 256, 10.0, "float64") * 1e30
    report = check(a, normal(rng, (256,), "float64"), factor_mode=mode)
    assert (report.method, report.factor_mode) == ("refine", mode)


@pytest.mark.parametrize("method", ["direct", "refine"])
@pytest.mark.parametrize(
    ("dtype", "factor"),
    [("float32", 2.0**e) for e in (-120, -100, 63, 116)]
    + [("float64", 2.0**e) for e in (-1010, -664, 515, 1016)],
)
def test_the_scale_of_the_operands_does_not_change_the_backward_error(method, dtype, factor, rng):
    a, b = normal(rng, (100, 100), dtype), normal(rng, (100, 2), dtype)
    for left, right in (
        (a * a.dtype.type(factor), b),
        (a * a.dtype.type(factor), b * b.dtype.type(factor)),
    ):
        x, report = linalg.solve(left, right, method=method, full_output=True)
        assert (report.method, np.isfinite(x).all()) == (method, True)
        assert report.backward_error == pytest.approx(
            backward_error(left, x, right), rel=0.01, abs=unit(dtype) / 4
        )


def test_gmres_converges_where_classical_refinement_does_not(rng, monkeypatch):
    a, b = conditioned(rng, 256, 3e4, "float64"), normal(rng, (256, 2), "float64")
    report = check(a, b, factor_mode="tf32")
    assert report.method == "refine"
    assert 0 < report.gmres_steps <= refinement.MAX_STEPS
    monkeypatch.setattr(refinement, "_GMRES_COLUMNS", 1)
    report = check(a, b, factor_mode="tf32")
    assert (report.method, report.reason) == ("direct", SolveReason.NO_CONVERGENCE)


def test_condition_is_that_of_the_frobenius_norm(rng):
    for kappa in (1.0, 1e3, 1e6):
        a = conditioned(rng, 200, kappa, "float64")
        want = np.linalg.norm(a) * np.linalg.norm(np.linalg.inv(a))
        # The mean of squares of two normal numbers is within a factor of 100 with a probability of 0.99 (they are
        # exponentially distributed if one singular value dominates), and the vectors are always the same.
        assert want / 10 < check(a, normal(rng, (200,), "float64")).condition < want * 10


def hilbert(n):
    return 1.0 / (np.arange(n)[:, None] + np.arange(n) + 1)


SPECIAL = {
    "Hilbert": hilbert,
    "Vandermonde": lambda n: np.vander(np.linspace(0, 1, n)),
    "identity": np.eye,
    "Poisson": lambda n: 2 * np.eye(n) - np.eye(n, k=1) - np.eye(n, k=-1),
    # of U: 2^n
    "growth": lambda n: np.eye(n) - np.tril(np.ones((n, n)), -1) + np.outer(np.ones(n), np.eye(n)[-1]),
    "huge": lambda n: np.eye(n) * 1e300 + 1e298,
    "tiny": lambda n: np.eye(n) * 1e-300 + 1e-302,
    "rows": lambda n: (hilbert(n) + np.eye(n)) * np.geomspace(1e-140, 1e140, n)[:, None],
    "columns": lambda n: (hilbert(n) + np.eye(n)) * np.geomspace(1e-140, 1e140, n),
    "both": lambda n: (hilbert(n) + np.eye(n)) * np.geomspace(1e-70, 1e70, n) * np.geomspace(1e70, 1e-70, n)[:, None],
}  # fmt: skip


@pytest.mark.parametrize("name", SPECIAL)
@pytest.mark.parametrize("n", [4, 12, 60])
def test_special_matrices(name, n, rng):
    a = SPECIAL[name](n)
    check(a, a @ np.ones(n))
    check(a, normal(rng, (n, 2), "float64"))


@pytest.mark.parametrize("name", ["huge", "tiny", "rows", "columns", "both"])
def test_scaling_makes_a_factor_possible(name, rng):
    report = check(SPECIAL[name](12), normal(rng, (12,), "float64"))
    assert (report.method, report.fallbacks) == ("refine", 0)


def test_small_rows_have_to_converge_too(rng):
    # Normwise, the last rows do not count: a solution that is wrong in them alone has an error of 0.
    a = np.zeros((201, 201))
    a[0, 0] = 1e200
    a[1:, 1:] = conditioned(rng, 200, 1e15, "float64")
    report = check(a, np.concatenate([[1e200], normal(rng, (200,), "float64")]))
    assert (report.method, report.reason) == ("direct", SolveReason.NO_CONVERGENCE)


# -- stacks, views, libraries ---------------------------------------------------------------------


SHAPES = [
    ((3, 20, 20), (20,)), ((3, 20, 20), (20, 2)), ((20, 20), (4, 20, 2)), ((1, 20, 20), (2, 4, 20, 2)),
    ((2, 1, 20, 20), (3, 20, 2)), ((3, 20, 20), (1, 20, 1)),
]  # fmt: skip


@pytest.mark.parametrize(("of_a", "of_b"), SHAPES, ids=str)
def test_stacks_broadcast(of_a, of_b, xp, rng):
    a, b = normal(rng, of_a, "float64"), normal(rng, of_b, "float64")
    want = np.linalg.solve(a, b)
    x, report = linalg.solve(xp.asarray(a), xp.asarray(b), method="refine", full_output=True)
    assert isinstance(x, xp.result_type)
    found = xp.to_numpy(x)
    assert found.shape == want.shape
    right = b[:, None] if b.ndim == 1 else b
    assert backward_error(a, found[..., None] if b.ndim == 1 else found, right) <= bound(
        20, "float64"
    )
    assert (report.systems, report.fallbacks) == (
        want[..., 0].size // 20 if b.ndim > 1 else want.size // 20,
        0,
    )


@dtypes
@pytest.mark.parametrize("assume", ["gen", "pos"])
def test_every_library(dtype, assume, xp, rng):
    a, b = positive(rng, 90, 50.0, dtype), normal(rng, (90, 3), dtype)
    x, report = linalg.solve(
        xp.asarray(a), xp.asarray(b), method="refine", assume=assume, full_output=True
    )
    assert isinstance(x, xp.result_type)
    assert report.method == "refine"
    found = xp.to_numpy(x)
    assert found.dtype == dtype
    assert backward_error(a, found, b) <= bound(90, dtype)
    assert report.backward_error <= bound(90, dtype)


@pytest.mark.parametrize("xp", [Backend.TORCH, Backend.JAX], indirect=True, ids=lambda b: b.value)
@dtypes
@pytest.mark.parametrize("assume", ["gen", "pos"])
@pytest.mark.parametrize("mode", [None, "bf16"])
@pytest.mark.sampled(4)
def test_the_operations_of_a_gpu(dtype, assume, mode, xp, rng, monkeypatch):
    """The functions that a library has for its own arrays: the same on the CPU."""
    monkeypatch.setattr(solving, "_is_on_host", lambda view: False)
    monkeypatch.setitem(factors._LAPACK, "numpy", "a module that is not imported")
    a, b = np.stack([positive(rng, 70, 20.0, dtype)] * 2), normal(rng, (70, 2), dtype)
    a[1] = np.tril(a[1]) + np.triu(
        a[1].conj().swapaxes(0, 1).T if assume == "pos" else normal(rng, (70, 70), dtype), 1
    )
    a[0] *= 1e-20 if dtype in ("float64", "complex128") else 1e-8
    x, report = linalg.solve(
        xp.asarray(a),
        xp.asarray(b),
        method="refine",
        assume=assume,
        factor_mode=mode,
        full_output=True,
    )
    assert isinstance(x, xp.result_type)
    assert report.fallbacks < 2
    own = np.linalg.solve(a, b)
    for i, one in enumerate(xp.to_numpy(x)):
        assert backward_error(a[i], one, b) <= max(
            bound(70, dtype), 10 * backward_error(a[i], own[i], b)
        )


class LikeCupy(np.ndarray):
    """An array with what CuPy's have, computed by NumPy."""

    @property
    def device(self):
        return warnings.catch_warnings()  # any context manager

    def get(self):
        return np.asarray(self)


@pytest.mark.parametrize("kind", ["lu", "blocked lu", "cholesky"])
def test_the_operations_of_cupy(kind, rng, monkeypatch):
    pytest.importorskip("scipy", reason="scipy is not installed")
    a, b = positive(rng, 100, 10.0, "float32"), normal(rng, (100, 2), "float32")
    ops = factors.Operations(a)
    ops._like, ops._name, ops.is_numpy = a.view(LikeCupy), "cupy", False
    monkeypatch.setitem(factors._LAPACK, "cupy", "scipy.linalg")
    monkeypatch.setattr(factors.Operations, "to_host", lambda self, x: np.asarray(x))
    mode = lowprec.MathMode.FP32 if kind == "lu" else lowprec.MathMode.TF32X3
    solve = factors.factor(
        ops.lowered(a, "float32", None), ops, mode, is_positive=kind == "cholesky"
    )
    x = solve(b.copy())
    # Substitution with |L||U| = O(n) |A|, and inverses of blocks of condition 10.
    assert backward_error(a, x, b) <= 100 * bound(100, "float32")
    np.testing.assert_array_equal(ops.magnitudes(a)[0], abs(a).max(1))


def test_views_are_read_as_they_are(rng):
    base = normal(rng, (180, 180), "float64")
    b = normal(rng, (180, 4), "float64")[::2, ::2]
    for a in (
        base[::2, ::2],
        base[:90, :90].T,
        base[89::-1, :90],
        np.asfortranarray(base[:90, :90]),
    ):
        a.flags.writeable = False
        assert check(a, b).method == "refine"


def test_the_current_mode_is_not_the_factors(rng):
    a, b = normal(rng, (256, 256), "float64"), normal(rng, (256,), "float64")
    plain = check(a, b)
    with lowprec.math_mode("bf16"):
        inside = check(a, b)
        assert lowprec.get_math_mode() == "bf16"
    assert (inside.factor_mode, inside.steps) == (plain.factor_mode, plain.steps)
    a, b = a.astype("float32"), b.astype("float32")
    with lowprec.math_mode("bf16"):
        assert check(a, b).backward_error <= bound(256, "float32")


def test_the_environment_overrides_the_mode(variables, rng):
    variables({"LOWPREC_FORCE_MATH_MODE": "bf16"})
    a, b = conditioned(rng, 256, 5.0, "float64"), normal(rng, (256,), "float64")
    assert check(a, b, factor_mode="fp32").factor_mode == "bf16"


# -- what is left to the library ------------------------------------------------------------------


@pytest.mark.parametrize("method", ["refine", "auto"])
@pytest.mark.parametrize("how", ["block", "variable"])
def test_a_guard_is_direct(method, how, variables, rng):
    a, b = normal(rng, (40, 40), "float64"), normal(rng, (40,), "float64")
    if how == "variable":
        variables({"LOWPREC_FP32_GUARD": "1", "LOWPREC_FORCE_MATH_MODE": "fp32_pedantic"})
        x, report = linalg.solve(a, b, method=method, factor_mode="bf16", full_output=True)
    else:
        with lowprec.fp32_guard():
            x, report = linalg.solve(a, b, method=method, factor_mode="bf16", full_output=True)
    np.testing.assert_array_equal(x, np.linalg.solve(a, b))
    assert (report.method, report.reason, report.factor_mode) == (
        "direct",
        SolveReason.GUARDED,
        None,
    )


SINGULAR = {
    "zero": np.zeros((5, 5)),
    "row": np.diag([1.0, 2, 0, 4, 5]),
    "equal rows": np.array([[1.0, 2, 3], [1, 2, 3], [4, 5, 7]]),
}


@pytest.mark.parametrize("name", SINGULAR)
def test_singular_matrices_are_the_librarys_affair(name, xp):
    a = SINGULAR[name]
    for stack in (a, np.stack([np.eye(len(a)), a])):
        b = np.ones((len(a), 1))
        if xp.name == "jax":
            x, report = linalg.solve(
                xp.asarray(stack), xp.asarray(b), method="refine", full_output=True
            )
            assert not np.isfinite(xp.to_numpy(x)[..., :, :]).all()
            assert (report.fallbacks, report.reason) == (1, SolveReason.BREAKDOWN)
            continue
        errors = xp.torch.linalg.LinAlgError if xp.name == "torch" else np.linalg.LinAlgError
        with pytest.raises(errors, match="ingular"):
            linalg.solve(xp.asarray(stack), xp.asarray(b), method="refine")


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("mode", [None, "bf16", "fp16"])
def test_systems_singular_in_the_working_precision_have_the_library_s_result(dtype, mode, rng):
    for _ in range(8):  # NumPy's pivot is zero in some of them, and it raises
        a, b = normal(rng, (3, 20, 20), dtype), normal(rng, (20, 2), dtype)
        a[1, 10] = a[1, 3]
        report = check(a, b, factor_mode=mode)
        assert report is None or report.fallbacks == 1


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("where", ["a", "b"])
def test_numbers_that_are_not_finite(value, where, xp, rng):
    a, b = normal(rng, (40, 40), "float64"), normal(rng, (40, 2), "float64")
    (a if where == "a" else b)[7, 1] = value
    want = linalg.solve(xp.asarray(a), xp.asarray(b))
    x, report = linalg.solve(xp.asarray(a), xp.asarray(b), method="refine", full_output=True)
    np.testing.assert_array_equal(xp.to_numpy(x), xp.to_numpy(want))
    assert (report.method, report.reason, report.fallbacks) == ("direct", SolveReason.NOT_FINITE, 1)


def test_a_matrix_that_is_not_positive_definite(rng):
    a = normal(rng, (60, 60), "float64")
    report = check(a + a.T, normal(rng, (60,), "float64"), assume="pos")
    assert (report.method, report.reason, report.fallbacks) == ("direct", SolveReason.BREAKDOWN, 1)


def test_a_stack_of_both_kinds(rng):
    a = np.stack([conditioned(rng, 200, 10.0, "float64"), conditioned(rng, 200, 1e15, "float64")])
    report = check(a, normal(rng, (200, 1), "float64"))
    assert (report.method, report.systems, report.fallbacks) == ("refine", 2, 1)
    assert report.reason is SolveReason.NO_CONVERGENCE
    assert "2, of which 1 solved directly after all" in str(report)


@pytest.mark.parametrize(
    ("of_a", "of_b"), [((0, 0), (0,)), ((0, 3, 3), (3, 1)), ((3, 3), (3, 0))], ids=str
)
def test_nothing_to_solve(of_a, of_b):
    x, report = linalg.solve(
        np.broadcast_to(np.eye(of_a[-1]), of_a), np.ones(of_b), method="refine", full_output=True
    )
    assert x.size == 0
    assert (report.method, report.reason) == ("direct", SolveReason.EMPTY)


# -- auto -----------------------------------------------------------------------------------------


def test_small_systems_are_direct(xp, rng):
    a, b = normal(rng, (30, 30), "float64"), normal(rng, (30, 2), "float64")
    x, report = linalg.solve(xp.asarray(a), xp.asarray(b), method="auto", full_output=True)
    np.testing.assert_array_equal(
        xp.to_numpy(x), xp.to_numpy(linalg.solve(xp.asarray(a), xp.asarray(b)))
    )
    assert (report.method, report.reason) == ("direct", SolveReason.NOT_FASTER)


def test_large_systems_are_refined():
    def chosen(n, columns=1, dtype="float64"):
        found = solving.operands(
            "solve", a=np.broadcast_to(np.zeros((), dtype), (n, n)), b=np.zeros((n, columns), dtype)
        )
        call = solving._Solve(found, (), "auto", None, False)
        return call._read() is None

    assert [chosen(n) for n in (256, 1024, 4096, 8192)] == [False, True, True, True]
    assert not chosen(4096, 4096), (
        "products with as many right-hand sides cost more than the factor"
    )
    assert not chosen(4096, 256)
    assert not chosen(1024, dtype="float32")


def test_auto_refines_where_it_is_faster(rng, monkeypatch):
    monkeypatch.setattr(solving, "_REFINE", 0.0)
    monkeypatch.setattr(solving, "_SMALLEST", 0)
    a, b = normal(rng, (100, 100), "float64"), normal(rng, (100,), "float64")
    x, report = linalg.solve(a, b, method="auto", full_output=True)
    assert (report.method, report.reason) == ("refine", SolveReason.FASTER)
    assert backward_error(a, x, b) <= max(
        unit("float64"), backward_error(a, np.linalg.solve(a, b), b)
    )


def test_without_scipy(rng, monkeypatch):
    monkeypatch.setattr(solving, "find_spec", lambda name: None)
    a, b = rng.standard_normal((8, 8)), rng.standard_normal(8)
    with pytest.raises(
        lowprec.UnsupportedError, match=r"refinement in host memory uses SciPy.*pip install scipy"
    ):
        linalg.solve(a, b, method="refine")
    x, report = linalg.solve(a, b, method="auto", full_output=True)
    assert (report.method, report.reason) == ("direct", SolveReason.NO_LAPACK)
    np.testing.assert_array_equal(x, np.linalg.solve(a, b))


def test_a_cheap_mode_is_tried_first(rng, monkeypatch):
    bf16, fp32 = lowprec.MathMode.BF16, lowprec.MathMode.FP32
    monkeypatch.setattr(
        solving._Solve, "_costs", lambda self, dtype: {bf16: (0.1, 8e-3), fp32: (1.0, 1e-6)}
    )
    b = normal(rng, (256,), "float64")
    assert check(conditioned(rng, 256, 2.0, "float64"), b).factor_mode == bf16
    # the second factor, too, is of the scaled matrix
    for scale in (1.0, np.geomspace(1, 1e8, 256)):
        report = check(conditioned(rng, 256, 1e5, "float64") * scale, b)
        assert (report.method, report.factor_mode, report.fallbacks) == ("refine", fp32, 0)


def test_gradients_and_tracers(torch):
    a = (torch.eye(3, dtype=torch.float64) * 2).requires_grad_()
    b = torch.ones(3, dtype=torch.float64)
    x, report = linalg.solve(a, b, method="auto", full_output=True)
    assert (report.method, report.reason) == ("direct", SolveReason.NOT_READABLE)
    assert np.isnan(report.backward_error)
    x.sum().backward()
    np.testing.assert_allclose(a.grad.numpy(), -0.25, rtol=1e-15)
    with pytest.raises(lowprec.ArrayError, match=r"^a: .*grad"):
        linalg.solve(a, b, method="refine")
    jax = load_or_skip(Backend.JAX).jax
    solve = jax.jit(lambda a: linalg.solve(a, a[0], method="auto"))
    np.testing.assert_allclose(solve(2 * jax.numpy.eye(3)), [1.0, 0, 0], rtol=1e-6)
    with pytest.raises(lowprec.ArrayError, match=r"^a: a JAX tracer"):
        jax.jit(lambda a: linalg.solve(a, a[0], method="refine"))(2 * jax.numpy.eye(3))


# -- the report, refusals, interrupts -------------------------------------------------------------


def test_the_report(rng):
    a, b = normal(rng, (64, 64), "float64"), normal(rng, (64,), "float64")
    x, report = linalg.solve(a, b, method="refine", factor_mode="bf16x3", full_output=True)
    text = str(report)
    assert text.startswith("solve\n")
    assert "updates in bf16x3" in text
    assert "<table>" in report._repr_html_()
    assert set(dict(report.seconds)) == {"scaling", "factor", "refinement"}
    assert report.backward_error == pytest.approx(backward_error(a, x, b), abs=64 * unit("float64"))
    x, report = linalg.solve(a, b, full_output=True)
    np.testing.assert_array_equal(x, np.linalg.solve(a, b))
    assert (report.method, report.reason, report.condition) == (
        "direct",
        SolveReason.REQUESTED,
        None,
    )
    assert report.backward_error == pytest.approx(backward_error(a, x, b), abs=64 * unit("float64"))


EYE = np.eye(3)

REFUSED = [
    ((EYE, EYE[0]), {"method": "lu"}, lowprec.SettingError, r"no method='lu'; choose one of: 'direct', 'ref"),
    ((EYE, EYE[0]), {"method": None}, lowprec.SettingError, r"no method=None; choose one of: 'direct'"),
    ((EYE, EYE[0]), {"assume": "spd"}, lowprec.SettingError, r"no assume='spd'; choose one of: 'gen', 'pos'"),
    ((EYE, EYE[0]), {"method": "refine", "factor_mode": "half"}, lowprec.ModeError, "^factor_mode 'half' is not a mat"),
    ((EYE, EYE[0]), {"factor_mode": "bf16"}, lowprec.SettingError, "factor_mode is for method='refine' or 'auto'"),
    ((EYE[:2], EYE[0]), {"method": "refine"}, lowprec.ShapeError, r"square matrices.*a has shape \(2, 3\)"),
    ((EYE[0], EYE[0]), {"method": "refine"}, lowprec.ShapeError, r"square matrices.*a has shape \(3,\)"),
    ((EYE, EYE[0, :2]), {"method": "auto"}, lowprec.ShapeError, r"b must have shape \(3,\) or .*has shape \(2,\)"),
    ((EYE, EYE[0, 0]), {"method": "auto"}, lowprec.ArrayError, "got numpy.float64"),
    ((np.ones((2, 3, 3)), np.ones((5, 3, 1))), {"method": "refine"}, lowprec.ShapeError, "do not broadcast"),
    ((EYE.astype("float16"), EYE[0]), {"method": "refine"}, lowprec.DTypeError, "a is float16; convert it first"),
    (([[1.0]], [1.0]), {"method": "refine"}, lowprec.ArrayError, "^a: .*got list"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("operands", "keywords", "error", "message"), REFUSED, ids=range(len(REFUSED))
)
def test_bad_arguments(operands, keywords, error, message):
    with pytest.raises(error, match=message):
        linalg.solve(*operands, **keywords)
