"""Plans of several products on the CPU: pairs of parts, and chunks of the inner dimension."""

from __future__ import annotations

import numpy as np
import pytest

import lowprec
from support import machines, schedules


@pytest.mark.parametrize("machine", machines.MACHINES)
@pytest.mark.parametrize("mode", schedules.TWO_PARTS)
@pytest.mark.parametrize("dtype", [np.float32, np.complex64])
def test_every_pair_of_parts_is_multiplied_and_summed(machine, mode, dtype):
    x, summed = schedules.TWO_PARTS[mode]
    a, b = (schedules.constant(x, *shape).astype(dtype) for shape in ((40, 8), (8, 30)))
    with machines.on(machine):
        found = lowprec.matmul(a, b, math_mode=mode)
        assert len(lowprec.plan(a, b, math_mode=mode).schedule) == mode_products(mode)
    # 8 products of numbers with at most 21 bits: exact in float32.
    np.testing.assert_array_equal(found, np.full((40, 30), 8 * np.float32(summed), dtype))


def mode_products(mode):
    return len(lowprec.modes.row(mode).pairs)


def test_exact_numbers_of_a_format_have_one_part():
    """bfloat16 with float32: two products are left of three, one where both are bfloat16."""
    import ml_dtypes

    mode = lowprec.modes.MathMode.BF16X3
    wide, narrow = np.ones((4, 4), np.float32), np.ones((4, 4), ml_dtypes.bfloat16)
    schedule = lowprec.plan(wide, narrow, math_mode=mode).schedule
    assert [(p.a_part, p.b_part, p.accumulates) for p in schedule] == [(1, 0, False), (0, 0, True)]
