"""Small products whose steps were made with the plan, and step by step without native code but a BLAS's."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import lowprec
from lowprec.backends.cpu import casting, single_products
from lowprec.core import executors

BF16 = np.dtype(ml_dtypes.bfloat16)


def matmul(a: Any, b: Any, *, native: bool = True, **keywords: Any) -> Any:
    """Multiply by BLAS, rounded and written by native kernels or by NumPy; fail where the plan has another kernel."""
    assert lowprec.plan(a, b, **keywords).kernel_row.blas
    with pytest.MonkeyPatch.context() as monkeypatch:
        if not native:
            monkeypatch.setattr(single_products, "prepare", lambda *_: None)
            monkeypatch.setattr(casting, "is_ready", lambda: False)
        executors.clear_caches()
        return lowprec.matmul(a, b, **keywords)


def assert_same(found: Any, want: Any) -> None:
    """NaN equals NaN; the signs of zeros count."""
    assert found.dtype == want.dtype
    if found.dtype == BF16:  # NumPy does not know its NaN
        found, want = found.astype(np.float32), want.astype(np.float32)
    np.testing.assert_array_equal(found, want)
    numbers = ~np.isnan(want)
    np.testing.assert_array_equal(np.signbit(found)[numbers], np.signbit(want)[numbers])


def both(a: Any, b: Any, **keywords: Any) -> Any:
    """Multiply with the kernels and without; the bits must be the same."""
    out = keywords.pop("out", None)
    want = matmul(a, b, native=False, **keywords)
    if out is not None:
        keywords["out"] = out
    found = matmul(a, b, **keywords)
    assert_same(found, want)
    return found


def numbers(rng: np.random.Generator, *shape: int, dtype: Any = np.float32) -> Any:
    return rng.standard_normal(shape).astype(dtype)


def views(rng: np.random.Generator, rows: int, cols: int, dtype: Any) -> dict[str, Any]:
    """Arrays of one shape that lie in memory in each way."""
    return {
        "rows": numbers(rng, rows, cols, dtype=dtype),
        "columns": numbers(rng, cols, rows, dtype=dtype).T,
        "steps": numbers(rng, 2 * rows, 3 * cols, dtype=dtype)[::2, ::3],
        "backwards": numbers(rng, rows, cols, dtype=dtype)[::-1, ::-1],
        "columns with gaps": numbers(rng, cols, rows + 3, dtype=dtype).T[:rows],
        "one row": np.broadcast_to(numbers(rng, 1, cols, dtype=dtype), (rows, cols)),
        "one column": np.broadcast_to(numbers(rng, rows, 1, dtype=dtype), (rows, cols)),
    }
