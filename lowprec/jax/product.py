"""``matmul`` for JAX: the primitive and the epilogue."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lowprec.arrays import library_of
from lowprec.arrays.base import Delegate
from lowprec.core.call import Call, bind, run
from lowprec.core.executors import CachedExecutor
from lowprec.core.tolerance import mode_of
from lowprec.errors import ArrayError, DTypeError, UnsupportedError
from lowprec.formats import DType
from lowprec.jax.current_mode import check_key
from lowprec.jax.primitive import dot_general
from lowprec.jax.steps import current_step
from lowprec.modes import ActivationName, BoundName, MathMode, Mode, ModeName, Recipe, ResolvedMode, parse_mode
from lowprec.planning import Activation


def matmul(
    a: jax.Array,
    b: jax.Array,
    /,
    *,
    c: jax.Array | None = None,
    alpha: complex = 1.0,
    beta: complex = 0.0,
    bias: jax.Array | None = None,
    activation: ActivationName | None = None,
    out_dtype: Any = None,
    math_mode: ModeName | MathMode | Recipe | None = None,
    rtol: float | None = None,
    bound: BoundName | None = None,
    backward_mode: ModeName | MathMode | Recipe | None = None,
) -> jax.Array:
    """Return ``activation(alpha * a @ b + beta * c + bias)`` inside JAX.

    The product is transformed, compiled, partitioned among devices and exported. ``jax.numpy`` computes the epilogue
    (``alpha``, ``c``, ``bias``, ``activation``), in float32 for 16-bit operands.

    Parameters
    ----------
    a : jax.Array, shape (..., m, k) or (k,)
        Traced or not. dtypes: float64, float32, float16, bfloat16, complex64, complex128, int8. One of the two may be
        a NumPy array.
    b : jax.Array, shape (..., k, n) or (k,)
    c, alpha, beta, bias, activation, out_dtype, math_mode, rtol, bound
        As for :func:`lowprec.matmul`; ``alpha`` and ``beta`` may also be traced numbers.
    backward_mode : str, MathMode or Recipe, optional
        Mode of the two products of the backward pass; by default the forward product's. A guard that is open while the
        backward pass is traced overrides it.

    Examples
    --------
    >>> import jax, jax.numpy as jnp
    >>> loss = lambda w: matmul(jnp.eye(2), w, math_mode="bf16").sum()
    >>> jax.jit(jax.grad(loss))(jnp.ones((2, 2), "float32"))
    Array([[1., 1.],
           [1., 1.]], dtype=float32)
    """
    call = bind(a, b, c=c, alpha=alpha, beta=beta, bias=bias, activation=activation, out_dtype=out_dtype)
    backward = None if backward_mode is None else parse_mode(backward_mode, "backward_mode")
    call = call._replace(delegate=call.delegate or _ALWAYS)
    array: jax.Array = run(call, mode_of(call, math_mode, rtol, bound), backward)
    return array


_ALWAYS = Delegate("jax", "JAX computes the products of lowprec.jax")


def product(call: Call, resolved: ResolvedMode, entry: CachedExecutor, backward_mode: Mode | None = None) -> jax.Array:
    """Return the product of arrays that JAX traces or that are sharded over several devices."""
    check_key()
    if resolved.emulates is not None:
        raise UnsupportedError(
            "lowprec.emulate imitates tensor cores on concrete arrays, not on those that JAX traces; leave the scope, "
            "or call the function outside of jit, grad, vmap and other transforms"
        )
    plan, options = entry.plan, call.options
    a, b = _array("a", call.a), _array("b", call.b)
    _, c, bias, *_ = call.others
    c, bias = (None if x is None else _array(n, x) for n, x in (("c", c), ("bias", bias)))
    library_of(a).check_result(plan.out_dtype)  # type: ignore[attr-defined]  # of JaxLibrary
    x, y = (v.astype(plan.compute_dtype.label) for v in (a, b))
    is_plain = c is bias is options.activation is None and options.alpha == 1.0
    # The primitive rounds once, to a type no narrower than the operands'.
    exact = is_plain and plan.out_dtype.bits >= plan.compute_dtype.bits
    mode, backward = resolved.mode.value, (backward_mode or resolved.mode).value
    step = current_step(resolved.mode, backward_mode)
    out = _product(x, y, step, mode, backward, (plan.out_dtype if exact else plan.accumulator).label)
    if not is_plain:
        alpha, beta = (
            raw if isinstance(raw, jax.Array) else checked
            for raw, checked in zip(call.factors, (options.alpha, options.beta), strict=True)
        )
        out = _with_epilogue(out, c, bias if bias is None or b.ndim > 1 else bias[0], alpha, beta, options.activation)
    return out.astype(plan.out_dtype.label)


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


def _product(a: Any, b: Any, step: Any, mode: str, backward_mode: str, out_dtype: str) -> Any:
    last, first = a.ndim - 1, max(b.ndim - 2, 0)
    how = {"mode": mode, "backward_mode": backward_mode, "out_dtype": out_dtype}
    if a.ndim <= 2 or b.ndim <= 2:
        out = dot_general(a, b, step, dimensions=(((last,), (first,)), ((), ())), **how)
        return jnp.moveaxis(out, 0, -2) if a.ndim == 2 and b.ndim > 2 else out
    batch = jnp.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    a = jnp.broadcast_to(a, (*batch, *a.shape[-2:]))
    b = jnp.broadcast_to(b, (*batch, *b.shape[-2:]))
    axes = tuple(range(len(batch)))
    dimensions = (((a.ndim - 1,), (b.ndim - 2,)), (axes, axes))
    return dot_general(a, b, step, dimensions=dimensions, **how)


def _with_epilogue(out: Any, c: Any, bias: Any, alpha: Any, beta: Any, activation: Activation | None) -> Any:
    if not isinstance(alpha, jax.Array) and alpha == 0:
        out = jnp.zeros_like(out)  # as in BLAS: with alpha = 0 the product is ignored, also Inf and NaN
    elif isinstance(alpha, jax.Array) or alpha != 1:
        out = (alpha * out).astype(out.dtype)
    if c is not None and (isinstance(beta, jax.Array) or beta != 0):
        out = out + (beta * _aligned(c, out)).astype(out.dtype)
    if bias is not None:
        bias = _aligned(bias, out)
        if out.dtype == DType.INT32.label:  # saturate
            limits = jnp.iinfo(out.dtype)
            lowest, highest = limits.min - jnp.minimum(bias, 0), limits.max - jnp.maximum(bias, 0)
            out = jnp.clip(out, lowest, highest)
        out = out + bias
    if activation is Activation.GELU:
        return jax.nn.gelu(out, approximate=True)
    return out if activation is None else getattr(jax.nn, activation.value)(out)


def _aligned(x: Any, out: Any) -> Any:
    """Return an addend with the product's type and number of axes; JAX's own rank promotion may be disabled."""
    return jax.lax.expand_dims(x.astype(out.dtype), range(out.ndim - x.ndim))
