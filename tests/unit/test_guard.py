"""`fp32_guard` as a context manager, a decorator and a wrapper, over threads and tasks."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from lowprec.errors import LowprecWarning
from lowprec.modes import MathMode, ModeSource
from lowprec.policy import environment, fp32_guard, get_math_mode, math_mode, resolve, set_math_mode
from lowprec.policy.state import FULL_FP32

FP32, PEDANTIC = MathMode.FP32, MathMode.FP32_PEDANTIC
TF32, BF16, FP16 = MathMode.TF32, MathMode.BF16, MathMode.FP16


@pytest.fixture(autouse=True)
def bf16_everywhere(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process that lowers the precision, so that what the guard leaves open is seen."""
    for variable in environment.VARIABLES:
        monkeypatch.delenv(variable.name, raising=False)
    environment.refresh()
    set_math_mode("bf16")
    yield
    set_math_mode(None)
    environment.refresh()


def test_modes_of_full_fp32() -> None:
    assert {MathMode.FP32, MathMode.FP32_PEDANTIC, MathMode.FP64} == FULL_FP32


def test_the_guard_acts_at_entry_and_ends_at_exit() -> None:
    guard = fp32_guard()
    assert get_math_mode() is BF16
    with guard as entered:
        assert entered is guard
        assert get_math_mode() is FP32
        assert resolve("tf32").source is ModeSource.GUARD
        assert resolve("fp32_pedantic").mode is PEDANTIC
    assert get_math_mode() is BF16


def test_a_scope_inside_does_not_lower_it() -> None:
    with fp32_guard(), math_mode("tf32"):
        assert get_math_mode() is FP32
        set_math_mode("fp16")
        assert get_math_mode() is FP32
        with math_mode("fp32_pedantic"):
            assert get_math_mode() is PEDANTIC


def test_guards_nest_and_are_entered_again() -> None:
    guard = fp32_guard()
    with guard:
        with guard, fp32_guard():
            assert get_math_mode() is FP32
        assert get_math_mode() is FP32
    assert get_math_mode() is BF16


def test_an_exception_ends_the_guard() -> None:
    with pytest.raises(ZeroDivisionError, match="division"), fp32_guard():
        assert 1 / 0
    assert get_math_mode() is BF16


def test_the_guard_outlives_a_scope_that_closes_out_of_order() -> None:
    scope, guard = math_mode("tf32"), fp32_guard()
    scope.__enter__()
    guard.__enter__()
    scope.__exit__(None, None, None)
    assert get_math_mode() is FP32
    guard.__exit__(None, None, None)
    assert get_math_mode() is BF16
    guard.__enter__()
    scope.__enter__()
    guard.__exit__(None, None, None)
    assert get_math_mode() is TF32
    scope.__exit__(None, None, None)
    assert get_math_mode() is BF16


def test_an_exit_in_another_context_does_not_end_it() -> None:
    with fp32_guard() as guard:
        with pytest.warns(LowprecWarning, match=r"fp32_guard\(\) was left in a thread or task"):
            contextvars.Context().run(guard.__exit__, None, None, None)
        assert get_math_mode() is FP32


def test_a_guard_in_one_thread_leaves_the_others_alone() -> None:
    guard, inside, seen = fp32_guard(), threading.Event(), threading.Event()

    def solve() -> MathMode:
        with guard:
            inside.set()
            assert seen.wait(10)
            return get_math_mode()

    with ThreadPoolExecutor(1) as pool:
        solving = pool.submit(solve)
        assert inside.wait(10)
        assert get_math_mode() is BF16
        with guard:  # the same object, here
            assert get_math_mode() is FP32
        assert get_math_mode() is BF16
        seen.set()
        assert solving.result() is FP32


def test_overlapping_guards_of_eight_threads() -> None:
    guard, together = fp32_guard(), threading.Barrier(8)

    def count_mistakes(guarded: bool) -> int:
        mistakes = 0
        together.wait()
        for _ in range(2000):
            if guarded:
                with guard:
                    mistakes += resolve("tf32").mode is not FP32
            mistakes += resolve("tf32").mode is not TF32
        return mistakes

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(count_mistakes, [True, False] * 4)) == [0] * 8


def test_wrap_carries_the_guard_into_a_worker() -> None:
    with ThreadPoolExecutor(1) as pool, fp32_guard() as guard:
        assert pool.submit(get_math_mode).result() is BF16
        assert pool.submit(guard.wrap(get_math_mode)).result() is FP32
        assert pool.submit(get_math_mode).result() is BF16


def test_wrap_carries_a_mode_into_a_worker() -> None:
    with ThreadPoolExecutor(1) as pool, math_mode("tf32") as mode:
        assert pool.submit(get_math_mode).result() is BF16
        assert pool.submit(mode.wrap(get_math_mode)).result() is TF32
        assert pool.submit(get_math_mode).result() is BF16


def test_a_decorated_function() -> None:
    @fp32_guard()
    def mode(depth: int) -> list[MathMode]:
        return [get_math_mode(), *(mode(depth - 1) if depth else [])]

    assert mode(2) == [FP32] * 3
    assert get_math_mode() is BF16
    with pytest.raises(TypeError, match="argument"):
        fp32_guard(mode)  # type: ignore[call-arg] # the forgotten parentheses


def test_a_decorated_generator_keeps_the_guard_from_the_consumer() -> None:
    @fp32_guard()
    def steps() -> Iterator[MathMode]:
        while True:
            yield get_math_mode()

    running = steps()
    assert [next(running), get_math_mode(), next(running), get_math_mode()] == [FP32, BF16] * 2


def test_tasks_overlap_without_leaking() -> None:
    guard = fp32_guard()

    async def solve(turns: int) -> list[MathMode]:
        seen = []
        with guard:
            for _ in range(turns):
                await asyncio.sleep(0)
                seen.append(get_math_mode())
        return [*seen, get_math_mode()]

    @guard
    async def solve_decorated() -> MathMode:
        await asyncio.sleep(0)
        return get_math_mode()

    async def look_on() -> list[MathMode]:
        seen = []
        for _ in range(4):
            await asyncio.sleep(0)
            seen.append(get_math_mode())
        return seen

    async def main() -> list[object]:
        return await asyncio.gather(solve(3), solve(1), look_on(), solve_decorated())

    assert asyncio.run(main()) == [[FP32] * 3 + [BF16], [FP32, BF16], [BF16] * 4, FP32]


def test_a_task_and_a_thread_of_asyncio_inherit_it() -> None:
    async def mode() -> MathMode:
        return get_math_mode()

    async def main() -> list[MathMode]:
        with fp32_guard():
            task = asyncio.create_task(mode())
            in_thread = await asyncio.to_thread(get_math_mode)
        return [await task, in_thread, get_math_mode()]

    assert asyncio.run(main()) == [FP32, FP32, BF16]
