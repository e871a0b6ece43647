"""Whether C is added in FP32 and rounded to nearest with beta = 1, and whether split-K sums stay in FP32."""

from __future__ import annotations

from typing import Any

import numpy as np

from gpu import libraries
from gpu.parts import Options, Part

DTYPES = ("bfloat16", "float16")
_SIDE = 128
#: The products are multiples of this; beside C, between 1 and 2, their last bits must be rounded away.
_UNIT = 2.0**-27

#: Inner dimension and extents that make the heuristics split the inner dimension.
_SPLIT_SIDE, _SPLIT_INNER = 64, 16384


def sum_operands(seed: int, dtype: str) -> tuple[Any, Any, Any]:
    """Return a, b and c: `a b` is exact in FP32 in any order, `a b + c` is not."""
    rng = np.random.default_rng(seed)
    kind = libraries.numpy_dtype(dtype)
    a = rng.integers(-8, 9, (_SIDE, 16)) * 2.0**-13
    b = rng.integers(-8, 9, (16, _SIDE)) * (_UNIT / 2.0**-13)
    c = (1 + rng.random((_SIDE, _SIDE))).astype(np.float32)
    return a.astype(kind), b.astype(kind), c


def classify_sum(a: Any, b: Any, c: Any, d: Any) -> dict[str, Any]:
    """Return how `a b + c` was rounded: the share of results that are to nearest, toward zero, or neither.

    Results that are the same either way are left out.

    Parameters
    ----------
    a, b, c, d : numpy.ndarray
        d is what came back, float32.
    """
    exact = a.astype(np.float64) @ b.astype(np.float64) + c
    nearest = exact.astype(np.float32)
    below = np.nextafter(nearest, np.float32(0))
    toward_zero = np.where(np.abs(nearest.astype(np.float64)) > np.abs(exact), below, nearest)
    telling = nearest != toward_zero
    shares = {
        "to nearest": float(np.mean(d[telling] == nearest[telling])),
        "toward zero": float(np.mean(d[telling] == toward_zero[telling])),
    }
    rule = next((name for name, share in shares.items() if share == 1.0), "neither")
    return {"rule": rule, "shares": shares, "telling": int(telling.sum())}


def split_operands(seed: int, dtype: str) -> tuple[Any, Any]:
    """Return operands whose sums are whole numbers of about 2^14: exact in FP32 and in nothing narrower."""
    rng = np.random.default_rng(seed)
    kind = libraries.numpy_dtype(dtype)
    a = rng.integers(0, 3, (_SPLIT_SIDE, _SPLIT_INNER))
    b = rng.integers(0, 3, (_SPLIT_INNER, _SPLIT_SIDE))
    return a.astype(kind), b.astype(kind)


def run(part: Part, options: Options) -> None:
    """Look at all algorithms that the heuristics offer."""
    for dtype in DTYPES:
        _added(part, options, dtype)
        for out in ("float32", dtype):
            for schemes in (("INPLACE", "COMPUTE_TYPE"), ("MASK",)):
                _split(part, options, dtype, out, schemes)


def _added(part: Part, options: Options, dtype: str) -> None:
    from gpu.raw import LtProduct, told

    a, b, c = sum_operands(options.seed, dtype)
    try:
        product = LtProduct(a, b, compute="COMPUTE_32F", out_dtype="float32")
        offered = product.algorithms(32)
    except Exception as error:  # noqa: BLE001 - the report says what it was
        part.row(ok=False, question="beta", dtype=dtype, error=libraries.short(error))
        return
    for rank, algorithm in enumerate(offered):
        found = classify_sum(a, b, c, product.run(algorithm, beta=1.0, c=c))
        # The first choice is what runs.
        ok = found["rule"] == "to nearest" if rank == 0 else None
        part.row(ok=ok, question="beta", dtype=dtype, rank=rank, **found, **told(algorithm))


def _split(part: Part, options: Options, dtype: str, out: str, schemes: tuple[str, ...]) -> None:
    """Look at algorithms that split; with lowprec's mask all must be exact."""
    from gpu.raw import LtProduct, told

    a, b = split_operands(options.seed, dtype)
    exact = (a.astype(np.float64) @ b.astype(np.float64)).astype(libraries.numpy_dtype(out))
    allowed = schemes if out == "float32" or schemes == ("MASK",) else ("COMPUTE_TYPE",)
    words = {"question": "split", "dtype": dtype, "out_dtype": out, "allowed": list(allowed)}
    try:
        product = LtProduct(a, b, compute="COMPUTE_32F", out_dtype=out)
        offered = product.algorithms(64, allowed)
    except Exception as error:  # noqa: BLE001 - the report says what it was
        part.row(ok=False, **words, error=libraries.short(error))
        return
    for rank, algorithm in enumerate(offered):
        info = told(algorithm)
        if info["split_k"] > 1 or rank == 0:
            result = product.run(algorithm)
            same = bool((result.astype(np.float64) == exact.astype(np.float64)).all())
            ok = None if allowed == ("MASK",) else same
            part.row(ok=ok, **words, rank=rank, exact=same, **info)
