"""A mode, or the guard, for the rest of the process: what ``lowprec run`` asks for as each library is imported.

lowprec's own part is in the environment (``LOWPREC_MATH_MODE``, ``LOWPREC_FP32_GUARD``), from which every thread reads
it. This is about the other libraries' switches, which are set once and never put back.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from lowprec.errors import LowprecError
from lowprec.modes import MathMode, parse_mode
from lowprec.policy.controllers import controllers, loaded_controllers
from lowprec.policy.environment import RUN_GUARD
from lowprec.policy.interrupts import attempt, in_words
from lowprec.policy.protocol import Controller, HasDefault, Tier
from lowprec.policy.scopes import guarded_libraries
from lowprec.policy.switches import FLOOR, Block, hold, release

#: By library under the guard: the switches as it set them.
_guarded: dict[Controller, Mapping[str, Any]] = {}


def set_library(name: str, order: str) -> str | None:
    """Set a loaded library's switches for all threads of the process; return why it could not be set, or None.

    ``name`` is that of its controller, ``order`` a mode or ``"fp32_guard"``.
    """
    is_floor = order == RUN_GUARD
    (controller,) = [c for c in controllers() if c.name == name]
    block = Block()  # that of the process: released by an exception only
    try:
        return _set(block, controller, MathMode.FP32 if is_floor else parse_mode(order), is_floor)
    except BaseException as error:
        release(block)
        _guarded.pop(controller, None)
        if isinstance(error, LowprecError):
            return str(error)
        raise


def without_effect(name: str, order: str) -> str | None:
    """Return what the switches that :func:`set_library` has set leave in full FP32; None for nothing."""
    if order == RUN_GUARD:
        return None
    from lowprec.policy import effects

    (controller,) = [c for c in controllers() if c.name == name]
    return effects.without_effect(controller, parse_mode(order), None)


def _set(block: Block, controller: Controller, mode: MathMode, is_floor: bool) -> str | None:
    is_guarded = None if is_floor else guarded_libraries()
    if is_guarded is not None and is_guarded(controller.name):
        return FLOOR
    if controller not in loaded_controllers():
        return f"{controller.module} has not been imported"
    why_not: str | None
    if mode not in controller.modes:
        why_not = f"{controller.name} has no switch for {mode}"
    elif controller.tier == Tier.THREAD:
        if not isinstance(controller, HasDefault):
            return f"{controller.name}'s switches belong to the thread"
        _, error = attempt(controller, partial(controller.set_default, mode))
        why_not = None if error is None else in_words(error)
    else:
        hold(block, [controller], mode, is_floor)
        why_not = block.failures.get(controller.name)
    if is_floor and why_not is None:
        _guarded[controller] = controller.describe()
    return why_not


def changes() -> list[str]:
    """Return a sentence for each library under the guard whose switches the program has changed since."""
    said = []
    for controller, inside in _guarded.items():
        now, error = attempt(controller, controller.describe)
        if now is None:
            said.append(f"the switches of {controller.name} cannot be read: {in_words(error)}")
            continue
        values = [f"{name} = {now.get(name)!r}" for name in inside if now.get(name) != inside[name]]
        if values:
            verbs = ("was", "is") if len(values) == 1 else ("were", "are")
            said.append(
                f"{controller.name}: {', '.join(values)} {verbs[0]} set by the program, and {verbs[1]} kept"
            )
    return said
