"""PyTorch's switches for attention: fused kernels hide their products, the plain form shows them."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import torch

from lowprec.modes import MathMode
from lowprec.policy.protocol import Tier

_FLAGS = ("flash", "mem_efficient", "cudnn", "overrideable", "math")
_FAST_PATH = "mha fast path"


class AttentionController:
    """Which kernels ``scaled_dot_product_attention`` may choose, and whether encoder layers take a kernel of their own.

    A controller, since the switches belong to the process: blocks of several threads that overlap put them back once,
    in whichever order they end.
    """

    name = "torch attention"
    module = "torch"
    tier = Tier.PROCESS
    modes = (MathMode.FP32,)
    switches: Mapping[str, str] = MappingProxyType({})

    def save(self) -> dict[str, Any]:
        """Return the switches as they are."""
        found = {flag: getattr(torch._C, f"_get_{flag}_sdp_enabled")() for flag in _FLAGS}
        return {**found, _FAST_PATH: torch.backends.mha.get_fastpath_enabled()}

    def set_mode(self, mode: MathMode) -> dict[str, Any]:
        """Leave the plain form alone."""
        plain = dict.fromkeys(_FLAGS, False) | {"math": True, _FAST_PATH: False}
        self.restore(plain)
        return plain

    def restore(self, saved: Mapping[str, Any]) -> None:
        """Write the switches."""
        for flag in _FLAGS:
            getattr(torch._C, f"_set_sdp_use_{flag}")(saved[flag])
        torch.backends.mha.set_fastpath_enabled(saved[_FAST_PATH])

    describe = save


CONTROLLER = AttentionController()
