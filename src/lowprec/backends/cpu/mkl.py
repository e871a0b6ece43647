"""MKL, where it is installed: found where its wheel puts it, opened at first use, called through CBLAS.

MKL is used without its own threads: a product is cut into panels that the pool of this backend shares out. With an
OpenMP runtime of its own beside another library's, MKL's products come out wrong once that other runtime was loaded
first (``libmkl_intel_thread`` beside PyTorch's ``libgomp``), its threads spin for 200 ms after each product in the way
of whatever runs next, and which runtime there is would depend on what else the process has imported.

Source: oneMKL Developer Reference, "cblas_?gemm" and "mkl_set_threading_layer".
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from lowprec.backends.cpu import threads
from lowprec.backends.cpu.interrupts import raised_in
from lowprec.planning import MatrixStack

_ROW_MAJOR, _NO_TRANS, _TRANS = 101, 111, 112
_SEQUENTIAL = 1

_INT, _POINTER = ctypes.c_int, ctypes.c_void_p

#: Name of the function, and how it takes alpha and beta.
_FUNCTIONS: dict[str, tuple[str, Any]] = {
    "float32": ("cblas_sgemm", ctypes.c_float),
    "float64": ("cblas_dgemm", ctypes.c_double),
    "complex64": ("cblas_cgemm", _POINTER),
    "complex128": ("cblas_zgemm", _POINTER),
}

#: Alpha and beta of the complex functions, which read them through their addresses for as long as the process lives.
_COMPLEX_FACTORS = {name: np.array([1, 0], name) for name in ("complex64", "complex128")}

#: Flops from which it pays to wake other threads.
_PARALLEL_FLOPS = 20_000_000

#: Panels begin at multiples of this many rows or columns, so that all but the last fill MKL's register blocks.
_PANEL_GRAIN = 48


class Mkl:
    """The opened library.

    Parameters
    ----------
    library : ctypes.CDLL
        ``libmkl_rt``.
    path : str
        Where it was found.
    is_sequential : bool
        Whether it runs without threads of its own.
    """

    def __init__(self, library: ctypes.CDLL, path: str, is_sequential: bool) -> None:
        self.path = path
        self.is_sequential = is_sequential
        self.version = _version_string(library)
        self._gemms: dict[str, Callable[..., None]] = {}
        self._factors: dict[str, tuple[Any, Any]] = {}
        for dtype, (name, scalar) in _FUNCTIONS.items():
            self._gemms[dtype] = _declared(getattr(library, name), scalar)
            pair = _COMPLEX_FACTORS.get(dtype)
            one, zero = (1.0, 0.0) if pair is None else (pair.ctypes.data, pair[1:].ctypes.data)
            self._factors[dtype] = scalar(one), scalar(zero)

    def product(
        self, a: MatrixStack, b: MatrixStack, out: MatrixStack
    ) -> Callable[[int, int, int], None]:
        """Return a function of the addresses of one a, b and out that computes ``out = a @ b``.

        Parameters
        ----------
        a, b, out : MatrixStack
            Of one dtype, float32, float64, complex64 or complex128; each one that BLAS can express.
        """
        if out.order != "row":
            whole = self.product(b.transposed, a.transposed, out.transposed)
            return lambda a, b, out: whole(b, a, out)
        m, n, k, dtype = a.rows, b.cols, a.cols, out.dtype
        function = self._gemms[dtype.label]
        one, zero = self._factors[dtype.label]
        # ctypes objects pass through; Python numbers would be converted again on every call, for 1 us.
        order, all_m, all_n, all_k = (_INT(x) for x in (_ROW_MAJOR, m, n, k))
        op_a, op_b = (_INT(_NO_TRANS if x.order == "row" else _TRANS) for x in (a, b))
        lda, ldb, ldc = (_INT(x.leading_dimension or 1) for x in (a, b, out))

        def single(a: int, b: int, out: int) -> None:
            function(order, op_a, op_b, all_m, all_n, all_k, one, a, lda, b, ldb, zero, out, ldc)

        if not self.is_sequential or 2 * m * n * k < _PARALLEL_FLOPS:
            return single

        a_row, b_column, out_row, out_column = (
            step * dtype.itemsize
            for step in (a.row_stride, b.col_stride, out.row_stride, out.col_stride)
        )

        def parallel(a: int, b: int, out: int) -> None:
            workers = threads.num_threads()
            if workers == 1:
                single(a, b, out)
                return
            panels = _panels(m, n, workers)

            def work() -> None:
                for i, rows, j, columns in panels:
                    function(
                        order, op_a, op_b, rows, columns, all_k, one, a + i * a_row, lda,
                        b + j * b_column, ldb, zero, out + i * out_row + j * out_column, ldc,
                    )  # fmt: skip

            threads.run(work, workers)

        return parallel


def _declared(function: Any, scalar: Any) -> Callable[..., None]:
    """Return a CBLAS function with its types declared."""
    function.restype = None
    function.argtypes = [
        _INT,  # layout
        _INT,  # op_a
        _INT,  # op_b
        _INT,  # m
        _INT,  # n
        _INT,  # k
        scalar,  # alpha
        _POINTER,  # a
        _INT,  # lda
        _POINTER,  # b
        _INT,  # ldb
        scalar,  # beta
        _POINTER,  # c
        _INT,  # ldc
    ]
    declared: Callable[..., None] = function
    return declared


def _panels(m: int, n: int, workers: int) -> Iterator[tuple[int, int, int, int]]:
    """Return one iterator, to be shared by the threads, over (first row, rows, first column, columns)."""
    grids = [(rows, workers // rows) for rows in range(1, workers + 1) if workers % rows == 0]
    # The panels nearest to squares reread the least of a and b.
    down, across = min(grids, key=lambda grid: m / grid[0] + n / grid[1])
    pieces = [
        (i, rows, j, columns) for i, rows in _cuts(m, down) for j, columns in _cuts(n, across)
    ]
    return iter(pieces)


def _cuts(extent: int, count: int) -> list[tuple[int, int]]:
    """Cut an extent into at most ``count`` nearly equal pieces, as (first, length).

    Examples
    --------
    >>> _cuts(200, 2), _cuts(40, 2)
    ([(0, 96), (96, 104)], [(0, 40)])
    """
    bounds = sorted({round(extent * i / count / _PANEL_GRAIN) * _PANEL_GRAIN for i in range(count)})
    starts = [start for start in bounds if start < extent]
    return [
        (start, stop - start) for start, stop in zip(starts, [*starts[1:], extent], strict=True)
    ]


def _version_string(library: ctypes.CDLL) -> str:
    buffer = ctypes.create_string_buffer(198)
    library.MKL_Get_Version_String(buffer, len(buffer))
    return buffer.value.decode(errors="replace").strip()


def _library_candidates() -> list[str]:
    """Return where ``libmkl_rt`` may be: the files of the ``mkl`` distribution, then the loader's own path."""
    import importlib.metadata  # 10 ms that only the first product needs

    try:
        files = importlib.metadata.files("mkl") or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    names = [f for f in files if f.name.startswith(("libmkl_rt.so", "mkl_rt."))]
    found = [os.path.realpath(str(f.locate())) for f in names]
    return [*found, "libmkl_rt.so.3", "libmkl_rt.so.2"]


