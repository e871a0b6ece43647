"""Exceptions that a signal handler raises, at every step of entering and leaving a block."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from lowprec.modes import MathMode
from lowprec.policy import entries, environment, fp32_guard, get_math_mode, math_mode, process, switches
from lowprec.policy.protocol import Tier
from support import interrupts
from support import synthetic_library as made_up
from support.interrupts import Late
from support.programs import run_python
from support.synthetic_library import Library

ERRORS = (KeyboardInterrupt, TimeoutError, Late)
#: The code of the libraries below counts as the policy's own.
FILES = (__file__, made_up.__file__)
TESTS = str(Path(__file__).parents[1])


Libraries = tuple[Library, Library]


@pytest.fixture
def libraries(register: Any) -> Iterator[Libraries]:
    """One whose switches belong to the process, and one whose switches belong to the thread."""
    made = register("process"), register("thread", tier=Tier.THREAD)
    environment.snapshot()
    yield made
    assert all(library.is_as_before for library in made)


def check(libraries: Libraries) -> None:
    """Everything is as before, and can be set again, in other threads too."""
    assert all(library.is_as_before for library in libraries)
    assert not entries.held
    # Those of other tests' libraries may have been set for the rest of the process.
    stacks = (switches._process_stacks, switches._thread.stacks)
    assert not any(held.get(library) for held in stacks for library in libraries)

    def enter() -> None:
        with math_mode("tf32", frameworks=True):
            assert get_math_mode() is MathMode.TF32
            seen.append({v for library in libraries for v in library.values.values()})

    seen: list[set[str]] = []
    enter()
    thread = threading.Thread(target=enter, daemon=True)
    thread.start()
    thread.join(10)
    assert seen == [{"tf32"}] * 2


# -- every place ----------------------------------------------------------------------------------


def empty() -> None:
    with fp32_guard():
        pass


def own_policy_only() -> None:
    with math_mode("bf16"), fp32_guard(frameworks=False):
        pass


def nested() -> None:
    guard = fp32_guard()
    with guard, fp32_guard(), guard:
        pass


def switches_of_a_mode() -> None:
    with math_mode("tf32", frameworks=True), fp32_guard():
        pass


@math_mode("tf32", frameworks=True)
def decorated() -> None:
    pass


@fp32_guard().wrap
def steps() -> Iterator[int]:
    yield 1
    yield 2


def generator() -> None:
    list(steps())


ACTIONS = [empty, own_policy_only, nested, switches_of_a_mode, decorated, generator]


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("action", ACTIONS, ids=lambda action: action.__name__)
@pytest.mark.sampled(3)
def test_the_exception_arrives_and_blocks_no_thread(
    libraries: Libraries, action: Callable[[], None], error: type[BaseException]
) -> None:
    assert interrupts.count(action, lambda: check(libraries), error, also=FILES) > 20


def test_an_interrupted_entry_is_undone(libraries: Libraries) -> None:
    def enter() -> None:
        fp32_guard().__enter__()

    for came in interrupts.interrupted(enter, Late, also=FILES):
        assert type(came) is Late
        assert not entries.held
        check(libraries)
    assert interrupts.leave() == 1  # of the call without an interrupt


def test_a_guard_that_another_thread_has_open(libraries: Libraries) -> None:
    guard, (of_process, of_thread) = fp32_guard(), libraries

    def enter() -> None:
        with guard:
            pass

    def is_full() -> None:
        assert of_process.is_full
        assert entries.innermost.get().outer is None
        assert len(entries.held) == 1
        assert of_thread.is_as_before

    with ThreadPoolExecutor(1) as pool:
        pool.submit(guard.__enter__).result()
        assert interrupts.count(enter, is_full, Late, also=FILES) > 20
        pool.submit(guard.__exit__).result()
    check(libraries)


@pytest.mark.filterwarnings("ignore::lowprec.errors.LowprecWarning")
def test_a_library_that_fails_by_itself_does_not_take_the_exception(libraries: Libraries) -> None:
    fails = libraries[0].fails
    fails["have set_mode"] = OSError("no driver")

    def look() -> None:
        own = fails.pop("have set_mode")
        check(libraries)
        fails["have set_mode"] = own

    assert interrupts.count(empty, look, Late, also=FILES) > 20


def test_a_library_for_the_rest_of_the_process(libraries: Libraries, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "_guarded", {})
    monkeypatch.setattr(switches, "_process_stacks", {})
    name, values = libraries[0].name, dict(libraries[0].values)

    def look() -> None:
        assert process._guarded == {}
        check(libraries)

    set_library = partial(process.set_library, name, "tf32")
    assert interrupts.count(set_library, look, Late, also=FILES) > 10
    libraries[0].restore(values)


# -- locks ----------------------------------------------------------------------------------------


def test_a_handler_that_multiplies_while_the_environment_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """It runs in the very thread that reads; both get the same values."""
    environment.refresh()
    take, seen = environment._take, []

    def interrupted() -> environment.EnvironmentSnapshot:
        monkeypatch.setattr(environment, "_take", take)
        seen.append(environment.snapshot())
        return take()

    monkeypatch.setattr(environment, "_take", interrupted)
    thread = threading.Thread(target=lambda: seen.append(environment.snapshot()), daemon=True)
    thread.start()
    thread.join(10)
    assert len(seen) == 2
    assert seen[0] is seen[1] is environment.snapshot()


# -- real signals ---------------------------------------------------------------------------------

_SIGNALS = """
import contextvars, random, signal, sys, threading, warnings
warnings.simplefilter("error")
from types import ModuleType
from lowprec.policy import controllers, fp32_guard, math_mode
from support import interrupts
from support.interrupts import Late
from support.synthetic_library import Library

library = Library("one")
sys.modules[library.module] = ModuleType(library.module)
controllers.register_controller(library)

def late(*_):
    global fired
    fired = True
    raise Late

# A function, since Python 3.13 may leave the jump back of a loop out of the try statement around it.
def run(scope):
    while not fired:
        with scope:
            pass

def enter():
    with scopes[0]:
        seen.append(library.is_full)

signal.signal(signal.SIGALRM, late)
rng, scopes = random.Random(0), (fp32_guard(), math_mode("tf32", frameworks=True))
lost, changed, seen = 0, 0, []
for turn in range(3000):
    fired, arrived = False, False
    try:
        signal.setitimer(signal.ITIMER_REAL, rng.uniform(1e-6, 2e-4))
        contextvars.copy_context().run(run, scopes[turn % 2])
    except Late:
        arrived = True
    lost += not arrived
    interrupts.leave()
    changed += not library.is_as_before
    thread = threading.Thread(target=enter, daemon=True)
    thread.start()
    thread.join(10)
    if len(seen) <= turn:
        sys.exit(f"turn {turn}: a thread waits for the lock")
print(lost, changed, all(seen))
"""


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="this system has no such timers")
def test_signals_arrive_and_block_no_thread() -> None:
    """A timer interrupts blocks wherever it happens to go off."""
    assert run_python(_SIGNALS, warn="error", timeout=300, PYTHONPATH=TESTS) == "0 0 True"
