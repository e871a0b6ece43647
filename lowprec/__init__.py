"""Matrix products of any library's arrays, in a precision you choose; the precision used is reported."""

from __future__ import annotations

import importlib
import typing

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
    ShapeError,
    SparsityError,
    UnsupportedError,
)
from lowprec.modes import MathMode
from lowprec.policy import fp32_guard, get_math_mode, math_mode, register_controller, set_math_mode
from lowprec.recipes import Recipe

if typing.TYPE_CHECKING:
    from lowprec import amp, dask, emulation, jax, linalg, numpy, torch  # noqa: F401
    from lowprec.arrays.quantized import QuantizedArray, quantize
    from lowprec.auditing import audit
    from lowprec.backends import release_memory
    from lowprec.backends.cuda.cublas import cublas_handle
    from lowprec.checking import check
    from lowprec.contractions import einsum, linear, tensordot, vecdot
    from lowprec.core.plan_call import plan
    from lowprec.core.prepare import PreparedOperand, prepare
    from lowprec.policy import emulate
    from lowprec.profiling import profile
    from lowprec.report import info
    from lowprec.tuning import autotune

#: Imported with their first use.
_LAZY = {
    **{name: f"lowprec.{name}" for name in ("amp", "dask", "emulation", "jax", "linalg", "numpy", "torch")},
    **dict.fromkeys(("einsum", "linear", "tensordot", "vecdot"), "lowprec.contractions"),
    **dict.fromkeys(("PreparedOperand", "prepare"), "lowprec.core.prepare"),
    **dict.fromkeys(("QuantizedArray", "quantize"), "lowprec.arrays.quantized"),
    "audit": "lowprec.auditing",
    "autotune": "lowprec.tuning",
    "check": "lowprec.checking",
    "cublas_handle": "lowprec.backends.cuda.cublas",
    "emulate": "lowprec.policy",
    "info": "lowprec.report",
    "plan": "lowprec.core.plan_call",
    "profile": "lowprec.profiling",
    "release_memory": "lowprec.backends",
}

#: Modules for a library, and the package to install. Not in ``__all__``: a star import loads no library.
_OF_LIBRARIES = {"dask": "dask[array]", "jax": "jax", "numpy": "numpy", "torch": "torch"}

__all__ = [
    "ArrayError", "BackendError", "DLPackArray", "DTypeError", "DeviceError", "DeviceMemoryError",
    "EnvironmentVariableError", "LowprecError", "LowprecWarning", "MathMode", "ModeError", "PreparedOperand",
    "QuantizedArray", "Recipe", "ShapeDtype", "ShapeError", "SparsityError", "UnsupportedError", "__version__", "amp",
    "audit", "autotune", "check", "cublas_handle", "einsum", "emulate", "emulation", "fp32_guard", "get_math_mode",
    "info", "linalg", "linear", "math_mode", "matmul", "plan", "prepare", "profile", "quantize", "register_controller",
    "release_memory", "set_math_mode", "tensordot", "vecdot",
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


def __dir__() -> list[str]:
    return sorted([*__all__, *_OF_LIBRARIES])
