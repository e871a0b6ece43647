"""Signals that end a process end a command as an exception does, so that it leaves nothing half-written."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType


class Terminated(BaseException):
    """A signal, whose number is the argument, that ends the process."""


@contextlib.contextmanager
def raised() -> Iterator[None]:
    """Raise :class:`Terminated` in the block at the first signal that would end the process; later ones are ignored.

    A signal that already has a handler, or is ignored (nohup), is left alone.
    """
    taken: list[int] = []

    def stop(number: int, frame: FrameType | None) -> None:
        for each in taken:  # what tidies up must not be interrupted
            signal.signal(each, signal.SIG_IGN)
        raise Terminated(number)

    if threading.current_thread() is threading.main_thread():
        known = (getattr(signal, name, None) for name in ("SIGTERM", "SIGHUP"))  # not on Windows
        taken += [n for n in known if n and signal.getsignal(n) is signal.SIG_DFL]
    try:
        for number in taken:
            signal.signal(number, stop)
        yield
    finally:
        for number in taken:
            signal.signal(number, signal.SIG_DFL)
