"""What `NVIDIA_TF32_OVERRIDE` does to each compute type and to cuBLAS handles.

It is read once in a process, so that each value is a part of the report: `override`, `override-0` and `override-1`.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from typing import Any

import numpy as np

from gpu import raw
from gpu.parts import OVERRIDE, Options, Part, short
from lowprec.backends.cuda import libraries

COMPUTE_TYPES = (
    "COMPUTE_32F", "COMPUTE_32F_PEDANTIC", "COMPUTE_32F_FAST_TF32", "COMPUTE_32F_FAST_16F", "COMPUTE_32F_FAST_16BF",
)  # fmt: skip
#: `cublasMath_t`.
MATH_MODES = {"DEFAULT_MATH": 0, "PEDANTIC_MATH": 2, "TF32_TENSOR_OP_MATH": 3}

_SIDE, _INNER = 512, 1024
#: Beyond float16, within bfloat16 and TF32.
_BEYOND_FLOAT16 = 2.0**20

#: Relative error of a product of normal numbers below which it counts as of this precision. Rounding both operands to
#: p bits causes about 2^-p / sqrt(6) each: 2.8e-4 for 11 bits, 2.3e-3 for 8; FP32 sums cause below 1e-5.
LEVELS = ((1.5e-5, "float32"), (8e-4, "11 bits (TF32 or float16)"), (8e-3, "8 bits (bfloat16)"))


def level(error: float | None) -> str:
    """Return the precision that an error shows.

    Examples
    --------
    >>> level(3e-7), level(2.9e-4), level(None)
    ('float32', '11 bits (TF32 or float16)', 'not finite')
    """
    if error is None or not np.isfinite(error):
        return "not finite"
    return next((words for limit, words in LEVELS if error < limit), "worse than bfloat16")


def expected(value: str | None, what: str) -> str | None:
    """Return the precision that is documented; None where a measurement must tell.

    0 forbids TF32; without the variable only a compute type or a math mode that allows less than float32 may give less.
    """
    is_plain = what in ("COMPUTE_32F", "handle, DEFAULT_MATH")
    forbids_tf32 = value == "0" and (is_plain or "TF32" in what)
    return "float32" if "PEDANTIC" in what or forbids_tf32 or (is_plain and value is None) else None


def probe(seed: int) -> Iterator[dict[str, Any]]:
    """Yield what each compute type and math mode does in this process."""
    rng = np.random.default_rng(seed)
    a, b = (rng.standard_normal(shape).astype(np.float32) for shape in ((_SIDE, _INNER), (_INNER, _SIDE)))
    exact = a.astype(np.float64) @ b.astype(np.float64)

    def judged(result: Any) -> dict[str, Any]:
        error = float(np.linalg.norm(result - exact) / np.linalg.norm(exact))
        return {"relative_error": error, "level": level(error)}

    def compute_type(name: str) -> dict[str, Any]:
        product, large = (
            raw.LtProduct(x, b, compute=name, out_dtype="float32") for x in (a, a * np.float32(_BEYOND_FLOAT16))
        )
        (algorithm,) = product.algorithms(1)
        beyond = bool(np.isfinite(large.run(algorithm)).all())
        told = {"beyond_float16": beyond, **raw.told(algorithm)}
        return {**judged(product.run(algorithm)), **told}

    def handle(name: str) -> dict[str, Any]:
        return judged(_sgemm(MATH_MODES[name], a, b))

    ways = {name: functools.partial(compute_type, name) for name in COMPUTE_TYPES}
    ways |= {f"handle, {name}": functools.partial(handle, name) for name in MATH_MODES}
    for what, way in ways.items():
        try:
            row = way()
        except Exception as error:  # noqa: BLE001 - one that is refused is an answer
            row = {"error_text": short(error)}
        yield {"what": what, **row}


def _sgemm(math_mode: int, a: Any, b: Any) -> Any:
    """Return a product by `cublasSgemm` on a handle in a math mode."""
    cublas = libraries.cublas
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


def run(part: Part, options: Options) -> None:
    """Probe this process's environment."""
    value = os.environ.get(OVERRIDE)
    for row in probe(options.seed):
        wanted = expected(value, row["what"])
        # What is documented and is refused has failed, too.
        ok = None if wanted is None else row.get("level") == wanted
        part.row(ok=ok, override=value, expected=wanted, **row)
