"""Native kernels for small products of parts: split as they are read, multiplied and summed as the schedule says.

Each product of parts has sums of its own, in the order of k, where every product of two numbers is rounded and added.
They are added to those of the products of parts before it: NumPy's multiplications and additions give the same bits. An
element that is not finite is computed again, from the operands as they are.

Importing this module imports numba.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from llvmlite import ir
from numba import njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from lowprec.backends.cpu import casting_kernels
from lowprec.backends.cpu import direct_job as D
from lowprec.backends.cpu.cpuinfo import has_fma
from lowprec.backends.cpu.direct_blocks import LANES, multiply_block, splat
from lowprec.backends.cpu.direct_kernels import (
    PRODUCT_ARITY,
    WORDS,
    cast,
    cast_addends,
    scale,
    unscale,
    write_block,
)
from lowprec.backends.cpu.packed import native
from lowprec.backends.cpu.packed.native import (
    F32,
    F64,
    I32,
    I64,
    call,
    compile_kernel,
    field,
    load,
    pointer,
    store,
)

#: Formats of parts, by the number that the kernels know them by.
FORMATS = ("bfloat16", "tf32", "float16")

_SPLIT_ARITY = 7

#: Where behind a block the sum of a product is, beyond what `write_block` needs.
_TERM = 1024


# --- splitting --------------------------------------------------------------------------------


@intrinsic(prefer_literal=True)
def _split_runs(typing_context, fmt, source, target, step, parts, vectors, exponent, has_sum):
    """Write the parts of float32 numbers in sequence, `step` bytes apart, and the sum of the first two behind them."""
    name = FORMATS[fmt.literal_value]

    def generate(context, builder, signature, args):
        _, source, target, step, parts, vectors, exponent, has_sum = args
        floats, word = ir.VectorType(F32, LANES), source.type
        bits = ir.VectorType(I32, LANES)
        rest = cgutils.alloca_once(builder, floats)
        power = builder.shl(builder.add(builder.trunc(exponent, I32), I32(127)), I32(23))
        factors = splat(builder, builder.bitcast(power, F32))

        def round_to(value: Any, address: Any) -> Any:
            part = casting_kernels.rounded(builder, name, builder.bitcast(value, bits))
            builder.store(part, pointer(builder, address, bits), align=1)
            return builder.bitcast(part, floats)

        with cgutils.for_range(builder, vectors, intp=word) as loop:
            at = builder.mul(loop.index, word(4 * LANES))
            first = builder.add(target, at)
            numbers = pointer(builder, builder.add(source, at), floats)
            builder.store(builder.load(numbers, align=1), rest)
            with cgutils.for_range(builder, parts, intp=word) as inner:
                number = builder.load(rest)
                to = builder.add(first, builder.mul(inner.index, step))
                left = builder.fsub(number, round_to(number, to))
                builder.store(builder.fmul(left, factors), rest)
            with builder.if_then(builder.icmp_signed("!=", has_sum, word(0))):
                second = builder.add(first, step)
                high, low = (
                    builder.load(pointer(builder, x, floats), align=1) for x in (first, second)
                )
                round_to(builder.fadd(high, low), builder.add(second, step))
        return context.get_dummy_value()

    return types.void(fmt, *[types.intp] * 7), generate


def _split_function(fmt: int) -> Any:

    def split(source, target, step, parts, elements, exponent, has_sum):
        _split_runs(fmt, source, target, step, parts, (elements + 15) // 16, exponent, has_sum)
        return 0

    return split


@cache
def split_kernel(fmt: str) -> int:
    """Return the address of the kernel that splits float32 numbers into parts of a format.

    Its arguments, `_SPLIT_ARITY` integers: addresses of numbers and parts, bytes from part to part, how many parts, how
    many numbers, the power of two by which each part is multiplied beyond the one before, and whether the sum of two
    parts is one, too. It reads and writes whole vectors.
    """
    return compile_kernel(_split_function(FORMATS.index(fmt)), _SPLIT_ARITY)


@njit
def _read(
    job, first, parts_first, source, raw, parts, lanes, lane_step, k_step, exponents, scratch
):
    """Cast a matrix, whose words begin at `first` and `parts_first`, and split it.

    What is not scaled has exponents of 0.
    """
    k = field(job, D.K)
    cast(job, first, source, raw, scratch, 4)
    if field(job, parts_first + D.IS_SCALED) != 0:
        scale(raw, lanes, k, lane_step, k_step, exponents, scratch)
    else:
        for lane in range(lanes):
            store(exponents + 8 * lane, 0, "i64")
    step, count = field(job, parts_first + D.PART_STEP), field(job, parts_first + D.PART_COUNT)
    has_sum, exponent = field(job, parts_first + D.HAS_SUM), field(job, D.PART_EXPONENT)
    call(field(job, D.SPLIT), (raw, parts, step, count, lanes * k, exponent, has_sum))


# --- products ---------------------------------------------------------------------------------


@intrinsic
def _add_block(typing_context, is_first, block, term, factor):
    """Add 8 rows of 16 numbers, times a factor, to a block; the first are added to zeros."""

    def generate(context, builder, signature, args):
        is_first, block, term, factor = args
        vector, word = ir.VectorType(F32, LANES), block.type
        factors = splat(builder, builder.fptrunc(factor, F32))
        zeros = ir.Constant(vector, [0.0] * LANES)
        for row in range(8):
            to, from_ = (
                pointer(builder, builder.add(x, word(64 * row)), vector) for x in (block, term)
            )
            before = builder.select(is_first, zeros, builder.load(to, align=1))
            more = builder.fmul(builder.load(from_, align=1), factors)
            builder.store(builder.fadd(before, more), to, align=1)
        return context.get_dummy_value()

    return types.void(types.boolean, types.intp, types.intp, types.float64), generate


@intrinsic(prefer_literal=True)
def _multiply_as_blas(typing_context, fuses, a, last_row, row_step, k_step, b, b_step, k, target):
    """Write 8 rows of A by 16 columns of B, with sums in float32.

    Where it ``fuses``, as a BLAS does with FMA, a product of two numbers is rounded with its sum only. That makes a
    difference where the product alone is beyond float32. In float64, through which the sum goes, it is exact.
    """
    product_type = F64 if fuses.literal_value else F32

    def generate(context, builder, signature, args):
        _, a, last_row, row_step, k_step, b, b_step, k, target = args
        floats, word = ir.VectorType(F32, LANES), a.type
        wide = ir.VectorType(product_type, LANES)

        def cast_to(kind: Any, value: Any) -> Any:
            if value.type == kind:
                return value
            return builder.fptrunc(value, kind) if kind == floats else builder.fpext(value, kind)

        sums = [cgutils.alloca_once(builder, floats) for _ in range(8)]
        for total in sums:
            builder.store(ir.Constant(floats, [0.0] * LANES), total)
        with cgutils.for_range(builder, k, intp=word) as loop:
            from_ = builder.add(b, builder.mul(loop.index, b_step))
            right = cast_to(wide, builder.load(pointer(builder, from_, floats), align=1))
            for i, total in enumerate(sums):
                beyond = builder.icmp_signed(">", word(i), last_row)
                at = builder.mul(builder.select(beyond, last_row, word(i)), row_step)
                at = builder.add(builder.add(a, at), builder.mul(loop.index, k_step))
                left = cast_to(product_type, builder.load(pointer(builder, at, F32), align=1))
                term = builder.fmul(splat(builder, left), right)
                found = builder.fadd(cast_to(wide, builder.load(total)), term)
                builder.store(cast_to(floats, found), total)
        for i, total in enumerate(sums):
            to = builder.add(target, word(64 * i))
            builder.store(builder.load(total), pointer(builder, to, floats), align=1)
        return context.get_dummy_value()

    return types.void(fuses, *[types.intp] * 8), generate


@intrinsic
def _is_lost(typing_context, block, columns):
    """Whether a number in the first columns of a block is not finite."""

    def generate(context, builder, signature, args):
        block, columns = args
        bits, word = ir.VectorType(I32, LANES), block.type
        infinity = native.vector(I32, [0x7F800000] * LANES)
        found = ir.Constant(ir.VectorType(ir.IntType(1), LANES), [0] * LANES)
        for row in range(8):
            at = pointer(builder, builder.add(block, word(64 * row)), bits)
            exponents = builder.and_(builder.load(at, align=1), infinity)
            found = builder.or_(found, builder.icmp_signed("==", exponents, infinity))
        lanes = native.vector(I64, range(LANES))
        inside = builder.icmp_signed("<", lanes, splat(builder, columns))
        mask = builder.bitcast(builder.and_(found, inside), ir.IntType(LANES))
        return builder.icmp_signed("!=", mask, ir.IntType(LANES)(0))

    return types.boolean(types.intp, types.intp), generate


@intrinsic
def _replace_lost(typing_context, block, others):
    """Put the numbers of another block where those of a block are not finite."""

    def generate(context, builder, signature, args):
        bits, word = ir.VectorType(I32, LANES), args[0].type
        infinity = native.vector(I32, [0x7F800000] * LANES)
        for row in range(8):
            to, from_ = (pointer(builder, builder.add(x, word(64 * row)), bits) for x in args)
            number = builder.load(to, align=1)
            is_lost = builder.icmp_signed("==", builder.and_(number, infinity), infinity)
            other = builder.load(from_, align=1)
            builder.store(builder.select(is_lost, other, number), to, align=1)
        return context.get_dummy_value()

    return types.void(types.intp, types.intp), generate


@njit(inline="always")
def _sum_products(job, a, last_row, row_step, k_step, b, b_step, block):
    """Write the sum of all products of parts, 8 rows by 16 columns."""
    product, term = job + 8 * D.WORDS, block + _TERM
    for number in range(field(job, D.PRODUCTS)):
        multiply_block(
            4, 1, a + field(product, D.A_OFFSET), last_row, row_step, k_step,
            b + field(product, D.B_OFFSET), b_step, field(product, D.LENGTH), term, 64, 16,
        )  # fmt: skip
        _add_block(number == 0, block, term, load(product + 8 * D.FACTOR, "f64"))
        product += 8 * D.PRODUCT_WORDS


def _product_function(kind: int) -> Any:
    width = D.OUT_BYTES[kind]
    word, fuses = WORDS[width], int(has_fma())

    def product(job, a, b, out, c, bias, factors, has_a, has_b, scratch):
        m, n, k = field(job, D.M), field(job, D.N), field(job, D.K)
        row_step, k_step = field(job, D.A_ROW_STEP), field(job, D.A_K_STEP)
        a_raw, b_raw = scratch + field(job, D.AT_A), scratch + field(job, D.AT_B)
        of_a, a_at = (
            scratch + field(job, D.AT_EXPONENTS),
            scratch + field(job, D.PARTS_A + D.AT_PARTS),
        )
        of_b = has_b if has_b > 1 else scratch + field(job, D.PARTS_B + D.AT_PARTS)
        b_at = of_b + (8 * n + 63) // 64 * 64
        _read(job, D.A, D.PARTS_A, a, a_raw, a_at, m, row_step, k_step, of_a, scratch)
        if has_b == 0:
            _read(job, D.B, D.PARTS_B, b, b_raw, b_at, n, 4, 4 * n, of_b, scratch)
        c_at, bias_at = cast_addends(job, c, bias, has_b == 1, scratch, 4)
        is_scaled = field(job, D.PARTS_A + D.IS_SCALED) + field(job, D.PARTS_B + D.IS_SCALED) > 0
        block, mends = scratch + field(job, D.AT_BLOCK), field(job, D.MENDS) != 0
        is_raw = False
        # The last columns come first: see `write_block`.
        for j in range((n - 1) // 16 * 16, -16, -16):
            for i in range(0, m, 8):
                rows, columns = min(8, m - i), min(16, n - j)
                _sum_products(
                    job, a_at + i * row_step, rows - 1, row_step, k_step, b_at + 4 * j, 4 * n, block
                )
                if is_scaled:
                    unscale(block, rows, columns, of_a + 8 * i, of_b + 8 * j, scratch)
                if mends and _is_lost(block, columns):
                    if not is_raw:
                        cast(job, D.A, a, a_raw, scratch, 4)
                        cast(job, D.B, b, b_raw, scratch, 4)
                        is_raw = True
                    _multiply_as_blas(
                        fuses, a_raw + i * row_step, rows - 1, row_step, k_step, b_raw + 4 * j,
                        4 * n, k, block + _TERM,
                    )  # fmt: skip
                    _replace_lost(block, block + _TERM)
                write_block(4, kind, word, width, job, block, i, j, out, c_at, bias_at, factors)
        return 0

    return product


@cache
def product_kernel(dtype: str) -> int:
    """Return the address of the kernel that writes ``dtype``, called as that of `direct_kernels` for float32 sums.

    Of a prepared operand it takes the exponents of b's columns, followed by the parts.
    """
    return compile_kernel(_product_function(D.OUT_DTYPES.index(dtype)), PRODUCT_ARITY)
