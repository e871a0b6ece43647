"""The mode table against the design, and the names that lead into it."""

import pytest

from lowprec import formats
from lowprec.errors import ModeError
from lowprec.modes import ALIASES, TABLE, MathMode, available_modes, mode_names, parse_mode, row
from lowprec.planning.plan import compute_words

#: mode: (format of each part, parts, products, JAX preset, compute type, whether it is TF32-based).
DESIGN = {
    "fp32": (formats.FLOAT32, 1, 1, "F32_F32_F32", "COMPUTE_32F", False),
    "fp32_pedantic": (formats.FLOAT32, 1, 1, None, "COMPUTE_32F_PEDANTIC", False),
    "fp64": (formats.FLOAT64, 1, 1, "F64_F64_F64", "COMPUTE_64F", False),
    "tf32": (formats.TF32, 1, 1, "TF32_TF32_F32", "COMPUTE_32F_FAST_TF32", True),
    "bf16": (formats.BFLOAT16, 1, 1, "BF16_BF16_F32", "COMPUTE_32F on bfloat16 data", False),
    "fp16": (formats.FLOAT16, 1, 1, "F16_F16_F32", "COMPUTE_32F on float16 data", False),
    "bf16x3": (formats.BFLOAT16, 2, 3, "BF16_BF16_F32_X3", "COMPUTE_32F on bfloat16 data", False),
    "bf16x6": (formats.BFLOAT16, 3, 6, "BF16_BF16_F32_X6", "COMPUTE_32F on bfloat16 data", False),
    "bf16x9": (formats.BFLOAT16, 3, 9, "BF16_BF16_F32_X9", "COMPUTE_32F on bfloat16 data", False),
    "tf32x3": (formats.TF32, 2, 3, "TF32_TF32_F32_X3", "COMPUTE_32F_FAST_TF32", True),
    "fp16x3": (formats.FLOAT16, 2, 3, None, "COMPUTE_32F on float16 data", False),
    "fp16x4": (formats.FLOAT16, 2, 4, None, "COMPUTE_32F on float16 data", False),
    "fp16x3_unscaled": (formats.FLOAT16, 2, 3, None, "COMPUTE_32F on float16 data", False),
    "fp16x4_unscaled": (formats.FLOAT16, 2, 4, None, "COMPUTE_32F on float16 data", False),
    "fp16_karatsuba": (formats.FLOAT16, 2, 3, None, "COMPUTE_32F on float16 data", False),
    "fp32_emulated": (formats.FLOAT32, 1, 1, None, "COMPUTE_32F", False),
    "fp64_emulated": (formats.FLOAT32, 1, 1, None, "COMPUTE_32F", False),
    "fp8": (formats.FLOAT8_E4M3FN, 1, 1, None, "COMPUTE_32F on bfloat16 data", False),
    "fp8_rows": (formats.FLOAT8_E4M3FN, 1, 1, None, "COMPUTE_32F on bfloat16 data", False),
    "fp8_blocks": (formats.FLOAT8_E4M3FN, 1, 1, None, "COMPUTE_32F on bfloat16 data", False),
    "mxfp8": (formats.FLOAT8_E4M3FN, 1, 1, None, "COMPUTE_32F on bfloat16 data", False),
    "mxfp4": (formats.FLOAT4_E2M1FN, 1, 1, None, "COMPUTE_32F on bfloat16 data", False),
    "nvfp4": (formats.FLOAT4_E2M1FN, 1, 1, None, "COMPUTE_32F on bfloat16 data", False),
    "int8": (formats.INT8, 1, 1, None, "COMPUTE_32I", False),
}


def test_the_table_is_the_design_s():
    assert [r.mode.value for r in TABLE] == list(DESIGN) == [m.value for m in MathMode]
    for r in TABLE:
        compute = compute_words(r.compute_type, r.data)
        found = (r.operand_format, r.parts, len(r.pairs), r.jax_preset, compute, r.uses_tf32)
        assert found == DESIGN[r.mode.value], r.mode


def test_the_smallest_products_are_summed_first():
    assert row(MathMode.BF16X3).pairs == ((0, 1), (1, 0), (0, 0))
    orders = [i + j for i, j in row(MathMode.BF16X9).pairs]
    assert orders == [4, 3, 3, 2, 2, 2, 1, 1, 0]


@pytest.mark.parametrize("mode", MathMode)
def test_a_mode_is_its_name(mode):
    assert str(mode) == f"{mode}" == mode.value == mode
    assert hash(mode) == hash(mode.value)
    assert {mode.value: 1}[mode] == 1


@pytest.mark.parametrize("mode", available_modes())
def test_names_in_any_case_and_presets(mode):
    names = [mode, mode.value, mode.value.upper(), f" {mode.value}\n", row(mode).jax_preset]
    assert {parse_mode(name) for name in names if name is not None} == {mode}


def test_aliases_are_the_presets_and_words_of_other_libraries():
    """PyTorch's and JAX's words; none hides a mode."""
    words = {
        "fp32": "default float32 highest ieee", "fp32_pedantic": "pedantic", "fp64": "float64", "fp16": "float16",
        "tf32": "high tensorfloat32", "bf16": "medium bfloat16 fastest", "bf16x3": "bfloat16_3x",
        "bf16x6": "bfloat16_6x",
    }  # fmt: skip
    expected = {word: mode for mode, text in words.items() for word in text.split()}
    expected |= {preset.lower(): mode for mode, (*_, preset, _, _) in DESIGN.items() if preset}
    assert expected == ALIASES
    assert not ALIASES.keys() & {m.value for m in MathMode}


@pytest.mark.parametrize("name", ["fp23", "", "tf-32", 32, None, 1.5])
def test_an_unknown_name_lists_the_known_ones(name):
    with pytest.raises(ModeError, match=r"what it is .* is not a math mode; choose one of: ") as e:
        parse_mode(name, what="what it is")
    assert repr(name) in str(e.value)
    assert mode_names() in str(e.value)


def test_a_misspelt_name_has_a_suggestion():
    for name, meant in (("bf61", "bf16"), ("TF23", "tf32"), ("hgih", "high")):
        with pytest.raises(ModeError, match=f"; did you mean {meant!r}\\?$"):
            parse_mode(name)
