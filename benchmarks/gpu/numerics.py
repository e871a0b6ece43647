"""How cuBLASLt rounds: TF32 operands, sums in tensor cores and over a split k; and `NVIDIA_TF32_OVERRIDE`."""

from __future__ import annotations

import contextlib
import functools
import math
import os
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import numpy as np

import lowprec
from gpu import raw
from gpu.arrays import numpy_dtype
from gpu.parts import OVERRIDE, Options, Part, short
from gpu.raw import FULL_REDUCTIONS, LtProduct, described
from lowprec.architectures import Architecture
from lowprec.backends.cuda import libraries

#: Extents with which cuBLAS was seen to run TF32 on the tensor cores of Hopper; unneeded elements are zero.
_SIDE = 512


# -- operands of TF32: products of chosen bit patterns with 1 -------------------------------------

#: Bits of a float32's mantissa that TF32 lacks.
_DROPPED = 13
_HALF = 1 << (_DROPPED - 1)


def patterns(seed: int, count: int = 512) -> Any:
    """Return finite normal float32 numbers around the middle between two TF32 numbers, and exactly there."""
    rng = np.random.default_rng(seed)
    low = np.array([0, 1, _HALF - 1, _HALF, _HALF + 1, 2 * _HALF - 1], np.uint32)
    # Ties at odd and even last bits alike, both signs, exponents away from the ends.
    high = rng.integers(0, 1 << 10, count, dtype=np.uint32) << np.uint32(_DROPPED)
    sign = rng.integers(0, 2, count, dtype=np.uint32) << np.uint32(31)
    exponent = rng.integers(64, 190, count, dtype=np.uint32) << np.uint32(23)
    return (sign | exponent | high | low[np.arange(count) % len(low)]).view(np.float32)


def _truncated(bits: Any) -> Any:
    return (bits & np.uint32(0xFFFFFFFF << _DROPPED & 0xFFFFFFFF)).view(np.float32)


#: Ways to round an operand, by name, as functions of its bits.
RULES: dict[str, Callable[[Any], Any]] = {
    "not rounded": lambda bits: bits.view(np.float32),
    "truncated": _truncated,
    "to nearest, ties away from zero": lambda bits: _truncated(bits + np.uint32(_HALF)),
    "to nearest, ties to even": lambda bits: _truncated(
        bits + np.uint32(_HALF - 1) + ((bits >> np.uint32(_DROPPED)) & np.uint32(1))
    ),
}


def rounding(part: Part, options: Options) -> None:
    """Look at both operands; with a short inner dimension the library may not use tensor cores."""
    values = patterns(options.seed)
    for k, side, compute in product(
        (1, 16, 512), ("a", "b"), ("COMPUTE_32F_FAST_TF32", "COMPUTE_32F")
    ):
        words = {"k": k, "operand": side, "compute_type": compute}
        # The values are the first column of a or row of b; the other operand begins with ones, and the rest is zero.
        x, ones = np.zeros((len(values), k), np.float32), np.zeros((k, _SIDE), np.float32)
        x[:, 0], ones[0] = values, 1
        # A refusal is an answer.
        with part.attempt(ok=None, **words):
            bare = LtProduct(*((x, ones) if side == "a" else (ones.T, x.T)), compute=compute)
            algorithm, result = bare.first()
            returned = result[:, 0] if side == "a" else result[0]
            shares = {
                name: float(np.mean(rule(values.view(np.uint32)) == returned))
                for name, rule in RULES.items()
            }
            rule = next((name for name, share in shares.items() if share == 1.0), "none of these")
            # COMPUTE_32F rounds nothing; FAST_TF32's rule is the question.
            ok = rule == "not rounded" if compute == "COMPUTE_32F" else None
            part.row(ok=ok, **words, rule=rule, shares=shares, **described(algorithm))


# -- sums -----------------------------------------------------------------------------------------

_DTYPES = ("bfloat16", "float16")
#: Rows that the emulation computes.
_EMULATED = 32


def accumulation(part: Part, options: Options) -> None:
    """Ask how sums are rounded inside a tensor core, and where k is split."""
    # Products that are not zero: one group of the largest model, and three.
    for dtype, terms in product((*_DTYPES, "float32"), (16, 48)):
        _tensor_core(part, options, dtype, terms)
    for dtype in _DTYPES:
        for out, schemes in product(("float32", dtype), (FULL_REDUCTIONS, ("MASK",))):
            _split(part, options, dtype, out, schemes)


def model_operands(seed: int, dtype: str, terms: int) -> tuple[Any, Any]:
    """Return operands with so many products that are not zero, of different exponents; float32 holds TF32 numbers."""
    rng = np.random.default_rng([seed, terms])
    kind, out = numpy_dtype("float16" if dtype == "float32" else dtype), numpy_dtype(dtype)
    a, b = np.zeros((_SIDE, _SIDE)), np.zeros((_SIDE, _SIDE))
    for x in (a[:, :terms], b[:terms]):
        x[:] = np.ldexp(rng.standard_normal(x.shape), rng.integers(-3, 4, x.shape))
    return a.astype(kind).astype(out), b.astype(kind).astype(out)


