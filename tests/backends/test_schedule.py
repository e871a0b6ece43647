"""Plans of several products on the CPU: pairs of parts, and chunks of the inner dimension."""

from __future__ import annotations

import numpy as np
import pytest

import lowprec
from support import machines, oracles, schedules


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
    """bfloat16 beside float32: two products are left of three, one where both are bfloat16."""
    import ml_dtypes

    mode = lowprec.modes.MathMode.BF16X3
    wide, narrow = np.ones((4, 4), np.float32), np.ones((4, 4), ml_dtypes.bfloat16)
    schedule = lowprec.plan(wide, narrow, math_mode=mode).schedule
    assert [(p.a_part, p.b_part, p.accumulates) for p in schedule] == [(1, 0, False), (0, 0, True)]


@pytest.mark.parametrize("machine", machines.MACHINES)
@pytest.mark.parametrize("mode", ["fp32", "bf16"])
def test_chunks_of_the_inner_dimension_are_summed(machine, mode, rng):
    a, b, c = (rng.integers(-3, 4, shape).astype(np.float32) for shape in ((3, 20, 50), (50, 30), (30,)))
    with machines.on(machine), schedules.chunked(16):
        made = lowprec.plan(a, b, math_mode=mode)
        found = lowprec.matmul(a, b, c=c, beta=2.0, math_mode=mode)
    assert [(p.k_start, p.k_stop) for p in made.schedule] == [(0, 16), (16, 32), (32, 48), (48, 50)]
    np.testing.assert_array_equal(found, oracles.product(a, b) + 2 * c)
