"""A math mode for each phase of training: cheap while gradients are large, exact at the end."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from lowprec.amp.rules import check_count, check_entries, check_number
from lowprec.errors import SettingError, quoted
from lowprec.modes import Mode, ModeLike, parse_mode
from lowprec.policy import math_mode
from lowprec.util.plain import plain

#: The state of a schedule, which is replaced as a whole for the sake of interrupts.
_STATE = ("steps", "stage", "waited", "lowest")


class PrecisionSchedule:
    """Math modes in sequence, changed at given steps or when the loss stagnates.

    Parameters
    ----------
    modes : sequence of str, MathMode or Recipe
        In order of use.
    at : sequence of int, optional
        Numbers of steps after which each next mode begins: ascending, one fewer than modes.
    patience : int, optional
        Instead of ``at``: the next mode begins after this many consecutive steps that did not lower the loss.
    threshold : float
        Relative decrease below the lowest loss that counts as lowering it.

    Raises
    ------
    SettingError
        Both or neither of ``at`` and ``patience`` are given, or a number is out of its range.
    ModeError
        A mode is unknown.

    Examples
    --------
    >>> schedule = PrecisionSchedule(["bf16", "bf16x3", "fp32"], at=[2, 3])
    >>> for step in range(4):
    ...     with schedule.scope():
    ...         pass  # the products of a step
    ...     print(step, schedule.mode)
    ...     schedule.update()
    0 bf16
    1 bf16
    2 bf16x3
    3 fp32
    """

    def __init__(
        self,
        modes: Sequence[ModeLike],
        *,
        at: Sequence[int] | None = None,
        patience: int | None = None,
        threshold: float = 1e-4,
    ) -> None:
        if isinstance(modes, str) or not modes:
            raise SettingError(f"the modes of a schedule must be a list, got {quoted(modes)}")
        self._modes = tuple(map(parse_mode, modes))
        if (at is None) is (patience is None):
            raise SettingError("a schedule needs either at= or patience=; pass one of them")
        self._at = None
        self._patience = 0
        if at is not None:
            self._at = self._steps(at)
        if patience is not None:
            self._patience = check_count("patience", patience, 1)
        check_number("threshold", threshold, lambda x: 0 <= x < 1, "a share from 0 to 1")
        self._threshold = threshold
        self._state = (0, 0, 0, math.inf)

    def _steps(self, at: Sequence[int]) -> tuple[int, ...]:
        steps = tuple(check_count("a step of at", step, 0) for step in at)
        rises = 0 not in steps and sorted({*steps}) == [*steps]
        if len(steps) != len(self._modes) - 1 or not rises:
            raise SettingError(
                f"at must hold {len(self._modes) - 1} increasing numbers of steps for {len(self._modes)} modes, got "
                f"{quoted(at)}"
            )
        return steps

    def __repr__(self) -> str:
        _, stage, *_ = self._state
        return f"PrecisionSchedule({self.mode}, stage {stage + 1} of {len(self._modes)})"

    @property
    def mode(self) -> Mode:
        """The mode of the next step."""
        _, stage, *_ = self._state
        return self._modes[stage]

    def scope(self) -> math_mode:
        """Return ``math_mode(self.mode)``, for the products of one step."""
        return math_mode(self.mode)

    def update(self, loss: Any = None) -> None:
        """Count a step.

        Parameters
        ----------
        loss : number or array of no axes, optional
            Loss of the step; required with ``patience``. NaN does not lower the loss.

        Raises
        ------
        SettingError
            The loss is required and missing, or is not a number.
        """
        steps, stage, waited, lowest = self._state
        steps += 1
        if self._at is not None:
            self._state = (steps, sum(steps >= step for step in self._at), 0, math.inf)
            return
        if loss is None:
            raise SettingError("a schedule with patience= needs the loss: call update(loss)")
        value = _number("the loss", loss)
        is_first = math.isinf(lowest) and value < lowest
        if is_first or value < lowest - self._threshold * abs(lowest):
            self._state = (steps, stage, 0, value)
        elif waited + 1 >= self._patience and stage + 1 < len(self._modes):
            self._state = (steps, stage + 1, 0, lowest)
        else:
            self._state = (steps, stage, waited + 1, lowest)

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the schedule as plain values."""
        return dict(zip(_STATE, plain(self._state), strict=True))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the state of another schedule of the same modes.

        Raises
        ------
        SettingError
            An entry is missing or illegal, or the stage does not exist.
        """
        check_entries("the state of a schedule", state, _STATE, "save it with state_dict()")
        steps, stage, waited = (check_count(name, state[name], 0) for name in _STATE[:3])
        if stage >= len(self._modes):
            raise SettingError(
                f"stage {quoted(state['stage'])} of a schedule of {len(self._modes)} modes; load it into one of the "
                "same modes"
            )
        lowest = math.inf
        if state["lowest"] is not None:
            lowest = _number("lowest", state["lowest"])
        if math.isnan(lowest):
            raise SettingError("lowest is NaN; load a state that state_dict() returned")
        self._state = (steps, stage, waited, lowest)


def _number(name: str, value: Any) -> float:
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError, RuntimeError):  # the last one PyTorch's
        raise SettingError(
            f"{name} must be a number or an array without axes, got {quoted(value)}"
        ) from None
