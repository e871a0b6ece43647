"""Switches of other libraries for the rest of the process, set by ``lowprec run`` when each library is imported.

They are set once and never restored. lowprec's own mode or guard is set by environment variables
(``LOWPREC_MATH_MODE``, ``LOWPREC_FP32_GUARD``).
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from lowprec.errors import LowprecError
from lowprec.modes import MathMode, parse_mode
from lowprec.policy import effects
from lowprec.policy.controllers import controllers
from lowprec.policy.environment import RUN_GUARD
from lowprec.policy.protocol import Controller, Tier, attempt
from lowprec.policy.scopes import guarded_libraries
from lowprec.policy.switches import FLOOR, Block, hold, kept, release

#: The switches of each library as set by the guard.
_guarded: dict[Controller, Mapping[str, Any]] = {}


def _controller_of(name: str) -> Controller:
    (controller,) = [c for c in controllers() if c.name == name]
    return controller


def set_library(name: str, order: str) -> str | None:
    """Set a loaded library's switches for all threads; ``order`` is a mode or "fp32_guard". Return why it failed."""
    block = Block()
    try:
        return _set(block, _controller_of(name), order)
    except BaseException as error:
        release(block)
        if isinstance(error, LowprecError):
            return str(error)
        raise


def without_effect(name: str, order: str) -> str | None:
    """Return the products that stay in full FP32 after :func:`set_library`; None for none."""
    if order == RUN_GUARD:
        return None
    return effects.without_effect(_controller_of(name), parse_mode(order), None)


def _set(block: Block, controller: Controller, order: str) -> str | None:
    is_floor = order == RUN_GUARD
    mode = MathMode.FP32 if is_floor else parse_mode(order)
    is_guarded = None if is_floor else guarded_libraries()
    if is_guarded is not None and is_guarded(controller.name):
        return FLOOR
    why_not: str | None
    if mode not in controller.modes:
        why_not = f"{controller.name} has no switch for {mode}"
    elif controller.tier == Tier.THREAD:
        set_default = getattr(controller, "set_default", None)
        if set_default is None:
            return f"{controller.name}'s switches belong to the thread"
        _, why_not = attempt(controller, partial(set_default, mode))
    else:
        hold(block, [controller], mode, is_floor)
        why_not = block.failures.get(controller.name)
    if is_floor and why_not is None:
        _guarded[controller] = controller.describe()
    return why_not


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
            sentences.append(kept(controller.name, changed, "by the program"))
    return sentences
