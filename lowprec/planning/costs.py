"""What a plan is expected to cost: the common measure of modes and schemes."""

from __future__ import annotations

from lowprec.planning.kernels import KernelRow, format_name
from lowprec.planning.plan import GemmPlan


def roundings(kernel: KernelRow, parts: int) -> float:
    """Return the cost of writing so many parts of an element, relative to rounding it.

    In one pass half of the cost is reading: packing takes 1.6, 2.1 and 2.6 times as long for two, three and four
    bfloat16 parts as for one, in one thread of a Zen 5.
    """
    return (kernel.parts * parts + 1) / 2 if kernel.sums_products else parts


def expected_cost(plan: GemmPlan) -> float:
    """Return the expected time relative to FP32 on the device: the kernel's, and that of rounding the operands.

    An element of ``a`` takes part in 2 n flops, one of ``b`` in 2 m.
    """
    kernel, layout = plan.kernel_row, plan.layout
    each = plan.capabilities.cost_per_flop(kernel, format_name(plan.operand_format))
    cost = each * sum(product.length for product in plan.schedule) / max(layout.k, 1)
    if plan.call is not None:
        # What is rewritten before and after the call is written and read; what a product is added to, as well.
        moved = 2 * sum(copy.nbytes for copy in plan.copies)
        moved += 2 * (len(plan.schedule) - 1) * plan.call.product_bytes
        return cost + moved * kernel.cost_per_byte / plan.flops
    a_parts, b_parts = plan.split
    a_parts, b_parts = plan.rounded[0] * a_parts, plan.rounded[1] * b_parts
    if (a_parts or b_parts) and layout.m and layout.n:
        whole = (1, 1) if max(a_parts, b_parts) == 1 else (a_parts, b_parts)
        a, b = (roundings(kernel, parts) for parts in whole)
        cost += kernel.cost_per_element * (a / (2 * layout.n) + b / (2 * layout.m))
    return cost
