"""Something that strikes in the middle of a call, as a signal handler may, but at a chosen point."""

from __future__ import annotations

import contextvars
import gc
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import lowprec
from lowprec.policy import entries

PACKAGE = str(Path(lowprec.__file__).parent)


class Interrupt(BaseException):
    """What a handler raises."""


class Late(Exception):
    """What a program might raise for a time limit of its own."""


def fail(error: type[BaseException]) -> None:
    """Raise, as a handler."""
    raise error("of a handler")


def strike(call: Callable[[], Any], at: int, action: Callable[[], Any], *, also: tuple[str, ...] = ()) -> bool:
    """Call something, and act at one of the places in lowprec where Python looks for signals; False if there are fewer.

    These are the beginnings of functions, and the returns of functions of C. The action runs in the thread of the call,
    and its exception comes out of that place. ``also`` names further files. The call has a context of its own.
    """
    passed = 0

    def look(frame: FrameType, event: str, arg: Any) -> None:
        nonlocal passed
        if event in ("call", "c_return") and frame.f_code.co_filename.startswith((PACKAGE, *also)):
            passed += 1
            if passed > at:
                sys.setprofile(None)
                action()

    before = sys.getprofile()
    gc.disable()  # a collection would run what other exceptions have left behind
    sys.setprofile(look)
    try:
        contextvars.copy_context().run(call)
    finally:
        sys.setprofile(before)
        gc.enable()
    return passed > at


def interrupted(
    call: Callable[[], Any], error: type[BaseException] = Interrupt, *, step: int = 1, **where: Any
) -> Iterator[BaseException | None]:
    """Make a call again and again, interrupted at the first place, the next, and so on; yield what came out each time.

    The last of them has no interrupt, and nothing is yielded for it.
    """
    at, struck = 0, True
    while struck:
        came = None
        try:
            struck = strike(call, at, partial(fail, error), **where)
        except BaseException as caught:  # noqa: BLE001 - handed on
            came = caught
        if struck:
            yield came
        at += step


def leave() -> int:
    """Leave the blocks of this thread that an interrupt has left open; return how many have set switches."""
    left = [entry for entry in list(entries.held) if entry.thread == threading.get_ident()]
    for entry in left:
        entry.close()
    entries.notify()
    return len(left)


def count(call: Callable[[], Any], check: Callable[[], Any], error: type[BaseException], **where: Any) -> int:
    """Return at how many places a call was interrupted.

    The exception must arrive, few blocks may stay open, and the check must hold once these are left.
    """
    places = left = 0
    for came in interrupted(call, error, **where):
        assert type(came) is error
        left += leave()
        check()
        places += 1
    assert left <= places // 4
    return places
