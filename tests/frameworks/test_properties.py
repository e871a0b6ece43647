"""Any shapes, strides, dtypes and modes: the product is within its bound, as planned."""

import ml_dtypes
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

import lowprec
from support import oracles

DTYPES = ["float32", "complex64", "float64", "complex128", "float16", "bfloat16"]

extents = st.integers(0, 9)
inner_extents = extents | st.integers(16, 20)  # from 16 on tiles pay
modes = st.sampled_from(oracles.ALL_MODES)


def numpy_dtype(name):
    return np.dtype(getattr(ml_dtypes, name, name))


@st.composite
def shapes(draw):
    """Draw two shapes that multiply."""
    m, n, k = draw(extents), draw(extents), draw(inner_extents)
    batch = draw(st.lists(st.integers(0, 3), max_size=2))
    ones_a, ones_b = (draw(st.lists(st.booleans(), min_size=2, max_size=2)) for _ in range(2))
    skip_a, skip_b = draw(st.integers(0, len(batch))), draw(st.integers(0, len(batch)))
    a = [1 if one else size for one, size in zip(ones_a, batch, strict=False)][skip_a:]
    b = [1 if one else size for one, size in zip(ones_b, batch, strict=False)][skip_b:]
    left, right = (draw(st.sampled_from([(m, k), (m, k), (k,)])), draw(st.sampled_from([(k, n), (k, n), (k,)])))
    return (*(a if len(left) > 1 else ()), *left), (*(b if len(right) > 1 else ()), *right)


@given(shapes(), st.sampled_from([*DTYPES, "int8"]), modes, st.booleans())
@settings(max_examples=200)
def test_a_plan_from_shapes_is_the_plan_from_arrays(drawn, name, mode, wide):
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
