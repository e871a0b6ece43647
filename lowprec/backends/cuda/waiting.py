"""A thread that lets go of operands once the work which reads them is done, without another call of lowprec.

An operand that is held too long costs its library: JAX computes on a copy where it would have reused a donated array.

``cudaLaunchHostFunc`` is not safe for it: its function would need the interpreter's lock, whose holder may be waiting
for the same stream, and may call no function of CUDA, as deleters of other libraries' arrays do. A thread of Python's
polls events instead; ``cudaEventSynchronize`` would cost a core, and keep the event from being reused meanwhile.
"""

from __future__ import annotations

import _thread
import os
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue

#: From the first look to the next, and the longest there is: each pause is twice that before.
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 50e-6, 5e-3


class Waiter:
    """Calls ``look`` on a thread of its own for as long as that returns that there is more to wait for.

    The thread starts with the first :meth:`wake`; the child of a fork starts its own. Between two calls it holds
    nothing, so the end of the interpreter may leave it behind.
    """

    def __init__(self, look: Callable[[], bool]) -> None:
        self._look = look
        self._is_stopped = False
        self._renew()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._renew)

    def _renew(self) -> None:
        # A signal handler may come in the midst of :meth:`wake` and call it, too; a SimpleQueue allows for that.
        self._wakes: SimpleQueue[None] = SimpleQueue()
        self._looking = threading.Lock()
        self._unstarted = [True]  # taken by whoever starts the thread

    def wake(self) -> None:
        """Tell that there is something to wait for."""
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
        except RuntimeError:  # there are too many threads, or the interpreter ends
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
            if self._is_stopped:
                return False
            try:
                return self._look()
            except Exception:  # noqa: BLE001 - nobody is here to be told; the next call meets the same error
                return False

    def stop(self) -> None:
        """Look no more; a look that has begun is waited for."""
        self._is_stopped = True
        with self._looking:
            pass
