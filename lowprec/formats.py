"""Element types and number formats, as data.

A *number format* is a set of numbers, given by precision and exponent range; an *element type* (dtype) is the storage
of an array's elements. TF32 is a format without an element type: its values are stored as float32.

Sources: IEEE 754-2019 (binary16/32/64); OCP 8-bit Floating Point Specification 1.0 (E4M3, E5M2); OCP Microscaling
Formats (MX) Specification 1.0 (E2M1, E8M0, mxfp8, mxfp4); NVIDIA's description of NVFP4; NVIDIA A100 whitepaper (TF32);
DLPack ``dlpack.h`` (type codes); CUDA ``library_types.h`` (``cudaDataType``).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from enum import Enum, unique
from functools import cache
from math import frexp, inf, nan, prod
from typing import Literal, NamedTuple, TypeAlias

from lowprec.errors import DTypeError, quoted


@unique
class ComputeType(Enum):
    """``cublasComputeType_t`` of cuBLASLt, with the library's values."""

    COMPUTE_32F = 68
    COMPUTE_32F_PEDANTIC = 69
    COMPUTE_64F = 70
    COMPUTE_32I = 72
    COMPUTE_32F_FAST_TF32 = 77
    COMPUTE_32F_EMULATED_16BFX9 = 78
    COMPUTE_64F_EMULATED_FIXEDPOINT = 79

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True, slots=True)
class NumberFormat:
    """A binary floating-point format."""

    name: str
    precision: int  # significand bits including the hidden one: 24 for float32
    emin: int  # exponent of the smallest normal number, 2^emin
    emax: int  # exponent of the largest number
    largest: float  # not derived, because E4M3 uses its top exponent for numbers
    has_infinity: bool = True  # overflow gives infinity; otherwise NaN

    @property
    def unit_roundoff(self) -> float:
        """Largest relative error of rounding to nearest in the normal range."""
        return 2.0**-self.precision

    @property
    def smallest_normal(self) -> float:
        return 2.0**self.emin

    @property
    def smallest_subnormal(self) -> float:
        return 2.0 ** (self.emin - self.precision + 1)

    def holds(self, x: float) -> bool:
        """Whether a number within the range has no more bits than those of the format."""
        exponent = max(frexp(x)[1] - 1, self.emin)
        return (x / 2.0 ** (exponent - self.precision + 1)).is_integer()


def _ieee(name: str, precision: int, emax: int) -> NumberFormat:
    largest = (2.0 - 2.0 ** (1 - precision)) * 2.0**emax
    return NumberFormat(name, precision, 1 - emax, emax, largest)


FLOAT64 = _ieee("float64", 53, 1023)
FLOAT32 = _ieee("float32", 24, 127)
TF32 = _ieee("tf32", 11, 127)
BFLOAT16 = _ieee("bfloat16", 8, 127)
FLOAT16 = _ieee("float16", 11, 15)
FLOAT8_E4M3FN = NumberFormat("float8_e4m3fn", 4, -6, 8, 448.0, has_infinity=False)
FLOAT8_E5M2 = _ieee("float8_e5m2", 3, 15)
# powers of two, unsigned
FLOAT8_E8M0FNU = NumberFormat("float8_e8m0fnu", 1, -127, 127, 2.0**127, has_infinity=False)
FLOAT4_E2M1FN = NumberFormat("float4_e2m1fn", 2, 0, 2, 6.0, has_infinity=False)  # without NaN
INT8 = NumberFormat("int8", 7, 0, 6, 127.0, has_infinity=False)  # with a scale: symmetric integers
#: int8 and int4: spacing 1, no exponent. Codes of int4 are from -8 to 7; those of int8 are symmetric.
INT8_CODES = NumberFormat("int8", 8, 7, 6, 127.0, has_infinity=False)
INT4_CODES = NumberFormat("int4", 4, 3, 3, 8.0, has_infinity=False)
UINT4_CODES = NumberFormat("uint4", 5, 4, 3, 15.0, has_infinity=False)

#: Unsigned, all bits one is NaN.
FLOAT8_UE5M3 = NumberFormat("float8_ue5m3", 4, -14, 16, 114688.0, has_infinity=False)

#: Formats of elements by their names in rules (`recipes.Rule`).
ELEMENTS = {"e4m3": FLOAT8_E4M3FN, "e5m2": FLOAT8_E5M2, "e2m1": FLOAT4_E2M1FN, "int8": INT8_CODES}


#: Special values of formats whose name has none.
DEFAULT_SPECIALS = {(4, 3): "nan", (5, 2): "ieee"}
_NAME = re.compile(r"e(\d)m(\d)(none|nan|ieee|fnuz|p3109)?(?:b(-?\d+))?")


