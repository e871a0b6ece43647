"""Packing of operands for cuBLASLt in one pass: rounding, scaling, transposition, padding, complex as real numbers.

The kernel of ``kernels/pack.cu`` is selected by the strides of the source (contiguous and aligned columns, 16 bytes at
a time; contiguous rows, through tiles; or any), and in each call by the alignment of the pointers.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import prod
from typing import NamedTuple

from lowprec.backends.cuda.compiling import ELEMENT, EXPONENT_BYTES, THREADS, Launch, Macros
from lowprec.backends.cuda.libraries import cached
from lowprec.backends.cuda.steps import (
    LaunchBatch,
    Step,
    Used,
    are_multiples,
    batch_dimensions,
    kernel_step,
    launch_batches,
    zeros,
)
from lowprec.formats import INT8_CODES
from lowprec.planning.cublaslt.calls import PACKED, STEP_BYTES, TILE_VECTORS, Packing
from lowprec.recipes import Rule
from lowprec.util.strides import Dimension, coalesce, packed_strides

#: Least extents of a matrix for which tiles are used.
_TILED = 8
#: Least number of threads of a block per row.
_LEAST_ACROSS = 4
#: Words of a tile each way, and the threads that read and write it.
_TILE = 32
_TILE_BLOCK = (32, 8)
_WORD_BYTES = 4
#: Columns per block in the search for the largest magnitudes.
_SPAN = 512
_SCALINGS = {"tensor": 0, "vector": 1, "floor": 2, "rceil": 3, "e4m3": 4, "float32": 5, "even": 6}
#: Modes whose scales are not those of vectors.
_STORED = {"VEC128_32F": 2, "BLK128x128_32F": 3, "VEC32_UE8M0": 4, "VEC16_UE4M3": 5}
#: Macro of loads that bypass shared memory.
_DIRECTLY = 2
#: Numbers along k of a tile.
_TILE_LENGTH = 128


class _Shape(NamedTuple):
    """A packing in source elements, its dimensions coalesced."""

    batch: list[Dimension]
    rows: int
    cols: int
    row_stride: int
    col_stride: int
    out_rows: int
    out_cols: int
    source_bytes: int  # of an element
    out_bytes: int


def _shape(packing: Packing) -> _Shape:
    source = packing.source
    lines, elements = PACKED[packing.complex_as]
    out_rows = packing.padded_rows // lines
    out_cols = packing.leading_dimension // elements
    row: Dimension = (source.rows, (source.row_stride,))
    column: Dimension = (source.cols, (source.col_stride,))
    batch = coalesce(batch_dimensions(source.batch_shape, source.batch_strides))
    # Without padding the target is contiguous, so dimensions coalesce by the strides of the source.
    if out_rows == source.rows and packing.parts == 1:
        batch = coalesce([*batch, row])
        if out_cols == source.cols and not packing.scaled and packing.complex_as != "rotated":
            batch = coalesce([*batch, column])
            column = (1, (1,))
            if batch:
                column = batch.pop()
            out_cols = column[0]
        row = (1, (0,))
        if batch:
            row = batch.pop()
        out_rows = row[0]
    rows, (row_stride,) = row
    cols, (col_stride,) = column
    if cols == 1:
        col_stride = 1
    source_bytes = source.dtype.itemsize
    out_bytes = packing.dtype.itemsize * elements
    return _Shape(
        batch, rows, cols, row_stride, col_stride, out_rows, out_cols, source_bytes, out_bytes
    )


@cached
def prepare_packing(packing: Packing, device: int, operand: str = "a") -> tuple[Step, ...]:
    """Return the steps that pack an operand on ``device``, which must be current."""
    if packing.rule is not None:
        return _prepare_quantizing(packing, packing.rule, device, operand)
    shape = _shape(packing)
    along_rows = 0 < abs(shape.row_stride) < abs(shape.col_stride)
    by_tiles = along_rows and min(shape.rows, shape.cols) >= _TILED
    steps: list[Step] = []
    if packing.scaled and by_tiles:
        nbytes = packing.source.rows * prod(packing.source.batch_shape) * EXPONENT_BYTES
        steps.append(zeros(f"scales_{operand}", 0, nbytes))
    kernels = _by_tiles if by_tiles else _by_lines
    for batch in launch_batches(shape.batch, 1):
        used, strides = _arrays(packing, shape, batch, operand)
        launch = partial(_launch, packing, shape, batch, strides, device)
        steps += kernels(packing, shape, batch, used, launch)
    return tuple(steps)


def _arrays(
    packing: Packing, shape: _Shape, batch: LaunchBatch, operand: str
) -> tuple[Used, tuple[int, int, int]]:
    """Return source, target and exponents of a batch, and the strides between lines, matrices and parts of the target.

    Strides are in numbers of the source.
    """
    lines = shape.out_rows * PACKED[packing.complex_as][0]
    batch_stride = shape.out_cols * packing.parts * lines
    line_stride = shape.out_cols
    part_step = shape.out_cols
    if packing.side_by_side:
        line_stride *= packing.parts
    else:
        part_step *= lines
    first = batch.before * batch_stride
    if packing.descending:
        first += part_step * (packing.parts - 1)
        part_step = -part_step
    used = [
        (operand, batch.offsets[0] * shape.source_bytes),
        (f"packed_{operand}", first * shape.out_bytes),
        (f"scales_{operand}", batch.before * shape.rows * EXPONENT_BYTES),
    ]
    return used, (line_stride, batch_stride, part_step)


def _launch(
    packing: Packing,
    shape: _Shape,
    batch: LaunchBatch,
    strides: tuple[int, int, int],
    device: int,
    name: str,
    wanted: int,
    block: tuple[int, ...],
    *last: int,
    varying: str = "3Q",
    masks: tuple[int, ...] = (),
) -> Launch:
    """Return a kernel with ``last`` after the common arguments."""
    definitions: Macros = {
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
    constants = [shape.rows, shape.cols, shape.row_stride, shape.col_stride]
    if name != "pack_maxima":
        constants += [shape.out_rows, shape.out_cols, *strides]
    constants += [batch.matrices, *batch.extents, *batch.strides[0], *last]
    return Launch(name, "pack.cu", definitions, device, wanted, block, varying, constants, masks)


def _by_lines(
    packing: Packing, shape: _Shape, batch: LaunchBatch, used: Used, launch: Callable[..., Launch]
) -> list[Step]:
    """Return kernels whose adjacent threads process adjacent columns."""
    vector = max(1, STEP_BYTES // min(shape.source_bytes, shape.out_bytes))
    lines = batch.matrices * shape.out_rows
    strides = batch.strides[0]
    if shape.rows > 1:
        strides = (shape.row_stride, *strides)
    regular = shape.col_stride == 1 and are_multiples(STEP_BYTES, shape.source_bytes, strides)
    if lines * PACKED[packing.complex_as][0] * packing.parts > 1:
        regular = regular and are_multiples(STEP_BYTES, shape.out_bytes, [shape.out_cols])
    aligned = (STEP_BYTES - 1, STEP_BYTES - 1)
    groups = -(-shape.out_cols // vector)
    if packing.scaled:
        threads_per_row = 1 << (groups - 1).bit_length()
        across = min(THREADS, max(_LEAST_ACROSS, threads_per_row))
        block = (across, THREADS // across)
        wanted = -(-lines // block[1])
        fast = launch("pack_rows", wanted, block, 1, masks=aligned)
        slow = launch("pack_rows", wanted, block, 0)
    else:
        used = used[:2]
        threads = (THREADS,)
        wanted = -(-lines * groups // THREADS)
        fast = launch("pack_groups", wanted, threads, varying="2Q", masks=aligned)
        wanted = -(-lines * shape.out_cols // THREADS)
        slow = launch("pack_elements", wanted, threads, varying="2Q")
    launches = [slow]
    if regular:
        launches.insert(0, fast)
    return [kernel_step(used, launches)]


def _by_tiles(
    packing: Packing, shape: _Shape, batch: LaunchBatch, used: Used, launch: Callable[..., Launch]
) -> list[Step]:
    """Return kernels whose adjacent threads read adjacent rows and write adjacent columns."""
    # Pairs of bytes for elements of 16 bytes, of which a tile of words exceeds the shared memory.
    least = 2 if shape.out_bytes == STEP_BYTES else _WORD_BYTES
    source_word = max(least, shape.source_bytes)
    target_word = max(_WORD_BYTES, shape.out_bytes)
    source_strides = [shape.col_stride, *batch.strides[0]]
    regular = (
        shape.row_stride == 1
        and are_multiples(source_word, shape.source_bytes, source_strides)
        and are_multiples(target_word, shape.out_bytes, [shape.out_cols])
    )
    tall = -(-shape.out_rows // (_TILE * source_word // shape.source_bytes))
    wide = -(-shape.out_cols // (_TILE * target_word // shape.out_bytes))
    wanted = batch.matrices * tall * wide
    launches = [launch("pack_tiles", wanted, _TILE_BLOCK, 0)]
    if regular:
        masks = (source_word - 1, target_word - 1)
        launches.insert(0, launch("pack_tiles", wanted, _TILE_BLOCK, 1, masks=masks))
    steps = [kernel_step(used, launches)]
    if packing.scaled:  # the exponents, cleared before, for the kernel that packs
        tall = -(-shape.rows // _TILE)
        wide = -(-shape.cols // _SPAN)
        wanted = batch.matrices * tall * wide
        maxima = launch("pack_maxima", wanted, _TILE_BLOCK, _SPAN, varying="2Q")
        source, _, exponents = used
        steps.insert(0, kernel_step([source, exponents], [maxima]))
    return steps


def _prepare_quantizing(
    packing: Packing, rule: Rule, device: int, operand: str
) -> tuple[Step, ...]:
    """Return the steps of the quantising packing on ``device``, which must be current."""
    source = packing.source
    shape = (*source.batch_shape, 1, 1)
    strides = (*(packing.numbers or source.batch_strides), 1, 1)
    numbers = packed_strides(shape, strides)[:-2]
    dimensions = batch_dimensions(source.batch_shape, source.batch_strides, numbers)
    batches = list(launch_batches(dimensions, 2))
    first = 0  # of the bytes that are cleared: the padding of scales, and the largest magnitudes
    if _scales(packing) == 1:
        first = source.rows * prod(source.batch_shape) * EXPONENT_BYTES
    steps: list[Step] = []
    if packing.scale_bytes > first:
        steps.append(zeros(f"scales_{operand}", first, packing.scale_bytes - first))
    passes = (True, False) if packing.peaks else (False,)
    for seeks in passes:
        steps += [_quantizing(packing, rule, batch, device, operand, seeks) for batch in batches]
    return tuple(steps)


def _scales(packing: Packing) -> int:
    return _STORED.get(packing.scale_mode, 1) if packing.scaled else 0


def _quantizing_macros(packing: Packing, rule: Rule, seeks: bool, loads: int) -> Macros:
    elements = rule.number_format or INT8_CODES
    scaling = rule.scaling
    high = 1
    wide = _TILE_LENGTH
    if scaling == "block":
        scaling = rule.block_scale
        high, wide = rule.block
    return {
        "SOURCE": ELEMENT[packing.source.dtype],
        "TARGET": ELEMENT[packing.dtype],
        "STORED": elements.precision - 1,
        "LEAST_EXPONENT": f"({elements.emin})",
        "LARGEST": f"{elements.largest!r}f",
        "SCALING": _SCALINGS[scaling],
        "SCALES": _scales(packing),
        "HIGH": high,
        "WIDE": wide,
        "ALONE": int(rule.marks_elements),
        "INTEGER": int(rule.number_format is None),
        "POWERS": int(rule.power_scales),
        "STOCHASTIC": int(rule.is_stochastic),
        "HADAMARD": int(rule.hadamard > 0),
        "SEEKS": int(seeks),
        "LOADS": loads,
    }


def _quantizing(
    packing: Packing, rule: Rule, batch: LaunchBatch, device: int, operand: str, seeks: bool
) -> Step:
    """Return the kernel for the matrices of a launch."""
    source = packing.source
    out_cols = packing.leading_dimension
    if packing.scale_mode == "VEC16_UE4M3":
        out_cols *= 2  # numbers in an element
    tiles = batch.matrices * -(-packing.padded_rows // TILE_VECTORS) * -(-out_cols // _TILE_LENGTH)

    def launch(loads: int, *masks: int) -> Launch:
        definitions = _quantizing_macros(packing, rule, seeks, loads)
        return Launch(
            "quantize",
            "quantize.cu",
            definitions,
            device,
            tiles,
            _TILE_BLOCK,
            "5Q",
            _quantizing_constants(packing, rule, batch, bool(masks), out_cols),
            masks,
        )

    mask = STEP_BYTES - 1
    along_vectors = int(0 < abs(source.row_stride) < abs(source.col_stride))
    strides = (source.row_stride, *batch.strides[0])
    launches = [launch(along_vectors)]
    if are_multiples(STEP_BYTES, packing.dtype.itemsize, [packing.leading_dimension]):
        launches.insert(0, launch(along_vectors, 0, mask))
        if source.col_stride == 1 and are_multiples(STEP_BYTES, source.dtype.itemsize, strides):
            launches.insert(0, launch(_DIRECTLY, mask, mask))
    return kernel_step(_used_by_quantizing(packing, rule, batch, operand), launches)


def _quantizing_constants(
    packing: Packing, rule: Rule, batch: LaunchBatch, is_aligned: bool, out_cols: int
) -> list[int]:
    source = packing.source
    return [
        rule.seed - (rule.seed >> 63 << 64),  # the signed number with the same 64 bits
        source.rows,
        source.cols,
        source.row_stride,
        source.col_stride,
        batch.matrices,
        *batch.extents,
        *batch.strides[0],
        is_aligned,
        packing.padded_rows,
        out_cols,
        batch.offsets[1],
        *batch.strides[1],
    ]


def _used_by_quantizing(packing: Packing, rule: Rule, batch: LaunchBatch, operand: str) -> Used:
    """Return the addresses that a kernel reads and writes, with the offsets of its first matrix in bytes."""
    source = packing.source
    peaks = packing.scale_words
    if not rule.has_tensor_scale:
        peaks += batch.before * packing.peaks // prod(source.batch_shape)
    return [
        (operand, batch.offsets[0] * source.dtype.itemsize),
        (f"packed_{operand}", batch.before * packing.matrix_stride * packing.dtype.itemsize),
        (f"scales_{operand}", batch.before * source.rows * EXPONENT_BYTES),
        (f"scales_{operand}", peaks * EXPONENT_BYTES),
        (f"draw_{operand}", 0),
    ]
