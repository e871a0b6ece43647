"""Splitting of operands into the parts of a mode, after scaling of rows and columns if the mode requires it.

Each part is x minus the previous parts, rounded; the differences are exact. For infinities, NaN and values that
overflow in the format the second part is NaN, and so is every sum of the row or column.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from lowprec.backends.cpu import casting, team
from lowprec.backends.cpu.buffers import Workspace
from lowprec.backends.cpu.scaling import FLOAT16_DIGITS, TOP_EXPONENT
from lowprec.formats import NumberFormat
from lowprec.modes import ModeRow

_MAGNITUDE, _INFINITY = 0x7FFFFFFF, 0x7F800000

#: Numbers per block, which fits the cache.
_BLOCK = 1 << 16

#: Largest operand or result, in elements, of a batch that runs in slices; elements of a slice, which is one block.
SMALL_PRODUCT, SLICE = 1 << 14, 1 << 17

#: Sum of the magnitudes of two exponents up to which unscaling a product gives normal numbers.
_SMALL_EXPONENT = 50

#: Powers of two with exponents of this magnitude are normal float32 numbers.
_LARGEST_FACTOR = 126


class Split(NamedTuple):
    """The parts of an operand, and the exponents by which its rows (columns of ``b``) were scaled."""

    parts: list[Any]
    exponents: Any | None = None


def split(
    x: Any,
    dtype: np.dtype[Any],
    row: ModeRow,
    fmt: NumberFormat | None,
    count: int,
    scaled_over: int | None,
    workspace: Workspace,
) -> Split:
    """Split an operand, shape (..., rows, cols), into ``count`` parts, followed by their sum if the mode uses it.

    ``dtype`` is float32 or complex64. Parts are rounded to ``fmt``. Rows are scaled if ``scaled_over`` is -1, columns
    if it is -2. ``workspace`` provides the memory.
    """
    exponents = None
    if scaled_over is not None:
        x, exponents = _scaled(x, dtype, scaled_over, workspace)
        if count == 1:
            casting.cast([(x, x)], fmt)
            return Split([x], exponents)
    parts = rounded((x,), dtype, fmt, workspace)
    if count == 1:
        return Split(parts, exponents)
    rest = workspace.array(x.shape, dtype)
    left, factor = x, dtype.type(2.0**row.part_exponent)
    with np.errstate(all="ignore"):
        while len(parts) < min(count, row.parts):
            left = np.subtract(left, parts[-1], out=rest, dtype=dtype, casting="unsafe")
            if row.part_exponent:
                rest *= factor
            parts += rounded((rest,), dtype, fmt, workspace)
        if count > row.parts:
            np.add(parts[0], parts[1], out=rest)
            parts += rounded((rest,), dtype, fmt, workspace)
    return Split(parts, exponents)


def rounded(arrays: tuple[Any, ...], dtype: np.dtype[Any], fmt: NumberFormat | None, workspace: Workspace) -> list[Any]:
    """Return arrays cast to ``dtype`` and rounded to ``fmt``; those that need neither are returned unchanged."""
    results, pairs = _targets(arrays, dtype, fmt, workspace)
    casting.cast(pairs, fmt)
    return results


def _targets(
    arrays: tuple[Any, ...], dtype: np.dtype[Any], fmt: NumberFormat | None, workspace: Workspace
) -> tuple[list[Any], list[tuple[Any, Any]]]:
    results, pairs = [], []
    for x in arrays:
        if x.dtype == dtype and fmt is None:
            results.append(x)
            continue
        # In the memory order of the source, so that both are accessed sequentially.
        turned = abs(x.strides[-2]) < abs(x.strides[-1])
        shape = x.swapaxes(-1, -2).shape if turned else x.shape
        out = workspace.array(shape, dtype)
        results.append(out.swapaxes(-1, -2) if turned else out)
        pairs.append((x, results[-1]))
    return results, pairs


def scaled_where_needed(
    arrays: tuple[Any, ...], dtype: np.dtype[Any], row: ModeRow, workspace: Workspace, first: int = 0
) -> list[Split]:
    """Return ``a`` and ``b``, or ``b`` alone if ``first`` is 1, in float16, scaled if it makes a difference."""
    results, pairs = _targets(arrays, dtype, FLOAT16_DIGITS, workspace)
    apart = casting.cast(pairs, FLOAT16_DIGITS)
    return [
        split(x, dtype, row, row.operand_format, 1, -1 - operand, workspace) if is_apart else Split([result])
        for operand, (x, result, is_apart) in enumerate(zip(arrays, results, apart, strict=True), first)
    ]


def _components(x: Any) -> Any:
    """Return the components of a contiguous array as a flat real array."""
    return x.reshape(-1, copy=False).view(np.float32)


def _scaled(x: Any, dtype: np.dtype[Any], axis: int, workspace: Workspace) -> tuple[Any, Any]:
    """Return ``x`` with each row or column multiplied by 2^e, exactly, and the exponents e; 0 for rows of zeros.

    ``axis`` is the axis of k. Non-finite elements do not influence e.
    """
    turned = abs(x.strides[-2]) < abs(x.strides[-1])
    source, along_rows = (x.swapaxes(-1, -2), axis == -2) if turned else (x, axis == -1)
    out = workspace.array(source.shape, dtype)
    *batch, rows, cols = out.shape
    components = () if dtype == np.float32 else (2,)
    numbers = _components(out).reshape(-1, rows, cols, *components)
    if x.dtype == dtype == np.float32:
        read = source.reshape(-1, rows, cols)
    else:
        casting.cast([(source, out)], None)
        read = numbers
    blocks = _blocks(len(numbers), rows, cols * dtype.itemsize // 4)
    largest = np.zeros((len(numbers), rows, 1) if along_rows else (len(numbers), 1, cols), np.uint32)
    over = (2 if along_rows else 1, *([3] if components else []))
    found: list[tuple[tuple[slice, slice], Any]] = []

    def seek(block: tuple[slice, slice]) -> None:
        sizes = read[block].view(np.uint32) & np.uint32(_MAGNITUDE)
        most = np.maximum.reduce(sizes, over)
        if np.maximum.reduce(most, None, initial=0) >= _INFINITY:
            most = np.maximum.reduce(sizes * (sizes < _INFINITY), over)
        found.append((block, most))

    team.share(seek, blocks)
    for (matrices, some), most in found:
        if along_rows:
            largest[matrices, some, 0] = most
        else:
            np.maximum(largest[matrices, 0], most, out=largest[matrices, 0])
    exponents = TOP_EXPONENT + 1 - np.frexp(largest.view(np.float32))[1]
    exponents *= largest != 0
    steps = [exponents]
    if np.maximum.reduce(np.abs(exponents), None, initial=0) > _LARGEST_FACTOR:
        # In two steps, because 2^163 exceeds float32; roundings between are far below float16's smallest number.
        steps = [exponents // 2, exponents - exponents // 2]
    factors = [np.ldexp(np.float32(1), x).reshape(*x.shape, *[1] * len(components)) for x in steps]

    def scale(block: tuple[slice, slice]) -> None:
        matrices, _ = block
        from_, to = read[block], numbers[block]
        with np.errstate(all="ignore"):
            for factor in factors:
                np.multiply(from_, factor[block] if along_rows else factor[matrices], out=to)
                from_ = to

    team.share(scale, blocks)
    exponents = exponents.reshape(*batch, *exponents.shape[-2:])
    if turned:
        return out.swapaxes(-1, -2), exponents.swapaxes(-1, -2)
    return out, exponents


def _block(rows: int, row_numbers: int) -> int:
    return SLICE if rows * row_numbers <= SMALL_PRODUCT else _BLOCK


def _blocks(count: int, rows: int, row_numbers: int) -> list[tuple[slice, slice]]:
    """Return slices over matrices and their rows, of one block each."""
    height = max(1, _block(rows, row_numbers) // max(1, row_numbers))
    step = max(1, height // max(1, rows))
    return [(slice(i, i + step), slice(j, j + height)) for i in range(0, count, step) for j in range(0, rows, height)]


def unscale(out: Any, a: Split, b: Split) -> None:
    """Undo the scaling of the operands in a product, contiguous or not."""
    if a.exponents is None and b.exponents is None:
        return
    scaled = [x.exponents for x in (a, b) if x.exponents is not None]

    # Results are multiples of 2^-70, so that small powers of two keep them normal.
    is_exact = (
        out.dtype.kind != "c"
        and sum([np.maximum.reduce(np.abs(x), None, initial=0) for x in scaled]) <= _SMALL_EXPONENT
    )

    def take_back(rows: slice) -> None:
        here = out[..., rows, :]
        for part in (here.real, here.imag) if out.dtype.kind == "c" else (here,):
            # In float64 both powers are exact, so the result is rounded once.
            wide = part if is_exact else part.astype(np.float64)
            with np.errstate(all="ignore"):
                for x in scaled:
                    wide *= np.ldexp(wide.dtype.type(1), -(x[..., rows, :] if x.shape[-2] > 1 else x))
                if not is_exact:
                    part[...] = wide

    height = max(1, _block(*out.shape[-2:]) * out.shape[-2] // max(1, out.size))
    team.share(take_back, [slice(i, i + height) for i in range(0, out.shape[-2], height)])
