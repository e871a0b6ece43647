"""``lowprec.linalg`` over every array library: backward errors, result types, the guard inside, and what is refused.

Bounds are those of N. J. Higham, *Accuracy and Stability of Numerical Algorithms*, 2nd edition, SIAM
2002 (ASNA), evaluated in float64. ``gamma(k) = k u / (1 - k u)``; a complex operation counts as six
real ones (ASNA lemma 3.5: its error is at most sqrt(2) gamma_4).
"""

from __future__ import annotations

import contextlib
import inspect
import math
import sys
from collections.abc import Callable, Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

import lowprec
from frameworks.backends import ArrayNamespace, Backend, DLPackOnly
from lowprec import linalg
from lowprec.linalg import routes
from support import oracles
from support.cpu_units import imitated_units, medium_lowers

Array = NDArray[Any]

single = pytest.mark.parametrize("dtype", ["float32", "complex64"])


def stacks(test: Callable[..., None]) -> Callable[..., None]:
    """Run a test over a sample of both types, stacks of matrices and libraries."""
    batches = pytest.mark.parametrize("batch", [(), (3,), (2, 1)], ids=str)
    return pytest.mark.sampled(4)(single(batches(test)))


FUNCTIONS = sorted(routes.ROUTES)

#: SciPy computes these for NumPy's arrays, and so for those that are known only by DLPack.
SCIPYS = ("expm", "cdist")


def need_scipy(xp: ArrayNamespace) -> None:
    if xp.name in ("numpy", "dlpack_only"):
        pytest.importorskip("scipy", reason="scipy is not installed")


# -- operands and bounds --------------------------------------------------------------------------


def make(rng: np.random.Generator, *shape: int, dtype: str = "float32") -> Array:
    return oracles.random_matrix(rng, shape, dtype)


wide = oracles.widen


def adjoint(x: Array) -> Array:
    return x.swapaxes(-1, -2).conj()


def gamma(k: float, dtype: str) -> float:
    return oracles.gamma(6 * k if dtype.startswith("complex") else k, 2.0**-24)


def householder(k: float, dtype: str) -> float:
    """ASNA's gamma with a tilde: ``gamma(c k)`` with a small constant, for which ten is ample (section 19.3)."""
    return gamma(10 * k, dtype)


def norm(x: Array) -> Array:
    return np.linalg.norm(x, axis=(-2, -1))


def lu_moduli(a: Array) -> Array:
    """Return ``|L| |U|`` of Gaussian elimination with partial pivoting, its rows in the order of ``a``."""
    if a.ndim > 2:
        return np.stack([lu_moduli(x) for x in a]) if len(a) else np.abs(a)
    n = len(a)
    upper, lower, order = wide(a).copy(), np.zeros_like(wide(a)), np.arange(n)
    for j in range(n):
        pivot = j + np.argmax(abs(upper[j:, j]))
        for x in (upper, lower, order):
            x[[j, pivot]] = x[[pivot, j]]
        lower[j:, j] = upper[j:, j] / upper[j, j]
        upper[j + 1 :] -= np.outer(lower[j + 1 :, j], upper[j])
    found = np.empty((n, n))
    found[order] = abs(lower) @ abs(np.triu(upper))
    return found


def accept(xp: ArrayNamespace, result: Any, shape: tuple[int, ...], dtype: str) -> Array:
    """Check library, shape and dtype of a result; return its elements in float64 or complex128."""
    # NumPy's own results without axes are scalars.
    scalar = xp.name == "numpy" and not shape
    assert isinstance(result, np.generic if scalar else xp.result_type)
    elements = xp.to_numpy(result)
    assert (elements.shape, elements.dtype.name) == (shape, dtype)
    return wide(elements)


def real(dtype: str) -> str:
    return {"complex64": "float32", "complex128": "float64"}.get(dtype, dtype)


# -- the functions, against float64 ---------------------------------------------------------------


@stacks
@pytest.mark.parametrize("columns", [None, 1, 4])
def test_solve(xp: ArrayNamespace, dtype: str, batch: Any, columns: int | None, rng: np.random.Generator) -> None:
    n = 12
    a = make(rng, *batch, n, n, dtype=dtype)
    b = make(rng, n, dtype=dtype) if columns is None else make(rng, *batch, n, columns, dtype=dtype)
    shape = (*batch, n) if columns is None else b.shape
    x = accept(xp, linalg.solve(xp.asarray(a), xp.asarray(b)), shape, dtype)
    x = x[..., None] if columns is None else x
    right = b[:, None] if columns is None else b
    # ASNA theorem 9.4: (A + E) x = b with |E| <= gamma_3n |L| |U|.
    bound = gamma(3 * n, dtype) * (lu_moduli(a) @ abs(x))
    assert (abs(wide(right) - wide(a) @ x) <= bound).all()


