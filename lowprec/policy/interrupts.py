"""Distinction between exceptions of a library and those of a signal handler, which may raise at any call."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from lowprec.errors import UnsupportedError

if TYPE_CHECKING:
    from lowprec.policy.protocol import Controller

T = TypeVar("T")


def raised_in(error: BaseException, *modules: str) -> bool:
    """Whether an exception was raised in a module whose name begins so; a C function counts as part of its caller."""
    traceback = error.__traceback__
    while traceback is not None and traceback.tb_next is not None:
        traceback = traceback.tb_next
    name = "" if traceback is None else traceback.tb_frame.f_globals.get("__name__", "")
    return bool(name.startswith(modules))


def attempt(controller: Controller, step: Callable[[], T]) -> tuple[T | None, str | None]:
    """Call a controller's method; return its result, and the text of an exception from it or its library.

    An exception from any other module is raised, because it comes from a signal handler.
    """
    try:
        return step(), None
    except Exception as error:
        if not raised_in(error, "lowprec", controller.module, type(controller).__module__):
            raise
        if isinstance(error, UnsupportedError):
            return None, str(error)
        return None, f"{type(error).__name__}: {error}"
