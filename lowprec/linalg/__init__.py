"""Solvers and decompositions by the caller's own library, in full FP32.

Each function calls that of the operands' library (NumPy, PyTorch, JAX, CuPy) inside :func:`lowprec.fp32_guard`, which
computes its float32 products in full FP32. Algorithms, failures (a singular matrix raises in one library and gives NaN
in another) and gradients are the library's own. Names, arguments and the order of results are those of the Array API
standard, 2024.12 (https://data-apis.org/array-api), in every library; ``lstsq``, which it lacks, follows PyTorch.

Operands are float32, float64, complex64 or complex128, the types of LAPACK; cast 16-bit operands first.

Examples
--------
>>> import numpy as np
>>> import lowprec
>>> a = np.array([[3.0, 1.0], [1.0, 2.0]], np.float32)
>>> lowprec.linalg.solve(a, np.array([9.0, 8.0], np.float32)).round(5)
array([2., 3.], dtype=float32)
"""

from __future__ import annotations

from collections.abc import Callable
from inspect import cleandoc
from typing import Any, NamedTuple, TypeVar

from lowprec.arrays.signatures import of_first
from lowprec.errors import UnsupportedError, quoted
from lowprec.linalg.report import SolveReport
from lowprec.linalg.routes import REAL_DTYPES, ROUTES, call
from lowprec.modes import MathMode, ModeName
from lowprec.util.tracing import uncompiled

__all__ = ["EighResult", "LstsqResult", "QRResult", "SVDResult", "SlogdetResult", "SolveReport", *ROUTES]


class EighResult(NamedTuple):
    """Ascending eigenvalues (..., n), and eigenvectors as columns (..., n, n).

    >>> import numpy as np
    >>> eigh(np.diag([2.0, 1.0])).eigenvalues
    array([1., 2.])
    """

    eigenvalues: Any
    eigenvectors: Any


class QRResult(NamedTuple):
    """Orthonormal columns ``Q`` (..., m, k), upper triangle ``R`` (..., k, n).

    >>> import numpy as np
    >>> qr(np.ones((3, 2))).R.shape
    (2, 2)
    """

    Q: Any
    R: Any


class SVDResult(NamedTuple):
    """``U``, descending ``S`` (..., min(m, n)), and V's conjugate transpose ``Vh``.

    >>> import numpy as np
    >>> svd(np.diag([1.0, 2.0])).S
    array([2., 1.])
    """

    U: Any
    S: Any
    Vh: Any


class SlogdetResult(NamedTuple):
    """Signs (modulus 1, or 0) and natural logarithms of determinants' moduli (...).

    >>> import numpy as np
    >>> slogdet(np.eye(2)).logabsdet.item()
    0.0
    """

    sign: Any
    logabsdet: Any


class LstsqResult(NamedTuple):
    """Solution (n,) or (n, k), squared residuals per column, rank, singular values.

    Values that the library does not compute are empty: in most libraries the residuals if ``a`` is wide or of deficient
    rank; in PyTorch on a GPU also the rank and the singular values.

    >>> import numpy as np
    >>> int(lstsq(np.eye(3), np.ones(3)).rank)
    3
    """

    solution: Any
    residuals: Any
    rank: Any
    singular_values: Any


_QR_MODES = ("reduced", "complete")

_RAISES = """\
Raises
------
ArrayError, DTypeError
    An operand is not an array, is of another library than the others, or has an unsupported element type.
UnsupportedError
    The library lacks the function, or an argument is unsupported. Every other error is the library's own.
"""

_Function = TypeVar("_Function", bound=Callable[..., Any])


def _guarded(function: _Function) -> _Function:
    """Keep a function out of compiled graphs, and add the shared sections to its docstring, before its last ones."""
    if function.__doc__ is not None:
        routes = ", ".join(map(str, ROUTES[function.__name__].values()))
        shared = f"{_RAISES}\nSee Also\n--------\n{routes}\n\n"
        section = "References\n" if "References\n" in function.__doc__ else "Examples\n"
        function.__doc__ = cleandoc(function.__doc__).replace(section, shared + section, 1)
    return uncompiled(function)


