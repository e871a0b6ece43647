"""The current math mode: the environment, the process default, the scopes and the guard."""

from __future__ import annotations

from lowprec.policy.controllers import register_controller
from lowprec.policy.resolution import (
    emulated_architecture,
    get_math_mode,
    is_guarded,
    overriding_mode,
    resolve,
    restrict,
    set_math_mode,
)
from lowprec.policy.scopes import emulate, fp32_guard, math_mode
