"""Linear algebra by the caller's own library, inside the guard.

Each function finds the library of its operands, checks their element types, and calls that library's function inside
:func:`lowprec.fp32_guard`: what it multiplies in float32 on its way to the answer is multiplied in full FP32, whatever
was set before. Shapes, algorithms, failures (a singular matrix raises in one library and gives NaN in another) and
gradients are the library's own.
"""

from __future__ import annotations

from typing import Any

from lowprec.errors import UnsupportedError, quoted
from lowprec.linalg.call import REAL_DTYPES, Call
from lowprec.linalg.results import EighResult, LstsqResult, QRResult, SlogdetResult, SVDResult

__all__ = [
    "cdist",
    "cholesky",
    "det",
    "eigh",
    "expm",
    "inv",
    "lstsq",
    "matrix_power",
    "matrix_rank",
    "pinv",
    "qr",
    "slogdet",
    "solve",
    "svd",
]

_QR_MODES = ("reduced", "complete")


# -- solving --------------------------------------------------------------------------------------


def solve(a: Any, b: Any, /) -> Any:
    """Return ``x`` with ``a @ x = b``.

    Parameters
    ----------
    a : array, shape (..., n, n)
        Of float32, float64, complex64 or complex128, as every operand here.
    b : array, shape (n,) or (..., n, k)
        Of the library of ``a``. As in the Array API, only a 1-D ``b`` is a vector.

    Returns
    -------
    array, shape (..., n) or (..., n, k)

    Raises
    ------
    ArrayError, DTypeError
        An operand is no array, of another library, or of another element type.
    UnsupportedError
        The library has no such function. Every other error is the library's own.

    Examples
    --------
    >>> import numpy as np
    >>> solve(np.array([[2.0, 0.0], [0.0, 4.0]]), np.array([1.0, 1.0]))
    array([0.5 , 0.25])
    """
    return Call("solve", a, b).run()


def lstsq(a: Any, b: Any, /, *, rtol: float | None = None) -> LstsqResult:
    """Return the ``x`` of least norm that minimises ``|a @ x - b|``.

    Parameters
    ----------
    a : array, shape (m, n)
        A stack of matrices, shape (..., m, n), where the library takes one (PyTorch).
    b : array, shape (m,) or (m, k)
    rtol : float, optional
        Singular values below this fraction of the largest count as zero; ``max(m, n)`` times the machine epsilon by
        default.

    Returns
    -------
    LstsqResult
        ``(solution, residuals, rank, singular_values)``.

    Raises
    ------
    ArrayError, DTypeError, UnsupportedError
        As in :func:`solve`; also where the library takes no stack of matrices and is given one.

    Examples
    --------
    >>> import numpy as np
    >>> x = lstsq(np.array([[1.0], [1.0]]), np.array([1.0, 3.0]))
    >>> x.solution.round(6), int(x.rank)
    (array([2.]), 1)
    """
    call = Call("lstsq", a, b)
    return LstsqResult(*call.run(rtol=call.rtol(rtol)))


def inv(a: Any, /) -> Any:
    """Return the inverse of square matrices.

    Parameters
    ----------
    a : array, shape (..., n, n)

    Returns
    -------
    array, shape (..., n, n)

    Raises
    ------
    ArrayError, DTypeError, UnsupportedError
        As in :func:`solve`.

    Examples
    --------
    >>> import numpy as np
    >>> inv(np.array([[2.0, 0.0], [0.0, 4.0]]))
    array([[0.5 , 0.  ],
           [0.  , 0.25]])
    """
    return Call("inv", a).run()


