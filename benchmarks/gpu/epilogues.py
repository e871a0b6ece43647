"""Which epilogues cuBLASLt takes for which types, with FP8's scales and without; lowprec's own are tested."""

from __future__ import annotations

from itertools import product
from typing import Any, NamedTuple

import numpy as np

from gpu import libraries
from gpu.parts import Options, Part, short
from gpu.raw import LtProduct, told

EPILOGUES = ("DEFAULT", "RELU", "GELU", "BIAS", "RELU_BIAS", "GELU_BIAS")
_SIDE, _INNER = 128, 64


class Pair(NamedTuple):
    """Element types of operands and result, and what goes with them."""

    a: str
    b: str
    out: str
    compute: str
    scale: str
    tolerance: float


E4M3, E5M2 = "float8_e4m3fn", "float8_e5m2"
PAIRS = (
    Pair("float32", "float32", "float32", "COMPUTE_32F", "float32", 1e-5),
    Pair("float32", "float32", "float32", "COMPUTE_32F_FAST_TF32", "float32", 2e-3),
    Pair("bfloat16", "bfloat16", "bfloat16", "COMPUTE_32F", "float32", 1e-2),
    Pair("bfloat16", "bfloat16", "float32", "COMPUTE_32F", "float32", 1e-5),
    Pair("float16", "float16", "float16", "COMPUTE_32F", "float32", 2e-3),
    Pair("float16", "float16", "float32", "COMPUTE_32F", "float32", 1e-5),
    Pair("float64", "float64", "float64", "COMPUTE_64F", "float64", 1e-13),
    Pair("complex64", "complex64", "complex64", "COMPUTE_32F", "complex64", 1e-5),
    Pair("int8", "int8", "int32", "COMPUTE_32I", "int32", 0.0),
    Pair("int8", "int8", "float32", "COMPUTE_32F", "float32", 1e-6),
    Pair(E4M3, E4M3, "bfloat16", "COMPUTE_32F", "float32", 1e-2),
    Pair(E4M3, E4M3, "float16", "COMPUTE_32F", "float32", 2e-3),
    Pair(E4M3, E4M3, "float32", "COMPUTE_32F", "float32", 1e-3),
    Pair(E4M3, E5M2, "float32", "COMPUTE_32F", "float32", 1e-3),
    Pair(E5M2, E5M2, "float32", "COMPUTE_32F", "float32", 1e-3),
)


def gelu(x: Any) -> Any:
    """Return the tanh form of GELU."""
    return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def wanted(product: Any, epilogue: str, bias: Any) -> Any:
    """Return what an epilogue makes of an exact product."""
    if "BIAS" in epilogue:
        product = product + bias.astype(product.dtype)
    if "RELU" in epilogue:
        return np.maximum(product, 0)
    return gelu(product) if "GELU" in epilogue else product


def operands(pair: Pair, seed: int) -> tuple[Any, Any, Any]:
    """Return a, b and a bias of the type that goes with the result."""
    rng = np.random.default_rng(seed)
    # What the library's table has for FP8 with a float32 result.
    kind = "bfloat16" if "float8" in pair.a and pair.out == "float32" else pair.out
    a, b = (
        (rng.integers(-10, 11, shape) if dtype == "int8" else rng.standard_normal(shape)).astype(
            libraries.numpy_dtype(dtype)
        )
        for shape, dtype in (((_SIDE, _INNER), pair.a), ((_INNER, _SIDE), pair.b))
    )
    return a, b, rng.integers(-8, 9, _SIDE).astype(libraries.numpy_dtype(kind))


def run(part: Part, options: Options) -> None:
    """Try all."""
    for pair, epilogue in product(PAIRS, EPILOGUES):
        for scales in [(), (0.5, 4.0)] if "float8" in pair.a else [()]:
            part.row(**ask(pair, epilogue, scales, options.seed))
    for pair, epilogue in product(PAIRS[:5], ("RELU", "GELU")):
        part.row(**ask(pair, epilogue, (), options.seed, nan=True))


def ask(pair: Pair, epilogue: str, scales: tuple[float, ...], seed: int, *, nan: bool = False) -> dict[str, Any]:
    """Return what cuBLASLt says to one combination; `ok` is False where it takes it and computes something else.

    With `nan`, the first row of a is NaN, and the question is whether that of the result is.
    """
    a, b, bias = operands(pair, seed)
    row = {**pair._asdict(), "epilogue": epilogue, "scales": list(scales), "nan": nan}
    if nan:
        a[0] = np.nan
    try:
        product = LtProduct(
            a, b, compute=pair.compute, out_dtype=pair.out, scale_dtype=pair.scale, epilogue=epilogue,
            bias=bias if "BIAS" in epilogue else None, scales=scales,
            inner_contiguous=pair.a == "int8" or "float8" in pair.a,
        )  # fmt: skip
        offered = product.algorithms(1)
        if not offered:
            return {**row, "ok": None, "taken": False}
        result = product.run(offered[0])
    except Exception as error:  # noqa: BLE001 - one that is refused is an answer
        return {**row, "ok": None, "taken": False, "error": short(error)}
    if nan:
        kept = bool(np.isnan(result[0].astype(np.float64)).all())
        return {**row, "ok": None, "taken": True, "keeps_nan": kept, **told(offered[0])}
    wide = np.complex128 if a.dtype.kind == "c" else np.float64
    exact = wanted(a.astype(wide) @ b.astype(wide) * np.prod(scales), epilogue, bias)
    off = float(np.linalg.norm(result.astype(wide) - exact) / np.linalg.norm(exact))
    fine = bool(off <= pair.tolerance)
    return {**row, "ok": fine, "taken": True, "relative_error": off, **told(offered[0])}
