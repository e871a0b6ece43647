"""What the functions return that have more than one answer: the Array API's names, in its order.

Source: the linear algebra extension of the Array API standard, 2024.12 (https://data-apis.org/array-api). It has no
least squares; the names of that result are PyTorch's.
"""

from __future__ import annotations

from typing import Any, NamedTuple


class EighResult(NamedTuple):
    """Eigenvalues, ascending, shape (..., n), and the eigenvectors as columns, shape (..., n, n)."""

    eigenvalues: Any
    eigenvectors: Any


class QRResult(NamedTuple):
    """Orthonormal columns ``Q``, shape (..., m, k), and the upper triangle ``R``, shape (..., k, n)."""

    Q: Any
    R: Any


class SVDResult(NamedTuple):
    """``U``, the singular values ``S``, descending, shape (..., min(m, n)), and ``Vh``, V's conjugate transpose."""

    U: Any
    S: Any
    Vh: Any


class SlogdetResult(NamedTuple):
    """Sign (of modulus 1, or 0) and the natural logarithm of the modulus of determinants, each of shape (...)."""

    sign: Any
    logabsdet: Any


class LstsqResult(NamedTuple):
    """Solution, squared residual norms per column, rank of ``a`` and its singular values.

    What the library does not compute is empty: in most of them the residuals where ``a`` is wide or of deficient
    rank, in PyTorch on a GPU the rank and the singular values too.
    """

    solution: Any
    residuals: Any
    rank: Any
    singular_values: Any
