"""TensorFlow's switch."""

from __future__ import annotations

from types import MappingProxyType

from lowprec.modes import MathMode
from lowprec.policy.frameworks.switch import SwitchController


class TensorFlowController(SwitchController):
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
    values = MappingProxyType(
        {MathMode.FP32: False, MathMode.FP32_PEDANTIC: False, MathMode.TF32: True}
    )
    modes = tuple(values)
