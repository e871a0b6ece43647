"""The product inside JAX: under jit, grad, vmap and every other transformation, on sharded arrays, exported.

``lowprec.matmul`` comes here by itself for arrays that JAX traces or has spread over several devices. The name here is
for what needs one: a mode for the backward pass.
"""

from __future__ import annotations

from lowprec.jax.product import matmul

__all__ = ["matmul"]
