"""CuPy's switch."""

from __future__ import annotations

from collections.abc import Callable
from types import MappingProxyType
from typing import Any

from lowprec.modes import MathMode
from lowprec.policy.frameworks.switch import SwitchController


class CupyController(SwitchController):
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
    values = MappingProxyType({MathMode.FP32: 1, MathMode.FP32_PEDANTIC: 2, MathMode.TF32: 7})
    modes = tuple(values)

    def _read(self, getter: Callable[..., Any]) -> Any:
        return getter("f")

    def _write(self, setter: Callable[..., Any], value: Any) -> None:
        setter("f", value)
