"""``lowprec_dot_general``: the product as a primitive of JAX, with the rules of its transformations.

Its dimensions are those of ``lax.dot_general``, so a transformed product is again the same primitive. ``mode`` applies
to the product and its tangents, ``backward_mode`` to the two products of the transpose. A second primitive has the step
of stochastic rounding as a third operand.
"""

from __future__ import annotations

import functools
from contextlib import suppress
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from lowprec import policy
from lowprec.errors import DeviceError, UnsupportedError
from lowprec.formats import dtype_from_name, promote
from lowprec.jax.lowering import Axes, Dimensions, axes_of, multiply
from lowprec.modes import of_pass

_product_p = Primitive("lowprec_dot_general")
_stepped_p = Primitive("lowprec_dot_general_at_step")
_PLATFORMS = ("cpu", "cuda")


def dot_general(a: Any, b: Any, step: Any = None, *, out_sharding: Any = None, **how: Any) -> Any:
    """Multiply two arrays of one element type in a mode, as ``lax.dot_general``.

    ``how`` has the dimensions, the names of ``mode`` and ``backward_mode``, and the ``out_dtype``. ``step``, an int32
    array of shape (), is that of stochastic recipes without one.
    """
    # Under shard_map both vary over the same mesh axes then, so that gradients are summed over devices.
    over_a = _varying(a)
    over_b = _varying(b)
    if over_b - over_a:
        a = lax.pcast(a, tuple(over_b - over_a), to="varying")
    if over_a - over_b:
        b = lax.pcast(b, tuple(over_a - over_b), to="varying")
    if step is None:
        return _product_p.bind(a, b, out_sharding=out_sharding, **how)
    return _stepped_p.bind(a, b, step, out_sharding=out_sharding, **how)


def _varying(x: Any) -> frozenset[str]:
    kind = jax.typeof(x)
    if hasattr(kind, "vma"):
        return frozenset(kind.vma)
    return frozenset(kind.manual_axis_type.varying)


def _abstract(
    a: Any,
    b: Any,
    _step: Any = None,
    *,
    dimensions: Dimensions,
    out_dtype: str,
    out_sharding: Any,
    **_: Any,
) -> Any:
    """Return shape, type, sharding and manual axes of the result, as those of ``lax.dot_general``."""
    kind, _ = lax.dot_general_p.abstract_eval(
        a,
        b,
        dimension_numbers=dimensions,
        precision=None,
        preferred_element_type=np.dtype(out_dtype),
        out_sharding=out_sharding,
    )
    return kind


@functools.lru_cache(maxsize=1024)
def _compiled(**params: Any) -> Any:
    platforms = {
        name: functools.partial(multiply, on_gpu=name == "cuda", **params) for name in _PLATFORMS
    }
    return jax.jit(lambda *operands: lax.platform_dependent(*operands, **platforms))


def _compute(a: Any, b: Any, *step: Any, **params: Any) -> Any:
    sets = [x.devices() for x in (a, b) if isinstance(x, jax.Array) and x.committed]
    if len(sets) == 2 and sets[0] != sets[1]:
        raise DeviceError(
            f"the operands are on {sets[0]} and on {sets[1]}; move one of them by jax.device_put"
        )
    return _compiled(**params)(a, b, *step)


for _primitive in (_product_p, _stepped_p):
    _primitive.def_abstract_eval(_abstract)
    _primitive.def_impl(_compute)
    for _name in _PLATFORMS:
        _lower = mlir.lower_fun(
            functools.partial(multiply, on_gpu=_name == "cuda"), multiple_results=False
        )
        mlir.register_lowering(_primitive, _lower, platform=_name)