@cache
def number_format(name: str) -> NumberFormat:
    """Return the format of elements of this name: ``"e3m2"``, with its special values and bias ``"e4m3fnuzb9"``.

    Special values: ``none``; ``nan``, all bits one; ``ieee``, Inf and NaN with the largest exponent; ``fnuz``, a NaN in
    the place of -0, and a bias of one more; ``p3109``, as ``fnuz``, and all bits one is Inf. E4M3 has ``nan`` by
    default and E5M2 ``ieee``, as in OCP's specification.
    """
    if name in ELEMENTS:
        return ELEMENTS[name]
    found = _NAME.fullmatch(name)
    if found is None:
        raise DTypeError(
            f"{quoted(name)} is not a format of elements, such as 'e3m2' or 'e4m3fnuz'"
        )
    exponent, mantissa = map(int, found.groups()[:2])
    specials = found[3] or DEFAULT_SPECIALS.get((exponent, mantissa), "none")
    bias = standard_bias(exponent, specials)
    if found[4]:
        bias = int(found[4])
    top = (1 << exponent) - 1 - bias
    significand = 2.0 - 2.0**-mantissa
    lacks_last = specials in ("nan", "p3109")  # whether all bits one is no number
    if lacks_last:
        significand -= 2.0**-mantissa
    if specials == "ieee" or (lacks_last and not mantissa):
        top -= 1
        significand = 2.0 - 2.0**-mantissa
    bits = exponent + mantissa + 1
    if not (2 <= bits <= 8 and exponent > 0 and -100 <= 1 - bias <= top <= 100):
        raise DTypeError(f"{name} is not a format of 2 to 8 bits with exponents from -100 to 100")
    return NumberFormat(
        name,
        mantissa + 1,
        1 - bias,
        top,
        significand * 2.0**top,
        has_infinity=specials in ("ieee", "p3109"),
    )


@cache
def numbers_of_codes(name: str) -> tuple[float, ...]:
    """Return the numbers of all codes of elements of this name; the highest bit is the sign."""
    found = _NAME.fullmatch(name)
    assert found is not None
    exponent, mantissa = map(int, found.groups()[:2])
    to = number_format(name)
    positive: list[float] = []
    for code in range(1 << (exponent + mantissa)):
        binade, fraction = divmod(code, 1 << mantissa)
        size = fraction / (1 << mantissa) + (binade > 0)
        positive.append(size * 2.0 ** (to.emin + max(binade, 1) - 1))
        if positive[-1] > to.largest:
            is_infinite = to.has_infinity and positive[-2] == to.largest
            positive[-1] = inf if is_infinite else nan
    negative = [-x for x in positive]
    if found[3] in ("fnuz", "p3109"):
        negative[0] = nan
    return (*positive, *negative)


def standard_bias(exponent: int, specials: str | None) -> int:
    """Return the bias of a format with so many bits of the exponent."""
    return (1 << exponent >> 1) - (specials not in ("fnuz", "p3109"))


@dataclass(frozen=True, slots=True)
class BlockFormat:
    """A format of quantised arrays and of modes: ``code * scale of its block * scale of the array``."""

    name: str
    elements: NumberFormat
    bits: int  # of an element's code
    block: int  # elements with a common scale; 0 without blocks, `WHOLE` for all along the axis
    scales: NumberFormat | None  # of the blocks
    has_scale: bool  # whether the array has a float32 scale; otherwise it is 1
    is_stored: bool = True  # whether :func:`lowprec.quantize` knows it
    is_mode: bool = True
    square: bool = False  # whether blocks of ``b`` have as many vectors as elements along the axis
    looked_up: str = ""  # name of the elements for `numbers_of_codes`, of formats without kernels
    #: If cuBLASLt multiplies two operands by their codes: name in ``cublasLtMatmulMatrixScale_t``, type of the codes.
    scale_mode: str = ""
    cuda_data_type: int = 0

    @property
    def has_float_scales(self) -> bool:
        """Whether the numbers with their scales need float32; otherwise bfloat16 represents them."""
        return self.scales == FLOAT32

    @property
    def widened(self) -> DType:
        """The element type that represents the numbers without the scale of the array."""
        if not self.block:
            return DType.FLOAT8_E4M3FN
        of_scales = self.scales.precision if self.scales else 0
        if self.elements.precision + of_scales > BFLOAT16.precision:
            return DType.FLOAT32
        return DType.BFLOAT16

    @property
    def reach(self) -> float:
        """The magnitude that the largest number of a block becomes before it is rounded: half of int4's range."""
        return 7.5 if self.elements == INT4_CODES else self.elements.largest

    @property
    def has_zeros(self) -> bool:
        """Whether each block has an integer that is subtracted from its codes."""
        return self.elements == UINT4_CODES

    def of_length(self, length: int) -> BlockFormat:
        """Return the format with the blocks of an axis of this length."""
        if self.block == WHOLE:
            return replace(self, block=max(length, 1))
        return self

    def stored_bytes(self, shape: tuple[int, ...], axis: int) -> int:
        """Return the bytes of codes and scales of an array with blocks along an axis."""
        if not (self.block and shape[axis]):
            return prod(shape) * self.bits // 8
        block = self.of_length(shape[axis]).block
        scale = (self.scales is not None) + 3 * self.has_float_scales + self.has_zeros
        return (
            prod(shape) // shape[axis] * -(-shape[axis] // block) * (block * self.bits // 8 + scale)
        )


