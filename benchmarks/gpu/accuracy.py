"""The error of each mode and each storage dtype, against exact products, beside the plan's bound."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

import lowprec
from gpu import libraries
from gpu.parts import Options, Part, short
from lowprec.modes import available_modes

#: On Hopper cuBLAS was seen to take tensor cores for TF32 only from m = 16 and min(n, k) = 512 on.
SIDE, INNER = 512, (512, 2048, 16384)

MODES = ("fp32", "fp32_pedantic", "tf32", "bf16", "fp16")
#: Those of several products, and float64: on real matrices alone.
MORE_MODES = tuple(str(mode) for mode in available_modes() if str(mode) not in MODES)
SINGLE = ("float32", "complex64")
STORED = ("float64", "complex128", "float16", "bfloat16", "int8")
#: (first operand, second operand, out_dtype).
FLOAT8 = (
    ("float8_e4m3fn", "float8_e4m3fn", None),
    ("float8_e4m3fn", "float8_e4m3fn", "float32"),
    ("float8_e4m3fn", "float8_e5m2", "float32"),
    ("float8_e5m2", "float8_e4m3fn", "float16"),
)

#: Rows and columns of a 64-bit product that are checked, in long double.
_SAMPLED = 16


def draw(rng: np.random.Generator, shape: tuple[int, int], distribution: str, axis: int) -> Any:
    """Return float64 numbers of a distribution; `axis` is that of the rows of a (0) or the columns of b (1)."""
    if distribution == "uniform":
        return rng.random(shape)
    values, exponents = rng.standard_normal(shape), np.array(0)
    if distribution == "wide":
        # The largest elements stay inside float16; the smallest ones are subnormal there.
        exponents = rng.integers(-12, 11, shape)
    if distribution == "scaled":
        # Whole rows and columns are far beyond float16.
        exponents = rng.integers(-30, 31, (shape[0], 1) if axis == 0 else (1, shape[1]))
    return np.ldexp(values, exponents)


class Case(NamedTuple):
    """One product to check."""

    dtypes: tuple[str, str]
    distribution: str
    k: int
    mode: str | None = None
    out_dtype: str | None = None


def cases(inner: tuple[int, ...]) -> Iterator[Case]:
    """Yield all products, those that share operands after one another; what the claims are about comes first."""
    for k in inner:
        for distribution in ("normal", "uniform", "wide", "scaled"):
            is_plain = distribution in ("normal", "uniform")
            for dtype in SINGLE:
                for mode in MODES if is_plain else ("fp16", "tf32"):
                    yield Case((dtype, dtype), distribution, k, mode)
            for dtype in STORED if is_plain else ():
                yield Case((dtype, dtype), distribution, k)
            for first, second, out in FLOAT8 if is_plain else ():
                yield Case((first, second), distribution, k, None, out)
    for k in inner:
        for distribution in ("normal", "uniform"):
            for mode in MORE_MODES:
                yield Case(("float32", "float32"), distribution, k, mode)


@functools.lru_cache(maxsize=1)
def operands(dtypes: tuple[str, str], distribution: str, k: int, side: int, seed: int) -> tuple[Any, Any]:
    """Return the operands as NumPy arrays of their own types."""
    rng = np.random.default_rng([seed, k, *distribution.encode()])

    def operand(shape: tuple[int, int], axis: int) -> Any:
        dtype = dtypes[axis]
        if dtype == "int8":
            low = -128 if distribution == "normal" else 0
            return rng.integers(low, 128, shape, dtype=np.int8)
        values = draw(rng, shape, distribution, axis)
        if dtype.startswith("complex"):
            values = values + 1j * draw(rng, shape, distribution, axis)
        return values.astype(libraries.numpy_dtype(dtype))

    return operand((side, k), 0), operand((k, side), 1)


def exact(a: Any, b: Any) -> tuple[Any, Any, Any, slice]:
    """Return the product, the operands behind it in a wider type, and which rows and columns of the whole it is."""
    part = slice(None)
    if a.dtype in (np.float64, np.complex128):
        part = slice(0, a.shape[0], max(1, a.shape[0] // _SAMPLED))
        a, b = a[part], b[:, part]
        wide: Any = np.longdouble if a.dtype == np.float64 else np.clongdouble
    else:
        wide = np.complex128 if a.dtype.kind == "c" else np.float64
    x, y = a.astype(wide), b.astype(wide)
    return x @ y, x, y, part


def judge(result: Any, a: Any, b: Any, bound: Any) -> dict[str, Any]:
    """Return the error of a product and whether it is within the bound of lowprec's plan."""
    wanted, x, y, part = exact(a, b)
    result = result[part][:, part]

    def norm(array: Any) -> float:
        return float(np.linalg.norm(array.astype(complex)))

    norm_a, norm_b = norm(x), norm(y)
    error = norm(result.astype(wanted.dtype) - wanted)
    limit = bound.frobenius(norm_a, norm_b, *wanted.shape)
    return {
        "error": error / (norm_a * norm_b),
        "relative_error": error / norm(wanted),
        "bound": limit / (norm_a * norm_b),
        # False for NaN, too.
        "ok": bool(error <= limit),
    }


def run(part: Part, options: Options) -> None:
    """Check all products."""
    arrays = libraries.TorchArrays()
    inner = INNER[:1] if options.quick else INNER
    for case in part.in_time(cases(inner), options):
        part.row(**check(lowprec, arrays, case, SIDE, options.seed))


def check(lowprec: Any, arrays: Any, case: Case, side: int, seed: int) -> dict[str, Any]:
    """Return the row of one product."""
    words = {**case._asdict(), "dtypes": list(case.dtypes)}
    a, b = operands(case.dtypes, case.distribution, case.k, side, seed)
    asked = {"math_mode": case.mode, "out_dtype": case.out_dtype}
    try:
        x, y = arrays.put(a), arrays.put(b)
        plan = lowprec.plan(x, y, **asked)
        result = arrays.get(lowprec.matmul(x, y, **asked))
    except Exception as error:  # noqa: BLE001 - one product that fails is one row
        # That a device has no FP8 is no failure; that cuBLASLt has no algorithm is one.
        lacks = isinstance(error, lowprec.UnsupportedError) and "compute capability" in str(error)
        return {**words, "ok": None if lacks else False, "refused": short(error)}
    algorithm = dict(plan.algorithm)
    # None where the plan's row says nothing of the units that multiply.
    units = algorithm.get("units")
    return {
        **words,
        **judge(result, a, b, plan.bound),
        "kernel": str(plan.kernel),
        "compute_type": plan.compute_type,
        "algorithm": algorithm,
        "tensor_cores": None if units is None else "no tensor cores" not in units,
    }
