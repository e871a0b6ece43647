"""Matrix products of any library's arrays, in the precision that you choose and that you are told of."""

from __future__ import annotations

from lowprec._version import __version__
from lowprec.arrays import DLPackArray
from lowprec.dispatch import matmul
from lowprec.errors import (
    ArrayError,
    BackendError,
    DeviceError,
    DTypeError,
    EnvironmentVariableError,
    LowprecError,
    LowprecWarning,
    ModeError,
    ShapeError,
    UnsupportedError,
)
from lowprec.explain import plan
from lowprec.info import info
from lowprec.modes import MathMode
from lowprec.policy import fp32_guard, get_math_mode, math_mode, set_math_mode
from lowprec.request import ShapeDtype

__all__ = [
    "ArrayError",
    "BackendError",
    "DLPackArray",
    "DTypeError",
    "DeviceError",
    "EnvironmentVariableError",
    "LowprecError",
    "LowprecWarning",
    "MathMode",
    "ModeError",
    "ShapeDtype",
    "ShapeError",
    "UnsupportedError",
    "__version__",
    "fp32_guard",
    "get_math_mode",
    "info",
    "math_mode",
    "matmul",
    "plan",
    "set_math_mode",
]
