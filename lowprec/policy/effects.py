"""Whether a library's switch changes anything on this device: asked of the library itself, by one small product.

A switch may be set and do nothing: PyTorch's "medium" lowers products on CPUs with tile units, and on no others. Each
library is asked once a process for each mode, where it has been set for that mode, and never for the guard.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

from lowprec.modes import MathMode
from lowprec.policy.interrupts import attempt
from lowprec.policy.protocol import Controller, HasEffect

#: By library and mode: what the switch leaves alone; None where it has an effect.
_known: dict[tuple[str, MathMode], str | None] = {}
_told: set[tuple[str, MathMode]] = set()


def without_effect(
    controller: Controller, mode: MathMode, inside: Mapping[str, Any] | None
) -> str | None:
    """Return what a library's switches leave in full FP32; None if nothing is known of that.

    ``inside`` has the switches as they were set for the mode, None where they belong to this thread alone. If another
    thread has changed them meanwhile, the answer is not kept.
    """
    if mode in (MathMode.FP32, MathMode.FP32_PEDANTIC) or not isinstance(controller, HasEffect):
        return None
    key = controller.name, mode
    if key not in _known:
        left, _ = attempt(controller, partial(controller.without_effect, mode))
        # None: it cannot be asked now (PyTorch is tracing, say).
        if left is None or (inside is not None and controller.save() != inside):
            return None
        _known[key] = left or None
    return _known[key]


def known(name: str, mode: MathMode) -> str | None:
    """Return what :func:`without_effect` has found, without asking."""
    return _known.get((name, mode))


def news(found: Iterable[tuple[Controller, Mapping[str, Any] | None]], mode: MathMode) -> list[str]:
    """Return a phrase for each library, with its switches as set, that has no effect and was not reported yet."""
    said = []
    for controller, inside in found:
        left = without_effect(controller, mode, inside)
        key = controller.name, mode
        if left is not None and key not in _told:
            _told.add(key)
            said.append(f"{controller.name} ({left})")
    return said
