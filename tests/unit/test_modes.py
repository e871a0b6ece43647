"""The order of the products of a mode, and the names of modes."""

import re

import pytest

from lowprec.errors import ModeError
from lowprec.modes import ALIASES, TABLE, MathMode, available_modes, mode_names, parse_mode, row


def test_the_smallest_products_are_summed_first():
    assert row(MathMode.BF16X3).pairs == ((0, 1), (1, 0), (0, 0))
    orders = [i + j for i, j in row(MathMode.BF16X9).pairs]
    assert orders == [4, 3, 3, 2, 2, 2, 1, 1, 0]


def test_the_number_of_products_is_in_the_name():
    found = {r.mode.value: len(r.pairs) for r in TABLE if r.mode is not MathMode.FP16_KARATSUBA}
    assert found == {name: int(x[1]) if (x := re.search(r"x(\d)", name)) else 1 for name in found}


@pytest.mark.parametrize("mode", MathMode)
def test_a_mode_is_its_name(mode):
    assert str(mode) == f"{mode}" == mode.value == mode
    assert hash(mode) == hash(mode.value)
    assert {mode.value: 1}[mode] == 1


@pytest.mark.parametrize("mode", available_modes())
def test_names_in_any_case_and_presets(mode):
    names = [mode, mode.value, mode.value.upper(), f" {mode.value}\n", row(mode).jax_preset]
    names += [alias for alias, meant in ALIASES.items() if meant is mode]
    assert {parse_mode(name) for name in names if name is not None} == {mode}


@pytest.mark.parametrize("name", ["fp23", "", "tf-32", 32, None, 1.5])
def test_an_unknown_name_lists_the_known_ones(name):
    with pytest.raises(ModeError, match=r"what it is .* is not a math mode; choose one of: ") as e:
        parse_mode(name, what="what it is")
    assert repr(name) in str(e.value)
    assert mode_names() in str(e.value)


@pytest.mark.parametrize(
    ("name", "meant"),
    [("bf61", "bf16"), ("TF23", "tf32"), ("hgih", "high")]
    # The words of other libraries and of data sheets, some of which are more similar to the name of another format.
    + [(name, "nvfp4") for name in ("fp4", "float4", "int4", "e2m1", "Float4_e2m1fn_x2")]
    + [(name, "fp8") for name in ("float8", "e4m3", "e5m2", "fp8_e4m3", "float8_e4m3fn")]
    + [("half", "fp16"), ("single", "fp32"), ("double", "fp64"), ("f16", "fp16"), ("fp6", "mxfp8")],
)
def test_a_misspelt_name_has_a_suggestion(name, meant):
    with pytest.raises(ModeError, match=f"; did you mean {meant!r}\\?$"):
        parse_mode(name)


def test_an_element_type_that_is_no_mode_has_no_suggestion():
    with pytest.raises(ModeError, match=r"int8_blocks$"):
        parse_mode("int16")


@pytest.mark.parametrize("given", [print, Exception], ids=["a function", "a class"])
def test_a_function_or_a_model_belongs_in_the_block(given):
    with pytest.raises(
        ModeError, match=f"is a {type(given).__name__}, not a math mode; call it in a block: with"
    ):
        parse_mode(given)
