"""Detection of switches without effect on this device, by one small product of the library.

PyTorch's "medium", for example, lowers the precision only on CPUs with tile units. Each library is probed once per
process and mode, after its switches are set, and never for the guard.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

from lowprec.modes import MathMode
from lowprec.policy import switches
from lowprec.policy.protocol import Controller, attempt

#: By library and mode, the results of :func:`without_effect`.
known: dict[tuple[str, MathMode], str | None] = {}
_reported: set[tuple[str, MathMode]] = set()

#: Rounds to 1 in TF32 and in bfloat16.
_ABOVE_ONE = 1 + 2.0**-12
#: Libraries multiply smaller matrices in full FP32 in every mode.
_SIZE = 128


def probe(full: Callable[[tuple[int, int], float], Any]) -> str:
    """Return the products that stay in full FP32, "" for none; ``full`` creates float32 arrays on the CPU."""
    x = full((_SIZE, _SIZE), _ABOVE_ONE)
    return "" if float((x @ x)[0, 0]) == _SIZE else "float32 products on this CPU stay in full FP32"


def without_effect(controller: Controller, mode: MathMode, inside: Mapping[str, Any] | None) -> str | None:
    """Return the products that a library leaves in full FP32; None if there are none or they are unknown.

    ``inside`` has the switches as set for the mode, and is None if they were not saved. The result is not cached if
    another thread has changed them since.
    """
    ask = getattr(controller, "without_effect", None)
    if mode in (MathMode.FP32, MathMode.FP32_PEDANTIC) or ask is None:
        return None
    key = controller.name, mode
    if key not in known:
        left, _ = attempt(controller, partial(ask, mode))
        # None: unknown at the moment, for example while PyTorch traces.
        if left is None or (inside is not None and switches.save(controller) != inside):
            return None
        known[key] = left or None
    return known[key]


def unreported(found: Iterable[tuple[Controller, Mapping[str, Any] | None]], mode: MathMode) -> list[str]:
    """Return a phrase for each library whose switches have no effect, once per library and mode."""
    phrases = []
    for controller, inside in found:
        left = without_effect(controller, mode, inside)
        key = controller.name, mode
        if left is not None and key not in _reported:
            _reported.add(key)
            phrases.append(f"{controller.name} ({left})")
    return phrases
