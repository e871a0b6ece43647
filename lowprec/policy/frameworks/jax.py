"""JAX's default precision of products."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from lowprec.errors import BackendError, UnsupportedError
from lowprec.modes import MathMode
from lowprec.policy.frameworks.switch import attribute
from lowprec.policy.protocol import Tier

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
        MathMode.FP32: "highest",
        MathMode.FP32_PEDANTIC: "highest",
        MathMode.TF32: "tensorfloat32",
        MathMode.BF16: "bfloat16",
    }
    modes = tuple(_words)

    @staticmethod
    def _state() -> Any:
        state = attribute("jax.default_matmul_precision", "JAX")
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
        return {_JAX_SWITCH: attribute("jax.config", "JAX").jax_default_matmul_precision}

    def without_effect(self, mode: MathMode) -> str | None:
        """Return what JAX multiplies in full FP32 although the switch is set for this mode."""
        from lowprec.policy.frameworks.probe import jax_leaves

        return jax_leaves(sys.modules["jax"])

    def set_default(self, mode: MathMode) -> None:
        """Set the precision of every thread that has chosen none, for the rest of the process."""
        attribute("jax.config.update", "JAX")("jax_default_matmul_precision", self._words[mode])