def test_only_a_vector_is_a_vector(xp: ArrayNamespace, rng: np.random.Generator) -> None:
    # For these shapes torch.linalg.solve takes three vectors, the Array API one matrix.
    a, b = make(rng, 3, 3, 3), make(rng, 3, 3)
    x = accept(xp, linalg.solve(xp.asarray(a), xp.asarray(b)), (3, 3, 3), "float32")
    residual = abs(wide(b) - wide(a) @ x)
    assert (residual <= gamma(9, "float32") * (lu_moduli(a) @ abs(x))).all()


@stacks
def test_inv(xp: ArrayNamespace, dtype: str, batch: Any, rng: np.random.Generator) -> None:
    n = 12
    a = make(rng, *batch, n, n, dtype=dtype)
    x = accept(xp, linalg.inv(xp.asarray(a)), a.shape, dtype)
    # As for solve, with b = I, where all four libraries solve; LAPACK's getri has the residual XA - I
    # under c_n u |X| |L| |U| instead (ASNA section 14.3), so either may be small.
    error = [abs(wide(a) @ x - np.eye(n)), abs(x @ wide(a) - np.eye(n))]
    bound = [lu_moduli(a) @ abs(x), abs(x) @ lu_moduli(a)]
    assert any((e <= gamma(3 * n, dtype) * b).all() for e, b in zip(error, bound, strict=True))


@single
@pytest.mark.parametrize("shape", [(9, 5), (5, 9)], ids=str)
@pytest.mark.parametrize("columns", [None, 3])
@pytest.mark.sampled(4)
def test_lstsq(xp: ArrayNamespace, dtype: str, shape: Any, columns: int | None, rng: np.random.Generator) -> None:
    m, n = shape
    a = make(rng, m, n, dtype=dtype)
    b = make(rng, m, dtype=dtype) if columns is None else make(rng, m, columns, dtype=dtype)
    found = linalg.lstsq(xp.asarray(a), xp.asarray(b))
    x = accept(xp, found.solution, (n, *b.shape[1:]), dtype)
    want, squares, rank, singular = np.linalg.lstsq(wide(a), wide(b))
    # A stable method solves a problem perturbed by eps = gamma~_mn, and this moves the solution by
    # Wedin's theorem (ASNA 20.1; by 20.3 a factor of min(m, n) for norms by columns).
    eps = householder(m * n, dtype) * math.sqrt(min(m, n))
    kappa = singular[0] / singular[-1]
    residual = np.linalg.norm(wide(b) - wide(a) @ want)
    size = np.linalg.norm(want)
    bound = kappa * eps / (1 - kappa * eps) * (2 + (kappa + 1) * residual / (singular[0] * size))
    assert np.linalg.norm(x - want) <= bound * size
    assert int(xp.to_numpy(found.rank)) == rank
    values = accept(xp, found.singular_values, singular.shape, real(dtype))
    assert (abs(values - singular) <= eps * singular[0]).all()
    if m > n:
        sums = xp.to_numpy(found.residuals)
        assert sums.shape == np.atleast_1d(squares).shape
        np.testing.assert_allclose(sums, squares, rtol=2 * bound)


@single
def test_lstsq_ignores_singular_values_below_rtol(xp: ArrayNamespace, dtype: str, rng: np.random.Generator) -> None:
    a = np.diag([4.0, 2.0, 1e-3]).astype(dtype)
    b = np.ones(3, dtype)
    found = linalg.lstsq(xp.asarray(a), xp.asarray(b), rtol=1e-2)
    assert int(xp.to_numpy(found.rank)) == 2
    x = accept(xp, found.solution, (3,), dtype)
    assert (abs(x - [0.25, 0.5, 0.0]) <= householder(9, dtype)).all()


@stacks
@pytest.mark.parametrize("shape", [(9, 5), (5, 9)], ids=str)
def test_pinv(xp: ArrayNamespace, dtype: str, batch: Any, shape: Any, rng: np.random.Generator) -> None:
    m, n = shape
    a = make(rng, *batch, m, n, dtype=dtype)
    x = accept(xp, linalg.pinv(xp.asarray(a)), (*batch, n, m), dtype)
    want = np.linalg.pinv(wide(a))
    # The pseudoinverse of A + E, |E| = gamma~_mn |A|, is off by at most 2 |A+|^2 |E| (ASNA 20.11,
    # Wedin), and the product of its factors adds gamma_n |V| |1/S| |U|. The factor 2 is for E in both.
    singular = np.linalg.svd(wide(a), compute_uv=False)
    kappa = singular.max(-1) / singular.min(-1)
    bound = 4 * householder(m * n, dtype) * math.sqrt(min(m, n)) * kappa * norm(want)
    assert (norm(x - want) <= bound).all()


def test_pinv_counts_noise_as_zero_in_float32(xp: ArrayNamespace, rng: np.random.Generator) -> None:
    # Of rank 2 in exact arithmetic. NumPy's own default cutoff, 1e-15, would invert rounding errors.
    a = make(rng, 8, 2) @ make(rng, 2, 6)
    found = accept(xp, linalg.pinv(xp.asarray(a)), (6, 8), "float32")
    smallest = np.linalg.svd(wide(a), compute_uv=False)[1]
    assert norm(found) < 2 * math.sqrt(2) / smallest
    half = accept(xp, linalg.pinv(xp.asarray(np.diag([4.0, 1.0])), rtol=0.5), (2, 2), "float64")
    np.testing.assert_allclose(half, np.diag([0.25, 0.0]), atol=1e-15)


