"""The primitive as operations of XLA, which fuses, partitions and exports them.

On the CPU, where XLA ignores ``DotAlgorithmPreset``, operands are rounded and split here and multiplied in FP32. NVIDIA
GPUs use the mode's preset; operands of modes with one product are rounded here, float16 parts are split here. Complex
operands are split here on both, and multiplied in FP32.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable
from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import reshard

from lowprec import formats
from lowprec.arrays import block_codes
from lowprec.arrays.block_layout import padded
from lowprec.arrays.narrow_numbers import rounded_sum
from lowprec.formats import DType, dtype_from_name
from lowprec.jax.rounding import round_to, scaled, split, times_power_of_two
from lowprec.modes import Mode, ModeRow, Recipe, parse_mode, row, rules_of
from lowprec.planning.kernels import BLOCKS_CHUNK
from lowprec.planning.schedule import chunk_length, make_schedule
from lowprec.recipes import Rule

#: As for ``lax.dot_general``: the contracted axes of each operand, and the batch axes of each.
Axes = tuple[int, ...]
Dimensions = tuple[tuple[Axes, Axes], tuple[Axes, Axes]]

#: By the name of the format of 16-bit data.
_PRESETS_16_BIT = {"float16": "F16_F16_F32", "bfloat16": "BF16_BF16_F32"}


class OperandAxes(NamedTuple):
    """The axes of one operand: those of both operands, its own ones, and the contracted ones."""

    batch: Axes
    free: Axes
    summed: Axes


def axes_of(x: Any, dimensions: Dimensions, number: int) -> OperandAxes:
    """Return the axes of the first (0) or second (1) operand of a product."""
    summed = dimensions[0][number]
    batch = dimensions[1][number]
    free = tuple(axis for axis in range(x.ndim) if axis not in summed and axis not in batch)
    return OperandAxes(batch, free, summed)


class Contraction(NamedTuple):
    """The multiplied axes, and the sharding of the result, None for JAX's choice."""

    dimensions: Dimensions
    out_sharding: Any

    def product(self, a: Any, b: Any, preset: str | None, result: str) -> Any:
        """Multiply by a preset, or in full FP32 or FP64; the result's element type is given by its name."""
        return lax.dot_general(
            a,
            b,
            self.dimensions,
            precision=lax.DotAlgorithmPreset[preset] if preset else lax.Precision.HIGHEST,
            preferred_element_type=np.dtype(result),
            out_sharding=self.out_sharding,
        )


class GeneralConvolution(NamedTuple):
    """A convolution by the parameters of ``lax.conv_general_dilated``."""

    params: dict[str, Any]

    def product(self, a: Any, b: Any, preset: str | None, result: str) -> Any:
        """Convolve in full FP32 or FP64: the presets are those of contractions."""
        full = {"precision": lax.Precision.HIGHEST, "preferred_element_type": np.dtype(result)}
        return lax.conv_general_dilated(a, b, **(self.params | full))


#: The operations on rounded operands.
Bilinear = Contraction | GeneralConvolution


def multiply(
    a: Any, b: Any, step: Any = None, *, dimensions: Dimensions, out_sharding: Any, **options: Any
) -> Any:
    """Multiply two arrays along axes as for ``lax.dot_general``, as :func:`computed` describes."""
    return computed(a, b, step, Contraction(dimensions, out_sharding), **options)


