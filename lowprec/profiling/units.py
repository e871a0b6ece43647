"""Tensor units of a GPU, tile units and vector units of a CPU: which numbers they multiply, and why they did not."""

from __future__ import annotations

from typing import NamedTuple

from lowprec.planning import GemmPlan
from lowprec.planning.kernels import Summation, format_name
from lowprec.planning.tensor_cores import first_capability, tensor_cores_multiply

_EMPTY = "the product is empty"


class Units(NamedTuple):
    """Whether a product could run on such units by its numbers, whether it did, and why."""

    eligible: bool
    used: bool | None
    reason: str


def units_of(plan: GemmPlan, used: bool | None) -> Units:
    """Return whether units were used, as reported by the backend (None: unknown), and why."""
    capability, fmt = plan.capabilities.compute_capability, format_name(plan.operand_format)
    if capability is None:
        return _tile_units(plan, fmt, used)
    since = first_capability(fmt)
    if not plan.flops:
        return Units(since is not None, False, _EMPTY)
    if used:
        reason = "tensor cores"
    elif since is None:
        reason = f"tensor cores do not multiply {fmt} numbers"
    elif not tensor_cores_multiply(fmt, capability):
        major, minor = capability
        reason = f"tensor cores of compute capability {major}.{minor} do not multiply {fmt} numbers"
    elif used is None:
        reason = "the library does not tell"
    else:
        reason = "the library chose an algorithm without tensor cores"
    return Units(since is not None, used, reason)


def _tile_units(plan: GemmPlan, fmt: str, used: bool | None) -> Units:
    row = plan.kernel_row
    tiles = [x for x in plan.capabilities.kernels if x.summation is Summation.TILES]
    eligible = any(x.formats is not None and fmt in x.formats for x in tiles)
    if used:
        reason = row.units
    elif not plan.flops:
        reason = _EMPTY
    elif not eligible:
        reason = f"tile units do not multiply {fmt} numbers"
    elif row.summation is Summation.TILES:
        reason = f"the kernel {plan.kernel} fell back: {'; '.join(plan.fallbacks)}"
    else:
        reason = plan.kernel_reason
    return Units(eligible, used, reason)
