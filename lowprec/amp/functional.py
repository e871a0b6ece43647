"""Loss scaling by pure functions, for ``jax.jit`` and ``jax.lax.scan``; the state is an argument and a result.

No function branches on the value of an array. A factor is rounded to float32 before it multiplies the scale;
:class:`~lowprec.amp.LossScaler` rounds the product alone.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from lowprec.amp.casting import scaled_loss
from lowprec.amp.containers import leaves, mapped
from lowprec.amp.rules import ScaleRule, check_scale
from lowprec.amp.unscaling import check_gradient, divided
from lowprec.arrays.namespaces import array_module
from lowprec.errors import ArrayError

_DEFAULT = ScaleRule()


class ScalerState(NamedTuple):
    """Scale (float32) and growth tracker (int32), arrays of no axes; in JAX a container of two arrays."""

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
    number = _DEFAULT.limited(check_scale("init_scale", init_scale))
    scale = xp.asarray(number, dtype=xp.float32)
    tracker = xp.asarray(0, dtype=xp.int32)
    return ScalerState(scale, tracker)


def scale(loss: Any, state: ScalerState) -> Any:
    """Return a loss, or a container of losses, times the scale, as by :meth:`LossScaler.scale`."""
    return mapped(lambda x: scaled_loss(x, state.scale), loss)


def unscale(grads: Any, state: ScalerState) -> tuple[Any, Any]:
    """Return gradients divided by the scale, and whether any was Inf or NaN (array of one bool).

    Raises
    ------
    GradientTypeError
        A gradient is float16.
    DTypeError, ArrayError
        A gradient has a type that :meth:`LossScaler.unscale` rejects, or there are no gradients.
    """
    arrays = leaves(grads)
    if not arrays:
        raise ArrayError("no gradients to unscale; pass a container with at least one array")
    for x in arrays:
        check_gradient(x)
    xp = array_module(arrays[0])
    quotients, found_inf = divided(xp, arrays, 1 / state.scale)
    following = iter(quotients)
    return mapped(lambda _: next(following), grads), found_inf


def update(state: ScalerState, found_inf: Any, rule: ScaleRule = _DEFAULT) -> ScalerState:
    """Return the state after a step.

    Parameters
    ----------
    state : ScalerState
    found_inf : array of one bool
        For all processes together, where several train.
    rule : ScaleRule
        A constant of the traced program.
    """
    xp = array_module(state.scale)
    scale, tracker = rule.next_traced(xp, state.scale, state.growth_tracker, found_inf)
    return ScalerState(scale, tracker)


def select(found_inf: Any, skipped: Any, stepped: Any) -> Any:
    """Return ``skipped`` if Inf or NaN was found, else ``stepped``.

    Parameters
    ----------
    found_inf : array of one bool
    skipped, stepped : container of arrays
        The weights before and after the step, of the same structure.
    """
    return mapped(lambda x, y: array_module(x).where(found_inf, x, y), skipped, stepped)
