"""Which mode is in force: the order of precedence, and the scopes that make part of it."""

from __future__ import annotations

import asyncio
import contextvars
import functools
import itertools
import threading
from collections.abc import AsyncIterator, Generator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any, NamedTuple

import pytest

from lowprec.errors import EnvironmentVariableError, LowprecWarning, ModeError
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
from lowprec.policy.state import FULL_FP32

PLAIN_MODES = tuple(MathMode(n) for n in ("fp32", "fp32_pedantic", "tf32", "bf16", "fp16"))
FP32, PEDANTIC, TF32, BF16, FP16 = PLAIN_MODES
S = ModeSource


@pytest.fixture(autouse=True)
def fresh_policy(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for variable in environment.VARIABLES:
        monkeypatch.delenv(variable.name, raising=False)
    environment.refresh()
    yield
    set_math_mode(None)
    environment.refresh()


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
        # Each level with all that stand below it.
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
        # The guard's variable stands where the guard does, and the guard speaks for both.
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
        # What was overruled is told, whoever asked for it.
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
        # An rtol stands above the scope, so the scope's mode does not count beneath the guard.
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


def test_finish_applies_what_takes_precedence_over_a_chosen_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    with math_mode("bf16"):
        assert restrict(TF32, S.RTOL) == ResolvedMode(TF32, S.RTOL)
    with fp32_guard():
        assert restrict(TF32, S.RTOL).mode is FP32
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "0")
    environment.refresh()
    found = restrict(TF32, S.RTOL)
    assert (found.mode, found.source, found.requested) == (FP32, S.RTOL, TF32)
    assert restrict(BF16, S.RTOL) == ResolvedMode(BF16, S.RTOL)


# -- scopes and the process default ---------------------------------------------------------------


def test_a_scope_acts_at_entry_and_is_checked_at_construction() -> None:
    scope = math_mode("bf16")
    assert get_math_mode() is FP32
    with scope as entered:
        assert entered is scope
        assert get_math_mode() is BF16
    assert get_math_mode() is FP32
    with pytest.raises(ModeError, match="'fp23' is not a math mode"):
        math_mode("fp23")
    with pytest.raises(ModeError, match="None is not a math mode"):
        math_mode(None)  # type: ignore[arg-type]
    with pytest.raises(ModeError, match="is not a math mode"):
        math_mode(test_reasons)  # type: ignore[arg-type] # the forgotten parentheses
    with pytest.raises(TypeError, match=r"math_mode\('bf16'\) decorates functions, got int"):
        scope(3)  # type: ignore[type-var]


def test_scopes_nest_and_are_used_again() -> None:
    bf16, tf32 = math_mode("bf16"), math_mode("tf32")
    with bf16:
        with tf32:
            with bf16:
                assert get_math_mode() is BF16
            assert get_math_mode() is TF32
        assert get_math_mode() is BF16
        with bf16:
            assert get_math_mode() is BF16
        assert get_math_mode() is BF16
    assert get_math_mode() is FP32


def test_an_exception_closes_the_scope() -> None:
    with pytest.raises(ZeroDivisionError, match="division"), math_mode("bf16"):
        assert 1 / 0
    assert get_math_mode() is FP32


def test_scopes_that_close_out_of_order_do_not_undo_each_other() -> None:
    first, second = math_mode("bf16"), math_mode("tf32")
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert get_math_mode() is TF32
    second.__exit__(None, None, None)
    assert get_math_mode() is FP32


def test_an_exit_in_another_context_changes_neither() -> None:
    scope = math_mode("bf16")
    with scope:
        with pytest.warns(LowprecWarning, match="left in a thread or task in which it was not"):
            contextvars.Context().run(scope.__exit__, None, None, None)
        assert get_math_mode() is BF16
        # A copy has the entry, and loses only its own.
        contextvars.copy_context().run(scope.__exit__, None, None, None)
        assert get_math_mode() is BF16
    assert get_math_mode() is FP32


