"""Products of JAX programs that do not use lowprec."""

import threading

import numpy as np
import pytest

import lowprec

#: Rounds to 1 in bfloat16.
ABOVE = 1 + 2.0**-9

ROUTES = {
    "matmul": lambda jax, x: x @ x,
    "einsum": lambda jax, x: jax.numpy.einsum("ij,jk->ik", x, x),
    "lax.dot": lambda jax, x: jax.lax.dot(x, x),
    "multi_dot": lambda jax, x: jax.numpy.linalg.multi_dot([x, x, x]),
    "tensordot": lambda jax, x: jax.numpy.tensordot(x, x, 1),
    "jit": lambda jax, x: jax.jit(lambda a: a @ a)(x),
    "scan": lambda jax, x: jax.lax.scan(lambda c, _: (c @ x, None), x, None, length=2)[0],
    "vmap": lambda jax, x: jax.vmap(lambda a: a @ x)(jax.numpy.stack([x, x]))[1],
    "grad": lambda jax, x: jax.grad(lambda a: (a @ x).sum())(x),
    "ragged_dot": lambda jax, x: jax.lax.ragged_dot(x, x[None], jax.numpy.array([4])),
    "complex": lambda jax, x: (x.astype("complex64") @ x.astype("complex64")).real,
    "checkpoint": lambda jax, x: jax.grad(lambda a: jax.checkpoint(lambda b: (b @ x) * 2)(a).sum())(
        x
    ),
}


@pytest.fixture
def intercept(jax):
    return lowprec.jax.intercept


@pytest.mark.parametrize("name", ROUTES)
def test_a_product_is_taken_and_restored(jax, intercept, name):
    call, x = ROUTES[name], jax.numpy.full((4, 4), ABOVE, "float32")
    full = call(jax, x)
    with intercept("bf16") as seen:
        low = call(jax, x)
        exact = call(jax, jax.numpy.ones((4, 4), "float32"))
    # Products of bfloat16 ones are exact, up to the last operand of a chain.
    assert float(jax.numpy.abs(low / exact - 1).max()) < 2.0**-12
    assert float((full / exact - 1).min()) > 2.0**-10
    assert jax.numpy.array_equal(call(jax, x), full)
    assert {p.mode for p in seen.report().taken} <= {"bf16", "fp32"}


def test_a_compiled_function_follows_scopes(jax, intercept):
    x, found = jax.numpy.full((4, 4), ABOVE, "float32"), []
    product = jax.jit(lambda a: (a @ a)[0, 0])
    assert product(x) > 4
    outer, inner = intercept("bf16"), intercept("fp32")
    with outer:
        assert product(x) == 4
        with inner:
            assert product(x) > 4
        with lowprec.fp32_guard(frameworks=False):
            assert product(x) > 4
        thread = threading.Thread(target=lambda: found.append(product(x)))
        thread.start()
        thread.join()
        assert product(x) == 4
    assert found[0] > 4
    assert product(x) > 4
    outer.__enter__()
    inner.__enter__()
    outer.__exit__(None, None, None)
    assert product(x) > 4
    inner.__exit__(None, None, None)


def test_products_that_are_not_taken_are_reported(jax, intercept):
    x = jax.numpy.full((6, 6), ABOVE, "float32")
    with intercept("tf32x3") as seen:
        x.astype("bfloat16") @ x.astype("bfloat16")
        jax.lax.dot(x, x, precision="highest")
    report = seen.report()
    assert {p.reason for p in report.passed} == {
        "the mode does not act on this element type", "the program chooses its precision",
    }  # fmt: skip
    assert "compiled products" in str(report)
    with pytest.raises(lowprec.ModeError, match=r"^math_mode 'bf17' is not a math mode"):
        intercept("bf17")


def test_the_default_precision_of_jax_is_overridden(jax, intercept):
    x = jax.numpy.full((4, 4), ABOVE, "float32")
    for default in ("highest", "bfloat16"):
        with jax.default_matmul_precision(default), intercept("bf16"):
            assert (x @ x)[0, 0] == 4


