"""What a controller is: the object that knows the switches of one library.

When it is asked, and in which order over threads and tasks, is the business of ``policy.switches``. A controller
imports nothing; it looks at what stands in ``sys.modules``, each time anew.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import unique
from typing import Any, Protocol, runtime_checkable

from lowprec.modes import MathMode
from lowprec.util.enums import StrEnum


@unique
class Tier(StrEnum):
    """How far a library's switches reach."""

    THREAD = "thread"
    PROCESS = "process"


class Controller(Protocol):
    """How the switches of one library are read, set and put back.

    :meth:`save`, :meth:`set_mode` and :meth:`restore` are called under one lock, so they must not wait for another
    thread, and must not enter a guard. Calls come in pairs, ``set_mode`` before ``restore``, and the pairs are nested;
    for ``Tier.THREAD`` both calls of a pair come in one thread.

    An exception that is raised in the controller's module, or in one whose name begins as :attr:`module`, does not
    reach the caller of the guard: the library is reported as not protected, with the text of the exception. Any other
    is a signal handler's, and is raised. After it ``restore`` may be called twice.
    """

    @property
    def name(self) -> str:
        """The library, as the user writes it in ``frameworks=[...]``."""

    @property
    def module(self) -> str:
        """The module that stands in ``sys.modules`` if the library is loaded."""

    @property
    def tier(self) -> Tier:
        """Whether the switches belong to the thread or to the process."""

    @property
    def switches(self) -> Mapping[str, str]:
        """The name of each switch, and what it acts on, in words; for the documentation."""

    @property
    def modes(self) -> tuple[MathMode, ...]:
        """The modes that the library has a switch for; ``fp32`` at least."""

    def save(self) -> Mapping[str, Any]:
        """Return the switches as they are, by name; the values are compared, and handed to :meth:`restore`."""

    def set_mode(self, mode: MathMode) -> Mapping[str, Any]:
        """Set every switch for this mode, one of :attr:`modes`, and return them as :meth:`save` does.

        After an exception comes :meth:`restore`.
        """

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Put back what :meth:`save` returned, values that the user set inside the block among them."""

    def describe(self) -> Mapping[str, Any]:
        """Return the switches as the library's user reads them, for ``info()``, without changing any."""


@runtime_checkable
class HasDefault(Protocol):
    """A controller whose switches belong to the thread, and have a default for all threads of the process."""

    def set_default(self, mode: MathMode) -> object:
        """Set the default for this mode."""


@runtime_checkable
class HasEffect(Protocol):
    """A controller that can tell whether its switches change anything on this device."""

    def without_effect(self, mode: MathMode) -> str | None:
        """Return what the switches, set for this mode, leave alone; "" for nothing, None if that cannot be told now."""
