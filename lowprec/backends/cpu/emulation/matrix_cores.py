"""Sums of AMD's matrix cores (CDNA 1 to 3), element by element with NumPy.

Source: P. Xie and others, "MMA-Sim: bit-accurate reference model of tensor cores and matrix cores", arXiv 2511.10909,
section on AMD; no results of this hardware were compared here.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from lowprec.backends.cpu.emulation.arrays import exponents_of
from lowprec.errors import SettingError
from lowprec.formats import FLOAT32

_LEAST = np.float32(FLOAT32.smallest_normal)


class MatrixCore(NamedTuple):
    """How a matrix core adds a group of products of one format to an FP32 accumulator.

    Without ``fraction_bits`` products are added in FP32 in pairs, and their sum to the accumulator. Otherwise
    products are aligned to their largest exponent and truncated to so many bits. Their exact sum is aligned with the
    accumulator, both rounded down, to 31 and 24 bits below the larger exponent, and their sum rounded to nearest.
    """

    group: int
    flushes: bool = False  # subnormal operands and sums become zero
    fraction_bits: int = 0


#: By architecture and format.
MATRIX_CORES = {
    ("cdna1", "float16"): MatrixCore(4),
    ("cdna1", "bfloat16"): MatrixCore(2),
    ("cdna2", "float16"): MatrixCore(4, flushes=True),
    ("cdna2", "bfloat16"): MatrixCore(4, flushes=True),
    ("cdna3", "float16"): MatrixCore(8, fraction_bits=24),
    ("cdna3", "bfloat16"): MatrixCore(8, fraction_bits=24),
    ("cdna3", "tf32"): MatrixCore(4, fraction_bits=24),
}


def matrix_core(name: str, fmt: str) -> MatrixCore | None:
    """Return the model of an architecture of AMD, None for other names; raise SettingError without the format."""
    found = {of: core for (arch, of), core in MATRIX_CORES.items() if arch == name.strip().lower()}
    if found and fmt not in found:
        raise SettingError(f"matrix cores of {name} have the formats {', '.join(found)}, not {fmt}")
    return found.get(fmt)


def multiply(a: Any, b: Any, c: Any, emin: int, core: MatrixCore) -> Any:
    """Return ``c + a @ b`` as float32; ``emin`` is the exponent of the smallest normal number of the format."""
    total = c.astype(np.float32)
    if core.flushes:
        a, b, total = (
            np.where(abs(x) < least, np.float32(0), x)
            for x, least in ((a, 2.0**emin), (b, 2.0**emin), (total, _LEAST))
        )
    add = _rounded_down if core.fraction_bits else _in_pairs
    with np.errstate(all="ignore"):
        for first in range(0, a.shape[-1], core.group):
            part = slice(first, first + core.group)
            x = a[..., part, None]
            y = b[..., None, part, :]
            total = add(x, y, total, emin, core)
    return total


def _in_pairs(x: Any, y: Any, total: Any, emin: int, core: MatrixCore) -> Any:
    sums = [_flushed(x[..., i, :] * y[..., i, :], core) for i in range(x.shape[-2])]
    sums += [np.zeros_like(sums[0])] * (core.group - len(sums))
    while len(sums) > 1:
        sums = [_flushed(low + high, core) for low, high in zip(sums[::2], sums[1::2], strict=True)]
    return _flushed(total + sums[0], core)


def _flushed(x: Any, core: MatrixCore) -> Any:
    return np.where(core.flushes & (abs(x) < _LEAST), x * np.float32(0), x)


def _rounded_down(x: Any, y: Any, total: Any, emin: int, core: MatrixCore) -> Any:
    products = x.astype(np.float64) * y
    c = total.astype(np.float64)
    special = (products.sum(-2) + c).astype(np.float32)
    exponents = exponents_of(x, emin) + exponents_of(y, emin)
    largest = exponents.max(-2)
    scale = np.ldexp(1.0, core.fraction_bits - largest)
    exact = np.trunc(products * scale[..., None, :]).sum(-2)
    whole = np.maximum(largest, exponents_of(c, FLOAT32.emin))
    kept = np.floor(np.ldexp(exact, 31 - core.fraction_bits + largest - whole))
    of_c = np.floor(np.ldexp(c, 24 - whole))
    found = np.ldexp(kept + np.ldexp(of_c, 7), whole - 31).astype(np.float32)
    return np.where(np.isfinite(special) | (abs(products).max(-2) < np.inf), found, special)