def _is_loaded(path: str) -> bool:
    """Whether somebody else (a NumPy built on MKL) has loaded this library already."""
    if not hasattr(os, "RTLD_NOLOAD"):
        return False
    try:
        ctypes.CDLL(os.path.basename(path), mode=os.RTLD_NOLOAD)
    except OSError as error:
        if not raised_in(error, "ctypes"):
            raise
        return False
    return True


#: By path, whether lowprec loads the library itself. The first thread to ask decides before it loads, so that no other
#: one, nor a second try after an interrupt, takes a library of ours for somebody else's.
_is_ours: dict[str, bool] = {}


@functools.cache
def mkl() -> Mkl | None:
    """Open MKL once and return it, or ``None`` where it is not installed.

    Several threads may come here at once, and a signal handler may end the call anywhere: all that is done here may be
    done twice, and a library is handed out only after it was configured.
    """
    for path in _library_candidates():
        is_ours = _is_ours.get(path)
        if is_ours is None:
            is_ours = _is_ours.setdefault(path, not _is_loaded(path))
        try:
            library = ctypes.CDLL(path)
            # The threading layer holds for the whole process: another user's MKL is taken as it is.
            layer = library.MKL_Set_Threading_Layer(_SEQUENTIAL) if is_ours else None
            return Mkl(library, path, layer == _SEQUENTIAL)
        except (OSError, AttributeError) as error:
            if not raised_in(error, "ctypes"):
                raise
    return None


def loaded_mkl() -> Mkl:
    """Return MKL for a plan that was made because it is there."""
    library = mkl()
    assert library is not None
    return library
