"""The current values of other libraries' switches, and conflicts between them and environment variables."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lowprec.policy import environment
from lowprec.policy.controllers import loaded_controllers
from lowprec.policy.protocol import attempt


@dataclass(frozen=True, slots=True)
class SwitchRow:
    """One switch of a loaded library."""

    library: str
    switch: str | None  # None if the library's switches cannot be read
    value: str | bool | int | None  # current value in this thread
    tier: str  # scope: ``"process"`` or ``"thread"``
    problem: str | None = None  # the reason if it cannot be read


def switch_rows() -> tuple[SwitchRow, ...]:
    """Return every switch of every loaded library with a controller, without changing any."""
    rows: list[SwitchRow] = []
    for controller in loaded_controllers():
        name, tier = controller.name, str(controller.tier)
        found, error = attempt(controller, controller.describe)
        if found is None:
            rows.append(SwitchRow(name, None, None, tier, error))
            continue
        for switch, value in found.items():
            shown = value if value is None or isinstance(value, str | bool | int) else str(value)
            rows.append(SwitchRow(name, switch, shown, tier))
    return tuple(rows)


_TORCH_CUDA = "backends.cuda.matmul.fp32_precision"
_CUPY = "_core.compute_type('f')"
_CUPY_TF32 = 7  # CuPy's COMPUTE_TYPE_TF32

#: Switches that set cuBLAS's precision, with the values that allow TF32, which NVIDIA_TF32_OVERRIDE=0 disables.
_TF32_VALUES: dict[tuple[str, str], tuple[Any, ...]] = {
    ("torch", _TORCH_CUDA): ("tf32",),
    ("jax", "default_matmul_precision"): ("tensorfloat32", "high"),
    ("tensorflow", "config.experimental.tensor_float_32_execution"): (True,),
    ("cupy", _CUPY): (_CUPY_TF32,),
    ("paddle", "base.core.cublas_switch"): (True,),
}


def _is_on(text: str) -> bool:
    return bool(int(text)) if text.isdecimal() else text.lower() in {"true", "on", "yes"}


#: By switch: the variable with its initial value, and a function that returns whether text and current value agree.
_INITIAL_VALUES: dict[tuple[str, str], tuple[str, Callable[[str, Any], bool]]] = {
    ("torch", _TORCH_CUDA): (
        "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
        lambda text, value: value == "tf32" or not _is_on(text),
    ),
    ("jax", "default_matmul_precision"): (
        "JAX_DEFAULT_MATMUL_PRECISION",
        lambda text, value: str(value).lower() == text.lower(),
    ),
    ("cupy", _CUPY): ("CUPY_TF32", lambda text, value: (value == _CUPY_TF32) is _is_on(text)),
}


def disagreements(rows: tuple[SwitchRow, ...]) -> tuple[str, ...]:
    """Return a sentence for each variable that conflicts with one of these switches."""
    texts = {variable.name: variable.text() for variable in environment.VARIABLES}
    values = {(row.library, row.switch): row.value for row in rows}
    sentences = []
    for (library, switch), tf32 in _TF32_VALUES.items():
        value = values.get((library, switch))
        if texts["NVIDIA_TF32_OVERRIDE"] == "0" and value in tf32:
            sentences.append(f"NVIDIA_TF32_OVERRIDE=0 keeps cuBLAS from TF32, while {library}'s {switch} is {value!r}")
    for key, (variable, agrees) in _INITIAL_VALUES.items():
        text = texts[variable]
        if text is not None and key in values and not agrees(text, values[key]):
            sentences.append(f"{variable}={text}, while {key[0]}'s {key[1]} is {values[key]!r} now")
    # MLX reads its variable once and has no other switch.
    if sys.modules.get("mlx.core") is not None and texts["MLX_ENABLE_TF32"] != "0":
        sentences.append(
            "mlx is loaded and may use TF32, which fp32_guard cannot change: start the process with MLX_ENABLE_TF32=0"
        )
    return tuple(sentences)
