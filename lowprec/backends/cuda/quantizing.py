"""Packing of operands that are quantised: codes times their block scales, and the float32 scales of rows.

The kernel, ``kernels/quantize.cu``, reads the source twice if a scale is of more than a tile.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod

from lowprec.backends.cuda import runtime
from lowprec.backends.cuda.batching import LaunchBatch, in_sequence, launch_batches
from lowprec.backends.cuda.compiling import ELEMENT, EXPONENT_BYTES, Launch, pick_blocks
from lowprec.formats import INT8_CODES
from lowprec.planning.cublaslt.calls import TILE_VECTORS, Packing
from lowprec.recipes import Rule
from lowprec.util.strides import contiguous_strides

_SCALINGS = {"tensor": 0, "vector": 1, "floor": 2, "rceil": 3, "e4m3": 4, "float32": 5}
#: Modes whose scales are not those of vectors.
_STORED = {"VEC128_32F": 2, "BLK128x128_32F": 3, "VEC32_UE8M0": 4, "VEC16_UE4M3": 5}
#: Numbers along k of a tile, and the threads for it.
_TILE_LENGTH, _BLOCK = 128, (32, 8)


def prepare_quantizing(packing: Packing, rule: Rule, device: int) -> Callable[..., None]:
    """Return the function that queues the quantising packing on a stream of ``device``, which must be current."""
    source = packing.source
    # Random numbers belong to the distinct matrices of a broadcast batch.
    extents = [n if stride else 1 for n, stride in zip(source.batch_shape, source.batch_strides, strict=True)]
    numbers = [s if n > 1 else 0 for n, s in zip(extents, contiguous_strides(tuple(extents)), strict=True)]
    strides = zip(source.batch_strides, numbers, strict=True)
    batches = list(launch_batches(list(zip(source.batch_shape, strides, strict=True)), 2))
    steps: list[Callable[..., None]] = [_launch(packing, rule, batch, device) for batch in batches]
    if packing.peaks:
        steps = [*(_launch(packing, rule, batch, device, seeks=True) for batch in batches), *steps]
    # The padding of scales, and the largest magnitudes.
    first = source.rows * prod(source.batch_shape) * EXPONENT_BYTES if _scales(packing) == 1 else 0
    nbytes = packing.scale_bytes - first

    def clear(source: int, target: int, scales: int, stream: int, draw: int) -> None:
        runtime.call("cudaMemsetAsync", scales + first, 0, nbytes, stream)

    return in_sequence([clear, *steps] if nbytes else steps)


def _scales(packing: Packing) -> int:
    return _STORED.get(packing.scale_mode, 1) if packing.scaled else 0


def _definitions(packing: Packing, rule: Rule) -> dict[str, str | int]:
    elements = rule.number_format or INT8_CODES
    high, wide = rule.block if rule.scaling == "block" else (1, _TILE_LENGTH)
    return {
        "SOURCE": ELEMENT[packing.source.dtype],
        "TARGET": ELEMENT[packing.dtype],
        "STORED": elements.precision - 1,
        "LEAST_EXPONENT": f"({elements.emin})",
        "LARGEST": f"{elements.largest:.1f}f",
        "SCALING": _SCALINGS[rule.block_scale if rule.scaling == "block" else rule.scaling],
        "SCALES": _scales(packing),
        "HIGH": high,
        "WIDE": wide,
        "ALONE": int(rule.marks_elements),
        "INTEGER": int(rule.number_format is None),
        "STOCHASTIC": int(rule.is_stochastic),
        "HADAMARD": int(rule.hadamard > 0),
    }


def _launch(
    packing: Packing, rule: Rule, batch: LaunchBatch, device: int, *, seeks: bool = False
) -> Callable[..., None]:
    """Return the function that queues the kernel for the matrices of a launch."""
    source, numbers = packing.source, 1 + (packing.scale_mode == "VEC16_UE4M3")  # in an element
    out = packing.padded_rows, packing.leading_dimension * numbers
    tiles = batch.count * -(-out[0] // TILE_VECTORS) * -(-out[1] // _TILE_LENGTH)
    by_rows = int(0 < abs(source.row_stride) < abs(source.col_stride))
    constants = (
        source.rows, source.cols, source.row_stride, source.col_stride, batch.count, *batch.extents, *batch.strides[0],
        by_rows, *out, batch.offsets[1], *batch.strides[1],
    )  # fmt: skip
    definitions = _definitions(packing, rule) | {"SEEKS": int(seeks)}
    launch = Launch("quantize", "quantize.cu", definitions, device, pick_blocks(tiles, device), _BLOCK, 6, constants)
    peaks = 0 if rule.has_tensor_scale else packing.peaks // max(prod(source.batch_shape), 1)
    first, to = batch.offsets[0] * source.dtype.itemsize, batch.before * packing.matrix_stride * packing.dtype.itemsize
    of_scales = batch.before * source.rows * EXPONENT_BYTES
    of_peaks = (packing.scale_words + batch.before * peaks) * EXPONENT_BYTES

    def queue(source: int, target: int, scales: int, stream: int, draw: int) -> None:
        launch(stream, source + first, target + to, scales + of_scales, scales + of_peaks, rule.seed, draw)

    return queue
