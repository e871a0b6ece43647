"""Convolutions of JAX programs that do not use lowprec."""

import numpy as np
import pytest

import lowprec

#: Rounds to 1 in bfloat16.
ABOVE = 1 + 2.0**-9

EXACT = ("bf16", "bf16x6", "fp16", "fp64")


def draw_convolution(jax, rng):
    """Return a function of random parameters, and images and kernels of small integers."""
    axes = rng.integers(1, 4)
    groups = rng.choice([1, 1, 2, 3])
    batches = 1
    if rng.random() < 0.2:
        groups, batches = 1, rng.choice([2, 3])
    images = [rng.integers(1, 4) * batches, rng.integers(1, 6) * groups, *rng.integers(3, 9, axes)]
    kernels = [
        rng.integers(1, 3) * groups * batches,
        images[1] // groups,
        *rng.integers(1, 4, axes),
    ]
    orders = [tuple(rng.permutation(axes + 2).tolist()) for _ in range(3)]
    given = {
        "window_strides": rng.integers(1, 4, axes).tolist(),
        "padding": [(int(low), int(high)) for low, high in rng.integers([-1, 0], 4, (axes, 2))],
        "lhs_dilation": rng.integers(1, 3, axes).tolist(),
        "rhs_dilation": rng.integers(1, 3, axes).tolist(),
        "dimension_numbers": jax.lax.ConvDimensionNumbers(*orders),
        "feature_group_count": int(groups),
        "batch_group_count": int(batches),
    }
    operands = [
        np.transpose(rng.integers(-3, 4, shape).astype(np.float32), np.argsort(order))
        for shape, order in zip((images, kernels), orders, strict=False)
    ]
    return (lambda x, w: jax.lax.conv_general_dilated(x, w, **given)), operands


@pytest.mark.parametrize("seeds", [range(3), pytest.param(range(3, 50), marks=pytest.mark.sweep)])
def test_integers_are_exact(jax, seeds):
    for seed in seeds:
        convolve, operands = draw_convolution(jax, np.random.default_rng(seed))
        expected = convolve(*operands)
        for mode in EXACT:
            with lowprec.jax.intercept(mode) as seen:
                found = convolve(*operands)
            assert np.array_equal(found, expected), (seed, mode)
            assert [p.mode for p in seen.report().products] == [mode]


def test_both_operands_and_gradients_are_rounded(jax):
    jnp = jax.numpy
    x = jnp.full((2, 4, 7, 7), ABOVE, "float32")
    w = jnp.full((3, 4, 3, 3), ABOVE, "float32")
    convolve = jax.jit(lambda x, w: jax.lax.conv(x, w, (1, 1), "VALID"))

    @jax.jit
    def gradients(x, w):
        return jax.vjp(convolve, x, w)[1](jnp.full((2, 3, 5, 5), ABOVE, "float32"))

    with lowprec.jax.intercept("bf16") as seen:
        assert (convolve(x, w) == 36).all()
        of_x, of_w = gradients(x, w)
    assert of_x[0, 0, 3, 3] == 27
    assert (of_w == 50).all()
    assert convolve(x, w).min() > 36
    assert {(p.backward, p.mode) for p in seen.report().taken} == {(False, "bf16"), (True, "bf16")}


@pytest.mark.parametrize("mode", ["int8", "mxfp8", "nvfp4", "fp16x3"])
def test_a_convolution_is_a_product_of_unfolded_images(jax, mode):
    """The oracle multiplies windows of NumPy; both have FP32 sums of the same rounded numbers, in another order."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((2, 8, 6, 6), dtype=np.float32)
    w = rng.standard_normal((5, 8, 3, 3), dtype=np.float32)
    windows = np.lib.stride_tricks.sliding_window_view(x, (3, 3), (2, 3))
    rows = windows.transpose(0, 2, 3, 1, 4, 5).reshape(-1, 72)
    expected = lowprec.matmul(rows, w.reshape(5, 72).T.copy(), math_mode=mode)
    with lowprec.jax.intercept(mode):
        found = jax.lax.conv(jax.numpy.asarray(x), jax.numpy.asarray(w), (1, 1), "VALID")
    found = np.asarray(found).transpose(0, 2, 3, 1).reshape(-1, 5)
    sums = np.abs(rows) @ np.abs(w.reshape(5, 72).T)
    assert (np.abs(found - expected) <= 2 * 73 * 2.0**-24 * sums).all()


@pytest.mark.parametrize("mode", ["bf16x3", "fp16", "int8"])
def test_an_infinity_reaches_its_windows_alone(jax, mode):
    x = jax.numpy.ones((1, 1, 8, 8)).at[0, 0, 0, 0].set(np.inf)
    with lowprec.jax.intercept(mode):
        found = jax.lax.conv(x, jax.numpy.ones((1, 1, 3, 3)), (1, 1), "VALID")
    assert not np.isfinite(found[0, 0, 0, 0])
    assert np.isfinite(np.asarray(found).ravel()[1:]).all()


def test_convolutions_that_are_not_taken_are_reported(jax):
    def convolutions(x):
        first = jax.lax.conv(x, x, (1, 1), "SAME")
        with jax.named_scope("head"):
            full = jax.lax.conv(x, x, (1, 1), "VALID", precision="highest")
            whole = jax.lax.conv(x.astype("int8"), x.astype("int8"), (1, 1), "VALID")
            return jax.lax.conv(x, x, (1, 1), "VALID"), full, whole, first

    x = jax.numpy.full((1, 1, 6, 6), ABOVE, "float32")
    with lowprec.jax.intercept({"head": "bf16"}) as seen:
        low, full, *_ = jax.jit(convolutions)(x)
    assert low == 36
    assert full > 36
    report = seen.report()
    assert {p.reason for p in report.passed} == {
        "no mode for this layer",
        "the program chooses its precision",
        "the mode does not act on this element type",
    }
    assert len(report.taken) == 1


def test_convolutions_are_compared(jax):
    rng = np.random.default_rng(0)
    x = jax.numpy.asarray(rng.standard_normal((2, 8, 6, 6), dtype="float32"))
    w = jax.numpy.asarray(rng.standard_normal((4, 8, 3, 3), dtype="float32"))

    def network(x):
        with jax.named_scope("first"):
            return jax.lax.conv(x, w, (1, 1), "VALID")

    found = lowprec.compare(lambda: jax.jit(network)(x), "mxfp4", against="fp32")
    (row,) = found.layers
    assert "first" in row.layer
    with lowprec.jax.intercept("mxfp4"):
        low = network(x)
    exact = network(x)
    error = np.linalg.norm(low - exact) / np.linalg.norm(exact)
    assert row.own_error == pytest.approx(error, rel=1e-4)
    assert row.share == 1
