"""Exceptions that a signal handler raises while PyTorch's and JAX's switches are set and put back."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from lowprec import fp32_guard, math_mode
from lowprec.policy import entries
from support import interrupts

ERRORS = (KeyboardInterrupt, RuntimeError)
PAIRS = [
    *[("generic", "all"), ("cuda", "all"), ("mkldnn", "all")],
    *[(backend, what) for backend in ("cuda", "mkldnn") for what in ("matmul", "conv", "rnn")],
]


def module(name: str) -> Any:
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"{name} is not installed")
    return importlib.import_module(name)


@pytest.fixture
def core() -> Iterator[Any]:
    """PyTorch's switches, all at their start."""
    found = module("torch")._C

    def reset() -> None:
        found._set_float32_matmul_precision("highest")
        found._set_cudnn_allow_tf32(True)
        for pair in PAIRS:
            found._set_fp32_precision_setter(*pair, "tf32" if pair in (("cuda", "conv"), ("cuda", "rnn")) else "none")

    reset()
    yield found
    reset()


def read(core: Any) -> list[Any]:
    """Return every switch as the user reads it, a refusal among them."""
    found: list[Any] = [core._get_fp32_precision_getter(*pair) for pair in PAIRS]
    for getter in (core._get_float32_matmul_precision, core._get_cudnn_allow_tf32):
        try:
            found.append(getter())
        except RuntimeError:
            found.append("refused")
    return found


#: Start states, in each of which PyTorch's switches are read in another way.
STATES: dict[str, Callable[[Any], object]] = {
    "medium": lambda core: core._set_float32_matmul_precision("medium"),
    "passed on": lambda core: core._set_fp32_precision_setter("generic", "all", "tf32"),
    "refused": lambda core: (
        core._set_float32_matmul_precision("highest"),
        core._set_fp32_precision_setter("cuda", "matmul", "tf32"),
        core._set_fp32_precision_setter("cuda", "conv", "ieee"),
        core._set_fp32_precision_setter("mkldnn", "all", "bf16"),
    ),
}


def empty() -> None:
    with fp32_guard():
        pass


def mode() -> None:
    with math_mode("tf32", frameworks=True), fp32_guard():
        pass


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("state", STATES)
@pytest.mark.sampled(3)
def test_pytorch_at_every_step(core: Any, state: str, error: type[BaseException]) -> None:
    empty()  # what is looked up once
    STATES[state](core)
    before = read(core)

    def check() -> None:
        assert read(core) == before
        assert not entries.held
        with math_mode("bf16", frameworks=["torch"]):
            assert core._get_float32_matmul_precision() == "medium"
        assert read(core) == before

    assert interrupts.count(empty if state != "medium" else mode, check, error) > 50


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("chosen", [None, "bfloat16"])
def test_jax_at_every_step(chosen: str | None, error: type[BaseException]) -> None:
    jax = module("jax")
    now = lambda: jax.config.jax_default_matmul_precision  # noqa: E731
    of_process = now()

    def check() -> None:
        assert now() == (chosen or of_process)
        if chosen is None:
            # The thread has chosen nothing, so that it follows the process.
            jax.config.update("jax_default_matmul_precision", "tensorfloat32")
            assert now() == "tensorfloat32"
            jax.config.update("jax_default_matmul_precision", of_process)
        with math_mode("bf16", frameworks=["jax"]):
            assert now() == "bfloat16"

    def action() -> None:
        with math_mode("tf32", frameworks=["jax"]), fp32_guard(frameworks=["jax"]):
            pass

    if chosen is None:
        assert interrupts.count(action, check, error) > 50
    else:
        with jax.default_matmul_precision(chosen):
            assert interrupts.count(action, check, error) > 50
    assert now() == of_process
