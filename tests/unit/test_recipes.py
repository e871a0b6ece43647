"""Recipes as values, as text, and in the places that accept the name of a mode."""

import dataclasses
import pickle

import numpy as np
import pytest

import lowprec
from lowprec import recipes
from lowprec.core.rules import parse_rules
from lowprec.modes import MathMode, available_modes, of_pass, parse_mode, row, rules_of
from lowprec.recipes import Recipe
from support.programs import run_python

SOME = [
    Recipe("mxfp8"),
    Recipe("mxfp8", scale_rule="rceil"),
    Recipe(("mxfp8", "mxfp4"), grad_input=("mxfp8_e5m2", "mxfp4")),
    Recipe("nvfp4", rounding="stochastic", seed=2**64 - 1, step=7, layer=3),
    Recipe.fp8_training(),
    Recipe.mxfp8_training(),
    Recipe.nvfp4_training(seed=5),
    Recipe.nvfp4_training(seed=5).of("grad_weight").at(3, 2),
    Recipe("nvfp4", grad_input=Recipe("mxfp8", scale_rule="rceil"), grad_weight="bf16"),
    Recipe("mxfp8", backward_override="dequantized", scale_rule="rceil"),
    Recipe(
        "nvfp4",
        seed=1,
        rounding="stochastic",
        grad_weight=Recipe("mxfp4", rounding="stochastic", seed=2, hadamard=16),
    ),
]


def test_every_mode_that_quantises_is_a_format():
    assert [m.value for m in available_modes() if row(m).quantizes] == list(recipes.MODES)


@pytest.mark.parametrize("recipe", SOME, ids=str)
def test_a_recipe_is_a_value_with_a_text(recipe):
    assert parse_mode(str(recipe)) == parse_mode(recipe)
    assert parse_mode(f" {recipe.value.replace(',', ' , ')}") == parse_mode(recipe)
    assert eval(repr(recipe), {"Recipe": Recipe}) == recipe == pickle.loads(pickle.dumps(recipe))
    assert hash(recipe) == hash(pickle.loads(pickle.dumps(recipe)))
    assert f"{recipe}" == str(recipe) == recipe.value


def test_a_recipe_without_details_is_its_mode():
    assert parse_mode(Recipe("mxfp8")) is MathMode.MXFP8
    assert parse_mode("mxfp8()") is MathMode.MXFP8
    assert (
        rules_of(MathMode.NVFP4)
        == Recipe("nvfp4").rules
        == rules_of(Recipe("nvfp4").of("grad_weight"))
    )


def test_products_of_a_layer():
    recipe = Recipe("fp8", grad_input=("fp8_e5m2", "fp8"), grad_weight=("fp8", "fp8_e5m2"))
    assert recipe == Recipe.fp8_training()
    elements = {
        x: tuple(rule.elements for rule in of_pass(recipe, x).rules) for x in recipes._PAIRS
    }
    assert elements == {
        "forward": ("e4m3", "e4m3"),
        "grad_input": ("e5m2", "e4m3"),
        "grad_weight": ("e4m3", "e5m2"),
    }
    assert of_pass(MathMode.MXFP8, "grad_input") is MathMode.MXFP8


def test_products_of_the_backward_pass_may_be_of_modes_that_do_not_quantise():
    recipe = Recipe("nvfp4", grad_input="bf16", grad_weight="fp32")
    assert parse_mode("nvfp4(grad_input=bf16,grad_weight=fp32)") == recipe
    assert [of_pass(recipe, x) for x in recipes._PAIRS] == [recipe, MathMode.BF16, MathMode.FP32]
    assert {MathMode(name) for name in recipes.PLAIN} <= set(available_modes())
    assert not any(row(MathMode(name)).quantizes for name in recipes.PLAIN)
    with pytest.raises(lowprec.ModeError, match=r"grad_weight of the recipe .* does not quantise"):
        recipe.of("grad_weight").rules  # noqa: B018


def test_square_blocks_are_of_weights_alone():
    """DeepSeek-V3, arXiv 2412.19437, section 3.3.2: activations and gradients have tiles of 1 x 128."""
    blocks = {
        x: [rule.block for rule in rules_of(of_pass(MathMode.FP8_BLOCKS, x))]
        for x in recipes._PAIRS
    }
    square, flat = (128, 128), (1, 128)
    assert blocks == {
        "forward": [flat, square],
        "grad_input": [flat, square],
        "grad_weight": [flat, flat],
    }
    recipe = Recipe("fp8_blocks", grad_weight="fp8_blocks_e5m2", scale_rule="rceil")
    assert {(rule.block, rule.power_scales) for rule in recipe.of("grad_weight").rules} == {
        (flat, True)
    }


