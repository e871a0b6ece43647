"""Solvers and decompositions by the caller's own library, in full FP32.

Each function is that of NumPy, PyTorch, JAX or CuPy, whichever the operands belong to, called inside
:func:`lowprec.fp32_guard`. Names, arguments and the order of results are those of the Array API in every library.
float32, float64, complex64 and complex128 are taken; LAPACK has no narrower types, and computing in float32 what was
given in 16 bits, or rounding a solution to 16 bits, is the caller's decision: convert, and convert back.

Examples
--------
>>> import numpy as np
>>> import lowprec
>>> a = np.array([[3.0, 1.0], [1.0, 2.0]], np.float32)
>>> lowprec.linalg.solve(a, np.array([9.0, 8.0], np.float32)).round(5)
array([2., 3.], dtype=float32)
>>> lowprec.linalg.eigh(a)._fields
('eigenvalues', 'eigenvectors')
"""

from lowprec.linalg.guarded import (
    EighResult,
    LstsqResult,
    QRResult,
    SlogdetResult,
    SVDResult,
    cdist,
    cholesky,
    det,
    eigh,
    expm,
    inv,
    lstsq,
    matrix_power,
    matrix_rank,
    pinv,
    qr,
    slogdet,
    solve,
    svd,
)

__all__ = [
    "EighResult",
    "LstsqResult",
    "QRResult",
    "SVDResult",
    "SlogdetResult",
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
