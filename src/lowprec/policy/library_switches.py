"""The switches of JAX, TensorFlow, CuPy and Paddle: a getter and a setter each, or a context manager."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from lowprec.errors import BackendError, UnsupportedError
from lowprec.modes import MathMode
from lowprec.policy.protocol import Tier

__all__ = ["CupyController", "JaxController", "PaddleController", "TensorFlowController"]

_M = MathMode


def _attribute(path: str, library: str) -> Any:
    """Return what stands under this dotted path in a loaded module."""
    name, *rest = path.split(".")
    found: Any = sys.modules[name]
    try:
        for part in rest:
            found = getattr(found, part)
    except AttributeError:
        version = getattr(sys.modules[name], "__version__", None) or "of an unknown version"
        raise UnsupportedError(
            f"{library} {version} has no {path}: it is still being imported, or its switches are not those that "
            "lowprec knows"
        ) from None
    return found


# -- JAX ------------------------------------------------------------------------------------------


class JaxController:
    """JAX's default precision, by its own context manager, which acts on the thread.

    The layers of ``policy.switches`` enter and leave it in order and in one thread. Left in another order, as
    overlapping asyncio tasks do it, JAX would restore what another task had set.
    """

    name = "jax"
    module = "jax"
    tier = Tier.THREAD
    switches: Mapping[str, str] = MappingProxyType(
        {"default_matmul_precision": "products and convolutions that are traced in this thread"}
    )
    # JAX's words, not the names of algorithms: those are errors on devices that lack them. What a word becomes is
    # up to the device.
    _words: Mapping[MathMode, str] = {
        _M.FP32: "highest",
        _M.FP32_PEDANTIC: "highest",
        _M.TF32: "tensorfloat32",
        _M.BF16: "bfloat16",
    }
    modes = tuple(_words)

    def __init__(self) -> None:
        self._entered = threading.local()

    @staticmethod
    def _now() -> Any:
        return sys.modules["jax"].config.jax_default_matmul_precision

    def save(self) -> dict[str, Any]:
        """Return the precision in force in this thread."""
        return {
            "default_matmul_precision": _attribute("jax.config", "JAX").jax_default_matmul_precision
        }

    def set_mode(self, mode: MathMode) -> dict[str, Any]:
        """Enter JAX's context manager."""
        word = self._words[mode]
        manager = _attribute("jax.default_matmul_precision", "JAX")(word)
        manager.__enter__()
        if not hasattr(self._entered, "stack"):
            self._entered.stack = []
        self._entered.stack.append((manager, word))
        return self.save()

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Leave the context manager entered last, unless the user has changed the precision since."""
        manager, word = self._entered.stack.pop()
        if self._now() == word:
            manager.__exit__(None, None, None)

    def set_default(self, mode: MathMode) -> dict[str, Any]:
        """Set the precision of every thread that has chosen none, for the rest of the process."""
        word = self._words[mode]
        _attribute("jax.config.update", "JAX")("jax_default_matmul_precision", word)
        return self.save()

    describe = save


# -- libraries with a getter and a setter ---------------------------------------------------------


class _SwitchController:
    """A library whose switches are functions: one that reads and one that writes."""

    name: str
    module: str
    label: str
    tier = Tier.PROCESS
    switches: Mapping[str, str]
    #: Per switch: where the getter and the setter stand.
    paths: Mapping[str, tuple[str, str]]
    #: Per mode: the value of every switch.
    values: Mapping[MathMode, Any]
    modes: tuple[MathMode, ...]

    def _read(self, getter: Callable[..., Any]) -> Any:
        return getter()

    def _write(self, setter: Callable[..., Any], value: Any) -> None:
        setter(value)

    def save(self) -> dict[str, Any]:
        """Return the switches as they are."""
        return {
            name: self._read(_attribute(getter, self.label))
            for name, (getter, _) in self.paths.items()
        }

    def set_mode(self, mode: MathMode) -> dict[str, Any]:
        """Set every switch, and see that it took."""
        value = self.values[mode]
        for _, setter in self.paths.values():
            self._write(_attribute(setter, self.label), value)
        found = self.save()
        for name, kept in found.items():
            if kept != value:
                raise BackendError(
                    f"{self.label} kept {name} = {kept!r} when it was set to {value!r}"
                )
        return found

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Write the values as they were."""
        for name, (_, setter) in self.paths.items():
            self._write(_attribute(setter, self.label), saved[name])

    def describe(self) -> dict[str, Any]:
        """Return the switches as they are."""
        return self.save()


class TensorFlowController(_SwitchController):
    """TensorFlow's switch for TF32."""

    name = "tensorflow"
    module = "tensorflow"
    label = "TensorFlow"
    switches = MappingProxyType(
        {"config.experimental.tensor_float_32_execution": "products and convolutions on CUDA"}
    )
    paths = MappingProxyType(
        {
            "config.experimental.tensor_float_32_execution": (
                "tensorflow.config.experimental.tensor_float_32_execution_enabled",
                "tensorflow.config.experimental.enable_tensor_float_32_execution",
            )
        }
    )
    values = MappingProxyType({_M.FP32: False, _M.FP32_PEDANTIC: False, _M.TF32: True})
    modes = tuple(values)


class PaddleController(_SwitchController):
    """Paddle's switches for TF32 in cuBLAS and cuDNN."""

    name = "paddle"
    module = "paddle"
    label = "Paddle"
    switches = MappingProxyType(
        {
            "base.core.cublas_switch": "products on CUDA",
            "base.core.cudnn_switch": "convolutions on CUDA",
        }
    )
    paths = MappingProxyType(
        {
            "base.core.cublas_switch": (
                "paddle.base.core.get_cublas_switch",
                "paddle.base.core.set_cublas_switch",
            ),
            "base.core.cudnn_switch": (
                "paddle.base.core.get_cudnn_switch",
                "paddle.base.core.set_cudnn_switch",
            ),
        }
    )
    values = MappingProxyType({_M.FP32: False, _M.FP32_PEDANTIC: False, _M.TF32: True})
    modes = tuple(values)


class CupyController(_SwitchController):
    """CuPy's compute type of float32 and complex64, which share one.

    CuPy takes the value for TF32 only where there is a device of compute capability 8.0 or later.
    """

    name = "cupy"
    module = "cupy"
    label = "CuPy"
    switches = MappingProxyType({"_core.compute_type('f')": "float32 and complex64 products"})
    paths = MappingProxyType(
        {
            "_core.compute_type('f')": (
                "cupy._core.get_compute_type",
                "cupy._core.set_compute_type",
            )
        }
    )
    # CuPy's COMPUTE_TYPE_DEFAULT, _PEDANTIC and _TF32. Its _BF16 allows bfloat16 and does not promise it.
    values = MappingProxyType({_M.FP32: 1, _M.FP32_PEDANTIC: 2, _M.TF32: 7})
    modes = tuple(values)

    def _read(self, getter: Callable[..., Any]) -> Any:
        return getter("f")

    def _write(self, setter: Callable[..., Any], value: Any) -> None:
        setter("f", value)
