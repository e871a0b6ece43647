"""Paddle's switches."""

from __future__ import annotations

from types import MappingProxyType

from lowprec.modes import MathMode
from lowprec.policy.frameworks.switch import SwitchController


class PaddleController(SwitchController):
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
    values = MappingProxyType(
        {MathMode.FP32: False, MathMode.FP32_PEDANTIC: False, MathMode.TF32: True}
    )
    modes = tuple(values)
