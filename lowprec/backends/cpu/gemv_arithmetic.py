"""Arithmetic of the matrix-vector kernels: float32, or int16 for int8 operands.

Products of int16 are added in pairs in int32, as ``VPMADDWD`` and ``VPDPWSSD`` do: exact, and modulo 2^32.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from llvmlite import ir

from lowprec.backends.cpu.casting_kernels import CASTS, Extrema, cast_vector
from lowprec.backends.cpu.packed import native
from lowprec.backends.cpu.packed.native import F32, I8, I16, I32, pointer
from lowprec.backends.cpu.packed.vector_arithmetic import LANES, floats_of


@dataclass(frozen=True)
class Arithmetic:
    """Types of the factors and of the vector of 16 sums."""

    factor: Any
    total: Any
    pair: int = 1  # factors per sum and step

    @property
    def step(self) -> int:
        """Factors per step, for 16 sums."""
        return LANES * self.pair

    @property
    def factor_bytes(self) -> int:
        """Bytes per factor."""
        return 4 // self.pair


FLOATS, INTEGERS = Arithmetic(F32, F32), Arithmetic(I16, I32, pair=2)


def arithmetic(index: int) -> Arithmetic:
    """Return the arithmetic of the kernels of one of `CASTS`."""
    return INTEGERS if CASTS[index][0] == "int8" else FLOATS


def numbers_of(builder: Any, index: int, address: Any, extrema: Extrema) -> Any:
    """Return the contiguous numbers of a step, cast."""
    numbers = arithmetic(index)
    if numbers is INTEGERS:
        x = builder.load(pointer(builder, address, ir.VectorType(I8, numbers.step)), align=1)
        return builder.sext(x, ir.VectorType(I16, numbers.step))
    return floats_of(builder, cast_vector(builder, index, address, extrema))


def columns_of(builder: Any, index: int, addresses: Sequence[Any], extrema: Extrema) -> list[Any]:
    """Return 16 numbers of each column, cast; for int8 those of pairs of adjacent columns."""
    if arithmetic(index) is FLOATS:
        return [numbers_of(builder, index, at, extrema) for at in addresses]
    kind = ir.VectorType(I8, LANES)
    read = [builder.load(pointer(builder, at, kind), align=1) for at in addresses]
    if len(read) % 2:
        read.append(native.vector(I8, [0] * LANES))
    turns = [x for i in range(LANES) for x in (i, LANES + i)]
    pairs = (native.shuffle(builder, a, b, turns) for a, b in zip(*[iter(read)] * 2, strict=True))
    return [builder.sext(pair, ir.VectorType(I16, 2 * LANES)) for pair in pairs]


def column_factors(builder: Any, index: int, address: Any, count: int) -> list[Any]:
    """Return the factors of :func:`columns_of`: each number (int8: pair) of a vector, broadcast 16 times."""
    numbers, factors = arithmetic(index), []
    for col in range(0, count, numbers.pair):
        at = builder.add(address, address.type(numbers.factor_bytes * col))
        if numbers.pair > count - col:
            one = builder.zext(builder.load(pointer(builder, at, I16), align=1), I32)
        else:
            one = builder.load(pointer(builder, at, numbers.total), align=1)
        vector = ir.VectorType(one.type, LANES)
        first = builder.insert_element(ir.Constant(vector, ir.Undefined), one, I32(0))
        splat = native.shuffle(builder, first, first, [0] * LANES)
        factors.append(builder.bitcast(splat, ir.VectorType(numbers.factor, numbers.step)))
    return factors


def _pair_sums(builder: Any, a: Any, b: Any) -> Any:
    """Return pairwise sums of the products of 32 int16, in int32, in a form that LLVM maps to one instruction."""
    wide = ir.VectorType(I32, 2 * LANES)
    products = builder.mul(builder.sext(a, wide), builder.sext(b, wide))
    even, odd = (native.shuffle(builder, products, products, range(first, 2 * LANES, 2)) for first in (0, 1))
    return builder.add(even, odd)


def added(builder: Any, a: Any, b: Any) -> Any:
    """Return the elementwise sum of two vectors of 16 sums."""
    return builder.add(a, b) if a.type.element == I32 else builder.fadd(a, b)


def multiply_add(builder: Any, a: Any, b: Any, c: Any) -> Any:
    """Return a * b + c, fused if the processor can; products of 11-bit numbers are exact in either case."""
    if c.type.element == I32:
        return builder.add(_pair_sums(builder, a, b), c)
    return builder.fadd(builder.fmul(a, b, flags=("contract",)), c, flags=("contract",))