def test_a_default_precision_that_the_program_sets_inside_is_its_choice(jax, intercept):
    x = jax.numpy.full((5, 4), ABOVE, "float32")
    product = jax.jit(lambda a: a @ a.T)
    for _ in range(2):  # the second time with functions that are compiled
        with intercept("bf16") as seen:
            with jax.default_matmul_precision("float32"):
                assert min((x @ x.T)[0, 0], product(x)[0, 0]) > 4
            assert (x @ x.T)[0, 0] == product(x)[0, 0] == 4
            # The guard, which sets the default, too, is no choice of the program's.
            with lowprec.fp32_guard():
                assert min((x @ x.T)[0, 0], product(x)[0, 0]) > 4
        with jax.default_matmul_precision("float32"), intercept("bf16"):
            assert (x @ x.T)[0, 0] == product(x)[0, 0] == 4
            with intercept("bf16"):
                assert product(x)[0, 0] == 4
            with jax.default_matmul_precision("tensorfloat32"):
                assert product(x)[0, 0] > 4
            assert product(x)[0, 0] == 4
    assert {p.reason for p in seen.report().passed} <= {"the program chooses its precision"}


@pytest.mark.parametrize("precision", ["default", "DEFAULT preset", None, "highest"])
def test_the_precision_named_default_is_no_choice(jax, intercept, precision):
    x = jax.numpy.full((3, 4), ABOVE, "float32")
    given = jax.lax.DotAlgorithmPreset.DEFAULT if precision == "DEFAULT preset" else precision
    with intercept("bf16") as seen:
        assert (jax.lax.dot(x, x.T, precision=given)[0, 0] == 4) == (precision != "highest")
    assert bool(seen.report().passed) == (precision == "highest")


def test_blocks_of_one_mode_have_their_own_counts(jax, intercept):
    x = jax.numpy.full((7, 4), ABOVE, "float32")
    with intercept("bf16") as first:
        x @ x.T
    with intercept("bf16") as second:
        x @ x.T
        x.T @ x
    shapes = [[p.shapes for p in seen.report().products] for seen in (first, second)]
    assert shapes == [[((7, 4), (4, 7))], [((4, 7), (7, 4))]]


def test_the_report_names_what_is_not_seen(jax, intercept):
    x = jax.numpy.full((4, 4), ABOVE, "float32")
    product = jax.jit(lambda a: a @ a)
    compiled = product.lower(x).compile()
    with intercept("bf16") as seen:
        assert compiled(x)[0, 0] > 4
        jax.pure_callback(lambda a: np.asarray(a) @ np.asarray(a), x, x)
    assert not seen.report().products
    for words in (
        "exported or compiled ahead of time",
        "pure_callback",
        "compiled are not counted again",
    ):
        assert words in seen.report().remarks[0]


# -- rules ----------------------------------------------------------------------------------------


def model(jax):
    """Return a function with the products of two scopes, of a function in two scopes, and of a loop in one."""

    @jax.jit
    def shared(x):
        return x @ x

    def network(x):
        with jax.named_scope("mlp"):
            with jax.named_scope("first"):
                x = x @ x
            with jax.named_scope("second"):
                x = shared(x)
        with jax.named_scope("head"):
            x = shared(x)
        with jax.named_scope("loop"):
            return jax.lax.scan(lambda c, _: (shared(c), None), x, None, length=2)[0]

    return network


RULES = {
    "a scope": ("head=fp32,*=bf16", {"head.shared": "fp32"}),
    "a path": ("*.mlp.*=fp32,*=bf16", {"mlp.first": "fp32", "mlp.second.shared": "fp32"}),
    "a function": ("shared=fp32,*=bf16", {"mlp.second.shared": "fp32", "head.shared": "fp32", "loop.shared": "fp32"}),
    "the function that is compiled": ("network=fp32,*=bf16", dict.fromkeys(
        ("mlp.first", "mlp.second.shared", "head.shared", "loop.shared"), "fp32")),
    "a loop": ([("loop", "fp32"), ("*", "bf16")], {"loop.shared": "fp32"}),
}  # fmt: skip


