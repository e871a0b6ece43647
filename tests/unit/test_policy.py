"""Which mode is in force: the order of precedence."""

from __future__ import annotations

import itertools
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
from lowprec.policy.resolution import FULL_FP32

PLAIN_MODES = tuple(MathMode(n) for n in ("fp32", "fp32_pedantic", "tf32", "bf16", "fp16"))
FP32, PEDANTIC, TF32, BF16, FP16 = PLAIN_MODES
S = ModeSource


pytestmark = pytest.mark.usefixtures("clean_policy")


# -- precedence -----------------------------------------------------------------------------------


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

    def resolve(self, monkeypatch: pytest.MonkeyPatch) -> ResolvedMode:
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


def case(mode: MathMode, source: ModeSource, requested: MathMode | None = None, **levels: object):
    return pytest.param(Settings(**levels), mode, source, requested, id=str(levels or "nothing"))


@pytest.mark.parametrize(
    ("settings", "mode", "source", "requested"),
    [
        # Each level alone.
        case(FP32, S.DEFAULT),
        case(TF32, S.ENVIRONMENT, variable="tf32"),
        case(TF32, S.PROCESS, process="tf32"),
        case(TF32, S.CONTEXT, context="tf32"),
        case(TF32, S.ARGUMENT, argument="tf32"),
        case(TF32, S.FORCED, force="tf32"),
        case(FP32, S.GUARD, guard=True),
        # Each level with all lower ones.
        case(FP16, S.PROCESS, process="fp16", variable="tf32"),
        case(BF16, S.CONTEXT, context="bf16", process="fp16", variable="tf32"),
        case(TF32, S.ARGUMENT, argument="tf32", context="bf16", process="fp16", variable="bf16"),
        case(
            FP16, S.FORCED, TF32,
            force="fp16", argument="tf32", context="bf16", process="bf16", variable="bf16",
        ),
        case(
            FP32, S.GUARD, TF32,
            guard=True, force="fp16", argument="tf32", context="bf16", process="bf16", variable="bf16",
        ),
        # The guard's variable has the rank of the guard, which is the source of both.
        case(FP32, S.GUARD_VARIABLE, guard_variable="1"),
        case(
            FP32, S.GUARD_VARIABLE, TF32, guard_variable="1",
            force="fp16", argument="tf32", context="bf16", process="bf16", variable="bf16",
        ),
        case(FP32, S.GUARD, TF32, guard=True, guard_variable="1", argument="tf32"),
        case(PEDANTIC, S.ARGUMENT, guard_variable="1", argument="fp32_pedantic"),
        case(FP32, S.GUARD_VARIABLE, TF32, guard_variable="1", argument="tf32", tf32="0"),
        case(TF32, S.ARGUMENT, guard_variable="0", argument="tf32"),
        # A level may raise the precision as well as lower it, so fp32 must win where it is higher up.
        case(FP32, S.PROCESS, process="fp32", variable="tf32"),
        case(FP32, S.CONTEXT, context="fp32", process="tf32"),
        case(FP32, S.ARGUMENT, argument="fp32", context="tf32"),
        case(FP32, S.FORCED, TF32, force="fp32", argument="tf32"),
        # Every overruled mode is reported, with its source.
        case(FP16, S.FORCED, BF16, force="fp16", context="bf16"),
        case(FP16, S.FORCED, force="fp16", argument="fp16"),
        case(FP32, S.GUARD, BF16, guard=True, variable="bf16"),
        case(FP32, S.GUARD, BF16, guard=True, force="bf16"),
        case(FP32, S.GUARD, guard=True, argument="fp32"),
        # The guard is a floor, not a ceiling.
        case(PEDANTIC, S.ARGUMENT, guard=True, argument="fp32_pedantic"),
        case(PEDANTIC, S.CONTEXT, guard=True, context="fp32_pedantic", process="bf16"),
        case(PEDANTIC, S.FORCED, BF16, guard=True, force="fp32_pedantic", argument="bf16"),
        case(FP32, S.GUARD, PEDANTIC, guard=True, force="bf16", argument="fp32_pedantic"),
        # Without TF32 its modes become fp32, wherever they came from; no other mode changes.
        case(FP32, S.ENVIRONMENT, TF32, variable="tf32", tf32="0"),
        case(FP32, S.PROCESS, TF32, process="tf32", tf32="0"),
        case(FP32, S.CONTEXT, TF32, context="tf32", tf32="0"),
        case(FP32, S.ARGUMENT, TF32, argument="high", tf32="0"),
        case(FP32, S.FORCED, TF32, force="tf32", tf32="0"),
        case(FP32, S.FORCED, BF16, force="tf32", argument="bf16", tf32="0"),
        case(FP32, S.GUARD, TF32, guard=True, argument="tf32", tf32="0"),
        case(BF16, S.ARGUMENT, argument="bf16", tf32="0"),
        case(PEDANTIC, S.ARGUMENT, argument="pedantic", tf32="0"),
        case(TF32, S.ARGUMENT, argument="tf32", tf32="1"),
    ],
)  # fmt: skip
def test_precedence(
    settings: Settings, mode: MathMode, source: ModeSource, requested: MathMode | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = settings.resolve(monkeypatch)
    assert (found.mode, found.source, found.requested) == (mode, source, requested)
    # A decision that differs from the request explains itself.
    assert bool(found.reasons) >= (requested is not None)


@pytest.mark.parametrize("guard", [(True, None), (False, "1")], ids=["block", "variable"])
@pytest.mark.parametrize("argument", [None, *PLAIN_MODES])
def test_nothing_gets_below_the_guard(
    argument: MathMode | None, guard: tuple[bool, str | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    block, own = guard
    choices = (None, *(m.value for m in PLAIN_MODES))
    for force, context, process in itertools.product(choices, repeat=3):
        settings = Settings(block, force, argument, context, process, "bf16", None, own)
        assert settings.resolve(monkeypatch).mode in FULL_FP32, settings


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
        (Settings(guard=True), ("fp32_guard keeps the precision at fp32 or above.",)),
        (
            Settings(guard=True, argument="fp32_pedantic"),
            ("fp32_guard is active, and fp32_pedantic is no less precise than fp32.",),
        ),
    ],
)
def test_reasons(settings: Settings, reasons: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    assert settings.resolve(monkeypatch).reasons == reasons


def test_the_same_question_gets_the_same_object() -> None:
    assert resolve("tf32") is resolve("tf32")
    assert resolve("tf32") is resolve(MathMode.TF32) is resolve("HIGH")
    before = resolve()
    set_math_mode("bf16")
    assert resolve().mode is BF16
    set_math_mode(None)
    assert resolve() is before


@pytest.mark.parametrize("guarded", [False, True])
def test_a_wrong_argument_is_an_error_even_where_it_is_overruled(guarded: bool) -> None:
    with ExitStack() as stack:
        if guarded:
            stack.enter_context(fp32_guard())
        with pytest.raises(ModeError, match="'fp23' is not a math mode; choose one of: fp32,"):
            resolve("fp23")
        with pytest.raises(ModeError, match=r"\['tf32'\] is not a math mode"):
            resolve(["tf32"])  # type: ignore[arg-type]


def test_a_wrong_variable_is_an_error_of_every_use(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOWPREC_MATH_MODE", "fp23")
    environment.refresh()
    uses = (resolve, get_math_mode, overriding_mode, lambda: restrict(BF16, S.RTOL))
    for use in uses:
        with pytest.raises(EnvironmentVariableError, match="LOWPREC_MATH_MODE"):
            use()


# -- a mode chosen by rtol ------------------------------------------------------------------------


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
def test_overriding_mode(
    settings: Settings, mode: MathMode | None, source: ModeSource | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    # `resolve` is called with everything in place; here the question is asked at the same point.
    monkeypatch.setattr(f"{__name__}.resolve", lambda argument: overriding_mode())
    found = settings.resolve(monkeypatch)
    assert (found and found.mode) is mode
    assert (found and found.source) is source


def test_restrict_applies_overrides_to_a_chosen_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    with math_mode("bf16"):
        assert restrict(TF32, S.RTOL) == ResolvedMode(TF32, S.RTOL)
    with fp32_guard():
        assert restrict(TF32, S.RTOL).mode is FP32
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "0")
    environment.refresh()
    found = restrict(TF32, S.RTOL)
    assert (found.mode, found.source, found.requested) == (FP32, S.RTOL, TF32)
    assert restrict(BF16, S.RTOL) == ResolvedMode(BF16, S.RTOL)
