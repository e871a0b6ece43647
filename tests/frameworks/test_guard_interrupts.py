"""Exceptions that a signal handler raises while PyTorch's and JAX's switches are read, set and restored."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from frameworks.torch_switches import Switches
from lowprec import fp32_guard, math_mode
from support import interrupts

#: Start states, in each of which PyTorch's switches are read in another way.
STATES: dict[str, Callable[[Switches], object]] = {
    "inherited": lambda s: s.put("generic", "all", "tf32"),
    "refused": lambda s: (
        s.put("cuda", "matmul", "tf32"), s.put("cuda", "conv", "ieee"), s.put("mkldnn", "all", "bf16"),
    ),
}  # fmt: skip


def blocks(library: str) -> None:
    with math_mode("tf32", frameworks=[library]), fp32_guard(frameworks=[library]):
        pass


@pytest.mark.parametrize("state", STATES)
def test_pytorch_at_every_step(switches: Switches, state: str) -> None:
    blocks("torch")  # imports modules
    STATES[state](switches)
    before = switches.read()

    def check() -> None:
        assert switches.read() == before

    assert interrupts.count(lambda: blocks("torch"), check, RuntimeError) > 50


def test_jax_at_every_step(jax: Any) -> None:
    def check() -> None:
        assert jax.config.jax_default_matmul_precision is None
        # The thread has no setting, so that it follows the process.
        jax.config.update("jax_default_matmul_precision", "tensorfloat32")
        assert jax.config.jax_default_matmul_precision == "tensorfloat32"
        jax.config.update("jax_default_matmul_precision", None)

    assert interrupts.count(lambda: blocks("jax"), check, RuntimeError) > 50