def _tensor_core(part: Part, options: Options, dtype: str, terms: int) -> None:
    """Compare the bits with those of lowprec's emulation of each architecture."""
    a, b = model_operands(options.seed, dtype, terms)
    how = {"compute": "COMPUTE_32F_FAST_TF32"} if dtype == "float32" else {}
    words = {"question": "tensor core", "dtype": dtype, "terms": terms}
    with part.attempt(**words):
        algorithm, result = LtProduct(a, b, **how).first()
        shares = {}
        for architecture in Architecture:
            with contextlib.suppress(lowprec.UnsupportedError), lowprec.emulate(architecture):
                emulated = lowprec.matmul(a[:_EMULATED], b, math_mode="tf32", out_dtype="float32")
                shares[architecture.value] = float(np.mean(result[:_EMULATED] == emulated))
        rules = [name for name, share in shares.items() if share == 1.0]
        part.row(**words, rule=rules or ["none of these"], shares=shares, **described(algorithm))


def _split(part: Part, options: Options, dtype: str, out: str, schemes: tuple[str, ...]) -> None:
    """Run algorithms that split k; with lowprec's mask all must be exact."""
    rng = np.random.default_rng(options.seed)
    # Extents that make the heuristics split. Whole sums of about 2^14 are exact in FP32 and in nothing narrower.
    a, b = (
        rng.integers(0, 3, shape).astype(numpy_dtype(dtype)) for shape in ((64, 16384), (16384, 64))
    )
    exact = (
        (a.astype(np.float64) @ b.astype(np.float64)).astype(numpy_dtype(out)).astype(np.float64)
    )
    allowed = schemes if out == "float32" or schemes == ("MASK",) else ("COMPUTE_TYPE",)
    words = {"question": "split", "dtype": dtype, "out_dtype": out, "allowed": list(allowed)}
    with part.attempt(**words):
        bare = LtProduct(a, b, out_dtype=out)
        offered = bare.algorithms(64, allowed)
        for rank in part.in_time(range(len(offered)), options):
            info = described(offered[rank])
            if info.get("split_k", 1) > 1 or rank == 0:
                # lowprec takes the next algorithm after one that fails when it runs.
                with part.attempt(ok=None, **words, rank=rank):
                    same = bool((bare.run(offered[rank]).astype(np.float64) == exact).all())
                    part.row(
                        ok=None if allowed == ("MASK",) else same,
                        **words,
                        rank=rank,
                        exact=same,
                        **info,
                    )


# -- NVIDIA_TF32_OVERRIDE, which a process reads once ---------------------------------------------

COMPUTE_TYPES = (
    "COMPUTE_32F", "COMPUTE_32F_PEDANTIC", "COMPUTE_32F_FAST_TF32", "COMPUTE_32F_FAST_16F", "COMPUTE_32F_FAST_16BF",
)  # fmt: skip
#: `cublasMath_t`.
MATH_MODES = {"DEFAULT_MATH": 0, "PEDANTIC_MATH": 2, "TF32_TENSOR_OP_MATH": 3}

#: Largest relative error of float32; rounding to 11 bits causes 2.8e-4, to 8 bits 2.3e-3.
FP32_ERROR = 1.5e-5


def must_be_float32(value: str | None, what: str) -> bool:
    """Whether float32 is documented: 0 forbids TF32; without the variable the plain types and modes are float32."""
    is_plain = what in ("COMPUTE_32F", "handle, DEFAULT_MATH")
    return (
        "PEDANTIC" in what
        or (value == "0" and (is_plain or "TF32" in what))
        or (value is None and is_plain)
    )


def probe(seed: int) -> Iterator[dict[str, Any]]:
    """Yield the precision of each compute type and math mode in this process."""
    rng = np.random.default_rng(seed)
    a, b = (
        rng.standard_normal(shape).astype(np.float32) for shape in ((_SIDE, 1024), (1024, _SIDE))
    )
    exact = a.astype(np.float64) @ b.astype(np.float64)

    def judged(result: Any) -> dict[str, Any]:
        return {"relative_error": float(np.linalg.norm(result - exact) / np.linalg.norm(exact))}

    def compute_type(name: str) -> dict[str, Any]:
        algorithm, result = LtProduct(a, b, compute=name).first()
        return {**judged(result), **described(algorithm)}

    ways: dict[str, Callable[[], dict[str, Any]]]
    ways = {name: functools.partial(compute_type, name) for name in COMPUTE_TYPES}
    ways |= {
        f"handle, {name}": lambda mode=mode: judged(_sgemm(mode, a, b))
        for name, mode in MATH_MODES.items()
    }
    for what, way in ways.items():
        try:
            yield {"what": what, **way()}
        except Exception as error:  # noqa: BLE001 - a refusal is an answer
            yield {"what": what, "error": short(error)}


def _sgemm(math_mode: int, a: Any, b: Any) -> Any:
    """Return a product by `cublasSgemm` on a handle in a math mode."""
    cublas = libraries.libraries().cublas
    handle = cublas.create()
    cublas.set_stream(handle, raw.STREAM)
    cublas.set_math_mode(handle, math_mode)
    (m, k), n = a.shape, b.shape[1]
    factors = np.array([1.0, 0.0], np.float32)
    one = factors.ctypes.data
    at = [raw.upload(x) for x in (b, a, np.full((m, n), np.nan, np.float32))]
    cublas.sgemm(handle, 0, 0, n, m, k, one, at[0], n, at[1], k, one + 4, at[2], n)
    result = raw.download(at[2], (m, n), np.float32)
    cublas.destroy(handle)
    return result


def override(part: Part, options: Options) -> None:
    value = os.environ.get(OVERRIDE)
    for row in probe(options.seed):
        # A refusal of a documented precision is a failure, too; not of NaN.
        ok = (
            row.get("relative_error", math.inf) < FP32_ERROR
            if must_be_float32(value, row["what"])
            else None
        )
        part.row(ok=ok, override=value, **row)