@stacks
def test_cholesky(xp: ArrayNamespace, dtype: str, batch: Any, rng: np.random.Generator) -> None:
    n = 12
    factor = make(rng, *batch, n, n, dtype=dtype)
    a = factor @ adjoint(factor) + np.eye(n, dtype=dtype)
    a = (a + adjoint(a)) / 2
    lower = accept(xp, linalg.cholesky(xp.asarray(a)), a.shape, dtype)
    np.testing.assert_array_equal(lower, np.tril(lower))
    # ASNA theorem 10.3.
    bound = gamma(n + 1, dtype) * (abs(lower) @ abs(adjoint(lower)))
    assert (abs(lower @ adjoint(lower) - wide(a)) <= bound).all()


@stacks
@pytest.mark.parametrize("shape", [(9, 5), (5, 9)], ids=str)
@pytest.mark.parametrize("mode", ["reduced", "complete"])
def test_qr(xp: ArrayNamespace, dtype: str, batch: Any, shape: Any, mode: str, rng: np.random.Generator) -> None:
    m, n = shape
    k = m if mode == "complete" else min(m, n)
    a = make(rng, *batch, m, n, dtype=dtype)
    found = linalg.qr(xp.asarray(a), mode=mode)
    q = accept(xp, found.Q, (*batch, m, k), dtype)
    r = accept(xp, found.R, (*batch, k, n), dtype)
    np.testing.assert_array_equal(r, np.triu(r))
    # ASNA theorem 19.4 and equation 19.13: A + E = QR by columns, and Q is that near to orthonormal;
    # each of the two errors is counted for A - QR.
    eps = householder(m * n, dtype) * math.sqrt(k)
    assert (norm(q @ r - wide(a)) <= 2 * eps * norm(wide(a))).all()
    assert (norm(adjoint(q) @ q - np.eye(k)) <= 2 * eps).all()


@stacks
def test_eigh(xp: ArrayNamespace, dtype: str, batch: Any, rng: np.random.Generator) -> None:
    n = 8
    a = make(rng, *batch, n, n, dtype=dtype)
    a = (a + adjoint(a)) / 2
    found = linalg.eigh(xp.asarray(a))
    values = accept(xp, found.eigenvalues, (*batch, n), real(dtype))
    vectors = accept(xp, found.eigenvectors, a.shape, dtype)
    # LAPACK Users' Guide, section 4.7.1: the exact ones of A + E, |E| <= p(n) u |A|. p(n) is that of
    # n - 2 Householder transformations from either side.
    eps = householder(2 * n * n, dtype) * norm(wide(a))
    assert (abs(values - np.linalg.eigvalsh(wide(a))) <= eps[..., None]).all()
    assert (norm(wide(a) @ vectors - vectors * values[..., None, :]) <= 2 * eps).all()
    assert (norm(adjoint(vectors) @ vectors - np.eye(n)) <= householder(2 * n * n, dtype)).all()


@stacks
@pytest.mark.parametrize("full", [True, False])
def test_svd(xp: ArrayNamespace, dtype: str, batch: Any, full: bool, rng: np.random.Generator) -> None:
    m, n = 9, 5
    a = make(rng, *batch, m, n, dtype=dtype)
    found = linalg.svd(xp.asarray(a), full_matrices=full)
    u = accept(xp, found.U, (*batch, m, m if full else n), dtype)
    values = accept(xp, found.S, (*batch, n), real(dtype))
    vh = accept(xp, found.Vh, (*batch, n, n), dtype)
    # LAPACK Users' Guide, section 4.9.1, as for eigh.
    eps = householder(2 * m * n, dtype)
    size = norm(wide(a))
    want = np.linalg.svd(wide(a), compute_uv=False)
    assert (abs(values - want) <= eps * size[..., None]).all()
    assert (norm((u[..., :n] * values[..., None, :]) @ vh - wide(a)) <= 2 * eps * size).all()
    for q in (u, adjoint(vh)):
        assert (norm(adjoint(q) @ q - np.eye(q.shape[-1])) <= eps).all()


def determinant_error(a: Array, dtype: str) -> Array:
    """Relative error of a determinant by elimination: that of ``det(A + E)``, |E| <= gamma_n |L| |U| (ASNA 14.6)."""
    n = a.shape[-1]
    moved = norm(abs(np.linalg.inv(wide(a))) @ lu_moduli(a)) * gamma(n, dtype)
    return np.expm1(n * np.log1p(moved)) + gamma(n, dtype)