@pytest.mark.parametrize("transform", ["jit", "grad", "vmap"])
@pytest.mark.parametrize("name", RULES)
def test_rules_by_scope_and_function(jax, intercept, name, transform):
    rules, expected = RULES[name]
    x = jax.numpy.full((2, 4, 4), ABOVE / 4, "float32")
    network = model(jax)
    run = jax.jit(network)
    if transform == "grad":
        run = jax.jit(jax.grad(lambda x: network(x).sum()))
        expected = {key: mode for key, mode in expected.items() if "network" not in rules}
    if transform == "vmap":
        run = jax.jit(jax.vmap(network))
    with intercept(rules) as seen:
        run(x if transform == "vmap" else x[0])
    report = seen.report()
    found = {p.layer.partition(".")[2]: p.mode for p in report.taken}
    every = ("mlp.first", "mlp.second.shared", "head.shared", "loop.shared")
    assert found == {**dict.fromkeys(every, "bf16"), **expected}
    assert len({(p.layer, p.mode) for p in report.taken}) == len(found), "one mode for each layer"


def test_a_function_has_the_modes_of_its_callers(jax, intercept):
    """The bits show it: each caller's lowering of the function is its own."""
    shared = jax.jit(lambda x: x @ x)

    def both(x):
        with jax.named_scope("head"):
            full = shared(x)
        return full, shared(x)

    x = jax.numpy.full((4, 4), ABOVE, "float32")
    with intercept({"head": "fp32", "*": "bf16"}):
        full, low = jax.jit(both)(x)
    assert (full > 4).all()
    assert (low == 4).all()


def test_a_layer_without_a_rule_is_xlas(jax, intercept):
    x = jax.numpy.full((4, 4), ABOVE, "float32")
    with intercept({"head": "bf16"}) as seen:
        assert (x @ x)[0, 0] > 4
    assert {p.reason for p in seen.report().products} == {"no mode for this layer"}


def test_vectors_keep_their_precision_unless_a_rule_names_them(jax, intercept):
    jnp = jax.numpy
    v = jnp.full(4, ABOVE, "float32")
    routes = {
        "dot": lambda: jnp.dot(v, v),
        "vdot": lambda: jnp.vdot(v, v),
        "row and column": lambda: (v[None] @ v[:, None])[0, 0],
        "vmap": lambda: jax.vmap(jnp.dot)(jnp.stack([v, v]), jnp.stack([v, v]))[1],
    }
    for call in routes.values():
        with intercept("bf16") as seen:
            assert call() > 4
        assert {p.reason for p in seen.report().products} == {"vectors are not rounded"}
        with intercept({"dot": "bf16"}):
            assert call() == 4


def test_modes_that_quantise_leave_vectors_in_bf16(jax, intercept):
    rng = np.random.default_rng(0)
    a, v = (
        jax.numpy.asarray(rng.standard_normal(shape, dtype="float32")) for shape in ((32, 32), 32)
    )
    with intercept("bf16"):
        expected = a @ v
    with intercept("mxfp8") as seen:
        found = a @ v
        a @ a
    assert (found == expected).all()
    assert {p.shapes[1]: p.mode for p in seen.report().taken} == {(32,): "bf16", (32, 32): "mxfp8"}
    with intercept({"dot_general": "mxfp8"}):
        assert (a @ v != expected).any()


@pytest.mark.parametrize("mode", ["mxfp8", "nvfp4", "int8"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_16_bit_operands_with_a_float32_result_are_quantised(jax, intercept, dtype, mode):
    """The codes and the sums are those of float32 operands with the same numbers."""
    rng = np.random.default_rng(0)
    a, b = (
        jax.numpy.asarray(rng.standard_normal((32, 48), dtype="float32")).astype(dtype)
        for _ in range(2)
    )
    with intercept(mode) as seen:
        found = jax.lax.dot(a, b.T, preferred_element_type="float32")
        expected = jax.lax.dot(a.astype("float32"), b.astype("float32").T)
    assert [p.mode for p in seen.report().products if p.dtype == dtype] == [mode]
    assert found.dtype == "float32"
    assert (found == expected).all()
