"""Loss scaling as functions, state in and state out, for programs that are traced: ``jax.jit``, ``jax.lax.scan``.

They compute what :class:`~lowprec.amp.LossScaler` does, without a branch on an array's value. With NumPy and PyTorch
they work as well. Factors that float32 does not hold are rounded to it here, where the scaler rounds their product.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

from lowprec.amp.arguments import scaled_loss, times
from lowprec.amp.containers import leaves, mapped
from lowprec.amp.rules import ScaleRule, check_scale
from lowprec.amp.unscaling import check_gradient
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
    scale = _DEFAULT.limited(check_scale("init_scale", init_scale))
    return ScalerState(xp.asarray(scale, dtype=xp.float32), xp.asarray(0, dtype=xp.int32))


def scale(loss: Any, state: ScalerState) -> Any:
    """Return a loss, or a container of losses, multiplied by the scale, as :meth:`LossScaler.scale` has it."""
    return mapped(lambda x: scaled_loss(x, state.scale), loss)


def unscale(grads: Any, state: ScalerState) -> tuple[Any, Any]:
    """Return gradients divided by the scale, and an array of one bool: whether one of them was Inf or NaN.

    Raises
    ------
    GradientTypeError
        If gradients are float16.
    DTypeError, ArrayError
        If gradients are of another type than :meth:`LossScaler.unscale` takes, or there is none.
    """
    arrays = leaves(grads)
    if not arrays:
        raise ArrayError("no gradients to unscale; pass a container with at least one array")
    for x in arrays:
        check_gradient(x)
    xp = array_module(arrays[0])
    found = functools.reduce(xp.logical_or, [xp.any(~xp.isfinite(x)) for x in arrays])
    inverse = 1 / state.scale
    return mapped(lambda x: times(x, inverse), grads), found


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
