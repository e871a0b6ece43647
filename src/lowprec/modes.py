"""Math modes: what becomes of float32 operands, as one table.

A mode acts on single precision only (float32 and complex64), as cuBLAS's and JAX's do. The order of the table is
the order of the documentation; ``planning.bounds`` gives the guaranteed error of each.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, unique

from lowprec import formats
from lowprec.errors import ModeError, quoted
from lowprec.formats import NumberFormat

__all__ = [
    "ALIASES",
    "TABLE",
    "MathMode",
    "ModeRow",
    "ModeSource",
    "ResolvedMode",
    "available_modes",
    "mode_names",
    "parse_mode",
    "row",
]


@unique
class MathMode(str, Enum):
    """Names of the math modes; each is a string, so ``"tf32"`` and ``MathMode.TF32`` are interchangeable."""

    FP32 = "fp32"
    FP32_PEDANTIC = "fp32_pedantic"
    TF32 = "tf32"
    BF16 = "bf16"
    FP16 = "fp16"
    BF16X3 = "bf16x3"
    BF16X6 = "bf16x6"
    BF16X9 = "bf16x9"
    TF32X3 = "tf32x3"
    FP16X3 = "fp16x3"
    FP16X4 = "fp16x4"
    FP16X3_UNSCALED = "fp16x3_unscaled"
    FP16X4_UNSCALED = "fp16x4_unscaled"
    FP16_KARATSUBA = "fp16_karatsuba"
    FP32_EMULATED = "fp32_emulated"

    def __str__(self) -> str:
        return self.value

    # str.__hash__ without Enum's detour: modes are looked up on every call.
    __hash__ = str.__hash__


@dataclass(frozen=True, slots=True)
class ModeRow:
    """One row of the mode table.

    Parameters
    ----------
    mode : MathMode
    operand_format : NumberFormat
        The format to which each part of an operand is rounded.
    parts : int
        In how many parts each operand is split.
    products : int
        How many matrix products are formed and summed.
    jax_preset : str or None
        Name of the equal preset of ``jax.lax.DotAlgorithmPreset``.
    compute_type : str
        The cuBLASLt compute type (without the ``CUBLAS_`` prefix) and, if not float32, the data it gets.
    inputs : str
        What the operands become, in words.
    uses_tf32 : bool
        Whether ``NVIDIA_TF32_OVERRIDE=0`` turns this mode into ``fp32``.
    available : bool
        Whether this version runs the mode.
    """

    mode: MathMode
    operand_format: NumberFormat
    parts: int
    products: int
    jax_preset: str | None
    compute_type: str
    inputs: str
    uses_tf32: bool = False
    available: bool = True


_FLOAT16_DATA = "COMPUTE_32F on float16 data"
_BFLOAT16_DATA = "COMPUTE_32F on bfloat16 data"
_M = MathMode


def _recovery(
    mode: MathMode, fmt: NumberFormat, parts: int, products: int, preset: str | None, inputs: str
) -> ModeRow:
    compute = {
        "tf32": "COMPUTE_32F_FAST_TF32",
        "bfloat16": _BFLOAT16_DATA,
        "float16": _FLOAT16_DATA,
    }[fmt.name]
    uses_tf32 = fmt is formats.TF32
    return ModeRow(mode, fmt, parts, products, preset, compute, inputs, uses_tf32, available=False)


#: Every mode, in the order of the documentation.
TABLE: tuple[ModeRow, ...] = (
    ModeRow(_M.FP32, formats.FLOAT32, 1, 1, "F32_F32_F32", "COMPUTE_32F", "float32"),
    ModeRow(_M.FP32_PEDANTIC, formats.FLOAT32, 1, 1, None, "COMPUTE_32F_PEDANTIC", "float32"),
    ModeRow(
        _M.TF32, formats.TF32, 1, 1, "TF32_TF32_F32", "COMPUTE_32F_FAST_TF32",
        "TF32 (8-bit exponent, 10-bit mantissa)", uses_tf32=True,
    ),
    ModeRow(_M.BF16, formats.BFLOAT16, 1, 1, "BF16_BF16_F32", _BFLOAT16_DATA, "bfloat16"),
    ModeRow(_M.FP16, formats.FLOAT16, 1, 1, "F16_F16_F32", _FLOAT16_DATA, "float16"),
    _recovery(_M.BF16X3, formats.BFLOAT16, 2, 3, "BF16_BF16_F32_X3", "2 bfloat16 parts"),
    _recovery(_M.BF16X6, formats.BFLOAT16, 3, 6, "BF16_BF16_F32_X6", "3 bfloat16 parts"),
    _recovery(_M.BF16X9, formats.BFLOAT16, 3, 9, "BF16_BF16_F32_X9", "3 bfloat16 parts"),
    _recovery(_M.TF32X3, formats.TF32, 2, 3, "TF32_TF32_F32_X3", "2 TF32 parts"),
    _recovery(_M.FP16X3, formats.FLOAT16, 2, 3, None, "2 float16 parts, the low one scaled by 2^11"),
    _recovery(_M.FP16X4, formats.FLOAT16, 2, 4, None, "2 float16 parts, the low one scaled by 2^11"),
    _recovery(_M.FP16X3_UNSCALED, formats.FLOAT16, 2, 3, None, "2 float16 parts"),
    _recovery(_M.FP16X4_UNSCALED, formats.FLOAT16, 2, 4, None, "2 float16 parts"),
    _recovery(_M.FP16_KARATSUBA, formats.FLOAT16, 2, 3, None, "2 float16 parts (scaled Karatsuba)"),
    ModeRow(
        _M.FP32_EMULATED, formats.FLOAT32, 1, 1, None, "-",
        "the fastest scheme whose bound is no worse than fp32's", available=False,
    ),
)  # fmt: skip

_ROWS = {r.mode: r for r in TABLE}


@unique
class ModeSource(str, Enum):
    """Who decided which mode is in force, in order of precedence; each value is the words that ``plan`` prints."""

    GUARD = "fp32_guard"
    GUARD_VARIABLE = "LOWPREC_FP32_GUARD"
    FORCED = "LOWPREC_FORCE_MATH_MODE"
    ARGUMENT = "math_mode= argument"
    RTOL = "rtol= argument"
    CONTEXT = "with math_mode(...)"
    PROCESS = "set_math_mode(...)"
    ENVIRONMENT = "LOWPREC_MATH_MODE"
    DEFAULT = "default"

    def __str__(self) -> str:
        return self.value

    __hash__ = str.__hash__


@dataclass(frozen=True, slots=True)
class ResolvedMode:
    """Which mode is in force, and why.

    Parameters
    ----------
    mode : MathMode
        The mode in force.
    source : ModeSource
        Who decided.
    requested : MathMode or None
        What the decider asked for, where it differs from ``mode`` (``NVIDIA_TF32_OVERRIDE=0`` turned ``tf32`` into
        ``fp32``), or what an argument asked for that was overruled.
    reasons : tuple of str
        The story in full sentences, for people.
    """

    mode: MathMode
    source: ModeSource
    requested: MathMode | None = None
    reasons: tuple[str, ...] = ()


#: Other accepted names. ``highest``, ``high`` and ``medium`` mean what they mean in PyTorch; JAX uses
#: ``highest`` and ``high`` alike, and its preset names are accepted as they stand.
ALIASES: dict[str, MathMode] = {
    "float32": MathMode.FP32,
    "highest": MathMode.FP32,
    "ieee": MathMode.FP32,
    "pedantic": MathMode.FP32_PEDANTIC,
    "high": MathMode.TF32,
    "tensorfloat32": MathMode.TF32,
    "medium": MathMode.BF16,
    "bfloat16": MathMode.BF16,
    "float16": MathMode.FP16,
    **{r.jax_preset.lower(): r.mode for r in TABLE if r.jax_preset},
}


def row(mode: MathMode) -> ModeRow:
    """Return the table's row of a mode."""
    return _ROWS[mode]