@_guarded
def solve(
    a: Any,
    b: Any,
    /,
    *,
    method: str = "direct",
    factor_mode: ModeName | MathMode | None = None,
    assume: str = "gen",
    full_output: bool = False,
) -> Any:
    """Return ``x`` with ``a @ x = b``, by the library's solver or by refinement.

    ``method="refine"`` factors the matrix in lower precision, with the updates by :func:`lowprec.matmul` in
    ``factor_mode``; uneven rows and columns are scaled by powers of two first. Iterative refinement in the precision of
    the operands (classical, then GMRES preconditioned by the factor) then reduces the backward error ``|b - a x| / (|a|
    |x| + |b|)``, with the Frobenius norm of ``a``, as far as it can. The result is accepted within 4 times the error of
    a direct solve: ``u / sqrt(n)``, with ``u = eps / 2``, or in double precision ``u / 2`` if that is larger. Systems
    that do not converge in 50 steps of each kind, singular matrices (also those of an estimated condition above ``1 /
    u``), and Inf and NaN go to the library's own solver, with its result or error. Shapes that do not match raise
    ShapeError (a direct solve without a report the library's error), an unknown ``factor_mode`` ModeError.

    Parameters
    ----------
    a : array, shape (..., n, n)
        float32, float64, complex64 or complex128.
    b : array, shape (n,) or (..., n, k)
        Of the library of ``a``. As in the Array API, only a 1-D ``b`` is a vector.
    method : {"direct", "refine", "auto"}
        ``"direct"`` calls the library's own solver inside the guard. ``"auto"`` refines if the planner's costs predict
        that it is faster; for arrays whose elements cannot be read (under a gradient, in ``jit``) it is ``"direct"``.
        Inside :func:`lowprec.fp32_guard` every method is ``"direct"``.
    factor_mode : str or MathMode, optional
        Math mode of the factor's updates; in ``fp32`` LAPACK computes the LU factor, in host memory SciPy's. By default
        the cheapest with a probable error of at most 2e-5; one that costs less than a quarter of it is tried before.
    assume : {"gen", "pos"}
        ``"pos"``: the matrices are Hermitian and positive definite, and refinement uses a Cholesky factorization.
    full_output : bool
        Whether to return the report as well.

    Returns
    -------
    array, shape (..., n) or (..., n, k)
        With ``full_output`` a pair of this and a :class:`SolveReport`, which ``print`` shows as a table.

    References
    ----------
    E. Carson and N. J. Higham, "A new analysis of iterative refinement and its application to accurate solution of
    ill-conditioned sparse linear systems", SIAM J. Sci. Comput. 39(6), 2017, and "Accelerating the solution of linear
    systems by iterative refinement in three precisions", SIAM J. Sci. Comput. 40(2), 2018; A. Haidar, S. Tomov,
    J. Dongarra and N. J. Higham, "Harnessing GPU tensor cores for fast FP16 arithmetic to speed up mixed-precision
    iterative refinement solvers", SC18, 2018.

    Examples
    --------
    >>> import numpy as np
    >>> a = np.random.default_rng(0).standard_normal((300, 300))
    >>> x, report = solve(a, a.sum(axis=1), method="refine", full_output=True)
    >>> str(report.method), report.fallbacks, report.backward_error < 1e-15
    ('refine', 0, True)
    """
    from lowprec.linalg import solving

    return solving.solve(a, b, method=method, factor_mode=factor_mode, assume=assume, full_output=full_output)


@_guarded
def lstsq(a: Any, b: Any, /, *, rtol: float | None = None) -> LstsqResult:
    """Return the ``x`` of least norm that minimises ``|a @ x - b|``.

    Parameters
    ----------
    a : array, shape (m, n)
        PyTorch also accepts stacks, shape (..., m, n).
    b : array, shape (m,) or (m, k)
    rtol : float, optional
        Singular values below this fraction of the largest count as zero; ``max(m, n)`` times epsilon by default.

    Examples
    --------
    >>> import numpy as np
    >>> x = lstsq(np.array([[1.0], [1.0]]), np.array([1.0, 3.0]))
    >>> x.solution.round(6), int(x.rank)
    (array([2.]), 1)
    """
    return LstsqResult(*call("lstsq", a, b, rtol=rtol))


@of_first
@_guarded
def inv(a: Any, /) -> Any:
    """Return the inverses of square matrices, shape (..., n, n).

    Parameters
    ----------
    a : array, shape (..., n, n)

    Examples
    --------
    >>> import numpy as np
    >>> inv(np.array([[2.0, 0.0], [0.0, 4.0]]))
    array([[0.5 , 0.  ],
           [0.  , 0.25]])
    """
    return call("inv", a)


@of_first
@_guarded
def pinv(a: Any, /, *, rtol: float | None = None) -> Any:
    """Return the Moore-Penrose inverses of matrices, shape (..., n, m).

    Parameters
    ----------
    a : array, shape (..., m, n)
    rtol : float, optional
        Singular values below this fraction of the largest count as zero. By default ``max(m, n)`` times the machine
        epsilon in every library, as in the Array API (NumPy's default, 1e-15, is below the rounding errors of float32).

    Examples
    --------
    >>> import numpy as np
    >>> pinv(np.array([[2.0, 0.0], [0.0, 0.0], [0.0, 4.0]])).round(6) + 0.0
    array([[0.5 , 0.  , 0.  ],
           [0.  , 0.  , 0.25]])
    """
    return call("pinv", a, rtol=rtol)


@of_first
@_guarded
def cholesky(a: Any, /) -> Any:
    """Return the lower triangles ``L``, shape (..., n, n), with ``a = L @ L^H``.

    Parameters
    ----------
    a : array, shape (..., n, n)
        Hermitian and positive definite.

    Examples
    --------
    >>> import numpy as np
    >>> cholesky(np.array([[4.0, 2.0], [2.0, 10.0]]))
    array([[2., 0.],
           [1., 3.]])
    """
    return call("cholesky", a)


