"""Exceptions that a signal handler raises, at every step of entering and leaving a block."""

from __future__ import annotations

import gc
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from types import ModuleType

import pytest

from interrupting import POLICY, Late, at_every_step
from lowprec.errors import UnsupportedError
from lowprec.modes import MathMode
from lowprec.policy import controllers as registry
from lowprec.policy import (
    entries,
    environment,
    fp32_guard,
    get_math_mode,
    math_mode,
    process,
    switches,
)
from lowprec.policy.interrupts import attempt
from lowprec.policy.protocol import Tier

ERRORS = (KeyboardInterrupt, TimeoutError, Late)
#: The code of the libraries below counts as the policy's own.
FILES = (POLICY, __file__)


class Library:
    """A library with three switches, which are set one after the other, in code that can be interrupted."""

    def __init__(self, name: str, tier: Tier) -> None:
        self.name = self.module = f"made_up_{name}"
        self.tier = tier
        self.switches = {"products": "", "convolutions": "", "sums": ""}
        self.modes = (MathMode.FP32, MathMode.TF32)
        self.fails: Exception | None = None
        self.at_start = {"products": "low", "convolutions": "lower", "sums": "lowest"}
        self._process = dict(self.at_start)
        self._thread = threading.local()

    @property
    def values(self) -> dict[str, str]:
        if self.tier is Tier.PROCESS:
            return self._process
        found: dict[str, str] = self._thread.__dict__.setdefault("values", dict(self.at_start))
        return found

    @property
    def is_full(self) -> bool:
        return set(self.values.values()) == {"fp32"}

    def save(self) -> dict[str, str]:
        return dict(self.values)

    def set_mode(self, mode: MathMode) -> dict[str, str]:
        for name in self.values:
            self.values[name] = mode.value
            if self.fails is not None:
                raise type(self.fails)(*self.fails.args)
        return dict(self.values)

    def restore(self, saved: dict[str, str]) -> None:
        for name in self.values:
            self.values[name] = saved[name]

    describe = save


Libraries = tuple[Library, Library]


@pytest.fixture
def libraries(monkeypatch: pytest.MonkeyPatch) -> Iterator[Libraries]:
    """One whose switches belong to the process, and one whose switches belong to the thread."""
    monkeypatch.setattr(registry, "_by_name", {})
    monkeypatch.setattr(registry, "_current", ())
    made = Library("process", Tier.PROCESS), Library("thread", Tier.THREAD)
    for library in made:
        registry.register_controller(library)
        monkeypatch.setitem(sys.modules, library.module, ModuleType(library.module))
    environment.snapshot()
    yield made
    assert [library.values for library in made] == [library.at_start for library in made]


def check(libraries: Libraries) -> None:
    """Everything is as before, and can be set again."""
    assert [library.values for library in libraries] == [lib.at_start for lib in libraries]
    assert entries.innermost.get().outer is None
    assert not entries.held
    # Those of other tests' libraries may have been set for the rest of the process.
    stacks = (switches._process_stacks, switches._thread.stacks)
    assert not any(held.get(library) for held in stacks for library in libraries)
    assert not switches._changing.locked()
    assert not switches._lock._is_owned()  # type: ignore[attr-defined]
    with math_mode("tf32", frameworks=True):
        assert get_math_mode() is MathMode.TF32
        assert {v for library in libraries for v in library.values.values()} == {"tf32"}


# -- every step -----------------------------------------------------------------------------------


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


def out_of_order() -> None:
    with math_mode("tf32", frameworks=True), fp32_guard() as guard, math_mode("tf32"):
        guard.__exit__()
        guard.__enter__()


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
def test_everything_is_put_back_and_the_exception_arrives(
    libraries: Libraries, action: Callable[[], None], error: type[BaseException]
) -> None:
    assert at_every_step(action, lambda: check(libraries), error, files=FILES) > 20


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.sampled(3)
def test_an_exit_stack(libraries: Libraries, error: type[BaseException]) -> None:
    """It is Python code, and has what it calls and the exception in variables of one frame.

    So an interrupt before the first line of our code is dealt with when that frame is collected. (One before the first
    line of its own code finds nothing of ours on its way.)
    """

    def action() -> None:
        with ExitStack() as stack:
            stack.enter_context(math_mode("tf32", frameworks=True))
            stack.enter_context(fp32_guard())

    def collect_and_check() -> None:
        if entries.held:
            gc.collect()
        check(libraries)

    assert at_every_step(action, collect_and_check, error, files=FILES, keep=False) > 20


