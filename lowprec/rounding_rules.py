"""The elements, the scales and the rounding of one operand. A format is a row of ``FORMATS``."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from math import floor, log2
from typing import Any, NamedTuple

from lowprec import formats
from lowprec.errors import DTypeError, ModeError, quoted
from lowprec.formats import BFLOAT16, BlockFormat, NumberFormat


class Rule(NamedTuple):
    """How one operand is rounded along the inner axis k: plain numbers and short strings."""

    elements: str  # name for `formats.number_format`
    scaling: str  # "tensor", "vector" (along k), "block"
    block: tuple[int, int] = (1, 0)  # vectors and elements along k with a common scale
    # a `ScaleRule`: powers of two; a key of `SCALES` with a further float32 scale; "float32"
    block_scale: str = ""
    rounding: str = "nearest"
    seed: int = 0  # key of the random numbers and of the Hadamard transform's signs
    stream: int = 0  # step, layer, pass and operand: part of the generator's counter
    hadamard: int = 0  # length of the transform along k before rounding; 0 for none
    power_scales: bool = False  # whether float32 scales are rounded up to powers of two
    outer: str = (
        "tensor"  # whose further scale it is that blocks with 8-bit scales have: "tensor" or "rows"
    )
    # magnitudes that the largest number of a block becomes, of which the best is chosen; () for the largest element
    peaks: tuple[float, ...] = ()
    across: bool = (
        False  # rounded along the other axis, as in the forward product, and multiplied in FP32
    )

    @property
    def number_format(self) -> NumberFormat | None:
        """The format of the elements; None for integers."""
        if self.elements == "int8":
            return None
        return formats.number_format(self.elements)

    @property
    def codes(self) -> str:
        """Name of the format of integers in blocks to which the rule rounds; empty if it is none."""
        if not self.has_kernels:
            return ""
        return _CODES.get((self.elements, self.block_scale, self.block), "")

    @property
    def in_bytes(self) -> BlockFormat | None:
        """The format of codes in bytes, with the scales of blocks; None without scales of 8 bits."""
        if not self.block_scale or self.block_scale == "float32":
            return None
        scales = self.scales or formats.FLOAT8_E8M0FNU
        elements = formats.number_format(self.elements)
        return BlockFormat(
            self.elements, elements, 8, self.block[1], scales, False, looked_up=self.elements
        )

    @property
    def has_kernels(self) -> bool:
        """Whether kernels have the elements and the scales."""
        return self.elements in formats.ELEMENTS and self.is_plain

    @property
    def is_plain(self) -> bool:
        """Whether kernels have the scales along k."""
        has_scales = self.outer == "tensor" and not self.peaks and self.block_scale != "e5m3"
        return has_scales and not self.across

    @property
    def scales(self) -> NumberFormat | None:
        """The format of 8-bit scales that are not powers of two."""
        return SCALES.get(self.block_scale)

    @property
    def largest_scale(self) -> float:
        """The largest 8-bit scale; with several peaks the last power of two that each of these leaves in range."""
        assert self.scales is not None
        largest = self.scales.largest
        if not self.peaks:
            return largest
        return float(2.0 ** floor(log2(largest * min(self.peaks) / max(self.peaks))))

    @property
    def is_wide(self) -> bool:
        """Whether a number times its 8-bit scale has more bits than bfloat16."""
        bits = self.number_format.precision if self.number_format else 8
        return bits + (self.scales.precision if self.scales else 0) > BFLOAT16.precision

    @property
    def is_float8(self) -> bool:
        """Whether the elements are FP8 with one scale a tensor or vector, whose products are one sum over k."""
        return self.elements in ("e4m3", "e5m2") and not self.block_scale

    @property
    def is_stochastic(self) -> bool:
        return self.rounding == "stochastic"

    def scaled_by(self, scale_rule: str) -> Rule:
        """Return the rule with the scales of a recipe."""
        if self.block_scale == "floor":
            return self._replace(block_scale=scale_rule)
        if scale_rule == "rceil" and self.elements in ("e4m3", "e5m2"):
            return self._replace(power_scales=True)
        return self

    def drawn(self, draw: int, operand: int) -> Rule:
        """Return the rule with the stream of random numbers of an operand, 0 or 1, of a product (`Recipe.draw`)."""
        if not self.is_stochastic:
            return self
        if self.across:  # the numbers of the forward product
            draw -= draw % 4
        return self._replace(stream=2 * draw + operand)

    @property
    def has_tensor_scale(self) -> bool:
        return self.scaling == "tensor" or (self.scales is not None and self.outer == "tensor")

    @property
    def has_row_scales(self) -> bool:
        """Whether each vector along k has a float32 scale."""
        return self.scaling == "vector" or (self.scales is not None and self.outer == "rows")

    @property
    def marks_elements(self) -> bool:
        """Whether a number that is not finite becomes NaN alone, and not its whole block or vector."""
        has_wide_scales = self.scaling != "block" or self.block_scale == "float32"
        return self.elements != "int8" and has_wide_scales

    def __str__(self) -> str:
        """Return the format as a phrase."""
        text = self.elements.upper().replace("INT", "int")
        vectors, length = self.block
        scales = _SCALES.get(self.block_scale, "")
        if self.scaling == "tensor":
            text += ", one float32 scale"
        elif self.scaling == "vector":
            text += ", a float32 scale per vector along k"
        elif vectors == 1:
            text += f" in blocks of {length} along k with {scales}"
        else:
            text += f" in blocks of {vectors} x {length} with {scales}"
        if self.scales and self.outer == "rows":
            text = text.replace("one float32 scale", "a float32 scale per vector along k")
        if self.peaks:
            text += (
                f", the better of {' and '.join(f'{x:g}' for x in self.peaks)} as largest magnitude"
            )
        if self.power_scales:
            text += ", rounded up to powers of two"
        if self.hadamard:
            text += f", after a Hadamard transform of {self.hadamard}"
        if self.is_stochastic:
            text += ", rounded stochastically"
        if self.across:
            text += ", as in the forward product"
        return text


_CODES = {
    ("e2m1", "floor", (1, 32)): "mxfp4",
    ("e2m1", "rceil", (1, 32)): "mxfp4",
    ("e2m1", "even", (1, 32)): "mxfp4",
    ("e2m1", "e4m3", (1, 16)): "nvfp4",
    ("int8", "float32", (1, 32)): "int8_blocks",
}
_SCALES = {
    "floor": "powers of two as scales",
    "rceil": "powers of two, rounded up, as scales",
    "even": "powers of two as scales, of the rounded largest numbers",
    "e4m3": "E4M3 scales and one float32 scale",
    "e5m3": "E5M3 scales and one float32 scale",
    "float32": "float32 scales",
}


#: Formats of the 8-bit scales of blocks.
SCALES = {"e4m3": formats.FLOAT8_E4M3FN, "e5m3": formats.FLOAT8_UE5M3}
_BLOCK_SCALES = {
    formats.FLOAT8_E8M0FNU: "floor",
    formats.FLOAT8_E4M3FN: "e4m3",
    formats.FLOAT32: "float32",
}


def _rules_of(row: BlockFormat, elements: str) -> tuple[Rule, Rule]:
    """Return the rules of ``a`` and ``b`` for a format, with elements of this name."""
    if row.scales is None:
        rule = Rule(elements, "tensor")
    elif row.block == formats.WHOLE:
        rule = Rule(elements, "vector")
    else:
        rule = Rule(elements, "block", (1, row.block), _BLOCK_SCALES[row.scales])
    if row.square:
        return rule, rule._replace(block=(row.block, row.block))
    return rule, rule


_MODES = {row.name: row for row in formats.NARROW if row.is_mode}
_ELEMENTS = {fmt: name for name, fmt in formats.ELEMENTS.items()}
#: Rules of ``a`` and ``b`` by name; each mode that quantises is one of these.
FORMATS = {name: _rules_of(row, _ELEMENTS[row.elements]) for name, row in _MODES.items()}
FORMATS |= {
    f"{name}_e5m2": _rules_of(row, "e5m2")
    for name, row in _MODES.items()
    if row.elements is formats.FLOAT8_E4M3FN
}


_SCALE_NAMES = {"e8m0": "floor", "e4m3": "e4m3", "e5m3": "e5m3", "float32": "float32"}
#: Lengths of the blocks of a `Format`.
_LENGTHS = ("tensor", "rows", 16, 32, 64, 128)


@dataclass(frozen=True)
class Format:
    """A format of 2 to 8 bits with scales, accepted wherever the name of a mode is.

    Products of a format without compiled kernels are rounded and multiplied by NumPy in FP32, which the plan shows.

    Parameters
    ----------
    exponent, mantissa : int
        Bits of the exponent, from 1, and of the significand after the point.
    specials : {"none", "nan", "ieee", "fnuz", "p3109"}, optional
        Codes that are no numbers: none; all bits one is NaN; the largest exponent is Inf and NaN; -0 is NaN, with a
        bias of one more, and, in those of IEEE P3109, all bits one is Inf. By default those of OCP's E4M3 (``"nan"``)
        and E5M2 (``"ieee"``), none for others. Rounding saturates: numbers beyond the largest one become that.
    bias : int, optional
        Of the exponent, by default 2^(exponent - 1) - 1.
    block : {"tensor", "rows", 16, 32, 64, 128}
        Numbers with a common scale: all, a vector along the axis that is summed over, or as many along it.
    scale : {"float32", "e8m0", "e4m3", "e5m3"}
        Type of the scales of blocks: E8M0 is a power of two, by the ``scale_rule`` of a recipe; with E4M3 and
        unsigned E5M3 there is a further float32 scale.
    outer : {"tensor", "rows"}
        Whose further scale this is: with that of a row, the row is rounded independently of the others.
    peaks : tuple of float
        Magnitudes of elements, such as ``(6, 4)`` of E2M1: each block is scaled to the first of these as its largest,
        and to the others, and has the scale with the least sum of squared errors (J. Cook and others, "Four over six",
        arXiv 2512.02010). By default the largest element.

    Raises
    ------
    ModeError
        The format is not possible.

    Examples
    --------
    >>> import numpy as np
    >>> import lowprec
    >>> mxfp6 = lowprec.Format(3, 2, block=32, scale="e8m0")
    >>> str(mxfp6), mxfp6 == lowprec.Format.parse("e3m2:block=32:scale=e8m0")
    ('e3m2:block=32:scale=e8m0', True)
    >>> lowprec.matmul(np.full((1, 32), 27, np.float32), np.ones((32, 1), np.float32), math_mode=mxfp6)
    array([[896.]], dtype=float32)
    """

    exponent: int
    mantissa: int
    specials: str | None = None
    bias: int | None = None
    block: int | str = "tensor"
    scale: str = "float32"
    outer: str = "tensor"
    peaks: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        default = formats.DEFAULT_SPECIALS.get((self.exponent, self.mantissa), "none")
        if self.specials is None:
            object.__setattr__(self, "specials", default)
        for name in ("exponent", "mantissa", "bias"):
            value = getattr(self, name)
            is_integer = type(value) is int and (value >= 0 or name == "bias")
            if not is_integer and (name, value) != ("bias", None):
                raise ModeError(f"{name} of a format is an integer, got {quoted(value)}")
        if self.bias == formats.standard_bias(self.exponent, self.specials):
            object.__setattr__(self, "bias", None)
        try:
            elements = formats.number_format(self.elements)
        except DTypeError as error:
            raise ModeError(f"{self!r}: {error}") from None
        if type(self.block) not in (int, str) or self.block not in _LENGTHS:
            raise ModeError(
                f"block of a format must be one of {', '.join(map(repr, _LENGTHS))}, got {quoted(self.block)}"
            )
        if not isinstance(self.scale, str) or self.scale not in _SCALE_NAMES:
            raise ModeError(
                f"scale of a format must be one of {', '.join(_SCALE_NAMES)}, got {quoted(self.scale)}"
            )
        if self.scale != "float32" and isinstance(self.block, str):
            raise ModeError(
                f"scales of a tensor or of rows are float32, got {self.scale}; pass block=32"
            )
        self._check_scales(elements)

    def _check_scales(self, elements: NumberFormat) -> None:
        """Raise ModeError for further scales and peaks that the elements or the scales of blocks exclude."""
        if self.outer != "tensor" and (self.outer != "rows" or self.scale not in SCALES):
            raise ModeError(
                f"outer of a format must be 'tensor', or 'rows' with scales in e4m3 or e5m3, got {quoted(self.outer)}"
            )
        fitting: list[float] = []
        with suppress(TypeError, ValueError):
            object.__setattr__(self, "peaks", tuple(map(float, self.peaks)))
            for x in self.peaks:
                if elements.holds(x) and 0 < x <= self.peaks[0] <= elements.largest:
                    fitting.append(x)
        if tuple(fitting) != self.peaks or (self.peaks and self.scale not in SCALES):
            raise ModeError(
                f"peaks of a format are numbers of its elements up to {elements.largest:g}, the largest first, "
                f"with scales in e4m3 or e5m3; got {quoted(self.peaks)}"
            )

    @property
    def elements(self) -> str:
        """The name of the elements, as ``"e3m2"``."""
        name = f"e{self.exponent}m{self.mantissa}"
        if self.specials != formats.DEFAULT_SPECIALS.get((self.exponent, self.mantissa), "none"):
            name += str(self.specials)
        if self.bias is not None:
            name += f"b{self.bias}"
        return name

    @property
    def rules(self) -> tuple[Rule, Rule]:
        """The rules of ``a`` and ``b``."""
        if self.block == "tensor":
            rule = Rule(self.elements, "tensor")
        elif self.block == "rows":
            rule = Rule(self.elements, "vector")
        else:
            rule = Rule(self.elements, "block", (1, int(self.block)), _SCALE_NAMES[self.scale])
        rule = rule._replace(outer=self.outer, peaks=self.peaks)
        return rule, rule

    @classmethod
    def parse(cls, text: str) -> Format:
        """Return the format of a text; raise ModeError if it is none."""
        name, *options = str(text).split(":")
        found = formats._NAME.fullmatch(name)
        given: dict[str, Any] = dict(option.partition("=")[::2] for option in options)
        names = {"block", "scale", "outer", "peaks"}
        if found is None or not given.keys() <= names or len(given) < len(options):
            raise ModeError(
                f"{quoted(text)} is not a format, such as 'e3m2' or 'e3m2:block=32:scale=e8m0'"
            )
        if given.get("block", "").isdecimal():
            given["block"] = int(given["block"])
        if "peaks" in given:
            try:
                given["peaks"] = tuple(map(float, given["peaks"].split("x")))
            except ValueError:
                raise ModeError(
                    f"peaks of the format {quoted(text)} are not numbers, such as 6x4"
                ) from None
        bias = None if found[4] is None else int(found[4])
        return cls(int(found[1]), int(found[2]), found[3], bias, **given)

    def __str__(self) -> str:
        text = f"{self.elements}:block={self.block}"
        if self.scale != "float32":
            text += f":scale={self.scale}"
        if self.outer != "tensor":
            text += f":outer={self.outer}"
        if self.peaks:
            numbers = (str(x).removesuffix(".0") for x in self.peaks)
            text += f":peaks={'x'.join(numbers)}"
        return text


#: Named formats, which have no row in the table of modes.
NAMED = {
    "mxfp6": Format(3, 2, block=32, scale="e8m0"),
    "mxfp6_e2m3": Format(2, 3, block=32, scale="e8m0"),
    "fp8_fnuz": Format(4, 3, "fnuz"),
    "fp8_fnuz_e5m2": Format(5, 2, "fnuz"),
    "fp6_rows": Format(3, 2, block="rows"),
    "nvfp4_4over6": Format(2, 1, block=16, scale="e4m3", peaks=(6, 4)),
    "nvfp4_rows": Format(2, 1, block=16, scale="e4m3", outer="rows"),
    "nvfp4_e5m3": Format(2, 1, block=16, scale="e5m3"),
    "p3109_k8p3": Format(5, 2, "p3109"),
    "p3109_k8p4": Format(4, 3, "p3109"),
    "p3109_k8p5": Format(3, 4, "p3109"),
    "p3109_k6p3": Format(3, 2, "p3109", block="rows"),
}
FORMATS |= {name: fmt.rules for name, fmt in NAMED.items()}


#: Formats of the scales of blocks by the ``scale`` of a `Format`.
_SCALE_FORMATS = {"e8m0": formats.FLOAT8_E8M0FNU, "float32": formats.FLOAT32, **SCALES}


@cache
def stored_format(fmt: Format) -> BlockFormat:
    """Return the format of stored arrays: that of kernels if these have it; otherwise codes in bytes."""
    rule, _ = fmt.rules
    names = [name for name in (*formats.BLOCK_FORMATS, *NAMED) if FORMATS.get(name) == fmt.rules]
    name = next(iter(names), str(fmt))
    if name in formats.BLOCK_FORMATS:
        return formats.BLOCK_FORMATS[name]
    bits = 8
    if isinstance(fmt.block, int) and fmt.exponent + fmt.mantissa == 3:
        bits = 4
    return BlockFormat(
        name,
        formats.number_format(fmt.elements),
        bits,
        fmt.block if isinstance(fmt.block, int) else formats.WHOLE,
        None if rule.scaling == "tensor" else _SCALE_FORMATS[fmt.scale],
        has_scale=rule.has_tensor_scale or fmt.outer == "rows",
        is_mode=False,
        looked_up=fmt.elements,
    )


def rules_of_format(name: str) -> tuple[Rule, Rule]:
    """Return the rules of ``a`` and ``b`` for a name or the text of a `Format`; raise ModeError for others."""
    return FORMATS.get(name) or Format.parse(name).rules
