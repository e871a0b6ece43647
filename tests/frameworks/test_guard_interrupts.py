"""Exceptions that a signal handler raises while PyTorch's and JAX's switches are set and restored."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from frameworks.torch_switches import Switches
from lowprec import fp32_guard, math_mode
from lowprec.policy import entries
from support import interrupts

ERRORS = (KeyboardInterrupt, RuntimeError)
#: Start states, in each of which PyTorch's switches are read in another way.
STATES: dict[str, Callable[[Switches], object]] = {
    "medium": lambda s: s.torch.set_float32_matmul_precision("medium"),
    "inherited": lambda s: s.put("generic", "all", "tf32"),
    "refused": lambda s: (
        s.put("cuda", "matmul", "tf32"), s.put("cuda", "conv", "ieee"), s.put("mkldnn", "all", "bf16"),
    ),
}  # fmt: skip


def empty() -> None:
    with fp32_guard():
        pass


def mode() -> None:
    with math_mode("tf32", frameworks=True), fp32_guard():
        pass


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("state", STATES)
@pytest.mark.sampled(3)
def test_pytorch_at_every_step(switches: Switches, state: str, error: type[BaseException]) -> None:
    empty()  # loads what is loaded once
    STATES[state](switches)
    before = switches.read()

    def check() -> None:
        assert switches.read() == before
        assert not entries.held
        with math_mode("bf16", frameworks=["torch"]):
            assert switches.torch.get_float32_matmul_precision() == "medium"
        assert switches.read() == before

    assert interrupts.count(empty if state != "medium" else mode, check, error) > 50


@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("chosen", [None, "bfloat16"])
def test_jax_at_every_step(jax: Any, chosen: str | None, error: type[BaseException]) -> None:
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