def computed(
    a: Any,
    b: Any,
    step: Any,
    operation: Bilinear,
    *,
    mode: str,
    out_dtype: str,
    on_gpu: bool,
    **_: Any,
) -> Any:
    """Multiply by XLA's algorithms for NVIDIA GPUs, or by those for every platform.

    ``step``, an int32 array, is that of a recipe without one. A :class:`GeneralConvolution` has a mode that rounds each
    number for itself: not one of :func:`rounds_vectors`.
    """
    storage = dtype_from_name(str(a.dtype))
    parsed = parse_mode(mode)
    scheme = row(parsed)
    if scheme.quantizes and scheme.acts(storage):
        assert isinstance(operation, Contraction)
        return _quantized(a, b, step, operation, parsed, on_gpu=on_gpu).astype(out_dtype)
    if storage is DType.INT8:
        return operation.product(a, b, None, "int32")
    if storage.bits == 16 and on_gpu:
        return operation.product(a, b, _PRESETS_16_BIT[storage.label], "float32").astype(out_dtype)
    if storage.bits == 16:
        return _fp32(a.astype(jnp.float32), b.astype(jnp.float32), operation).astype(out_dtype)
    if not storage.is_single_precision:
        return operation.product(a, b, None, storage.label)
    if scheme.widens:
        return _widened(a, b, operation, out_dtype)
    if scheme.operand_format is formats.FLOAT32:
        return _fp32(a, b, operation)
    if on_gpu and scheme.jax_preset and not storage.is_complex and scheme.data is not DType.FLOAT16:
        if scheme.parts == 1:
            a = round_to(a, scheme.operand_format)
            b = round_to(b, scheme.operand_format)
        return operation.product(a, b, scheme.jax_preset, storage.label)
    return _of_parts(a, b, operation, scheme, on_gpu=on_gpu)


def rounds_vectors(mode: Mode) -> bool:
    """Whether the rounding of a number depends on the others with which it is summed."""
    scheme = row(mode)
    return scheme.quantizes or scheme.operand_format is formats.FLOAT16


def _fp32(a: Any, b: Any, operation: Bilinear) -> Any:
    # There are no presets for complex numbers.
    preset = None if jnp.iscomplexobj(a) else "F32_F32_F32"
    return operation.product(a, b, preset, str(a.dtype))


def _widened(a: Any, b: Any, operation: Bilinear, out_dtype: str) -> Any:
    with jax.enable_x64(True):
        wide = np.dtype(np.complex128 if jnp.iscomplexobj(a) else np.float64)
        product = operation.product(
            lax.convert_element_type(a, wide), lax.convert_element_type(b, wide), None, wide.name
        )
        return lax.convert_element_type(product, np.dtype(out_dtype))


def _quantized(
    a: Any, b: Any, step: Any, contraction: Contraction, mode: Mode, *, on_gpu: bool
) -> Any:
    """Round both operands, with the codes and scales of the CPU's kernels, and multiply the rounded numbers."""
    draw = 0
    if not isinstance(mode, Recipe):
        step = None
    else:
        draw = mode.draw
        if mode.step:
            step = None
    of_a = axes_of(a, contraction.dimensions, 0)
    of_b = axes_of(b, contraction.dimensions, 1)
    rules = rules_of(mode)
    x, scales_x, scale_x = _rounded(a, of_a, rules[0] and rules[0].drawn(draw, 0), step)
    y, scales_y, scale_y = _rounded(b, of_b, rules[1] and rules[1].drawn(draw, 1), step)
    along_k = [x for x in rules if x and x.block_scale == "float32" and not x.across]
    if along_k and x.shape[-1]:
        length = max(rule.block[1] for rule in along_k)
        in_integers = all(rule and rule.codes in ("int8_blocks", "mxfp4") for rule in rules)
        add = _add_integers if in_integers else functools.partial(_add_scaled, on_gpu)
        chunk = BLOCKS_CHUNK if in_integers else x.shape[-1]
        out = _in_pieces((x, y), (scales_x, scales_y), length, chunk, add)
    else:
        out = _scaled_product(x, y, scales_x, scales_y, on_gpu=on_gpu)
    scale = scale_x * scale_y
    # sums of zero remain zero
    out = jnp.where(jnp.isinf(scale), out * scale_x * scale_y, out * scale)
    out = out.reshape(*_extents(a, of_a.batch), *_extents(a, of_a.free), *_extents(b, of_b.free))
    return _sharded(out, contraction)