FormatName: TypeAlias = Literal["fp8", "fp8_rows", "mxfp8", "mxfp4", "nvfp4", "int8", "int4"]

WHOLE = -1
#: Lengths of the blocks of int4.
GROUPS = (32, 64, 128)

#: All narrow formats; `recipes.FORMATS` has the rules of those that are modes.
NARROW = (
    BlockFormat("fp8", FLOAT8_E4M3FN, 8, 0, None, has_scale=True),
    BlockFormat("fp8_rows", FLOAT8_E4M3FN, 8, WHOLE, FLOAT32, has_scale=False),
    BlockFormat(
        "fp8_blocks", FLOAT8_E4M3FN, 8, 128, FLOAT32, has_scale=False, is_stored=False, square=True
    ),
    BlockFormat(
        "mxfp8",
        FLOAT8_E4M3FN,
        8,
        32,
        FLOAT8_E8M0FNU,
        has_scale=False,
        scale_mode="VEC32_UE8M0",
        cuda_data_type=28,
    ),
    BlockFormat("mxfp4", FLOAT4_E2M1FN, 4, 32, FLOAT8_E8M0FNU, has_scale=False),
    BlockFormat(
        "nvfp4",
        FLOAT4_E2M1FN,
        4,
        16,
        FLOAT8_E4M3FN,
        has_scale=True,
        scale_mode="VEC16_UE4M3",
        cuda_data_type=33,
    ),
    BlockFormat("int8", INT8_CODES, 8, WHOLE, FLOAT32, has_scale=False),
    BlockFormat("int8_blocks", INT8_CODES, 8, 32, FLOAT32, has_scale=False, is_stored=False),
    BlockFormat("int4", INT4_CODES, 4, 64, FLOAT32, has_scale=False, is_mode=False),
)

#: Formats of :func:`lowprec.quantize` by name.
BLOCK_FORMATS = {row.name: row for row in NARROW if row.is_stored}


class Blocks(NamedTuple):
    """The blocks of a quantised operand."""

    format: str  # key of `formats.BLOCK_FORMATS`
    axis: int  # along which they are, negative: -1 is the last
    row: BlockFormat


# Within class DType the names FLOAT32 and FLOAT64 are its members.
_SINGLE = FLOAT32
_DOUBLE = FLOAT64
_C = ComputeType
_FROM_8_BITS = ("bfloat16", "float16", "float32", "float8_e4m3fn", "float8_e5m2")


