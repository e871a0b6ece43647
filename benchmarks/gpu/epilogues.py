"""Which epilogues cuBLASLt takes for which types, and whether lowprec's results are right either way."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from gpu import libraries
from gpu.parts import Options, Part

EPILOGUES = ("DEFAULT", "RELU", "GELU", "BIAS", "RELU_BIAS", "GELU_BIAS")
_SIDE, _INNER = 128, 64


@dataclass(frozen=True)
class Pair:
    """Element types of operands and result, and what goes with them."""

    a: str
    b: str
    out: str
    compute: str
    scale: str
    tolerance: float


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
    Pair("float8_e4m3fn", "float8_e4m3fn", "bfloat16", "COMPUTE_32F", "float32", 1e-2),
    Pair("float8_e4m3fn", "float8_e4m3fn", "float16", "COMPUTE_32F", "float32", 2e-3),
    Pair("float8_e4m3fn", "float8_e4m3fn", "float32", "COMPUTE_32F", "float32", 1e-3),
    Pair("float8_e4m3fn", "float8_e5m2", "float32", "COMPUTE_32F", "float32", 1e-3),
    Pair("float8_e5m2", "float8_e5m2", "float32", "COMPUTE_32F", "float32", 1e-3),
)


def gelu(x: Any) -> Any:
    """Return the tanh form of GELU."""
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def wanted(product: Any, epilogue: str, bias: Any) -> Any:
    """Return what an epilogue makes of an exact product."""
    if "BIAS" in epilogue:
        product = product + bias.astype(product.dtype)
    if "RELU" in epilogue:
        return np.maximum(product, 0)
    return gelu(product) if "GELU" in epilogue else product


def operands(pair: Pair, seed: int) -> tuple[Any, Any, Any]:
    """Return a, b and a bias, of the type that goes with the result."""
    rng = np.random.default_rng(seed)
    made = []
    for shape, dtype in (((_SIDE, _INNER), pair.a), ((_INNER, _SIDE), pair.b)):
        if dtype == "int8":
            values = rng.integers(-10, 11, shape)
        else:
            values = rng.standard_normal(shape)
            if dtype.startswith("complex"):
                values = values + 1j * rng.standard_normal(shape)
        made.append(values.astype(libraries.numpy_dtype(dtype)))
    # What the library's table has for FP8 with a float32 result.
    kind = "bfloat16" if "float8" in pair.a and pair.out == "float32" else pair.out
    bias = rng.integers(-8, 9, _SIDE).astype(libraries.numpy_dtype(kind))
    return made[0], made[1], bias


def relative(result: Any, exact: Any) -> float:
    """Return the error in the Frobenius norm over that of the exact result."""
    wide = np.complex128 if exact.dtype.kind == "c" else np.float64
    off = np.linalg.norm(result.astype(wide) - exact.astype(wide))
    return float(off / np.linalg.norm(exact.astype(wide)))


def exact_product(a: Any, b: Any) -> Any:
    """Return the product in 64 bits."""
    wide = np.complex128 if a.dtype.kind == "c" else np.float64
    return a.astype(wide) @ b.astype(wide)


def run(part: Part, options: Options) -> None:
    """Try all, by the library itself and by lowprec."""
    for pair in PAIRS:
        scaled = [(), (0.5, 4.0)] if "float8" in pair.a else [()]
        for epilogue in EPILOGUES:
            for scales in scaled:
                part.row(**raw(pair, epilogue, scales, options.seed))
            part.row(**by_lowprec(pair, epilogue, options.seed))


def raw(pair: Pair, epilogue: str, scales: tuple[float, ...], seed: int) -> dict[str, Any]:
    """Return what cuBLASLt says to one combination; ok only where it takes it and computes something else."""
    from gpu.raw import LtProduct, told

    a, b, bias = operands(pair, seed)
    row = {**pair.__dict__, "epilogue": epilogue, "scales": list(scales), "by": "cuBLASLt"}
    inner = pair.a == "int8" or "float8" in pair.a
    try:
        product = LtProduct(
            a, b, compute=pair.compute, out_dtype=pair.out, scale_dtype=pair.scale, epilogue=epilogue,
            bias=bias if "BIAS" in epilogue else None, scales=scales, inner_contiguous=inner,
        )  # fmt: skip
        offered = product.algorithms(1)
        if not offered:
            return {**row, "ok": None, "taken": False}
        result = product.run(offered[0])
    except Exception as error:  # noqa: BLE001 - one that is refused is an answer
        return {**row, "ok": None, "taken": False, "error": libraries.short(error)}
    exact = wanted(exact_product(a, b) * (scales[0] * scales[1] if scales else 1), epilogue, bias)
    off = relative(result, exact)
    return {
        **row,
        "ok": bool(off <= pair.tolerance),
        "taken": True,
        "relative_error": off,
        **told(offered[0]),
    }


def by_lowprec(pair: Pair, epilogue: str, seed: int) -> dict[str, Any]:
    """Return whether lowprec computes one combination, and whether cuBLASLt did the epilogue."""
    import lowprec

    a, b, bias = operands(pair, seed)
    row = {**pair.__dict__, "epilogue": epilogue, "by": "lowprec"}
    words = epilogue.split("_")
    asked: dict[str, Any] = {
        "activation": next((w.lower() for w in words if w in ("RELU", "GELU")), None),
        "math_mode": "tf32" if "TF32" in pair.compute else "fp32",
        "out_dtype": pair.out,
    }
    try:
        arrays = libraries.arrays("gpu")
        x, y = arrays.put(a), arrays.put(b)
        if "BIAS" in words:
            asked["bias"] = arrays.put(bias)
        plan = lowprec.plan(x, y, **asked)
        result = arrays.get(lowprec.matmul(x, y, **asked))
    except lowprec.LowprecError as error:
        # What lowprec refuses by its own rules is no failure; what the backend cannot do is.
        kinds = (lowprec.UnsupportedError, lowprec.DTypeError)
        refused = isinstance(error, kinds) and "cuBLASLt" not in str(error)
        return {**row, "ok": None if refused else False, "error": libraries.short(error)}
    except Exception as error:  # noqa: BLE001 - one that fails is one row
        return {**row, "ok": False, "error": libraries.short(error)}
    off = relative(result, wanted(exact_product(a, b), epilogue, bias))
    fused = plan.call is not None and plan.call.epilogue == epilogue and not plan.call.aside
    return {**row, "ok": bool(off <= pair.tolerance), "relative_error": off, "fused": fused}
