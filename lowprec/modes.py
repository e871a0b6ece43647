"""Math modes: the rounding and splitting of float32 operands, as one table.

A mode acts on float32 and complex64, as cuBLAS's and JAX's do; quantising modes also on float16 and bfloat16, but not
on complex64, and ``fp64_emulated`` on float64 and complex128 alone. The order of the table is the order of the
documentation; ``planning.bounds`` gives the guaranteed error of each.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import unique
from typing import TYPE_CHECKING, Literal, TypeAlias

from lowprec import formats, recipes
from lowprec.errors import ModeError, did_you_mean, quoted
from lowprec.formats import ComputeType, DType, NumberFormat
from lowprec.recipes import Recipe
from lowprec.rounding_rules import NAMED, Format
from lowprec.util.plain import StrEnum

if TYPE_CHECKING:
    from lowprec.architectures import Emulated


@unique
class MathMode(StrEnum):
    """Names of the math modes; ``MathMode.TF32`` equals the string ``"tf32"``.

    >>> MathMode("tf32") is MathMode.TF32, str(MathMode.TF32)
    (True, 'tf32')
    """

    FP32 = "fp32"
    FP32_PEDANTIC = "fp32_pedantic"
    FP64 = "fp64"
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
    FP64_EMULATED = "fp64_emulated"
    FP8 = "fp8"
    FP8_ROWS = "fp8_rows"
    FP8_BLOCKS = "fp8_blocks"
    MXFP8 = "mxfp8"
    MXFP4 = "mxfp4"
    NVFP4 = "nvfp4"
    INT8 = "int8"
    INT8_BLOCKS = "int8_blocks"


#: A mode with its details.
Mode: TypeAlias = MathMode | Recipe

#: Indices of a part of ``a`` and a part of ``b`` that are multiplied; 0 is the leading part.
Pair = tuple[int, int]


def _pairs(parts: int, up_to: int) -> tuple[Pair, ...]:
    """Return the pairs of parts whose indices sum to at most ``up_to``, the smallest products first."""
    pairs = ((i, order - i) for order in range(up_to, -1, -1) for i in range(order + 1))
    return tuple((i, j) for i, j in pairs if i < parts and j < parts)


@dataclass(frozen=True, slots=True)
class ModeRow:
    """One row of the mode table."""

    mode: MathMode
    operand_format: NumberFormat  # format to which each part of an operand is rounded
    inputs: str  # description of the rounded operands, for the documentation
    jax_preset: str | None = None  # equivalent jax.lax.DotAlgorithmPreset
    compute_type: ComputeType = ComputeType.COMPUTE_32F  # for cuBLASLt
    data: DType | None = None  # element type that a GPU multiplies; None: that of the operands
    parts: int = 1  # number of parts of each operand
    pairs: tuple[Pair, ...] = ((0, 0),)  # products of parts, in the order of their summation
    part_exponent: int = 0  # part i is multiplied by 2^(i * part_exponent)
    factors: tuple[float, ...] = ()  # factors of the products; empty: derived from part_exponent
    sums_parts: bool = False  # the sum of the parts, rounded, is an additional part
    # by which cuBLASLt emulates the mode in one call, on some GPUs
    emulation: ComputeType | None = None
    acts_on: frozenset[DType] = frozenset({DType.FLOAT32, DType.COMPLEX64})  # types of the operands
    quantizes: bool = False  # both operands, to codes with scales along the inner axis

    @property
    def uses_tf32(self) -> bool:
        """Whether ``NVIDIA_TF32_OVERRIDE=0`` turns this mode into ``fp32``."""
        return self.operand_format is formats.TF32

    @property
    def widens(self) -> bool:
        """Whether operands are widened to float64, and the product is rounded once."""
        return self.operand_format is formats.FLOAT64

    def acts(self, dtype: DType) -> bool:
        return dtype in self.acts_on

    def factor(self, pair: Pair) -> float:
        if self.factors:
            return self.factors[self.pairs.index(pair)]
        return float(2.0 ** (-self.part_exponent * sum(pair)))

    def accumulator(self, dtype: DType) -> DType:
        """Return the element type of the sums and the epilogue, for operands of this type."""
        wide = DType.COMPLEX128 if dtype.is_complex else DType.FLOAT64
        return wide if self.widens and dtype.is_single_precision else dtype.accumulator


#: cuBLASLt's compute type for each operand format, and the element type of its data unless float32.
_ON_A_GPU: dict[NumberFormat, tuple[ComputeType, DType | None]] = {
    formats.FLOAT64: (ComputeType.COMPUTE_64F, DType.FLOAT64),
    formats.FLOAT32: (ComputeType.COMPUTE_32F, None),
    formats.TF32: (ComputeType.COMPUTE_32F_FAST_TF32, None),
    formats.BFLOAT16: (ComputeType.COMPUTE_32F, DType.BFLOAT16),
    formats.FLOAT16: (ComputeType.COMPUTE_32F, DType.FLOAT16),
}

#: The low one of two float16 parts is multiplied by 2^11, the precision of float16, so that it does not underflow.
_LOW_EXPONENT = 11
_LOW = 2.0**-_LOW_EXPONENT


def _row(
    mode: MathMode,
    fmt: NumberFormat,
    inputs: str,
    preset: str | None,
    pairs: tuple[Pair, ...] = ((0, 0),),
    part_exponent: int = 0,
) -> ModeRow:
    parts = 1 + max(max(pair) for pair in pairs)
    compute_type, data = _ON_A_GPU[fmt]
    return ModeRow(mode, fmt, inputs, preset, compute_type, data, parts, pairs, part_exponent)


_M = MathMode
_TWO_FLOAT16 = "2 float16 parts"
_SCALED = f"{_TWO_FLOAT16}, the low one scaled by 2^11"

#: Every mode, in the order of the documentation.
TABLE: tuple[ModeRow, ...] = (
    _row(_M.FP32, formats.FLOAT32, "float32", "F32_F32_F32"),
    ModeRow(
        _M.FP32_PEDANTIC, formats.FLOAT32, "float32", compute_type=ComputeType.COMPUTE_32F_PEDANTIC
    ),
    _row(_M.FP64, formats.FLOAT64, "float64 (widened, rounded once at the end)", "F64_F64_F64"),
    _row(_M.TF32, formats.TF32, "TF32 (8-bit exponent, 10-bit mantissa)", "TF32_TF32_F32"),
    _row(_M.BF16, formats.BFLOAT16, "bfloat16", "BF16_BF16_F32"),
    _row(_M.FP16, formats.FLOAT16, "float16", "F16_F16_F32"),
    _row(_M.BF16X3, formats.BFLOAT16, "2 bfloat16 parts", "BF16_BF16_F32_X3", _pairs(2, 1)),
    _row(_M.BF16X6, formats.BFLOAT16, "3 bfloat16 parts", "BF16_BF16_F32_X6", _pairs(3, 2)),
    replace(
        _row(_M.BF16X9, formats.BFLOAT16, "3 bfloat16 parts", "BF16_BF16_F32_X9", _pairs(3, 4)),
        emulation=ComputeType.COMPUTE_32F_EMULATED_16BFX9,
    ),
    _row(_M.TF32X3, formats.TF32, "2 TF32 parts", "TF32_TF32_F32_X3", _pairs(2, 1)),
    _row(_M.FP16X3, formats.FLOAT16, _SCALED, None, _pairs(2, 1), _LOW_EXPONENT),
    _row(_M.FP16X4, formats.FLOAT16, _SCALED, None, _pairs(2, 2), _LOW_EXPONENT),
    _row(_M.FP16X3_UNSCALED, formats.FLOAT16, _TWO_FLOAT16, None, _pairs(2, 1)),
    _row(_M.FP16X4_UNSCALED, formats.FLOAT16, _TWO_FLOAT16, None, _pairs(2, 2)),
    # With parts h and l, x = h + 2^-11 l: the factors follow from h l' + l h' = (h + l) (h' + l') - h h' - l l'.
    ModeRow(
        _M.FP16_KARATSUBA,
        formats.FLOAT16,
        f"{_TWO_FLOAT16} and their sum (scaled Karatsuba)",
        data=DType.FLOAT16,
        parts=2,
        pairs=((1, 1), (2, 2), (0, 0)),
        part_exponent=_LOW_EXPONENT,
        factors=(_LOW * (_LOW - 1), _LOW, 1 - _LOW),
        sums_parts=True,
    ),
    # Planning replaces it by another mode.
    ModeRow(
        _M.FP32_EMULATED,
        formats.FLOAT32,
        "those of the fastest scheme whose bound is no worse than fp32's",
    ),
    # On single precision it is ``fp32``.
    ModeRow(
        _M.FP64_EMULATED,
        formats.FLOAT32,
        "float32 (float64 operands: integers with one exponent per row or column)",
        emulation=ComputeType.COMPUTE_64F_EMULATED_FIXEDPOINT,
        acts_on=frozenset({DType.FLOAT64, DType.COMPLEX128}),
    ),
    *(
        ModeRow(
            MathMode(name),
            rules[0].number_format or formats.INT8,
            f"{rules[0]}"
            if rules[0] == rules[1]
            else f"{rules[0]} (b: {'{} x {}'.format(*rules[1].block)})",
            compute_type=ComputeType.COMPUTE_32F
            if rules[0].number_format
            else ComputeType.COMPUTE_32I,
            data=DType.BFLOAT16 if rules[0].number_format else DType.INT8,
            acts_on=frozenset({DType.FLOAT32, DType.BFLOAT16, DType.FLOAT16}),
            quantizes=True,
        )
        for name, rules in recipes.FORMATS.items()
        if name in recipes.MODES
    ),
)

_ROWS = {r.mode: r for r in TABLE}


@unique
class ModeSource(StrEnum):
    """Source of a resolved mode, in order of precedence; ``plan`` prints the value."""

    GUARD = "fp32_guard"
    GUARD_VARIABLE = "LOWPREC_FP32_GUARD"
    FORCED = "LOWPREC_FORCE_MATH_MODE"
    ARGUMENT = "math_mode= argument"
    RTOL = "rtol= argument"
    CONTEXT = "with math_mode(...)"
    PROCESS = "set_math_mode(...)"
    ENVIRONMENT = "LOWPREC_MATH_MODE"
    DEFAULT = "default"


@dataclass(frozen=True, slots=True)
class ResolvedMode:
    """A resolved mode and its source."""

    mode: Mode
    source: ModeSource
    requested: Mode | None = None  # the requested mode if the guard or a variable replaced it
    reasons: tuple[str, ...] = ()  # each decision as a sentence
    emulates: Emulated | None = None  # GPU generation whose tensor cores the CPU emulates


#: Other accepted names: ``highest``, ``high`` and ``medium`` as in PyTorch and JAX, JAX's precisions and presets. JAX's
#: ``default`` depends on the device; on a CPU it is full FP32.
ALIASES: dict[str, MathMode] = {
    "float32": MathMode.FP32,
    "default": MathMode.FP32,
    "highest": MathMode.FP32,
    "ieee": MathMode.FP32,
    "float64": MathMode.FP64,
    "pedantic": MathMode.FP32_PEDANTIC,
    "high": MathMode.TF32,
    "tensorfloat32": MathMode.TF32,
    "medium": MathMode.BF16,
    "bfloat16": MathMode.BF16,
    "fastest": MathMode.BF16,
    "bfloat16_3x": MathMode.BF16X3,
    "bfloat16_6x": MathMode.BF16X6,
    "float16": MathMode.FP16,
    **{r.jax_preset.lower(): r.mode for r in TABLE if r.jax_preset},
}


def row(mode: Mode) -> ModeRow:
    return _ROWS[mode if type(mode) is MathMode else MathMode(mode.base)]  # type: ignore[union-attr]


def rules_of(mode: Mode) -> tuple[recipes.Rule | None, recipes.Rule | None]:
    """Return how a mode that quantises rounds ``a`` and ``b``, None for one that is not rounded."""
    if isinstance(mode, MathMode):
        return recipes.FORMATS[mode]
    return mode.rules


def of_pass(mode: Mode, product: recipes.Pass) -> Mode:
    """Return the mode of one of the three products of a layer."""
    if isinstance(mode, MathMode):
        if mode is not MathMode.FP8_BLOCKS:
            return mode
        mode = Recipe(mode.value)
    found = mode.in_pass(product)
    return found if isinstance(found, Recipe) else MathMode(found)


def available_modes() -> tuple[MathMode, ...]:
    return tuple(r.mode for r in TABLE)


def mode_names() -> str:
    return ", ".join(available_modes())


_BY_NAME: dict[str, MathMode] = {**{m.value: m for m in MathMode}, **ALIASES}


def parse_mode(name: str | Mode | Format, what: str = "math_mode") -> Mode:
    """Return the mode of this name or alias, in any case, or the recipe of a text; ``what`` begins a ModeError."""
    found: Mode | None = None
    if isinstance(name, Format):
        name = Recipe(str(name))
    if isinstance(name, str):
        found = _BY_NAME.get(name) or _BY_NAME.get(name.strip().lower())
        if found is None and (not {"(", "/", ":"}.isdisjoint(name) or name in NAMED):
            name = recipes.parse_recipe(name)
    if isinstance(name, Recipe):  # a recipe without details is its mode
        found = _BY_NAME.get(str(name)) or name
    if found is None:
        if callable(name):  # a model or a function
            kind = type(name).__name__
            raise ModeError(
                f'{what} is a {kind}, not a math mode; call it in a block: with intercept("bf16"): ...'
            )
        similar = did_you_mean(name, _BY_NAME)
        raise ModeError(
            f"{what} {quoted(name)} is not a math mode; choose one of: {mode_names()}{similar}"
        )
    return found


BoundName: TypeAlias = Literal["guaranteed", "probable"]
# generated: names for type checkers
ModeName: TypeAlias = Literal[
    "fp32", "fp32_pedantic", "fp64", "tf32", "bf16", "fp16", "bf16x3", "bf16x6", "bf16x9", "tf32x3", "fp16x3", "fp16x4",
    "fp16x3_unscaled", "fp16x4_unscaled", "fp16_karatsuba", "fp32_emulated", "fp64_emulated", "fp8", "fp8_rows",
    "fp8_blocks", "mxfp8", "mxfp4", "nvfp4", "int8", "int8_blocks", "float32", "default", "highest", "ieee", "float64",
    "pedantic", "high", "tensorfloat32", "medium", "bfloat16", "fastest", "bfloat16_3x", "bfloat16_6x", "float16",
    "F32_F32_F32", "F64_F64_F64", "TF32_TF32_F32", "BF16_BF16_F32", "F16_F16_F32", "BF16_BF16_F32_X3",
    "BF16_BF16_F32_X6", "BF16_BF16_F32_X9", "TF32_TF32_F32_X3",
]  # fmt: skip
ActivationName: TypeAlias = Literal["relu", "gelu"]
ArchitectureName: TypeAlias = Literal["volta", "ampere", "ada", "hopper", "blackwell"]
# end of generated

#: A mode as an argument.
ModeLike: TypeAlias = ModeName | Mode | Format