@_guarded
def qr(a: Any, /, *, mode: str = "reduced") -> QRResult:
    """Return ``(Q, R)`` with ``a = Q @ R``, as :class:`QRResult`.

    Parameters
    ----------
    a : array, shape (..., m, n)
    mode : {"reduced", "complete"}
        Whether ``Q`` has ``min(m, n)`` columns or ``m``.

    Examples
    --------
    >>> import numpy as np
    >>> q, r = qr(np.array([[3.0], [4.0]]))
    >>> abs(r).round(6)
    array([[5.]])
    """
    if mode not in _QR_MODES:
        raise UnsupportedError(f"qr has no mode {quoted(mode)}; choose one of: {', '.join(map(repr, _QR_MODES))}")
    return QRResult(*call("qr", a, mode=mode))


@_guarded
def eigh(a: Any, /) -> EighResult:
    """Return eigenvalues and eigenvectors of Hermitian matrices.

    Parameters
    ----------
    a : array, shape (..., n, n)
        Hermitian, with both triangles stored: the library reads either one.

    Examples
    --------
    >>> import numpy as np
    >>> eigh(np.array([[2.0, 1.0], [1.0, 2.0]])).eigenvalues.round(6)
    array([1., 3.])
    """
    return EighResult(*call("eigh", a))


@_guarded
def svd(a: Any, /, *, full_matrices: bool = True) -> SVDResult:
    """Return ``(U, S, Vh)`` with ``a = U @ diag(S) @ Vh``, as :class:`SVDResult`.

    Parameters
    ----------
    a : array, shape (..., m, n)
    full_matrices : bool
        Whether ``U`` and ``Vh`` are square, or have ``min(m, n)`` columns and rows.

    Examples
    --------
    >>> import numpy as np
    >>> svd(np.array([[0.0, 2.0], [1.0, 0.0]])).S.round(6)
    array([2., 1.])
    """
    return SVDResult(*call("svd", a, full_matrices=full_matrices))


@_guarded
def det(a: Any, /) -> Any:
    """Return the determinants of square matrices, shape (...).

    Parameters
    ----------
    a : array, shape (..., n, n)

    Examples
    --------
    >>> import numpy as np
    >>> float(det(np.array([[2.0, 1.0], [0.0, 3.0]])))
    6.0
    """
    return call("det", a)


@_guarded
def slogdet(a: Any, /) -> SlogdetResult:
    """Return the signs of determinants and the logarithms of their moduli.

    Parameters
    ----------
    a : array, shape (..., n, n)

    Examples
    --------
    >>> import numpy as np
    >>> sign, logabsdet = slogdet(-np.eye(3))
    >>> float(sign), float(logabsdet)
    (-1.0, 0.0)
    """
    return SlogdetResult(*call("slogdet", a))


@_guarded
def matrix_rank(a: Any, /, *, rtol: float | None = None) -> Any:
    """Return the number of singular values above ``rtol`` times the largest.

    Parameters
    ----------
    a : array, shape (..., m, n)
    rtol : float, optional
        ``max(m, n)`` times the machine epsilon by default.

    Examples
    --------
    >>> import numpy as np
    >>> int(matrix_rank(np.ones((3, 3))))
    1
    """
    if rtol is None:
        return call("matrix_rank", a)
    return call("matrix_rank", a, rtol=rtol)


@of_first
@_guarded
def matrix_power(a: Any, n: int, /) -> Any:
    """Return powers of square matrices; powers of the inverses for ``n < 0``.

    Parameters
    ----------
    a : array, shape (..., m, m)
    n : int

    Examples
    --------
    >>> import numpy as np
    >>> matrix_power(np.array([[1.0, 1.0], [0.0, 1.0]]), 5)
    array([[1., 5.],
           [0., 1.]])
    """
    return call("matrix_power", a, n=n)


@of_first
@_guarded
def expm(a: Any, /) -> Any:
    """Return the matrix exponentials, shape (..., n, n).

    Parameters
    ----------
    a : array, shape (..., n, n)
        CuPy accepts a single matrix. NumPy arrays require SciPy.

    Examples
    --------
    >>> import torch
    >>> expm(torch.tensor([[0.0, 1.0], [0.0, 0.0]]))
    tensor([[1., 1.],
            [0., 1.]])
    """
    return call("expm", a)


@of_first
@_guarded
def cdist(a: Any, b: Any, /) -> Any:
    """Return Euclidean distances (..., m, n) between the points of two sets.

    PyTorch computes sets of more than 25 points as ``|x|^2 - 2 x.y + |y|^2``, with the error of the squares: distances
    much smaller than the points' norms have few correct digits, even in full FP32. JAX lacks the function; NumPy arrays
    require SciPy.

    Parameters
    ----------
    a : array, shape (..., m, k)
        float32 or float64. NumPy and CuPy accept no batches.
    b : array, shape (..., n, k)

    Examples
    --------
    >>> import torch
    >>> cdist(torch.tensor([[0.0, 0.0]]), torch.tensor([[3.0, 4.0]]))
    tensor([[5.]])
    """
    return call("cdist", a, b, dtypes=REAL_DTYPES)
