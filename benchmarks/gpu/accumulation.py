"""How sums are rounded: inside a tensor core, when C is added, and where the inner dimension is split."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from gpu import libraries
from gpu.parts import Options, Part
from gpu.raw import FULL_REDUCTIONS, LtProduct, told

DTYPES = ("bfloat16", "float16")
#: Extents with which TF32 was seen to run on the tensor cores of Hopper; what is not needed is zero.
_SIDE = 512
#: The products are multiples of this; beside C, between 1 and 2, their last bits must be rounded away.
_UNIT = 2.0**-27

#: Inner dimension and extents that make the heuristics split the inner dimension.
_SPLIT_SIDE, _SPLIT_INNER = 64, 16384

#: Group of exact products and fraction bits that `planning/tensor_cores.py` takes for Volta, Ampere, Hopper, and TF32.
MODELS = ((4, 23), (8, 24), (16, 25), (4, 24), (8, 25))
#: Products that are not zero: one group of the largest model, and three. So many rows are computed by the models.
_TERMS, _MODELLED = (16, 48), 32


def run(part: Part, options: Options) -> None:
    """Ask all three questions."""
    for dtype in (*DTYPES, "float32"):
        for terms in _TERMS:
            _models(part, options, dtype, terms)
    for dtype in DTYPES:
        _added(part, options, dtype)
        for out in ("float32", dtype):
            for schemes in (FULL_REDUCTIONS, ("MASK",)):
                _split(part, options, dtype, out, schemes)


def _offered(part: Part, words: dict[str, Any], count: int, a: Any, b: Any, **asked: Any) -> tuple[Any, Sequence[Any]]:
    """Return a bare product and its algorithms; none, and a row that says why, where it is refused."""
    schemes = asked.pop("schemes", FULL_REDUCTIONS)
    with part.attempt(**words):
        product = LtProduct(a, b, **asked)
        return product, product.algorithms(count, schemes)
    return None, ()


# -- inside a tensor core -------------------------------------------------------------------------


def model_operands(seed: int, dtype: str, terms: int) -> tuple[Any, Any]:
    """Return operands with so many products that are not zero, of exponents that differ; float32 holds TF32 numbers."""
    rng = np.random.default_rng([seed, terms])
    kind = libraries.numpy_dtype("float16" if dtype == "float32" else dtype)
    a, b = np.zeros((_SIDE, _SIDE)), np.zeros((_SIDE, _SIDE))
    for x in (a[:, :terms], b[:terms]):
        x[:] = np.ldexp(rng.standard_normal(x.shape), rng.integers(-3, 4, x.shape))
    out = libraries.numpy_dtype(dtype)
    return a.astype(kind).astype(out), b.astype(kind).astype(out)


def modelled(a: Any, b: Any, terms: int, group: int, fraction_bits: int) -> Any:
    """Return what a tensor core computes by a model, as float32, of the first `terms` columns of a and rows of b.

    The exact products of a group and the sum so far are aligned to the largest exponent, cut to `fraction_bits`, added,
    and rounded toward zero to FP32.
    """
    x, y = a[:, :terms].astype(np.float64), b[:terms].astype(np.float64)
    total = np.zeros((len(x), y.shape[1]))
    for first in range(0, terms, group):
        part = slice(first, first + group)
        summed = np.concatenate([total[None], x.T[part, :, None] * y[part, None, :]])
        # frexp's exponent is one more than that of a significand between 1 and 2.
        unit = np.ldexp(1.0, np.frexp(np.abs(summed).max(0))[1] - 1 - fraction_bits)
        # Multiples of the unit below 2^(bits + 1): float64 adds them without error.
        total = _toward_zero((np.trunc(summed / unit) * unit).sum(0)).astype(np.float64)
    return total.astype(np.float32)


def _toward_zero(x: Any) -> Any:
    """Return float64 numbers as float32, rounded toward zero."""
    nearest = x.astype(np.float32)
    below = np.nextafter(nearest, np.float32(0))
    return np.where(np.abs(nearest.astype(np.float64)) > np.abs(x), below, nearest)


def _models(part: Part, options: Options, dtype: str, terms: int) -> None:
    a, b = model_operands(options.seed, dtype, terms)
    compute = "COMPUTE_32F_FAST_TF32" if dtype == "float32" else "COMPUTE_32F"
    words = {"question": "tensor core", "dtype": dtype, "terms": terms}
    product, offered = _offered(part, words, 1, a, b, compute=compute)
    for algorithm in offered:
        with part.attempt(**words):
            result = product.run(algorithm)[:_MODELLED]
            shares = {}
            for group, bits in MODELS:
                same = result == modelled(a[:_MODELLED], b, terms, group, bits)
                shares[f"groups of {group}, {bits} bits"] = float(np.mean(same))
            rules = [name for name, share in shares.items() if share == 1.0]
            part.row(**words, rule=rules or ["none of these"], shares=shares, **told(algorithm))


# -- C --------------------------------------------------------------------------------------------


def sum_operands(seed: int, dtype: str) -> tuple[Any, Any, Any]:
    """Return a, b and c: `a b` is exact in FP32 in any order, `a b + c` is not."""
    rng = np.random.default_rng(seed)
    kind = libraries.numpy_dtype(dtype)
    a = rng.integers(-8, 9, (_SIDE, 16)) * 2.0**-13
    b = rng.integers(-8, 9, (16, _SIDE)) * (_UNIT / 2.0**-13)
    c = (1 + rng.random((_SIDE, _SIDE))).astype(np.float32)
    return a.astype(kind), b.astype(kind), c


def classify_sum(a: Any, b: Any, c: Any, d: Any) -> dict[str, Any]:
    """Return how `a b + c` was rounded to the float32 matrix d: the share of results to nearest and toward zero.

    Results that are the same either way are left out.
    """
    exact = a.astype(np.float64) @ b.astype(np.float64) + c
    nearest, toward_zero = exact.astype(np.float32), _toward_zero(exact)
    telling = nearest != toward_zero
    shares = {
        "to nearest": float(np.mean(d[telling] == nearest[telling])),
        "toward zero": float(np.mean(d[telling] == toward_zero[telling])),
    }
    rule = next((name for name, share in shares.items() if share == 1.0), "neither")
    return {"rule": rule, "shares": shares, "telling": int(telling.sum())}


def _added(part: Part, options: Options, dtype: str) -> None:
    a, b, c = sum_operands(options.seed, dtype)
    words = {"question": "beta", "dtype": dtype}
    product, offered = _offered(part, words, 4 if options.quick else 32, a, b)
    for rank in part.in_time(range(len(offered)), options):
        algorithm = offered[rank]
        with part.attempt(**words, rank=rank):
            found = classify_sum(a, b, c, product.run(algorithm, beta=1.0, c=c))
            # The first choice is what runs.
            ok = found["rule"] == "to nearest" if rank == 0 else None
            part.row(ok=ok, **words, rank=rank, **found, **told(algorithm))


# -- split sums -----------------------------------------------------------------------------------


def split_operands(seed: int, dtype: str) -> tuple[Any, Any]:
    """Return operands whose sums are whole numbers of about 2^14: exact in FP32 and in nothing narrower."""
    rng = np.random.default_rng(seed)
    shapes = ((_SPLIT_SIDE, _SPLIT_INNER), (_SPLIT_INNER, _SPLIT_SIDE))
    a, b = (rng.integers(0, 3, shape).astype(libraries.numpy_dtype(dtype)) for shape in shapes)
    return a, b


def _split(part: Part, options: Options, dtype: str, out: str, schemes: tuple[str, ...]) -> None:
    """Look at algorithms that split; with lowprec's mask all must be exact."""
    a, b = split_operands(options.seed, dtype)
    exact = (a.astype(np.float64) @ b.astype(np.float64)).astype(libraries.numpy_dtype(out))
    allowed = schemes if out == "float32" or schemes == ("MASK",) else ("COMPUTE_TYPE",)
    words = {"question": "split", "dtype": dtype, "out_dtype": out, "allowed": list(allowed)}
    product, offered = _offered(part, words, 64, a, b, out_dtype=out, schemes=allowed)
    for rank in part.in_time(range(len(offered)), options):
        algorithm = offered[rank]
        with part.attempt(**words, rank=rank):
            info = told(algorithm)
            if info.get("split_k", 1) > 1 or rank == 0:
                result = product.run(algorithm)
                same = bool((result.astype(np.float64) == exact.astype(np.float64)).all())
                ok = None if allowed == ("MASK",) else same
                part.row(ok=ok, **words, rank=rank, exact=same, **info)
