"""Three claims in numbers: rounded exactly, repeatable, bounded.

usage: python docs/examples/three_claims.py [--n N]
"""

from __future__ import annotations

import argparse
from typing import Any

import ml_dtypes
import numpy as np

import lowprec

#: Elements, numbers in a block, and the exponent of the largest element, of formats with powers of two as scales.
MX = {"mxfp8": (ml_dtypes.float8_e4m3fn, 32, 8, 448), "mxfp4": (ml_dtypes.float4_e2m1fn, 32, 2, 6)}
MODES = ("bf16", "tf32", "fp16", "bf16x3", "int8", "fp8", "mxfp8", "mxfp4", "nvfp4")


def by_definition(x: Any, fmt: str) -> Any:
    """Return the numbers of an MX format as its specification defines them, computed in float64."""
    elements, length, exponent, largest = MX[fmt]
    blocks = x.astype(np.float64).reshape(-1, length)
    peaks = np.abs(blocks).max(axis=1, keepdims=True)
    scales = np.exp2(np.floor(np.log2(peaks)) - exponent)
    codes = np.clip(blocks / scales, -largest, largest).astype(np.float32).astype(elements)
    return (codes.astype(np.float64) * scales).reshape(x.shape)


def nvfp4_by_definition(x: Any) -> Any:
    """Return the numbers of NVFP4: blocks of 16 with a scale in E4M3, and a scale of the array, in float32."""
    blocks = x.reshape(-1, 16)
    peaks = np.abs(blocks).max(axis=1, keepdims=True)
    whole = peaks.max() / np.float32(448 * 6)
    scales = (peaks / np.float32(6) / whole).astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
    codes = (blocks / (scales * whole)).clip(-6, 6).astype(ml_dtypes.float4_e2m1fn)
    return (codes.astype(np.float32) * scales * whole).reshape(x.shape)


def exact(n: int) -> str:
    """Compare stored numbers with their definition."""
    x = np.random.default_rng(0).standard_normal((n, n), dtype=np.float32)
    wanted = {fmt: by_definition(x, fmt) for fmt in MX}
    wanted["nvfp4"] = nvfp4_by_definition(x)
    differ = 0
    for fmt, numbers in wanted.items():
        differ += int((lowprec.quantize(x, fmt, axis=1).dequantize() != numbers).sum())
    formats = "mxfp8, mxfp4 and nvfp4"
    return f"{differ} of {3 * n * n:,} numbers in {formats} differ from their definition"


def repeatable(n: int) -> str:
    """Compare each row of a product with the product of that row alone."""
    rng = np.random.default_rng(1)
    x, weight = rng.standard_normal((2, n, n), dtype=np.float32)
    modes = ("fp32", "bf16", "mxfp8")
    differ = 0
    for mode in modes:
        batch = lowprec.matmul(x, weight, math_mode=mode)
        alone = (lowprec.matmul(row, weight, math_mode=mode) for row in x)
        differ += sum(a.tobytes() != b.tobytes() for a, b in zip(alone, batch, strict=True))
    return f"{differ} of {len(modes) * n:,} rows in {', '.join(modes)} differ alone and in a batch"


def bounded(n: int) -> str:
    """Compare the errors of modes with their guaranteed bounds."""
    rng = np.random.default_rng(2)
    a, b = (rng.standard_normal((n, n), dtype=np.float32) for _ in range(2))
    product = a.astype(np.float64) @ b
    norms = [float(np.linalg.norm(x.astype(np.float64))) for x in (a, b)]
    beyond = 0
    for mode in MODES:
        error = np.linalg.norm(lowprec.matmul(a, b, math_mode=mode) - product)
        beyond += error > lowprec.plan(a, b, math_mode=mode).bound.frobenius(*norms, n, n)
    return f"the errors of {beyond} of {len(MODES)} modes exceed their guaranteed bounds"


def main() -> None:
    """Print a line for each claim."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--n", type=int, default=1024, help="size of the matrices, a multiple of 32"
    )
    n = parser.parse_args().n
    for claim in (exact, repeatable, bounded):
        print(f"{claim.__name__ + ':':12}{claim(n)}")


if __name__ == "__main__":
    main()
