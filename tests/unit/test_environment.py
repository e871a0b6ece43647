"""The table of environment variables, its snapshot, and its rows in `info()`."""

import os

import pytest

from lowprec.errors import EnvironmentVariableError
from lowprec.modes import MathMode, available_modes
from lowprec.policy import environment
from support.programs import run_python

MODE_VARIABLES = ("LOWPREC_MATH_MODE", "LOWPREC_FORCE_MATH_MODE")
READ_ONCE = (*MODE_VARIABLES, "LOWPREC_FP32_GUARD", "NVIDIA_TF32_OVERRIDE")
pytestmark = pytest.mark.usefixtures("clean_policy")


def row_of(name):
    return next(r for r in environment.rows() if r["name"] == name)


@pytest.mark.parametrize("name", READ_ONCE)
@pytest.mark.parametrize("blank", [None, "", "  "])
def test_blank_is_unset(name, blank, monkeypatch):
    if blank is not None:
        monkeypatch.setenv(name, blank)
    taken = environment.snapshot()
    assert (taken.math_mode, taken.force_math_mode) == (None, None)
    assert (taken.fp32_guard, taken.tf32_off) == (False, False)
    assert all(r["value"] is None for r in environment.rows())
    assert row_of("LOWPREC_MATH_MODE")["effect"] == "fp32"
    assert environment.problems() == ()


@pytest.mark.parametrize(
    ("name", "text", "field", "value", "effect"),
    [
        ("LOWPREC_MATH_MODE", "tf32", "math_mode", MathMode.TF32, "tf32"),
        ("LOWPREC_MATH_MODE", " BF16 ", "math_mode", MathMode.BF16, "bf16"),
        ("LOWPREC_MATH_MODE", "F16_F16_F32", "math_mode", MathMode.FP16, "fp16"),
        (
            "LOWPREC_FORCE_MATH_MODE",
            "fp32_pedantic",
            "force_math_mode",
            MathMode.FP32_PEDANTIC,
            "fp32_pedantic",
        ),
        ("LOWPREC_FP32_GUARD", " 1 ", "fp32_guard", True, "no product is below full FP32"),
        ("LOWPREC_FP32_GUARD", "0", "fp32_guard", False, "no guard"),
        ("NVIDIA_TF32_OVERRIDE", " 0 ", "tf32_off", True, "TF32 is off"),
        ("NVIDIA_TF32_OVERRIDE", "1", "tf32_off", False, "lowprec does not act on this value"),
        ("NVIDIA_TF32_OVERRIDE", "00", "tf32_off", False, "lowprec does not act on this value"),
    ],
)
def test_legal_values(name, text, field, value, effect, monkeypatch):
    environment.rows()  # takes no snapshot
    monkeypatch.setenv(name, text)
    assert getattr(environment.snapshot(), field) is value
    assert row_of(name)["effect"] == effect
    remarked = [
        "NVIDIA reserves every value but 0" in problem for problem in environment.problems()
    ]
    assert remarked == [True] * effect.startswith("lowprec does not act")


@pytest.mark.parametrize("name", MODE_VARIABLES)
def test_a_bad_mode_is_an_error_and_a_row_and_is_not_kept(name, monkeypatch):
    monkeypatch.setenv(name, "fp23")
    with pytest.raises(
        EnvironmentVariableError, match=f"{name}.*'fp23' is not a math mode.*unset"
    ) as caught:
        environment.snapshot()
    assert all(mode.value in str(caught.value) for mode in available_modes())
    assert (row_of(name)["value"], row_of(name)["effect"]) == ("fp23", "refused")
    assert environment.problems() == (row_of(name)["problem"],) == (str(caught.value),)
    monkeypatch.setenv(name, "fp16")
    assert environment.snapshot().texts[name] == "fp16"


def test_a_variable_that_is_not_read_is_a_problem(monkeypatch):
    for name in ("LOWPREC_MTH_MODE", "LOWPREC_BUILD_TARGET", "LOWPREC_RUN_PROGRAM", "LOWPREC"):
        monkeypatch.setenv(name, "tf32")
    expected = "LOWPREC_MTH_MODE is not a variable of lowprec; did you mean 'LOWPREC_MATH_MODE'?"
    assert environment.problems() == (expected,)


@pytest.mark.parametrize("name", READ_ONCE)
def test_the_first_value_holds(name, monkeypatch):
    first = environment.snapshot()
    monkeypatch.setenv(name, "bf16" if name in MODE_VARIABLES else "0")
    assert environment.snapshot() is first
    (problem,) = environment.problems()
    assert f"{name} was unset when lowprec read it" in problem
    assert row_of(name)["effect"] == next(
        v.default for v in environment.VARIABLES if v.name == name
    )
    environment.refresh()
    assert environment.problems() == ()
    assert environment.snapshot() is not first


def test_a_switch_that_is_neither_on_nor_off_is_an_error(monkeypatch):
    monkeypatch.setenv("LOWPREC_FP32_GUARD", "yes")
    with pytest.raises(
        EnvironmentVariableError,
        match="LOWPREC_FP32_GUARD must be one of 0, 1, got 'yes'; or unset",
    ):
        environment.snapshot()


@pytest.mark.parametrize(
    ("mode", "options", "variables"),
    [
        (MathMode.TF32, {}, {"LOWPREC_MATH_MODE": "tf32", "LOWPREC_RUN": "tf32"}),
        (
            MathMode.BF16,
            {"force": True},
            {"LOWPREC_FORCE_MATH_MODE": "bf16", "LOWPREC_RUN": "bf16"},
        ),
        (
            None,
            {"guard": True},
            {"LOWPREC_FP32_GUARD": "1", "LOWPREC_RUN": "fp32_guard", "MLX_ENABLE_TF32": "0"},
        ),
        (None, {"profile": True}, {"LOWPREC_RUN_PROFILE": "1"}),
        (None, {"intercept": "{}"}, {"LOWPREC_RUN_INTERCEPT": "{}"}),
    ],
)
def test_the_environment_of_a_child(mode, options, variables, monkeypatch):
    monkeypatch.delenv("PYTHONPATH", raising=False)
    before = dict(os.environ)
    found = environment.child_environment("startup", mode, **options)
    assert found == {
        **before,
        **variables,
        "PYTHONPATH": "startup",
        "LOWPREC_RUN_PROGRAM": str(os.getpid()),
    }
    assert dict(os.environ) == before


@pytest.mark.parametrize(
    ("name", "default"),
    [
        ("OMP_NUM_THREADS", "the library's own choice"),
        ("LOWPREC_CACHE_DIR", "the user's cache folder of the system"),
    ],
)
def test_other_variables_are_read_at_every_use(name, default, monkeypatch):
    environment.snapshot()
    assert row_of(name)["effect"] == default
    monkeypatch.setenv(name, "4,2")
    assert row_of(name)["effect"] == "4,2"
    assert environment.problems() == ()


def test_a_bad_value_does_not_break_the_import():
    code = "import lowprec.policy as p\ntry: p.get_math_mode()\nexcept ValueError as e: print(type(e).__name__)"
    assert run_python(code, LOWPREC_FORCE_MATH_MODE="fp23") == "EnvironmentVariableError"
