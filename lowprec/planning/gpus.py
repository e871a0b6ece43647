"""Published data of NVIDIA's GPUs, a row per model: peak rates, memory, multiprocessors, clock.

Peak rates are for dense matrices with sums in FP32 (int32 for int8). Figures "with sparsity" in data sheets are halved,
and so are those of GeForce cards for 16-bit and FP8 numbers. ``clock_mhz`` is the boost clock of the rates. NVIDIA does
not publish the B200's multiprocessors, clock and L2; these are from its driver ("Nvidia's B200: Keeping the CUDA
Juggernaut Rolling", chipsandcheese.com, 2025).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from lowprec.errors import DeviceError, did_you_mean, quoted
from lowprec.planning.tensor_cores import Capability

#: Formats of the rates of a row, in order.
_FORMATS = ("float64", "float32", "tf32", "bfloat16", "float16", "float8_e4m3fn", "int8")

Rate = float | None


@dataclass(frozen=True, slots=True)
class GpuModel:
    """Published data of a model."""

    key: str  # name in ``device=``
    name: str
    compute_capability: Capability
    multiprocessors: int
    clock_mhz: int
    rates: tuple[Rate, Rate, Rate, Rate, Rate, Rate, Rate]  # TFLOP/s (TOP/s for int8) by format
    bandwidth: int  # of the memory, GB/s
    memory: int  # GB
    l2: float  # MB
    source: str

    @property
    def peak_tflops(self) -> dict[str, float]:
        """Peak rates by format, without unsupported formats."""
        pairs = zip(_FORMATS, self.rates, strict=True)
        return {fmt: rate for fmt, rate in pairs if rate is not None}

    @property
    def flops_per_byte(self) -> float:
        """Peak rate of float16 on tensor cores divided by the memory bandwidth."""
        return self.peak_tflops["float16"] * 1e3 / self.bandwidth


_NO = None

#: Rates of models that differ in memory alone.
_A100 = (19.5, 19.5, 156, 312, 312, _NO, 624)
_H100 = (67, 67, 494.5, 989.5, 989.5, 1979, 1979)

_ROWS: tuple[tuple[Any, ...], ...] = (
    ("v100", "NVIDIA V100 SXM2", (7, 0), 80, 1530, (7.8, 15.7, _NO, _NO, 125, _NO, _NO), 900, 32, 6,
     "V100 data sheet and Volta architecture white paper"),
    ("t4", "NVIDIA T4", (7, 5), 40, 1590, (0.25, 8.1, _NO, _NO, 65, _NO, 130), 320, 16, 4,
     "T4 data sheet and Turing architecture white paper"),
    ("rtx-2080-ti", "NVIDIA GeForce RTX 2080 Ti", (7, 5), 68, 1635, (0.44, 14.2, _NO, _NO, 56.9, _NO, 227.7), 616, 11,
     5.5, "Turing architecture white paper (Founders Edition)"),
    ("a100", "NVIDIA A100 SXM4 80GB", (8, 0), 108, 1410, _A100, 2039, 80, 40,
     "A100 data sheet and Ampere architecture white paper"),
    ("a100-40gb", "NVIDIA A100 SXM4 40GB", (8, 0), 108, 1410, _A100, 1555, 40, 40,
     "A100 data sheet and Ampere architecture white paper"),
    ("rtx-3090", "NVIDIA GeForce RTX 3090", (8, 6), 82, 1695, (0.56, 35.6, 35.6, 71, 71, _NO, 284), 936, 24, 6,
     "Ampere GA102 architecture white paper"),
    ("l4", "NVIDIA L4", (8, 9), 58, 2040, (0.49, 30.3, 60, 121, 121, 242.5, 242.5), 300, 24, 48,
     "L4 data sheet and Ada architecture white paper"),
    ("l40s", "NVIDIA L40S", (8, 9), 142, 2520, (1.43, 91.6, 183, 362, 362, 733, 733), 864, 48, 96,
     "L40S data sheet and Ada architecture white paper"),
    ("rtx-4090", "NVIDIA GeForce RTX 4090", (8, 9), 128, 2520, (1.29, 82.6, 82.6, 165.2, 165.2, 330.3, 660.6), 1008, 24,
     72, "Ada architecture white paper"),
    ("h100", "NVIDIA H100 SXM5", (9, 0), 132, 1980, _H100, 3350, 80, 50,
     "H100 data sheet and Hopper architecture white paper"),
    ("h200", "NVIDIA H200 SXM", (9, 0), 132, 1980, _H100, 4800, 141, 50,
     "H200 data sheet"),
    ("gh200", "NVIDIA GH200", (9, 0), 132, 1980, _H100, 4000, 96, 50,
     "GH200 data sheet (HBM3)"),
    ("b200", "NVIDIA B200", (10, 0), 148, 1965, (40, 80, 1100, 2250, 2250, 4500, 4500), 8000, 192, 126,
     "Blackwell architecture technical brief (HGX)"),
    ("rtx-5090", "NVIDIA GeForce RTX 5090", (12, 0), 170, 2407, (1.64, 104.8, 104.8, 209.5, 209.5, 419, 838), 1792, 32,
     96, "RTX Blackwell architecture white paper"),
)  # fmt: skip

#: The first row of a compute capability is used for models without a row.
MODELS = tuple(GpuModel(*row) for row in _ROWS)

_BY_KEY = {model.key: model for model in MODELS}
#: Matches "sm_90", "sm_90a", "sm90" and "9.0".
_CAPABILITY = re.compile(r"sm_?(\d+)(\d)a?|(\d+)\.(\d)")


def model_names() -> str:
    """Return the names accepted by :func:`parse_model`, for messages."""
    capabilities = sorted({model.compute_capability for model in MODELS})
    numbers = ", ".join(f"{major}.{minor}" for major, minor in capabilities)
    return f"{', '.join(_BY_KEY)}, or a compute capability ({numbers}; sm_90 for 9.0)"


def parse_model(name: object) -> GpuModel:
    """Return the model of this name (in any case, without brand), or the first of this compute capability."""
    text = name if isinstance(name, str) else ""
    wanted = _plain(text)
    capability = parse_capability(text)
    for model in MODELS:
        if model.compute_capability == capability or wanted in (
            _plain(model.key),
            _plain(model.name),
        ):
            return model
    similar = did_you_mean(name, _BY_KEY)
    raise DeviceError(
        f"device {quoted(name)} is not known; choose one of: cpu, {model_names()}{similar}"
    )


def parse_capability(text: str) -> Capability | None:
    """Return the compute capability of ``"sm_90"`` or ``"9.0"``; None for other text."""
    match = _CAPABILITY.fullmatch(text.strip().lower())
    if match is None:
        return None
    major, minor = (int(part) for part in match.groups() if part is not None)
    return major, minor


def _plain(text: str) -> str:
    """Return a name without brand names, spaces and hyphens."""
    return re.sub(r"nvidia|tesla|geforce|[\s_-]", "", text.lower())


def model_of(name: str) -> GpuModel | None:
    """Return the row of a GPU by its name from the driver; None if there is no row."""
    words = set(re.findall(r"[a-z0-9]+", name.lower()))
    models = [model for model in MODELS if words.issuperset(model.key.split("-"))]
    return max(models, key=lambda model: len(model.key), default=None)


def flops_per_byte(name: str, capability: Capability) -> float:
    """Return the flops per byte of a GPU by its name; without a row, of the nearest older compute capability."""
    older = [model for model in MODELS if model.compute_capability <= capability] or MODELS[:1]
    nearest = max(older, key=lambda model: model.compute_capability)  # the first of several
    return (model_of(name) or nearest).flops_per_byte
