"""Codes of a quantised array in the order of the kernels, in which ``lowprec.prepare`` keeps them.

The order is that of ``native/codes.hpp``: strips of as many vectors as a register has lanes, with rows of codes, of
scales and of zeros.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np

from lowprec.arrays.block_layout import part_shapes
from lowprec.arrays.numpy_library import aligned_empty
from lowprec.arrays.prepared_view import KernelCodes, QuantizedView
from lowprec.arrays.quantized import QuantizedArray, adopted, quantized_array
from lowprec.arrays.view import data_pointer
from lowprec.backends.cpu import library, threads
from lowprec.backends.cpu.library import Matrix, Product
from lowprec.errors import BackendError
from lowprec.formats import BlockFormat


def reordered(view: QuantizedView) -> KernelCodes | None:
    """Return a copy of codes in the order of the kernels; None if no kernel has an order for them."""
    row = view.blocks.row
    units = [library.UNITS.index(name) for name in library.units() if name.startswith("fp32")]
    has_kernels = view.blocks.format in library.BLOCK_TYPES
    if not (units and has_kernels and row.block and view.blocks.axis >= -2 and view.size):
        return None
    unit = max(units, key=library.lanes)
    lanes = library.lanes(unit)
    array = view.quantized
    row = row.of_length(array.shape[array.axis])
    memory = _packed(array, row, unit)
    like = adopted(np.empty(0, np.uint8), array.codes)
    restored = functools.partial(
        _restored, lanes, memory, like, array.shape, row, array.axis, scale=array.scale
    )
    return KernelCodes(data_pointer(memory), memory, array.scale, lanes, restored)


def _packed(array: QuantizedArray, row: BlockFormat, unit: int) -> Any:
    """Return the memory of the codes, scales and zeros of an array in the order of a unit."""
    stored = array.codes, array.scales, array.zeros
    parts = [np.ascontiguousarray(x) for x in stored if x is not None]
    *batch, vectors, nbytes = (1, *parts[0].shape)
    batches = prod(batch)
    offsets = np.arange(batches) * (vectors * nbytes)
    b = Matrix(col=nbytes, block=row.block, type=library.block_type(row))
    b.batch_offsets = data_pointer(offsets)
    b.scale_col = parts[1].shape[-1] * parts[1].itemsize
    product = Product(1, vectors, array.shape[array.axis], batches, b=b, unit=unit)
    product.c.type = product.bias.type = -1
    return packed(product, [*map(data_pointer, parts), 0])


def packed(product: Product, addresses: Sequence[int], draw: int = 0) -> Any:
    """Return the memory of ``b`` packed for a product; ``addresses`` are those of ``b``, its scales and its zeros."""
    at, scales, zeros = addresses[:3]
    pointers = 0, at, 0, scales, zeros, 0, 0, 0, 0, 0
    call = library.call_bytes(*pointers, 1.0, 0.0, 0.0, 0.0, threads.num_threads(), draw)
    pack = library.functions().pack
    description = ctypes.addressof(product)
    nbytes = pack(description, call, None)
    if nbytes < 0:
        raise BackendError("the compiled library does not pack operands of this type")
    memory = aligned_empty((nbytes,), np.dtype(np.uint8))
    if pack(description, call, data_pointer(memory)) < 0:
        raise MemoryError("no memory to round an operand")
    return memory


def _restored(
    lanes: int,
    memory: Any,
    like: Any,
    shape: tuple[int, ...],
    row: BlockFormat,
    axis: int,
    scale: float,
) -> QuantizedArray:
    """Return an array with new codes, scales and zeros, from those in the order of the kernels.

    ``like`` is an array without elements, of the library of its codes.
    """
    shapes = part_shapes(shape, axis, row)
    of_codes, of_scales, of_zeros = shapes
    batches = prod(of_codes[:-2])
    vectors = prod(of_codes[-2:-1])
    strips = -(-vectors // lanes)
    counts = _row_counts(row, shape[axis], of_scales[-1])
    nbytes = strips * sum(counts) * 4 * lanes
    rows = memory.reshape(batches, -1)[:, :nbytes].reshape(batches, strips, sum(counts), 4 * lanes)
    codes, scales, zeros = np.split(rows, np.cumsum(counts)[:-1], axis=2)
    stored = [_part(_by_vector(codes, lanes, row.bits == 8), of_codes, np.uint8)]
    stored.append(
        _part(
            _by_vector(scales, lanes), of_scales, np.float32 if row.has_float_scales else np.uint8
        )
    )
    if row.has_zeros:
        stored.append(_part(_by_vector(zeros, lanes), of_zeros, np.uint8))
    return quantized_array(like, shape, row, axis, stored, scale)


def _part(by_vector: Any, shape: tuple[int, ...], dtype: Any) -> Any:
    """Return codes, scales or zeros as an array of this shape, with zeros after the bytes of a vector."""
    vectors = prod(shape[-2:-1])
    part = np.zeros((len(by_vector), vectors, shape[-1]), dtype)
    of_bytes = part.view(np.uint8)
    found = by_vector[:, :vectors, : of_bytes.shape[-1]]
    of_bytes[..., : found.shape[-1]] = found
    return part.reshape(shape)


def _row_counts(row: BlockFormat, length: int, blocks: int) -> list[int]:
    """Return the numbers of rows of codes, scales and zeros in a strip."""
    fours = -(-blocks // 4)
    codes = -(-length // 32) * row.bits
    scales = blocks if row.has_float_scales else fours
    zeros = fours if row.has_zeros else 0
    return [codes, scales, zeros]


def _by_vector(rows: Any, lanes: int, in_runs: bool = False) -> Any:
    """Return the bytes of each vector from rows of dwords of the vectors, or of runs of bytes of the vectors."""
    batches, strips, count, _ = rows.shape
    if in_runs:
        found = rows.reshape(batches, strips, count, 4, lanes).transpose(0, 1, 4, 2, 3)
    else:
        found = rows.reshape(batches, strips, count, lanes, 4).transpose(0, 1, 3, 2, 4)
    return found.reshape(batches, strips * lanes, count * 4)