@stacks
def test_det_and_slogdet(xp: ArrayNamespace, dtype: str, batch: Any, rng: np.random.Generator) -> None:
    a = make(rng, *batch, 8, 8, dtype=dtype)
    bound = determinant_error(a, dtype)
    want = np.linalg.det(wide(a))
    found = accept(xp, linalg.det(xp.asarray(a)), batch, dtype)
    # CuPy and some versions of others exponentiate a logarithm: its rounding counts, too.
    assert (abs(found - want) <= (bound + gamma(50, dtype)) * abs(want)).all()
    parts = linalg.slogdet(xp.asarray(a))
    sign = accept(xp, parts.sign, batch, dtype)
    log = accept(xp, parts.logabsdet, batch, real(dtype))
    want_sign, want_log = np.linalg.slogdet(wide(a))
    assert (abs(sign - want_sign) <= (2 * bound if dtype == "complex64" else 0)).all()
    # Eight logarithms of moderate numbers, of modulus below 8, each rounded, and their sum.
    assert (abs(log - want_log) <= 2 * bound + gamma(16, dtype) * 8).all()


@stacks
@pytest.mark.parametrize("n", [5, 1, 0, -2])
def test_matrix_power(xp: ArrayNamespace, dtype: str, batch: Any, n: int, rng: np.random.Generator) -> None:
    m = 12
    a = make(rng, *batch, m, m, dtype=dtype) + 8 * np.eye(m, dtype=dtype)
    found = accept(xp, linalg.matrix_power(xp.asarray(a), n), a.shape, dtype)
    want = np.linalg.matrix_power(wide(a), n)
    base = wide(a) if n >= 0 else np.linalg.inv(wide(a))
    size = np.linalg.matrix_power(abs(base), abs(n))
    # A chain of n factors has n - 1 products, each off by gamma_m of the moduli (ASNA section 3.5). An
    # inverse comes in with the error of solve.
    relative = (1 + gamma(m, dtype)) ** max(abs(n) - 1, 0) - 1
    if n < 0:
        moved = gamma(3 * m, dtype) * norm(abs(base) @ lu_moduli(a))
        relative = relative + abs(n) * np.max(moved / (1 - moved))
        size = norm(size)[..., None, None]
    assert (abs(found - want) <= relative * size).all()


@stacks
def test_matrix_rank(xp: ArrayNamespace, dtype: str, batch: Any, rng: np.random.Generator) -> None:
    a = make(rng, *batch, 9, 3, dtype=dtype) @ make(rng, *batch, 3, 7, dtype=dtype)
    found = xp.to_numpy(linalg.matrix_rank(xp.asarray(a)))
    assert found.dtype.kind == "i"
    np.testing.assert_array_equal(found, np.full(batch, 3))
    loose = linalg.matrix_rank(xp.asarray(np.diag([4.0, 3.0, 1.0]).astype(dtype)), rtol=0.5)
    assert int(xp.to_numpy(loose)) == 2


@stacks
@pytest.mark.parametrize("size", [0.3, 2.0])
def test_expm(xp: ArrayNamespace, dtype: str, batch: Any, size: float, rng: np.random.Generator) -> None:
    need_scipy(xp)
    n = 10
    a = make(rng, *batch, n, n, dtype=dtype)
    a = (a * (size / norm(a))[..., None, None]).astype(dtype)
    found = accept(xp, linalg.expm(xp.asarray(a)), a.shape, dtype)
    # N. J. Higham, Functions of Matrices, SIAM 2008, theorem 10.21 and section 10.7.1: a polynomial
    # of degree 18 at most, evaluated and solved with (gamma_nd e^|A| for each), then s squarings,
    # each of which adds gamma_n and doubles what was there. All norms are within e^|A|.
    squarings = max(0, math.ceil(math.log2(size / 0.3)))
    bound = 2**squarings * (3 * gamma(n * 18, dtype) + gamma(n, dtype)) * math.exp(2 * size)
    assert (norm(found - exponential(wide(a))) <= bound).all()


def exponential(a: Array) -> Array:
    """Return the matrix exponential by its series, in float64: enough terms for moderate norms."""
    term = total = np.broadcast_to(np.eye(a.shape[-1]), a.shape).astype(a.dtype)
    for k in range(1, 60):
        term = term @ a / k
        total = total + term
    return total


WITH_CDIST = [b for b in Backend if b is not Backend.JAX]


@pytest.mark.parametrize("xp", WITH_CDIST, indirect=True, ids=lambda b: b.value)
@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("points", [(4, 7), (40, 50)], ids=str)
def test_cdist(xp: ArrayNamespace, dtype: str, points: Any, rng: np.random.Generator) -> None:
    need_scipy(xp)
    k = 6
    a, b = (make(rng, p, k).astype(dtype) for p in points)
    found = accept(xp, linalg.cdist(xp.asarray(a), xp.asarray(b)), points, dtype)
    want = np.sqrt(((wide(a)[:, None] - wide(b)) ** 2).sum(-1))
    # |x|^2 - 2 x.y + |y|^2 has an error of gamma_(k+2) (|x| + |y|)^2 (ASNA section 3.1), and its root
    # that divided by the distance; torch uses it for more than 25 points. float64 is held to float32's bound.
    squares = (np.linalg.norm(wide(a), axis=1)[:, None] + np.linalg.norm(wide(b), axis=1)) ** 2
    assert (abs(found - want) <= gamma(k + 4, "float32") * squares / want).all()


