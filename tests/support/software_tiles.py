"""The contract of ``packed.run.gemm`` in NumPy, so that what leads to it runs on machines without tile units."""

from __future__ import annotations

import numpy as np

from lowprec.backends.cpu.buffers import Workspace
from lowprec.backends.cpu.packed.micro_kernels import MicroKernel
from lowprec.backends.cpu.splitting import split
from lowprec.modes import MathMode, row
from lowprec.planning.schedule import make_schedule
from support import oracles

#: Operands in two parts: the kernel declines what is not finite.
_TWO_PARTS = {("float32", "tf32"), ("float32", "fp16"), ("float16", "exact")}

#: Modes that split the operands.
_SPLITS = {"bf16x3", "bf16x6", "bf16x9", "tf32x3"}


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
    a: np.ndarray,
    b: np.ndarray,
    out: np.ndarray,
    *,
    rounding: str,
    alpha: float = 1.0,
    beta: float = 0.0,
    c: np.ndarray | None = None,
    bias: np.ndarray | None = None,
    activation: str | None = None,
    panels: None = None,
) -> bool:
    """Compute what :func:`lowprec.backends.cpu.packed.run.gemm` computes; without panels."""
    if rounding in _SPLITS:
        product = _sum_of_parts(a, b, rounding)
        _write(product, out, alpha, beta, c, bias, activation)
        return bool(np.isfinite(product).all())
    x, y = _packed(a, rounding), _packed(b, rounding)
    if x is None or y is None:
        return False
    if out.dtype == np.int32:
        assert (alpha, beta, bias, activation) == (1, 0, None, None)
        out[...] = x.astype(np.int32) @ y.astype(np.int32)
        return True
    with np.errstate(all="ignore"):
        product = x @ y
    _write(product, out, alpha, beta, c, bias, activation)
    return True


def _sum_of_parts(a: np.ndarray, b: np.ndarray, mode: str) -> np.ndarray:
    """Return the sum of the products of parts in float32; an operand of 16 bits is one part."""
    found, is_split = row(MathMode(mode)), [x.dtype == np.float32 for x in (a, b)]
    with Workspace() as workspace:
        x, y = (
            split(side, np.dtype(np.float32), found, found.operand_format, found.parts if whole else 1, None, workspace)
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
    c: np.ndarray | None,
    bias: np.ndarray | None,
    activation: str | None,
) -> None:
    with np.errstate(all="ignore"):
        value = np.float32(alpha) * product
        if beta:
            assert c is not None
            value += np.float32(beta) * c.astype(np.float32)
        if bias is not None:
            value += bias.astype(np.float32)
        if activation == "relu":
            value = np.where(value < 0, np.float32(0), value)
        elif activation == "gelu":
            value = oracles.gelu(value.astype(np.float64))
        target[...] = value.astype(np.float32)
