"""The interface of a controller, which reads and sets the switches of one library.

``policy.switches`` decides when it is called, over threads and tasks. A controller imports nothing; it looks its
library up in ``sys.modules`` at each call.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import unique
from typing import Any, Protocol

from lowprec.modes import MathMode
from lowprec.util.plain import StrEnum


@unique
class Tier(StrEnum):
    """How far a library's switches reach."""

    THREAD = "thread"
    PROCESS = "process"


class Controller(Protocol):
    """How the switches of one library are read, set and restored.

    :meth:`save`, :meth:`set_mode` and :meth:`restore` are called under one lock, so they must not wait for another
    thread, and must not enter a guard. Calls come in pairs, ``set_mode`` before ``restore``, and the pairs are nested;
    for ``Tier.THREAD`` both calls of a pair come in one thread.

    An exception that is raised in the controller's module, or in one whose name begins as :attr:`module`, does not
    reach the caller of the guard: the library is reported as not protected, with the text of the exception. Any other
    is a signal handler's, and is raised. After it ``restore`` may be called twice.

    Two methods are optional. ``without_effect(mode)`` returns the products that stay in full FP32 on this device when
    the switches are set for the mode: "" for none, None if that is unknown now. ``set_default(mode)``, for
    ``Tier.THREAD``, sets the default of all threads of the process.
    """

    @property
    def name(self) -> str:
        """The library, as the user writes it in ``frameworks=[...]``."""

    @property
    def module(self) -> str:
        """The module that is in ``sys.modules`` if the library is loaded."""

    @property
    def tier(self) -> Tier:
        """Whether the switches belong to the thread or to the process."""

    @property
    def switches(self) -> Mapping[str, str]:
        """A description of each switch, by its name, for the documentation."""

    @property
    def modes(self) -> tuple[MathMode, ...]:
        """The modes that the library has a switch for; ``fp32`` at least."""

    def save(self) -> Mapping[str, Any]:
        """Return the value of each switch; values are compared, and passed to :meth:`restore`."""

    def set_mode(self, mode: MathMode) -> Mapping[str, Any]:
        """Set every switch for one of :attr:`modes`, and return them as :meth:`save` does.

        After an exception :meth:`restore` is called.
        """

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Write values of :meth:`save`, with those that the user set inside the block."""

    def describe(self) -> Mapping[str, Any]:
        """Return the switches as the library's user reads them, for ``info()``, without changing any."""
