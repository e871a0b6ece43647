"""Any shapes, strides, dtypes and modes: the product lies within its bound, and the plan foretold it."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

import lowprec
from frameworks.backends import ArrayNamespace, Backend
from support import oracles
from support.machines import MACHINES, SOFTWARE_TILES, on
from support.oracles import Epilogue

AVAILABLE = [b for b in Backend if b.skip_reason() is None]
DTYPES = ["float32", "complex64", "float64", "complex128", "float16", "bfloat16"]

extents = st.integers(0, 9)
inner_extents = extents | st.integers(16, 20)  # from 16 on tiles pay
seeds = st.integers(0, 2**32 - 1)
modes = st.sampled_from(oracles.ALL_MODES)
machines = st.sampled_from([*MACHINES, SOFTWARE_TILES])
namespaces = st.sampled_from(AVAILABLE).map(lambda b: b.load())
steps = st.sampled_from([1, 1, 1, 2, 3, -1, -2])


def numpy_dtype(name: str) -> np.dtype[Any]:
    return np.dtype(getattr(ml_dtypes, name, name))


def numbers(seed: int, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
    """Return seeded numbers over a few binades, with zeros among them."""
    rng = np.random.default_rng(seed)
    x = np.ldexp(rng.standard_normal(shape), rng.integers(-6, 6, shape)) * (rng.random(shape) > 0.05)
    if dtype.kind == "c":
        x = x + 1j * rng.standard_normal(shape)
    return x.astype(dtype)


@st.composite
def views(draw: st.DrawFn, shape: tuple[int, ...], dtype: np.dtype[Any]) -> NDArray[Any]:
    """Draw an array of this shape that lies in memory in any way that slices and transposes can make."""
    strides = [draw(steps) for _ in shape]
    margins = [draw(st.integers(0, 2)) for _ in shape]
    order = draw(st.permutations(range(len(shape))))
    whole = [n * abs(s) + margin for n, s, margin in zip(shape, strides, margins, strict=True)]
    base = numbers(draw(seeds), tuple(whole[i] for i in order), dtype).transpose(np.argsort(order))
    cut = tuple(slice(margin, None) for margin in margins)
    stepped = base[cut][tuple(slice(None, None, s) for s in strides)][tuple(slice(0, n) for n in shape)]
    assert stepped.shape == shape
    if shape and draw(st.integers(0, 7)) == 0:
        axis = draw(st.integers(0, len(shape) - 1))
        if shape[axis]:
            stepped = np.broadcast_to(np.take(stepped, [0], axis), shape)
    return stepped


@st.composite
def shapes(draw: st.DrawFn) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Draw two shapes that multiply."""
    m, n, k = draw(extents), draw(extents), draw(inner_extents)
    batch = draw(st.lists(st.integers(0, 3), max_size=2))
    ones_a, ones_b = (draw(st.lists(st.booleans(), min_size=2, max_size=2)) for _ in range(2))
    skip_a, skip_b = draw(st.integers(0, len(batch))), draw(st.integers(0, len(batch)))
    a = [1 if one else size for one, size in zip(ones_a, batch, strict=False)][skip_a:]
    b = [1 if one else size for one, size in zip(ones_b, batch, strict=False)][skip_b:]
    left, right = (draw(st.sampled_from([(m, k), (m, k), (k,)])), draw(st.sampled_from([(k, n), (k, n), (k,)])))
    return (*(a if len(left) > 1 else ()), *left), (*(b if len(right) > 1 else ()), *right)


@st.composite
def products(draw: st.DrawFn) -> tuple[NDArray[Any], NDArray[Any]]:
    """Draw two operands."""
    shape_a, shape_b = draw(shapes())
    name = draw(st.sampled_from(DTYPES))
    other = draw(st.sampled_from([name, name, name, *DTYPES]))
    return draw(views(shape_a, numpy_dtype(name))), draw(views(shape_b, numpy_dtype(other)))


def promoted(a: NDArray[Any], b: NDArray[Any]) -> np.dtype[Any]:
    """Return the dtype of the product: NumPy's rule, with ml_dtypes' for bfloat16."""
    pair = {a.dtype.name, b.dtype.name}
    if pair == {"bfloat16", "float16"}:
        return np.dtype("float32")
    if "bfloat16" in pair and len(pair) == 2:
        (name,) = pair - {"bfloat16"}
        return np.dtype(name)
    return np.promote_types(a.dtype, b.dtype)


