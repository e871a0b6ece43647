"""Switches of other libraries for the rest of the process, which ``lowprec run`` sets when each library is imported.

Environment variables set lowprec's own mode or guard (``LOWPREC_MATH_MODE``, ``LOWPREC_FP32_GUARD``).
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from lowprec.modes import MathMode, parse_mode
from lowprec.policy.controllers import controllers
from lowprec.policy.entries import Entry
from lowprec.policy.environment import RUN_GUARD
from lowprec.policy.protocol import Controller, attempt
from lowprec.policy.scopes import is_guarded_library
from lowprec.policy.switches import FLOOR, acquire, changed_switches

#: The switches of each library as set by the guard.
_guarded: dict[Controller, Mapping[str, Any]] = {}


def set_library(name: str, order: str) -> str | None:
    """Set a loaded library's switches for all threads; ``order`` is a mode or "fp32_guard". Return why it failed."""
    (controller,) = [c for c in controllers() if c.name == name]
    is_floor = order == RUN_GUARD
    mode = MathMode.FP32 if is_floor else parse_mode(order)
    if not is_floor and is_guarded_library(name):
        return FLOOR
    if controller.tier == "process" or mode not in controller.modes:
        block = Entry()  # never released
        acquire(block, [controller], mode, is_floor)
        reason = block.failures.get(name)
    elif (set_default := getattr(controller, "set_default", None)) is None:
        reason = f"{name}'s switches belong to the thread"
    else:
        _, reason = attempt(controller, partial(set_default, mode))
    if is_floor and reason is None:
        _guarded[controller] = controller.describe()
    return reason


def changes() -> list[str]:
    """Return a sentence for each guarded library whose switches the program has changed."""
    sentences = []
    for controller, inside in _guarded.items():
        now, error = attempt(controller, controller.describe)
        if now is None:
            sentences.append(f"the switches of {controller.name} cannot be read: {error}")
            continue
        changed = {name: now.get(name) for name in inside if now.get(name) != inside[name]}
        if changed:
            sentences.append(changed_switches(controller.name, changed, "by the program"))
    return sentences
