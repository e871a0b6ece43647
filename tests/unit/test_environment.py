"""The table of environment variables, its snapshot, and its rows in `info()`."""

import os

import pytest

from lowprec.errors import EnvironmentVariableError, LowprecError
from lowprec.modes import MathMode, available_modes
from lowprec.policy import environment
from support.programs import run_python

MODE_VARIABLES = ("LOWPREC_MATH_MODE", "LOWPREC_FORCE_MATH_MODE")
READ_ONCE = (*MODE_VARIABLES, "LOWPREC_FP32_GUARD", "NVIDIA_TF32_OVERRIDE")
pytestmark = pytest.mark.usefixtures("clean_policy")


def row_of(name):
    return next(r for r in environment.rows() if r.name == name)


@pytest.mark.parametrize("name", READ_ONCE)
@pytest.mark.parametrize("blank", [None, "", "  "])
def test_blank_is_unset(name, blank, monkeypatch):
    if blank is not None:
        monkeypatch.setenv(name, blank)
    taken = environment.snapshot()
    assert (taken.math_mode, taken.force_math_mode) == (None, None)
    assert (taken.fp32_guard, taken.tf32_off) == (False, False)
    assert all(r.value is None for r in environment.rows())
    assert row_of("LOWPREC_MATH_MODE").effect == "fp32"
    assert environment.problems() == ()


@pytest.mark.parametrize(
    ("text", "mode"), [("tf32", MathMode.TF32), (" BF16 ", MathMode.BF16), ("F16_F16_F32", MathMode.FP16)]
)
def test_mode_variables(text, mode, monkeypatch):
    monkeypatch.setenv("LOWPREC_MATH_MODE", text)
    monkeypatch.setenv("LOWPREC_FORCE_MATH_MODE", "fp32_pedantic")
    taken = environment.snapshot()
    assert taken.math_mode is mode
    assert taken.force_math_mode is MathMode.FP32_PEDANTIC
    assert row_of("LOWPREC_MATH_MODE").effect == mode.value


@pytest.mark.parametrize("name", MODE_VARIABLES)
def test_a_bad_mode_names_variable_value_and_legal_values(name, monkeypatch):
    monkeypatch.setenv(name, "fp23")
    with pytest.raises(EnvironmentVariableError, match=f"{name}.*'fp23'.*unset") as caught:
        environment.snapshot()
    assert all(mode.value in str(caught.value) for mode in available_modes())
    assert isinstance(caught.value, LowprecError)
    assert isinstance(caught.value, ValueError)


def test_a_bad_value_is_a_row_and_is_not_kept(monkeypatch):
    monkeypatch.setenv("LOWPREC_MATH_MODE", "fp23")
    row = row_of("LOWPREC_MATH_MODE")
    assert (row.value, row.effect) == ("fp23", "refused")
    (problem,) = environment.problems()
    assert problem == row.problem
    assert "'fp23' is not a math mode" in problem
    with pytest.raises(EnvironmentVariableError, match="LOWPREC_MATH_MODE"):
        environment.snapshot()
    monkeypatch.setenv("LOWPREC_MATH_MODE", "fp16")
    assert environment.snapshot().math_mode is MathMode.FP16


@pytest.mark.parametrize(
    ("text", "off", "remarks"), [("0", True, 0), (" 0 ", True, 0), ("1", False, 1), ("00", False, 1), ("off", False, 1)]
)
def test_only_zero_turns_tf32_off(text, off, remarks, monkeypatch):
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", text)
    assert environment.snapshot().tf32_off is off
    problems = environment.problems()
    assert len(problems) == remarks
    assert all("NVIDIA reserves every value but 0" in p for p in problems)


@pytest.mark.parametrize("name", READ_ONCE)
def test_the_first_value_holds(name, monkeypatch):
    first = environment.snapshot()
    monkeypatch.setenv(name, "bf16" if name in MODE_VARIABLES else "0")
    assert environment.snapshot() is first
    (problem,) = environment.problems()
    assert f"{name} was unset when lowprec read it" in problem
    assert row_of(name).effect == next(v.default for v in environment.VARIABLES if v.name == name)
    environment.refresh()
    assert environment.problems() == ()
    assert environment.snapshot() is not first