def test_torch_takes_stacks_where_others_do_not(torch: Any, rng: np.random.Generator) -> None:
    a, b = make(rng, 3, 9, 5), make(rng, 9, 3)
    found = linalg.lstsq(torch.tensor(a), torch.tensor(b)[None].expand(3, 9, 3))
    for i in range(3):
        want = np.linalg.lstsq(wide(a[i]), wide(b))[0]
        np.testing.assert_allclose(found.solution[i].numpy(), want, rtol=1e-4, atol=1e-5)
    assert linalg.cdist(torch.tensor(a), torch.tensor(a)).shape == (3, 9, 9)


# -- all functions alike --------------------------------------------------------------------------


def operands(function: str, dtype: str = "float32") -> tuple[Array, ...]:
    """Arrays that each function takes, well conditioned and positive definite."""
    a = (np.eye(4) * 3 + 0.5).astype(dtype)
    return (a, a[:, :2].copy() if function == "lstsq" else a) if function in TWO else (a,)


TWO = ("solve", "lstsq", "cdist")
NUMBERS: dict[str, tuple[int, ...]] = {"matrix_power": (3,)}

FIELDS = {
    "eigh": ("eigenvalues", "eigenvectors"),
    "lstsq": ("solution", "residuals", "rank", "singular_values"),
    "qr": ("Q", "R"),
    "slogdet": ("sign", "logabsdet"),
    "svd": ("U", "S", "Vh"),
}


def call(function: str, xp: ArrayNamespace, arrays: tuple[Array, ...]) -> Any:
    more = NUMBERS.get(function, ())
    return getattr(linalg, function)(*map(xp.asarray, arrays), *more)