def test_measures_act_on_the_operands_of_their_products():
    recipe = Recipe.nvfp4_training(seed=5)

    def of(product, knows_weight):
        return dataclasses.replace(recipe, product=product, knows_weight=knows_weight).rules

    rules = {x: of(x, knows_weight=True) for x in recipes._PAIRS}
    assert [[r.is_stochastic for r in pair] for pair in rules.values()] == [
        [False] * 2,
        [True, False],
        [False, True],
    ]
    assert [[r.hadamard for r in pair] for pair in rules.values()] == [[0, 0], [0, 0], [16, 16]]
    square, flat = (16, 16), (1, 16)
    assert [[r.block for r in pair] for pair in rules.values()] == [
        [flat, square],
        [flat, square],
        [flat, flat],
    ]
    assert {r.block for x in recipes._PAIRS for r in of(x, knows_weight=False)} == {flat}
    assert all(r.is_stochastic for r in Recipe("nvfp4", rounding="stochastic", seed=1).rules)


def test_steps_layers_and_products_have_different_random_numbers():
    recipe = Recipe("mxfp8", rounding="stochastic", seed=0)
    draws = {recipe.at(i, j).of(x).draw for i in range(3) for j in range(3) for x in recipes._PAIRS}
    assert len(draws) == 27
    assert Recipe("mxfp8", step=2**40 - 1, layer=2**20 - 1, product="grad_weight").draw < 2**62
    assert recipe.at(5).plannable == recipe, "plans are shared by all steps"


@pytest.mark.parametrize(
    ("how", "words"),
    [
        (
            {"forward": "mxfp9"},
            "forward of a recipe: 'mxfp9' is not a format; choose from: fp8.*did you mean",
        ),
        ({"forward": 3}, "forward of a recipe is a format or a pair of formats, got 3"),
        (
            {"forward": "mxfp8", "grad_input": ("fp8",)},
            "grad_input of a recipe is a format or a pair",
        ),
        ({"forward": ("int8", "fp8")}, "int8 and fp8 cannot be multiplied"),
        (
            {"forward": ("mxfp8", "fp8_blocks")},
            "cannot be multiplied; int8 and fp8_blocks need one format",
        ),
        (
            {"forward": "mxfp8", "scale_rule": "up"},
            "scale_rule of a recipe must be one of 'floor', 'rceil', 'even', got",
        ),
        (
            {"forward": "fp8_blocks", "scale_rule": "even"},
            "scale_rule=even has no effect on a recipe of fp8_blocks; omit",
        ),
        (
            {"forward": "int8", "scale_rule": "rceil"},
            "scale_rule=rceil has no effect on a recipe of int8",
        ),
        (
            {"forward": "nvfp4", "scale_rule": "even"},
            "scale_rule=even has no effect on a recipe of nvfp4",
        ),
        (
            {"forward": "mxfp8", "weight_block": (16, 16)},
            "weight_block=16x16 has no effect on a recipe of mxfp8",
        ),
        (
            {"forward": "mxfp8", "backward_override": "fp32"},
            "backward_override of a recipe must be",
        ),
        (
            {"forward": "fp8", "backward_override": "dequantized", "grad_input": "fp8_e5m2"},
            "grad_input=fp8_e5m2 has no effect on a recipe of fp8 with backward_override=dequantized",
        ),
        (
            {
                "forward": "fp8",
                "backward_override": "high_precision",
                "rounding": "stochastic_gradients",
                "seed": 1,
            },
            "rounding=stochastic_gradients has no effect",
        ),
        ({"forward": "bf16"}, "forward of a recipe: 'bf16' is not a format"),
        (
            {"forward": "mxfp8", "grad_input": "fp64"},
            "grad_input of a recipe: 'fp64' is not a format",
        ),
        (
            {"forward": "mxfp8", "grad_input": ("bf16", "mxfp8")},
            "grad_input of a recipe: 'bf16' is not a format",
        ),
        (
            {"forward": "mxfp8", "rounding": "odd"},
            "rounding of a recipe must be one of 'nearest', 'stochastic'",
        ),
        (
            {"forward": "mxfp8", "rounding": "stochastic"},
            "with stochastic rounding needs a seed; pass seed=",
        ),
        ({"forward": "mxfp8", "hadamard": 16}, "with a Hadamard transform needs a seed"),
        ({"forward": "mxfp8", "hadamard": 8}, "hadamard of a recipe must be one of 0, 16, got 8"),
        (
            {"forward": "nvfp4", "weight_block": (8, 8)},
            r"weight_block of a recipe must be one of None, \(16, 16\)",
        ),
        (
            {"forward": "mxfp8", "seed": -1},
            r"seed of a recipe must be an integer from 0 to 2\^64 - 1, got -1",
        ),
        ({"forward": "mxfp8", "seed": True}, "seed of a recipe must be an integer"),
        ({"forward": "mxfp8", "step": 1.5}, "step of a recipe must be an integer"),
    ],
)
def test_bad_recipes(how, words):
    with pytest.raises(lowprec.ModeError, match=words):
        Recipe(**how)


