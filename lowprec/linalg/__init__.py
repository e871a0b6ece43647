"""Functions of linear algebra of the arrays' library, in full FP32.

``lowprec.linalg.NAME`` calls the function of this name in the library of its arrays inside :func:`lowprec.fp32_guard`,
which computes float32 products in full FP32. Arguments, results, errors and gradients are the library's.

- NumPy: ``numpy.linalg``, then ``scipy.linalg``
- PyTorch: ``torch.linalg``
- JAX: ``jax.numpy.linalg``, then ``jax.scipy.linalg``
- CuPy: ``cupy.linalg``, then ``cupyx.scipy.linalg``
- other arrays with DLPack: NumPy in host memory; on CUDA CuPy, if the program has imported it

``expm`` (PyTorch's ``matrix_exp``) and ``cdist`` (SciPy's, PyTorch's and CuPy's) have one name for all. The first array
is float32, float64, complex64 or complex128, the types of LAPACK; cast 16-bit arrays first.

Examples
--------
>>> import numpy as np
>>> import lowprec
>>> a = np.array([[2.0, 1.0], [1.0, 2.0]], np.float32)
>>> lowprec.linalg.eigh(a).eigenvalues.round(5)
array([1., 3.], dtype=float32)
>>> lowprec.linalg.invert(a)
Traceback (most recent call last):
AttributeError: lowprec.linalg: no loaded library has a function 'invert' of linear algebra; names close to it: ...
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from lowprec.arrays.signatures import of_first
from lowprec.linalg import functions
from lowprec.linalg.results import SolveReport
from lowprec.modes import ModeLike
from lowprec.util.tracing import uncompiled

__all__ = ["SolveReport", "solve"]

if TYPE_CHECKING:

    @of_first
    def inv(a: Any, /, *arguments: Any, **keywords: Any) -> Any: ...

    cholesky = expm = matrix_power = pinv = inv


def __getattr__(name: str) -> Callable[..., Any]:
    if name.startswith("_"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return functions.guarded(name)


def __dir__() -> list[str]:
    return sorted({*__all__, *functions.names()})


@uncompiled
def solve(
    a: Any,
    b: Any,
    /,
    *,
    method: str = "direct",
    factor_mode: ModeLike | None = None,
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
    factor_mode : str, MathMode or Recipe, optional
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
    from lowprec.core.blas import untaken

    # not by an attribute of this module, which may import SciPy
    from lowprec.linalg.solving import solve

    return untaken(
        solve, a, b, method=method, factor_mode=factor_mode, assume=assume, full_output=full_output
    )