@given(products(), modes, namespaces, machines)
@settings(max_examples=300)
def test_a_product_is_within_its_bound(
    operands: tuple[NDArray[Any], NDArray[Any]], mode: str, xp: ArrayNamespace, machine: str
) -> None:
    a, b = operands
    if a.dtype != b.dtype:
        mode = "fp32"  # what a mode does to 16-bit numbers beside float32 is told elsewhere
    before = a.tobytes(), b.tobytes()
    x, y = xp.asarray(a), xp.asarray(b)
    with on(machine):
        result = xp.to_numpy(lowprec.matmul(x, y, math_mode=mode))
        plan = lowprec.plan(x, y, math_mode=mode)
    assert result.dtype == promoted(a, b)
    assert (result.shape, result.dtype.name) == (plan.out_shape, str(plan.out_dtype))
    assert str(plan.mode) == mode
    oracles.assert_within_bound(result, a, b, mode)
    assert (a.tobytes(), b.tobytes()) == before


@st.composite
def expressions(draw: st.DrawFn) -> tuple[NDArray[Any], NDArray[Any], Epilogue, NDArray[Any] | None]:
    """Draw two operands, what follows their product, and perhaps an array for the result."""
    m, n, k = draw(st.integers(1, 9)), draw(st.integers(1, 9)), draw(inner_extents)
    batch = tuple(draw(st.lists(st.integers(1, 3), max_size=2)))
    dtype = numpy_dtype(draw(st.sampled_from(["float32", "float64", "float16", "bfloat16"])))
    a, b = draw(views((*batch, m, k), dtype)), draw(views((k, n), dtype))
    if draw(st.booleans()):  # repeated by its own strides
        b = np.broadcast_to(b, (*batch, k, n))
    beta = draw(st.sampled_from([0.0, 1.0, -0.75]))
    c = draw(views((*batch, m, n), dtype)) if beta else None
    bias = draw(st.none() | views((n,), dtype))
    then = Epilogue(
        alpha=draw(st.sampled_from([1.0, 0.0, -2.5])),
        beta=beta,
        c=c,
        bias=bias,
        activation=draw(st.sampled_from([None, "relu", "gelu"])),
    )
    out = draw(st.sampled_from(["new", "own", "c", "a"]))
    if out == "own" or (out == "c" and c is None) or (out == "a" and n != k):
        return a, b, then, np.full((*batch, m, n), np.nan, dtype)
    return a, b, then, {"new": None, "c": c, "a": a}[out]


@given(expressions(), modes, machines)
@settings(max_examples=300)
def test_an_expression_is_within_its_bound(
    drawn: tuple[NDArray[Any], NDArray[Any], Epilogue, NDArray[Any] | None], mode: str, machine: str
) -> None:
    a, b, then, out = drawn
    if out is not None and not out.flags.writeable:
        out = None
    given_arrays = {"c": then.c, "bias": then.bias}
    kept = {key: None if x is None else x.copy() for key, x in given_arrays.items()}
    before = Epilogue(then.alpha, then.beta, kept["c"], kept["bias"], then.activation)
    x, y = a.copy(), b.copy()
    with on(machine):
        result = lowprec.matmul(
            a, b, out=out, math_mode=mode, alpha=then.alpha, beta=then.beta, activation=then.activation, **given_arrays
        )
    assert out is None or result is out
    if np.isfinite(np.asarray(result, np.float64)).all():
        oracles.assert_expression(result, x, y, mode, before)
    else:
        assert result.dtype == np.float16, "only float16 is small enough to overflow here"


@given(shapes(), st.sampled_from([*DTYPES, "int8"]), modes, st.booleans())
@settings(max_examples=200)
def test_a_plan_from_shapes_is_the_plan_from_arrays(
    drawn: tuple[tuple[int, ...], tuple[int, ...]], name: str, mode: str, wide: bool
) -> None:
    shape_a, shape_b = drawn
    dtype = numpy_dtype(name)
    out_dtype = "float32" if wide and name in ("float16", "bfloat16") else None
    a, b = np.zeros(shape_a, dtype), np.zeros(shape_b, dtype)
    described = lowprec.plan(
        lowprec.ShapeDtype(shape_a, name), lowprec.ShapeDtype(shape_b, name), math_mode=mode, out_dtype=out_dtype
    )
    made = lowprec.plan(a, b, math_mode=mode, out_dtype=out_dtype)
    assert (described.out_shape, described.out_dtype) == (made.out_shape, made.out_dtype)
    if 0 not in (*shape_a, *shape_b):  # the strides of an empty array may be any
        assert described == made
        assert hash(described) == hash(made)
    result = lowprec.matmul(a, b, math_mode=mode, out_dtype=out_dtype)
    assert (np.shape(result), result.dtype.name) == (made.out_shape, str(made.out_dtype))
    real_products = 8 if dtype.kind == "c" else 2
    m, n, k = ((shape_a[-2] if len(shape_a) > 1 else 1), (shape_b[-1] if len(shape_b) > 1 else 1), shape_a[-1])
    batch = np.broadcast_shapes(shape_a[:-2], shape_b[:-2])
    assert made.flops == real_products * m * n * k * int(np.prod(batch, dtype=int))
