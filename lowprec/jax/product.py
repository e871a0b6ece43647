"""The product of arrays that JAX traces or shards: the primitive and the epilogue."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from lowprec.arrays import library_of
from lowprec.core.call import Call
from lowprec.core.executors import CachedExecutor
from lowprec.errors import ArrayError, DTypeError, UnsupportedError
from lowprec.formats import DType
from lowprec.jax.current_mode import check_key
from lowprec.jax.primitive import dot_general
from lowprec.jax.steps import current_step
from lowprec.modes import ActivationName, Mode, ResolvedMode


def product(
    call: Call, resolved: ResolvedMode, entry: CachedExecutor, backward_mode: Mode | None = None
) -> jax.Array:
    """Return the product of arrays that JAX traces or that are sharded over several devices."""
    check_key()
    if resolved.emulates is not None:
        raise UnsupportedError(
            "lowprec.emulate imitates tensor cores on concrete arrays, not on those that JAX traces; leave the scope, "
            "or call the function outside of jit, grad, vmap and other transforms"
        )
    plan = entry.plan
    options = call.options
    _, c, bias, *_ = call.others
    a = _array("a", call.a)
    b = _array("b", call.b)
    if c is not None:
        c = _array("c", c)
    if bias is not None:
        bias = _array("bias", bias)
    library_of(a).check_result(plan.out_dtype)  # type: ignore[attr-defined]  # of JaxLibrary
    is_plain = c is bias is options.activation is None and options.alpha == 1.0
    # The primitive rounds once, to a type no narrower than the operands'.
    product_dtype = plan.accumulator
    if is_plain and plan.out_dtype.bits >= plan.compute_dtype.bits:
        product_dtype = plan.out_dtype
    how = {
        "mode": resolved.mode.value,
        "backward_mode": (backward_mode or resolved.mode).value,
        "out_dtype": product_dtype.label,
    }
    step = current_step(resolved.mode, backward_mode)
    kind = plan.compute_dtype.label
    out = _product(a.astype(kind), b.astype(kind), step, how)
    if not is_plain:
        if bias is not None and b.ndim == 1:
            bias = bias[0]
        alpha, beta = map(_factor, call.factors, (options.alpha, options.beta))
        out = _with_epilogue(out, c, bias, alpha, beta, options.activation)
    return out.astype(plan.out_dtype.label)


def _factor(given: Any, checked: Any) -> Any:
    """Return a factor of the epilogue, which JAX may trace."""
    return given if isinstance(given, jax.Array) else checked


def _array(name: str, x: Any) -> jax.Array:
    if isinstance(x, jax.Array):
        return x
    if not isinstance(x, np.ndarray):
        raise ArrayError(
            f"{name} is a {type(x).__qualname__}, not an array of JAX or NumPy; pass jax.numpy.asarray({name})"
        )
    x = np.asarray(x, x.dtype.newbyteorder("="))  # JAX has only the native byte order
    array: jax.Array = jnp.asarray(x)
    if array.dtype != x.dtype:
        raise DTypeError(
            f"{name} is {x.dtype}, but 64-bit types are disabled in JAX; enable them with "
            f'jax.config.update("jax_enable_x64", True), or convert {name}'
        )
    return array


def _product(a: Any, b: Any, step: Any, how: dict[str, str]) -> Any:
    """Multiply stacks of matrices; axes along which an operand is broadcast are free axes of the other one."""
    ndim = max(a.ndim, b.ndim)
    over_a, over_b = (
        dict(zip(range(ndim - x.ndim, ndim - 2), x.shape, strict=False)) for x in (a, b)
    )
    both = over_a.keys() & over_b.keys()
    ones_a = [axis for axis in sorted(both) if over_a[axis] == 1 != over_b[axis]]
    ones_b = [axis for axis in sorted(both) if over_b[axis] == 1 != over_a[axis]]
    a = jnp.squeeze(a, [axis - ndim + a.ndim for axis in ones_a])
    b = jnp.squeeze(b, [axis - ndim + b.ndim for axis in ones_b])
    of_a = [axis for axis in over_a if axis not in ones_a]
    of_b = [axis for axis in over_b if axis not in ones_b]
    batch = [axis for axis in of_a if axis in of_b]
    axes = (tuple(map(of_a.index, batch)), tuple(map(of_b.index, batch)))
    summed = ((a.ndim - 1,), (max(b.ndim - 2, 0),))
    out = dot_general(a, b, step, dimensions=(summed, axes), **how)
    # Axes of the result: batch, those of ``a``, those of ``b``.
    order = [*batch, *(x for x in of_a if x not in batch), *[ndim - 2] * (a.ndim > 1)]
    order += [*(x for x in of_b if x not in batch), *[ndim - 1] * (b.ndim > 1)]
    return lax.transpose(out, sorted(range(len(order)), key=order.__getitem__))


def _with_epilogue(
    out: Any, c: Any, bias: Any, alpha: Any, beta: Any, activation: ActivationName | None
) -> Any:
    if not isinstance(alpha, jax.Array) and alpha == 0:
        # as in BLAS: with alpha = 0 the product is ignored, also Inf and NaN
        out = jnp.zeros_like(out)
    elif isinstance(alpha, jax.Array) or alpha != 1:
        out = (alpha * out).astype(out.dtype)
    if c is not None and (isinstance(beta, jax.Array) or beta != 0):
        out = out + (beta * _aligned(c, out)).astype(out.dtype)
    if bias is not None:
        bias = _aligned(bias, out)
        if out.dtype == DType.INT32.label:  # saturate
            limits = jnp.iinfo(out.dtype)
            out = jnp.clip(
                out, limits.min - jnp.minimum(bias, 0), limits.max - jnp.maximum(bias, 0)
            )
        out = out + bias
    if activation == "gelu":
        return jax.nn.gelu(out, approximate=True)
    if activation is not None:
        return getattr(jax.nn, activation)(out)
    return out


def _aligned(x: Any, out: Any) -> Any:
    """Return an addend with the product's type and number of axes; JAX's own rank promotion may be disabled."""
    return jax.lax.expand_dims(x.astype(out.dtype), range(out.ndim - x.ndim))
