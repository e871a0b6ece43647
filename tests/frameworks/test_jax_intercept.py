"""Products of JAX programs that do not use lowprec."""

import re
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
    "checkpoint": lambda jax, x: jax.grad(lambda a: jax.checkpoint(lambda b: (b @ x) * 2)(a).sum())(x),
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
        jax.lax.conv(x[None, None], x[None, None], (1, 1), "SAME")
        x.astype("bfloat16") @ x.astype("bfloat16")
        jax.lax.dot(x, x, precision="highest")
    report = seen.report()
    reasons = {p.operator: p.reason for p in report.passed}
    assert reasons["conv_general_dilated"] == "a convolution is no matrix product"
    assert {p.reason for p in report.passed} >= {
        "the mode does not act on this element type", "the program chooses its precision",
    }  # fmt: skip
    assert "compiled products" in str(report)
    for wrong in ("bf17", {"layer*": "bf16"}):
        with pytest.raises(lowprec.ModeError, match=f"^math_mode {re.escape(repr(wrong))} is not a math mode"):
            intercept(wrong)


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
    for words in ("exported or compiled ahead of time", "pure_callback", "compiled are not counted again"):
        assert words in seen.report().remarks[0]
