"""A thread that releases operands once the work that reads them is done, without another call of lowprec.

A library pays for operands that are held too long: JAX copies where it would have reused a donated array.

The thread polls events. ``cudaLaunchHostFunc`` is unsafe: its function would need the interpreter's lock, whose holder
may be waiting for the same stream, and may call no function of CUDA, as deleters of other libraries' arrays do.
``cudaEventSynchronize`` would occupy a core, and keep the event from being reused meanwhile.
"""

from __future__ import annotations

import _thread
import os
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue

#: Between two calls; each pause is twice as long as the one before.
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 50e-6, 5e-3


class Waiter:
    """Calls ``look`` on its own thread for as long as that returns that more is pending.

    The thread starts with the first :meth:`wake`; the child of a fork starts its own. Between two calls it holds no
    lock, so that the interpreter can exit while it runs.
    """

    def __init__(self, look: Callable[[], bool]) -> None:
        self._look = look
        self._is_stopped = False
        self._renew()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._renew)

    def _renew(self) -> None:
        # A signal handler may interrupt :meth:`wake` and call it, too; a SimpleQueue allows that.
        self._wakes: SimpleQueue[None] = SimpleQueue()
        self._looking = threading.Lock()
        self._unstarted = [True]  # removed by the thread that starts the waiter

    def wake(self) -> None:
        """Start polling."""
        if self._is_stopped:
            return
        if self._wakes.empty():
            self._wakes.put(None)
        if self._unstarted:
            self._start()

    def _start(self) -> None:
        try:
            self._unstarted.pop()
            # Without the locks of the threading module, which a signal handler could find taken.
            _thread.start_new_thread(self._run, (self._wakes, self._looking))
        except IndexError:  # another thread was faster
            pass
        except RuntimeError:  # there are too many threads, or the interpreter is exiting
            self._unstarted.append(True)
        except BaseException:  # a second thread, if this one runs already, does no harm
            self._unstarted.append(True)
            raise

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
            except Exception:  # noqa: BLE001 - the next call of lowprec raises the same error
                return False

    def stop(self) -> None:
        """Stop polling, after the current call of ``look``."""
        self._is_stopped = True
        with self._looking:
            pass
