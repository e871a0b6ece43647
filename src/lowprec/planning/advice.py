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


def misaligned_dimensions(m: int, n: int, k: int, bits: int) -> tuple[str, ...]:
    """Return the dimensions that are not multiples of 16 bytes' worth of elements.

    That is 8 elements of 16 bits, 16 of 8 bits, 4 of 32 bits.

    Examples
    --------
    >>> misaligned_dimensions(64, 100, 33, bits=16)
    ('n = 100', 'k = 33')
    >>> misaligned_dimensions(64, 128, 32, bits=16)
    ()
    """
    step = ALIGNMENT_BYTES * 8 // bits
    return tuple(f"{name} = {size}" for name, size in (("m", m), ("n", n), ("k", k)) if size % step)


def memory_bound_dimensions(m: int, n: int, k: int) -> tuple[str, ...]:
    """Return the dimensions that are so small that memory decides the speed.

    Examples
    --------
    >>> memory_bound_dimensions(4096, 64, 4096)
    ('n = 64',)
    >>> memory_bound_dimensions(256, 256, 256)
    ()
    """
    return tuple(
        f"{name} = {size}"
        for name, size in (("m", m), ("n", n), ("k", k))
        if size <= SMALL_DIMENSION
    )


def is_low_intensity(arithmetic_intensity: float, flops_per_byte: float) -> bool:
    """Whether a device that does ``flops_per_byte`` would wait for memory.

    Examples
    --------
    >>> is_low_intensity(2.0, 16.0), is_low_intensity(300.0, 16.0)
    (True, False)
    """
    return arithmetic_intensity < flops_per_byte


def conversion_outweighs(m: int, n: int, flops_per_conversion: float) -> bool:
    """Whether rounding the operands costs more than the product itself.

    An element of ``a`` is used n times, one of ``b`` m times, two flops each.

    Examples
    --------
    >>> conversion_outweighs(1, 4096, 60.0), conversion_outweighs(4096, 4096, 60.0)
    (True, False)
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

    Parameters
    ----------
    m, n, k : int
    operand_format : NumberFormat or None
        Of what is multiplied; None for int8.
    arithmetic_intensity : float
        Flops per byte moved.
    flops_per_byte : float
        Of the device.
    rounds_for : float or None
        Flops that rounding one element costs, if the operands are rounded.
    tensor_cores : bool
        Whether the device has any.
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
    elif is_low_intensity(arithmetic_intensity, flops_per_byte):
        advice.append(
            Reason.of(Why.LOW_INTENSITY, intensity=arithmetic_intensity, device=flops_per_byte)
        )
    if rounds_for is not None and conversion_outweighs(m, n, rounds_for):
        advice.append(Reason.of(Why.ROUNDING_COSTS_MORE))
    return tuple(advice)


#: Bits per element on tensor cores; float32 and float64 have no alignment to ask for.
_TENSOR_CORE_BITS = {"float16": 16, "bfloat16": 16, "tf32": 32}
