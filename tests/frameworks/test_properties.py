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
