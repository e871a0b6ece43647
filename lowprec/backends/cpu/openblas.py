"""OpenBLAS, in a copy of lowprec's own: the library of the package ``scipy-openblas64``, called through CBLAS.

NumPy and SciPy bring copies of theirs. This one is a third, whose symbols have a prefix, so none sees another. It runs
without threads of its own: a product is cut into panels that the pool of this backend shares out, so that its threads
do not spin beside the pool's, and so that the number of threads changes no bit of a result.

An OpenBLAS chooses its kernels while it is loaded, by the processor and by ``OPENBLAS_CORETYPE``. That variable is set
for as long as this copy is loaded, to what the processor's flags allow: whatever holds NumPy's copy to lesser kernels,
an old release or the variable itself, does not hold this one.

Source: OpenBLAS's documentation, "Runtime variables"; the reference CBLAS, ``cblas.h``.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from lowprec.arrays.view import data_pointer
from lowprec.backends.cpu import cpuinfo, threads
from lowprec.backends.cpu.panels import (
    SMALLEST_PANEL,
    panels_for_shape,
    panels_for_threads,
    rows_for_shape,
)
from lowprec.planning import MatrixStack
from lowprec.policy import environment
from lowprec.policy.interrupts import raised_in
from lowprec.util import forking

_PACKAGE = "scipy_openblas64"

_ROW_MAJOR, _COLUMN_MAJOR, _NO_TRANS, _TRANS = 101, 102, 111, 112

_ENUM, _INT, _POINTER = ctypes.c_int, ctypes.c_int64, ctypes.c_void_p

#: Letter of the functions, and how they take alpha and beta.
_FUNCTIONS: dict[str, tuple[str, Any]] = {
    "float32": ("s", ctypes.c_float),
    "float64": ("d", ctypes.c_double),
    "complex64": ("c", _POINTER),
    "complex128": ("z", _POINTER),
}

#: Alpha and beta of the functions that read them through their addresses, for as long as the process lives.
_ONE_AND_ZERO = {name: np.array([1, 0], name) for name in _FUNCTIONS}

#: Up to this many multiplications OpenBLAS uses one thread (of complex numbers), with matrices and with a vector.
_NEVER_PARALLEL, _NEVER_PARALLEL_VECTOR = 1 << 15, 1 << 12

#: Multiplications of a batch that pay for waking a thread.
_PAYS_TO_SHARE = 4_000_000

#: Kernels, and what they multiply so that an element's bits do not depend on the panel that it lies in.
_SAME_BITS_IN_ANY_PANEL = frozenset({("SkylakeX", "float32")})

#: Kernels for AVX-512, and those that an OpenBLAS may have instead on a processor of later years.
AVX512 = "SkylakeX"
BELOW_AVX512 = ("Haswell", "Zen", "Sandybridge", "Nehalem", "Prescott", "Katmai")

#: What the processors had for which the kernels of that name were written.
_CORE_TYPES = (
    (AVX512, frozenset({"avx512f", "avx512cd", "avx512bw", "avx512dq", "avx512vl"})),
    ("Haswell", frozenset({"avx2", "fma"})),
)

#: What is loaded where the processor has better kernels that are not to be used.
_BELOW_AVX2 = "Nehalem"

#: Address space that loading the library takes with a thread for it, and that each thread in a product takes (its
#: buffer, and the stack and the arena of a new thread of the pool): what is not to be had ends the process.
_LIBRARY_BYTES, _THREAD_BYTES = 144 << 20, 112 << 20

Product = Callable[[int, int, int], None]

#: Of the addresses of all a, b and out; shape (3, batch_count), C-contiguous, 64 bits.
BatchedProduct = Callable[[Any], None]


def core_type(flags: frozenset[str]) -> str | None:
    """Return the name of the best kernels for a processor with these flags; None where OpenBLAS is to choose.

    Examples
    --------
    >>> core_type(frozenset({"avx2", "fma", "sse2"})), core_type(frozenset({"asimd"}))
    ('Haswell', None)
    """
    return next((name for name, needed in _CORE_TYPES if needed <= flags), None)


class OpenBlas:
    """A library that was loaded for lowprec, and where it was found."""

    def __init__(self, library: ctypes.CDLL, path: str) -> None:
        self.path = path
        self.version = _text(library, "scipy_openblas_get_config64_").split()[1]
        self.core_type = _text(library, "scipy_openblas_get_corename64_")
        # These two are so short that giving up the GIL for them would take longer.
        held = ctypes.PyDLL(path)
        self._get_threads = held.scipy_openblas_get_num_threads64_
        self._set_threads = held.scipy_openblas_set_num_threads64_
        self._gemm: dict[str, Callable[..., None]] = {}
        self._gemv: dict[str, Callable[..., None]] = {}
        self._gemm_batch: dict[str, Callable[..., None]] = {}
        self._factors: dict[str, tuple[Any, Any]] = {}
        for dtype, (letter, scalar) in _FUNCTIONS.items():
            one, zero = _factor_addresses(dtype) if scalar is _POINTER else (1.0, 0.0)
            self._factors[dtype] = scalar(one), scalar(zero)
            for table, name, types in (
                (self._gemm, "gemm", _gemm_types(scalar)),
                (self._gemv, "gemv", _gemv_types(scalar)),
                (self._gemm_batch, "gemm_batch", _GEMM_BATCH_TYPES),
            ):
                table[dtype] = _declared(library, f"scipy_cblas_{letter}{name}64_", types)
        self.use_one_thread()

    def use_one_thread(self) -> None:
        """Have each call run on the thread that makes it; ``threadpoolctl`` may have said otherwise."""
        if self._get_threads() != 1:
            self._set_threads(1)

    def product(self, a: MatrixStack, b: MatrixStack, out: MatrixStack) -> Product:
        """Return a function of the addresses of one a, b and out that computes ``out = a @ b``.

        All are of one dtype, float32, float64, complex64 or complex128, and such as BLAS can express.
        """
        if b.cols == 1:
            return self._matrix_vector(a, b, out)
        if a.rows == 1 or out.order != "row":
            whole = self.product(b.transposed, a.transposed, out.transposed)
            return lambda a, b, out: whole(b, a, out)
        return self._matrix_matrix(a, b, out)

    def batch(self, a: MatrixStack, b: MatrixStack, out: MatrixStack) -> BatchedProduct:
        """Return a function that computes ``out = a @ b`` for the matrices at all addresses passed to it.

        Each matrix is multiplied by one thread, or cut as its shape says: threads change no bit.
        """
        m, n, k = a.rows, b.cols, a.cols
        if m * n * k >= 2 * SMALLEST_PANEL:
            product = self.product(a, b, out)
            return lambda x: threads.share(
                lambda abc: product(*abc), list(zip(*x.tolist(), strict=True))
            )
        if out.order != "row":
            whole = self.batch(b.transposed, a.transposed, out.transposed)
            return lambda x: whole(x[[1, 0, 2]])
        function = self._gemm_batch[out.dtype.label]
        ops = np.array([_NO_TRANS if x.order == "row" else _TRANS for x in (a, b)], np.int32)
        leading = [x.leading_dimension or 1 for x in (a, b, out)]
        extents = np.array([m, n, k, *leading], np.int64)
        op_a, op_b = _element_addresses(ops)
        all_m, all_n, all_k, lda, ldb, ldc = _element_addresses(extents)
        one, zero = _factor_addresses(out.dtype.label)

        def batch(addresses: Any, _kept: Any = (ops, extents)) -> None:
            self.use_one_thread()
            _, count = addresses.shape
            workers = threads.num_threads() if count * m * n * k >= _PAYS_TO_SHARE else 1
            step = count if workers == 1 else max(1, count // (4 * workers))
            first = data_pointer(addresses)
            to_b, to_out = 8 * count, 16 * count
            pieces = iter(range(0, count, step))

            def work() -> None:
                for i in pieces:
                    at, size = first + 8 * i, ctypes.byref(_INT(min(step, count - i)))
                    function(
                        _ROW_MAJOR, op_a, op_b, all_m, all_n, all_k, one, at, lda,
                        at + to_b, ldb, zero, at + to_out, ldc, 1, size,
                    )  # fmt: skip

            threads.run(work, min(workers, count))

        return batch

    def _matrix_matrix(self, a: MatrixStack, b: MatrixStack, out: MatrixStack) -> Product:
        m, n, k, dtype = a.rows, b.cols, a.cols, out.dtype
        function = self._gemm[dtype.label]
        one, zero = self._factors[dtype.label]
        # ctypes objects pass through; Python numbers would be converted again on every call, for 1 us.
        order, all_m, all_n, all_k = _ENUM(_ROW_MAJOR), _INT(m), _INT(n), _INT(k)
        op_a, op_b = (_ENUM(_NO_TRANS if x.order == "row" else _TRANS) for x in (a, b))
        lda, ldb, ldc = (_INT(x.leading_dimension or 1) for x in (a, b, out))

        def single(a: int, b: int, out: int) -> None:
            function(order, op_a, op_b, all_m, all_n, all_k, one, a, lda, b, ldb, zero, out, ldc)

        if m * n * k <= _NEVER_PARALLEL:
            return single

        a_row, b_column, out_row, out_column = (
            step * dtype.itemsize
            for step in (a.row_stride, b.col_stride, out.row_stride, out.col_stride)
        )
        by_shape = (self.core_type, dtype.label) not in _SAME_BITS_IN_ANY_PANEL
        fixed = panels_for_shape(m, n, k) if by_shape else None
        is_small = m * n * k < 2 * SMALLEST_PANEL

        def panels(a: int, b: int, out: int) -> None:
            self.use_one_thread()
            if is_small:
                single(a, b, out)
                return
            workers = threads.num_threads()
            cut = panels_for_threads(m, n, k, workers) if fixed is None else fixed
            pieces = iter(cut)

            def work() -> None:
                # Taking the next element of a list's iterator is atomic.
                for i, rows, j, columns in pieces:
                    function(
                        order, op_a, op_b, rows, columns, all_k, one, a + i * a_row, lda,
                        b + j * b_column, ldb, zero, out + i * out_row + j * out_column, ldc,
                    )  # fmt: skip

            threads.run(work, min(workers, len(cut)))

        return panels

    def _matrix_vector(self, a: MatrixStack, b: MatrixStack, out: MatrixStack) -> Product:
        m, k, dtype = a.rows, a.cols, out.dtype
        function = self._gemv[dtype.label]
        one, zero = self._factors[dtype.label]
        order = _ENUM(_ROW_MAJOR if a.order == "row" else _COLUMN_MAJOR)
        no_trans, all_m, all_k = _ENUM(_NO_TRANS), _INT(m), _INT(k)
        lda = _INT(a.leading_dimension or 1)
        # The strides of a single element may be anything.
        step_b, step_out = _INT(b.row_stride if k > 1 else 1), _INT(out.row_stride if m > 1 else 1)
        a_row, out_row = a.row_stride * dtype.itemsize, out.row_stride * dtype.itemsize

        def single(a: int, b: int, out: int) -> None:
            function(order, no_trans, all_m, all_k, one, a, lda, b, step_b, zero, out, step_out)

        if m * k <= _NEVER_PARALLEL_VECTOR:
            return single

        cut = rows_for_shape(m, k, by_rows=a.order == "row")

        def pieces(a: int, b: int, out: int) -> None:
            self.use_one_thread()
            queue = iter(cut)

            def work() -> None:
                for i, rows in queue:
                    function(
                        order, no_trans, rows, all_k, one, a + i * a_row, lda, b, step_b,
                        zero, out + i * out_row, step_out,
                    )  # fmt: skip

            threads.run(work, min(threads.num_threads(), len(cut)))

        return pieces


#: A matrix or a vector: where it is, and its leading dimension or step.
_ARRAY = [_POINTER, _INT]


def _gemm_types(scalar: Any) -> list[Any]:
    """Layout, op_a, op_b; m, n, k; alpha, a, b; beta, c."""
    return [_ENUM] * 3 + [_INT] * 3 + [scalar, *_ARRAY, *_ARRAY, scalar, *_ARRAY]


def _gemv_types(scalar: Any) -> list[Any]:
    """Layout, op_a; m, n; alpha, a, x; beta, y."""
    return [_ENUM] * 2 + [_INT] * 2 + [scalar, *_ARRAY, *_ARRAY, scalar, *_ARRAY]


#: Layout; then an array for each argument of a product, with an element for each of so many groups; their sizes.
_GEMM_BATCH_TYPES = [_ENUM, *[_POINTER] * 13, _INT, _POINTER]


def _element_addresses(x: Any) -> list[int]:
    return [data_pointer(x) + i * x.itemsize for i in range(x.size)]


def _factor_addresses(dtype: str) -> list[int]:
    """Return the addresses of 1 and 0."""
    return _element_addresses(_ONE_AND_ZERO[dtype])


def _declared(library: ctypes.CDLL, name: str, argtypes: list[Any]) -> Callable[..., None]:
    """Return a CBLAS function with its types declared."""
    function: Any = getattr(library, name)
    function.restype, function.argtypes = None, argtypes
    declared: Callable[..., None] = function
    return declared


def _text(library: ctypes.CDLL, name: str) -> str:
    function = getattr(library, name)
    function.restype = ctypes.c_char_p
    return str(function().decode())


# --- opening it, once -------------------------------------------------------------------------


def library_path() -> str | None:
    """Return where the package has its library, without importing the package."""
    # On macOS, NumPy multiplies by Apple's Accelerate, which no OpenBLAS comes near.
    if sys.platform == "darwin":
        return None
    try:
        spec = importlib.util.find_spec(_PACKAGE)
    except ValueError as error:  # the module is blocked
        if not raised_in(error, "importlib.util"):
            raise
        return None
    folders = (spec and spec.submodule_search_locations) or []
    names = ("libscipy_openblas64_.so", "libscipy_openblas64_.dll")
    paths = [Path(folder, "lib", name) for folder in folders for name in names]
    found = [os.path.realpath(path) for path in paths if path.is_file()]
    return found[0] if found else None


def _is_loaded(path: str) -> bool:
    """Whether somebody else (a NumPy that was built with this package) has loaded this very library already."""
    if not hasattr(os, "RTLD_NOLOAD"):
        return False
    try:
        ctypes.CDLL(path, mode=os.RTLD_NOLOAD)
    except OSError as error:
        if not raised_in(error, "ctypes"):
            raise
        return False
    return True


#: The library by its path, None where it cannot be had.
_opened: dict[str, OpenBlas | None] = {}
#: Paths of libraries that this process has loaded for lowprec, or was about to.
_ours: set[str] = set()


class _Local(threading.local):
    is_unlimited = False  # as seen at the thread's first product


_local = _Local()


def has_room(nbytes: int | None = None) -> bool:
    """Whether the process may take so much address space, by default that of a product of this thread."""
    if nbytes is None and _local.is_unlimited:
        return True
    if not _is_limited():
        _local.is_unlimited = True
        return True
    try:
        # Reserved and released: no page of it is touched.
        np.empty(_THREAD_BYTES * threads.num_threads() if nbytes is None else nbytes, np.uint8)
    except MemoryError:
        return False
    return True


def _is_limited() -> bool:
    if sys.platform == "win32":
        return False
    try:
        import resource  # a library, for which there may be no room
    except ImportError:
        return True
    limits = map(resource.getrlimit, (resource.RLIMIT_AS, resource.RLIMIT_DATA))
    return any(soft != resource.RLIM_INFINITY for soft, _ in limits)


def _load(path: str) -> OpenBlas | None:
    # Another caller's has other threads and kernels.
    if (path not in _ours and _is_loaded(path)) or not has_room(_LIBRARY_BYTES):
        return None
    # Its one thread is no answer to how many a product may use.
    threads.ignore_library(path)
    variables = {"OPENBLAS_NUM_THREADS": "1"}
    best = core_type(cpuinfo.cpu_flags())
    if best is None and cpuinfo.hidden_flags():
        best = _BELOW_AVX2
    if best is not None:
        variables["OPENBLAS_CORETYPE"] = best
    _ours.add(path)
    with environment.c_variables(variables):
        library = ctypes.CDLL(path)
    return OpenBlas(library, path)


@functools.cache
def openblas() -> OpenBlas | None:
    """Open the library once and return it, or ``None`` where it is not installed."""
    path = library_path()
    if path is None:
        return None
    with forking.making:  # a fork waits: the child finds the variables as they were
        if path not in _opened:
            _opened[path] = _load(path)
        return _opened[path]


def loaded_openblas() -> OpenBlas:
    """Return the library for a plan that was made because it is there."""
    library = openblas()
    assert library is not None
    return library
