"""The product inside JAX: under jit, grad, vmap and every other transformation, on sharded arrays, exported.

``lowprec.matmul`` delegates to this package for arrays that JAX traces or that are sharded over several devices.
"""

from __future__ import annotations

from lowprec.core.dispatch import matmul
from lowprec.jax.interception import intercept
from lowprec.jax.steps import at_step

__all__ = ["at_step", "intercept", "matmul"]


def __dir__() -> list[str]:
    return __all__
