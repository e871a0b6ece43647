"""Which mode is in force: the order of precedence."""

import random
from contextlib import ExitStack
from typing import NamedTuple

import pytest

from lowprec.errors import EnvironmentVariableError, ModeError
from lowprec.modes import MathMode, ModeSource, ResolvedMode
from lowprec.policy import (
    environment,
    fp32_guard,
    get_math_mode,
    math_mode,
    overriding_mode,
    resolve,
    restrict,
    set_math_mode,
)

PLAIN_MODES = tuple(MathMode(n) for n in ("fp32", "fp32_pedantic", "tf32", "bf16", "fp16"))
FP32, PEDANTIC, TF32, BF16, FP16 = PLAIN_MODES
S = ModeSource


pytestmark = pytest.mark.usefixtures("clean_policy")


class Settings(NamedTuple):
    """What is set at each level, highest first."""

    guard: bool = False
    force: str | None = None
    argument: str | None = None
    context: str | None = None
    process: str | None = None
    variable: str | None = None
    tf32: str | None = None
    guard_variable: str | None = None

    def resolve(self, monkeypatch):
        variables = {
            "LOWPREC_FORCE_MATH_MODE": self.force,
            "LOWPREC_MATH_MODE": self.variable,
            "LOWPREC_FP32_GUARD": self.guard_variable,
            "NVIDIA_TF32_OVERRIDE": self.tf32,
        }
        for name, text in variables.items():
            monkeypatch.setenv(name, text or "")
        environment.refresh()
        set_math_mode(self.process)
        with ExitStack() as stack:
            if self.guard:
                stack.enter_context(fp32_guard())
            if self.context is not None:
                stack.enter_context(math_mode(self.context))
            return resolve(self.argument)


def expected(s):
    """Return the mode and its source, and the first mode that is overruled."""
    levels = {
        S.FORCED: s.force, S.ARGUMENT: s.argument, S.CONTEXT: s.context, S.PROCESS: s.process,
        S.ENVIRONMENT: s.variable, S.DEFAULT: "fp32",
    }  # fmt: skip
    given = {source: MathMode(name) for source, name in levels.items() if name}
    source, mode = next(iter(given.items()))
    if mode is TF32 and s.tf32 == "0":
        mode = FP32
    # The guard is a floor, not a ceiling.
    if (s.guard or s.guard_variable == "1") and mode is not PEDANTIC:
        mode, source = FP32, S.GUARD if s.guard else S.GUARD_VARIABLE
    forced = given.pop(S.FORCED, None)
    requests = [next(iter(given.values())) if len(given) > 1 else None, forced]
    return mode, source, next((x for x in requests if x not in (None, mode)), None)


def test_precedence(monkeypatch):
    rng = random.Random(0)
    for _ in range(4000):
        names = [rng.choice((*[None] * 4, *(m.value for m in PLAIN_MODES))) for _ in range(5)]
        settings = Settings(
            rng.random() < 0.3, *names, rng.choice((None, "0", "1")), rng.choice((None, "0", "1"))
        )
        found = settings.resolve(monkeypatch)
        assert (found.mode, found.source, found.requested) == expected(settings), settings
        # A decision that differs from the request explains itself.
        assert bool(found.reasons) >= (found.requested is not None)