@unique
class DType(Enum):
    """Element types, by their names in NumPy, ml_dtypes and the frameworks.

    Each member is a row: ``(name, bits, DLPack code, cudaDataType, format, is_complex, compute type, accumulator,
    results)``. ``bits`` counts the whole element: 64 for complex64. The compute type is cuBLASLt's for operands of this
    type; the accumulator is the type of the sums and the epilogue; the results are the possible types of the product,
    the default first.
    """

    # fmt: off
    FLOAT64 = ("float64", 64, 2, 1, FLOAT64, False, _C.COMPUTE_64F, "float64", ("float64",))
    FLOAT32 = ("float32", 32, 2, 0, FLOAT32, False, _C.COMPUTE_32F, "float32", ("float32", "float16", "bfloat16"))
    FLOAT16 = ("float16", 16, 2, 2, FLOAT16, False, _C.COMPUTE_32F, "float32", ("float16", "float32"))
    BFLOAT16 = ("bfloat16", 16, 4, 14, BFLOAT16, False, _C.COMPUTE_32F, "float32", ("bfloat16", "float32"))
    COMPLEX64 = ("complex64", 64, 5, 4, _SINGLE, True, _C.COMPUTE_32F, "complex64", ("complex64",))
    COMPLEX128 = ("complex128", 128, 5, 5, _DOUBLE, True, _C.COMPUTE_64F, "complex128", ("complex128",))
    INT8 = ("int8", 8, 0, 3, None, False, _C.COMPUTE_32I, "int32", ("int32",))
    INT32 = ("int32", 32, 0, 10, None, False, _C.COMPUTE_32I, "int32", ())
    FLOAT8_E4M3FN = ("float8_e4m3fn", 8, 10, 28, FLOAT8_E4M3FN, False, _C.COMPUTE_32F, "float32", _FROM_8_BITS)
    FLOAT8_E5M2 = ("float8_e5m2", 8, 12, 29, FLOAT8_E5M2, False, _C.COMPUTE_32F, "float32", _FROM_8_BITS)
    # fmt: on

    def __init__(
        self,
        label: str,
        bits: int,
        dlpack_code: int,
        cuda_data_type: int,
        format: NumberFormat | None,  # noqa: A002 - the usual term
        is_complex: bool,
        compute_type: ComputeType,
        accumulator: str,
        results: tuple[str, ...],
    ) -> None:
        self.label = label
        self.bits = bits
        self.dlpack_code = dlpack_code
        self.cuda_data_type = cuda_data_type
        self.format = format
        self.is_complex = is_complex
        self.compute_type = compute_type
        self._accumulator = accumulator
        self._results = results

    @property
    def accumulator(self) -> DType:
        return _BY_NAME[self._accumulator]

    @property
    def results(self) -> tuple[DType, ...]:
        """Possible element types of a product, the default first; empty if this type cannot be an operand."""
        return tuple(_BY_NAME[name] for name in self._results)

    @property
    def is_single_precision(self) -> bool:
        """Whether this is float32 or complex64, on which all modes but ``fp64_emulated`` act."""
        return self.format is _SINGLE

    # Members are singletons; Enum's own hash is in Python and slower.
    __hash__ = object.__hash__

    @property
    def itemsize(self) -> int:
        return self.bits // 8

    @property
    def is_float8(self) -> bool:
        return self.bits == 8 and self.format is not None

    def __str__(self) -> str:
        return self.label


_BY_NAME = {d.label: d for d in DType}

#: Element types that an operand may have; int32 is a result only.
OPERAND_DTYPES = tuple(d for d in DType if d.results)

_BY_DLPACK = {(d.dlpack_code, d.bits): d for d in DType}


def operand_names() -> str:
    """Return the names of the operand element types as a list for messages."""
    return ", ".join(d.label for d in OPERAND_DTYPES)


def dtype_from_name(name: str) -> DType:
    """Return the element type of this name; raise :class:`DTypeError` if there is none."""
    try:
        return _BY_NAME[name]
    except KeyError:
        raise DTypeError(
            f"dtype {quoted(name)} is not supported; supported: {operand_names()}"
        ) from None


def dtype_from_dlpack(code: int, bits: int, lanes: int = 1) -> DType:
    """Return the element type of a DLPack ``(code, bits, lanes)`` triple; raise :class:`DTypeError` if unknown."""
    found = None
    if lanes == 1:
        found = _BY_DLPACK.get((code, bits))
    if found is None:
        raise DTypeError(
            f"DLPack type (code {code}, bits {bits}, lanes {lanes}) is not supported; supported: {operand_names()}"
        )
    return found


_WIDTH_ORDER = (DType.FLOAT16, DType.FLOAT32, DType.FLOAT64)
_TO_COMPLEX = {DType.FLOAT32: DType.COMPLEX64, DType.FLOAT64: DType.COMPLEX128}
_TO_REAL = {v: k for k, v in _TO_COMPLEX.items()}


def promote(a: DType, b: DType) -> DType:
    """Return the common element type of two operands.

    Floating-point operands are promoted to the wider type, bfloat16 with float16 to float32, as in the Array API and
    ml_dtypes; two different float8 types to bfloat16, which represents both. int8 with a float raises
    :class:`DTypeError`.
    """
    if a is b:
        return a
    if DType.INT8 in (a, b) or DType.INT32 in (a, b):
        raise DTypeError(f"operands of dtypes {a} and {b} have no common type; convert one of them")
    if a.is_float8:
        return DType.BFLOAT16 if b.is_float8 else b
    if b.is_float8:
        return a
    real = [_TO_REAL.get(d, d) for d in (a, b)]
    wide = [DType.FLOAT32 if d is DType.BFLOAT16 and real[0] is not real[1] else d for d in real]
    widest = max(wide, key=_WIDTH_ORDER.index)
    if a.is_complex or b.is_complex:
        widest = max(widest, DType.FLOAT32, key=_WIDTH_ORDER.index)
        return _TO_COMPLEX[widest]
    return widest