def test_the_process_default_reaches_every_thread() -> None:
    set_math_mode("fp16")
    with ThreadPoolExecutor(1) as pool:
        assert pool.submit(get_math_mode).result() is FP16
        set_math_mode("highest")
        assert pool.submit(get_math_mode).result() is FP32
    with pytest.raises(ModeError, match="'fp23' is not a math mode"):
        set_math_mode("fp23")
    assert resolve().source is S.PROCESS


def test_each_of_eight_threads_sees_its_own_mode() -> None:
    modes = [m for m in PLAIN_MODES for _ in range(2)][:8]
    together = threading.Barrier(len(modes))

    def count_strangers(mode: MathMode) -> int:
        strangers = 0
        together.wait()
        for _ in range(2000):
            with math_mode(mode):
                strangers += resolve().mode is not mode
                strangers += resolve("tf32").mode is not TF32
            strangers += resolve().mode is not FP32
        return strangers

    with ThreadPoolExecutor(len(modes)) as pool:
        assert list(pool.map(count_strangers, modes)) == [0] * len(modes)


def test_threads_may_share_one_scope() -> None:
    scope, inside, left = math_mode("bf16"), threading.Event(), threading.Event()

    def stay() -> MathMode:
        with scope:
            inside.set()
            assert left.wait(10)
            return get_math_mode()

    with ThreadPoolExecutor(1) as pool:
        staying = pool.submit(stay)
        assert inside.wait(10)
        assert get_math_mode() is FP32
        with scope:
            assert get_math_mode() is BF16
        assert get_math_mode() is FP32
        left.set()
        assert staying.result() is BF16


def test_tasks_overlap_without_leaking() -> None:
    shared = math_mode("bf16")

    async def wander(mode: str, turns: int) -> list[MathMode]:
        seen = []
        with shared, math_mode(mode):
            for _ in range(turns):
                await asyncio.sleep(0)
                seen.append(get_math_mode())
        return [*seen, get_math_mode()]

    async def everyone() -> list[list[MathMode]]:
        return await asyncio.gather(wander("tf32", 3), wander("fp16", 1), wander("fp32", 2))

    assert asyncio.run(everyone()) == [[TF32] * 3 + [FP32], [FP16, FP32], [FP32] * 3]
    assert get_math_mode() is FP32


def test_a_task_inherits_the_scope_it_was_started_in() -> None:
    async def mode() -> MathMode:
        return get_math_mode()

    async def main() -> tuple[MathMode, MathMode]:
        with math_mode("bf16"):
            task = asyncio.create_task(mode())
        return await task, get_math_mode()

    assert asyncio.run(main()) == (BF16, FP32)


# -- decorators -----------------------------------------------------------------------------------


def test_a_decorated_function() -> None:
    @math_mode("bf16")
    def mode(depth: int, *, fail: bool = False) -> list[MathMode]:
        """Say the mode."""
        if fail:
            raise ZeroDivisionError("on purpose")
        deeper = mode(depth - 1) if depth else []
        return [get_math_mode(), *deeper]

    assert mode.__name__ == "mode"
    assert mode.__doc__ == "Say the mode."
    assert mode(2) == [BF16] * 3
    with pytest.raises(ZeroDivisionError, match="on purpose"):
        mode(0, fail=True)
    assert get_math_mode() is FP32


def test_a_decorated_coroutine_function() -> None:
    @math_mode("bf16")
    async def mode() -> tuple[MathMode, MathMode]:
        before = get_math_mode()
        await asyncio.sleep(0)
        return before, get_math_mode()

    async def main() -> tuple[MathMode, tuple[MathMode, MathMode], MathMode]:
        pending = mode()
        outside = get_math_mode()
        return outside, await pending, get_math_mode()

    assert asyncio.run(main()) == (FP32, (BF16, BF16), FP32)