def _gradient(
    gradient: Any, a: Any, b: Any, step: Any = None, *,
    dimensions: Dimensions, is_a: bool, backward_mode: str, **_: Any,
) -> Any:  # fmt: skip
    """Return an operand's gradient: the product of ``gradient`` and the other operand over the other's free axes.

    The gradient of ``a`` has ``gradient`` as its first operand, that of ``b`` as its second one.
    """
    number = 0 if is_a else 1
    aval = (a, b)[number].aval
    other = (b, a)[number]
    own = axes_of(aval, dimensions, number)
    others = axes_of(other, dimensions, 1 - number)
    dtype = promote(*(dtype_from_name(str(x.dtype)) for x in (gradient, other))).label
    # Axes of the forward product: batch, free axes of ``a``, free axes of ``b``.
    start = len(own.batch)
    if is_a:
        start += len(own.free)
    summed = (tuple(range(start, start + len(others.free))), others.free)
    batch = (tuple(range(len(own.batch))), others.batch)
    # The remaining axes of ``other`` are its contracted ones, in ascending order.
    in_order = tuple(mine for _, mine in sorted(zip(others.summed, own.summed, strict=True)))
    factors = (gradient.astype(dtype), other.astype(dtype))
    axes = (own.free, in_order)
    if not is_a:
        factors = factors[::-1]
        axes = axes[::-1]
        summed = summed[::-1]
        batch = batch[::-1]
    order = sum(axes, own.batch)
    mode = of_pass(policy.resolve(backward_mode).mode, "grad_input" if is_a else "grad_weight")
    product = dot_general(
        *factors, step, dimensions=(summed, batch), mode=mode.value, backward_mode=backward_mode,
        out_dtype=dtype, out_sharding=_explicit_sharding(aval, order),
    )  # fmt: skip
    positions = tuple(order.index(i) for i in range(len(order)))
    return lax.transpose(product, positions).astype(aval.dtype)


def _explicit_sharding(aval: Any, axes: Axes) -> Any:
    """Return an operand's sharding with permuted axes, by which JAX sums its gradient; None without explicit axes."""
    mesh = aval.sharding.mesh
    if AxisType.Explicit not in mesh.axis_types:
        return None
    return NamedSharding(mesh, PartitionSpec(*(aval.sharding.spec[axis] for axis in axes)))


ad.defbilinear(
    _product_p, functools.partial(_gradient, is_a=True), functools.partial(_gradient, is_a=False)
)
ad.defjvp(
    _stepped_p,
    lambda tangent, a, b, step, **params: _stepped_p.bind(tangent, b, step, **params),
    lambda tangent, a, b, step, **params: _stepped_p.bind(a, tangent, step, **params),
    None,
)


def _transposed(cotangent: Any, a: Any, b: Any, step: Any, **params: Any) -> tuple[Any, ...]:
    """Return the gradient of the operand that is unknown."""
    is_a = ad.is_undefined_primal(a)
    x = a if is_a else b
    if type(cotangent) is ad.Zero:
        found = ad.Zero(x.aval.to_ct_aval())
    else:
        found = _gradient(cotangent, a, b, step, is_a=is_a, **params)
    if is_a:
        return found, None, None
    return None, found, None


ad.primitive_transposes[_stepped_p] = _transposed


# jet is experimental, and its rules have no public names.
with suppress(ImportError, AttributeError):
    from jax.experimental import jet

    jet.jet_rules[_product_p] = functools.partial(jet._bilinear_taylor_rule, _product_p)


def _batched(
    operands: tuple[Any, ...],
    mapped: tuple[int | None, ...],
    *,
    dimensions: Dimensions,
    out_sharding: Any,
    **rest: Any,
) -> tuple[Any, int]:
    """Return the product of operands with a mapped axis: a batch axis where both have it, else a free one."""
    if any(axis is not None for axis in mapped[2:]):
        raise UnsupportedError(
            "the step of stochastic rounding differs along an axis that vmap maps; map the operands only"
        )
    # First, because blocks and random numbers depend on the order of the axes.
    operands = tuple(
        x if axis is None else jnp.moveaxis(x, axis, 0)
        for x, axis in zip(operands, mapped, strict=True)
    )
    mapped = tuple(None if axis is None else 0 for axis in mapped)
    a, b, *_ = operands
    of_a, of_b, *_ = mapped
    summed: Any = tuple(map(_shifted, dimensions[0], mapped))
    batch: Any = tuple(map(_shifted, dimensions[1], mapped))
    if of_a is not None and of_b is not None:
        batch = ((of_a, *batch[0]), (of_b, *batch[1]))
        axis = 0
    elif of_a is not None:
        axis = len(batch[0]) + axes_of(a, (summed, batch), 0).free.index(of_a)
    else:
        axis = a.ndim - len(summed[0]) + axes_of(b, (summed, batch), 1).free.index(cast(int, of_b))
    if out_sharding is not None:
        spec = list(out_sharding.spec)
        out_sharding = out_sharding.update(spec=PartitionSpec(*spec[:axis], None, *spec[axis:]))
    return dot_general(
        *operands, dimensions=(summed, batch), out_sharding=out_sharding, **rest
    ), axis


def _shifted(axes: tuple[int, ...], mapped: int | None) -> tuple[int, ...]:
    if mapped is None:
        return axes
    return tuple(axis + (axis >= mapped) for axis in axes)


for _primitive in (_product_p, _stepped_p):
    batching.primitive_batchers[_primitive] = _batched
