"""A thread that releases operands soon after the work that reads them is done.

Otherwise they would be kept until the next call of lowprec, and JAX would copy donated arrays instead of reusing them.

The thread polls events. ``cudaLaunchHostFunc`` is unsafe: its function needs the GIL, whose holder may be waiting for
the same stream, and must not call CUDA, as deleters of other libraries' arrays do. ``cudaEventSynchronize`` occupies a
core, and prevents reuse of the event meanwhile.
"""

from __future__ import annotations

import _thread
import contextlib
import os
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue

#: Pauses between two calls: each is twice as long as the previous one.
_FIRST_PAUSE_S = 50e-6
_LONGEST_PAUSE_S = 5e-3


class Waiter:
    """Calls ``look`` in a thread, started by the first :meth:`wake`, until it returns False; holds no lock between."""

    def __init__(self, look: Callable[[], bool]) -> None:
        self._look = look
        self._is_stopped = False
        self._renew()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._renew)

    def _renew(self) -> None:
        # A SimpleQueue is re-entrant: a signal handler may interrupt :meth:`wake` and call it.
        self._wakes: SimpleQueue[None] = SimpleQueue()
        self._looking = threading.Lock()
        self._is_started = False

    def wake(self) -> None:
        if self._is_stopped:
            return
        if self._wakes.empty():
            self._wakes.put(None)
        if not self._is_started:
            # too many threads, or the interpreter is exiting
            with contextlib.suppress(RuntimeError):
                # Without the locks of the threading module, which a signal handler could find held.
                _thread.start_new_thread(self._run, (self._wakes, self._looking))
                self._is_started = True  # a second thread is harmless

    def _run(self, wakes: SimpleQueue[None], looking: threading.Lock) -> None:
        while True:
            wakes.get()
            pause = _FIRST_PAUSE_S
            while self._has_more(looking):
                time.sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE_S)

    def _has_more(self, looking: threading.Lock) -> bool:
        with looking:
            try:
                return not self._is_stopped and self._look()
            except Exception:  # noqa: BLE001 - raised again by the next call of lowprec
                return False

    def stop(self) -> None:
        """Stop polling, after the current call of ``look``."""
        self._is_stopped = True
        with self._looking:
            pass
