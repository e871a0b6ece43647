"""Products of matrices that already hold what the mode says, by MKL or by NumPy's BLAS."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from lowprec.backends.cpu import threads
from lowprec.backends.cpu.mkl import Matrix, loaded_mkl
from lowprec.backends.execution import Arguments, Executor
from lowprec.planning import GemmLayout, GemmPlan

__all__ = ["MKL", "NUMPY", "Blas", "is_blas_expressible", "multiply_int8"]


def _has_contiguous_rows(x: Any) -> bool:
    rows, columns = x.shape
    row_stride, column_stride = x.strides
    one_step = column_stride == x.itemsize or columns == 1
    return bool(one_step and (row_stride >= columns * x.itemsize or rows == 1))


def is_blas_expressible(x: Any) -> bool:
    """Return whether BLAS can read the last two dimensions of ``x`` in place, as they are or transposed."""
    y = x[(0,) * (x.ndim - 2)] if x.ndim > 2 else x
    whole = all(s % x.itemsize == 0 for s in y.strides)
    return whole and (_has_contiguous_rows(y) or _has_contiguous_rows(y.T))


def _in_place_or_copy(x: Any) -> Any:
    return x if is_blas_expressible(x) else np.ascontiguousarray(x)


def _matrix(x: Any) -> Matrix:
    """Return how a BLAS-expressible 2-D array lies in memory."""
    rows, columns = x.shape
    if _has_contiguous_rows(x):
        return Matrix(True, max(x.strides[0] // x.itemsize, columns, 1))
    return Matrix(False, max(x.strides[1] // x.itemsize, rows, 1))


def _addresses(x: Any) -> list[int]:
    """Return the address of each matrix of a stack, in row-major order of the batch."""
    offsets = np.zeros((), np.intp)
    for extent, stride in zip(x.shape[:-2], x.strides[:-2], strict=True):
        offsets = np.add.outer(offsets, np.arange(extent) * stride)
    addresses: list[int] = (x.ctypes.data + offsets).ravel().tolist()
    return addresses


def multiply_numpy(a: Any, b: Any, out: Any) -> None:
    """Compute ``out = a @ b`` with ``numpy.matmul``; arrays of one dtype, at least 2-D, batches broadcast."""
    a, b = _in_place_or_copy(a), _in_place_or_copy(b)
    with np.errstate(all="ignore"):
        if is_blas_expressible(out):
            np.matmul(a, b, out=out)
        else:
            out[...] = np.matmul(a, b)


def multiply_mkl(a: Any, b: Any, out: Any) -> None:
    """Compute ``out = a @ b`` with MKL; arrays of one dtype, at least 2-D, batches broadcast."""
    a, b = _in_place_or_copy(a), _in_place_or_copy(b)
    target = out if is_blas_expressible(out) else np.empty(out.shape, out.dtype)
    batch, m, n = target.shape[:-2], target.shape[-2], target.shape[-1]
    stacks = [np.broadcast_to(x, batch + x.shape[-2:]) for x in (a, b, target)]
    layouts = [_matrix(x[(0,) * len(batch)]) for x in stacks]
    product = loaded_mkl().product(target.dtype.name, m, n, a.shape[-1], *layouts)
    addresses = zip(*(_addresses(x) for x in stacks), strict=True)
    threads.share(lambda abc: product(*abc), list(addresses))
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


# -- one call of the library on the arrays as they are --------------------------------------------


def _numpy_call(plan: GemmPlan) -> Executor:
    def execute(arguments: Arguments) -> None:
        a, b, out = arguments[:3]
        with np.errstate(all="ignore"):
            np.matmul(a.ndarray(), b.ndarray(), out=out.ndarray())

    return execute


def _mkl_call(plan: GemmPlan) -> Executor:
    layout = plan.layout
    matrices = [
        Matrix(x.order == "row", x.leading_dimension or 1) for x in (layout.a, layout.b, layout.out)
    ]
    product = loaded_mkl().product(plan.out_dtype.label, layout.m, layout.n, layout.k, *matrices)

    def execute(arguments: Arguments) -> None:
        a, b, out = arguments[:3]
        product(a.address, b.address, out.address)

    return execute


class Blas(NamedTuple):
    """A library that multiplies arrays which hold what the mode says.

    Parameters
    ----------
    multiply : callable
        Computes ``out = a @ b``; arrays of one dtype, at least 2-D, batches broadcast.
    takes_whole : callable
        Whether one call of the library can run the products of a layout.
    call : callable
        Returns the executor that makes that call.
    """

    multiply: Callable[[Any, Any, Any], None]
    takes_whole: Callable[[GemmLayout], bool]
    call: Callable[[GemmPlan], Executor]


#: It takes the arrays with their batches, so not a batch as rows.
NUMPY = Blas(multiply_numpy, lambda layout: not layout.collapsed, _numpy_call)

#: It takes addresses of matrices, so not a batch.
MKL = Blas(multiply_mkl, lambda layout: layout.batch_shape == (), _mkl_call)
