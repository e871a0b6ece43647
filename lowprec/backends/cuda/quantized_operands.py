"""Quantised operands on a GPU: their numbers widened, or their codes with scales in the order of cuBLASLt."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from lowprec.arrays import Device, Library, library_of
from lowprec.arrays.quantized import QuantizedArray, codes_view
from lowprec.arrays.view import ArrayView, PackedOperand
from lowprec.backends.cuda import memory
from lowprec.backends.cuda.packing import prepare_packing
from lowprec.backends.cuda.staging import packed_block
from lowprec.backends.interface import Arguments
from lowprec.formats import DType
from lowprec.planning import MatrixStack
from lowprec.planning.cublaslt.calls import Packing
from lowprec.util.strides import contiguous_strides

#: Rows and columns of a tile of scales; rows with this distance are adjacent in it.
_ROWS, _COLUMNS, _APART = 128, 4, 32


@contextmanager
def widened(arguments: Arguments) -> Iterator[Arguments]:
    """Return arguments with the numbers of quantised operands, for a ``with`` block that queues the product.

    Their libraries widen them on their own streams, and reuse the memory in the order of these.
    """
    wide, device, stream, owners = arguments.widened(), arguments.out.device, arguments.stream, []
    for before, after in zip(arguments[:2], wide[:2], strict=True):
        if after is not before:
            library, other = _wait(before.quantized.codes, stream, device)
            if library.keeps_owners or other != stream:
                owners.append(after.owner)
    try:
        yield wide
    finally:
        if owners:
            memory.keep(owners, stream, device)


def _wait(array: Any, stream: int, device: Device) -> tuple[Library, int]:
    """Make a stream wait for the current one of an array's library, and return both."""
    library = library_of(array)
    other = library.current_stream(device) or stream
    memory.order(other, stream, device)
    return library, other


@contextmanager
def as_codes(arguments: Arguments) -> Iterator[Arguments]:
    """Return arguments with the scales of two block-scaled operands, whose addresses are those of the codes."""
    scales = [_tiles(x, arguments.stream) for x in arguments[:2] if x.blocks]
    yield arguments._replace(scale_a=scales[0], scale_b=scales[1])


def are_contiguous(arguments: Arguments) -> bool:
    """Whether codes and scales of block-scaled operands are row-major without gaps."""
    views = [x for x in arguments[:2] if x.blocks and x.quantized.scales is not None]
    return all(x.packed_operand("contiguous", partial(_contiguous, x.quantized)) for x in views)


def _contiguous(x: QuantizedArray) -> PackedOperand:
    parts = map(codes_view, (x.codes, x.scales))
    return PackedOperand(all(part.strides == contiguous_strides(part.shape) for part in parts), 0)


def _tiles(view: ArrayView, stream: int) -> ArrayView:
    """Return the scales of an operand in tiles of 128 x 4, padded with zeros, arranged at the first product.

    The scale of row ``r`` and block ``c`` of k is byte ``r % 32 * 16 + r // 32 * 4 + c`` of a tile: the cuBLAS
    documentation, *1D Block Scaling Factors Layout*.
    """
    device, scales = view.device, codes_view(view.quantized.scales)
    columns = scales.shape[-1]
    rows = scales.size // columns
    tall, wide = -(-rows // _ROWS), -(-columns // _COLUMNS)
    length, nbytes = wide * _COLUMNS, tall * wide * _ROWS * _COLUMNS

    def pack(address: int) -> None:
        _wait(view.quantized.scales, stream, device)
        source = MatrixStack.of(DType.INT8, rows, columns, columns, 1)
        tiles = MatrixStack.of(
            DType.INT8, _COLUMNS, _COLUMNS, _APART * length, 1,
            (tall, wide, _APART), (_ROWS * length, _COLUMNS, length),
        )  # fmt: skip
        with memory.temporary(nbytes, device.index, stream) as padded:
            pad = prepare_packing(Packing(source, DType.INT8, length, tall * _ROWS), device.index)
            pad(scales.address, padded, 0, stream)
            tile = prepare_packing(Packing(tiles, DType.INT8, _COLUMNS, _COLUMNS), device.index)
            tile(padded, address, 0, stream)

    what = "the scales of a quantised operand"
    block = packed_block(view, "scales in tiles", nbytes, stream, pack, what)
    return ArrayView(DType.INT8, (nbytes,), (1,), device, block, True, block.address)
