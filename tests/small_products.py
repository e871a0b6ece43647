"""Small products by native code and by NumPy, whose bits must be the same."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

import lowprec
from lowprec import executors
from lowprec.backends.cpu import direct

BF16 = np.dtype(ml_dtypes.bfloat16)


def matmul(a: Any, b: Any, *, native: bool = True, **keywords: Any) -> Any:
    """Multiply by the kernels, or by NumPy; the test fails where the plan has another kernel."""
    assert lowprec.plan(a, b, **keywords).kernel in ("direct", "direct_parts", "direct_int8")
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(direct, "_has_kernels", lambda: native)
        executors.forget()
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
