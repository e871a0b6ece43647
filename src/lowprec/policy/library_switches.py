"""The switches of JAX, TensorFlow, CuPy and Paddle: a getter and a setter each."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from functools import partial
from operator import attrgetter
from types import MappingProxyType
from typing import Any

from lowprec.errors import BackendError, UnsupportedError
from lowprec.modes import MathMode
from lowprec.policy.interrupts import comes_again
from lowprec.policy.protocol import Tier

__all__ = ["CupyController", "JaxController", "PaddleController", "TensorFlowController"]

_M = MathMode


def _attribute(path: str, library: str) -> Any:
    """Return what stands under this dotted path in a loaded module."""
    name, attributes = path.split(".", 1)
    find = partial(attrgetter(attributes), sys.modules[name])
    try:
        return find()
    except AttributeError as error:
        if not comes_again(find, error):
            raise
        version = getattr(sys.modules[name], "__version__", None) or "of an unknown version"
        raise UnsupportedError(
            f"{library} {version} has no {path}: it is still being imported, or its switches are not those that "
            "lowprec knows"
        ) from None


# -- JAX ------------------------------------------------------------------------------------------


_JAX_SWITCH = "default_matmul_precision"


class JaxController:
    """JAX's default precision in a thread.

    What a thread has not chosen comes from the process's default, so what is saved is the thread's own choice, which
    may be that it has none. JAX's context manager does not tell it, and keeps what it found to itself: an interrupt
    inside its ``__enter__`` loses that.
    """

    name = "jax"
    module = "jax"
    tier = Tier.THREAD
    switches: Mapping[str, str] = MappingProxyType(
        {_JAX_SWITCH: "products and convolutions that are traced in this thread"}
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

    @staticmethod
    def _state() -> Any:
        state = _attribute("jax.default_matmul_precision", "JAX")
        # Versions with a hook keep a second copy of the value.
        hook = getattr(state, "_update_thread_local_hook", "none of these versions")
        if hook is not None or not hasattr(state, "set_local"):
            raise UnsupportedError(
                f"JAX {sys.modules['jax'].__version__} keeps jax.default_matmul_precision in another way than lowprec "
                "knows (0.10)"
            )
        return state

    def save(self) -> dict[str, Any]:
        """Return what this thread has chosen, JAX's own mark if that is nothing."""
        return {_JAX_SWITCH: self._state().get_local()}

    def set_mode(self, mode: MathMode) -> dict[str, Any]:
        """Choose for this thread."""
        state, word = self._state(), self._words[mode]
        state.set_local(word)
        if state.value != word:
            raise BackendError(
                f"JAX kept {_JAX_SWITCH} = {state.value!r} when it was set to {word!r}"
            )
        return {_JAX_SWITCH: word}

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Write what the thread had chosen."""
        self._state().set_local(saved[_JAX_SWITCH])

    def describe(self) -> dict[str, Any]:
        """Return the precision in force in this thread."""
        return {_JAX_SWITCH: _attribute("jax.config", "JAX").jax_default_matmul_precision}

    def set_default(self, mode: MathMode) -> None:
        """Set the precision of every thread that has chosen none, for the rest of the process."""
        _attribute("jax.config.update", "JAX")("jax_default_matmul_precision", self._words[mode])


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
