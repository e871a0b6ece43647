"""The contract of ``packed_gemm.gemm`` in NumPy, so that what leads to it runs on machines without tile units."""

from __future__ import annotations

import contextlib

import ml_dtypes
import numpy as np

import oracles
from lowprec.arrays.view import memory_at
from lowprec.backends.cpu.packed.micro_kernels import MicroKernel
from lowprec.backends.cpu.packed.packed_gemm import Operand
from lowprec.backends.cpu.splitting import split
from lowprec.modes import MathMode, row
from lowprec.planning.schedule import make_schedule

#: Operands in two parts: the kernel declines what is not finite.
_TWO_PARTS = {("float32", "tf32"), ("float32", "fp16"), ("float16", "exact")}

#: Modes that split the operands.
_SPLITS = {"bf16x3", "bf16x6", "bf16x9", "tf32x3"}


def _array(operand: Operand, rows: int, cols: int) -> np.ndarray:
    """Return the matrix that an operand names, on its own memory."""
    dtype = np.dtype(getattr(ml_dtypes, operand.dtype, operand.dtype))
    steps = [s * dtype.itemsize for s in (operand.row_stride, operand.col_stride)]
    below = sum(min(0, s) * (n - 1) for s, n in zip(steps, (rows, cols), strict=True))
    return np.ndarray((rows, cols), dtype, memory_at(operand.address + below, None), -below, steps)


def _packed(x: np.ndarray, rounding: str) -> np.ndarray | None:
    """Return an operand as it is multiplied, None where the kernel declines it."""
    kind = (x.dtype.name, rounding if x.dtype == np.float32 else "exact")
    assert kind != ("float32", "exact"), "float32 is always rounded"
    if x.dtype != np.int8:
        with np.errstate(invalid="ignore"):
            if kind == ("float32", "fp16"):
                x = oracles.float16_digits(x)
            else:
                x = oracles.round_to(x, rounding).astype(np.float32)
    return None if kind in _TWO_PARTS and not np.isfinite(x).all() else x


def gemm(
    micro_kernel: MicroKernel,
    m: int,
    n: int,
    k: int,
    a: Operand,
    b: Operand,
    out: Operand,
    *,
    rounding: str,
    alpha: float = 1.0,
    beta: float = 0.0,
    c: Operand | None = None,
    bias: tuple[int, str, int] | None = None,
    activation: str | None = None,
    panels: None = None,
) -> bool:
    """Compute what :func:`lowprec.backends.cpu.packed.packed_gemm.gemm` computes; without panels."""
    left, right, target = _array(a, m, k), _array(b, k, n), _array(out, m, n)
    if rounding in _SPLITS:
        product = _sum_of_parts(left, right, rounding)
        _write(product, target, alpha, beta, c, bias, activation)
        return bool(np.isfinite(product).all())
    x, y = _packed(left, rounding), _packed(right, rounding)
    if x is None or y is None:
        return False
    if target.dtype == np.int32:
        assert (alpha, beta, bias, activation) == (1, 0, None, None)
        target[...] = x.astype(np.int32) @ y.astype(np.int32)
        return True
    with np.errstate(all="ignore"):
        product = x @ y
    _write(product, target, alpha, beta, c, bias, activation)
    return True


def _sum_of_parts(a: np.ndarray, b: np.ndarray, mode: str) -> np.ndarray:
    """Return the sum of the products of parts in float32; an operand of 16 bits is one part."""
    found, is_split = row(MathMode(mode)), [x.dtype == np.float32 for x in (a, b)]
    with contextlib.ExitStack() as stack:
        x, y = (
            split(
                side,
                np.dtype(np.float32),
                found,
                found.operand_format,
                found.parts if whole else 1,
                None,
                stack,
            )
            for side, whole in zip((a, b), is_split, strict=True)
        )
        with np.errstate(all="ignore"):
            products = make_schedule(found, (is_split[0], is_split[1]), a.shape[1])
            return sum(x.parts[p.a_part] @ y.parts[p.b_part] for p in products)


def _write(
    product: np.ndarray,
    target: np.ndarray,
    alpha: float,
    beta: float,
    c: Operand | None,
    bias: tuple[int, str, int] | None,
    activation: str | None,
) -> None:
    m, n = target.shape
    with np.errstate(all="ignore"):
        value = np.float32(alpha) * product
        if beta:
            assert c is not None
            value += np.float32(beta) * _array(c, m, n).astype(np.float32)
        if bias is not None:
            address, dtype, stride = bias
            value += _array(Operand(address, dtype, 0, stride), 1, n).astype(np.float32)
        if activation == "relu":
            value = np.where(value < 0, np.float32(0), value)
        elif activation == "gelu":
            value = oracles.gelu(value.astype(np.float64))
        target[...] = value.astype(np.float32)
