"""Full FP32 inside a block, whatever was set outside it, in lowprec and in every loaded library."""

from __future__ import annotations

from lowprec.policy.scopes import Frameworks, PolicyScope, selection


class fp32_guard(PolicyScope):
    """Keep float32 products at full FP32 or above, inside a ``with`` block or a decorated function.

    For lowprec the guard is a floor. Nothing below it lowers the precision: no ``math_mode=`` or ``rtol=`` argument,
    no scope inside or outside, no process default, no environment variable. What is more precise stays
    (``fp32_pedantic``, and storage such as float64, on which a mode has no effect).

    Of the other libraries, those in ``sys.modules`` at the entry are set to full FP32 by their own switches, and
    what was set before comes back at the exit. PyTorch, JAX, TensorFlow, CuPy and Paddle are known;
    ``register_controller`` adds others. None is imported for it. A library whose switches cannot be set is reported
    with a :class:`LowprecWarning`, and the others are set nevertheless. A switch that is changed inside keeps the new
    value, with a warning.

    lowprec's part holds in this thread and task, and in tasks that are started inside; :meth:`wrap` carries it into
    other threads. JAX's switch belongs to the thread, those of the other libraries to the process: while any guard is
    open, every thread computes in full FP32 with them. A guard may be entered again, nested, and shared by threads
    and tasks. It ends with its block: work that is only put off inside it (a callback, a backward pass) runs without
    it.

    Parameters
    ----------
    frameworks : bool or list of str, optional
        Which other libraries to set, such as ``["torch", "jax"]``: all that are loaded if not given or True, none if
        False.

    Raises
    ------
    TypeError
        If ``frameworks`` is something else.
    UnsupportedError
        If ``frameworks`` names a library of which nothing is known.

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
    _guards = True

    def __init__(self, *, frameworks: Frameworks | None = None) -> None:
        self._mode = None
        self._libraries = selection(True if frameworks is None else frameworks)

    def __repr__(self) -> str:
        chosen = self._frameworks
        return "fp32_guard()" if chosen is True else f"fp32_guard(frameworks={chosen})"
