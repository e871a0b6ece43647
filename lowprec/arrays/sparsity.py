"""2:4 structured sparsity: the check of the pattern, and pruning by magnitude.

In each group of 4 consecutive elements along the inner dimension, counted from 0, at most 2 are nonzero; a shorter last
group counts as padded with zeros. Source: NVIDIA A100 whitepaper, "fine-grained structured sparsity".
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from lowprec.arrays.device_memory import LEGACY_STREAM, provider
from lowprec.arrays.numpy_library import host_view
from lowprec.arrays.prepared_view import copy_of
from lowprec.arrays.view import NUMPY_DTYPES, Array, ArrayView
from lowprec.errors import DTypeError, ShapeError, SparsityError, quoted
from lowprec.formats import OPERAND_DTYPES, DType
from lowprec.util.strides import Shape, overlaps_itself

#: The supported pattern.
TWO_OF_FOUR = "2:4"

#: Types of ``b`` that sparse tensor cores multiply, directly or after rounding.
_DTYPES = tuple(d for d in OPERAND_DTYPES if d.bits <= 32 and not d.is_complex)


def check_sparsity(sparsity: str | None, prune: bool, dtype: DType, shape: Shape) -> None:
    """Raise if ``prepare`` does not support these arguments. ``sparsity`` or ``prune`` is given."""
    if sparsity is None:
        raise SparsityError(
            f'prune={prune} needs sparsity=; pass sparsity="{TWO_OF_FOUR}" or omit prune='
        )
    if sparsity != TWO_OF_FOUR:
        raise SparsityError(
            f"sparsity {quoted(sparsity)} is not supported; choose {TWO_OF_FOUR!r} or None"
        )
    if dtype not in _DTYPES:
        legal = ", ".join(map(str, _DTYPES))
        raise DTypeError(
            f"b has dtype {dtype}, which no sparse unit multiplies; omit sparsity= or use one of: {legal}"
        )
    if len(shape) < 2:
        raise ShapeError(
            f"b has shape {shape}; sparsity= needs a matrix or a stack of matrices: pass b[:, None]"
        )


def sparse_copy(view: ArrayView, prune: bool, stream: int | None) -> ArrayView:
    """Return a copy with the pattern, checked or pruned in host memory, on the device of ``view``."""
    if view.device.is_host:
        if prune:
            view = host_view(pruned(view.ndarray(), view.dtype))
        else:
            check_pattern(view.ndarray(), view.dtype)
        return copy_of(view, None)
    if prune and overlaps_itself(view.shape, view.strides):
        raise ShapeError("b has elements that share memory; pass a contiguous copy to prune it")
    copy = copy_of(view, stream)
    memory = provider(view.device)
    device = view.device
    first, last = copy.extent()
    stream = stream or LEGACY_STREAM
    strides = [s * view.dtype.itemsize for s in view.strides]
    buffer = np.empty(last - first, np.uint8)
    memory.copy(first, buffer.ctypes.data, buffer.nbytes, device, stream)
    memory.synchronize(stream, device)
    start = copy.address - first
    x: Array = np.ndarray(view.shape, NUMPY_DTYPES[view.dtype], buffer, start, strides)
    if prune:
        x[...] = pruned(x, view.dtype)
        memory.copy(buffer.ctypes.data, first, buffer.nbytes, device, stream)
        memory.synchronize(stream, device)
    else:
        check_pattern(x, view.dtype)
    return copy


def check_pattern(x: Array, dtype: DType) -> None:
    """Raise SparsityError if an array, shape (..., k, n), violates the pattern."""
    nonzero = [part != 0 for part in _by_position(x, dtype)]
    counts: NDArray[np.uint8] = np.sum(nonzero, axis=0, dtype=np.uint8)
    violations = np.argwhere(counts > 2)
    if not len(violations):
        return
    *batch, group, column = violations[0].tolist()
    first = 4 * group
    rows = f"{first}:{min(first + 4, x.shape[-2])}"
    index = ", ".join(map(str, [*batch, rows, column]))
    raise SparsityError(
        f"b is not {TWO_OF_FOUR} sparse: b[{index}] has {counts[tuple(violations[0])]} nonzero elements, the first of "
        f"{len(violations):,} of {counts.size:,} groups with more than 2; pass prune=True to keep the 2 largest "
        "magnitudes of each group"
    )


def pruned(x: Array, dtype: DType) -> Array:
    """Return a copy with the two largest magnitudes of each group; of equal ones, those with the lower index."""
    copy = np.array(x, order="K")
    parts = _by_position(x, dtype)
    for i, part in enumerate(parts):
        larger = [other >= part for other in parts[:i]]
        larger += [other > part for other in parts[i + 1 :]]
        count = np.sum(larger, axis=0, dtype=np.uint8)
        drop = (count >= 2) & (part != 0)
        target = copy[..., i::4, :]
        target[drop[..., : target.shape[-2], :]] = 0
    return copy


def _by_position(x: Array, dtype: DType) -> list[Array]:
    """Return the magnitudes of the first, second, third and fourth element of all groups, as integers."""
    magnitudes = _magnitudes(x, dtype)
    missing = -x.shape[-2] % 4
    if missing:
        batch = [(0, 0)] * (x.ndim - 2)
        magnitudes = np.pad(magnitudes, [*batch, (0, missing), (0, 0)])
    return [magnitudes[..., i::4, :] for i in range(4)]


def _magnitudes(x: Array, dtype: DType) -> Array:
    """Return integers in the order of the magnitudes, 0 for zero; all NaN are equal, and the largest."""
    if dtype.format is None:
        return np.abs(x.astype(np.int16))
    mask = (1 << (dtype.bits - 1)) - 1
    bits = x.view(f"u{x.itemsize}") & mask
    largest = np.iinfo(bits.dtype).max
    return np.where(np.isnan(x), bits.dtype.type(largest), bits)
