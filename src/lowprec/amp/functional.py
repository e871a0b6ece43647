"""Loss scaling as functions, state in and state out, for programs that are traced: ``jax.jit``, ``jax.lax.scan``.

They compute what :class:`~lowprec.amp.LossScaler` does, without a branch on an array's value. With NumPy and PyTorch
they work as well. Factors that float32 does not hold are rounded to it here, where the scaler rounds their product.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

from lowprec.amp.casts import cast, dtype_name
from lowprec.amp.containers import leaves, mapped
from lowprec.amp.errors import GradientTypeError
from lowprec.amp.rules import ScaleRule, check_scale
from lowprec.arrays.namespaces import array_module
from lowprec.errors import ArrayError

_DEFAULT = ScaleRule()


class ScalerState(NamedTuple):
    """Scale and growth tracker: arrays of no axes, float32 and int32. JAX takes it as a container of two arrays."""

    scale: Any
    growth_tracker: Any


def init(xp: Any, init_scale: float = 2.0**16) -> ScalerState:
    """Return the state at the start, in arrays of a namespace.

    Examples
    --------
    >>> import numpy as np
    >>> init(np, 1024.0)
    ScalerState(scale=array(1024., dtype=float32), growth_tracker=array(0, dtype=int32))
    """
    scale = check_scale("init_scale", init_scale)
    return ScalerState(xp.asarray(scale, dtype=xp.float32), xp.asarray(0, dtype=xp.int32))


def scale(loss: Any, state: ScalerState) -> Any:
    """Return a loss, or a container of losses, multiplied by the scale; elements keep their type."""
    return mapped(
        lambda x: cast(cast(x, _wide(x)) * cast(state.scale, _wide(x)), dtype_name(x)), loss
    )


def unscale(grads: Any, state: ScalerState) -> tuple[Any, Any]:
    """Return gradients divided by the scale, and an array of one bool: whether one of them was Inf or NaN.

    Raises
    ------
    GradientTypeError
        If gradients are float16.
    ArrayError
        If there is no gradient at all.
    """
    arrays = leaves(grads)
    if not arrays:
        raise ArrayError("no gradients to unscale; pass a container with at least one array")
    if any(dtype_name(x) == "float16" for x in arrays):
        raise GradientTypeError(
            "float16 gradients must not be unscaled; cast them to float32 first"
        )
    xp = array_module(arrays[0])
    found = functools.reduce(xp.logical_or, [xp.any(~xp.isfinite(x)) for x in arrays])
    inverse = 1 / state.scale

    def divide(x: Any) -> Any:
        return cast(cast(x, _wide(x)) * cast(inverse, _wide(x)), dtype_name(x))

    return mapped(divide, grads), found


def update(state: ScalerState, found_inf: Any, rule: ScaleRule = _DEFAULT) -> ScalerState:
    """Return the state after a step.

    Parameters
    ----------
    state : ScalerState
    found_inf : array of one bool
        Of all processes, where several train together.
    rule : ScaleRule
        A constant of the program.
    """
    xp = array_module(state.scale)
    return ScalerState(*rule.next_traced(xp, state.scale, state.growth_tracker, found_inf))


def select(found_inf: Any, skipped: Any, stepped: Any) -> Any:
    """Return the weights after a step: those before it where Inf or NaN was found, else those of the step.

    Parameters
    ----------
    found_inf : array of one bool
    skipped, stepped : container of arrays
        Of the same structure.
    """
    return mapped(lambda x, y: array_module(x).where(found_inf, x, y), skipped, stepped)


def _wide(x: Any) -> str:
    return "float64" if dtype_name(x) == "float64" else "float32"
