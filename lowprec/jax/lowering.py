"""The primitive as operations of XLA, which fuses, partitions and exports them.

On the CPU, where XLA ignores ``DotAlgorithmPreset``, operands are rounded and split here and multiplied in FP32. NVIDIA
GPUs use the mode's preset; operands of modes with one product are rounded here, float16 parts are split here. Complex
operands are split here on both, and multiplied in FP32.
"""

from __future__ import annotations

from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import reshard

from lowprec import formats
from lowprec.arrays import block_codes
from lowprec.formats import DType, dtype_from_name
from lowprec.jax.rounding import round_to, scaled, split, times_power_of_two
from lowprec.modes import ModeRow, Recipe, parse_mode, row, rules_of
from lowprec.planning.schedule import make_schedule
from lowprec.recipes import Rule

#: As for ``lax.dot_general``: the contracted axes of each operand, and the batch axes of each.
Dimensions = tuple[tuple[tuple[int, ...], tuple[int, ...]], tuple[tuple[int, ...], tuple[int, ...]]]

#: By the name of the format of 16-bit data.
_PRESETS_16_BIT = {"float16": "F16_F16_F32", "bfloat16": "BF16_BF16_F32"}


def free_axes(ndim: int, contracted: tuple[int, ...], batch: tuple[int, ...]) -> tuple[int, ...]:
    """Return an operand's free axes: neither contracted nor batch."""
    return tuple(axis for axis in range(ndim) if axis not in contracted and axis not in batch)


class Shape(NamedTuple):
    """The multiplied axes, and the sharding of the result, None for JAX's choice."""

    dimensions: Dimensions
    out_sharding: Any


def multiply(
    a: Any,
    b: Any,
    step: Any = None,
    *,
    dimensions: Dimensions,
    out_sharding: Any,
    mode: str,
    out_dtype: str,
    on_gpu: bool,
    **_: Any,
) -> Any:
    """Multiply by XLA's algorithms for NVIDIA GPUs, or by those for every platform.

    ``step``, an int32 array, is that of a recipe without one.
    """
    shape = Shape(dimensions, out_sharding)
    storage, parsed = dtype_from_name(str(a.dtype)), parse_mode(mode)
    scheme = row(parsed)
    if scheme.quantizes and scheme.acts(storage):
        draw, step = (parsed.draw, None if parsed.step else step) if isinstance(parsed, Recipe) else (0, None)
        rules = tuple(rule.drawn(draw, i) for i, rule in enumerate(rules_of(parsed)))
        return _quantized(a, b, step, shape, rules, on_gpu=on_gpu).astype(out_dtype)
    if storage is DType.INT8:
        return _dot(a, b, shape, None, "int32")
    if storage.bits == 16:
        preset = _PRESETS_16_BIT[storage.label]
        if not on_gpu:
            preset, a, b = "F32_F32_F32", a.astype(jnp.float32), b.astype(jnp.float32)
        return _dot(a, b, shape, preset, "float32").astype(out_dtype)
    if not storage.is_single_precision:
        return _dot(a, b, shape, None, storage.label)
    if scheme.widens:
        return _widened(a, b, shape, out_dtype)
    if scheme.operand_format is formats.FLOAT32:
        return _fp32(a, b, shape)
    if on_gpu and scheme.jax_preset and not storage.is_complex and scheme.data is not DType.FLOAT16:
        if scheme.parts == 1:
            a, b = round_to(a, scheme.operand_format), round_to(b, scheme.operand_format)
        return _dot(a, b, shape, scheme.jax_preset, storage.label)
    return _of_parts(a, b, shape, scheme, on_gpu=on_gpu)


def _dot(a: Any, b: Any, shape: Shape, preset: str | None, result: str) -> Any:
    return lax.dot_general(
        a,
        b,
        shape.dimensions,
        precision=lax.Precision.HIGHEST if preset is None else lax.DotAlgorithmPreset[preset],
        preferred_element_type=np.dtype(result),
        out_sharding=shape.out_sharding,
    )


def _fp32(a: Any, b: Any, shape: Shape) -> Any:
    # There are no presets for complex numbers.
    preset = None if jnp.iscomplexobj(a) else "F32_F32_F32"
    return _dot(a, b, shape, preset, str(a.dtype))


def _widened(a: Any, b: Any, shape: Shape, out_dtype: str) -> Any:
    with jax.enable_x64(True):
        wide = np.dtype(np.complex128 if jnp.iscomplexobj(a) else np.float64)
        a, b = (lax.convert_element_type(x, wide) for x in (a, b))
        return lax.convert_element_type(_dot(a, b, shape, None, wide.name), np.dtype(out_dtype))


