"""Operands that repeat along their batch by strides of zero, in every mode, dtype and epilogue, without copies."""

from __future__ import annotations

import itertools
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import lowprec
from support import oracles
from support.machines import MACHINES, fixture

M, N, K = 7, 5, 24

Array = np.ndarray


machine = fixture(*MACHINES)


def make(rng: np.random.Generator, *shape: int, dtype: Any) -> Array:
    return oracles.random_matrix(rng, shape, dtype)


#: The left operand, from a function that makes arrays.
LEFT: dict[str, Callable[..., Array]] = {
    "a batch": lambda make, batch: make(*batch, M, K),
    "a batch, transposed": lambda make, batch: make(*batch, K, M).swapaxes(-1, -2),
    "rows one after another": lambda make, batch: make(*batch, 1, K),
    "repeated itself": lambda make, batch: np.broadcast_to(make(M, K), (*batch, M, K)),
    "one matrix": lambda make, batch: make(M, K),
    "one row, reversed": lambda make, batch: make(1, K)[:, ::-1],
    "a vector": lambda make, batch: make(K),
    "a vector, reversed": lambda make, batch: make(K)[::-1],
}

#: From a matrix to a stack that repeats it.
RIGHT: dict[str, Callable[[Array, tuple[int, ...]], Array]] = {
    "repeated": lambda w, batch: np.broadcast_to(w, (*batch, K, N)),
    "transposed and repeated": lambda w, batch: np.broadcast_to(
        np.ascontiguousarray(w.T).T, (*batch, K, N)
    ),
    "reversed and repeated": lambda w, batch: np.broadcast_to(w[::-1], (*batch, K, N)),
    "repeated along the last of the batch": lambda w, batch: np.broadcast_to(
        np.stack([w, *[-w] * (batch[0] - 1)]).reshape(-1, *(1,) * (len(batch) - 1), K, N), (*batch, K, N)
    ),
}  # fmt: skip

BATCHES = [(4,), (1,), (2, 3), (3, 1, 2)]


CASES = [(dtype, mode) for dtype in ("float32", "complex64") for mode in oracles.ALL_MODES]
CASES += [(dtype, "fp32") for dtype in ("float16", "bfloat16", "float64", "complex128", "int8")]


@pytest.mark.parametrize(("dtype", "mode"), CASES)
@pytest.mark.parametrize("left", LEFT)
@pytest.mark.sampled(2)
def test_every_mode_and_dtype(mode: str, dtype: str, left: str, machine: str, rng: np.random.Generator) -> None:
    for right, batch in itertools.product(RIGHT, BATCHES):
        b = RIGHT[right](make(rng, K, N, dtype=dtype), batch)
        a = LEFT[left](lambda *shape: make(rng, *shape, dtype=dtype), batch)
        got = lowprec.matmul(a, b, math_mode=mode)
        if dtype == "int8":
            np.testing.assert_array_equal(got, a.astype(np.int32) @ b.astype(np.int32))
        else:
            oracles.assert_within_bound(got, a, b, mode)


@pytest.mark.parametrize("mode", ["bf16", "tf32", "fp16"])
@pytest.mark.parametrize("dtype", ["float32", "complex64", "float16", "int8"])
@pytest.mark.parametrize("order", ["C", "reversed"])
@pytest.mark.sampled(6)
def test_a_repeated_matrix_is_not_copied_for_every_product(
    mode: str, dtype: str, order: str, machine: str, rng: np.random.Generator
) -> None:
    """Its copies would be 64 times 512 KiB; the operands that are copied once have 512 KiB and 64 KiB at most."""
    w = make(rng, 256, 256, dtype=dtype)
    b = np.broadcast_to(w if order == "C" else w[::-1, ::-1], (64, 256, 256))
    for a in (make(rng, 64, 2, 256, dtype=dtype), make(rng, 256, dtype=dtype)):
        lowprec.matmul(a, b, math_mode=mode)  # what is loaded and kept at the first use
        tracemalloc.start()
        try:
            lowprec.matmul(a, b, math_mode=mode)
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert peak < 16 * 256 * 256 * 8, f"{peak:,} bytes for a matrix of {w.nbytes:,}"
