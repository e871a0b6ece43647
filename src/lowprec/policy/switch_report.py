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


# -- variables against switches -------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Expectation:
    """What a variable with a certain text says that a switch holds."""

    variable: str
    library: str
    switch: str
    #: From the variable's text to the values that agree with it; None if the text says nothing about the switch.
    agreeing: Callable[[str], Callable[[Any], bool] | None]


def _no_tf32(*values: Any) -> Callable[[str], Callable[[Any], bool] | None]:
    return lambda text: (lambda value: value not in values) if text == "0" else None


def _asks_for_tf32(text: str) -> Callable[[Any], bool] | None:
    return (lambda value: value == "tf32") if _number(text) else None


def _same_word(text: str) -> Callable[[Any], bool]:
    return lambda value: str(value).lower() == text.lower()


def _cupy_tf32(text: str) -> Callable[[Any], bool]:
    wanted = bool(_number(text))
    return lambda value: (value == 7) is wanted  # CuPy's COMPUTE_TYPE_TF32


def _number(text: str) -> int:
    try:
        return int(text)
    except ValueError:
        return int(text.lower() in {"true", "on", "yes"})


_TORCH_CUDA = "backends.cuda.matmul.fp32_precision"
_TENSORFLOW = "config.experimental.tensor_float_32_execution"
_NVIDIA = "NVIDIA_TF32_OVERRIDE"

_EXPECTATIONS = (
    _Expectation(_NVIDIA, "torch", _TORCH_CUDA, _no_tf32("tf32")),
    _Expectation(_NVIDIA, "jax", "default_matmul_precision", _no_tf32("tensorfloat32", "high")),
    _Expectation(_NVIDIA, "tensorflow", _TENSORFLOW, _no_tf32(True)),
    _Expectation(_NVIDIA, "cupy", "_core.compute_type('f')", _no_tf32(7)),
    _Expectation(_NVIDIA, "paddle", "base.core.cublas_switch", _no_tf32(True)),
    _Expectation("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "torch", _TORCH_CUDA, _asks_for_tf32),
    _Expectation("JAX_DEFAULT_MATMUL_PRECISION", "jax", "default_matmul_precision", _same_word),
    _Expectation("CUPY_TF32", "cupy", "_core.compute_type('f')", _cupy_tf32),
)


def disagreements(rows: tuple[SwitchRow, ...] | None = None) -> tuple[str, ...]:
    """Return a sentence for each variable that a switch among ``rows`` (by default all) does not agree with."""
    values = {
        (row.library, row.switch): row.value for row in (switch_rows() if rows is None else rows)
    }
    texts = {variable.name: variable.text() for variable in environment.VARIABLES}
    said = [_disagreement(expected, texts, values) for expected in _EXPECTATIONS]
    return (*(sentence for sentence in said if sentence is not None), *_mlx(texts))


def _disagreement(
    expected: _Expectation,
    texts: Mapping[str, str | None],
    values: Mapping[tuple[str, str | None], Any],
) -> str | None:
    text = texts[expected.variable]
    place = (expected.library, expected.switch)
    if text is None or place not in values:
        return None
    agrees = expected.agreeing(text)
    if agrees is None or agrees(values[place]):
        return None
    what = f"{expected.library}'s {expected.switch} is {values[place]!r}"
    if expected.variable == _NVIDIA:
        return f"{_NVIDIA}=0 keeps cuBLAS from TF32, while {what}"
    return f"{expected.variable}={text}, while {what} now"


def _mlx(texts: Mapping[str, str | None]) -> tuple[str, ...]:
    # MLX reads its variable once and has no switch, so there is nothing that a guard could set.
    if sys.modules.get("mlx.core") is None or texts["MLX_ENABLE_TF32"] == "0":
        return ()
    return (
        "mlx is loaded and may use TF32, which fp32_guard cannot change: start the process with MLX_ENABLE_TF32=0",
    )
