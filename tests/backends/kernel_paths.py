"""The kernel paths of the CPU: the products of each kernel."""

from dataclasses import dataclass
from itertools import product
from typing import NamedTuple

import ml_dtypes
import numpy as np

from lowprec.modes import TABLE, MathMode
from support.cpu_units import UNITS

#: Multiples of the kernels' blocks, their neighbours, and primes.
_EXTENTS = (
    1,
    2,
    3,
    5,
    7,
    8,
    15,
    16,
    17,
    31,
    32,
    33,
    45,
    48,
    63,
    64,
    65,
    96,
    113,
    129,
    160,
    230,
    257,
    272,
    290,
)
_LONG = (1, 2, 9, 16, 27, 33, 128, 250, 385, 769, 2049, 4099)

#: So that an example takes milliseconds.
MOST_FLOPS, _MOST_ELEMENTS = 1 << 22, 1 << 16


class Shape(NamedTuple):
    """Extents of each product."""

    m: int
    n: int
    k: int

    @property
    def elements(self):
        """Of a, b and the result."""
        return self.m * self.k + self.k * self.n + self.m * self.n

    @property
    def flops(self):
        return 2 * self.m * self.n * self.k


_ALL_SHAPES = sorted({*product(_EXTENTS, repeat=3), *product(_LONG, repeat=3)})
SHAPES = [
    x
    for x in map(Shape._make, _ALL_SHAPES)
    if x.elements <= _MOST_ELEMENTS and x.flops <= MOST_FLOPS
]


def numpy_dtype(name):
    return np.dtype(getattr(ml_dtypes, name, name))


def promoted(a, b):
    """Return in which type operands of two are multiplied."""
    if a == b:
        return a
    if {a, b} == {"bfloat16", "float16"}:
        return "float32"
    others = [x for x in (a, b) if x != "bfloat16"]
    return np.result_type(*others).name


@dataclass(frozen=True)
class KernelPath:
    """Products that one kernel runs on a machine with one unit."""

    kernel: str
    unit: str
    dtypes: tuple[tuple[str, str], ...]  # of a and b, which may change places
    modes: tuple[str, ...]


ALL = tuple(
    str(r.mode)
    for r in TABLE
    if not r.quantizes and r.mode not in (MathMode.FP32_EMULATED, MathMode.FP64)
)
_BF16 = tuple(mode for mode in ALL if mode.startswith("bf16"))
_PAIRS = tuple(mode for mode in ALL if mode.startswith(("tf32", "fp16")))

_SINGLE = ("float32", "float32")
_HALVES = (("float32", "bfloat16"), ("float32", "float16"), ("bfloat16", "float16"))
_COMPLEX = (
    ("complex64", "complex64"),
    ("complex64", "float32"),
    ("complex64", "float16"),
    ("complex64", "bfloat16"),
)
_WIDE = (
    ("float64", "float64"),
    ("float64", "float32"),
    ("complex128", "complex128"),
    ("complex128", "float32"),
)
_FLOAT16, _BFLOAT16, _INT8 = ((name, name) for name in ("float16", "bfloat16", "int8"))

#: By kind of unit and name: the kernel's name after the unit, types and modes.
_KINDS = {
    "fp32": {
        "": ("", (_SINGLE, *_HALVES), ALL),
        ", complex": ("", _COMPLEX, ALL),
        ", stored": ("", (_FLOAT16, _BFLOAT16), ALL),
    },
    "bf16": {
        "": ("", (_SINGLE, *_HALVES), _BF16),
        ", complex": ("", _COMPLEX, _BF16),
        ", stored": ("", (_BFLOAT16,), ALL),
    },
    "int8": {"": ("", (_INT8,), ALL)},
}
_AMX = {
    ", pairs": ("_pair", (_SINGLE, *_HALVES, *_COMPLEX), _PAIRS),
    ", stored pairs": ("_pair", (_FLOAT16,), ALL),
}

KERNEL_PATHS = {
    f"{unit}{name}": KernelPath(f"{unit}{suffix}", unit, dtypes, modes)
    for unit in UNITS
    for name, (suffix, dtypes, modes) in (
        _KINDS[unit[:4]] | (_AMX if unit == "bf16_amx" else {})
    ).items()
}
KERNEL_PATHS |= {
    "NumPy": KernelPath(
        "numpy", "", (_SINGLE, *_HALVES, *_COMPLEX, _FLOAT16, _BFLOAT16, _INT8), ALL
    ),
    "NumPy, wide": KernelPath("numpy", "", _WIDE, ("fp32", "fp64", "bf16")),
    "NumPy in fp64": KernelPath("numpy", "", (_SINGLE, *_HALVES, *_COMPLEX), ("fp64",)),
}
