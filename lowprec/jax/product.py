"""``matmul`` for JAX: arguments checked, the primitive bound, what follows the product."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lowprec.arrays.libraries import promoted
from lowprec.arrays.prepared_view import refuse_prepared
from lowprec.core import plan_call
from lowprec.core.arguments import ShapeDtype, view_of
from lowprec.errors import ArrayError, DTypeError, UnsupportedError
from lowprec.formats import DType
from lowprec.jax import ambient
from lowprec.jax.primitive import dot_general
from lowprec.modes import MathMode, parse_mode
from lowprec.planning import Activation, GemmPlan

#: What stands for the first of the sizes that are known by name only, in checks.
_UNKNOWN = 1009


def matmul(
    a: jax.Array,
    b: jax.Array,
    /,
    *,
    c: jax.Array | None = None,
    alpha: complex = 1.0,
    beta: complex = 0.0,
    bias: jax.Array | None = None,
    activation: str | None = None,
    out_dtype: Any = None,
    math_mode: str | MathMode | None = None,
    backward_mode: str | MathMode | None = None,
) -> jax.Array:
    """Multiply two arrays, ``activation(alpha * a @ b + beta * c + bias)``, with all that JAX does to a product.

    It is transformed, compiled, partitioned among devices and exported. What follows the product (``alpha``, ``c``,
    ``bias``, ``activation``) is ``jax.numpy``'s arithmetic, in float32 for 16-bit operands.

    Parameters
    ----------
    a : jax.Array, shape (..., m, k) or (k,)
        Traced or not. dtypes: float64, float32, float16, bfloat16, complex64, complex128, int8. One of the two may be
        a NumPy array.
    b : jax.Array, shape (..., k, n) or (k,)
    c, alpha, beta, bias, activation, out_dtype, math_mode
        As :func:`lowprec.matmul` takes them; ``alpha`` and ``beta`` may also be traced numbers.
    backward_mode : str or MathMode, optional
        The mode of the two products of the backward pass; by default the one that the forward product had. A guard
        that is open while the backward pass is traced stands above it.

    Returns
    -------
    jax.Array, shape (..., m, n)

    Raises
    ------
    ArrayError, ModeError, ShapeError, DTypeError, UnsupportedError
        As :func:`lowprec.matmul`.

    Examples
    --------
    >>> import jax, jax.numpy as jnp
    >>> loss = lambda w: matmul(jnp.eye(2), w, math_mode="bf16").sum()
    >>> jax.jit(jax.grad(loss))(jnp.ones((2, 2), "float32"))
    Array([[1., 1.],
           [1., 1.]], dtype=float32)
    """
    resolved = ambient.resolve(math_mode)
    if resolved.emulates is not None:
        raise UnsupportedError(
            "lowprec.emulate imitates tensor cores on arrays that are there, not in what JAX traces; leave the scope, "
            "or call the function outside of jit, grad, vmap and other transforms"
        )
    mode = resolved.mode.value
    backward = mode if backward_mode is None else parse_mode(backward_mode, "backward_mode").value
    arrays = {"a": a, "b": b, "c": c, "bias": bias}
    arrays = {n: _array(n, x) for n, x in arrays.items() if x is not None or n in ("a", "b")}
    a, b, c, bias = promoted((arrays["a"], arrays["b"]), arrays.get("c"), arrays.get("bias"))
    given = {"a": a, "b": b, "c": c, "bias": bias}
    arrays = {name: x for name, x in given.items() if x is not None}
    plan = _checked(arrays, alpha, beta, activation, out_dtype)
    x, y = (arrays[name].astype(plan.compute_dtype.label) for name in "ab")
    plain = c is bias is activation is None and type(alpha) is float and alpha == 1.0
    # Rounded once, and to no less than the operands' type inside the primitive.
    product_dtype = (
        plan.out_dtype
        if plain and plan.out_dtype.bits >= plan.compute_dtype.bits
        else plan.accumulator
    )
    out = _product(x, y, mode, backward, product_dtype.label)
    if not plain:
        out = _followed(out, arrays, alpha, beta, plan.problem.activation)
    return out.astype(plan.out_dtype.label)


# -- checks ---------------------------------------------------------------------------------------


def _array(name: str, x: Any) -> jax.Array:
    """Return an argument as an array of JAX's; raise ArrayError if it is none, and none of NumPy's."""
    if isinstance(x, jax.Array):
        return x
    if not isinstance(x, np.ndarray):
        refuse_prepared(**{name: x})
        raise ArrayError(
            f"{name} is a {type(x).__qualname__}, no array of JAX's or NumPy's; pass jax.numpy.asarray({name})"
        )
    view_of(x)  # raises where it has no place in a product
    x = np.asarray(x, x.dtype.newbyteorder("="))  # JAX has no other order of bytes
    found: jax.Array = jnp.asarray(x)
    if found.dtype != x.dtype:
        raise DTypeError(
            f"{name} is {x.dtype}, but JAX has 64-bit types switched off; enable them with "
            f'jax.config.update("jax_enable_x64", True), or convert {name}'
        )
    return found


def _checked(
    arrays: dict[str, jax.Array], alpha: Any, beta: Any, activation: Any, out_dtype: Any
) -> GemmPlan:
    """Return a plan of the product, which raises what any other product would."""
    sizes: dict[str, int] = {}

    def size(extent: Any) -> int:  # of an exported function it may be a name
        return (
            extent if type(extent) is int else sizes.setdefault(str(extent), _UNKNOWN + len(sizes))
        )

    described = {name: ShapeDtype(tuple(map(size, x.shape)), x.dtype) for name, x in arrays.items()}
    # A traced number is checked as another that is not one, which needs what any factor of its type does.
    factors = [
        (2j if jnp.iscomplexobj(x) else 2.0) if isinstance(x, jax.Array) and x.ndim == 0 else x
        for x in (alpha, beta)
    ]
    alpha, beta = factors
    return plan_call.plan(
        described["a"], described["b"],
        c=described.get("c"), alpha=alpha, beta=beta, bias=described.get("bias"), activation=activation,
        out_dtype=out_dtype, math_mode=MathMode.FP32,
    )  # fmt: skip


# -- the product, and what follows it -------------------------------------------------------------


def _product(a: Any, b: Any, mode: str, backward_mode: str, out_dtype: str) -> Any:
    last, first = a.ndim - 1, max(b.ndim - 2, 0)
    how = {"mode": mode, "backward_mode": backward_mode, "out_dtype": out_dtype}
    if a.ndim <= 2 or b.ndim <= 2:
        out = dot_general(a, b, dimensions=(((last,), (first,)), ((), ())), **how)
        return jnp.moveaxis(out, 0, -2) if a.ndim == 2 and b.ndim > 2 else out
    batch = jnp.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    a = jnp.broadcast_to(a, (*batch, *a.shape[-2:]))
    b = jnp.broadcast_to(b, (*batch, *b.shape[-2:]))
    axes = tuple(range(len(batch)))
    dimensions = (((a.ndim - 1,), (b.ndim - 2,)), (axes, axes))
    return dot_general(a, b, dimensions=dimensions, **how)


def _followed(
    out: Any, arrays: dict[str, Any], alpha: Any, beta: Any, activation: Activation | None
) -> Any:
    """Return ``activation(alpha * out + beta * c + bias)``."""
    if type(alpha) is float and alpha == 0.0:
        out = jnp.zeros_like(out)  # as BLAS specifies, whatever the product is
    elif type(alpha) is not float or alpha != 1.0:
        out = (alpha * out).astype(out.dtype)
    if "c" in arrays and not (isinstance(beta, (int, float, complex)) and beta == 0):
        c = _aligned(arrays["c"], out)
        out = out + (beta * c).astype(out.dtype)
    if "bias" in arrays:
        out = _plus(out, _aligned(arrays["bias"], out))
    if activation is Activation.GELU:
        return jax.nn.gelu(out, approximate=True)
    return out if activation is None else getattr(jax.nn, activation.value)(out)


def _aligned(x: Any, out: Any) -> Any:
    """Return an addend in the product's type and with its number of axes, which JAX may be told not to add."""
    return jax.lax.expand_dims(x.astype(out.dtype), range(out.ndim - x.ndim))


def _plus(out: Any, bias: Any) -> Any:
    """Add; integers to the nearest number of their type."""
    if out.dtype != DType.INT32.label:
        return out + bias
    limits = jnp.iinfo(out.dtype)
    lowest, highest = limits.min - jnp.minimum(bias, 0), limits.max - jnp.maximum(bias, 0)
    return jnp.clip(out, lowest, highest) + bias
