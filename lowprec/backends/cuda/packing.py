"""Packing of operands for cuBLASLt in one pass: rounding, scaling, transposition, padding, complex as real numbers.

The kernel of ``kernels/pack.cu`` is selected by the strides of the source (contiguous and aligned columns, 16 bytes at
a time; contiguous rows, through tiles; or any), and in each call by the alignment of the pointers.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import NamedTuple, TypeAlias

from lowprec.backends.cuda import runtime
from lowprec.backends.cuda.batching import LaunchBatch, are_multiples, in_sequence, launch_batches
from lowprec.backends.cuda.compiling import ELEMENT, EXPONENT_BYTES, THREADS, VECTOR_BYTES, Launch, pick_blocks
from lowprec.backends.cuda.libraries import cached
from lowprec.backends.cuda.quantizing import prepare_quantizing
from lowprec.planning.cublaslt.calls import PACKED, Packing
from lowprec.util.strides import Dimension, coalesce

#: Queues the work: addresses of source, destination and exponents (0 without scaling), and a stream; if the packing
#: quantises, also the number of the random numbers.
Packer: TypeAlias = Callable[..., None]

#: Least extents of a matrix for which tiles are used.
_TILED = 8
#: Least number of threads of a block per row.
_LEAST_ACROSS = 4
#: Words of a tile each way, and the threads that read and write it.
_TILE, _TILE_BLOCK, _WORD_BYTES = 32, (32, 8), 4
#: Columns per block in the search for the largest magnitudes.
_SPAN = 512


class _Shape(NamedTuple):
    """A packing in source elements, its dimensions coalesced."""

    batch: list[Dimension]
    rows: int
    cols: int
    row_stride: int
    col_stride: int
    out_rows: int
    out_cols: int


def _shape(packing: Packing) -> _Shape:
    source = packing.source
    lines, elements = PACKED[packing.complex_as]
    out_rows, out_cols = packing.padded_rows // lines, packing.leading_dimension // elements
    rows, cols = source.rows, source.cols
    row_stride, col_stride = source.row_stride, source.col_stride
    dimensions: list[Dimension] = [
        (extent, (stride,)) for extent, stride in zip(source.batch_shape, source.batch_strides, strict=True)
    ]
    # Without padding the target is contiguous, so dimensions coalesce by the strides of the source.
    if out_rows == rows and packing.parts == 1:
        dimensions = coalesce([*dimensions, (rows, (row_stride,))])
        if out_cols == cols and not packing.scaled and packing.complex_as != "rotated":
            dimensions = coalesce([*dimensions, (cols, (col_stride,))])
            cols, (col_stride,) = dimensions.pop() if dimensions else (1, (1,))
            out_cols = cols
        rows, (row_stride,) = dimensions.pop() if dimensions else (1, (0,))
        out_rows = rows
    if cols == 1:
        col_stride = 1
    return _Shape(coalesce(dimensions), rows, cols, row_stride, col_stride, out_rows, out_cols)


@cached
def prepare_packing(packing: Packing, device: int) -> Packer:
    """Return the function that queues a packing on a stream of ``device``, which must be current."""
    if packing.rule is not None:
        return prepare_quantizing(packing, packing.rule, device)
    shape, source = _shape(packing), packing.source
    empty = not shape.out_rows * shape.out_cols
    batches = () if empty else launch_batches(shape.batch, 1)
    launches = [_PackingLaunch(packing, shape, batch, device) for batch in batches]
    steps: list[Packer] = [*launches]
    nbytes = source.rows * prod(source.batch_shape) * EXPONENT_BYTES
    if packing.scaled and nbytes and (empty or any(x.maxima for x in launches)):

        def clear_exponents(source: int, target: int, exponents: int, stream: int) -> None:
            runtime.call("cudaMemsetAsync", exponents, 0, nbytes, stream)

        steps.insert(0, clear_exponents)
    return in_sequence(steps)


class _PackingLaunch:
    """The kernels that pack the batch of one launch."""

    def __init__(self, packing: Packing, shape: _Shape, batch: LaunchBatch, device: int) -> None:
        self._packing, self._shape, self._batch, self._device = packing, shape, batch, device
        self._source_bytes = packing.source.dtype.itemsize
        lines_per_row, elements = PACKED[packing.complex_as]
        self._out_bytes = packing.dtype.itemsize * elements
        lines = shape.out_rows * lines_per_row
        parts, side_by_side = packing.parts, packing.side_by_side
        line_stride = shape.out_cols * (parts if side_by_side else 1)
        batch_stride = shape.out_cols * parts * lines
        part_step = shape.out_cols * (1 if side_by_side else lines)
        first_part = part_step * (parts - 1) if packing.descending else 0
        #: Strides between lines, matrices and parts of the target, in numbers of the source.
        self._steps = (line_stride, batch_stride, -part_step if packing.descending else part_step)
        self._offsets = (
            batch.offsets[0] * self._source_bytes,
            (batch.before * batch_stride + first_part) * self._out_bytes,
            batch.before * shape.rows * EXPONENT_BYTES,
        )
        self._lines = lines * batch.count
        #: Kernel that computes the exponents (zero before) for the next kernel.
        self.maxima: Launch | None = None
        self._fast: Launch | None
        transposed = 0 < abs(shape.row_stride) < abs(shape.col_stride)
        if transposed and min(shape.rows, shape.cols) >= _TILED:
            self._by_tiles()
        else:
            self._by_lines()

    def __call__(self, source: int, target: int, exponents: int, stream: int) -> None:
        source += self._offsets[0]
        target += self._offsets[1]
        exponents += self._offsets[2]
        if self.maxima is not None:
            self.maxima(stream, source, exponents)
        launch = self._fast
        if launch is None or source & self._source_mask or target & self._target_mask:
            launch = self._any
        if self._takes_exponents:
            launch(stream, source, target, exponents)
        else:
            launch(stream, source, target)

    def _launch(self, name: str, wanted: int, block: tuple[int, ...], last: tuple[int, ...]) -> Launch:
        """Return a kernel with ``last`` after the common arguments."""
        packing, shape, batch = self._packing, self._shape, self._batch
        definitions: dict[str, str | int] = {
            "SOURCE": ELEMENT[packing.source.dtype],
            "TARGET": ELEMENT[packing.dtype],
            "PAIRS": int(packing.complex_as != "no"),
            "ROTATED": int(packing.complex_as == "rotated"),
            "SCALED": int(packing.scaled),
            "PARTS": packing.parts,
            "PART_FACTOR": 1 << packing.part_exponent,
            "SUMMED": int(packing.summed),
            "TF32": int(packing.as_tf32),
            f"KERNEL_{name}": 1,
        }
        blocks = pick_blocks(wanted, self._device)
        out = () if name == "pack_maxima" else (shape.out_rows, shape.out_cols, *self._steps)
        constants = (
            *(shape.rows, shape.cols, shape.row_stride, shape.col_stride, *out),
            *(batch.count, *batch.extents, *batch.strides[0], *last),
        )
        addresses = 2 + (self._takes_exponents and name != "pack_maxima")
        return Launch(name, "pack.cu", definitions, self._device, blocks, block, addresses, constants)

    def _by_lines(self) -> None:
        """Prepare kernels whose adjacent threads process adjacent columns."""
        shape, batch = self._shape, self._batch
        vector = max(1, VECTOR_BYTES // min(self._source_bytes, self._out_bytes))
        strides = [shape.row_stride if shape.rows > 1 else 0, *batch.strides[0]]
        regular = shape.col_stride == 1 and are_multiples(VECTOR_BYTES, self._source_bytes, strides)
        if self._lines * self._packing.parts > 1:
            regular = regular and are_multiples(VECTOR_BYTES, self._out_bytes, [shape.out_cols])
        self._source_mask = self._target_mask = VECTOR_BYTES - 1
        self._takes_exponents = self._packing.scaled
        if self._packing.scaled:
            groups = -(-shape.out_cols // vector)
            across = min(THREADS, max(_LEAST_ACROSS, 1 << (groups - 1).bit_length()))
            block = (across, THREADS // across)
            wanted = -(-batch.count * shape.out_rows // block[1])
            self._any = self._launch("pack_rows", wanted, block, (0,))
            self._fast = self._launch("pack_rows", wanted, block, (1,)) if regular else None
            return

        def wanted_of(elements: int) -> int:
            groups = batch.count * shape.out_rows * -(-shape.out_cols // elements)
            return -(-groups // THREADS)

        self._any = self._launch("pack_elements", wanted_of(1), (THREADS,), ())
        self._fast = self._launch("pack_groups", wanted_of(vector), (THREADS,), ()) if regular else None

    def _by_tiles(self) -> None:
        """Prepare kernels whose adjacent threads read adjacent rows and write adjacent columns."""
        shape, batch = self._shape, self._batch
        # Pairs of bytes for elements of 16 bytes, of which a tile of words exceeds the shared memory.
        source_word = max(2 if self._out_bytes == VECTOR_BYTES else _WORD_BYTES, self._source_bytes)
        target_word = max(_WORD_BYTES, self._out_bytes)
        regular = (
            shape.row_stride == 1
            and are_multiples(source_word, self._source_bytes, [shape.col_stride, *batch.strides[0]])
            and are_multiples(target_word, self._out_bytes, [shape.out_cols])
        )
        height = _TILE * source_word // self._source_bytes
        width = _TILE * target_word // self._out_bytes
        wanted = batch.count * -(-shape.out_rows // height) * -(-shape.out_cols // width)
        self._source_mask, self._target_mask = source_word - 1, target_word - 1
        self._takes_exponents = True
        self._any = self._launch("pack_tiles", wanted, _TILE_BLOCK, (0,))
        self._fast = self._launch("pack_tiles", wanted, _TILE_BLOCK, (1,)) if regular else None
        if self._packing.scaled:
            strips = batch.count * -(-shape.rows // _TILE) * -(-shape.cols // _SPAN)
            self.maxima = self._launch("pack_maxima", strips, _TILE_BLOCK, (_SPAN,))
