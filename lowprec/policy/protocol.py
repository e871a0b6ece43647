"""``Controller``: the interface that reads and sets the switches of one library; and calls of it.

``policy.switches`` calls it. A controller does not import its library, but looks it up in ``sys.modules``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeVar

from lowprec.errors import UnsupportedError
from lowprec.modes import MathMode

T = TypeVar("T")


class Controller(Protocol):
    """Reads, sets and restores the switches of one library.

    :meth:`save`, :meth:`set_mode` and :meth:`restore` are called under one lock, so they must not wait for another
    thread or enter a guard. Calls are nested pairs of ``set_mode`` and ``restore``; for switches of a thread both are
    called in the same thread.

    An exception from the controller's module, or from a module whose name begins with :attr:`module`, is not raised:
    the library is reported as not protected, with the text of the exception. Any other exception comes from a signal
    handler and is raised; ``restore`` may then be called twice.

    An optional method ``set_default(mode)``, for switches of a thread, sets the default of all threads.
    """

    @property
    def name(self) -> str:
        """Name of the library, as in ``frameworks=[...]``."""

    @property
    def module(self) -> str:
        """Module that is in ``sys.modules`` if the library is loaded."""

    @property
    def tier(self) -> str:
        """``"thread"`` or ``"process"``, to which the switches belong."""

    @property
    def switches(self) -> Mapping[str, str]:
        """Description of each switch by name, for the documentation."""

    @property
    def modes(self) -> tuple[MathMode, ...]:
        """Modes that the switches support, ``fp32`` included."""

    def save(self) -> Mapping[str, Any]:
        """Return the value of each switch, for comparison with ``==`` and for :meth:`restore`."""

    def set_mode(self, mode: MathMode) -> Mapping[str, Any]:
        """Set every switch for one of :attr:`modes`, and return the values as :meth:`save` does.

        After an exception :meth:`restore` is called.
        """

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Set the switches to values of :meth:`save`, or to those that the user set inside the block."""

    def describe(self) -> Mapping[str, Any]:
        """Return the switches as the library reports them, for ``info()``, without changing any."""


def raised_in(error: BaseException, *modules: str) -> bool:
    """Whether an exception was raised in a module whose name begins with one of these, or in C code called there."""
    traceback = error.__traceback__
    while traceback is not None and traceback.tb_next is not None:
        traceback = traceback.tb_next
    name = "" if traceback is None else traceback.tb_frame.f_globals.get("__name__", "")
    return bool(name.startswith(modules))


def attempt(controller: Controller, step: Callable[[], T]) -> tuple[T | None, str | None]:
    """Call a controller's method; return its result, and the text of an exception from it or its library."""
    try:
        return step(), None
    except Exception as error:
        if not raised_in(error, "lowprec", controller.module, type(controller).__module__):
            raise
        if isinstance(error, UnsupportedError):
            return None, str(error)
        return None, f"{type(error).__name__}: {error}"
