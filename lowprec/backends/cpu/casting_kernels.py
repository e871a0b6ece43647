"""Compiled kernels that cast stored numbers to float32 and round them as a mode requires.

They work on vectors of 16 numbers, which LLVM splits to the processor's width. The bits are those of
:func:`lowprec.backends.cpu.rounding.round_float32`. Importing this module imports numba.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from llvmlite import ir
from numba import njit, types
from numba.core import cgutils

from lowprec.backends.cpu import team
from lowprec.backends.cpu.packed.native import F32, I8, I16, I32, compiled, emitted, load, pointer, store
from lowprec.backends.cpu.packed.vector_arithmetic import (
    INFINITY,
    LANES,
    SIGN,
    bits_of,
    floats_of,
    magnitude_of,
    narrowed_bfloat16,
    nearest,
    rounded,
    splat,
    unless_nan,
    widened_bfloat16,
)
from lowprec.backends.cpu.scaling import FLOAT16_DIGITS

DIGITS = FLOAT16_DIGITS.name

#: Stored types and their roundings, by the names of `lowprec.formats` (and `scaling.FLOAT16_DIGITS`); None for no
#: rounding. The index of a kernel is its position here.
CASTS = (
    ("float32", "tf32"),
    ("float32", "bfloat16"),
    ("float32", "float16"),
    ("float32", DIGITS),
    ("float32", None),
    ("float16", None),
    ("float16", "bfloat16"),
    ("bfloat16", None),
    ("bfloat16", DIGITS),
    ("int8", None),
    ("float8_e4m3fn", None),
    ("float8_e5m2", None),
)

_8_BITS = ("int8", "float8_e4m3fn", "float8_e5m2")
ELEMENTS = {"float32": I32, "float16": I16, "bfloat16": I16, **dict.fromkeys(_8_BITS, I8)}
KINDS = {"float32": "u32", "float16": "u16", "bfloat16": "u16", **dict.fromkeys(_8_BITS, "i8")}


def item_bytes(index: int) -> int:
    """Return the bytes of a number that a kernel of `CASTS` reads."""
    return int(ELEMENTS[CASTS[index][0]].width) // 8


#: Offset in scratch memory of the extrema: 16 largest magnitudes, then 16 smallest ones minus 1.
_EXTREMA = 384


def float_splat(value: float) -> Any:
    """Return 16 times a number."""
    return ir.Constant(ir.VectorType(F32, LANES), [value] * LANES)


def _widened_float16(builder: Any, x: Any) -> Any:
    sign = builder.shl(builder.and_(x, splat(0x8000)), splat(16))
    magnitude = builder.and_(x, splat(0x7FFF))
    high = builder.shl(magnitude, splat(13))
    normal = builder.add(high, splat(112 << 23))  # the biases are 15 and 127
    special = builder.or_(high, splat(INFINITY))
    # A subnormal float16 is a multiple of 2^-24.
    units = builder.uitofp(magnitude, ir.VectorType(F32, LANES))
    subnormal = bits_of(builder, builder.fmul(units, float_splat(2.0**-24)))
    is_special = builder.icmp_unsigned(">=", magnitude, splat(0x7C00))
    is_subnormal = builder.icmp_unsigned("<", magnitude, splat(0x0400))
    chosen = builder.select(is_special, special, normal)
    return builder.or_(sign, builder.select(is_subnormal, subnormal, chosen))


def _widened_e4m3(builder: Any, x: Any) -> Any:
    sign, magnitude = builder.shl(builder.and_(x, splat(0x80)), splat(24)), builder.and_(x, splat(0x7F))
    normal = builder.add(builder.shl(magnitude, splat(20)), splat(120 << 23))  # the biases are 7 and 127
    units = builder.uitofp(magnitude, ir.VectorType(F32, LANES))
    subnormal = bits_of(builder, builder.fmul(units, float_splat(2.0**-9)))
    chosen = builder.select(builder.icmp_unsigned("<", magnitude, splat(8)), subnormal, normal)
    is_nan = builder.icmp_unsigned("==", magnitude, splat(0x7F))
    return builder.or_(sign, builder.select(is_nan, splat(0x7FC00000), chosen))


def _read(builder: Any, storage: str, address: Any) -> Any:
    x = builder.load(pointer(builder, address, ir.VectorType(ELEMENTS[storage], LANES)), align=1)
    if storage == "float8_e4m3fn":
        return _widened_e4m3(builder, builder.zext(x, ir.VectorType(I32, LANES)))
    if storage == "float8_e5m2":  # the high byte of a float16
        wide = builder.zext(x, ir.VectorType(I32, LANES))
        return _widened_float16(builder, builder.shl(wide, splat(8)))
    if storage == "int8":
        return bits_of(builder, builder.sitofp(x, ir.VectorType(F32, LANES)))
    if storage == "bfloat16":
        return widened_bfloat16(builder, x)
    if storage == "float16":
        return _widened_float16(builder, builder.zext(x, ir.VectorType(I32, LANES)))
    return x


def _rounded_float16(builder: Any, bits: Any) -> Any:
    sign = builder.and_(bits, splat(SIGN))
    magnitude = magnitude_of(builder, bits)
    normal = nearest(builder, magnitude, 13)
    overflows = builder.icmp_unsigned(">=", normal, splat(0x47800000))  # 65536
    normal = builder.select(overflows, splat(INFINITY), normal)
    # Below 2^-14 the spacing is 2^-24, that of float32 numbers from 0.5 on.
    half = float_splat(0.5)
    sum_ = builder.fadd(floats_of(builder, magnitude), half)
    subnormal = bits_of(builder, builder.fsub(sum_, half))
    is_subnormal = builder.icmp_unsigned("<", magnitude, splat(0x38800000))
    return builder.or_(sign, builder.select(is_subnormal, subnormal, normal))


def _rounded(builder: Any, rounding: str | None, bits: Any) -> Any:
    """Round 16 float32, given by their bits, to a format; None changes nothing."""
    if rounding is None:
        return bits
    if rounding == "float16":
        return unless_nan(builder, bits, _rounded_float16(builder, bits), bits)
    dropped = 16 if rounding == "bfloat16" else 13
    return rounded(builder, bits, dropped, ties_away=rounding == "tf32")


def cast_vector(builder: Any, index: int, address: Any, extrema: Extrema) -> Any:
    """Cast 16 contiguous numbers, and update the extrema if they are needed."""
    storage, rounding = CASTS[index]
    bits = _read(builder, storage, address)
    if rounding == DIGITS:
        extrema.update(bits)
    return _rounded(builder, rounding, bits)


class Extrema:
    """The largest and smallest nonzero magnitudes in a loop, in scratch memory.

    Magnitudes are compared by their bits. 1 is subtracted from candidates for the smallest: zero wraps around to the
    largest integer and so is ignored.
    """

    def __init__(self, builder: Any, index: int, scratch: Any) -> None:
        self.builder, self.found = builder, []
        if CASTS[index][1] != DIGITS:
            return
        vector = ir.VectorType(I32, LANES)
        for offset in (0, 64):
            place = builder.add(scratch, scratch.type(_EXTREMA + offset))
            at, local = pointer(builder, place, vector), cgutils.alloca_once(builder, vector)
            builder.store(builder.load(at, align=1), local)
            self.found.append((at, local))

    def update(self, bits: Any) -> None:
        """Update the extrema with 16 numbers, given by their bits."""
        builder = self.builder
        magnitude = magnitude_of(builder, bits)
        less = builder.sub(magnitude, splat(1))
        for (_, local), x, order in zip(self.found, (magnitude, less), "><", strict=True):
            before = builder.load(local)
            beyond = builder.icmp_unsigned(order, x, before)
            builder.store(builder.select(beyond, x, before), local)

    def write(self) -> None:
        """Store the extrema."""
        for at, local in self.found:
            self.builder.store(self.builder.load(local), at, align=1)


@njit(inline="always")
def clear_extrema(scratch):
    """Reset the extrema."""
    for i in range(_EXTREMA, _EXTREMA + 64, 8):
        store(scratch + i, 0, "i64")
        store(scratch + 64 + i, -1, "i64")


@njit(inline="always")
def clear_run(scratch):
    """Write zeros, which do not change extrema, after the last numbers of a row."""
    for i in range(0, 64, 8):
        store(scratch + i, 0, "i64")


@emitted(types.intp)
def extrema_in(builder, scratch):
    """Return the bits of the largest magnitude times 2^32, plus those of the smallest nonzero one minus 1."""
    vector, word = ir.VectorType(I32, LANES), scratch.type
    found = []
    for offset, name in ((0, "umax"), (64, "umin")):
        at = pointer(builder, builder.add(scratch, word(_EXTREMA + offset)), vector)
        function = cgutils.get_or_insert_function(
            builder.module, ir.FunctionType(I32, [vector]), f"llvm.vector.reduce.{name}.v{LANES}i32"
        )
        one = builder.call(function, [builder.load(at, align=1)])
        found.append(builder.zext(one, word))
    return builder.or_(builder.shl(found[0], word(32)), found[1])


@emitted(literals=("index", "count", "writes"))
def _cast_runs(builder, index, count, writes, source, target, steps, scratch):
    """Cast contiguous numbers, ``count`` times 16 per step; without ``writes``, only find the extrema."""
    word, item, extrema = source.type, item_bytes(index), Extrema(builder, index, scratch)
    with cgutils.for_range(builder, steps, intp=word) as loop:
        first = builder.mul(loop.index, word(LANES * count))
        for i in range(count):
            at = builder.add(first, word(LANES * i))
            from_ = builder.add(source, builder.mul(at, word(item)))
            bits = cast_vector(builder, index, from_, extrema)
            if writes:
                to = builder.add(target, builder.mul(at, word(4)))
                builder.store(bits, pointer(builder, to, bits.type), align=1)
    extrema.write()


def _cast_function(index: int, writes: int = 1) -> Any:
    storage, rounding = CASTS[index]
    kind, item, is_scaled = KINDS[storage], item_bytes(index), rounding == DIGITS

    def cast(source, row_stride, col_stride, rows, cols, target, scratch):
        if is_scaled:
            clear_extrema(scratch)
        for row in range(rows):
            from_, to = source + row * row_stride, target + row * cols * 4
            first = 0
            if col_stride == item:
                longs, first = cols // 64, cols - cols % 16
                at = longs * 64
                _cast_runs(index, 4, writes, from_, to, longs, scratch)
                rest = (first - at) // 16
                _cast_runs(index, 1, writes, from_ + at * item, to + at * 4, rest, scratch)
            for col in range(first, cols, 16):
                count = min(16, cols - col)
                clear_run(scratch)
                for i in range(count):
                    store(scratch + i * item, load(from_ + (col + i) * col_stride, kind), kind)
                _cast_runs(index, 1, writes, scratch, scratch + 64, 1, scratch)
                for i in range(count * writes):
                    store(to + (col + i) * 4, load(scratch + 64 + i * 4, "u32"), "u32")
        return extrema_in(scratch) if is_scaled else 0

    return cast


@cache
def cast_kernel(index: int) -> Any:
    """Return the kernel of one of `CASTS`, a function of seven integers.

    They are address, row stride and column stride of a matrix, in bytes; its rows and columns; the address of a
    contiguous row-major float32 matrix; the address of 512 bytes of scratch memory. It returns the extrema if it rounds
    to float16's digits, otherwise 0.
    """
    return compiled(_cast_function(index))


@cache
def extrema_address() -> int:
    """Return the address of :func:`extrema_kernel`."""
    return team.address_of(extrema_kernel())


@cache
def extrema_kernel() -> Any:
    """Return the kernel that finds the extrema of float32 numbers, with the arguments of a casting kernel."""
    return compiled(_cast_function(CASTS.index(("float32", DIGITS)), 0))


def _narrowed_float16(builder: Any, bits: Any) -> Any:
    """Round to 16 float16, ties to even."""
    magnitude = magnitude_of(builder, bits)
    normal = builder.lshr(nearest(builder, magnitude, 13), splat(13))
    normal = builder.sub(normal, splat(112 << 10))
    overflows = builder.icmp_unsigned(">=", normal, splat(0x7C00))
    normal = builder.select(overflows, splat(0x7C00), normal)
    half = float_splat(0.5)
    units = bits_of(builder, builder.fadd(floats_of(builder, magnitude), half))
    subnormal = builder.sub(units, splat(0x3F000000))  # the bits of 0.5
    is_subnormal = builder.icmp_unsigned("<", magnitude, splat(0x38800000))
    result = builder.select(is_subnormal, subnormal, normal)
    is_nan = builder.icmp_unsigned(">", magnitude, splat(INFINITY))
    result = builder.select(is_nan, splat(0x7E00), result)
    sign = builder.lshr(builder.and_(bits, splat(SIGN)), splat(16))
    return builder.trunc(builder.or_(sign, result), ir.VectorType(I16, LANES))


@emitted(literals=("is_float16",))
def _narrow_run(builder, is_float16, source, target):
    narrowed = _narrowed_float16 if is_float16 else narrowed_bfloat16
    row = narrowed(builder, _read(builder, "float32", source))
    builder.store(row, pointer(builder, target, row.type), align=1)


def _narrow_function(is_float16: int) -> Any:
    def narrow(target, row_stride, col_stride, rows, cols, source, scratch):
        for row in range(rows):
            from_, to = source + row * cols * 4, target + row * row_stride
            first = 0
            if col_stride == 2:
                first = cols - cols % 16
                for col in range(0, first, 16):
                    _narrow_run(is_float16, from_ + col * 4, to + col * 2)
            for col in range(first, cols, 16):
                count = min(16, cols - col)
                for i in range(count):
                    store(scratch + i * 4, load(from_ + (col + i) * 4, "u32"), "u32")
                _narrow_run(is_float16, scratch, scratch + 64)
                for i in range(count):
                    store(to + (col + i) * col_stride, load(scratch + 64 + i * 2, "u16"), "u16")
        return 0

    return narrow


@cache
def narrow_kernel(dtype: str) -> Any:
    """Return the kernel that rounds to ``"float16"`` or ``"bfloat16"``, a function of seven integers.

    They are those of :func:`cast_kernel` with the two matrices exchanged: the strided one is the result.
    """
    return compiled(_narrow_function(int(dtype == "float16")))