@pytest.mark.parametrize(
    "text", ["mxfp8(seed)", "mxfp8(color=red)", "mxfp8(seed=x)", "a/b/c", "fp32(seed=1)"]
)
def test_bad_texts(text):
    with pytest.raises(lowprec.ModeError, match="recipe"):
        parse_mode(text)


def test_scopes_defaults_and_reports_know_recipes():
    recipe = Recipe("mxfp8", scale_rule="rceil")
    a = np.random.default_rng(0).standard_normal((8, 64), dtype=np.float32)
    expected = lowprec.matmul(a, a.T, math_mode=recipe)
    assert not np.array_equal(expected, lowprec.matmul(a, a.T, math_mode="mxfp8"))
    with lowprec.math_mode(recipe):
        assert lowprec.get_math_mode() == recipe
        assert np.array_equal(lowprec.matmul(a, a.T), expected)
        assert np.array_equal(lowprec.linear(a, a), expected)
        assert np.array_equal(lowprec.einsum("ij,kj->ik", a, a), expected)
        with lowprec.math_mode("bf16"):
            assert lowprec.get_math_mode() == "bf16"
    lowprec.set_math_mode(recipe)
    try:
        assert np.array_equal(lowprec.matmul(a, a.T), expected)
    finally:
        lowprec.set_math_mode(None)
    assert "mxfp8(scale_rule=rceil), from math_mode= argument" in str(
        lowprec.plan(a, a.T, math_mode=recipe)
    )
    assert lowprec.plan(a, a.T, math_mode=recipe).to_dict()["mode"]
    checked = lowprec.check(a, a.T, modes=[recipe, "int8"], rounds=1)
    assert [x.name for x in checked.rows] == ["fp32", str(recipe), "int8"]
    assert checked.within


def test_the_environment_knows_recipes():
    code = "import lowprec; print(lowprec.get_math_mode())"
    recipe = Recipe.nvfp4_training(seed=3)
    assert run_python(code, LOWPREC_MATH_MODE=str(recipe)) == str(recipe)


def test_a_step_of_a_scope_reaches_recipes_without_one():
    recipe = Recipe("mxfp4", rounding="stochastic", seed=1)
    a = np.random.default_rng(0).standard_normal((8, 64), dtype=np.float32)
    plain, third = (lowprec.matmul(a, a.T, math_mode=x) for x in (recipe, recipe.at(3)))
    assert not np.array_equal(plain, third)
    with lowprec.math_mode(recipe.at(3)):
        assert np.array_equal(lowprec.matmul(a, a.T), third)
        assert np.array_equal(lowprec.matmul(a, a.T, math_mode=recipe), third)


def test_a_product_may_have_a_recipe_of_its_own(rng):
    """Its gradient is that of a recipe with these settings for all products, and its settings are not the others'."""
    own = Recipe("mxfp8", scale_rule="rceil", rounding="stochastic", seed=3)
    recipe = Recipe(
        "nvfp4",
        weight_block=(16, 16),
        grad_weight=own,
        grad_input=Recipe("nvfp4", rounding="stochastic_gradients", seed=4),
    )
    assert of_pass(recipe, "forward").rules == Recipe("nvfp4").rules
    assert of_pass(recipe, "grad_weight").rules == of_pass(own, "grad_weight").rules
    first, second = of_pass(recipe, "grad_input").rules
    assert (first.rounding, first.seed, second.rounding) == ("stochastic", 4, "nearest")
    knowing = dataclasses.replace(recipe, knows_weight=True)
    assert of_pass(knowing, "forward").rules[1].block == (16, 16)
    assert of_pass(knowing, "grad_input").rules[1].block == (1, 16)
    a, b = rng.standard_normal((5, 64), np.float32), rng.standard_normal((64, 7), np.float32)
    for step in (0, 1):
        found, want = (
            lowprec.matmul(a, b, math_mode=of_pass(x, "grad_weight").at(step))
            for x in (recipe, own)
        )
        assert np.array_equal(found, want)
    assert Recipe("nvfp4", grad_weight=Recipe("mxfp8")) == Recipe("nvfp4", grad_weight="mxfp8")
    rules = parse_rules(f"head={recipe},*=mxfp8")
    assert rules == (("head", recipe), ("*", MathMode.MXFP8))


@pytest.mark.parametrize(
    ("own", "words"),
    [
        (Recipe("mxfp8", grad_input="bf16"), r"grad_weight of a recipe: grad_input of mxfp8\(grad_input=bf16\) have"),
        (Recipe("mxfp8", seed=1, rounding="stochastic", step=2), "step of .* have no effect there; omit them"),
    ],
)  # fmt: skip
def test_a_recipe_of_one_product_has_no_settings_of_others(own, words):
    with pytest.raises(lowprec.ModeError, match=words):
        Recipe("nvfp4", grad_weight=own)
    with pytest.raises(lowprec.ModeError, match="grad_input of a recipe: hadamard of"):
        Recipe("nvfp4", grad_input=Recipe("nvfp4", hadamard=16, seed=1))
