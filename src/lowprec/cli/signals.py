"""Signals that end a process end a command as an exception does, so that it leaves nothing half-written."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType

#: Those that exist here; Windows has no SIGHUP.
_ENDING = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]


class Terminated(BaseException):
    """The signal of this number has told the process to end."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


@contextlib.contextmanager
def raised() -> Iterator[None]:
    """Raise :class:`Terminated` in the block at the first signal that would end the process; later ones are ignored.

    A signal that somebody has seen to (a caller's handler, nohup) is left to them.
    """
    taken: list[int] = []

    def stop(number: int, frame: FrameType | None) -> None:
        for each in taken:  # what tidies up must not be interrupted
            signal.signal(each, signal.SIG_IGN)
        raise Terminated(number)

    if threading.current_thread() is threading.main_thread():
        taken += [n for n in _ENDING if signal.getsignal(n) is signal.SIG_DFL]
    try:
        for number in taken:
            signal.signal(number, stop)
        yield
    finally:
        for number in taken:
            signal.signal(number, signal.SIG_DFL)


def end_by(number: int) -> int:
    """End this process by a signal, so that whoever started it sees why."""
    signal.signal(number, signal.SIG_DFL)
    signal.raise_signal(number)
    return 128 + number
