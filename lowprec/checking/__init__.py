"""``check``: compare the math modes on given operands: time, error, guaranteed bound."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from numbers import Integral, Real
from typing import Any

from lowprec.arrays import library_of
from lowprec.checking.accuracy import Array, Errors, Verdict
from lowprec.checking.comparison import Case, Comparison, Row, compare, variants_of
from lowprec.checking.measure import Load, Timing, load
from lowprec.errors import ModeError, SettingError, UnsupportedError, quoted
from lowprec.modes import ModeLike, parse_mode
from lowprec.util.tracing import uncompiled

__all__ = ["Comparison", "Errors", "Load", "Row", "Timing", "Verdict", "check"]


@uncompiled
def check(
    a: Any,
    b: Any,
    /,
    *,
    modes: Sequence[ModeLike] | None = None,
    rounds: int | None = None,
    budget: float = 2.0,
) -> Comparison:
    """Multiply two arrays in each math mode; compare times, errors and bounds.

    Errors are measured against a float64 product of the operands as stored. The modes take turns, with an untimed call
    before each timed one; each time is the median of its samples. ``lowprec check`` does the same on the command line.

    Parameters
    ----------
    a : array, shape (..., m, k) or (k,)
        Of any library, in host memory: float32, complex64, float16, bfloat16 or int8. Elements on which no mode acts
        (the last three) are compared with copies in float32.
    b : array, shape (..., k, n) or (k,)
    modes : sequence of str, MathMode or Recipe, optional
        Modes to compare with ``fp32``; by default all.
    rounds : int, optional
        Timed calls of each mode; by default 7, and more while the times of a mode spread by more than 10%.
    budget : float
        Seconds after which no new round begins, once three are done.

    Returns
    -------
    Comparison
        ``print`` and notebooks show a table of at most 12 rows and ``summary``, a sentence; ``to_dict()`` returns plain
        values. ``rows`` has one row per mode, with ``plan``, ``timing``, ``speedup`` and ``errors``.

    Raises
    ------
    LowprecError
        As for ``matmul``.
    DTypeError
        An operand is float64 or complex128, for which there is no wider reference.
    UnsupportedError
        An operand is not in host memory.
    SettingError
        ``rounds`` or ``budget`` is out of range.

    Examples
    --------
    >>> import numpy as np
    >>> import lowprec
    >>> a = np.random.default_rng(0).standard_normal((64, 64), dtype=np.float32)
    >>> comparison = lowprec.check(a, a, modes=["bf16"], rounds=3)
    >>> [row.name for row in comparison.rows], comparison.within
    (['fp32', 'bf16'], True)
    """
    before = load()
    is_count = isinstance(rounds, Integral) and not isinstance(rounds, bool) and rounds > 0
    if rounds is not None and not is_count:
        raise SettingError(f"rounds must be an integer of at least 1, got {rounds!r}")
    if not isinstance(budget, Real) or not 0 <= budget < math.inf:
        raise SettingError(f"budget must be a number of seconds, got {budget!r}")
    named = [modes] if isinstance(modes, str) else modes
    if not isinstance(named, Iterable | None):
        raise ModeError(f"modes must be a sequence of math modes, got {quoted(modes)}")
    chosen = None if named is None else [parse_mode(mode) for mode in named]
    case = Case.of("check", "", _host(a), _host(b))
    variants = variants_of(case, chosen)
    return compare(case, variants, rounds=rounds and int(rounds), budget=budget, load=before)


def _host(x: Any) -> Array:
    view = library_of(x).view(x)
    if not view.device.is_host:
        raise UnsupportedError(
            f"check compares on the host, and this array is on {view.device}; copy it to the host, "
            "and use lowprec.profile to time products on a GPU"
        )
    return view.ndarray()