@pytest.mark.parametrize("function", FUNCTIONS)
def test_the_library_is_called_inside_the_guard_and_its_results_are_named(
    function: str, xp: ArrayNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    if function in SCIPYS:
        need_scipy(xp)
    if (function, xp.name) in routes.LACKING:
        with pytest.raises(lowprec.UnsupportedError, match=f"{xp.name} has no {function}; take"):
            call(function, xp, operands(function))
        return
    library = {"dlpack_only": "numpy"}.get(xp.name, xp.name)
    route = routes.ROUTES[function][library]
    routes.find(function, library)  # loads the module
    module, seen = sys.modules[route.module], []
    original: Callable[..., Any] = getattr(module, route.name)

    def spy(*args: Any, **keywords: Any) -> Any:
        seen.append(str(lowprec.get_math_mode()))
        return original(*args, **keywords)

    monkeypatch.setattr(module, route.name, spy)
    with lowprec.math_mode("bf16"):
        result = call(function, xp, operands(function))
        assert str(lowprec.get_math_mode()) == "bf16"
    assert seen == ["fp32"]
    fields = FIELDS.get(function)
    assert getattr(result, "_fields", None) == fields
    kinds = (xp.result_type, np.generic) if xp.name == "numpy" else xp.result_type
    for part in result if fields else (result,):
        assert isinstance(part, kinds)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("dtype", ["float64", "complex128"])
@pytest.mark.parametrize("function", [f for f in FUNCTIONS if f not in SCIPYS])
def test_wide_types_are_the_librarys_own_result(function: str, dtype: str, xp: ArrayNamespace) -> None:
    result = call(function, xp, operands(function, dtype))
    library = {"dlpack_only": "numpy"}.get(xp.name, xp.name)
    # lstsq and pinv are called with lowprec's tolerance, and with the driver that gives all results.
    keywords = {"lstsq": {"rtol": 4 * 2.0**-52}, "pinv": {"rtol": 4 * 2.0**-52}}.get(function, {})
    host = Backend.NUMPY.load() if xp.name == "dlpack_only" else xp
    inputs = map(host.asarray, operands(function, dtype))
    power = {"n": 3} if function == "matrix_power" else {}
    own = routes.find(function, library)(*inputs, **keywords, **power)
    pairs = zip(result, own, strict=True) if function in FIELDS else [(result, own)]
    for got, want in pairs:
        np.testing.assert_array_equal(xp.to_numpy(got), host.to_numpy(want))


@pytest.mark.parametrize("function", ["solve", "lstsq"])
def test_mixed_types_go_to_the_wider(function: str, xp: ArrayNamespace) -> None:
    a, b = operands(function)
    result = getattr(linalg, function)(xp.asarray(a.astype("float64")), xp.asarray(b))
    x = result.solution if function == "lstsq" else result
    accept(xp, x, b.shape, "float64")
    result = getattr(linalg, function)(xp.asarray(a), xp.asarray(b.astype("complex64")))
    x = result.solution if function == "lstsq" else result
    accept(xp, x, b.shape, "complex64")


def test_an_empty_batch(xp: ArrayNamespace) -> None:
    a = xp.asarray(np.empty((0, 3, 3), np.float32))
    accept(xp, linalg.inv(a), (0, 3, 3), "float32")
    accept(xp, linalg.det(a), (0,), "float32")
    accept(xp, linalg.svd(a).S, (0, 3), "float32")


@pytest.mark.parametrize("xp", [Backend.NUMPY, Backend.DLPACK_ONLY], indirect=True)
def test_views_are_read_as_they_are(xp: ArrayNamespace, rng: np.random.Generator) -> None:
    base = make(rng, 8, 8)
    for view in (base.T, base[::-1], base[::2, ::2], base[:, ::-1]):
        found = xp.to_numpy(linalg.det(xp.asarray(view)))
        np.testing.assert_array_equal(found, np.linalg.det(view))


def test_a_result_for_dlpack_is_an_operand_again() -> None:
    a = DLPackOnly(np.eye(3, dtype=np.float32) * 2)
    x = linalg.solve(a, linalg.inv(a))
    assert isinstance(x, lowprec.DLPackArray)
    np.testing.assert_array_equal(np.asarray(x), np.eye(3, dtype=np.float32) / 4)
    assert linalg.matrix_rank(a).dtype == "int32"


# -- the guard inside, seen from outside ----------------------------------------------------------


@pytest.fixture
def medium(torch: Any) -> Iterator[Any]:
    """torch in a process that asks for bfloat16 products."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("medium")
    yield torch
    torch.set_float32_matmul_precision(before)


AFFECTED = {
    "expm": lambda torch, a: torch.linalg.matrix_exp(a),
    "cdist": lambda torch, a: torch.cdist(a, a),
    "matrix_power": lambda torch, a: torch.linalg.matrix_power(a, 5),
    "pinv": lambda torch, a: torch.linalg.pinv(a, rtol=128 * 2.0**-23),
}


@pytest.mark.parametrize("units", ["of this machine", "imitated"])
@pytest.mark.parametrize("function", AFFECTED)
def test_torch_computes_in_full_fp32(function: str, units: str, medium: Any, rng: np.random.Generator) -> None:
    a = medium.tensor(make(rng, 128, 128) / 12)
    arguments = {"cdist": (a,), "matrix_power": (5,)}.get(function, ())
    with imitated_units(medium) if units == "imitated" else contextlib.nullcontext():
        lowered = AFFECTED[function](medium, a)
        guarded = getattr(linalg, function)(a, *arguments)
    assert medium.get_float32_matmul_precision() == "medium"
    medium.set_float32_matmul_precision("highest")
    full = AFFECTED[function](medium, a)
    assert medium.equal(guarded, full)
    # The control: with units for it, "medium" is bfloat16, eight bits of which are right.
    if units == "imitated" or medium_lowers(128):
        assert float(medium.linalg.norm(lowered - full) / medium.linalg.norm(full)) > 1e-4


def test_torchs_switch_is_restored_after_an_exception(medium: Any) -> None:
    with pytest.raises(medium.linalg.LinAlgError, match="singular"):
        linalg.inv(medium.zeros(3, 3))
    assert medium.get_float32_matmul_precision() == "medium"


def test_torch_records_gradients(torch: Any) -> None:
    a = (torch.eye(3, dtype=torch.float64) * 2).requires_grad_()
    linalg.det(a).backward()
    np.testing.assert_allclose(a.grad.numpy(), 4 * np.eye(3), atol=1e-15)


def test_jax_compiles_at_the_highest_precision(jax: Any) -> None:
    a = jax.numpy.eye(4, dtype="float32")

    def program() -> str:
        text: str = jax.jit(linalg.matrix_power, static_argnums=1).lower(a, 3).as_text()
        return text

    with jax.default_matmul_precision("bfloat16"):
        unguarded = jax.jit(lambda x: x @ x).lower(a).as_text()
        assert "precision = [DEFAULT, DEFAULT]" in unguarded, "what the guard is compared with"
        assert "precision = [HIGHEST, HIGHEST]" in program()
        assert "precision = [DEFAULT, DEFAULT]" not in program()
        assert jax.config.jax_default_matmul_precision == "bfloat16"


def test_jaxs_switch_is_restored_after_an_exception(jax: Any) -> None:
    with jax.default_matmul_precision("bfloat16"):
        with pytest.raises(ValueError, match="must have shape"):
            linalg.inv(jax.numpy.ones((2, 3)))
        assert jax.config.jax_default_matmul_precision == "bfloat16"


def test_jax_transforms_take_it(jax: Any, rng: np.random.Generator) -> None:
    a = make(rng, 3, 5, 2)
    b = make(rng, 3, 5)
    found = jax.jit(jax.vmap(linalg.lstsq))(jax.numpy.array(a), jax.numpy.array(b))
    want = np.stack([np.linalg.lstsq(wide(x), wide(y))[0] for x, y in zip(a, b, strict=True)])
    np.testing.assert_allclose(found.solution, want, rtol=1e-4)
    gradient = jax.grad(linalg.det)(2 * jax.numpy.eye(3))
    np.testing.assert_allclose(gradient, 4 * np.eye(3), rtol=1e-6)


# -- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "int8"])
@pytest.mark.parametrize("function", FUNCTIONS)
@pytest.mark.sampled(3)
def test_other_types_are_refused(function: str, dtype: str, xp: ArrayNamespace) -> None:
    narrow = np.dtype(getattr(ml_dtypes, dtype, dtype))
    arrays = tuple(x.astype(narrow) for x in operands(function))
    with pytest.raises(lowprec.DTypeError, match=rf"^{function} takes float32, .*, and a is {dtype}; convert"):
        call(function, xp, arrays)


def test_distances_of_complex_points_are_refused(xp: ArrayNamespace) -> None:
    with pytest.raises(lowprec.DTypeError, match="cdist takes float32, float64, and a is complex64"):
        call("cdist", xp, operands("cdist", "complex64"))


@pytest.mark.parametrize("function", TWO)
def test_two_libraries_are_refused(function: str, xp: ArrayNamespace, other_xp: ArrayNamespace) -> None:
    if xp.name == other_xp.name:
        return
    a, b = operands(function)
    names = [n.removesuffix("_only") for n in (xp.name, other_xp.name)]
    with pytest.raises(lowprec.ArrayError, match=f"^{function} takes .* one library, got {names[0]} and {names[1]}"):
        getattr(linalg, function)(xp.asarray(a), other_xp.asarray(b))


def test_objects_that_are_no_arrays_are_refused() -> None:
    with pytest.raises(lowprec.ArrayError, match=r"got list; wrap it with numpy\.asarray"):
        linalg.inv([[1.0]])
    with pytest.raises(lowprec.ArrayError, match="MaskedArray is not accepted"):
        linalg.inv(np.ma.masked_array(np.eye(2)))


def test_an_unknown_mode_of_qr(xp: ArrayNamespace) -> None:
    with pytest.raises(lowprec.UnsupportedError, match="no mode 'r'; choose one of: 'reduced', "):
        linalg.qr(xp.asarray(np.eye(2)), mode="r")


NO_STACKS = [b for b in Backend if b is not Backend.TORCH]


@pytest.mark.parametrize("xp", NO_STACKS, indirect=True, ids=lambda b: b.value)
def test_stacks_of_least_squares(xp: ArrayNamespace) -> None:
    out = "put jax.vmap around it" if xp.name == "jax" else "call it for each matrix"
    a = xp.asarray(np.ones((2, 3, 3), np.float32))
    with pytest.raises(lowprec.UnsupportedError, match=rf"no lstsq of stacks.*\(2, 3, 3\); {out}"):
        linalg.lstsq(a, a)


def test_stacks_of_points_in_numpy() -> None:
    pytest.importorskip("scipy", reason="scipy is not installed")
    with pytest.raises(lowprec.UnsupportedError, match="numpy has no cdist of stacks of matrices"):
        linalg.cdist(np.ones((2, 3, 3)), np.ones((3, 3)))


@pytest.mark.parametrize("function", SCIPYS)
def test_without_scipy(function: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [n for n in sys.modules if n.partition(".")[0] == "scipy"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "scipy", None)
    with pytest.raises(lowprec.UnsupportedError, match=rf"{function} of numpy arrays is scipy\..*pip install scipy"):
        call(function, Backend.NUMPY.load(), operands(function))


def test_an_old_version_of_a_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(np.linalg, "pinv")
    with pytest.raises(lowprec.UnsupportedError, match=r"^numpy \d.* has no numpy\.linalg\.pinv; install a later"):
        linalg.pinv(np.eye(2))


def test_a_singular_matrix_is_handled_as_the_library_does(xp: ArrayNamespace) -> None:
    a = xp.asarray(np.zeros((3, 3), np.float32))
    if xp.name == "jax":
        assert not np.isfinite(xp.to_numpy(linalg.inv(a))).any()
        return
    errors = xp.torch.linalg.LinAlgError if xp.name == "torch" else np.linalg.LinAlgError
    with pytest.raises(errors, match="ingular"):
        linalg.inv(a)


# -- CuPy, and CUDA memory, without a GPU ---------------------------------------------------------


class OnDevice(np.ndarray):
    """A substitute for a CuPy array."""

    def __dlpack_device__(self) -> tuple[int, int]:
        return (2, 0)


class OnlyOnDevice:
    """CUDA memory of a library that is known only by DLPack."""

    def __init__(self, memory: Array) -> None:
        self.memory = memory

    def __dlpack__(self, **keywords: Any) -> object:
        raise AssertionError("memory of a GPU is exported to a library of the GPU only")

    def __dlpack_device__(self) -> tuple[int, int]:
        return (2, 0)


def to_device(x: Any) -> Any:
    return x.view(OnDevice) if isinstance(x, np.ndarray) else np.asarray(x).view(OnDevice)


def function_of_cupy(name: str, *parameters: str) -> Callable[..., Any]:
    """A function with CuPy's own parameters, and no others, that NumPy carries out."""
    renamed = {"M": "a", "tol": "tol"}

    def stand_in(*args: Any, **keywords: Any) -> Any:
        bound = signature.bind(*args, **keywords).arguments
        assert all(isinstance(x, OnDevice) for x in list(bound.values())[:1]), "an array of CuPy"
        arguments = [np.asarray(v) if isinstance(v, OnDevice) else v for v in bound.values()]
        names = [renamed.get(n, n) for n in bound]
        first = 2 if names[1:2] == ["b"] else 1
        result = getattr(np.linalg, name)(
            *arguments[:first], **dict(zip(names[first:], arguments[first:], strict=True))
        )
        return tuple(map(to_device, result)) if isinstance(result, tuple) else to_device(result)

    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    required = dict.fromkeys(("a", "b", "M"), inspect.Parameter.empty)
    signature = inspect.Signature([inspect.Parameter(p, kind, default=required.get(p)) for p in parameters])
    return stand_in


#: Source: cupy/linalg of CuPy 14, optional parameters that lowprec does not pass left out.
CUPYS = {
    "cholesky": ("a",),
    "det": ("a",),
    "eigh": ("a",),
    "inv": ("a",),
    "lstsq": ("a", "b", "rcond"),
    "matrix_power": ("M", "n"),
    "matrix_rank": ("M",),
    "pinv": ("a", "rcond"),
    "qr": ("a", "mode"),
    "slogdet": ("a",),
    "solve": ("a", "b"),
    "svd": ("a", "full_matrices", "compute_uv"),
}


@pytest.fixture
def cupy(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A substitute for CuPy, with its functions and their parameters."""
    module, functions = ModuleType("cupy"), ModuleType("cupy.linalg")
    for name, parameters in CUPYS.items():
        setattr(functions, name, function_of_cupy(name, *parameters))
    types = {"f": 0}
    core = SimpleNamespace(get_compute_type=types.get, set_compute_type=types.__setitem__)
    found = {"ndarray": OnDevice, "linalg": functions, "__version__": "14.0.0", "_core": core}
    found["from_dlpack"] = lambda array: to_device(array.memory)
    vars(module).update(found)
    monkeypatch.setitem(sys.modules, "cupy", module)
    monkeypatch.setitem(sys.modules, "cupy.linalg", functions)
    return module


@pytest.mark.usefixtures("cupy")
@pytest.mark.parametrize("function", CUPYS)
def test_cupys_functions_are_called_as_they_are(function: str) -> None:
    more = NUMBERS.get(function, ())
    arrays = operands(function)
    for wrap in (to_device, OnlyOnDevice):
        result = getattr(linalg, function)(*map(wrap, arrays), *more)
        want = getattr(linalg, function)(*arrays, *more)
        pairs = zip(result, want, strict=True) if function in FIELDS else [(result, want)]
        for got, expected in pairs:
            assert isinstance(got, OnDevice)
            np.testing.assert_array_equal(got, expected)


@pytest.mark.usefixtures("cupy")
def test_cupys_tolerance_of_the_rank_is_relative_too() -> None:
    a = np.stack([np.diag([4.0, 3.0, 1.0]), np.diag([4.0, 1.0, 1.0])])
    np.testing.assert_array_equal(linalg.matrix_rank(to_device(a), rtol=0.5), [2, 1])


@pytest.mark.usefixtures("cupy")
def test_features_missing_from_cupy() -> None:
    a = to_device(np.eye(3))
    with pytest.raises(lowprec.UnsupportedError, match=r"cupyx\.scipy\.linalg\.expm, and cupyx"):
        linalg.expm(a)


def test_cuda_memory_without_cupy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(lowprec.UnsupportedError, match=r"DLPack arrays on cuda:0: .*import cupy"):
        linalg.inv(OnlyOnDevice(np.eye(2)))


# -- the page and the table -----------------------------------------------------------------------


def test_the_table_is_complete() -> None:
    wanted = {(f, library) for f in FUNCTIONS for library in routes.LIBRARIES}
    found = {(f, library) for f, row in routes.ROUTES.items() for library in row}
    assert found.isdisjoint(routes.LACKING)
    assert found | set(routes.LACKING) == wanted
    assert set(FUNCTIONS) == {n for n in linalg.__all__ if n[0].islower()}


@pytest.mark.parametrize("function", FUNCTIONS)
def test_every_function_documents_its_parameters_and_targets(function: str) -> None:
    text = inspect.getdoc(getattr(linalg, function)) or ""
    assert ">>> " in text
    for parameter in inspect.signature(getattr(linalg, function)).parameters:
        assert f"\n{parameter} : " in text, f"{function} does not say what {parameter} is"
    for error in ("ArrayError", "DTypeError", "UnsupportedError"):
        assert error in text[text.index("Raises\n---") : text.index("See Also\n---")]
    for route in routes.ROUTES[function].values():
        assert str(route) in text[text.index("See Also\n---") : text.index("Examples\n---")]
