"""Plans of several products on a GPU: pairs of parts, and chunks of the inner dimension."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import lowprec
from cuda_backend.device_fixture import Gpu
from support import oracles, schedules

SIXTEEN_BITS = [mode for mode in schedules.TWO_PARTS if not mode.startswith("tf32")]


@pytest.mark.parametrize("mode", SIXTEEN_BITS)
@pytest.mark.parametrize("dtype", [np.float32, np.complex64])
@pytest.mark.parametrize("transposed", [False, True])
def test_every_pair_of_parts_is_multiplied_and_summed(gpu: Gpu, mode: Any, dtype: Any, transposed: bool) -> None:
    x, summed = schedules.TWO_PARTS[mode]
    a, b = (schedules.constant(x, *shape).astype(dtype) for shape in ((40, 8), (8, 30)))
    if transposed:
        a, b = (np.ascontiguousarray(array.T).T for array in (a, b))
    bias = np.arange(30, dtype=np.float32).astype(dtype)
    found = gpu.get(lowprec.matmul(gpu.put(a), gpu.put(b), math_mode=mode, bias=gpu.put(bias)))
    # 8 products of numbers with at most 21 bits: exact in float32, and the bias rounded in once.
    expected = (np.full((40, 30), 8 * np.float32(summed)) + bias).astype(dtype)
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("mode", ["fp32", "tf32", "bf16", "fp16"])
@pytest.mark.parametrize("dtype", [np.float32, np.complex64])
@pytest.mark.parametrize("order", ["nn", "nt", "tn", "tt"])
@pytest.mark.sampled(2)
def test_chunks_of_the_inner_dimension_are_summed(gpu: Gpu, mode: str, dtype: Any, order: str) -> None:
    rng = np.random.default_rng(0)
    a, b, c = (rng.integers(-3, 4, shape).astype(dtype) for shape in ((3, 20, 50), (3, 50, 30), (30,)))
    if order[0] == "t":
        a = np.ascontiguousarray(a.swapaxes(1, 2)).swapaxes(1, 2)
    if order[1] == "t":
        b = np.ascontiguousarray(b.swapaxes(1, 2)).swapaxes(1, 2)
    with schedules.chunked(16):
        found = lowprec.matmul(gpu.put(a), gpu.put(b), c=gpu.put(c), beta=2.0, math_mode=mode)
        found = gpu.get(found)
    np.testing.assert_array_equal(found, oracles.product(a, b) + 2 * c)
