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

    ``inside`` has the switches as they were set for the mode. If they are not so any more, another thread has changed
    them, and nothing is learnt; None where they belong to this thread alone.

    Examples
    --------
    >>> from lowprec.policy.controllers import controllers
    >>> print(without_effect(controllers()[3], MathMode.TF32, None))  # CuPy is not asked
    None
    """
    if mode in (MathMode.FP32, MathMode.FP32_PEDANTIC) or not isinstance(controller, HasEffect):
        return None
    key = controller.name, mode
    if key not in _known:
        found, error = attempt(controller, partial(controller.without_effect, mode))
        # What cannot be asked now (PyTorch is tracing, say) may be another time.
        if (
            error is not None
            or found is None
            or (inside is not None and controller.save() != inside)
        ):
            return None
        _known[key] = found or None
    return _known[key]


def known(name: str, mode: MathMode) -> str | None:
    """Return what :func:`without_effect` has found, without asking."""
    return _known.get((name, mode))


def news(found: Iterable[tuple[Controller, Mapping[str, Any] | None]], mode: MathMode) -> list[str]:
    """Return a phrase for each library of which it was not said yet that its switches have no effect.

    ``found`` has controllers, and what was set of each, as :func:`without_effect` takes them.
    """
    said = []
    for controller, inside in found:
        left = without_effect(controller, mode, inside)
        key = controller.name, mode
        if left is not None and key not in _told:
            _told.add(key)
            said.append(f"{controller.name} ({left})")
    return said