def _scaled_product(x: Any, y: Any, scales_x: Any, scales_y: Any, *, on_gpu: bool) -> Any:
    """Return the products of matrices (batch, vector, k), times the scales (batch, vector) of both, None for none."""
    stacks = Contraction((((2,), (2,)), ((0,), (0,))), None)
    if on_gpu and x.dtype == y.dtype == jnp.bfloat16:
        out = stacks.product(x, y, "BF16_BF16_F32", "float32")
    else:
        out = _fp32(x.astype(jnp.float32), y.astype(jnp.float32), stacks)
    if scales_x is not None and scales_y is not None:
        rows = scales_x[:, :, None]
        columns = scales_y[:, None, :]
        both = rows * columns
        # `where` also keeps XLA from fusing this product with an addition.
        return jnp.where(jnp.isinf(both), out * rows * columns, out * both)
    if scales_x is not None:
        return out * scales_x[:, :, None]
    if scales_y is not None:
        return out * scales_y[:, None, :]
    return out


def _add_scaled(on_gpu: bool, total: Any, operands: tuple[Any, ...]) -> Any:
    return total + _scaled_product(*operands, on_gpu=on_gpu)


def _add_integers(total: Any, operands: tuple[Any, ...]) -> Any:
    """Return ``fma(I * scale of b, scale of a, total)`` with the exact sums I, as the kernels do."""
    x, y, scales_x, scales_y = operands
    sums = _scaled_product(x, y, None, scales_y, on_gpu=False)
    with jax.enable_x64(True):
        wide = lax.convert_element_type(sums, np.float64)
        if scales_x is not None:
            wide = wide * lax.convert_element_type(scales_x[:, :, None], np.float64)
        return rounded_sum(wide, jnp.asarray(total), jnp)


