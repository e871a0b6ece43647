"""Products of matrices that already hold what the mode says, by lowprec's OpenBLAS or by NumPy's BLAS."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from lowprec.arrays import NUMPY_DTYPES
from lowprec.arrays.view import data_pointer
from lowprec.backends.cpu import batches, casting
from lowprec.backends.cpu.openblas import BatchedProduct, has_room, loaded_openblas
from lowprec.backends.cpu.stacks import scratch
from lowprec.backends.execution import Arguments, Executor
from lowprec.planning import GemmLayout, GemmPlan, MatrixStack

_DTYPES = {numpy_dtype: dtype for dtype, numpy_dtype in NUMPY_DTYPES.items()}


def stack_of(x: Any) -> MatrixStack:
    """Return how an array of at least two dimensions lies in memory; its strides are multiples of its elements."""
    *batch_strides, row_stride, col_stride = (step // x.itemsize for step in x.strides)
    *batch_shape, rows, cols = x.shape
    return MatrixStack.of(
        _DTYPES[x.dtype], rows, cols, row_stride, col_stride, tuple(batch_shape), tuple(batch_strides)
    )  # fmt: skip


def is_blas_expressible(x: Any) -> bool:
    """Return whether BLAS can read the last two dimensions of ``x`` in place, as they are or transposed."""
    return all(step % x.itemsize == 0 for step in x.strides) and stack_of(x).blas_expressible


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


def multiply_openblas(a: Any, b: Any, out: Any) -> None:
    """Compute ``out = a @ b`` with lowprec's OpenBLAS; arrays of one dtype, at least 2-D, batches broadcast.

    Where a limit leaves no memory for it, NumPy does that.
    """
    if not has_room():
        multiply_numpy(a, b, out)
        return
    a, b = _in_place_or_copy(a), _in_place_or_copy(b)
    target = out if is_blas_expressible(out) else np.empty(out.shape, out.dtype)
    batch = target.shape[:-2]
    arrays = [np.broadcast_to(x, batch + x.shape[-2:]) for x in (a, b, target)]
    first = [data_pointer(x) for x in arrays]
    stacks = stack_of(arrays[0]), stack_of(arrays[1]), stack_of(arrays[2])
    if batch:
        offsets = batches.offsets_of((*stacks, None))
        loaded_openblas().batch(*stacks)(_columns(offsets + np.array([*first, 0])))
    else:
        loaded_openblas().product(*stacks)(*first)
    if target is not out:
        out[...] = target


def _columns(table: Any) -> Any:
    """Return the columns of a, b and out, from a table with a row for each product."""
    return np.ascontiguousarray(table[:, :3].T)


#: Products of int8 are at most 2^14 in size, so sums of this many are exact in float32.
_INT8_CHUNK = 1024


def multiply_int8(multiply: Callable[[Any, Any, Any], None], a: Any, b: Any, out: Any) -> None:
    """Compute ``out = a @ b`` for int8 operands and an int32 result, exactly, with float32 products of short sums."""
    float32 = np.dtype(np.float32)
    with (
        scratch(a.shape, float32) as x,
        scratch(b.shape, float32) as y,
        scratch(out.shape, float32) as z,
    ):
        casting.cast([(a, x), (b, y)], None)
        for first in range(0, a.shape[-1], _INT8_CHUNK):
            last = first + _INT8_CHUNK
            multiply(x[..., first:last], y[..., first:last, :], z)
            if first:
                out += z.astype(np.int32)
            else:
                out[...] = z


# -- one call of the library on the arrays as they are --------------------------------------------


def _numpy_call(plan: GemmPlan) -> Executor:
    def execute(arguments: Arguments) -> None:
        a, b, out = arguments[:3]
        with np.errstate(all="ignore"):
            np.matmul(a.ndarray(), b.ndarray(), out=out.ndarray())

    return execute


def _openblas_call(plan: GemmPlan) -> Executor:
    by_library, by_numpy = _library_call(plan), _numpy_call(plan)

    def execute(arguments: Arguments) -> None:
        (by_library if has_room() else by_numpy)(arguments)

    return execute


def _library_call(plan: GemmPlan) -> Executor:
    layout, library = plan.layout, loaded_openblas()
    stacks = (layout.a, layout.b, layout.out)
    if layout.batch_shape:
        few = layout.batch_count <= batches.KEPT
        return _openblas_batch(library.batch(*stacks), (*stacks, None), few)
    product = library.product(*stacks)

    def execute(arguments: Arguments) -> None:
        a, b, out = arguments[:3]
        product(a.address, b.address, out.address)

    return execute


def _openblas_batch(product: BatchedProduct, matrices: batches.Matrices, few: bool) -> Executor:
    kept = _columns(batches.offsets_of(matrices)) if few else None

    def execute(arguments: Arguments) -> None:
        offsets = _columns(batches.offsets_of(matrices)) if kept is None else kept
        product(offsets + np.array([[x.address] for x in arguments[:3]], np.int64))

    return execute


class Blas(NamedTuple):
    """A library that multiplies arrays which hold what the mode says."""

    #: Computes ``out = a @ b``; arrays of one dtype, at least 2-D, batches broadcast.
    multiply: Callable[[Any, Any, Any], None]
    #: Whether one call of the library can run the products of a layout.
    takes_whole: Callable[[GemmLayout], bool]
    call: Callable[[GemmPlan], Executor]  # returns the executor that makes that call


#: It takes the arrays with their batches, so not a batch as rows.
NUMPY = Blas(multiply_numpy, lambda layout: not layout.collapsed, _numpy_call)

#: It takes the addresses of all matrices.
OPENBLAS = Blas(multiply_openblas, lambda layout: True, _openblas_call)
