"""Full FP32 inside a block, whatever was set outside it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from lowprec.policy.state import PolicyScope

__all__ = ["fp32_guard"]

F = TypeVar("F", bound=Callable[..., Any])


class fp32_guard(PolicyScope):
    """Keep the products of lowprec at full FP32 or above, inside a ``with`` block or a decorated function.

    The guard is a floor. Nothing below it lowers the precision: no ``math_mode=`` or ``rtol=`` argument, no scope
    inside or outside, no process default, no environment variable. What is more precise stays (``fp32_pedantic``,
    and storage such as float64, on which a mode has no effect).

    It holds in this thread and task, and in tasks that are started inside; other threads are not affected, and
    :meth:`wrap` carries it into them. A guard may be entered again, nested, and shared by threads and tasks. It ends
    with its block: work that is only put off inside it (a callback, a backward pass) runs without it.

    It acts on lowprec alone. The float32 products of other libraries follow their own switches.

    Examples
    --------
    >>> from lowprec.policy import get_math_mode, math_mode
    >>> with math_mode("bf16"), fp32_guard():
    ...     get_math_mode()
    <MathMode.FP32: 'fp32'>

    As a decorator it serves functions, coroutine functions and both kinds of generator:

    >>> @fp32_guard()
    ... def solve():
    ...     return get_math_mode()
    >>> with math_mode("bf16"):
    ...     solve()
    <MathMode.FP32: 'fp32'>
    """

    __slots__ = ()

    def __init__(self) -> None:
        self._mode = None

    def wrap(self, function: F) -> F:
        """Return the function with the guard around each of its calls, in whichever thread these happen.

        A thread starts without the scopes of the thread that started it, so a guard around ``pool.map`` would not
        reach the workers.

        Parameters
        ----------
        function : callable
            What the workers call.

        Returns
        -------
        callable
            With the same signature.

        Examples
        --------
        >>> from concurrent.futures import ThreadPoolExecutor
        >>> from lowprec.policy import resolve
        >>> with ThreadPoolExecutor() as pool, fp32_guard() as guard:
        ...     pool.submit(guard.wrap(resolve), "bf16").result().mode
        <MathMode.FP32: 'fp32'>
        """
        return self(function)

    def __repr__(self) -> str:
        return "fp32_guard()"
