"""Controller of JAX's default precision in a thread; the module is the controller.

The saved value is the thread's own setting, or JAX's marker if there is none and the process default applies. JAX's
context manager is not used: it does not expose this value, and an interrupt in its ``__enter__`` would lose it.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from lowprec.errors import BackendError, UnsupportedError
from lowprec.modes import MathMode
from lowprec.policy.frameworks.switch_functions import attribute

_SWITCH = "default_matmul_precision"

name = "jax"
module = "jax"
tier = "thread"
switches: Mapping[str, str] = {_SWITCH: "products and convolutions that are traced in this thread"}
# JAX's precisions, because its algorithms raise an error on devices that lack them.
_WORDS: Mapping[MathMode, str] = {
    MathMode.FP32: "highest",
    MathMode.FP32_PEDANTIC: "highest",
    MathMode.TF32: "tensorfloat32",
    MathMode.BF16: "bfloat16",
}
modes = tuple(_WORDS)


def _state() -> Any:
    state = attribute("jax.default_matmul_precision", "JAX")
    # JAX versions with a hook store a second copy of the value.
    hook = getattr(state, "_update_thread_local_hook", "none of these versions")
    if hook is not None or not hasattr(state, "set_local"):
        raise UnsupportedError(
            f"JAX {sys.modules['jax'].__version__} stores jax.default_matmul_precision in another way than JAX "
            "0.10, which lowprec supports"
        )
    return state


def save() -> dict[str, Any]:
    return {_SWITCH: _state().get_local()}


def set_mode(mode: MathMode) -> dict[str, Any]:
    state, word = _state(), _WORDS[mode]
    state.set_local(word)
    if state.value != word:
        raise BackendError(f"JAX kept {_SWITCH} = {state.value!r} when it was set to {word!r}")
    return {_SWITCH: word}


def restore(saved: Mapping[str, Any]) -> None:
    _state().set_local(saved[_SWITCH])


def describe() -> dict[str, Any]:
    return {_SWITCH: attribute("jax.config", "JAX").jax_default_matmul_precision}


def set_default(mode: MathMode) -> None:
    """Set the default precision of all threads for the rest of the process."""
    attribute("jax.config.update", "JAX")("jax_default_matmul_precision", _WORDS[mode])
