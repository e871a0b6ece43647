"""The step of stochastic rounding as an array, so that a compiled training loop serves all steps."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import jax
import jax.numpy as jnp

from lowprec.errors import ArrayError
from lowprec.modes import Mode, Recipe

_step: ContextVar[Any] = ContextVar("lowprec_jax_step", default=None)
#: Part of JAX's key: a function that is compiled inside of a block has the block's step, and serves no other block.
_block = jax.make_user_context(None)


@contextmanager
def at_step(step: jax.Array) -> Iterator[None]:
    """Use this traced step for stochastic rounding in the block.

    Recipes with a step of their own keep it. Products of :class:`lowprec.jax.intercept` have none.

    Parameters
    ----------
    step : jax.Array of an integer type, shape ()
        Traced: the block is inside of a function that ``jit``, ``scan`` or another transformation traces.

    Raises
    ------
    ArrayError
        The step is not such an array; outside of traced functions, ``recipe.at(step)`` is a recipe with a step.

    Examples
    --------
    >>> import jax.numpy as jnp
    >>> import lowprec
    >>> recipe = lowprec.Recipe("mxfp4", rounding="stochastic", seed=1)
    >>> @jax.jit
    ... def product(x, step):
    ...     with at_step(step):
    ...         return lowprec.matmul(x, x, math_mode=recipe)
    >>> x = jnp.linspace(0, 1, 32 * 32, dtype="float32").reshape(32, 32)
    >>> bool((product(x, 1) == product(x, 2)).all()), product._cache_size()
    (False, 1)
    """
    is_traced = isinstance(step, jax.core.Tracer) and step.shape == ()
    if not is_traced or not jnp.issubdtype(step.dtype, jnp.integer):
        raise ArrayError(
            "the step is not a traced integer of shape (): open the block inside of the function that jit compiles, "
            "whose argument the step is; outside, pass recipe.at(step) as the mode"
        )
    token = _step.set(step.astype(jnp.int32))
    try:
        with _block(object()):
            yield
    finally:
        _step.reset(token)


def current_step(*modes: Mode | None) -> Any:
    """Return the step of the block if one of the modes is a recipe that uses it, otherwise None."""
    if any(isinstance(m, Recipe) and m.rounding != "nearest" and not m.step for m in modes):
        return _step.get()
    return None