def pinv(a: Any, /, *, rtol: float | None = None) -> Any:
    """Return the Moore-Penrose inverse.

    Parameters
    ----------
    a : array, shape (..., m, n)
    rtol : float, optional
        Singular values below this fraction of the largest count as zero. By default ``max(m, n)`` times the machine
        epsilon, as the Array API has it, in every library (NumPy's own is 1e-15, which counts noise in float32).

    Returns
    -------
    array, shape (..., n, m)

    Raises
    ------
    ArrayError, DTypeError, UnsupportedError
        As in :func:`solve`.

    Examples
    --------
    >>> import numpy as np
    >>> pinv(np.array([[2.0, 0.0], [0.0, 0.0], [0.0, 4.0]])).round(6) + 0.0
    array([[0.5 , 0.  , 0.  ],
           [0.  , 0.  , 0.25]])
    """
    call = Call("pinv", a)
    return call.run(rtol=call.rtol(rtol))


# -- decompositions -------------------------------------------------------------------------------


def cholesky(a: Any, /) -> Any:
    """Return the lower triangle ``L`` with ``a = L @ L^H``.

    Parameters
    ----------
    a : array, shape (..., n, n)
        Hermitian and positive definite.

    Returns
    -------
    array, shape (..., n, n)

    Raises
    ------
    ArrayError, DTypeError, UnsupportedError
        As in :func:`solve`.

    Examples
    --------
    >>> import numpy as np
    >>> cholesky(np.array([[4.0, 2.0], [2.0, 10.0]]))
    array([[2., 0.],
           [1., 3.]])
    """
    return Call("cholesky", a).run()


def qr(a: Any, /, *, mode: str = "reduced") -> QRResult:
    """Return ``(Q, R)`` with ``a = Q @ R``, ``Q`` of orthonormal columns and ``R`` upper triangular.

    Parameters
    ----------
    a : array, shape (..., m, n)
    mode : {"reduced", "complete"}
        Whether ``Q`` has ``min(m, n)`` columns or ``m``.

    Returns
    -------
    QRResult
        ``(Q, R)``.

    Raises
    ------
    ArrayError, DTypeError, UnsupportedError
        As in :func:`solve`; also for another ``mode``.

    Examples
    --------
    >>> import numpy as np
    >>> q, r = qr(np.array([[3.0], [4.0]]))
    >>> abs(r).round(6)
    array([[5.]])
    """
    if mode not in _QR_MODES:
        raise UnsupportedError(
            f"qr has no mode {quoted(mode)}; choose one of: {', '.join(map(repr, _QR_MODES))}"
        )
    return QRResult(*Call("qr", a).run(mode=mode))


def eigh(a: Any, /) -> EighResult:
    """Return eigenvalues and eigenvectors of Hermitian matrices.

    Parameters
    ----------
    a : array, shape (..., n, n)
        Hermitian, both triangles: which one is read is the library's choice.

    Returns
    -------
    EighResult
        ``(eigenvalues, eigenvectors)``, the eigenvalues real and ascending.

    Raises
    ------
    ArrayError, DTypeError, UnsupportedError
        As in :func:`solve`.

    Examples
    --------
    >>> import numpy as np
    >>> eigh(np.array([[2.0, 1.0], [1.0, 2.0]])).eigenvalues.round(6)
    array([1., 3.])
    """
    return EighResult(*Call("eigh", a).run())


def svd(a: Any, /, *, full_matrices: bool = True) -> SVDResult:
    """Return ``(U, S, Vh)`` with ``a = U @ diag(S) @ Vh``.

    Parameters
    ----------
    a : array, shape (..., m, n)
    full_matrices : bool
        Whether ``U`` and ``Vh`` are square, or as narrow as ``min(m, n)``.

    Returns
    -------
    SVDResult
        ``(U, S, Vh)``, the singular values real and descending.

    Raises
    ------
    ArrayError, DTypeError, UnsupportedError
        As in :func:`solve`.

    Examples
    --------
    >>> import numpy as np
    >>> svd(np.array([[0.0, 2.0], [1.0, 0.0]])).S.round(6)
    array([2., 1.])
    """
    return SVDResult(*Call("svd", a).run(full_matrices=full_matrices))


# -- numbers of a matrix --------------------------------------------------------------------------


