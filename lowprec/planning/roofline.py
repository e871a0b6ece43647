"""The time below which a product cannot run, from a device's peak rate and the bandwidth of its memory.

Source: S. Williams, A. Waterman and D. Patterson, "Roofline: an insightful visual performance model for multicore
architectures", CACM 52(4), 2009.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from lowprec.planning.kernels import format_name
from lowprec.planning.tensor_cores import tensor_cores_multiply

if TYPE_CHECKING:
    from lowprec.planning.plan import GemmPlan


@dataclass(frozen=True, slots=True)
class Roofline:
    """Seconds that each part takes at least; arithmetic and memory overlap, what is rewritten does not."""

    seconds: float  # of all
    arithmetic: float  # of the products, at the peak rate
    memory: float  # of reading what is multiplied and writing the result, once
    rewriting: float  # of the kernels that rewrite operands before, or the result after
    units: str  # whose peak rate it is
    tflops: float  # that rate


def roofline(plan: GemmPlan) -> Roofline | None:
    """Return the least time of a product by cuBLASLt; None where a figure of the device is not known."""
    call, able, problem = plan.call, plan.capabilities, plan.problem
    fmt = format_name(plan.operand_format)
    on_tensor_cores = tensor_cores_multiply(fmt, able.compute_capability)
    # Other units widen narrow numbers.
    units = fmt if on_tensor_cores or fmt in ("int8", "float64") else "float32"
    rate = dict(able.peak_tflops).get(units)
    if call is None or not rate or not able.bytes_per_second:
        return None
    flops = plan.flops * sum(x.length for x in plan.schedule) / plan.layout.k
    read = rewritten = 0
    for spec, pack in ((problem.a, call.pack_a), (problem.b, call.pack_b)):
        read += pack.nbytes if pack else spec.stored_bytes
        rewritten += spec.stored_bytes + pack.nbytes if pack else 0
    # What else the plan moves: the result, c and bias.
    around = plan.bytes_moved - problem.a.stored_bytes - problem.b.stored_bytes
    if call.staged:
        rewritten += call.product_bytes + around
        # What a product is added to is read and written.
        around = call.product_bytes * (2 * len(plan.schedule) - 1)
    arithmetic = flops / (rate * 1e12)
    memory, rewriting = ((x / able.bytes_per_second) for x in (read + around, rewritten))
    where = f"{units} on tensor cores" if on_tensor_cores else f"{units} without tensor cores"
    return Roofline(max(arithmetic, memory) + rewriting, arithmetic, memory, rewriting, where, rate)
