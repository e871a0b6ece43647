"""Advice on the shape of a product: small predicates. The sentences are in ``planning.reasons``.

Sources: NVIDIA, *Matrix Multiplication Background User's Guide* (alignment to 16 bytes, arithmetic intensity, small
dimensions).
"""

from __future__ import annotations

from lowprec.formats import NumberFormat
from lowprec.planning.reasons import Reason, Why

#: Tensor cores like the contiguous dimension in steps of so many bytes.
ALIGNMENT_BYTES = 16

#: A product with a dimension of at most this reads its operands too seldom to hide memory.
SMALL_DIMENSION = 128


#: Bits per element on tensor cores; float32 and float64 have no alignment to ask for.
_TENSOR_CORE_BITS = {"float16": 16, "bfloat16": 16, "tf32": 32}


def misaligned_dimensions(m: int, n: int, k: int, bits: int) -> tuple[str, ...]:
    """Return the dimensions that are not multiples of 16 bytes' worth of elements of so many bits."""
    step = ALIGNMENT_BYTES * 8 // bits
    return tuple(f"{name} = {size}" for name, size in (("m", m), ("n", n), ("k", k)) if size % step)


def memory_bound_dimensions(m: int, n: int, k: int) -> tuple[str, ...]:
    """Return the dimensions that are so small that memory decides the speed."""
    sizes = {"m": m, "n": n, "k": k}
    return tuple(f"{name} = {size}" for name, size in sizes.items() if size <= SMALL_DIMENSION)


def conversion_outweighs(m: int, n: int, flops_per_conversion: float) -> bool:
    """Whether rounding the operands costs more than the product itself.

    An element of ``a`` is used n times, one of ``b`` m times, two flops each.
    """
    return flops_per_conversion * (1 / (2 * n) + 1 / (2 * m)) > 1


def advise(
    m: int,
    n: int,
    k: int,
    operand_format: NumberFormat | None,
    arithmetic_intensity: float,
    flops_per_byte: float,
    rounds_for: float | None,
    *,
    tensor_cores: bool,
) -> tuple[Reason, ...]:
    """Return the advice of the field for this product; nothing for an empty product.

    ``arithmetic_intensity`` is the product's, ``flops_per_byte`` the device's; ``rounds_for`` the flops that rounding
    one element costs, None where nothing is rounded.
    """
    if 0 in (m, n, k):
        return ()
    advice = []
    bits = 8 if operand_format is None else _TENSOR_CORE_BITS.get(operand_format.name)
    misaligned = misaligned_dimensions(m, n, k, bits) if bits and tensor_cores else ()
    if bits and misaligned:
        step = ALIGNMENT_BYTES * 8 // bits
        advice.append(Reason.of(Why.MISALIGNED, dimensions=misaligned, step=step, bits=bits))
    small = memory_bound_dimensions(m, n, k)
    if small:
        advice.append(Reason.of(Why.SMALL_DIMENSIONS, dimensions=small, most=SMALL_DIMENSION))
    elif arithmetic_intensity < flops_per_byte:
        advice.append(
            Reason.of(Why.LOW_INTENSITY, intensity=arithmetic_intensity, device=flops_per_byte)
        )
    if rounds_for is not None and conversion_outweighs(m, n, rounds_for):
        advice.append(Reason.of(Why.ROUNDING_COSTS_MORE))
    return tuple(advice)
