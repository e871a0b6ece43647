"""Exceptions that a signal handler raises while a block is entered or left."""

from __future__ import annotations

import signal
import threading
from pathlib import Path
from typing import Any

import pytest

from lowprec.modes import MathMode
from lowprec.policy import entries, environment, fp32_guard, get_math_mode, math_mode, switches
from lowprec.policy.protocol import Tier
from support import interrupts, synthetic_library
from support.interrupts import Late
from support.programs import run_python
from support.synthetic_library import Library

#: The code of the libraries below counts as the policy's.
FILES = (__file__, synthetic_library.__file__)
TESTS = str(Path(__file__).parents[1])


@pytest.mark.filterwarnings("ignore::lowprec.errors.LowprecWarning")
@pytest.mark.parametrize("error", [KeyboardInterrupt, Late])
@pytest.mark.parametrize("fails", [False, True])
def test_the_exception_arrives_and_the_next_block_is_right(
    register: Any, error: type[BaseException], fails: bool
) -> None:
    libraries: list[Library] = [register("process"), register("thread", tier=Tier.THREAD)]
    failure = {"have set_mode": OSError("no driver")} if fails else {}
    environment.snapshot()

    def nested() -> None:
        libraries[0].fails.update(failure)
        with math_mode("tf32", frameworks=True), fp32_guard():
            pass

    def check() -> None:
        libraries[0].fails.clear()
        assert all(library.is_as_before for library in libraries)
        assert not entries.holds
        assert not any(
            stacks.get(x) for stacks in (switches._process_stacks, switches._thread.stacks) for x in libraries
        )
        with math_mode("tf32", frameworks=True):
            assert get_math_mode() is MathMode.TF32
            assert {v for library in libraries for v in library.values.values()} == {"tf32"}

    assert interrupts.count(nested, check, error, also=FILES) > 20


def test_an_interrupted_entry_is_undone(register: Any) -> None:
    library = register()
    for error in interrupts.interrupted(lambda: fp32_guard().__enter__(), Late, also=FILES):
        assert type(error) is Late
        assert not entries.holds
        assert library.is_as_before
    assert interrupts.leave() == 1  # of the call without an interrupt


def test_a_handler_that_multiplies_while_the_environment_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """It runs in the thread that reads; both get the same values."""
    environment.refresh()
    read, snapshots = environment._read, []

    def interrupted() -> environment.EnvironmentSnapshot:
        monkeypatch.setattr(environment, "_read", read)
        snapshots.append(environment.snapshot())
        return read()

    monkeypatch.setattr(environment, "_read", interrupted)
    thread = threading.Thread(target=lambda: snapshots.append(environment.snapshot()), daemon=True)
    thread.start()
    thread.join(10)
    assert len(snapshots) == 2
    assert snapshots[0] is snapshots[1] is environment.snapshot()


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
    """A timer interrupts blocks at random."""
    assert run_python(_SIGNALS, warn="error", timeout=300, PYTHONPATH=TESTS) == "0 0 True"
