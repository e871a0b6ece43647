"""Products of integers in blocks on NumPy, with the bits of the kernels (``native/blocks.hpp``)."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np

from lowprec.arrays import block_codes
from lowprec.arrays.narrow_numbers import rounded_sum
from lowprec.arrays.numpy_library import host_view
from lowprec.arrays.view import ArrayView
from lowprec.backends.cpu.emulation import arithmetic, products
from lowprec.backends.cpu.numpy_execution import execute, stacks
from lowprec.backends.interface import Arguments
from lowprec.formats import numbers_of_codes
from lowprec.planning import GemmPlan
from lowprec.planning.schedule import chunk_length


def execute_blocks(plan: GemmPlan, arguments: Arguments) -> None:
    """Add the exact sums over blocks times their scales, in chunks of k."""
    a, scales_a = _integers(arguments.a)
    b, scales_b = _integers(arguments.b)
    of_a, of_b, *_ = stacks(plan, arguments._replace(a=scales_a, b=scales_b))
    rows = [x.blocks.row for x in (plan.problem.a, plan.problem.b) if x.blocks]
    size = 32
    if any(row.block == 16 for row in rows):
        size = 16
    rounds = rows[1].has_float_scales

    def multiply(plan: GemmPlan, arguments: Arguments, a: Any, b: Any, out: Any) -> None:
        k = a.shape[-1]
        step = chunk_length(k, plan.kernel_row.k_chunk)
        for start in range(0, k, step):
            total = np.zeros(out.shape, np.float32)
            for first in range(start, min(start + step, k), size):
                part = slice(first, min(first + size, start + step, k))
                scaled = np.matmul(a[..., part], b[..., part, :]) * of_b[..., first : first + 1, :]
                if rounds:
                    scaled = scaled.astype(np.float32).astype(np.float64)
                total = rounded_sum(scaled * of_a[..., first : first + 1], total, np)
            if start:
                total = out + total
            out[...] = total

    execute(plan, multiply, arguments._replace(a=a, b=b))


def execute_scaled(plan: GemmPlan, arguments: Arguments) -> None:
    """Multiply numbers with scales of blocks as emulated tensor cores do, in chunks of k."""
    a, scales_a = _integers(arguments.a)
    b, scales_b = _integers(arguments.b)
    of_a, of_b, *_ = stacks(plan, arguments._replace(a=scales_a, b=scales_b))
    architecture = plan.kernel_row.imitates
    assert architecture is not None
    model = arithmetic.arithmetic(architecture, *(plan.kernel_row.formats or ()))
    emins = []
    for blocks in plan.problem.blocks_along_k:
        row = blocks.row
        scaled = row.scales if model.dot > 1 else row.elements
        assert scaled is not None
        emins.append(scaled.emin)

    def multiply(plan: GemmPlan, arguments: Arguments, a: Any, b: Any, out: Any) -> None:
        for part in plan.schedule:
            k = slice(part.k_start, part.k_stop)
            scales = of_a[..., k], of_b[..., k, :]
            found = products.multiply_scaled(a[..., k], b[..., k, :], scales, emins, model)
            if part.accumulates:
                found += out
            out[...] = found

    execute(plan, multiply, arguments._replace(a=a, b=b))


def _integers(view: ArrayView) -> tuple[ArrayView, ArrayView]:
    """Return the numbers of codes without scales, and the scale of each, in float64."""
    assert view.blocks is not None
    axis = view.blocks.axis
    row = view.blocks.row.of_length(view.shape[axis])
    stored = view.quantized
    codes = np.asarray(stored.codes)
    scales = np.asarray(stored.scales)
    zeros = None
    if stored.zeros is not None:
        zeros = np.asarray(stored.zeros).reshape(-1)
    assert row.scales is not None
    dtype = np.dtype(getattr(ml_dtypes, row.scales.name, row.scales.name))
    ones = np.ones(scales.size, dtype).view(scales.dtype)
    table = None
    if row.looked_up:
        table = np.array(numbers_of_codes(row.looked_up), np.float32)
    numbers = block_codes.decode(codes.reshape((scales.size, -1)), ones, zeros, row, 1.0, np, table)
    spread = np.repeat(scales.view(dtype).astype(np.float64), row.block, -1)

    def in_shape(x: Any) -> ArrayView:
        found = np.moveaxis(x.reshape(spread.shape)[..., : view.shape[axis]], -1, axis)
        return host_view(np.broadcast_to(found.astype(np.float64), view.shape))

    return in_shape(numbers), in_shape(spread)
