"""Packing of operands that are quantised: codes times their block scales, and the float32 scales of rows.

The kernels, ``kernels/quantize.cu``, read the source twice if a scale is of more than a tile.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

from lowprec.backends.cuda import runtime
from lowprec.backends.cuda.batching import LaunchBatch, in_sequence, launch_batches
from lowprec.backends.cuda.compiling import ELEMENT, EXPONENT_BYTES, Launch, pick_blocks
from lowprec.formats import INT8_CODES
from lowprec.planning.cublaslt.calls import TILE_VECTORS, Packing
from lowprec.recipes import Rule
from lowprec.util.strides import contiguous_strides

_SCALINGS = {"tensor": 0, "vector": 1, "floor": 2, "rceil": 3, "e4m3": 4, "float32": 5}
#: Modes whose scales are not those of vectors.
_STORED = {"VEC128_32F": 2, "BLK128x128_32F": 3, "VEC32_UE8M0": 4}
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
    at_peaks = packing.scale_words * EXPONENT_BYTES
    steps = [_quantizer(packing, rule, batch, device, at_peaks) for batch in batches]
    if packing.peaks:
        steps = [*(_peaks(packing, rule, batch, device, at_peaks) for batch in batches), *steps]
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


def _launch(packing: Packing, rule: Rule, batch: LaunchBatch, device: int, name: str, *last: int) -> Launch:
    """Return a kernel with ``last`` after the common arguments."""
    source, is_last = packing.source, name == "quantize"
    lines, length = (packing.padded_rows, packing.leading_dimension) if is_last else (source.rows, source.cols)
    tiles = batch.count * -(-lines // TILE_VECTORS) * -(-length // _TILE_LENGTH)
    by_rows = int(0 < abs(source.row_stride) < abs(source.col_stride))
    constants = (
        source.rows, source.cols, source.row_stride, source.col_stride, batch.count, *batch.extents, *batch.strides[0],
        by_rows, *last,
    )  # fmt: skip
    definitions = _definitions(packing, rule) | {f"KERNEL_{name}": 1}
    addresses = 6 if is_last else 3
    return Launch(name, "quantize.cu", definitions, device, pick_blocks(tiles, device), _BLOCK, addresses, constants)


def _peaks(packing: Packing, rule: Rule, batch: LaunchBatch, device: int, at_peaks: int) -> Callable[..., None]:
    launch, each = _launch(packing, rule, batch, device, "quantize_peaks"), _peaks_before(packing, rule, batch)
    offset = batch.offsets[0] * packing.source.dtype.itemsize

    def queue(source: int, target: int, scales: int, stream: int, draw: int) -> None:
        launch(stream, source + offset, scales + at_peaks + each, rule.seed)

    return queue


def _peaks_before(packing: Packing, rule: Rule, batch: LaunchBatch) -> int:
    """Return the bytes of the largest magnitudes of the matrices of earlier launches."""
    if rule.has_tensor_scale:
        return 0
    return packing.peaks // max(prod(packing.source.batch_shape), 1) * batch.before * EXPONENT_BYTES


def _quantizer(packing: Packing, rule: Rule, batch: LaunchBatch, device: int, at_peaks: int) -> Callable[..., None]:
    out = packing.padded_rows, packing.leading_dimension
    launch = _launch(packing, rule, batch, device, "quantize", *out, batch.offsets[1], *batch.strides[1])
    each, itemsize = _peaks_before(packing, rule, batch), packing.dtype.itemsize
    offsets = batch.offsets[0] * packing.source.dtype.itemsize, batch.before * prod(out) * itemsize
    first = batch.before * packing.source.rows * EXPONENT_BYTES

    def queue(source: int, target: int, scales: int, stream: int, draw: Any) -> None:
        peaks = scales + at_peaks + each
        launch(stream, source + offsets[0], target + offsets[1], scales + first, peaks, rule.seed, draw)

    return queue