def test_a_decorated_generator_keeps_its_mode_from_the_consumer() -> None:
    seen: list[object] = []

    @math_mode("bf16")
    def steps(n: int) -> Generator[MathMode, str, str]:
        try:
            for _ in range(n):
                try:
                    seen.append((yield get_math_mode()))
                except ZeroDivisionError:
                    seen.append(("caught", get_math_mode()))
        finally:
            seen.append(("closed", get_math_mode()))
        return "done"

    running = steps(3)
    assert next(running) is BF16
    assert get_math_mode() is FP32
    with math_mode("tf32"):
        assert running.send("sent") is BF16
        assert get_math_mode() is TF32
    assert running.throw(ZeroDivisionError()) is BF16
    with pytest.raises(StopIteration, match="done"):
        next(running)
    assert seen == ["sent", ("caught", BF16), None, ("closed", BF16)]
    assert get_math_mode() is FP32


def test_a_decorated_generator_closes_its_body_in_its_mode() -> None:
    seen = []

    @math_mode("bf16")
    def steps() -> Iterator[None]:
        try:
            yield
        finally:
            seen.append(get_math_mode())

    running = steps()
    next(running)
    running.close()
    assert seen == [BF16]
    running = steps()
    next(running)
    with pytest.raises(ZeroDivisionError, match="on purpose"):
        running.throw(ZeroDivisionError("on purpose"))
    assert seen == [BF16, BF16]
    assert get_math_mode() is FP32


def test_a_decorated_object_is_of_the_kind_of_its_call() -> None:
    class Coroutine:
        async def __call__(self) -> MathMode:
            await asyncio.sleep(0)
            return get_math_mode()

    class Steps:
        def __call__(self) -> Iterator[MathMode]:
            yield get_math_mode()

    class AsyncSteps:
        async def __call__(self) -> AsyncIterator[MathMode]:
            yield get_math_mode()

    async def consume(function: Any) -> list[MathMode]:
        return [mode async for mode in function()]

    around = math_mode("bf16")
    for wrap in (lambda f: f, functools.partial):
        assert asyncio.run(around(wrap(Coroutine()))()) is BF16
        assert list(around(wrap(Steps()))()) == [BF16]
        assert asyncio.run(consume(around(wrap(AsyncSteps())))) == [BF16]


def test_decorated_methods_without_an_instance() -> None:
    class Solver:
        @math_mode("bf16")
        @staticmethod
        def static(x: int) -> tuple[int, MathMode]:
            return x, get_math_mode()

        @math_mode("bf16")
        @classmethod
        def of_class(cls, x: int) -> tuple[type, int, MathMode]:
            return cls, x, get_math_mode()

        @math_mode("bf16")
        @staticmethod
        async def later(x: int) -> tuple[int, MathMode]:
            await asyncio.sleep(0)
            return x, get_math_mode()

    for solver in (Solver, Solver()):
        assert solver.static(3) == (3, BF16)
        assert solver.of_class(3) == (Solver, 3, BF16)
        assert asyncio.run(solver.later(3)) == (3, BF16)


def test_a_decorated_async_generator() -> None:
    seen: list[object] = []

    @math_mode("bf16")
    async def steps(n: int) -> AsyncIterator[MathMode]:
        try:
            for _ in range(n):
                await asyncio.sleep(0)
                try:
                    seen.append((yield get_math_mode()))
                except ZeroDivisionError:
                    seen.append(("caught", get_math_mode()))
        finally:
            seen.append(("closed", get_math_mode()))

    async def main() -> list[MathMode]:
        modes = []
        async for mode in steps(1):
            modes += [mode, get_math_mode()]
        running = steps(3)
        modes += [await running.__anext__(), get_math_mode()]
        modes += [await running.asend("sent"), get_math_mode()]
        modes += [await running.athrow(ZeroDivisionError()), get_math_mode()]
        await running.aclose()
        return [*modes, get_math_mode()]

    assert asyncio.run(main()) == [BF16, FP32] * 4 + [FP32]
    assert seen == [None, ("closed", BF16), "sent", ("caught", BF16), ("closed", BF16)]


def test_a_scope_left_open_in_a_generator_can_be_closed_late() -> None:
    def body() -> Iterator[None]:
        with math_mode("bf16"):
            yield

    # A plain generator shares its consumer's context: the mode stays until the body ends.
    running = body()
    next(running)
    assert get_math_mode() is BF16
    with math_mode("tf32"):
        running.close()
        assert get_math_mode() is TF32
    assert get_math_mode() is FP32