def det(a: Any, /) -> Any:
    """Return the determinants of square matrices.

    Parameters
    ----------
    a : array, shape (..., n, n)

    Returns
    -------
    array, shape (...)

    Raises
    ------
    ArrayError, DTypeError, UnsupportedError
        As in :func:`solve`.

    Examples
    --------
    >>> import numpy as np
    >>> float(det(np.array([[2.0, 1.0], [0.0, 3.0]])))
    6.0
    """
    return Call("det", a).run()


def slogdet(a: Any, /) -> SlogdetResult:
    """Return the signs of determinants, and the logarithms of their moduli.

    Parameters
    ----------
    a : array, shape (..., n, n)

    Returns
    -------
    SlogdetResult
        ``(sign, logabsdet)``.

    Raises
    ------
    ArrayError, DTypeError, UnsupportedError
        As in :func:`solve`.

    Examples
    --------
    >>> import numpy as np
    >>> sign, logabsdet = slogdet(-np.eye(3))
    >>> float(sign), float(logabsdet)
    (-1.0, 0.0)
    """
    return SlogdetResult(*Call("slogdet", a).run())


def matrix_rank(a: Any, /, *, rtol: float | None = None) -> Any:
    """Return how many singular values are above ``rtol`` times the largest.

    Parameters
    ----------
    a : array, shape (..., m, n)
    rtol : float, optional
        ``max(m, n)`` times the machine epsilon by default.

    Returns
    -------
    array of integers, shape (...)

    Raises
    ------
    ArrayError, DTypeError, UnsupportedError
        As in :func:`solve`.

    Examples
    --------
    >>> import numpy as np
    >>> int(matrix_rank(np.ones((3, 3))))
    1
    """
    return Call("matrix_rank", a).run(**({} if rtol is None else {"rtol": rtol}))


# -- functions of matrices and points -------------------------------------------------------------


def matrix_power(a: Any, n: int, /) -> Any:
    """Return square matrices multiplied by themselves; their inverses where ``n`` is negative.

    Parameters
    ----------
    a : array, shape (..., m, m)
    n : int

    Returns
    -------
    array, shape (..., m, m)

    Raises
    ------
    ArrayError, DTypeError, UnsupportedError
        As in :func:`solve`.

    Examples
    --------
    >>> import numpy as np
    >>> matrix_power(np.array([[1.0, 1.0], [0.0, 1.0]]), 5)
    array([[1., 5.],
           [0., 1.]])
    """
    return Call("matrix_power", a).run(n=n)


def expm(a: Any, /) -> Any:
    """Return the matrix exponential.

    Parameters
    ----------
    a : array, shape (..., n, n)
        CuPy takes a single matrix. For NumPy arrays SciPy does the work, and must be installed.

    Returns
    -------
    array, shape (..., n, n)

    Raises
    ------
    ArrayError, DTypeError, UnsupportedError
        As in :func:`solve`.

    Examples
    --------
    >>> import torch
    >>> expm(torch.tensor([[0.0, 1.0], [0.0, 0.0]]))
    tensor([[1., 1.],
            [0., 1.]])
    """
    return Call("expm", a).run()


def cdist(a: Any, b: Any, /) -> Any:
    """Return the Euclidean distances between the points of two sets.

    PyTorch works out sets of more than 25 points as ``|x|^2 - 2 x.y + |y|^2``. The error is then that of the squares,
    so that distances much smaller than the points' norms have few correct digits, even in full FP32.

    Parameters
    ----------
    a : array, shape (..., m, k)
        float32 or float64. One set, without batches, in NumPy and CuPy.
    b : array, shape (..., n, k)

    Returns
    -------
    array, shape (..., m, n)
        Of the operands' common dtype.

    Raises
    ------
    ArrayError, DTypeError, UnsupportedError
        As in :func:`solve`; JAX has no such function, and for NumPy arrays SciPy must be installed.

    Examples
    --------
    >>> import torch
    >>> cdist(torch.tensor([[0.0, 0.0]]), torch.tensor([[3.0, 4.0]]))
    tensor([[5.]])
    """
    return Call("cdist", a, b, dtypes=REAL_DTYPES).run()