@pytest.mark.parametrize(("text", "on"), [("1", True), (" 1 ", True), ("0", False)])
def test_the_guard_variable(text, on, monkeypatch):
    monkeypatch.setenv("LOWPREC_FP32_GUARD", text)
    assert environment.snapshot().fp32_guard is on
    effect = "no product is below full FP32" if on else "no guard"
    assert row_of("LOWPREC_FP32_GUARD").effect == effect


@pytest.mark.parametrize(
    ("name", "text", "read"),
    [
        ("LOWPREC_FP32_GUARD", "yes", environment.snapshot),
        ("LOWPREC_PEER_ACCESS", "2", environment.PEER_ACCESS.current),
    ],
)
def test_a_switch_that_is_neither_on_nor_off_is_an_error(name, text, read, monkeypatch):
    monkeypatch.setenv(name, text)
    with pytest.raises(EnvironmentVariableError, match=f"{name} must be one of 0, 1, got '{text}'; or unset it"):
        read()


@pytest.mark.parametrize(
    ("mode", "force", "variables"),
    [
        (MathMode.TF32, False, {"LOWPREC_MATH_MODE": "tf32", "LOWPREC_RUN": "tf32"}),
        (MathMode.BF16, True, {"LOWPREC_FORCE_MATH_MODE": "bf16", "LOWPREC_RUN": "bf16"}),
        (None, False, {"LOWPREC_FP32_GUARD": "1", "LOWPREC_RUN": "fp32_guard", "MLX_ENABLE_TF32": "0"}),
    ],
)
def test_the_environment_of_a_child(mode, force, variables, monkeypatch):
    monkeypatch.delenv("PYTHONPATH", raising=False)
    before = dict(os.environ)
    found = environment.child_environment("startup", mode, guard=mode is None, force=force)
    assert found == {**before, **variables, "PYTHONPATH": "startup", "LOWPREC_RUN_PROGRAM": str(os.getpid())}
    assert dict(os.environ) == before


def test_reports_of_a_child(monkeypatch):
    monkeypatch.delenv("PYTHONPATH", raising=False)
    before = dict(os.environ) | {"LOWPREC_RUN_PROGRAM": str(os.getpid())}
    found = environment.child_environment("startup", None, profile=True)
    assert found == {**before, "PYTHONPATH": "startup", "LOWPREC_RUN_PROFILE": "1"}
    found = environment.child_environment("startup", MathMode.TF32, intercept="{}")
    assert found["LOWPREC_RUN_INTERCEPT"] == "{}"
    assert "LOWPREC_RUN_PROFILE" not in found


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("", ["startup"]),
        ("one", ["startup", "one"]),
        ("one::two", ["startup", "one", "", "two"]),
        ("one:startup:two", ["startup", "one", "two"]),
    ],
)
def test_the_hook_comes_first_and_once(before, after, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", before.replace(":", os.pathsep))
    found = environment.child_environment("startup", MathMode.TF32)
    assert found["PYTHONPATH"] == os.pathsep.join(after)


def test_rows_do_not_take_the_snapshot(monkeypatch):
    environment.rows()
    monkeypatch.setenv("LOWPREC_MATH_MODE", "bf16")
    assert environment.snapshot().math_mode is MathMode.BF16


def test_thread_variables_are_shown_as_they_are(monkeypatch):
    environment.snapshot()
    monkeypatch.setenv("OMP_NUM_THREADS", "4,2")
    assert row_of("OMP_NUM_THREADS").effect == "4,2"
    assert row_of("MKL_NUM_THREADS").effect == "the library's own choice"
    assert environment.problems() == ()


def test_the_cache_directory_is_read_at_every_use(monkeypatch):
    environment.snapshot()
    assert environment.CACHE_DIR.current() is None
    monkeypatch.setenv("LOWPREC_CACHE_DIR", "somewhere")
    assert environment.CACHE_DIR.current() == "somewhere"
    assert row_of("LOWPREC_CACHE_DIR").effect == "somewhere"


def test_a_bad_value_does_not_break_the_import():
    code = "import lowprec.policy as p\ntry: p.get_math_mode()\nexcept ValueError as e: print(type(e).__name__)"
    assert run_python(code, LOWPREC_FORCE_MATH_MODE="fp23") == "EnvironmentVariableError"