def _quantized(a: Any, b: Any, step: Any, shape: Shape, rules: tuple[Rule, ...], *, on_gpu: bool) -> Any:
    """Round both operands, with the codes and scales of the CPU's kernels, and multiply the rounded numbers."""
    (summed_a, summed_b), (batch_a, batch_b) = shape.dimensions
    free_a, free_b = free_axes(a.ndim, summed_a, batch_a), free_axes(b.ndim, summed_b, batch_b)
    batch, rows, columns = ([x.shape[i] for i in axes] for x, axes in ((a, batch_a), (a, free_a), (b, free_b)))
    x, rows_scale, of_a = _rounded(a, (batch_a, free_a, summed_a), rules[0], step)
    y, columns_scale, of_b = _rounded(b, (batch_b, free_b, summed_b), rules[1], step)
    in_bfloat16 = on_gpu and x.dtype == y.dtype == jnp.bfloat16
    if not in_bfloat16:
        x, y = x.astype(jnp.float32), y.astype(jnp.float32)
    stacks = Shape((((2,), (2,)), ((0,), (0,))), None)
    out = _dot(x, y, stacks, "BF16_BF16_F32" if in_bfloat16 else "F32_F32_F32", "float32")
    if rows_scale is not None:
        out = out * rows_scale[:, :, None]
    if columns_scale is not None:
        out = out * columns_scale[:, None, :]
    scale = of_a * of_b
    out = jnp.where(jnp.isinf(scale), out * of_a * of_b, out * scale)  # sums of zero remain zero
    out = out.reshape(*batch, *rows, *columns)
    return out if shape.out_sharding is None else reshard(out, shape.out_sharding)


def _rounded(x: Any, axes: tuple[tuple[int, ...], ...], rule: Rule, step: Any) -> tuple[Any, Any, Any]:
    """Return an operand as matrices (batch, vector, k) of rounded numbers, with the scales of vectors and tensor."""
    extents = [prod(x.shape[i] for i in some) for some in axes]
    x = jnp.transpose(x, sum(axes, ())).reshape(extents)
    values, scales, scale = block_codes.rounded(x, -1, rule, jnp, step)
    if rule.block_scale == "float32":
        high, wide = rule.block
        each = jnp.repeat(jnp.repeat(jnp.moveaxis(scales, -1, -2), high, -2), wide, -1)
        return values.astype(jnp.float32) * each[:, : extents[1], : extents[2]], None, scale
    return values, scales, scale


def _of_parts(a: Any, b: Any, shape: Shape, scheme: ModeRow, *, on_gpu: bool) -> Any:
    total = _sum_of_parts(a, b, shape, scheme, on_gpu=on_gpu)
    if on_gpu or scheme.parts == 1:
        return total
    # An infinity has the parts Inf and NaN, so non-finite results are recomputed.
    finite = jnp.isfinite(total)
    return lax.cond(
        jnp.all(finite),
        lambda a, b, total, finite: total,
        lambda a, b, total, finite: jnp.where(finite, total, _fp32(a, b, shape)),
        *(a, b, total, finite),
    )


def _sum_of_parts(a: Any, b: Any, shape: Shape, scheme: ModeRow, *, on_gpu: bool) -> Any:
    summed, exponents = shape.dimensions[0], None
    fp16 = scheme.operand_format is formats.FLOAT16
    if fp16:
        (a, of_a), (b, of_b) = (scaled(x, axes) for x, axes in zip((a, b), summed, strict=True))
        exponents = _outer_sum(of_a, of_b, shape)
    narrow = fp16 and on_gpu and not jnp.iscomplexobj(a)

    def dot(x: Any, y: Any) -> Any:
        if not narrow:
            return _fp32(x, y, shape)
        x, y = x.astype(jnp.float16), y.astype(jnp.float16)  # exact
        return _dot(x, y, shape, "F16_F16_F32", "float32")

    parts_of_a, parts_of_b = split(a, scheme), split(b, scheme)
    total = None
    for product in make_schedule(scheme, (True, True), k=1):
        term = dot(parts_of_a[product.a_part], parts_of_b[product.b_part])
        if product.factor != 1:
            term = term * product.factor
        total = term if total is None else total + term
    return total if exponents is None else times_power_of_two(total, -exponents, 3)


def _outer_sum(of_a: Any, of_b: Any, shape: Shape) -> Any:
    (contract_a, contract_b), (batch_a, batch_b) = shape.dimensions
    free_a = free_axes(of_a.ndim, contract_a, batch_a)
    free_b = free_axes(of_b.ndim, contract_b, batch_b)
    batch, rows = ([of_a.shape[i] for i in axes] for axes in (batch_a, free_a))
    columns = [of_b.shape[i] for i in free_b]
    of_a = jnp.transpose(of_a, (*batch_a, *free_a, *contract_a))
    of_b = jnp.transpose(of_b, (*batch_b, *free_b, *contract_b))
    of_a = of_a.reshape(*batch, *rows, *(1 for _ in columns))
    sums = of_a + of_b.reshape(*batch, *(1 for _ in rows), *columns)
    return sums if shape.out_sharding is None else reshard(sums, shape.out_sharding)