def available_modes() -> tuple[MathMode, ...]:
    """Return the modes that this version runs, in table order."""
    return tuple(r.mode for r in TABLE if r.available)


def mode_names() -> str:
    """Return the modes that this version runs as one phrase for messages."""
    return ", ".join(available_modes())


_BY_NAME: dict[str, MathMode] = {**{m.value: m for m in MathMode}, **ALIASES}


def parse_mode(name: str | MathMode, what: str = "math_mode") -> MathMode:
    """Return the mode of this name or alias (upper and lower case are the same).

    Parameters
    ----------
    name : str or MathMode
        For example ``"tf32"``, ``"highest"`` or ``"BF16_BF16_F32"``.
    what : str
        How to call the argument in an error message.

    Raises
    ------
    ModeError
        If there is no such mode, or this version cannot run it yet.

    Examples
    --------
    >>> parse_mode("high")
    <MathMode.TF32: 'tf32'>
    """
    found = None
    if isinstance(name, str):
        found = _BY_NAME.get(name) or _BY_NAME.get(name.strip().lower())
    if found is None:
        raise ModeError(f"{what} {quoted(name)} is not a math mode; choose one of: {mode_names()}")
    if not _ROWS[found].available:
        raise ModeError(
            f"{what} {str(name)!r}: the mode {found} is not available in this version; choose one of: {mode_names()}"
        )
    return found
