"""Expected costs of plans relative to FP32, and the roofline: the least time of a product on a device.

Roofline: S. Williams, A. Waterman and D. Patterson, "Roofline: an insightful visual performance model for multicore
architectures", CACM 52(4), 2009.
"""

from __future__ import annotations

from dataclasses import dataclass

from lowprec.planning.cublaslt.calls import Packing
from lowprec.planning.kernels import KernelRow, format_name
from lowprec.planning.layout import OperandSpec
from lowprec.planning.plan import GemmPlan
from lowprec.planning.tensor_cores import tensor_cores_multiply

#: Of rounding one element of an operand to a code with a scale, in flops.
_QUANTIZING_COST = 80.0


def packing_cost(kernel: KernelRow, parts: int) -> float:
    """Return the cost of packing ``parts`` parts of an element, relative to one part.

    Half of the cost is reading: in one thread of a Zen 5, packing two, three and four bfloat16 parts takes 1.6, 2.1 and
    2.6 times as long as packing one.
    """
    if kernel.packs:
        return (kernel.parts * parts + 1) / 2
    return parts


def expected_cost(plan: GemmPlan) -> float:
    """Return the expected time of kernel and packing, relative to FP32 on the device."""
    kernel = plan.kernel_row
    layout = plan.layout
    if plan.quantized and plan.call is None:
        each = 0.0
        for other, rule in zip((layout.n, layout.m), plan.quantized.rules, strict=True):
            if rule and other:
                each += 1 / (2 * other)
        return expected_cost(plan.quantized.inner) + _QUANTIZING_COST * each
    each = plan.capabilities.cost_per_flop(kernel, format_name(plan.multiplied_format))
    length = sum(product.length for product in plan.schedule)
    cost = each * length / max(layout.k, 1)
    if plan.call is not None:
        # Each copy is written and read. So is the temporary result for each product that is added to it.
        moved = 2 * sum(copy.nbytes for copy in plan.copies)
        moved += 2 * (len(plan.schedule) - 1) * plan.call.product_bytes
        return cost + moved * kernel.cost_per_byte / plan.flops
    a_parts, b_parts = plan.split
    a_parts = plan.rounded[0] * a_parts
    b_parts = plan.rounded[1] * b_parts
    if (a_parts or b_parts) and layout.m and layout.n:
        if max(a_parts, b_parts) == 1:
            a_parts = b_parts = 1
        of_a = packing_cost(kernel, a_parts) / (2 * layout.n)
        of_b = packing_cost(kernel, b_parts) / (2 * layout.m)
        cost += kernel.cost_per_element * (of_a + of_b)
    return cost


@dataclass(frozen=True, slots=True)
class Roofline:
    """Least times in seconds; arithmetic and memory traffic overlap, the copies run before and after them."""

    seconds: float  # total
    arithmetic: float  # the products at the peak rate
    memory: float  # reading the operands and writing the result once
    # the kernels that pack operands before the product, or write the result after it
    rewriting: float
    units: str  # the units of the peak rate
    tflops: float  # peak rate in TFLOP/s


def _traffic(spec: OperandSpec, pack: Packing | None) -> tuple[int, int]:
    """Return the bytes of an operand that the product reads, and those that its packing moves."""
    if pack is None:
        return spec.stored_bytes, 0
    # Largest magnitudes of more than a tile are sought in a first pass over the source.
    passes = 2 if pack.peaks else 1
    return pack.nbytes, spec.stored_bytes * passes + pack.nbytes


def roofline(plan: GemmPlan) -> Roofline | None:
    """Return the least time of a product by cuBLASLt; None if a figure of device or emulation is unknown."""
    call = plan.call
    capabilities = plan.capabilities
    problem = plan.problem
    kernel = plan.kernel_row
    fmt = kernel.part_format or format_name(plan.multiplied_format)
    codes = call.first.codes if call else None
    if codes:
        fmt = codes.elements.name
    on_tensor_cores = codes is not None or tensor_cores_multiply(
        fmt, capabilities.compute_capability
    )
    # Other units widen narrow formats to float32.
    units = fmt if on_tensor_cores or fmt in ("int8", "float64") else "float32"
    rate = dict(capabilities.peak_tflops).get(units)
    products = kernel.part_products if kernel.cublas_emulation else 1
    if call is None or not rate or not capabilities.bytes_per_second or not products:
        return None
    length = sum(x.length for x in plan.schedule)
    flops = plan.flops * products * length / plan.layout.k
    read_a, rewritten_a = _traffic(problem.a, call.pack_a)
    read_b, rewritten_b = _traffic(problem.b, call.pack_b)
    rewritten = rewritten_a + rewritten_b
    # The result, c and bias.
    around = plan.bytes_moved - problem.a.stored_bytes - problem.b.stored_bytes
    if call.staged:
        rewritten += call.product_bytes + around
        # The first product writes the result; each later one reads and writes it.
        around = call.product_bytes * (2 * len(plan.schedule) - 1)
    arithmetic = flops / (rate * 1e12)
    memory = (read_a + read_b + around) / capabilities.bytes_per_second
    rewriting = rewritten / capabilities.bytes_per_second
    seconds = max(arithmetic, memory) + rewriting
    if on_tensor_cores:
        where = f"{units} on tensor cores"
    else:
        where = f"{units} without tensor cores"
    return Roofline(seconds, arithmetic, memory, rewriting, where, rate)
