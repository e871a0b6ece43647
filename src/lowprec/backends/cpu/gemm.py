"""Products of matrices that already hold what the mode says: MKL where it is installed, else NumPy.

MKL is found where its wheel puts it, opened once, at first use, and called through CBLAS
(oneMKL Developer Reference, "cblas_?gemm").
"""

from __future__ import annotations

import ctypes
import functools
import importlib.metadata
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from lowprec.planning import GemmLayout

__all__ = ["mkl", "multiply_mkl", "multiply_numpy"]

_ROW_MAJOR, _COL_MAJOR, _NO_TRANS, _TRANS = 101, 102, 111, 112
_THREADING_INTEL = 0

_INT, _POINTER = ctypes.c_int, ctypes.c_void_p
_FUNCTIONS: dict[str, tuple[str, Any]] = {
    "float32": ("cblas_sgemm", ctypes.c_float),
    "float64": ("cblas_dgemm", ctypes.c_double),
    "complex64": ("cblas_cgemm", None),
    "complex128": ("cblas_zgemm", None),
}


class Mkl:
    """The opened library.

    Parameters
    ----------
    library : ctypes.CDLL
        ``libmkl_rt``.
    path : str
        Where it was found.
    """

    def __init__(self, library: ctypes.CDLL, path: str) -> None:
        self.path = path
        self._gemms: dict[str, Callable[..., None]] = {}
        for dtype, (name, scalar) in _FUNCTIONS.items():
            function = getattr(library, name)
            by_value = scalar if scalar is not None else _POINTER
            function.restype = None
            function.argtypes = [
                _INT,  # layout
                _INT,  # op_a
                _INT,  # op_b
                _INT,  # m
                _INT,  # n
                _INT,  # k
                by_value,  # alpha
                _POINTER,  # a
                _INT,  # lda
                _POINTER,  # b
                _INT,  # ldb
                by_value,  # beta
                _POINTER,  # c
                _INT,  # ldc
            ]
            self._gemms[dtype] = function
        self._scalars: dict[str, tuple[Any, Any]] = {"float32": (1.0, 0.0), "float64": (1.0, 0.0)}
        for dtype in ("complex64", "complex128"):
            # Kept as attributes: the C call reads them through their addresses.
            pair = np.array([1.0, 0.0], dtype)
            self._scalars[dtype] = (pair[0:].ctypes.data, pair[1:].ctypes.data)
            self._scalars[dtype + " owner"] = (pair, None)
        library.MKL_Get_Max_Threads.restype = _INT
        self.max_threads: Callable[[], int] = library.MKL_Get_Max_Threads
        self.version = _version_string(library)

    def bound(self, dtype: str, layout: GemmLayout) -> Callable[[int, int, int], None]:
        """Return the call for one product of this layout, as a function of the addresses of a, b and out.

        What NumPy's attributes would be asked for on every call is worked out here once.
        """
        a, b, out = layout.a, layout.b, layout.out
        # ctypes objects pass through; Python numbers would be converted again on every call, for 1 us.
        op_a, op_b = (_INT(_NO_TRANS if x.order == out.order else _TRANS) for x in (a, b))
        lda, ldb, ldc = (_INT(x.leading_dimension or 1) for x in (a, b, out))
        m, n, k = _INT(layout.m), _INT(layout.n), _INT(layout.k)
        # A column-major result stands in a column-major call, where NO_TRANS means column-major.
        order = _INT(_COL_MAJOR if out.order == "col" else _ROW_MAJOR)
        function = self._gemms[dtype]
        scalar = _FUNCTIONS[dtype][1] or _POINTER
        one, zero = (scalar(x) for x in self._scalars[dtype])

        def call(a: int, b: int, out: int) -> None:
            function(order, op_a, op_b, m, n, k, one, a, lda, b, ldb, zero, out, ldc)

        return call

    def gemm(self, a: Any, b: Any, out: Any) -> None:
        """Compute ``out = a @ b`` for 2-D arrays of one dtype that BLAS can express."""
        dtype = out.dtype.name
        m, n, k = out.shape[0], out.shape[1], a.shape[1]
        if not _is_row_major(out):
            a, b, out, m, n = b.T, a.T, out.T, n, m
        op_a, lda = _operand(a)
        op_b, ldb = _operand(b)
        one, zero = self._scalars[dtype]
        self._gemms[dtype](
            _ROW_MAJOR,
            op_a,
            op_b,
            m,
            n,
            k,
            one,
            a.ctypes.data,
            lda,
            b.ctypes.data,
            ldb,
            zero,
            out.ctypes.data,
            max(out.strides[0] // out.itemsize, n),
        )


def _version_string(library: ctypes.CDLL) -> str:
    buffer = ctypes.create_string_buffer(198)
    library.MKL_Get_Version_String(buffer, len(buffer))
    return buffer.value.decode(errors="replace").strip()


def _library_candidates() -> list[str]:
    """Return where ``libmkl_rt`` may be: the files of the ``mkl`` distribution, then the loader's own path."""
    try:
        files = importlib.metadata.files("mkl") or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    names = [f for f in files if f.name.startswith(("libmkl_rt.so", "mkl_rt."))]
    return [str(Path(str(f.locate())).resolve()) for f in names] + [
        "libmkl_rt.so.3",
        "libmkl_rt.so.2",
    ]


@functools.cache
def mkl() -> Mkl | None:
    """Open MKL once and return it, or ``None`` where it is not installed."""
    for path in _library_candidates():
        try:
            library = ctypes.CDLL(path)
            library.MKL_Set_Threading_Layer(_THREADING_INTEL)
            return Mkl(library, path)
        except (OSError, AttributeError):
            continue
    return None


def loaded_mkl() -> Mkl:
    """Return MKL for a plan that was made because it is there."""
    library = mkl()
    assert library is not None
    return library


def _is_row_major(x: Any) -> bool:
    rows, columns = x.shape
    row_stride, column_stride = x.strides
    one_step = column_stride == x.itemsize or columns == 1
    return bool(one_step and (row_stride >= columns * x.itemsize or rows == 1))


def is_blas_expressible(x: Any) -> bool:
    """Return whether BLAS can read the last two dimensions of ``x`` in place, as they are or transposed."""
    y = x[(0,) * (x.ndim - 2)] if x.ndim > 2 else x
    whole = all(s % x.itemsize == 0 for s in y.strides)
    return whole and (_is_row_major(y) or _is_row_major(y.T))


def _operand(x: Any) -> tuple[int, int]:
    """Return ``(op, leading dimension)`` of a BLAS-expressible 2-D array in row-major terms."""
    if _is_row_major(x):
        return _NO_TRANS, max(x.strides[0] // x.itemsize, x.shape[1], 1)
    return _TRANS, max(x.strides[1] // x.itemsize, x.shape[0], 1)


def _in_place_or_copy(x: Any) -> Any:
    return x if is_blas_expressible(x) else np.ascontiguousarray(x)


def multiply_numpy(a: Any, b: Any, out: Any) -> None:
    """Compute ``out = a @ b`` with ``numpy.matmul``; arrays of one dtype, at least 2-D, batches broadcast."""
    a, b = _in_place_or_copy(a), _in_place_or_copy(b)
    with np.errstate(all="ignore"):
        if is_blas_expressible(out):
            np.matmul(a, b, out=out)
        else:
            out[...] = np.matmul(a, b)


def multiply_mkl(a: Any, b: Any, out: Any) -> None:
    """Compute ``out = a @ b`` with MKL; arrays of one dtype, at least 2-D, batches broadcast.

    The caller has made sure that MKL is there.
    """
    library = loaded_mkl()
    a, b = _in_place_or_copy(a), _in_place_or_copy(b)
    target = out if is_blas_expressible(out) else np.empty(out.shape, out.dtype)
    if target.ndim == 2:
        library.gemm(a, b, target)
    else:
        batch = target.shape[:-2]
        wide_a = np.broadcast_to(a, batch + a.shape[-2:])
        wide_b = np.broadcast_to(b, batch + b.shape[-2:])
        for index in np.ndindex(batch):
            library.gemm(wide_a[index], wide_b[index], target[index])
    if target is not out:
        out[...] = target


#: Products of int8 are at most 2^14 in size, so sums of this many are exact in float32.
_INT8_CHUNK = 1024


def multiply_int8(multiply: Callable[[Any, Any, Any], None], a: Any, b: Any, out: Any) -> None:
    """Compute ``out = a @ b`` for int8 operands and an int32 result, exactly, with float32 products of short sums."""
    out[...] = 0
    for first in range(0, a.shape[-1], _INT8_CHUNK):
        x = a[..., first : first + _INT8_CHUNK].astype(np.float32)
        y = b[..., first : first + _INT8_CHUNK, :].astype(np.float32)
        partial = np.empty(out.shape, np.float32)
        multiply(x, y, partial)
        out += partial.astype(np.int32)
