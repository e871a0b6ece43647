"""What other libraries' switches are now, and where an environment variable says something else."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from lowprec.policy import environment
from lowprec.policy.controllers import loaded_controllers
from lowprec.policy.interrupts import attempt, in_words


@dataclass(frozen=True, slots=True)
class SwitchRow:
    """One switch of a loaded library."""

    library: str
    switch: str | None  # None where the library's switches cannot be read
    value: str | bool | int | None  # as it is now, in this thread
    tier: str  # ``"process"`` or ``"thread"``: how far it reaches
    problem: str | None = None  # why it cannot be read


def switch_rows() -> tuple[SwitchRow, ...]:
    """Return every switch of every loaded library that has a controller. Nothing is changed for it."""
    rows: list[SwitchRow] = []
    for controller in loaded_controllers():
        name, tier = controller.name, str(controller.tier)
        found, error = attempt(controller, controller.describe)
        if found is None:
            rows.append(SwitchRow(name, None, None, tier, in_words(error)))
            continue
        rows += [SwitchRow(name, switch, _plain(value), tier) for switch, value in found.items()]
    return tuple(rows)


def _plain(value: Any) -> str | bool | int | None:
    return value if value is None or isinstance(value, str | bool | int) else str(value)


_TORCH_CUDA = "backends.cuda.matmul.fp32_precision"
_TENSORFLOW = "config.experimental.tensor_float_32_execution"
_CUPY = "_core.compute_type('f')"
_NVIDIA = "NVIDIA_TF32_OVERRIDE"


def _is_on(text: str) -> bool:
    return bool(int(text)) if text.isdecimal() else text.lower() in {"true", "on", "yes"}


def _allows(*of_tf32: Any) -> Callable[[str, Any], bool]:
    """Return whether a value goes with this text of NVIDIA's variable; 0 turns TF32 off, others mean nothing."""
    return lambda text, value: text != "0" or value not in of_tf32


#: Variable, library, switch, and whether the variable's text goes with the switch's value.
_EXPECTATIONS: tuple[tuple[str, str, str, Callable[[str, Any], bool]], ...] = (
    (_NVIDIA, "torch", _TORCH_CUDA, _allows("tf32")),
    (_NVIDIA, "jax", "default_matmul_precision", _allows("tensorfloat32", "high")),
    (_NVIDIA, "tensorflow", _TENSORFLOW, _allows(True)),
    (_NVIDIA, "cupy", _CUPY, _allows(7)),  # CuPy's COMPUTE_TYPE_TF32
    (_NVIDIA, "paddle", "base.core.cublas_switch", _allows(True)),
    (
        "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "torch", _TORCH_CUDA,
        lambda text, value: value == "tf32" or not _is_on(text),
    ),
    (
        "JAX_DEFAULT_MATMUL_PRECISION", "jax", "default_matmul_precision",
        lambda text, value: str(value).lower() == text.lower(),
    ),
    ("CUPY_TF32", "cupy", _CUPY, lambda text, value: (value == 7) is _is_on(text)),
)  # fmt: skip


def disagreements(rows: tuple[SwitchRow, ...] | None = None) -> tuple[str, ...]:
    """Return a sentence for each variable that a switch among ``rows`` (by default all) does not agree with."""
    values = {
        (row.library, row.switch): row.value for row in (switch_rows() if rows is None else rows)
    }
    texts = {variable.name: variable.text() for variable in environment.VARIABLES}
    said = []
    for variable, library, switch, agree in _EXPECTATIONS:
        text, place = texts[variable], (library, switch)
        if text is None or place not in values or agree(text, values[place]):
            continue
        what = f"{library}'s {switch} is {values[place]!r}"
        if variable == _NVIDIA:
            said.append(f"{_NVIDIA}=0 keeps cuBLAS from TF32, while {what}")
        else:
            said.append(f"{variable}={text}, while {what} now")
    return (*said, *_mlx(texts))


def _mlx(texts: Mapping[str, str | None]) -> tuple[str, ...]:
    # MLX reads its variable once and has no switch, so there is nothing that a guard could set.
    if sys.modules.get("mlx.core") is None or texts["MLX_ENABLE_TF32"] == "0":
        return ()
    return (
        "mlx is loaded and may use TF32, which fp32_guard cannot change: start the process with MLX_ENABLE_TF32=0",
    )
