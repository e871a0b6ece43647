"""Something that strikes in the middle of a call, as a signal handler may, but at a chosen point."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import lowprec

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
    and its exception comes out of that place. ``also`` names further files.
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
        call()
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


def count(call: Callable[[], Any], check: Callable[[], Any], error: type[BaseException], **where: Any) -> int:
    """Return at how many places a call was interrupted; the exception must arrive, and the check hold after each."""
    places = 0
    for came in interrupted(call, error, **where):
        assert type(came) is error
        check()
        places += 1
    return places
