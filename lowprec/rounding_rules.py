"""The elements, the scales and the rounding of one operand. A format is a row of ``FORMATS``."""

from __future__ import annotations

from typing import NamedTuple

from lowprec import formats
from lowprec.formats import BlockFormat, NumberFormat


class Rule(NamedTuple):
    """How one operand is rounded along the inner axis k: plain numbers and short strings."""

    elements: str  # key of `formats.ELEMENTS`
    scaling: str  # "tensor", "vector" (along k), "block"
    block: tuple[int, int] = (1, 0)  # vectors and elements along k with a common scale
    block_scale: str = ""  # a `ScaleRule`: powers of two; "e4m3" with a scale of the tensor; "float32"
    rounding: str = "nearest"
    seed: int = 0  # key of the random numbers and of the Hadamard transform's signs
    stream: int = 0  # step, layer, pass and operand: part of the generator's counter
    hadamard: int = 0  # length of the transform along k before rounding; 0 for none
    power_scales: bool = False  # whether float32 scales are rounded up to powers of two

    @property
    def number_format(self) -> NumberFormat | None:
        """The format of the elements; None for integers."""
        if self.elements == "int8":
            return None
        return formats.ELEMENTS[self.elements]

    @property
    def codes(self) -> str:
        """Name of the format of integers in blocks to which the rule rounds; empty if it is none."""
        if self.block[0] > 1:
            return ""
        return _CODES.get((self.elements, self.block_scale), "")

    @property
    def is_stochastic(self) -> bool:
        return self.rounding == "stochastic"

    def drawn(self, draw: int, operand: int) -> Rule:
        """Return the rule with the stream of random numbers of an operand, 0 or 1, of a product (`Recipe.draw`)."""
        if not self.is_stochastic:
            return self
        return self._replace(stream=2 * draw + operand)

    @property
    def has_tensor_scale(self) -> bool:
        return self.scaling == "tensor" or self.block_scale == "e4m3"

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
        if self.power_scales:
            text += ", rounded up to powers of two"
        if self.hadamard:
            text += f", after a Hadamard transform of {self.hadamard}"
        if self.is_stochastic:
            text += ", rounded stochastically"
        return text


_CODES = {
    ("e2m1", "floor"): "mxfp4",
    ("e2m1", "rceil"): "mxfp4",
    ("e2m1", "even"): "mxfp4",
    ("e2m1", "e4m3"): "nvfp4",
    ("int8", "float32"): "int8_blocks",
}
_SCALES = {
    "floor": "powers of two as scales",
    "rceil": "powers of two, rounded up, as scales",
    "even": "powers of two as scales, of the rounded largest numbers",
    "e4m3": "E4M3 scales and one float32 scale",
    "float32": "float32 scales",
}


_BLOCK_SCALES = {formats.FLOAT8_E8M0FNU: "floor", formats.FLOAT8_E4M3FN: "e4m3", formats.FLOAT32: "float32"}


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
    f"{name}_e5m2": _rules_of(row, "e5m2") for name, row in _MODES.items() if row.elements is formats.FLOAT8_E4M3FN
}