def _in_pieces(
    values: Any, scales: Any, length: int, chunk: int, add: Callable[[Any, tuple[Any, ...]], Any]
) -> Any:
    """Return the sum over pieces of k of products with the scales of the piece, (batch, vector, piece), in order.

    The sums of chunks of k are added.
    """

    def pieces(values: Any) -> Any:
        values = padded(values, 2, length, jnp)
        values = values.reshape(*values.shape[:2], -1, length)
        return jnp.moveaxis(values, 2, 0)

    scales = [x if x is None else jnp.moveaxis(x, 2, 0) for x in scales]
    operands = (*map(pieces, values), *scales)
    at_once = -(-chunk_length(values[0].shape[-1], chunk) // length)
    sums = []
    for start in range(0, len(operands[0]), at_once):
        first, rest = (
            jax.tree.map(operator.itemgetter(part), operands)
            for part in (start, slice(start + 1, start + at_once))
        )
        total = add(0.0, first)
        if len(rest[0]):
            total, _ = lax.scan(lambda *x: (add(*x), None), total, rest)
        sums.append(total)
    return functools.reduce(operator.add, sums)


def _extents(x: Any, axes: Iterable[int]) -> list[int]:
    return [x.shape[axis] for axis in axes]


def _sharded(out: Any, contraction: Contraction) -> Any:
    if contraction.out_sharding is None:
        return out
    return reshard(out, contraction.out_sharding)


def _rounded(x: Any, axes: OperandAxes, rule: Rule | None, step: Any) -> tuple[Any, Any, Any]:
    """Return an operand as matrices (batch, vector, k) of rounded numbers, with the scales of vectors and tensor.

    Float32 scales of blocks have the shape (batch, vector, blocks along k). The operand is rounded with its axes in the
    order of the array, on which blocks of vectors and random numbers depend.
    """
    extents = [prod(_extents(x, each)) for each in axes]
    if rule is None or rule.across:
        if rule is not None:
            x = _rounded_across(x, axes, rule, step)
        x = jnp.transpose(x, sum(axes, ()))
        return x.reshape(extents).astype(jnp.float32), None, jnp.float32(1)
    kept = sorted(axes.batch + axes.free)
    order = [kept.index(axis) for axis in axes.batch + axes.free]
    k = extents[-1]
    x = jnp.transpose(x, (*kept, *axes.summed)).reshape(*(_extents(x, kept) or [1]), k)
    values, scales, scale = block_codes.rounded(x, -1, rule, jnp, step)
    if rule.block_scale == "float32" and not k:
        scales = None
    elif rule.block_scale == "float32":
        scales = jnp.moveaxis(scales, -1, -2)
        scales = jnp.repeat(scales, rule.block[0], -2)[..., : x.shape[-2], :]
        scales = jnp.transpose(
            scales.reshape(*x.shape[: len(kept)], -1), (*order, len(kept))
        ).reshape(*extents[:2], -1)
    elif scales is not None:
        scales = jnp.transpose(scales.reshape(x.shape[: len(kept)]), order).reshape(extents[:2])
    if kept:
        values = jnp.transpose(values, (*order, len(order)))
    return values.reshape(extents), scales, scale


def _rounded_across(x: Any, axes: OperandAxes, rule: Rule, step: Any) -> Any:
    """Return the numbers of an operand of a forward product, which sums over the free axes."""
    order = (*sorted(axes.batch + axes.summed), *axes.free)
    in_order = jnp.transpose(x, order)
    vectors = _extents(in_order, range(x.ndim - len(axes.free))) or [1]
    numbers = in_order.reshape(*vectors, prod(_extents(x, axes.free)))
    numbers = block_codes.rounded_numbers(numbers, -1, rule, jnp, step)
    return jnp.transpose(
        numbers.reshape(in_order.shape), sorted(range(x.ndim), key=order.__getitem__)
    )


def _of_parts(a: Any, b: Any, operation: Bilinear, scheme: ModeRow, *, on_gpu: bool) -> Any:
    total = _sum_of_parts(a, b, operation, scheme, on_gpu=on_gpu)
    if on_gpu or scheme.parts == 1:
        return total
    # An infinity has the parts Inf and NaN, so non-finite results are recomputed.
    finite = jnp.isfinite(total)
    return lax.cond(
        jnp.all(finite), lambda: total, lambda: jnp.where(finite, total, _fp32(a, b, operation))
    )


def _sum_of_parts(a: Any, b: Any, operation: Bilinear, scheme: ModeRow, *, on_gpu: bool) -> Any:
    exponents = None
    is_fp16 = scheme.operand_format is formats.FLOAT16
    if is_fp16:
        assert isinstance(operation, Contraction)
        summed_a, summed_b = operation.dimensions[0]
        a, of_a = scaled(a, summed_a)
        b, of_b = scaled(b, summed_b)
        exponents = _outer_sum(of_a, of_b, operation)
    is_narrow = is_fp16 and on_gpu and not jnp.iscomplexobj(a)
    parts_of_a = split(a, scheme)
    parts_of_b = split(b, scheme)
    total: Any = None
    for product in make_schedule(scheme, (True, True), k=1):
        x = parts_of_a[product.a_part]
        y = parts_of_b[product.b_part]
        if is_narrow:  # exact
            term = operation.product(
                x.astype(jnp.float16), y.astype(jnp.float16), "F16_F16_F32", "float32"
            )
        else:
            term = _fp32(x, y, operation)
        if product.factor != 1:
            term = term * product.factor
        total = term if total is None else total + term
    if exponents is None:
        return total
    return times_power_of_two(total, -exponents, 3)


def _outer_sum(a: Any, b: Any, contraction: Contraction) -> Any:
    """Return the sum of numbers of both operands' vectors, shared along the contracted axes, for each element."""
    of_a = axes_of(a, contraction.dimensions, 0)
    of_b = axes_of(b, contraction.dimensions, 1)
    batch = _extents(a, of_a.batch)
    rows = _extents(a, of_a.free)
    columns = _extents(b, of_b.free)
    a = jnp.transpose(a, sum(of_a, ()))
    b = jnp.transpose(b, sum(of_b, ()))
    a = a.reshape(*batch, *rows, *[1] * len(columns))
    b = b.reshape(*batch, *[1] * len(rows), *columns)
    return _sharded(a + b, contraction)
