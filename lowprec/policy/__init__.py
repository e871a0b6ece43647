"""The current math mode: the environment, the process default, the scopes and the guard."""

from __future__ import annotations

from lowprec.policy.controllers import register_controller
from lowprec.policy.state import (
    fp32_guard,
    get_math_mode,
    is_guarded,
    math_mode,
    overriding_mode,
    resolve,
    restrict,
    set_math_mode,
)
