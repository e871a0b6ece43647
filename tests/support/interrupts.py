"""Simulated signal handlers: a function is called at a chosen place inside another call."""

import contextvars
import gc
import sys
import warnings
from functools import partial
from pathlib import Path

import lowprec
from lowprec.policy import entries

PACKAGE = str(Path(lowprec.__file__).parent)


class Interrupt(BaseException):
    """The exception of a handler."""


class Late(Exception):
    """The exception of a program's time limit."""


def fail(error):
    """Raise, as a handler."""
    raise error("of a handler")


def strike(call, at, action, *, also=()):
    """Call a function, and act at one of lowprec's checks for signals; return False if there are fewer.

    Python checks at the beginnings of its functions and the returns of C functions. The action runs in the thread of
    the call, and its exception is raised at that place. ``also`` names further files. The call has its own context.
    """
    passed = 0

    def look(frame, event, arg):
        nonlocal passed
        if event in ("call", "c_return") and frame.f_code.co_filename.startswith((PACKAGE, *also)):
            passed += 1
            if passed > at:
                sys.setprofile(None)
                action()

    before = sys.getprofile()
    gc.disable()  # a collection would finalize objects of earlier exceptions
    sys.setprofile(look)
    try:
        contextvars.copy_context().run(call)
    finally:
        sys.setprofile(before)
        gc.enable()
    return passed > at


def interrupted(call, error=Interrupt, *, step=1, **where):
    """Repeat a call, interrupted at the first place, the next, and so on; yield each exception, None if none arrived.

    The last call is not interrupted, and nothing is yielded for it.
    """
    at, struck = 0, True
    while struck:
        raised = None
        try:
            struck = strike(call, at, partial(fail, error), **where)
        except BaseException as caught:  # noqa: BLE001 - yielded
            raised = caught
        if struck:
            yield raised
        at += step


def count(call, check, error, **where):
    """Return at how many places a call was interrupted.

    The exception must arrive, and the check must hold once it is forgotten, with the scopes in its frames.
    """
    places = 0
    with warnings.catch_warnings():
        # not used, or not left
        warnings.filterwarnings("ignore", "the scope was ", lowprec.LowprecWarning)
        for raised in interrupted(call, error, **where):
            assert type(raised) is error
            raised.__traceback__ = raised.__context__ = None
            entries.notify()
            check()
            places += 1
    return places
