"""Matrix products of any library's arrays, in the precision that you choose and that you are told of."""

from __future__ import annotations

import importlib
import typing

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
from lowprec.policy import (
    fp32_guard,
    get_math_mode,
    math_mode,
    register_controller,
    set_math_mode,
)
from lowprec.request import ShapeDtype

if typing.TYPE_CHECKING:
    from lowprec import linalg

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
    "linalg",
    "math_mode",
    "matmul",
    "plan",
    "register_controller",
    "set_math_mode",
]

#: Parts that are imported when they are first used (PEP 562).
_ON_DEMAND = frozenset({"linalg"})

# Type checkers see the import above; a general ``__getattr__`` would hide misspelt names from them.
if not typing.TYPE_CHECKING:

    def __getattr__(name):
        if name in _ON_DEMAND:
            return importlib.import_module(f"{__name__}.{name}")
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def __dir__():
        return sorted({*globals(), *_ON_DEMAND})
