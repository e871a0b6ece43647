"""Something that strikes in the middle of a call, as a signal handler may, but at a chosen point."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import lowprec

PACKAGE = str(Path(lowprec.__file__).parent)


class Interrupt(BaseException):
    """What a handler raises."""


def strike(
    call: Callable[[], Any],
    at: int,
    action: Callable[[], Any],
    *,
    opcodes: bool = False,
    also: tuple[str, ...] = (),
) -> bool:
    """Call something, and act at one of its lines (or instructions) in lowprec; False if there are not so many.

    The action runs in the thread of the call, and what it raises comes out of that line. ``also`` names further files.
    """
    passed = 0

    def trace(frame: FrameType, event: str, arg: Any) -> Any:
        nonlocal passed
        if not frame.f_code.co_filename.startswith((PACKAGE, *also)):
            return None
        frame.f_trace_opcodes = opcodes
        passed += 1
        if passed > at:
            sys.settrace(None)
            action()
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return passed > at


def interrupted(
    call: Callable[[], Any],
    error: type[BaseException] = Interrupt,
    *,
    step: int = 1,
    **where: Any,
) -> Iterator[BaseException | None]:
    """Make a call again and again, interrupted at its first line, the next, and so on; yield what came out each time.

    The last of them has no interrupt, and nothing is yielded for it.
    """

    def act() -> None:
        raise error

    at, struck = 0, True
    while struck:
        came = None
        try:
            struck = strike(call, at, act, **where)
        except BaseException as caught:  # noqa: BLE001 - handed on
            came = caught
        if struck:
            yield came
        at += step
