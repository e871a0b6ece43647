"""A mode, or the guard, for the rest of the process: what ``lowprec run`` asks for as each library is imported.

lowprec's own part is in the environment (``LOWPREC_MATH_MODE``, ``LOWPREC_FP32_GUARD``), from which every thread reads
it. This is about the other libraries' switches, which are set once and never put back.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from lowprec.errors import LowprecError, UnsupportedError
from lowprec.modes import MathMode, parse_mode
from lowprec.policy.controllers import controllers
from lowprec.policy.environment import RUN_GUARD
from lowprec.policy.protocol import Controller, HasDefault, Tier
from lowprec.policy.scopes import guarded_libraries
from lowprec.policy.switches import FLOOR, hold, in_words

__all__ = ["changes", "set_library"]

#: By library under the guard: the switches as it set them.
_guarded: dict[Controller, Mapping[str, Any]] = {}


def set_library(name: str, order: str) -> str | None:
    """Set one loaded library's switches for all threads of the process.

    Parameters
    ----------
    name : str
        The library, as its controller calls it.
    order : str
        A mode, or ``"fp32_guard"``.

    Returns
    -------
    str or None
        Why the library could not be set.
    """
    is_floor = order == RUN_GUARD
    controller = next(c for c in controllers() if c.name == name)
    try:
        inside = _set(controller, MathMode.FP32 if is_floor else parse_mode(order), is_floor)
    except LowprecError as error:
        return str(error)
    if is_floor:
        _guarded[controller] = inside
    return None


def _set(controller: Controller, mode: MathMode, is_floor: bool) -> Mapping[str, Any]:
    is_guarded = None if is_floor else guarded_libraries()
    if is_guarded is not None and is_guarded(controller.name):
        raise UnsupportedError(FLOOR)
    if controller.tier == Tier.THREAD:
        return _set_default(controller, mode)
    # It is never released: the block on which this layer of switches relies is the process.
    held = hold(frozenset({controller.name}), mode, is_floor)
    if held is None:
        raise UnsupportedError(f"{controller.module} has not been imported")
    if held.failures:
        raise UnsupportedError(held.failures[controller.name])
    return held.layers[0].inside


def _set_default(controller: Controller, mode: MathMode) -> Mapping[str, Any]:
    if mode not in controller.modes:
        raise UnsupportedError(f"{controller.name} has no switch for {mode}")
    if not isinstance(controller, HasDefault):
        raise UnsupportedError(f"{controller.name}'s switches belong to the thread")
    try:
        return controller.set_default(mode)
    except Exception as error:
        raise UnsupportedError(in_words(error)) from error


def changes() -> list[str]:
    """Return a sentence for each library under the guard whose switches the program has changed since."""
    said = []
    for controller, inside in _guarded.items():
        try:
            now = controller.save()
        except Exception as error:  # noqa: BLE001 - a report does not fail for what it reports on
            said.append(f"the switches of {controller.name} cannot be read: {in_words(error)}")
            continue
        values = [f"{name} = {now.get(name)!r}" for name in inside if now.get(name) != inside[name]]
        if values:
            verbs = ("was", "is") if len(values) == 1 else ("were", "are")
            said.append(
                f"{controller.name}: {', '.join(values)} {verbs[0]} set by the program, and {verbs[1]} kept"
            )
    return said
