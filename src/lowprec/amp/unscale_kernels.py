"""Native kernels that multiply numbers by the inverse scale and look for Inf and NaN in the same pass.

All is done in vectors, in operations that every processor's vector units have. Importing this module imports numba.
"""

from __future__ import annotations

from functools import cache
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from lowprec.backends.cpu.packed import native
from lowprec.backends.cpu.packed.native import (
    F32,
    F64,
    I8,
    I32,
    I64,
    atomic_add,
    compile_kernel,
    load,
    pointer,
)

#: Element type, its integer of the same size, the bits of infinity, how many make up 64 bytes.
_ROWS: tuple[tuple[Any, Any, int, int], ...] = (
    (F32, I32, 0x7F800000, 16),
    (F64, I64, 0x7FF0000000000000, 8),
)
DTYPES = ("float32", "float64")

#: Bytes from what the loop reads to what it asks for.
_AHEAD = 4096


def _prefetch(builder, address):
    """Ask for what the loop reads some steps later, more than the processor looks ahead by itself."""
    place = pointer(builder, builder.add(address, address.type(_AHEAD)), I8)
    kind = ir.FunctionType(ir.VoidType(), [place.type, I32, I32, I32])
    function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0i8")
    builder.call(function, [place, I32(0), I32(3), I32(1)])


@intrinsic(prefer_literal=True)
def _unscale_run(typing_context, row, source, target, steps, apart, inverse):
    """Multiply 64 bytes of numbers, and those so many bytes on, at each step; return 1 if one is Inf or NaN, else 0.

    Memory is read faster at two places at once. What lies 0 bytes on is done twice, with the same result.
    """
    element, integer, infinity, lanes = _ROWS[row.literal_value]

    def generate(context, builder, signature, args):
        _, source, target, steps, apart, inverse = args
        floats, bits = ir.VectorType(element, lanes), ir.VectorType(integer, lanes)
        word = source.type
        factor = builder.load(pointer(builder, inverse, element), align=1)
        first = builder.insert_element(ir.Constant(floats, ir.Undefined), factor, I32(0))
        factors = native.shuffle(builder, first, first, [0] * lanes)
        magnitude = native.vector(integer, [(1 << integer.width - 1) - 1] * lanes)
        # The largest magnitude, as an integer: those of Inf and NaN are above all others.
        largest = cgutils.alloca_once(builder, bits)
        builder.store(native.vector(integer, [0] * lanes), largest)
        with cgutils.for_range(builder, steps, intp=word) as loop:
            offset = builder.mul(loop.index, word(64))
            offsets = [offset, builder.add(offset, apart)]
            loaded = []
            for at in offsets:
                from_ = builder.add(source, at)
                _prefetch(builder, from_)
                loaded.append(builder.load(pointer(builder, from_, floats), align=1))
            for at, x in zip(offsets, loaded, strict=True):
                place = pointer(builder, builder.add(target, at), floats)
                builder.store(builder.fmul(x, factors), place, align=1)
                size = builder.and_(builder.bitcast(x, bits), magnitude)
                before = builder.load(largest)
                larger = builder.icmp_unsigned(">", size, before)
                builder.store(builder.select(larger, size, before), largest)
        beyond = builder.icmp_unsigned(
            ">=", builder.load(largest), native.vector(integer, [infinity] * lanes)
        )
        mask = builder.bitcast(beyond, ir.IntType(lanes))
        found = builder.icmp_unsigned("!=", mask, ir.Constant(mask.type, 0))
        return builder.zext(found, word)

    return types.intp(row, *[types.intp] * 5), generate


def _unscale_function(row: int) -> Any:
    lanes = _ROWS[row][3]
    item = 64 // lanes
    kind = "u32" if item == 4 else "i64"

    def unscale(job, count, inverse, scratch):
        found = 0
        index = atomic_add(job, 1)
        while index < count:
            piece = job + 8 + 24 * index
            source, target = load(piece, "i64"), load(piece + 8, "i64")
            length = load(piece + 16, "i64")
            steps = length // (2 * lanes)
            found |= _unscale_run(row, source, target, steps, steps * 64, inverse)
            done = steps * 2 * lanes
            while done < length:
                rest = min(length - done, lanes)
                at = done * item
                for i in range(0, 64, item):
                    native.store(scratch + i, 0, kind)
                for i in range(0, rest * item, item):
                    native.store(scratch + i, load(source + at + i, kind), kind)
                found |= _unscale_run(row, scratch, scratch, 1, 0, inverse)
                for i in range(0, rest * item, item):
                    native.store(target + at + i, load(scratch + i, kind), kind)
                done += lanes
            index = atomic_add(job, 1)
        return found

    return unscale


@cache
def unscale_kernel(dtype: str) -> Any:
    """Return the kernel of ``"float32"`` or ``"float64"``, to be called by each thread with four integers.

    Address of the job; how many pieces it has; the address of the inverse scale, of the same element type; the
    address of 64 bytes of scratch memory of the thread's own. A job is int64: 0, which counts the pieces that were
    taken, and for each piece the address of its numbers, the address of the results, the same one or memory that does
    not overlap, and how many there are. The kernel returns 1 if a number was Inf or NaN, else 0.
    """
    return native.callable_at(compile_kernel(_unscale_function(DTYPES.index(dtype)), 4), 4)
