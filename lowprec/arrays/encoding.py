"""Arrays in narrow formats, by the functions of their library, or by NumPy in host memory."""

from __future__ import annotations

from typing import Any

import numpy as np

from lowprec.arrays import block_codes
from lowprec.arrays.block_layout import blocks_of, joined, part_shapes, ranges
from lowprec.arrays.namespaces import array_module, converted
from lowprec.arrays.narrow_numbers import array_scale
from lowprec.arrays.quantized import QuantizedArray, quantized_array
from lowprec.arrays.view import ArrayView
from lowprec.formats import BlockFormat
from lowprec.rounding_rules import rules_of_format


def encoded(
    x: Any, view: ArrayView, row: BlockFormat, axis: int, scale_rule: str
) -> QuantizedArray:
    """Return an array in a narrow format, by the functions of its library, or by NumPy in host memory."""
    xp, source = _module_and_array(x, view)
    of_axis = row.of_length(view.shape[axis])
    source = blocks_of(xp.moveaxis(source, axis, -1), of_axis, xp)
    with np.errstate(all="ignore"):
        parts = [source[i] for i in ranges(len(source), of_axis, xp)]
        scale = array_scale(parts, row, xp)
        found = [block_codes.encode(part, row, scale, xp, scale_rule) for part in parts]
    shapes = part_shapes(view.shape, axis, row)
    columns = zip(*found, strict=True)
    stored = [
        joined(column, shape or (), xp) for column, shape in zip(columns, shapes, strict=False)
    ]
    return quantized_array(x, view.shape, row, axis, stored, scale)


def encoded_by_rule(
    x: Any, view: ArrayView, row: BlockFormat, axis: int, scale_rule: str
) -> QuantizedArray:
    """Return an array in a format without kernels, whose numbers are rounded as operands are."""
    rule, _ = rules_of_format(row.name)
    if rule.block_scale == "floor":
        rule = rule._replace(block_scale=scale_rule)
    xp, source = _module_and_array(x, view)
    source = xp.moveaxis(source, axis, -1)
    shapes = part_shapes(view.shape, axis, row)
    if 0 in view.shape:
        one = converted(xp.sum(source) + 1, xp.float32)
        dtypes = (xp.uint8, xp.float32 if row.has_float_scales else xp.uint8)
        stored: Any = [
            shape and xp.broadcast_to(converted(one, dtype), shape)
            for shape, dtype in zip(shapes, dtypes, strict=False)
        ]
        scale: Any = xp.broadcast_to(one, source.shape[:-1]) if rule.outer == "rows" else one
    else:
        with np.errstate(all="ignore"):
            *stored, scale = block_codes.rounded(source, -1, rule, xp, row=row)
    stored = [
        None if part is None else joined([part], shape, xp)
        for part, shape in zip(stored, shapes, strict=False)
    ]
    return quantized_array(x, view.shape, row, axis, stored, scale)


def _module_and_array(x: Any, view: ArrayView) -> tuple[Any, Any]:
    """Return the functions for an array, and the array that they take: NumPy's in host memory."""
    if view.device.is_host:
        return np, view.ndarray()
    return array_module(x), x
