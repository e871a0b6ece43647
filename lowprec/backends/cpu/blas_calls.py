"""Calls of CBLAS functions for matrices with strides: single products, panels shared by threads, and batches.

Source: OpenBLAS's documentation, "Extensions" (``cblas_?gemm_batch``); the reference CBLAS, ``cblas.h``.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

from lowprec.arrays.view import data_pointer
from lowprec.backends.cpu import team, threads
from lowprec.backends.cpu.panels import SMALLEST_PANEL, panels_for_shape, panels_for_threads, rows_for_shape
from lowprec.planning import MatrixStack

_ROW_MAJOR, _COLUMN_MAJOR, _NO_TRANS, _TRANS = 101, 102, 111, 112

_ENUM, _INT, _POINTER = ctypes.c_int, ctypes.c_int64, ctypes.c_void_p

#: By dtype: letter in the functions' names, type of alpha and beta, and its letter for `team_kernels.rows_kernel`.
_FUNCTIONS: dict[str, tuple[str, Any, str]] = {
    "float32": ("s", ctypes.c_float, "f"),
    "float64": ("d", ctypes.c_double, "d"),
    "complex64": ("c", _POINTER, "l"),
    "complex128": ("z", _POINTER, "l"),
}

#: Alpha = 1 and beta = 0 in memory, for functions that take their addresses.
_ONE_AND_ZERO = {name: np.array([1, 0], name) for name in _FUNCTIONS}

#: Multiplications (of complex numbers) up to which OpenBLAS uses one thread, with matrices and with a vector.
_NEVER_PARALLEL, _NEVER_PARALLEL_VECTOR = 1 << 15, 1 << 12

#: Multiplications of a batch from which a second thread is faster; batch size from which each product is one call.
_PAYS_TO_SHARE, _MANY = 4_000_000, 32

#: Kernels and dtypes for which the bits of an element do not depend on its panel.
_SAME_BITS_IN_ANY_PANEL = frozenset({("SkylakeX", "float32")})

Product = Callable[[int, int, int], None]

#: Computes a batch, given the addresses of all a, b and out: int64, shape (3, batch_count), C-contiguous.
BatchedProduct = Callable[[Any], None]


class OpenBlas:
    """lowprec's copy of OpenBLAS, and its path."""

    def __init__(self, library: ctypes.CDLL, path: str) -> None:
        self.path = path
        self.version = _text(library, "scipy_openblas_get_config64_").split()[1]
        self.core_type = _text(library, "scipy_openblas_get_corename64_")
        # Two functions that are shorter than releasing the GIL.
        held = ctypes.PyDLL(path)
        self._get_threads = held.scipy_openblas_get_num_threads64_
        self._set_threads = held.scipy_openblas_set_num_threads64_
        self._gemm: dict[str, Callable[..., None]] = {}
        self._gemv: dict[str, Callable[..., None]] = {}
        self._gemm_batch: dict[str, Callable[..., None]] = {}
        self._factors: dict[str, tuple[Any, Any]] = {}
        #: By dtype: the letter of alpha and beta in the signature of table rows, and 1 and 0 as words.
        self._words: dict[str, tuple[str, list[int]]] = {}
        for dtype, (letter, scalar, row_letter) in _FUNCTIONS.items():
            one, zero = _element_addresses(_ONE_AND_ZERO[dtype]) if scalar is _POINTER else (1.0, 0.0)
            self._factors[dtype] = factors = scalar(one), scalar(zero)
            self._words[dtype] = row_letter, [int.from_bytes(bytes(x), sys.byteorder) for x in factors]
            for table, name, types in (
                (self._gemm, "gemm", _types(3, scalar)),
                (self._gemv, "gemv", _types(2, scalar)),
                (self._gemm_batch, "gemm_batch", _GEMM_BATCH_TYPES),
            ):
                table[dtype] = function = getattr(library, f"scipy_cblas_{letter}{name}64_")
                function.restype, function.argtypes = None, types
        self.use_one_thread()

    def use_one_thread(self) -> None:
        """Set OpenBLAS to one thread, which ``threadpoolctl`` may have changed."""
        if self._get_threads() != 1:
            self._set_threads(1)

    def product(self, a: MatrixStack, b: MatrixStack, out: MatrixStack, *, shared: bool = True) -> Product:
        """Return a function of the addresses of a, b and out that computes ``out = a @ b``.

        All have one dtype (float32, float64, complex64 or complex128) and a BLAS layout; threads share the work.
        """
        if b.cols == 1:
            return self._matrix_vector(a, b, out, shared)
        if a.rows == 1 or out.order != "row":
            turned = self.product(b.transposed, a.transposed, out.transposed, shared=shared)
            return lambda a, b, out: turned(b, a, out)
        return self._matrix_matrix(a, b, out, shared)

    def batch(self, a: MatrixStack, b: MatrixStack, out: MatrixStack) -> BatchedProduct:
        """Return a function that computes ``out = a @ b`` for a batch, given the addresses of all matrices.

        In a large batch each product is one call, in a small batch products are divided into panels. The bits do not
        depend on the number of threads.
        """
        m, n, k = a.rows, b.cols, a.cols
        if m * n * k >= 2 * SMALLEST_PANEL:
            few, many = (self.product(a, b, out, shared=shared) for shared in (True, False))

            def each(addresses: Any) -> None:
                count = addresses.shape[1]
                self.use_one_thread()
                team.is_ready(count * m * n * k)
                product = few if count < _MANY else many
                team.share(lambda abc: product(*abc), list(zip(*addresses.tolist(), strict=True)))

            return each
        if out.order != "row":
            whole = self.batch(b.transposed, a.transposed, out.transposed)
            return lambda x: whole(x[[1, 0, 2]])
        function = self._gemm_batch[out.dtype.label]
        ops = np.array([_NO_TRANS if x.order == "row" else _TRANS for x in (a, b)], np.int32)
        leading = [x.leading_dimension or 1 for x in (a, b, out)]
        extents = np.array([m, n, k, *leading], np.int64)
        op_a, op_b = _element_addresses(ops)
        all_m, all_n, all_k, lda, ldb, ldc = _element_addresses(extents)
        one, zero = _element_addresses(_ONE_AND_ZERO[out.dtype.label])

        symbol = team.address_of(function)

        def pieces(count: int, step: int) -> tuple[Any, Any]:
            """Return the table of calls with ``step`` products each, and the sizes to which it refers."""
            starts = range(0, count, step)
            sizes = np.array([min(step, count - i) for i in starts], np.int64)
            rows = [
                (
                    symbol, _ROW_MAJOR, op_a, op_b, all_m, all_n, all_k, one, 8 * i, lda,
                    8 * (count + i), ldb, zero, 8 * (2 * count + i), ldc, 1, size,
                )
                for i, size in zip(starts, _element_addresses(sizes), strict=True)
            ]  # fmt: skip
            return np.array(rows, np.int64), sizes

        def batch(addresses: Any, _kept: Any = (ops, extents)) -> None:
            self.use_one_thread()
            _, count = addresses.shape
            first, work = data_pointer(addresses), count * m * n * k
            workers = threads.num_threads() if work >= _PAYS_TO_SHARE else 1
            if workers > 1 and team.is_ready(work):
                table, _sizes = pieces(count, max(1, count // (4 * workers)))
                team.run_rows("illllllalallalll", table, min(workers, count), bases=(first, 0, 0))
                return
            function(
                _ROW_MAJOR, op_a, op_b, all_m, all_n, all_k, one, first, lda,
                first + 8 * count, ldb, zero, first + 16 * count, ldc, 1, ctypes.byref(_INT(count)),
            )  # fmt: skip

        return batch

    def _matrix_matrix(self, a: MatrixStack, b: MatrixStack, out: MatrixStack, shared: bool) -> Product:
        m, n, k, dtype = a.rows, b.cols, a.cols, out.dtype
        function = self._gemm[dtype.label]
        one, zero = self._factors[dtype.label]
        # ctypes objects, because converting Python numbers takes 1 us per call.
        order, all_m, all_n, all_k = _ENUM(_ROW_MAJOR), _INT(m), _INT(n), _INT(k)
        op_a, op_b = (_ENUM(_NO_TRANS if x.order == "row" else _TRANS) for x in (a, b))
        lda, ldb, ldc = (_INT(x.leading_dimension or 1) for x in (a, b, out))

        def single(a: int, b: int, out: int) -> None:
            function(order, op_a, op_b, all_m, all_n, all_k, one, a, lda, b, ldb, zero, out, ldc)

        if not shared or m * n * k <= _NEVER_PARALLEL:
            return single

        a_row, b_column, out_row, out_column = (
            step * dtype.itemsize for step in (a.row_stride, b.col_stride, out.row_stride, out.col_stride)
        )
        by_shape = (self.core_type, dtype.label) not in _SAME_BITS_IN_ANY_PANEL
        fixed = panels_for_shape(m, n, k) if by_shape else None
        letter, (all_one, all_zero) = self._words[dtype.label]
        symbol = team.address_of(function)

        @functools.lru_cache(maxsize=4)
        def table_of(workers: int) -> Any:
            cut = panels_for_threads(m, n, k, workers) if fixed is None else fixed
            rows = [
                (
                    symbol, _ROW_MAJOR, op_a.value, op_b.value, rows, columns, k, all_one,
                    i * a_row, lda.value, j * b_column, ldb.value, all_zero,
                    i * out_row + j * out_column, ldc.value,
                )
                for i, rows, j, columns in cut
            ]  # fmt: skip
            return np.array(rows, np.int64)

        signature = f"iiilll{letter}albl{letter}cl"
        return self._shared(function, single, signature, table_of, m * n * k)

    def _shared(
        self, function: Callable[..., None], single: Product, signature: str, table_of: Callable[[int], Any], work: int
    ) -> Product:
        """Return a product of ``work`` multiplications that runs the calls of a table in several threads."""

        def product(a: int, b: int, out: int) -> None:
            self.use_one_thread()
            workers = 1 if team.is_sharing() else threads.num_threads()
            table = table_of(workers)
            if len(table) == 1:
                single(a, b, out)
            elif team.is_ready(work):
                team.run_rows(signature, table, min(workers, len(table)), bases=(a, b, out))
            else:
                for words in table[:, 1:].tolist():
                    factors, bases = iter((1.0, 0.0)), {"a": a, "b": b, "c": out}
                    function(
                        *(
                            next(factors) if letter in "fd" else word + bases.get(letter, 0)
                            for letter, word in zip(signature, words, strict=True)
                        )
                    )

        return product

    def _matrix_vector(self, a: MatrixStack, b: MatrixStack, out: MatrixStack, shared: bool) -> Product:
        m, k, dtype = a.rows, a.cols, out.dtype
        function = self._gemv[dtype.label]
        one, zero = self._factors[dtype.label]
        order = _ENUM(_ROW_MAJOR if a.order == "row" else _COLUMN_MAJOR)
        no_trans, all_m, all_k = _ENUM(_NO_TRANS), _INT(m), _INT(k)
        lda = _INT(a.leading_dimension or 1)
        # The stride of a single element is arbitrary.
        step_b, step_out = _INT(b.row_stride if k > 1 else 1), _INT(out.row_stride if m > 1 else 1)
        a_row, out_row = a.row_stride * dtype.itemsize, out.row_stride * dtype.itemsize

        def single(a: int, b: int, out: int) -> None:
            function(order, no_trans, all_m, all_k, one, a, lda, b, step_b, zero, out, step_out)

        if not shared or m * k <= _NEVER_PARALLEL_VECTOR:
            return single

        letter, (all_one, all_zero) = self._words[dtype.label]
        rows = [
            (
                team.address_of(function), order.value, _NO_TRANS, rows, k, all_one, i * a_row, lda.value,
                0, step_b.value, all_zero, i * out_row, step_out.value,
            )
            for i, rows in rows_for_shape(m, k, by_rows=a.order == "row")
        ]  # fmt: skip
        table = np.array(rows, np.int64)
        signature = f"iill{letter}albl{letter}cl"
        return self._shared(function, single, signature, lambda _: table, m * k)


#: Types of a matrix or vector: address, and leading dimension or increment.
_ARRAY = [_POINTER, _INT]


def _types(count: int, scalar: Any) -> list[Any]:
    """For gemm (3): layout, op_a, op_b; m, n, k; alpha, a, b; beta, c. For gemv (2): layout, op_a; m, n; the same."""
    return [_ENUM] * count + [_INT] * count + [scalar, *_ARRAY, *_ARRAY, scalar, *_ARRAY]


#: Layout; an array for each argument of a product, with one element per group; number of groups; sizes of groups.
_GEMM_BATCH_TYPES = [_ENUM, *[_POINTER] * 13, _INT, _POINTER]


def _element_addresses(x: Any) -> list[int]:
    return [data_pointer(x) + i * x.itemsize for i in range(x.size)]


def _text(library: ctypes.CDLL, name: str) -> str:
    function = getattr(library, name)
    function.restype = ctypes.c_char_p
    return str(function().decode())