@pytest.mark.parametrize("error", ERRORS)
def test_a_guard_that_another_thread_has_open(
    libraries: Libraries, error: type[BaseException]
) -> None:
    guard, of_process = fp32_guard(), libraries[0]

    def enter() -> None:
        with guard:
            pass

    def is_full() -> None:
        assert of_process.is_full
        assert entries.innermost.get().outer is None
        assert len(entries.held) == 1
        assert libraries[1].values == libraries[1].at_start

    with ThreadPoolExecutor(1) as pool:
        pool.submit(guard.__enter__).result()
        assert at_every_step(enter, is_full, error, files=FILES) > 20
        pool.submit(guard.__exit__).result()
    check(libraries)


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("own", [OSError("no driver"), UnsupportedError("other switches")])
def test_a_library_that_fails_by_itself_does_not_take_the_interrupt(
    libraries: Libraries, error: type[BaseException], own: Exception
) -> None:
    libraries[0].fails = own

    def look() -> None:
        libraries[0].fails = None
        check(libraries)
        libraries[0].fails = own

    assert at_every_step(empty, look, error, files=FILES, warns=True) > 20


@pytest.mark.parametrize("error", ERRORS)
def test_a_library_for_the_rest_of_the_process(
    libraries: Libraries, error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "_guarded", {})
    monkeypatch.setattr(switches, "_process_stacks", {})
    name, values = libraries[0].name, dict(libraries[0].values)

    def look() -> None:
        assert process._guarded == {}
        check(libraries)

    assert at_every_step(lambda: process.set_library(name, "tf32"), look, error, files=FILES) > 20
    libraries[0].restore(values)


# -- whose exception it is ------------------------------------------------------------------------


def test_an_exception_that_comes_again_is_the_librarys() -> None:
    own, late, same_class = OSError("no driver"), Late("now"), OSError("now")
    new_words = [OSError(str(i)) for i in range(9)]

    def outcome(*steps: Exception | int) -> object:
        left = list(steps)

        def step() -> int:
            now = left.pop(0) if len(left) > 1 else left[0]
            if isinstance(now, Exception):
                raise now
            return now

        try:
            return attempt(step)
        except Exception as error:  # noqa: BLE001 - it is what is asked for
            return error

    assert outcome(1) == (1, None)
    assert outcome(own) == (None, own)
    assert outcome(late, 1) is late
    assert outcome(late, own) is late
    assert outcome(own, late, own) is late
    assert outcome(own, same_class, own) is same_class
    assert outcome(same_class, own) is same_class
    assert outcome(*new_words)[1] in new_words  # type: ignore[index]
    assert outcome(late, *new_words) is late


@pytest.mark.skipif(not hasattr(signal, "SIGUSR1"), reason="this system has no such signal")
@pytest.mark.parametrize("kind", ["function", "method", "object", "partial"])
def test_what_an_installed_handler_raises_is_an_interrupt_however_often(kind: str) -> None:
    class Handler:
        def __call__(self, *args: object) -> None:
            raise Late("now")

        method = __call__

    def function(*args: object) -> None:
        raise Late("now")

    handlers = {
        "function": function,
        "method": Handler().method,
        "object": Handler(),
        "partial": partial(function, 1),
    }
    before = signal.signal(signal.SIGUSR1, handlers[kind])
    try:
        with pytest.raises(Late, match="now"):
            attempt(lambda: signal.raise_signal(signal.SIGUSR1))
    finally:
        signal.signal(signal.SIGUSR1, before)


# -- locks ----------------------------------------------------------------------------------------


def test_a_handler_that_multiplies_while_the_environment_is_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
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
import random, signal, warnings
warnings.simplefilter("error")
from lowprec.policy import entries, fp32_guard, math_mode

class Late(Exception):
    pass

def late(*_):
    global fired
    fired = True
    raise Late

# A function, since Python 3.13 may leave the jump back of a loop out of the try statement around it.
def run(scope):
    while not fired:
        with scope:
            pass

signal.signal(signal.SIGALRM, late)
rng, scopes = random.Random(0), (fp32_guard(), math_mode("tf32", frameworks=True))
lost = wrong = 0
for turn in range(5000):
    fired, arrived = False, False
    try:
        signal.setitimer(signal.ITIMER_REAL, rng.uniform(1e-6, 2e-4))
        run(scopes[turn % 2])
    except Late:
        arrived = True
    lost += not arrived
    wrong += entries.innermost.get().outer is not None
print(lost, wrong)
"""


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="this system has no such timers")
def test_signals_arrive_and_leave_nothing_behind() -> None:
    """A timer interrupts blocks wherever it happens to go off."""
    done = subprocess.run(
        [sys.executable, "-c", _SIGNALS], capture_output=True, text=True, check=True, timeout=300
    )
    assert (done.stdout, done.stderr) == ("0 0\n", "")
