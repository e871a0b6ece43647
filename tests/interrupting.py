"""An exception at every step of an action in turn, as a signal handler may raise it."""

from __future__ import annotations

import gc
import linecache
import os
import sys
import warnings
from collections.abc import Callable
from types import FrameType
from typing import Any

from lowprec.policy import entries

#: The folder of the code that is interrupted.
POLICY = os.path.dirname(entries.__file__) + os.sep


class Late(Exception):
    """What a program might raise for a time limit of its own."""


class Interrupt:
    """Raises at one line or call of some files' code, and tells where that was.

    It is harsher than a signal: Python looks for signals at calls and at turns of loops, not at every line. So one line
    is left out, that of a ``with`` statement which is about to call a lock's ``__exit__``. Between the last call inside
    the block and that of ``__exit__``, which is C code, there is no look for signals; and no Python code could survive
    an exception there, since it would have to give the lock back on just such a line.
    """

    def __init__(self, at: int, error: BaseException | None, files: tuple[str, ...]) -> None:
        self._left = at
        self._error = error
        self._files = files
        self.where = ""

    def __enter__(self) -> Interrupt:
        self._before = sys.gettrace()
        gc.disable()  # it would run what other exceptions have left behind
        sys.settrace(self._call)
        return self

    def __exit__(self, *exc_info: object) -> None:
        sys.settrace(self._before)
        gc.enable()
        self._error = None

    def _call(self, frame: FrameType, event: str, _: object) -> Any:
        if not frame.f_code.co_filename.startswith(self._files):
            return None
        self._count(frame, "call of")
        locked: set[int] = set()

        def step(frame: FrameType, event: str, _: object) -> Any:
            if event == "line" and frame.f_lineno not in locked:
                source = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
                if source.lstrip().startswith(("with _lock", "with _changing")):
                    locked.add(frame.f_lineno)
                self._count(frame, "line in")
            return step

        return step

    def _count(self, frame: FrameType, what: str) -> None:
        self._left -= 1
        if self._left == 0:
            name = os.path.basename(frame.f_code.co_filename)
            self.where = f"{name}:{frame.f_lineno}, {what} {frame.f_code.co_name}"
            assert self._error is not None
            raise self._error


def at_every_step(
    action: Callable[[], object],
    check: Callable[[], object],
    error: type[BaseException],
    *,
    files: tuple[str, ...] = (POLICY,),
    keep: bool = True,
    warns: bool = False,
) -> int:
    """Interrupt the action at each of its steps in turn.

    Parameters
    ----------
    action, check : callable
        The check runs after each interrupt.
    error : exception class
    files : tuple of str
        How the names of the files begin whose steps are meant.
    keep : bool
        Whether the exception is still there, with its traceback, while the check runs.
    warns : bool
        Whether the action may warn. An interrupt never does.

    Returns
    -------
    int
        How many steps there were.
    """
    at = 0
    while True:
        at += 1
        raised: BaseException | None = error("interrupted")
        arrived: BaseException | None = None
        interrupt = Interrupt(at, raised, files)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore" if warns else "error")
            try:
                with interrupt:
                    action()
            except BaseException as caught:  # noqa: BLE001 - it is what is asked for
                arrived = caught
        if not interrupt.where:
            assert arrived is None
            return at - 1
        try:
            assert arrived is raised, f"what arrived is {arrived!r}"
            if not keep:
                arrived = raised = None
            check()
        except BaseException as wrong:
            raise AssertionError(f"after an interrupt at {interrupt.where}") from wrong
