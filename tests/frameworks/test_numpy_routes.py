"""Routes of products in NumPy, SciPy, scikit-learn and others: taken, passed by with a reason, or named as not seen."""

import sys
import warnings

import numpy as np
import pytest
from numpy import dot as dot_before

import lowprec
import lowprec.numpy as ln
from lowprec.backends.cpu import library
from lowprec.core.interception_report import PassedBy

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or library.library() is None,
    reason="interception needs Linux and the compiled kernels",
)

#: Unit roundoff of bfloat16, to which both operands of a product are rounded.
UNIT = 2.0**-8
TYPES = (np.float32, np.float64, np.complex64, np.complex128)


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
#: Products of loops of NumPy that are counted, with their types and multiplications.
OF_LOOPS = {
    "integers": ("int64", 288, lambda a: a.astype(int) @ a.astype(int).T),
    "boolean": ("bool", 288, lambda a: (a > 0) @ (a > 0).T),
    "long double": ("longdouble", 288, lambda a: a.astype("g") @ a.astype("g").T),
    "objects": ("object", 288, lambda a: a.astype(object) @ a.astype(object).T),
    "column and row": ("float32", 48, lambda a: a[:, :1] @ a[:1]),
    "matvec of float16": ("float16", 48, lambda a: np.matvec(a.astype("e"), a[0].astype("e"))),
    "vecmat of integers": ("int64", 48, lambda a: np.vecmat(a.astype(int)[:, 0], a.astype(int))),
    "vecdot of float16": ("float16", 48, lambda a: np.vecdot(a.astype("e"), a.astype("e"))),
}
#: Products that no counter sees: of NumPy, which are in a remark of each report.
NOT_SEEN = {
    "einsum": lambda a, b: np.einsum("ij,jk->ik", a, b),
    "einsum of three, by one loop": lambda a, b: np.einsum("ij,jk,kl->il", a, b, b.T),
    "trace": lambda a, b: np.einsum("ii", a[:, :6]),
    "dot of float16": lambda a, b: np.dot(a.astype(np.float16), b.astype(np.float16)),
    "dot of integers": lambda a, b: np.dot(a.astype(int), b.astype(int)),
    "inner of float16": lambda a, b: np.inner(a.astype(np.float16), b.T.astype(np.float16)),
    "tensordot of integers": lambda a, b: np.tensordot(a.astype(int), b.astype(int), 1),
    "outer": lambda a, b: np.outer(a[0], b[0]),
    "linalg.outer": lambda a, b: np.linalg.outer(a[0], b[0]),
    "kron": lambda a, b: np.kron(a, b),
    "cross": lambda a, b: np.cross(a[0, :3], b[:3, 0]),
    "fft": lambda a, b: np.fft.fft(a[0]),
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
KEPT_OF_TYPES = [
    (name, dtype)
    for name in KEPT
    for dtype in TYPES
    if name != "convolve" or np.dtype(dtype).kind == "f"
]


@pytest.mark.parametrize(("name", "dtype"), KEPT_OF_TYPES)
def test_products_of_vectors_and_in_solvers_keep_their_precision(name, dtype):
    a = draw(6, 8, dtype=dtype)
    plain = KEPT[name](a)
    with ln.intercept("bf16", cast=True) as seen:
        found = KEPT[name](a)
    report = seen.report()
    assert np.array_equal(found, plain)
    assert not report.taken
    assert {p.passed_by for p in report.passed} <= {
        PassedBy.VECTORS,
        PassedBy.LINEAR_ALGEBRA,
        PassedBy.LAYER,
    }
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
    assert all(p.count == 1 for p in report.products), (
        "a query of the size of a workspace is no call"
    )
    assert np.array_equal(found, plain) is not bool(taken)
    # Two operands rounded once.
    assert (
        np.linalg.norm(found - plain)
        <= (2 * UNIT + UNIT**2) * np.linalg.norm(call(np.abs(a), linalg))
        or not taken
    )


@pytest.mark.parametrize("name", OF_LOOPS)
def test_products_of_numpys_loops_are_counted(name):
    dtype, multiplications, call = OF_LOOPS[name]
    if not hasattr(np, name.split()[0]) and name.startswith(("matvec", "vecmat")):
        pytest.skip("since NumPy 2.2")
    a = 9 * draw(6, 8)
    plain = call(a)
    with ln.intercept("bf16", cast=True) as seen:
        found = call(a)
    assert np.array_equal(found, plain)
    (product,) = seen.report().passed
    assert (product.passed_by, product.dtype) == (PassedBy.OWN_LOOP, np.dtype(dtype).name)
    assert product.multiplications == multiplications


@pytest.mark.parametrize(
    "mode", ["bf16", "fp32", "fp8", "fp8_rows", "fp8_blocks", "mxfp8", "mxfp4", "nvfp4", "int8"]
)
def test_float16_has_the_bits_of_matmul(mode):
    """Units of tiles, where the CPU has these, sum products of float16 in another order than the block's FP32 unit."""
    a, b = draw(37, 300).astype(np.float16), draw(300, 221, seed=1).astype(np.float16)
    operands = {
        "plain": (a, b),
        "transposed": (b.T, a.T),
        "strides": (a[::-2, ::2], b[::2, ::-1]),
        "vector": (a, b[:, 0]),
        "stack": (stacked(a), b),
    }
    for name, (x, y) in operands.items():
        with ln.intercept(mode) as seen:
            found = x @ y
        in_bf16 = name == "vector" and mode not in ("bf16", "fp32")
        math_mode = "bf16" if in_bf16 else mode
        each = [lowprec.matmul(one, y, math_mode=math_mode) for one in x.reshape(-1, *x.shape[-2:])]
        # Both add k exact products in float32, in different orders, and round the sum to float16.
        error = np.abs(found.reshape(len(each), *each[0].shape) - np.array(each, np.float32))
        terms = np.abs(x.astype(np.float32)) @ np.abs(y.astype(np.float32))
        bound = 2 * x.shape[-1] * 2.0**-24 * terms + 2.0**-10 * np.abs(found)
        of_tiles = lowprec.plan(x, y, math_mode=math_mode).kernel == "bf16_amx_pair"
        assert (error <= bound.reshape(error.shape) * of_tiles).all(), name
        quantises = mode not in ("bf16", "fp32") and not in_bf16
        assert {p.mode for p in seen.report().taken} == {mode if quantises else "fp32"}
        assert not seen.report().passed
    with ln.intercept(mode) as seen:
        assert not (a[:, :0] @ b[:0]).any()
    assert not seen.report().products


@pytest.mark.parametrize("name", NOT_SEEN)
def test_products_that_are_not_seen_are_named(name):
    a, b = draw(6, 8), draw(8, 5, seed=1)
    plain = NOT_SEEN[name](a, b)
    with ln.intercept("bf16", cast=True) as seen:
        found = NOT_SEEN[name](a, b)
    assert np.array_equal(found, plain)
    assert not seen.report().products
    assert " ".join(str(seen.report()).split()).endswith(ln._NOT_SEEN)


#: Functions of other libraries, of a (32, 32) and a symmetric positive definite one, and whether products are taken and
#: whether some are passed by; neither: loops of these libraries, which are not seen.
TAKEN, PASSED, BOTH, NEITHER = (True, False), (False, True), (True, True), (False, False)
OF_LIBRARIES = {
    "scipy.linalg": {
        "expm": (BOTH, lambda m, a, s: m.expm(a)),
        "sqrtm": (BOTH, lambda m, a, s: m.sqrtm(s)),
        "polar": (BOTH, lambda m, a, s: m.polar(a)),
        "pinv": (BOTH, lambda m, a, s: m.pinv(a)),
        "solve_sylvester": (BOTH, lambda m, a, s: m.solve_sylvester(a, a, a)),
        "solve": (PASSED, lambda m, a, s: m.solve(a, a[0])),
        "cho_solve": (PASSED, lambda m, a, s: m.cho_solve(m.cho_factor(s), a[0])),
        "schur": (PASSED, lambda m, a, s: m.schur(a)),
        "inv": (PASSED, lambda m, a, s: m.inv(a)),
        "eigh": (PASSED, lambda m, a, s: m.eigh(s)),
        "lstsq": (PASSED, lambda m, a, s: m.lstsq(a, a[0])),
        "solve_triangular": (PASSED, lambda m, a, s: m.solve_triangular(s, a[0])),
        "hessenberg": (PASSED, lambda m, a, s: m.hessenberg(a)),
        "ldl": (PASSED, lambda m, a, s: m.ldl(s)),
        "qz": (PASSED, lambda m, a, s: m.qz(a, a)),
        "generalized eigenvalues": (PASSED, lambda m, a, s: m.eigvals(a, s)),
        "qr_multiply": (PASSED, lambda m, a, s: m.qr_multiply(a, a)),
        "chemm": (TAKEN, lambda m, a, s: m.blas.chemm(1, a * 1j, a)),
        "cherk": (TAKEN, lambda m, a, s: m.blas.cherk(1, a * 1j)),
        "zhemv": (TAKEN, lambda m, a, s: m.blas.zhemv(1, a * 1j, a[0])),
        "cher2k": (PASSED, lambda m, a, s: m.blas.cher2k(1, a * 1j, a)),
        "strsm": (PASSED, lambda m, a, s: m.blas.strsm(1, s, a)),
        "strsv": (PASSED, lambda m, a, s: m.blas.strsv(s, a[0])),
        "ssyr": (PASSED, lambda m, a, s: m.blas.ssyr(1, a[0])),
        "cgeru": (PASSED, lambda m, a, s: m.blas.cgeru(1, a[0] * 1j, a[0])),
        "ssysv": (PASSED, lambda m, a, s: m.lapack.ssysv(s, a[0])),
        "spotri": (PASSED, lambda m, a, s: m.lapack.spotri(m.lapack.spotrf(s)[0])),
        "ssbmv": (NEITHER, lambda m, a, s: m.blas.ssbmv(1, 1, a[:2], a[0])),
        "solve_banded": (NEITHER, lambda m, a, s: m.solve_banded((1, 1), abs(a[:3]) + 9, a[0])),
        "khatri_rao": (NEITHER, lambda m, a, s: m.khatri_rao(a, a)),
    },
    "scipy.sparse.linalg": {
        "cg": (BOTH, lambda m, a, s: m.cg(s, a[0])),
        "gmres": (BOTH, lambda m, a, s: m.gmres(s, a[0])),
        "eigsh": (BOTH, lambda m, a, s: m.eigsh(s, 3)),
        "svds": (BOTH, lambda m, a, s: m.svds(a, 3)),
        "svds by PROPACK": (BOTH, lambda m, a, s: m.svds(a, 3, solver="propack")),
        "lobpcg": (BOTH, lambda m, a, s: m.lobpcg(s, a[:, :3].copy())),
        "expm_multiply": (TAKEN, lambda m, a, s: m.expm_multiply(a, a[0])),
        "lsqr": (BOTH, lambda m, a, s: m.lsqr(a, a[0])),
    },
    "scipy.sparse": {
        "sparse @ dense": (NEITHER, lambda m, a, s: m.csr_array(a) @ a),
        "sparse @ sparse": (NEITHER, lambda m, a, s: (m.csr_array(a) @ m.csr_array(a)).toarray()),
    },
    "scipy.spatial.distance": {
        "cdist": (NEITHER, lambda m, a, s: m.cdist(a, a)),
        "cdist by an inverse": (BOTH, lambda m, a, s: m.cdist(a[:, :4], a[:, :4], "mahalanobis")),
    },
    "scipy.stats": {
        "gaussian_kde": (BOTH, lambda m, a, s: m.gaussian_kde(a[:2])(a[:2, :5])),
        "multivariate_normal": (BOTH, lambda m, a, s: m.multivariate_normal(a[0], s).pdf(a)),
    },
    "scipy.optimize": {
        "L-BFGS-B": (
            PASSED,
            lambda m, a, s: m.minimize(lambda x: ((x - 1) ** 4).sum(), a[0], method="L-BFGS-B"),
        ),
        "least_squares": (BOTH, lambda m, a, s: m.least_squares(lambda x: s @ x - a[0], a[0])),
    },
    "scipy.interpolate": {
        "RBFInterpolator": (BOTH, lambda m, a, s: m.RBFInterpolator(a[:, :2], a[0])(a[:5, :2]))
    },
    "scipy.signal": {"convolve": (NEITHER, lambda m, a, s: m.convolve(a, a[:3, :3]))},
    "sklearn.linear_model": {
        "LinearRegression": (PASSED, lambda m, a, s: m.LinearRegression().fit(a, a[0])),
        "Ridge": (BOTH, lambda m, a, s: m.Ridge().fit(a, a[0])),
        "LogisticRegression": (BOTH, lambda m, a, s: m.LogisticRegression().fit(a, a[0] > 0)),
    },
    "sklearn.decomposition": {
        "PCA": (PASSED, lambda m, a, s: m.PCA(3).fit_transform(a)),
        "NMF": (BOTH, lambda m, a, s: m.NMF(2, init="random", random_state=0).fit(abs(a))),
    },
    "sklearn.cluster": {
        "KMeans": (BOTH, lambda m, a, s: m.KMeans(3, n_init=1, random_state=0).fit(a))
    },
    "sklearn.svm": {"SVC": (PASSED, lambda m, a, s: m.SVC().fit(a, a[0] > 0))},
    "sklearn.neighbors": {
        "NearestNeighbors": (
            BOTH,
            lambda m, a, s: m.NearestNeighbors(algorithm="brute").fit(a).kneighbors(a),
        )
    },
    "sklearn.mixture": {
        "GaussianMixture": (BOTH, lambda m, a, s: m.GaussianMixture(2, random_state=0).fit(a))
    },
    "sklearn.ensemble": {
        "RandomForest": (NEITHER, lambda m, a, s: m.RandomForestClassifier(5).fit(a, a[0] > 0))
    },
    "dask.array": {
        "@": (TAKEN, lambda m, a, s: (m.from_array(a) @ m.from_array(a)).compute(scheduler="sync"))
    },
    "pandas": {
        "@": (TAKEN, lambda m, a, s: m.DataFrame(a) @ m.DataFrame(a)),
        "cov": (TAKEN, lambda m, a, s: m.DataFrame(a).cov()),
        "Series.dot": (PASSED, lambda m, a, s: m.Series(a[0]).dot(m.Series(a[1]))),
    },
    "numba": {"@": (TAKEN, lambda m, a, s: m.njit(lambda x: x @ x)(a))},
}


@pytest.mark.parametrize(
    ("library", "name"), [(x, y) for x, rows in OF_LIBRARIES.items() for y in rows]
)
def test_products_of_libraries_are_taken_or_counted(library, name):
    module = pytest.importorskip(library, reason=f"{library.partition('.')[0]} is not installed")
    (takes, passes), call = OF_LIBRARIES[library][name]
    a = draw(32, 32)
    s = a @ a.T + 32 * np.eye(32, dtype=np.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of iterations that end early
        plain = call(module, a, s)
        with ln.intercept("fp32", cast=True) as seen:
            found = call(module, a, s)
    report = seen.report()
    assert bool(report.taken) is takes
    assert bool(report.passed) is passes
    if not takes and isinstance(plain, np.ndarray):
        assert np.array_equal(found, plain)
