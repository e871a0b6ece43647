"""Products with few rows or in batches that cuBLASLt may refuse: FP8 with and without scales, bias, int8."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

import lowprec
from gpu import libraries, raw
from gpu.parts import Options, Part, short

E4M3, E5M2 = "float8_e4m3fn", "float8_e5m2"
FLOAT8_ROWS, INT8_ROWS = (1, 2, 8, 16, 17, 128), (1, 2, 8, 12, 16, 17, 24, 32, 33)
_SIDE, _BATCH = 64, 5


class Case(NamedTuple):
    """Element types of the operands, leading extents and rows, and what goes with the product."""

    a: str
    b: str
    extents: tuple[int, ...]
    scales: tuple[float, ...] = ()
    bias: str | None = None
    activation: str | None = None


def cases() -> Iterator[Case]:
    """Yield all products, in the order of the questions."""
    for rows in FLOAT8_ROWS:
        for scales in ((), (0.5, 4.0)):
            yield Case(E4M3, E4M3, (rows,), scales)
    yield Case(E4M3, E5M2, (32,), (0.5, 4.0))
    for dtype in ("float32", "bfloat16", "float16", E4M3):
        for activation in (None, "relu"):
            yield Case(dtype, dtype, (_BATCH, 24), (), "bfloat16" if dtype == E4M3 else dtype, activation)
    yield Case(E4M3, E4M3, (_BATCH, 24), (0.5, 4.0), "bfloat16")
    for rows in INT8_ROWS:
        yield Case("int8", "int8", (rows,))


def check(arrays: Any, case: Case, seed: int) -> dict[str, Any]:
    """Return the row of one product of small whole numbers, which every type and order of summation keeps exact."""
    rng = np.random.default_rng([seed, *case.extents])
    words = {**case._asdict(), "extents": [*case.extents, _SIDE, _SIDE]}
    numbers = [rng.integers(-3, 4, s) for s in ((*case.extents, _SIDE), (*case.extents[:-1], _SIDE, _SIDE), (_SIDE,))]
    a, b, bias = (
        x.astype(libraries.numpy_dtype(dtype or "float32"))
        for x, dtype in zip(numbers, (case.a, case.b, case.bias), strict=True)
    )
    want = numbers[0] @ numbers[1] * float(np.prod(case.scales)) + (numbers[2] if case.bias else 0)
    asked: dict[str, Any] = {"activation": case.activation}
    if case.a != "int8":
        asked["out_dtype"] = "float32"
    if case.scales:
        asked |= dict(zip(("scale_a", "scale_b"), case.scales, strict=True))
    try:
        x, y = arrays.put(a), arrays.put(b)
        if case.bias:
            asked["bias"] = arrays.put(bias)
        plan = lowprec.plan(x, y, **asked)
        result = arrays.get(lowprec.matmul(x, y, **asked))
    except Exception as error:  # noqa: BLE001 - one product that fails is one row
        lacks = isinstance(error, lowprec.UnsupportedError) and "compute capability" in str(error)
        return {**words, "ok": None if lacks else False, "refused": short(error)}
    right = np.array_equal(result, np.maximum(want, 0) if case.activation else want)
    copies = [copy.operand for copy in plan.copies]
    return {**words, "ok": bool(right), "kernel": str(plan.kernel), "algorithm": dict(plan.algorithm), "packed": copies}


def run(part: Part, options: Options) -> None:
    """Check all products."""
    arrays = libraries.TorchArrays()
    for case in part.one_by_one(cases(), options, raw.is_broken):
        part.row(**check(arrays, case, options.seed))
