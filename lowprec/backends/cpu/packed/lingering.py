"""Waiting a moment for the helpers of a product without going to sleep.

Threads that share a product end within microseconds of each other, but to be woken takes some fifty. So the caller
looks at the gate for a while, outside of the interpreter, whose lock the helpers need to leave.
"""

from __future__ import annotations

import ctypes
from functools import cache, partial

from lowprec.backends.cpu import threads
from lowprec.backends.cpu.packed.compilation import compile_kernel
from lowprec.backends.cpu.packed.native import call, callable_at, pause

#: Looks at the gate: about a hundred microseconds.
_LOOKS = 4000


def _kernel() -> int:
    """Address of the function that returns when a gate is empty, or has not been for too long.

    Its arguments: the addresses of ``pthread_rwlock_trywrlock``, of ``pthread_rwlock_unlock`` and of the gate.
    """
    looks = _LOOKS

    def linger(close, leave, gate):
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
    threads.linger_by(partial(callable_at(_kernel(), 3), *functions))
