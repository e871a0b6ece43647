"""Blocks of small products: 8 rows by 16 or 32 columns, multiplied, and written with their epilogue.

Importing this module imports numba.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from lowprec.backends.cpu import casting_kernels, direct_gelu
from lowprec.backends.cpu import direct_job as D
from lowprec.backends.cpu.packed import native
from lowprec.backends.cpu.packed.native import F32, F64, I32, I64, pointer, shuffle

_ROWS, LANES = 8, 16
FLOATS = {4: F32, 8: F64}


def splat(builder: Any, value: Any) -> Any:
    """Return 16 times a number."""
    vector = ir.VectorType(value.type, LANES)
    first = builder.insert_element(ir.Constant(vector, ir.Undefined), value, I32(0))
    return shuffle(builder, first, first, [0] * LANES)


def _store_masked(builder: Any, value: Any, at: Any, mask: Any) -> None:
    kind = ir.FunctionType(ir.VoidType(), [value.type, at.type, I32, mask.type])
    lanes = f"v{LANES}{'f32' if value.type.element == F32 else 'f64'}"
    function = cgutils.get_or_insert_function(
        builder.module, kind, f"llvm.masked.store.{lanes}.p0{lanes}"
    )
    builder.call(function, [value, at, I32(1), mask])


@intrinsic(prefer_literal=True)
def multiply_block(
    typing_context,
    item, vectors, a, last_row, row_step, k_step, b, b_step, k, target, target_step, columns,
):  # fmt: skip
    """Write 8 rows of A by ``vectors`` times 16 columns of B; no columns from ``columns`` on.

    Beyond `last_row` that row is repeated.
    """
    bytes_, count = item.literal_value, vectors.literal_value
    element = FLOATS[bytes_]

    def generate(context, builder, signature, args):
        _, _, a, last_row, row_step, k_step, b, b_step, k, target, target_step, columns = args
        vector, word = ir.VectorType(element, LANES), a.type
        size = LANES * bytes_

        def vector_at(address: Any, number: int) -> Any:
            return pointer(builder, builder.add(address, word(size * number)), vector)

        rows, targets, sums = [], [], []
        for i in range(_ROWS):
            beyond = builder.icmp_signed(">", word(i), last_row)
            row = builder.select(beyond, last_row, word(i))
            rows.append(builder.add(a, builder.mul(row, row_step)))
            targets.append(builder.add(target, builder.mul(row, target_step)))
            sums.append([cgutils.alloca_once(builder, vector) for _ in range(count)])
            for total in sums[-1]:
                builder.store(ir.Constant(vector, [0.0] * LANES), total)
        with cgutils.for_range(builder, k, intp=word) as loop:
            from_ = builder.add(b, builder.mul(loop.index, b_step))
            right = [builder.load(vector_at(from_, j), align=1) for j in range(count)]
            # Opaque, or LLVM keeps a pointer to each row of two steps, which are too many for the registers.
            step = native.inline_asm(builder, "", "=r,0", word, [builder.mul(loop.index, k_step)])
            for row, totals in zip(rows, sums, strict=True):
                at = pointer(builder, builder.add(row, step), element)
                left = splat(builder, builder.load(at, align=1))
                for total, factor in zip(totals, right, strict=True):
                    product = builder.fmul(left, factor)
                    builder.store(builder.fadd(builder.load(total), product), total)
        for j in range(count):
            found = [
                (builder.load(totals[j]), vector_at(at, j))
                for totals, at in zip(sums, targets, strict=True)
            ]
            is_whole = builder.icmp_signed(">=", columns, word(LANES * (j + 1)))
            with builder.if_else(is_whole, likely=True) as (whole, part):
                with whole:
                    for total, at in found:
                        builder.store(total, at, align=1)
                with part:
                    lanes = native.vector(I64, range(LANES * j, LANES * (j + 1)))
                    mask = builder.icmp_signed("<", lanes, splat(builder, columns))
                    for total, at in found:
                        _store_masked(builder, total, at, mask)
        return context.get_dummy_value()

    return types.void(item, vectors, *[types.intp] * 10), generate


class _Vector:
    """16 float32 in the code that is being made, for formulas."""

    def __init__(self, builder: Any, value: Any) -> None:
        self.builder, self.value = builder, value

    def __add__(self, other: _Vector) -> _Vector:
        return _Vector(self.builder, self.builder.fadd(self.value, other.value))

    def __sub__(self, other: _Vector) -> _Vector:
        return _Vector(self.builder, self.builder.fsub(self.value, other.value))

    def __mul__(self, other: _Vector) -> _Vector:
        return _Vector(self.builder, self.builder.fmul(self.value, other.value))

    def __truediv__(self, other: _Vector) -> _Vector:
        return _Vector(self.builder, self.builder.fdiv(self.value, other.value))

    def __lt__(self, other: _Vector) -> Any:
        return self.builder.fcmp_ordered("<", self.value, other.value)

    def __gt__(self, other: _Vector) -> Any:
        return self.builder.fcmp_ordered(">", self.value, other.value)


def _gelu(builder: Any, value: Any) -> Any:
    floats, bits = ir.VectorType(F32, LANES), ir.VectorType(I32, LANES)

    def number(x: float) -> _Vector:
        return _Vector(builder, ir.Constant(floats, [float(np.float32(x))] * LANES))

    def where(condition: Any, then: _Vector, otherwise: _Vector) -> _Vector:
        return _Vector(builder, builder.select(condition, then.value, otherwise.value))

    def power_of_two(shifted: _Vector) -> _Vector:
        magic = int(np.float32(direct_gelu.MAGIC).view(np.int32))
        biased = native.vector(I32, [127 - magic] * LANES)
        n = builder.add(builder.bitcast(shifted.value, bits), biased)
        n = builder.shl(n, native.vector(I32, [23] * LANES))
        return _Vector(builder, builder.bitcast(n, floats))

    operations = direct_gelu.Operations(number, where, power_of_two)
    result: _Vector = direct_gelu.gelu(_Vector(builder, value), operations)
    return result.value


def _rounded_to_odd(builder: Any, wide: Any) -> Any:
    """16 float64 as float32, the last bit set where something was cut: rounding them again then rounds once."""
    bits = ir.VectorType(I32, LANES)
    nearest = builder.fptrunc(wide, ir.VectorType(F32, LANES))
    back = builder.fpext(nearest, wide.type)
    longs = ir.VectorType(I64, LANES)
    magnitudes = [
        builder.and_(builder.bitcast(x, longs), native.vector(I64, [(1 << 63) - 1] * LANES))
        for x in (back, wide)
    ]
    # Of finite numbers the larger has the larger bits; those of an infinity tell that nothing is to be done.
    infinity = native.vector(I64, [0x7FF << 52] * LANES)
    finite = builder.icmp_unsigned("<", magnitudes[1], infinity)
    inexact = builder.and_(builder.fcmp_ordered("!=", back, wide), finite)
    beyond = builder.and_(builder.icmp_unsigned(">", *magnitudes), inexact)
    found = builder.sub(builder.bitcast(nearest, bits), builder.zext(beyond, bits))
    return builder.or_(found, builder.zext(inexact, bits))


def _stored(builder: Any, value: Any, dtype: str) -> Any:
    """16 numbers as they are stored."""
    is_wide = value.type.element == F64
    floats, bits = ir.VectorType(F32, LANES), ir.VectorType(I32, LANES)
    if dtype in ("float16", "bfloat16"):
        words = _rounded_to_odd(builder, value) if is_wide else builder.bitcast(value, bits)
        return casting_kernels.narrowed(builder, words, is_float16=dtype == "float16")
    if dtype == "int32":  # of int8 operands, whose sums are whole numbers
        return builder.fptosi(value, bits)
    return builder.fptrunc(value, floats) if is_wide and dtype == "float32" else value


@intrinsic(prefer_literal=True)
def finish_row(typing_context, item, kind, block, factors, c, bias, activation, target):
    """Apply the epilogue to 16 numbers and write them, in the result's type; no `c` or `bias` where that is 0."""
    element, dtype = FLOATS[item.literal_value], D.OUT_DTYPES[kind.literal_value]

    def generate(context, builder, signature, args):
        _, _, block, factors, c, bias, activation, target = args
        vector, word = ir.VectorType(element, LANES), block.type

        def factor(index: int) -> Any:
            at = builder.add(factors, word(8 * index))
            number = builder.load(pointer(builder, at, F64), align=1)
            return splat(builder, number if element == F64 else builder.fptrunc(number, F32))

        def vector_at(address: Any) -> Any:
            return builder.load(pointer(builder, address, vector), align=1)

        value = cgutils.alloca_once(builder, vector)
        builder.store(builder.fmul(vector_at(block), factor(0)), value)
        with builder.if_then(builder.icmp_signed("!=", c, word(0))):
            addend = builder.fmul(vector_at(c), factor(1))
            builder.store(builder.fadd(builder.load(value), addend), value)
        with builder.if_then(builder.icmp_signed("!=", bias, word(0))):
            builder.store(builder.fadd(builder.load(value), vector_at(bias)), value)
        with builder.if_then(builder.icmp_signed("==", activation, word(D.RELU))):
            found, zero = builder.load(value), ir.Constant(vector, [0.0] * LANES)
            # Written so that a NaN passes.
            below = builder.fcmp_ordered("<", found, zero)
            builder.store(builder.select(below, zero, found), value)
        if element == F32:
            with builder.if_then(builder.icmp_signed("==", activation, word(D.GELU))):
                builder.store(_gelu(builder, builder.load(value)), value)
        result = _stored(builder, builder.load(value), dtype)
        builder.store(result, pointer(builder, target, result.type), align=1)
        return context.get_dummy_value()

    return types.void(item, kind, *[types.intp] * 6), generate
