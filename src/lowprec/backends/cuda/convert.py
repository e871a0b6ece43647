"""Operands rewritten for cuBLASLt: rounded, scaled, transposed, padded, complex numbers taken apart, in one pass each.

Which of the kernels in ``kernels/pack.cu`` runs depends on how the source lies: columns contiguous and aligned (16
bytes at a time), rows contiguous (by way of tiles), or anything else. It is decided once per packing, but for the
alignment of the pointers, which only the call knows.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any, Literal, TypeAlias

from lowprec.backends.cuda import driver
from lowprec.backends.cuda.compiling import ELEMENT, Launch, pick_blocks
from lowprec.backends.cuda.libraries import libraries
from lowprec.backends.cuda.stacks import Dimension, Walk, are_multiples, merged, walks
from lowprec.errors import DTypeError
from lowprec.formats import DType
from lowprec.planning import MatrixStack

__all__ = ["Packer", "Packing", "pack"]

#: Queues the work: addresses of source, destination and exponents (0 without a scale), and a stream.
Packer: TypeAlias = Callable[[int, int, int, int], None]

_REAL = (DType.FLOAT16, DType.BFLOAT16, DType.FLOAT32)
_SIXTEEN_BITS = (DType.FLOAT16, DType.BFLOAT16)

#: Element types that each one is converted to, beside itself.
_BECOMES: dict[DType, tuple[DType, ...]] = {
    **dict.fromkeys(_REAL, (*_REAL, DType.FLOAT64, DType.COMPLEX64, DType.COMPLEX128)),
    DType.FLOAT64: (DType.COMPLEX128,),
    DType.COMPLEX64: (DType.COMPLEX128,),
}
_TAKEN_APART = (*_REAL, DType.COMPLEX64)

_THREADS = 256
_VECTOR_BYTES = 16
#: Extents of a matrix from which tiles are worth their barriers.
_TILED = 8
#: Threads of a block that share a row, at least.
_LEAST_ACROSS = 4
#: A block of tiles: so many words each way, read and written by so many threads.
_TILE, _TILE_BLOCK, _WORD_BYTES = 32, (32, 8), 4
_EXPONENT_BYTES = 4
#: Columns of which one block seeks the largest magnitudes.
_SPAN = 512


@dataclass(frozen=True, slots=True)
class Packing:
    """What is written: batch after batch, each of ``padded_rows`` lines of ``leading_dimension`` elements.

    Row r and column c of the source go to line r and element c, the padding is zero. Numbers are rounded to nearest,
    ties to even; NaN stays NaN, infinities stay, what is too large becomes one.

    Parameters
    ----------
    source : MatrixStack
    dtype : DType
        Of what is written.
    leading_dimension, padded_rows : int
        At least the columns and rows that are written.
    scale : {"none", "rows"}
        "rows": row r is multiplied by 2^e (exactly, before it is rounded to float16) so that its largest finite
        magnitude lies in [2^14, 2^15), and e is written to the exponents, int32, one per row and batch; e is 0 for a
        row of zeros.
    complex_as : {"no", "pairs", "rotated"}
        "pairs": elements 2c and 2c + 1 of a line are the real and the imaginary part. "rotated": line 2r holds
        (re, -im) and line 2r + 1 holds (im, re); a zero keeps its sign. Real sources have imaginary parts of zero.
    part : int
        Which part of each number is written: 0 is the number rounded, each later one what the parts before leave,
        multiplied by 2^part_exponent for each, rounded.
    part_exponent : int
    """

    source: MatrixStack
    dtype: DType
    leading_dimension: int
    padded_rows: int
    scale: Literal["none", "rows"] = "none"
    complex_as: Literal["no", "pairs", "rotated"] = "no"
    part: int = 0
    part_exponent: int = 0

    def __post_init__(self) -> None:
        source, target, apart = self.source.dtype, self.dtype, self.complex_as != "no"
        scaled = self.scale == "rows"
        legal = source in _TAKEN_APART and target in _SIXTEEN_BITS if apart else (
            source is target or target in _BECOMES.get(source, ())
        )  # fmt: skip
        legal = legal and not (scaled and target is not DType.FLOAT16)
        legal = legal and not (self.part and target not in _SIXTEEN_BITS)
        if not legal or ((scaled or self.part) and source not in _TAKEN_APART):
            raise DTypeError(
                f"no kernel writes {source} as {target} "
                f"(scale {self.scale!r}, complex_as {self.complex_as!r}, part {self.part})"
            )
        cols = self.source.cols * (2 if apart else 1)
        rows = self.source.rows * (2 if self.complex_as == "rotated" else 1)
        odd = (apart and self.leading_dimension % 2) or (
            self.complex_as == "rotated" and self.padded_rows % 2
        )
        if self.leading_dimension < cols or self.padded_rows < rows or odd:
            raise ValueError(
                f"{rows} x {cols} elements do not go into {self.padded_rows} lines of {self.leading_dimension}"
            )


@dataclass(frozen=True, slots=True)
class _Shape:
    """A packing in source elements, with what can be walked as one dimension made one."""

    batch: list[Dimension]
    rows: int
    cols: int
    row_stride: int
    col_stride: int
    out_rows: int
    out_cols: int


def _shape(packing: Packing) -> _Shape:
    source = packing.source
    out_rows = packing.padded_rows // (2 if packing.complex_as == "rotated" else 1)
    out_cols = packing.leading_dimension // (1 if packing.complex_as == "no" else 2)
    rows, cols = source.rows, source.cols
    row_stride, col_stride = source.row_stride, source.col_stride
    dimensions: list[Dimension] = [
        (extent, (step,))
        for extent, step in zip(source.batch_shape, source.batch_strides, strict=True)
    ]
    # What is written is regular throughout, so without padding only the source decides what is one dimension.
    if out_rows == rows:
        dimensions = merged([*dimensions, (rows, (row_stride,))])
        if out_cols == cols and packing.scale == "none" and packing.complex_as != "rotated":
            dimensions = merged([*dimensions, (cols, (col_stride,))])
            cols, (col_stride,) = dimensions.pop() if dimensions else (1, (1,))
            out_cols = cols
        rows, (row_stride,) = dimensions.pop() if dimensions else (1, (0,))
        out_rows = rows
    if cols == 1:
        col_stride = 1
    return _Shape(merged(dimensions), rows, cols, row_stride, col_stride, out_rows, out_cols)


def pack(packing: Packing, device: int) -> Packer:
    """Return the function that queues a packing on a stream of a device, which is the current one then.

    Kernels are compiled at its first call.
    """
    return _packer(libraries().core, packing, device)


@functools.lru_cache(maxsize=1024)
def _packer(core: Any, packing: Packing, device: int) -> Packer:
    """Look up or make a packer; the library is a part of the key, so that tests may exchange it."""
    shape = _shape(packing)
    if not shape.out_rows * shape.out_cols:
        return _Zeroed(packing)
    queues = [
        _Queue(packing, shape, walk, i, device) for i, walk in enumerate(walks(shape.batch, 1))
    ]
    raised = bool(queues) and queues[0].raises
    steps: list[Packer] = [_Zeroed(packing), *queues] if raised else [*queues]
    if len(steps) == 1:
        return steps[0]

    def queue_all(source: int, target: int, exponents: int, stream: int) -> None:
        for step in steps:
            step(source, target, exponents, stream)

    return queue_all


class _Zeroed:
    """Sets the exponents to zero, if there are any.

    Parameters
    ----------
    packing : Packing
    """

    def __init__(self, packing: Packing) -> None:
        source = packing.source
        count = source.rows * prod(source.batch_shape) if packing.scale == "rows" else 0
        self._nbytes = count * _EXPONENT_BYTES

    def __call__(self, source: int, target: int, exponents: int, stream: int) -> None:
        """Queue it."""
        if self._nbytes:
            driver.set_zero_async(exponents, self._nbytes, stream)


class _Queue:
    """The kernels of one walk through a batch.

    Parameters
    ----------
    packing : Packing
    shape : _Shape
    walk : Walk
    index : int
        How many walks of as many matrices come before.
    device : int
    """

    def __init__(
        self, packing: Packing, shape: _Shape, walk: Walk, index: int, device: int
    ) -> None:
        self._packing, self._shape, self._walk, self._device = packing, shape, walk, device
        self._source_bytes = packing.source.dtype.itemsize
        self._out_bytes = packing.dtype.itemsize * (1 if packing.complex_as == "no" else 2)
        lines = shape.out_rows * (2 if packing.complex_as == "rotated" else 1)
        before = index * walk.count
        self._offsets = (
            walk.offsets[0] * self._source_bytes,
            before * lines * shape.out_cols * self._out_bytes,
            before * shape.rows * _EXPONENT_BYTES,
        )
        self._lines = lines * walk.count
        #: Whether a kernel before raises the exponents from zero.
        self.raises = False
        self._maxima: Launch | None = None
        self._fast: Launch | None
        transposed = 0 < abs(shape.row_stride) < abs(shape.col_stride)
        if transposed and min(shape.rows, shape.cols) >= _TILED:
            self._by_tiles()
        else:
            self._by_lines()

    def __call__(self, source: int, target: int, exponents: int, stream: int) -> None:
        """Queue them."""
        source_offset, target_offset, exponents_offset = self._offsets
        source, target = source + source_offset, target + target_offset
        addresses: tuple[int, ...] = (source, target)
        if self._takes_exponents:
            exponents += exponents_offset
            addresses = (source, target, exponents)
        if self._maxima is not None:
            self._maxima(stream, (source, exponents))
        fast = self._fast
        if fast is not None and not (source & self._source_mask or target & self._target_mask):
            fast(stream, addresses)
        else:
            self._any(stream, addresses)

    def _launch(
        self, name: str, wanted: int, block: tuple[int, ...], last: tuple[int, ...]
    ) -> Launch:
        """Return a kernel with ``last`` after what all of them take."""
        packing, shape, walk = self._packing, self._shape, self._walk
        definitions: dict[str, str | int] = {
            "SOURCE": ELEMENT[packing.source.dtype],
            "TARGET": ELEMENT[packing.dtype],
            "PAIRS": int(packing.complex_as != "no"),
            "ROTATED": int(packing.complex_as == "rotated"),
            "SCALED": int(packing.scale == "rows"),
            "PART": packing.part,
            "PART_FACTOR": 1 << packing.part_exponent,
            f"KERNEL_{name}": 1,
        }
        blocks = pick_blocks(wanted, self._device)
        out = () if name == "pack_maxima" else (shape.out_rows, shape.out_cols)
        constants = (
            *(shape.rows, shape.cols, shape.row_stride, shape.col_stride, *out),
            *(walk.count, *walk.extents, *walk.steps[0], *last),
        )
        return Launch(name, "pack.cu", definitions, self._device, blocks, block, constants)

    def _by_lines(self) -> None:
        """Adjacent threads take adjacent columns."""
        shape, walk = self._shape, self._walk
        vector = max(1, _VECTOR_BYTES // min(self._source_bytes, self._out_bytes))
        steps = [shape.row_stride if shape.rows > 1 else 0, *walk.steps[0]]
        regular = shape.col_stride == 1 and are_multiples(_VECTOR_BYTES, self._source_bytes, steps)
        if self._lines > 1:
            regular = regular and are_multiples(_VECTOR_BYTES, self._out_bytes, [shape.out_cols])
        self._source_mask = self._target_mask = _VECTOR_BYTES - 1
        self._takes_exponents = self._packing.scale == "rows"
        if self._takes_exponents:
            groups = -(-shape.out_cols // vector)
            across = min(_THREADS, max(_LEAST_ACROSS, 1 << (groups - 1).bit_length()))
            block = (across, _THREADS // across)
            wanted = -(-walk.count * shape.out_rows // block[1])
            self._any = self._launch("pack_rows", wanted, block, (0,))
            self._fast = self._launch("pack_rows", wanted, block, (1,)) if regular else None
            return

        def wanted_of(elements: int) -> int:
            groups = walk.count * shape.out_rows * -(-shape.out_cols // elements)
            return -(-groups // _THREADS)

        self._any = self._launch("pack_elements", wanted_of(1), (_THREADS,), ())
        self._fast = None
        if regular:
            self._fast = self._launch("pack_groups", wanted_of(vector), (_THREADS,), ())

    def _by_tiles(self) -> None:
        """Adjacent threads read adjacent rows and write adjacent columns."""
        shape, walk = self._shape, self._walk
        source_word = max(_WORD_BYTES, self._source_bytes)
        target_word = max(_WORD_BYTES, self._out_bytes)
        regular = (
            shape.row_stride == 1
            and are_multiples(source_word, self._source_bytes, [shape.col_stride, *walk.steps[0]])
            and are_multiples(target_word, self._out_bytes, [shape.out_cols])
        )
        height = _TILE * source_word // self._source_bytes
        width = _TILE * target_word // self._out_bytes
        wanted = walk.count * -(-shape.out_rows // height) * -(-shape.out_cols // width)
        self._source_mask, self._target_mask = source_word - 1, target_word - 1
        self._takes_exponents = True
        self._any = self._launch("pack_tiles", wanted, _TILE_BLOCK, (0,))
        self._fast = self._launch("pack_tiles", wanted, _TILE_BLOCK, (1,)) if regular else None
        if self._packing.scale == "rows":
            self.raises = True
            strips = walk.count * -(-shape.rows // _TILE) * -(-shape.cols // _SPAN)
            self._maxima = self._launch("pack_maxima", strips, _TILE_BLOCK, (_SPAN,))
