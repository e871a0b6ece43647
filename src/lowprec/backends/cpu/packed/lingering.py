"""Waiting a moment for the helpers of a product without going to sleep.

Threads that share a product end within microseconds of each other, but to be woken takes some fifty. So the caller
looks at the gate for a while, outside of the interpreter, whose lock the helpers need to leave.
"""

from __future__ import annotations

import ctypes
from functools import cache

from lowprec.backends.cpu import threads
from lowprec.backends.cpu.packed.native import call, callable_at, compile_kernel, pause

#: Looks at the gate: about a hundred microseconds.
_LOOKS = 4000


def _kernel() -> int:
    """Address of the function of a gate's address, and those of what closes and opens it at once.

    It returns when nobody is inside, or has been for too long. The functions are ``pthread_rwlock_trywrlock`` and
    ``pthread_rwlock_unlock``.
    """
    looks = _LOOKS

    def linger(gate, close, leave):
        for _ in range(looks):
            if call(close, (gate,)) & 0xFFFFFFFF == 0:
                call(leave, (gate,))
                break
            pause()
        return 0

    return compile_kernel(linger, 3)


@cache
def use() -> None:
    """Have the threads of this process linger from now on."""
    library = ctypes.CDLL(None)
    functions = [
        ctypes.cast(getattr(library, name), ctypes.c_void_p).value
        for name in ("pthread_rwlock_trywrlock", "pthread_rwlock_unlock")
    ]
    linger = callable_at(_kernel(), 3)
    threads.linger_by(lambda gate: linger(gate, *functions))
