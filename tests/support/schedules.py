"""Schedules of several products, imposed on plans, with operands whose result shows which products were summed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from lowprec.core import executors
from lowprec.modes import MathMode, ModeRow
from lowprec.planning import planner
from lowprec.planning.schedule import make_schedule

#: By mode: a number x of exactly two parts, and the sum of the products of parts that the mode forms of x times x.
TWO_PARTS = {
    MathMode.BF16X3: (1 + 2**-10, 1 + 2**-9),
    MathMode.BF16X9: (1 + 2**-10, 1 + 2**-9 + 2**-20),
    MathMode.FP16X3: (1 + 2**-15, 1 + 2**-14),
    MathMode.FP16X3_UNSCALED: (1 + 2**-13, 1 + 2**-12),
}


@contextmanager
def fresh_plans() -> Iterator[pytest.MonkeyPatch]:
    """Create new plans inside, and after."""
    with pytest.MonkeyPatch.context() as patch:
        executors.clear_caches()
        try:
            yield patch
        finally:
            executors.clear_caches()


@contextmanager
def chunked(length: int) -> Iterator[None]:
    """Run every product in chunks of the inner dimension."""

    def schedule(row: ModeRow, rounded: tuple[bool, bool], k: int, k_chunk=None, **of_a_plan: bool):
        return make_schedule(row, rounded, k, length if of_a_plan else k_chunk)

    with fresh_plans() as patch:
        patch.setattr(planner, "make_schedule", schedule)
        yield


def constant(value: float, *shape: int) -> np.ndarray:
    return np.full(shape, value, np.float32)
