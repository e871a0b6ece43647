"""Advice on the shape of a product: small predicates. The sentences are in ``planning.reasons``.

Sources: NVIDIA, *Matrix Multiplication Background User's Guide* (alignment to 16 bytes, arithmetic intensity, small
dimensions).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from lowprec.planning.reasons import Reason, Why

if TYPE_CHECKING:
    from lowprec.planning.plan import GemmPlan

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


def advise(plan: GemmPlan) -> tuple[Reason, ...]:
    """Return the advice of the field for a product; nothing for an empty one."""
    layout, able, fmt, call = plan.layout, plan.capabilities, plan.operand_format, plan.call
    m, n, k = layout.m, layout.n, layout.k
    if 0 in (m, n, k):
        return ()
    advice = []
    bits = 8 if fmt is None else _TENSOR_CORE_BITS.get(fmt.name)
    on_tensor_cores = able.compute_capability is not None
    if bits and on_tensor_cores and (misaligned := misaligned_dimensions(m, n, k, bits)):
        step = ALIGNMENT_BYTES * 8 // bits
        advice.append(Reason.of(Why.MISALIGNED, dimensions=misaligned, step=step, bits=bits))
    small = memory_bound_dimensions(m, n, k)
    if small:
        advice.append(Reason.of(Why.SMALL_DIMENSIONS, dimensions=small, most=SMALL_DIMENSION))
    elif (intensity := plan.arithmetic_intensity) < able.flops_per_byte:
        advice.append(Reason.of(Why.LOW_INTENSITY, intensity=intensity, device=able.flops_per_byte))
    converts = any(plan.rounded) and (call is None or call.pack_a or call.pack_b)
    if converts and conversion_outweighs(m, n, plan.kernel_row.cost_per_element):
        advice.append(Reason.of(Why.ROUNDING_COSTS_MORE))
    return tuple(advice)
