"""What `NVIDIA_TF32_OVERRIDE` does to each compute type and to cuBLAS handles; each value in a fresh process.

usage: python -m gpu.override FILE SEED (one environment; the section calls it)
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from gpu.libraries import short
from gpu.parts import Options, Part, plain

VARIABLE = "NVIDIA_TF32_OVERRIDE"
VALUES = (None, "0", "1")
COMPUTE_TYPES = (
    "COMPUTE_32F",
    "COMPUTE_32F_PEDANTIC",
    "COMPUTE_32F_FAST_TF32",
    "COMPUTE_32F_FAST_16F",
    "COMPUTE_32F_FAST_16BF",
)
#: `cublasMath_t`.
MATH_MODES = {
    "handle, DEFAULT_MATH": 0,
    "handle, PEDANTIC_MATH": 2,
    "handle, TF32_TENSOR_OP_MATH": 3,
}

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
    if "PEDANTIC" in what or (value is None and what in ("COMPUTE_32F", "handle, DEFAULT_MATH")):
        return "float32"
    if value == "0" and ("TF32" in what or what in ("COMPUTE_32F", "handle, DEFAULT_MATH")):
        return "float32"
    return None


def probe(seed: int) -> list[dict[str, Any]]:
    """Return what each compute type and math mode does in this process."""
    from gpu.raw import LtProduct, told

    rng = np.random.default_rng(seed)
    a = rng.standard_normal((_SIDE, _INNER)).astype(np.float32)
    b = rng.standard_normal((_INNER, _SIDE)).astype(np.float32)
    exact = a.astype(np.float64) @ b.astype(np.float64)
    rows = []
    for compute in COMPUTE_TYPES:
        try:
            product = LtProduct(a, b, compute=compute, out_dtype="float32")
            (algorithm,) = product.algorithms(1)
            large = LtProduct(
                a * np.float32(_BEYOND_FLOAT16), b, compute=compute, out_dtype="float32"
            )
            beyond = bool(np.isfinite(large.run(algorithm)).all())
            rows.append(
                _row(
                    compute, product.run(algorithm), exact, beyond_float16=beyond, **told(algorithm)
                )
            )
        except Exception as error:  # noqa: BLE001 - one that is refused is an answer
            rows.append({"what": compute, "error_text": short(error)})
    for name, mode in MATH_MODES.items():
        try:
            rows.append(_row(name, _sgemm(mode, a, b), exact))
        except Exception as error:  # noqa: BLE001 - as above
            rows.append({"what": name, "error_text": short(error)})
    return rows


def _row(what: str, result: Any, exact: Any, **more: Any) -> dict[str, Any]:
    error = float(np.linalg.norm(result - exact) / np.linalg.norm(exact))
    return {"what": what, "relative_error": error, "level": level(error), **more}


def _sgemm(math_mode: int, a: Any, b: Any) -> Any:
    """Return a product by `cublasSgemm` on a handle in a math mode."""
    from gpu import raw
    from lowprec.backends.cuda.libraries import libraries

    cublas = libraries().cublas
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
    """Probe each environment in a process of its own."""
    for value in VALUES:
        for row in in_fresh_process(value, options):
            wanted = expected(value, row.get("what", ""))
            # What is documented and is refused has failed, too.
            ok = None if wanted is None else row.get("level") == wanted
            part.row(**{"ok": ok, "override": value, "expected": wanted, **row})


def in_fresh_process(value: str | None, options: Options) -> list[dict[str, Any]]:
    """Return the rows of one environment; one row that tells the error where its process fails."""
    environment = {name: x for name, x in os.environ.items() if name != VARIABLE}
    if value is not None:
        environment[VARIABLE] = value
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.json"
        command = [sys.executable, "-m", "gpu.override", str(path), str(options.seed)]
        try:
            done = subprocess.run(
                command, env=environment, capture_output=True, text=True, check=False,
                timeout=max(1.0, min(15.0, options.left())),
            )  # fmt: skip
            found: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))
        except subprocess.TimeoutExpired:
            return [{"what": "process", "ok": False, "error_text": "it took too long"}]
        except (OSError, ValueError):
            last = done.stderr.strip().splitlines()[-1:]
            return [{"what": "process", "ok": False, "error_text": " ".join(last)}]
    return found


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(json.dumps(plain(probe(int(sys.argv[2])))), encoding="utf-8")