@pytest.mark.parametrize(
    ("settings", "reasons"),
    [
        (Settings(), ()),
        (Settings(context="bf16"), ()),
        (
            Settings(force="tf32", argument="bf16", tf32="0"),
            (
                "LOWPREC_FORCE_MATH_MODE=tf32 overrules bf16 (math_mode= argument).",
                "NVIDIA_TF32_OVERRIDE=0 turns tf32 into fp32.",
            ),
        ),
        (
            Settings(guard=True, force="tf32", context="bf16"),
            (
                "LOWPREC_FORCE_MATH_MODE=tf32 overrules bf16 (with math_mode(...)).",
                "fp32_guard raises tf32 (LOWPREC_FORCE_MATH_MODE) to fp32.",
            ),
        ),
        (
            Settings(guard_variable="1", variable="bf16"),
            ("LOWPREC_FP32_GUARD raises bf16 (LOWPREC_MATH_MODE) to fp32.",),
        ),
        # Emulated products depend on the data, so float64 operands are multiplied in native FP64.
        (
            Settings(guard=True, argument="fp64_emulated"),
            ("fp32_guard raises fp64_emulated (math_mode= argument) to fp32.",),
        ),
        (Settings(guard=True), ("fp32_guard keeps the precision at fp32 or above.",)),
        (
            Settings(guard=True, argument="fp32_pedantic"),
            ("fp32_guard is active, and fp32_pedantic is no less precise than fp32.",),
        ),
    ],
)
def test_reasons(settings, reasons, monkeypatch):
    assert settings.resolve(monkeypatch).reasons == reasons


def test_the_same_question_gets_the_same_object():
    assert resolve("tf32") is resolve("tf32")
    assert resolve("tf32") is resolve(MathMode.TF32) is resolve("HIGH")
    before = resolve()
    set_math_mode("bf16")
    assert resolve().mode is BF16
    set_math_mode(None)
    assert resolve() is before


@pytest.mark.parametrize("guarded", [False, True])
def test_a_wrong_argument_is_an_error_even_where_it_is_overruled(guarded):
    with ExitStack() as stack:
        if guarded:
            stack.enter_context(fp32_guard())
        with pytest.raises(ModeError, match="'fp23' is not a math mode; choose one of: fp32,"):
            resolve("fp23")
        with pytest.raises(ModeError, match=r"\['tf32'\] is not a math mode"):
            resolve(["tf32"])


def test_a_wrong_variable_is_an_error_of_every_use(monkeypatch):
    monkeypatch.setenv("LOWPREC_MATH_MODE", "fp23")
    environment.refresh()
    uses = (resolve, get_math_mode, overriding_mode, lambda: restrict(BF16, S.RTOL))
    for use in uses:
        with pytest.raises(EnvironmentVariableError, match="LOWPREC_MATH_MODE"):
            use()


@pytest.mark.parametrize(
    ("settings", "mode", "source"),
    [
        (Settings(), None, None),
        (Settings(context="bf16", process="fp16", variable="tf32", tf32="0"), None, None),
        (Settings(force="bf16", context="fp16"), BF16, S.FORCED),
        (Settings(force="tf32", tf32="0"), FP32, S.FORCED),
        (Settings(guard=True, force="bf16"), FP32, S.GUARD),
        (Settings(guard=True, force="fp32_pedantic"), PEDANTIC, S.FORCED),
        (Settings(guard_variable="1"), FP32, S.GUARD_VARIABLE),
        (Settings(guard_variable="1", force="bf16"), FP32, S.GUARD_VARIABLE),
        # An rtol takes precedence over the scope, so the scope's mode does not count beneath the guard.
        (Settings(guard=True, context="fp32_pedantic", variable="fp32_pedantic"), FP32, S.GUARD),
    ],
)
def test_overriding_mode(settings, mode, source, monkeypatch):
    # `resolve` is called with everything in place; here the question is asked at the same point.
    monkeypatch.setattr(f"{__name__}.resolve", lambda argument: overriding_mode())
    found = settings.resolve(monkeypatch)
    assert (found and found.mode) is mode
    assert (found and found.source) is source


def test_restrict_applies_overrides_to_a_chosen_mode(monkeypatch):
    with math_mode("bf16"):
        assert restrict(TF32, S.RTOL) == ResolvedMode(TF32, S.RTOL)
    with fp32_guard():
        assert restrict(TF32, S.RTOL).mode is FP32
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "0")
    environment.refresh()
    found = restrict(TF32, S.RTOL)
    assert (found.mode, found.source, found.requested) == (FP32, S.RTOL, TF32)
    assert restrict(BF16, S.RTOL) == ResolvedMode(BF16, S.RTOL)
