"""Tensor units of a GPU and tile units of a CPU: which numbers they multiply, and why they did not."""

from __future__ import annotations

from typing import NamedTuple

from lowprec.planning import GemmPlan
from lowprec.planning.bounds import operand_format
from lowprec.planning.kernels import KERNELS, PREFERENCES, READS_ANY_STRIDES

__all__ = ["Units", "number_format", "units_of"]

#: Numbers that tensor cores multiply, by the first compute capability that does. Source: CUDA C++ Programming Guide,
#: *Warp Matrix Functions*; PTX ISA, *mma*.
_TENSOR_CORES_SINCE: dict[str, tuple[int, int]] = {
    "float16": (7, 0),
    "int8": (7, 2),
    "bfloat16": (8, 0),
    "tf32": (8, 0),
    "float64": (8, 0),
    "float8_e4m3fn": (8, 9),
    "float8_e5m2": (8, 9),
}

_TILE_FORMATS = frozenset(
    fmt for fmt, preferred in PREFERENCES.items() if not READS_ANY_STRIDES.isdisjoint(preferred)
)

_EMPTY = "the product is empty"


class Units(NamedTuple):
    """Whether a product could run on tensor (tile) units by its numbers, whether it did, and why."""

    eligible: bool
    used: bool | None
    reason: str


def number_format(plan: GemmPlan) -> str:
    """Return the format of what is multiplied, once rounded: ``"tf32"``, ``"int8"``."""
    fmt = operand_format(plan.mode, plan.compute_dtype)
    return plan.compute_dtype.label if fmt is None else fmt.name


def units_of(plan: GemmPlan, used: bool | None) -> Units:
    """Return what is to be said of the units.

    Parameters
    ----------
    plan : GemmPlan
    used : bool or None
        What the backend found.
    """
    capability = plan.capabilities.compute_capability
    fmt = number_format(plan)
    if capability is None:
        return _tile_units(plan, fmt, used)
    since = _TENSOR_CORES_SINCE.get(fmt)
    if not plan.flops:
        return Units(since is not None, False, _EMPTY)
    if used:
        reason = "tensor cores"
    elif since is None:
        reason = f"tensor cores do not multiply {fmt} numbers"
    elif capability < since:
        major, minor = capability
        reason = f"tensor cores of compute capability {major}.{minor} do not multiply {fmt} numbers"
    elif used is None:
        reason = "the library does not tell"
    else:
        reason = "the library chose an algorithm without tensor cores"
    return Units(since is not None, used, reason)


def _tile_units(plan: GemmPlan, fmt: str, used: bool | None) -> Units:
    eligible = fmt in _TILE_FORMATS
    if used:
        reason = KERNELS[plan.kernel].units
    elif not plan.flops:
        reason = _EMPTY
    elif not eligible:
        reason = f"tile units do not multiply {fmt} numbers"
    elif plan.kernel in READS_ANY_STRIDES:
        reason = f"the kernel {plan.kernel} fell back: {'; '.join(plan.fallbacks)}"
    else:
        reason = plan.kernel_reason
    return Units(eligible, used, reason)
