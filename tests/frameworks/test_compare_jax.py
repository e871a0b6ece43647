"""JAX's products in two runs: by callbacks of compiled functions, with the lines of the program as layers."""

import numpy as np
import pytest

import lowprec

jax = pytest.importorskip("jax", reason="JAX is not installed")

#: Of sketches of 1,021 numbers: three standard deviations.
SKETCH = 0.07


def normal(*shape, seed=0):
    return jax.numpy.asarray(np.random.default_rng(seed).standard_normal(shape), "float32")


@jax.jit
def network(weights, x):
    jnp = jax.numpy
    hidden = jnp.tanh(x @ weights[0])
    scale = jnp.ones(64, "float32").at[5].divide(100)
    hidden = jnp.tanh((hidden * scale) @ weights[1])  # the spoiled layer
    return hidden @ weights[2]


def spoiled():
    weights = [normal(64, 64, seed=i) / 8 for i in range(3)]
    weights[1] = weights[1].at[5].multiply(100)
    return weights, normal(32, 64, seed=3)


def test_the_spoiled_layer_is_named_first():
    weights, x = spoiled()
    found = lowprec.compare(lambda: network(weights, x), "nvfp4", blame=True)
    line = network.__wrapped__.__code__.co_firstlineno + 5
    assert found.layers[0].layer == f"network, test_compare_jax.py:{line}"
    assert f"of that comes from {found.layers[0].layer}" in found.verdict
    assert 0.8 < sum(each.blame for each in found.layers) < 1.25
    alone = lowprec.compare(lambda: network(weights, x), "nvfp4")
    assert f"of layer {found.layers[0].layer}" in alone.verdict
    assert [each.share for each in found.layers] == [pytest.approx(1 / 3)] * 3
    assert all(each.mode == "nvfp4" for each in found.layers)
    assert not found.parting


def test_errors_equal_a_computation_by_hand():
    weights, x = spoiled()
    found = lowprec.compare(lambda: network(weights, x), "bf16", "fp64")
    rows = {each.layer.split(":")[1]: each for each in found.layers}
    first = rows[str(network.__wrapped__.__code__.co_firstlineno + 3)]
    exact = np.asarray(x, float) @ np.asarray(weights[0], float)
    rounded = [np.asarray(y.astype("bfloat16"), float) for y in (x, weights[0])]
    error = np.linalg.norm(rounded[0] @ rounded[1] - exact) / np.linalg.norm(exact)
    assert first.own_error == pytest.approx(error, rel=SKETCH)
    assert first.drift == pytest.approx(error, rel=SKETCH)
    results = []
    for mode in ("bf16", "fp64"):
        with lowprec.jax.intercept(mode):
            results.append(np.asarray(network(weights, x), float))
    change = np.linalg.norm(results[0] - results[1]) / np.linalg.norm(results[1])
    assert found.change == pytest.approx(change)


def test_underflow_is_that_of_the_first_vectors():
    """A part of the 2**17 numbers of an operand is measured, that of its first rows or columns."""
    jnp = jax.numpy
    a = jnp.ones((2, 4, 256), "float32")
    # Of each block of 16 the others are lost.
    b = jnp.ones((256, 512), "float32").at[::16].set(1000)
    found = lowprec.compare(lambda: a @ b, "nvfp4")
    assert found.layers[0].underflow == 15 / 16
    found = lowprec.compare(lambda: jnp.einsum("kn,bmk->bmn", b, a), "nvfp4")
    assert found.layers[0].underflow == 15 / 16


def test_callbacks_of_the_host_record_the_same(monkeypatch):
    """They are those of other processors than the CPU."""
    from lowprec.jax import observing

    weights, x = spoiled()
    found = lowprec.compare(lambda: network(weights, x), "nvfp4")
    monkeypatch.setattr(observing, "_is_registered", lambda: False)
    again = lowprec.compare(lambda: network(weights, x), "nvfp4")
    assert found.to_dict() == again.to_dict()


def test_loops_and_gradients_are_observed():
    weights, x = normal(5, 8, 8), normal(4, 8)

    def loss(weights):
        return jax.lax.scan(lambda y, w: (jax.numpy.tanh(y @ w), None), x, weights)[0].sum()

    found = lowprec.compare(lambda: jax.value_and_grad(loss)(weights), "bf16")
    # Five steps, each of a forward product and two of gradients.
    assert sum(each.calls for each in found.layers) == 15
    assert {each.mode for each in found.layers} == {"bf16"}
    assert all(0 < each.own_error < 2.0**-7 for each in found.layers)


def test_gradients_of_compiled_functions_are_named():
    weights, x = spoiled()
    step = jax.jit(jax.grad(lambda weights: network(weights, x).sum()))
    found = lowprec.compare(lambda: step(weights), "bf16")
    gradients = [each for each in found.layers if "(gradient)" in each.layer]
    # of three weights and two inputs; XLA omits the last forward product
    assert sum(each.calls for each in gradients) == 5
    assert sum(each.calls for each in found.layers) == 7


def test_products_of_jax_itself_and_non_finite_ones_are_named():
    jnp = jax.numpy
    found = lowprec.compare(lambda: jnp.ones((3, 3), "int32") @ jnp.ones((3, 3), "int32"), "bf16")
    assert [(each.mode, each.own_error, each.drift) for each in found.layers] == [("", None, 0.0)]
    found = lowprec.compare(
        lambda: jnp.full((4, 4), 3.4028e38, "float32") @ jnp.full((4, 4), 1e-30, "float32"), "bf16"
    )
    assert found.fault.endswith("by bf16; the product is finite in fp32.")
    found = lowprec.compare(
        lambda: jnp.full((4, 4), jnp.nan, "float32") @ jnp.ones((4, 4), "float32"), "bf16"
    )
    assert found.fault.endswith("its first operand has NaN.")


def test_a_block_after_a_comparison_records_nothing():
    weights, x = spoiled()
    seen = lowprec.compare(lambda: network(weights, x), "bf16")
    with lowprec.jax.intercept("bf16"):
        network(weights, x)
    assert sum(each.calls for each in seen.layers) == 3


def test_statistics_of_a_block_are_those_of_executions():
    """Of each block of 16 all other numbers of `b` are lost; the report may be read inside the block."""
    jnp = jax.numpy
    a = normal(64, 96)
    b = jnp.ones((96, 32), "float32").at[::16].set(1000)
    product = jax.jit(lambda a, b: a @ b)
    with lowprec.intercept("nvfp4", ["jax"], statistics=True) as seen:
        product(a, b).block_until_ready()
        assert seen.report().taken[0].b.underflow == 15 / 16
        result = np.asarray(product(2 * a, b), float)
    (row,) = seen.report().taken
    exact = 2 * np.asarray(a, float) @ np.asarray(b)
    error = np.linalg.norm(result - exact) / np.linalg.norm(exact)
    # 2 * a has the significands of a, and only the scale of the tensor is rounded differently
    assert row.error == pytest.approx(error, rel=0.1)
    # of the first 42 of 64 vectors
    assert 1.8 * np.abs(a).max() < row.a.magnitude <= 2 * np.abs(a).max()
    assert "underflow" in str(seen.report())
