"""Matrix products of any library's arrays, in a precision you choose; the precision used is reported."""

from __future__ import annotations

import importlib
import typing

from lowprec import _interpreter  # noqa: F401 - before NumPy
from lowprec._version import __version__
from lowprec.arrays import DLPackArray
from lowprec.core.arguments import ShapeDtype
from lowprec.core.dispatch import matmul
from lowprec.errors import (
    ArrayError,
    BackendError,
    DeviceError,
    DeviceMemoryError,
    DTypeError,
    EnvironmentVariableError,
    LowprecError,
    LowprecWarning,
    ModeError,
    SettingError,
    ShapeError,
    SparsityError,
    UnsupportedError,
)
from lowprec.modes import MathMode
from lowprec.policy import fp32_guard, get_math_mode, math_mode, register_controller, set_math_mode
from lowprec.policy.scopes import on_verify as _on_verify
from lowprec.recipes import Recipe
from lowprec.rounding_rules import Format

if typing.TYPE_CHECKING:
    from lowprec import amp, emulation, linalg, testing

    # by two names, which type checkers require of a name that is not in `__all__`
    from lowprec import dask as dask
    from lowprec import jax as jax
    from lowprec import numpy as numpy
    from lowprec import torch as torch
    from lowprec.arrays.quantized import QuantizedArray
    from lowprec.auditing import audit
    from lowprec.backends import release_memory
    from lowprec.backends.cuda.cublas import cublas_handle
    from lowprec.checking import check
    from lowprec.comparing import compare
    from lowprec.contractions import conv, einsum, linear, tensordot, vecdot
    from lowprec.core.plan_call import plan
    from lowprec.core.prepare import PreparedOperand, prepare
    from lowprec.core.quantize import quantize
    from lowprec.inspection import info
    from lowprec.interception import intercept
    from lowprec.policy import emulate
    from lowprec.profiling import profile
    from lowprec.tuning import autotune

#: Imported with their first use.
_LAZY = {
    **{
        name: f"lowprec.{name}"
        for name in ("amp", "dask", "emulation", "jax", "linalg", "numpy", "testing", "torch")
    },
    **dict.fromkeys(("conv", "einsum", "linear", "tensordot", "vecdot"), "lowprec.contractions"),
    **dict.fromkeys(("PreparedOperand", "prepare"), "lowprec.core.prepare"),
    "QuantizedArray": "lowprec.arrays.quantized",
    "quantize": "lowprec.core.quantize",
    "audit": "lowprec.auditing",
    "autotune": "lowprec.tuning",
    "check": "lowprec.checking",
    "compare": "lowprec.comparing",
    "cublas_handle": "lowprec.backends.cuda.cublas",
    "emulate": "lowprec.policy",
    "info": "lowprec.inspection",
    "intercept": "lowprec.interception",
    "plan": "lowprec.core.plan_call",
    "profile": "lowprec.profiling",
    "release_memory": "lowprec.backends",
}

#: Modules for a library, and the package to install. Not in ``__all__``: a star import loads no library.
_OF_LIBRARIES = {"dask": "dask[array]", "jax": "jax", "numpy": "numpy", "torch": "torch"}

__all__ = [
    "ArrayError", "BackendError", "DLPackArray", "DTypeError", "DeviceError", "DeviceMemoryError",
    "EnvironmentVariableError", "Format", "LowprecError", "LowprecWarning", "MathMode", "ModeError", "PreparedOperand",
    "QuantizedArray", "Recipe", "SettingError", "ShapeDtype", "ShapeError", "SparsityError", "UnsupportedError",
    "__version__", "amp", "audit", "autotune", "check", "compare", "conv", "cublas_handle", "einsum", "emulate",
    "emulation", "fp32_guard", "get_math_mode", "info", "intercept", "linalg", "linear", "math_mode", "matmul", "plan",
    "prepare", "profile", "quantize", "register_controller", "release_memory", "set_math_mode", "tensordot", "testing",
    "vecdot",
]  # fmt: skip


if not typing.TYPE_CHECKING:  # for type checkers any name would exist

    def __getattr__(name: str) -> typing.Any:
        if name not in _LAZY:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        try:
            module = importlib.import_module(_LAZY[name])
        except ModuleNotFoundError as error:
            if (error.name or "").partition(".")[0] != name:
                raise
            # hasattr expects this class.
            raise AttributeError(
                f'lowprec.{name} needs {name}, which is not installed: pip install "{_OF_LIBRARIES[name]}"'
            ) from error
        is_module = _LAZY[name] == f"{__name__}.{name}"
        value = globals()[name] = module if is_module else getattr(module, name)
        return value


def _verify() -> None:
    from lowprec.auditing import verify

    verify()


_on_verify(_verify)


def __dir__() -> list[str]:
    return sorted([*__all__, *_OF_LIBRARIES])
