"""Products of rounded matrices by lowprec's OpenBLAS or NumPy's BLAS."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from lowprec.arrays import NUMPY_DTYPES
from lowprec.arrays.view import data_pointer
from lowprec.backends.cpu import casting, stacks
from lowprec.backends.cpu.buffers import Workspace
from lowprec.backends.cpu.openblas import has_memory, loaded_openblas
from lowprec.backends.execution import Arguments, Executor
from lowprec.planning import GemmLayout, GemmPlan, MatrixStack

_DTYPES = {numpy_dtype: dtype for dtype, numpy_dtype in NUMPY_DTYPES.items()}

#: Shape, and strides in bytes, of an array of at least two dimensions.
_Extents = tuple[tuple[int, ...], tuple[int, ...]]

#: Computes ``out = a @ b``, given the addresses of a, b and out.
_Call = Callable[[int, int, int], None]


def _stack(dtype: np.dtype[Any], extents: _Extents, batch: tuple[int, ...] = ()) -> MatrixStack:
    (*own, rows, cols), steps = extents
    *strides, row_stride, col_stride = (step // dtype.itemsize for step in steps)
    strides = [x if n > 1 else 0 for n, x in zip(own, strides, strict=True)]
    missing = [0] * (len(batch) - len(own))
    return MatrixStack.of(_DTYPES[dtype], rows, cols, row_stride, col_stride, batch, (*missing, *strides))


@functools.lru_cache(maxsize=1024)
def _is_expressible(dtype: np.dtype[Any], shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    if any(step % dtype.itemsize for step in strides):
        return False
    return _stack(dtype, (shape, strides), shape[:-2]).blas_expressible


def is_blas_expressible(x: Any) -> bool:
    """Return whether BLAS can read the last two dimensions of ``x`` in place, transposed or not."""
    return x.flags.c_contiguous or _is_expressible(x.dtype, x.shape, x.strides)


def _in_place_or_copy(x: Any) -> Any:
    return x if is_blas_expressible(x) else np.ascontiguousarray(x)


def multiply_numpy(a: Any, b: Any, out: Any) -> None:
    """Compute ``out = a @ b`` with ``numpy.matmul``; arrays of one dtype, at least 2-D, batches broadcast."""
    a = a if a.flags.c_contiguous else _in_place_or_copy(a)
    b = b if b.flags.c_contiguous else _in_place_or_copy(b)
    with np.errstate(all="ignore"):
        if out.flags.c_contiguous or is_blas_expressible(out):
            np.matmul(a, b, out=out)
        else:
            out[...] = np.matmul(a, b)


def multiply_openblas(a: Any, b: Any, out: Any) -> None:
    """Compute ``out = a @ b`` with lowprec's OpenBLAS, or with NumPy if a memory limit prevents that.

    Arrays of one dtype, at least 2-D; batches broadcast.
    """
    if not has_memory():
        multiply_numpy(a, b, out)
        return
    a, b = _in_place_or_copy(a), _in_place_or_copy(b)
    target = out if is_blas_expressible(out) else np.empty(out.shape, out.dtype)
    call = _openblas_product(out.dtype, *((x.shape, x.strides) for x in (a, b, target)))
    call(data_pointer(a), data_pointer(b), data_pointer(target))
    if target is not out:
        out[...] = target


@functools.lru_cache(maxsize=1024)
def _openblas_product(dtype: np.dtype[Any], a: _Extents, b: _Extents, out: _Extents) -> _Call:
    batch = out[0][:-2]
    return library_product(_stack(dtype, a, batch), _stack(dtype, b, batch), _stack(dtype, out, batch))


def library_product(a: MatrixStack, b: MatrixStack, out: MatrixStack) -> _Call:
    """Return the product of stacks of matrices; offsets of small batches are precomputed."""
    library = loaded_openblas()
    if not out.batch_shape:
        return library.product(a, b, out)
    product, matrices = library.batch(a, b, out), (a, b, out, None)
    few = math.prod(out.batch_shape) <= stacks.KEPT
    kept = _columns(stacks.offsets_of(matrices)) if few else None

    def multiply(*first: int) -> None:
        offsets = _columns(stacks.offsets_of(matrices)) if kept is None else kept
        product(offsets + np.array(first, np.int64)[:, None])

    return multiply


def _columns(table: Any) -> Any:
    return np.ascontiguousarray(table[:, :3].T)


#: Sums of this many int8 products, each at most 2^14, are exact in float32.
_INT8_CHUNK = 1024


def multiply_int8(multiply: Callable[[Any, Any, Any], None], a: Any, b: Any, out: Any) -> None:
    """Compute ``out = a @ b`` for int8 operands and an int32 result, exactly, by float32 products over chunks of k."""
    float32 = np.dtype(np.float32)
    with Workspace() as workspace:
        x, y, z = (workspace.array(array.shape, float32) for array in (a, b, out))
        casting.cast([(a, x), (b, y)], None)
        for first in range(0, a.shape[-1], _INT8_CHUNK):
            last = first + _INT8_CHUNK
            multiply(x[..., first:last], y[..., first:last, :], z)
            if first:
                out += z.astype(np.int32)
            else:
                out[...] = z


def _numpy_call(plan: GemmPlan) -> Executor:
    def execute(arguments: Arguments) -> None:
        a, b, out = arguments[:3]
        with np.errstate(all="ignore"):
            np.matmul(a.ndarray(), b.ndarray(), out=out.ndarray())

    return execute


def _openblas_call(plan: GemmPlan) -> Executor:
    product, by_numpy = library_product(plan.layout.a, plan.layout.b, plan.layout.out), _numpy_call(plan)

    def execute(arguments: Arguments) -> None:
        if has_memory():
            a, b, out = arguments[:3]
            product(a.address, b.address, out.address)
        else:
            by_numpy(arguments)

    return execute


class Blas(NamedTuple):
    """A BLAS library for rounded arrays."""

    #: Computes ``out = a @ b``; arrays of one dtype, at least 2-D, batches broadcast.
    multiply: Callable[[Any, Any, Any], None]
    #: Whether one call of the library can run the products of a layout.
    takes_whole: Callable[[GemmLayout], bool]
    call: Callable[[GemmPlan], Executor]  # returns the executor of that call


#: numpy.matmul takes arrays with their batches, not collapsed ones.
NUMPY = Blas(multiply_numpy, lambda layout: not layout.collapsed, _numpy_call)

#: OpenBLAS takes the addresses of all matrices.
OPENBLAS = Blas(multiply_openblas, lambda layout: True, _openblas_call)
