"""Controllers of TensorFlow, CuPy and Paddle, whose switches are getter and setter functions."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from lowprec.errors import BackendError, UnsupportedError
from lowprec.modes import MathMode


def attribute(path: str, library: str) -> Any:
    """Return the object at this dotted path in a loaded module."""
    name, attributes = path.split(".", 1)
    try:
        return attrgetter(attributes)(sys.modules[name])
    except AttributeError:
        version = getattr(sys.modules[name], "__version__", None) or "of an unknown version"
        raise UnsupportedError(
            f"{library} {version} has no {path}: it is still being imported, or lowprec does not support its switches"
        ) from None


@dataclass(frozen=True, eq=False)
class SwitchController:
    """Controller of process-wide switches with getters and setters."""

    name: str
    label: str  # name in messages
    # description of each switch, paths of its getter and setter
    functions: Mapping[str, tuple[str, str, str]]
    values: Mapping[MathMode, Any]  # value of every switch in each mode
    arguments: tuple[str, ...] = ()  # first arguments of every getter and setter
    tier = "process"

    @property
    def module(self) -> str:
        return self.name

    @property
    def switches(self) -> dict[str, str]:
        return {name: description for name, (description, _, _) in self.functions.items()}

    @property
    def modes(self) -> tuple[MathMode, ...]:
        return tuple(self.values)

    def _write(self, values: Mapping[str, Any]) -> None:
        for name, (_, _, setter) in self.functions.items():
            attribute(f"{self.name}.{setter}", self.label)(*self.arguments, values[name])

    def save(self) -> dict[str, Any]:
        values = {}
        for name, (_, getter, _) in self.functions.items():
            read = attribute(f"{self.name}.{getter}", self.label)
            values[name] = read(*self.arguments)
        return values

    def set_mode(self, mode: MathMode) -> dict[str, Any]:
        """Set every switch, and check that it holds the new value."""
        value = self.values[mode]
        self._write(dict.fromkeys(self.functions, value))
        values = self.save()
        for name, now in values.items():
            if now != value:
                raise BackendError(
                    f"{self.label} kept {name} = {now!r} when it was set to {value!r}"
                )
        return values

    def restore(self, saved: Mapping[str, Any]) -> None:
        self._write(saved)

    describe = save


_ALLOW_TF32 = {MathMode.FP32: False, MathMode.FP32_PEDANTIC: False, MathMode.TF32: True}

TENSORFLOW = SwitchController(
    "tensorflow",
    "TensorFlow",
    {
        "config.experimental.tensor_float_32_execution": (
            "products and convolutions on CUDA",
            "config.experimental.tensor_float_32_execution_enabled",
            "config.experimental.enable_tensor_float_32_execution",
        )
    },
    _ALLOW_TF32,
)

#: CuPy accepts TF32 only if a device of compute capability 8.0 or later is present.
CUPY = SwitchController(
    "cupy",
    "CuPy",
    {
        "_core.compute_type('f')": (
            "float32 and complex64 products",
            "_core.get_compute_type",
            "_core.set_compute_type",
        )
    },
    # CuPy's COMPUTE_TYPE_DEFAULT, _PEDANTIC and _TF32. Its _BF16 allows bfloat16 and does not promise it.
    {MathMode.FP32: 1, MathMode.FP32_PEDANTIC: 2, MathMode.TF32: 7},
    arguments=("f",),
)

PADDLE = SwitchController(
    "paddle",
    "Paddle",
    {
        "base.core.cublas_switch": (
            "products on CUDA",
            "base.core.get_cublas_switch",
            "base.core.set_cublas_switch",
        ),
        "base.core.cudnn_switch": (
            "convolutions on CUDA",
            "base.core.get_cudnn_switch",
            "base.core.set_cudnn_switch",
        ),
    },
    _ALLOW_TF32,
)
