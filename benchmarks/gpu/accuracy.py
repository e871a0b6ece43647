"""The error of each mode and each storage dtype, against exact products, beside the plan's bound."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from gpu import libraries
from gpu.parts import Options, Part

SIDE = 256
INNER = (64, 256, 1024, 4096, 16384)
QUICK_SIDE, QUICK_INNER = 32, (64, 256)
#: On a CPU the figures are known; this only shows that the section works.
CPU_INNER = (64, 1024)

MODES = ("fp32", "fp32_pedantic", "tf32", "bf16", "fp16")
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

Draw = Callable[[np.random.Generator, tuple[int, int]], Any]


def _normal(rng: np.random.Generator, shape: tuple[int, int]) -> Any:
    return rng.standard_normal(shape)


def _uniform(rng: np.random.Generator, shape: tuple[int, int]) -> Any:
    return rng.random(shape)


def _wide(rng: np.random.Generator, shape: tuple[int, int]) -> Any:
    # Its largest elements stay inside float16; the smallest ones are subnormal there.
    return np.ldexp(_normal(rng, shape), rng.integers(-12, 11, shape))


DISTRIBUTIONS: dict[str, Draw] = {"normal": _normal, "uniform": _uniform}


def scaled(rng: np.random.Generator, shape: tuple[int, int], axis: int) -> Any:
    """Return normal numbers whose rows (axis 0) or columns (axis 1) are scaled by 2^-30 to 2^30: far beyond float16."""
    extents = (shape[0], 1) if axis == 0 else (1, shape[1])
    return np.ldexp(_normal(rng, shape), rng.integers(-30, 31, extents))


@dataclass(frozen=True)
class Case:
    """One product to check."""

    dtypes: tuple[str, str]
    distribution: str
    k: int
    mode: str | None = None
    out_dtype: str | None = None


def cases(inner: tuple[int, ...], device: str) -> Iterator[Case]:
    """Yield all products, those that share operands after one another."""
    beyond = ("scaled",) if device == "gpu" else ()
    for k in inner:
        for distribution in DISTRIBUTIONS:
            for dtype in SINGLE:
                for mode in MODES:
                    yield Case((dtype, dtype), distribution, k, mode)
            for dtype in STORED:
                yield Case((dtype, dtype), distribution, k)
            for first, second, out in FLOAT8:
                yield Case((first, second), distribution, k, None, out)
        for distribution in ("wide", *beyond):
            for dtype in SINGLE:
                yield Case((dtype, dtype), distribution, k, "fp16")
                yield Case((dtype, dtype), distribution, k, "tf32")


def operands(case: Case, side: int, seed: int) -> tuple[Any, Any]:
    """Return the operands as NumPy arrays of their own types."""
    rng = np.random.default_rng([seed, case.k, *case.distribution.encode()])
    shapes = ((side, case.k), (case.k, side))
    return tuple(
        _operand(rng, shape, dtype, case.distribution, axis)
        for axis, (shape, dtype) in enumerate(zip(shapes, case.dtypes, strict=True))
    )


def _operand(
    rng: np.random.Generator, shape: tuple[int, int], dtype: str, distribution: str, axis: int
) -> Any:
    if dtype == "int8":
        low = -128 if distribution == "normal" else 0
        return rng.integers(low, 128, shape, dtype=np.int8)

    def draw() -> Any:
        if distribution == "scaled":
            return scaled(rng, shape, axis)
        return {**DISTRIBUTIONS, "wide": _wide}[distribution](rng, shape)

    values = draw() + 1j * draw() if dtype.startswith("complex") else draw()
    return values.astype(libraries.numpy_dtype(dtype))


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
    """Return the error of a product and whether it is within its bound.

    Parameters
    ----------
    result, a, b : numpy.ndarray
    bound : ErrorBound
        Of lowprec's plan.
    """
    wanted, x, y, part = exact(a, b)
    result = result[part][:, part]
    norm_a, norm_b = (
        float(np.linalg.norm(x.astype(complex))),
        float(np.linalg.norm(y.astype(complex))),
    )
    difference = (result.astype(wanted.dtype) - wanted).astype(complex)
    error = float(np.linalg.norm(difference))
    limit = bound.frobenius(norm_a, norm_b, *wanted.shape)
    return {
        "error": error / (norm_a * norm_b),
        "relative_error": error / float(np.linalg.norm(wanted.astype(complex))),
        "bound": limit / (norm_a * norm_b),
        # False for NaN, too.
        "ok": bool(error <= limit),
    }


def tensor_cores(algorithm: dict[str, str]) -> bool | None:
    """Return whether the plan's algorithm row says that tensor cores multiply; None where it says nothing."""
    units = algorithm.get("units")
    return None if units is None else "no tensor cores" not in units


def run(part: Part, options: Options) -> None:
    """Check all products."""
    import lowprec

    arrays = libraries.arrays(part.device)
    side, inner = (QUICK_SIDE, QUICK_INNER) if options.quick else (SIDE, INNER)
    if part.device == "cpu" and not options.quick:
        inner = CPU_INNER
    part.fact("side", side)
    for case in cases(inner, part.device):
        if options.left() < 0:
            part.fact("stopped_at", case.__dict__)
            break
        part.row(**check(lowprec, arrays, case, side, options.seed))


def check(lowprec: Any, arrays: Any, case: Case, side: int, seed: int) -> dict[str, Any]:
    """Return the row of one product."""
    words = {
        "dtypes": list(case.dtypes), "mode": case.mode, "out_dtype": case.out_dtype,
        "distribution": case.distribution, "k": case.k,
    }  # fmt: skip
    a, b = operands(case, side, seed)
    asked = {"math_mode": case.mode, "out_dtype": case.out_dtype}
    try:
        x, y = arrays.put(a), arrays.put(b)
        plan = lowprec.plan(x, y, **asked)
        result = arrays.get(lowprec.matmul(x, y, **asked))
    except lowprec.UnsupportedError as error:
        # That a device has no FP8 is no failure; that cuBLASLt has no algorithm is one.
        ok = None if "compute capability" in str(error) else False
        return {**words, "ok": ok, "refused": libraries.short(error)}
    except Exception as error:  # noqa: BLE001 - one product that fails is one row
        return {**words, "ok": False, "refused": libraries.short(error)}
    algorithm = dict(plan.algorithm)
    return {
        **words,
        **judge(result, a, b, plan.bound),
        "kernel": str(plan.kernel),
        "compute_type": plan.compute_type,
        "algorithm": algorithm,
        "tensor_cores": tensor_cores(algorithm),
    }
