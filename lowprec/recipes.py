"""Recipes: how a quantising mode rounds the operands of a product and of its two gradients.

A format is a row of ``FORMATS``. Its rule states the elements, the scales and the rounding of one operand.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Any, ClassVar, Literal, NamedTuple, TypeAlias

from lowprec import formats
from lowprec.errors import ModeError, did_you_mean, quoted
from lowprec.formats import BlockFormat, NumberFormat

ScaleRule: TypeAlias = Literal["floor", "rceil"]
Rounding: TypeAlias = Literal["nearest", "stochastic", "stochastic_gradients"]
Pass: TypeAlias = Literal["forward", "grad_input", "grad_weight"]

#: The bit of a stream where the step begins.
STEP_BIT = 23


class Rule(NamedTuple):
    """How one operand is rounded along the inner axis k: plain numbers and short strings."""

    elements: str  # key of `formats.ELEMENTS`
    scaling: str  # "tensor", "vector" (along k), "block"
    block: tuple[int, int] = (1, 0)  # vectors and elements along k with a common scale
    block_scale: str = ""  # "floor" and "rceil": powers of two; "e4m3" with a scale of the tensor; "float32"
    rounding: str = "nearest"
    seed: int = 0  # key of the random numbers and of the Hadamard transform's signs
    stream: int = 0  # step, layer, pass and operand: part of the generator's counter
    hadamard: int = 0  # length of the transform along k before rounding; 0 for none

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
        if self.scaling == "tensor":
            text += ", one float32 scale"
        elif self.scaling == "vector":
            text += ", a float32 scale per vector along k"
        elif vectors == 1:
            text += f" in blocks of {length} along k with {_SCALES[self.block_scale]}"
        else:
            text += f" in blocks of {vectors} x {length} with {_SCALES[self.block_scale]}"
        if self.hadamard:
            text += f", after a Hadamard transform of {self.hadamard}"
        if self.is_stochastic:
            text += ", rounded stochastically"
        return text


_CODES = {
    ("e2m1", "floor"): "mxfp4",
    ("e2m1", "rceil"): "mxfp4",
    ("e2m1", "e4m3"): "nvfp4",
    ("int8", "float32"): "int8_blocks",
}
_SCALES = {
    "floor": "powers of two as scales",
    "rceil": "powers of two, rounded up, as scales",
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
#: Formats that are modes: E5M2 is for gradients alone.
MODES = tuple(_MODES)

_PAIRS = ("forward", "grad_input", "grad_weight")
_LEGAL: dict[str, tuple[Any, ...]] = {
    "scale_rule": ("floor", "rceil"),
    "rounding": ("nearest", "stochastic", "stochastic_gradients"),
    "hadamard": (0, 16),
    "weight_block": (None, (16, 16)),
    "product": _PAIRS,
    "knows_weight": (False, True),
}


@dataclass(frozen=True, repr=False)
class Recipe:
    """A quantising mode in detail; accepted wherever the name of a mode is.

    The three products of a linear layer are the forward one, ``input @ weight``; the gradient of the input, ``gradient
    @ weight.T``; and the gradient of the weight, ``input.T @ gradient``. Each rounds both of its operands along the
    axis that it sums over. In a product of two arrays ``b`` has the part of the weight.

    Parameters
    ----------
    forward : str or pair of str
        Format of both operands, or those of ``a`` and ``b``: ``"fp8"``, ``"fp8_rows"``, ``"fp8_blocks"``, ``"mxfp8"``,
        ``"mxfp4"``, ``"nvfp4"``, ``"int8"``, ``"int8_blocks"``, or one of the first four with E5M2 elements
        (``"fp8_e5m2"``).
    grad_input, grad_weight : str or pair of str, optional
        Formats of the products of the backward pass; by default those of ``forward``.
    scale_rule : {"floor", "rceil"}
        Scales of the MX formats: rounded down as in the OCP specification, which clips the largest numbers of a block,
        or up as by cuBLAS and TransformerEngine.
    rounding : {"nearest", "stochastic", "stochastic_gradients"}
        Stochastic rounding of all operands, or of gradients alone.
    seed : int, optional
        Seed from 0 to 2^64 - 1. Required for stochastic rounding and for the Hadamard transform.
    hadamard : {0, 16}
        Length of the Hadamard transform, with random signs, of both operands of the gradient of the weight.
    weight_block : tuple of int, optional
        ``(16, 16)``: blocks of weights in NVFP4, so that the forward and the backward product see the same numbers.
        Weights are known in layers (``lowprec.torch.Linear``) and in intercepted models only.
    step, layer : int
        Part of the counter of the random numbers; see :meth:`at`.
    product : {"forward", "grad_input", "grad_weight"}
        The product that the recipe applies to.
    knows_weight : bool
        Whether ``b`` of the forward product is a weight.

    Raises
    ------
    ModeError
        A value is not legal, or ``seed`` is missing.

    Examples
    --------
    >>> import numpy as np
    >>> import lowprec
    >>> recipe = lowprec.Recipe("mxfp8", scale_rule="rceil")
    >>> recipe, str(recipe)
    (Recipe('mxfp8', scale_rule='rceil'), 'mxfp8(scale_rule=rceil)')
    >>> float(lowprec.matmul(np.full((1, 32), 500, np.float32), np.ones((32, 1), np.float32), math_mode=recipe)[0, 0])
    16384.0
    """

    forward: str | tuple[str, str]
    grad_input: str | tuple[str, str] | None = None
    grad_weight: str | tuple[str, str] | None = None
    scale_rule: ScaleRule = "floor"
    rounding: Rounding = "nearest"
    seed: int | None = None
    hadamard: int = 0
    weight_block: tuple[int, int] | None = None
    step: int = 0
    layer: int = 0
    product: Pass = "forward"
    knows_weight: bool = False

    #: The recipe as text, which is accepted wherever the name of a mode is.
    value: ClassVar[str]

    def __post_init__(self) -> None:
        for name in _PAIRS:
            object.__setattr__(self, name, _checked_pair(name, getattr(self, name)))
        for name, legal in _LEGAL.items():
            value = getattr(self, name)
            if value not in legal:
                choices = ", ".join(repr(x) for x in legal)
                raise ModeError(f"{name} of a recipe must be one of {choices}, got {quoted(value)}")
        for name, bits in (("seed", 64), ("step", 40), ("layer", 20)):
            object.__setattr__(self, name, _checked_integer(name, getattr(self, name), bits))
        if self.seed is None and (self.rounding != "nearest" or self.hadamard):
            measure = "a Hadamard transform" if self.hadamard else "stochastic rounding"
            raise ModeError(f"a recipe with {measure} needs a seed; pass seed=")
        value = _text(self.forward)
        given = ",".join(f"{name}={_text(x)}" for name, x in self._given())
        if given:
            value = f"{value}({given})"
        # An attribute, because PyTorch's compiler reads it.
        object.__setattr__(self, "value", value)

    @classmethod
    def fp8_training(cls) -> Recipe:
        """Return the recipe of FP8 with E5M2 for gradients, one scale a tensor.

        P. Micikevicius et al., "FP8 formats for deep learning", arXiv 2209.05433.
        """
        return cls("fp8", grad_input=("fp8_e5m2", "fp8"), grad_weight=("fp8", "fp8_e5m2"))

    @classmethod
    def mxfp8_training(cls) -> Recipe:
        """Return the recipe of MXFP8 with E4M3 in all products and scales rounded up.

        A. Mishra et al., "Recipes for pre-training LLMs with MXFP8", arXiv 2506.08027.
        """
        return cls("mxfp8", scale_rule="rceil")

    @classmethod
    def nvfp4_training(cls, *, seed: int) -> Recipe:
        """Return the recipe of NVFP4 with its three measures.

        Weights have blocks of 16 x 16, gradients are rounded stochastically, and the operands of the gradient of the
        weight are transformed before rounding.

        NVIDIA, "Pretraining large language models with NVFP4", arXiv 2509.25149.
        """
        return cls("nvfp4", rounding="stochastic_gradients", seed=seed, hadamard=16, weight_block=(16, 16))

    def at(self, step: int | None = None, layer: int | None = None) -> Recipe:
        """Return the recipe for a step and a layer, each with its random numbers."""
        if step is None:
            step = self.step
        if layer is None:
            layer = self.layer
        return replace(self, step=step, layer=layer)

    def of(self, product: Pass) -> Recipe:
        """Return the recipe of one of the three products."""
        if product == self.product:
            return self
        return replace(self, product=product)

    @property
    def base(self) -> str:
        """Name of the mode of ``a`` in the forward product."""
        name, _ = _pair(self.forward)
        return str(name).removesuffix("_e5m2")

    @property
    def draw(self) -> int:
        """Step, layer and product as one number of 62 bits."""
        return self.step << (STEP_BIT - 1) | self.layer << 2 | _PAIRS.index(self.product)

    @property
    def rules(self) -> tuple[Rule, Rule]:
        """The rules of both operands of this product."""
        return _rules(self)

    @property
    def plannable(self) -> Recipe:
        """The recipe without step and layer, on which no plan depends."""
        if self.step or self.layer:
            return replace(self, step=0, layer=0)
        return self

    def _given(self) -> list[tuple[str, Any]]:
        _, *optional = fields(self)
        named = [(f.name, getattr(self, f.name), f.default) for f in optional]
        return [(name, value) for name, value, default in named if value != default]

    def __repr__(self) -> str:
        given = [f"{name}={x!r}" for name, x in self._given()]
        return f"Recipe({', '.join([repr(self.forward), *given])})"

    def __str__(self) -> str:
        return self.value

    def __format__(self, spec: str) -> str:
        return format(self.value, spec)


def _text(value: Any) -> str:
    if not isinstance(value, tuple):
        return str(value)
    mark = "x" if isinstance(value[0], int) else "/"
    return mark.join(map(str, value))


@cache
def parse_recipe(text: str) -> Recipe:
    """Return the recipe of a text such as ``"fp8(grad_input=fp8_e5m2/fp8)"``; raise ModeError if it is none."""
    name, _, rest = "".join(text.split()).partition("(")
    given: dict[str, Any] = {}
    for item in filter(None, rest.removesuffix(")").split(",")):
        key, _, value = item.partition("=")
        if key not in _READERS or not value or key in given:
            raise ModeError(f"{quoted(item)} in the recipe {quoted(text)} is not one of: {', '.join(_READERS)}")
        try:
            given[key] = _READERS[key](value)
        except (ValueError, KeyError):
            raise ModeError(f"{quoted(item)} in the recipe {quoted(text)} has no legal value") from None
    return Recipe(_names(name), **given)


def _names(text: str) -> Any:
    names = tuple(text.split("/"))
    if len(names) == 1:
        return text
    return names


def _pair(names: Any) -> Any:
    if isinstance(names, str):
        return names, names
    return names


_READERS: dict[str, Any] = {
    **dict.fromkeys(("grad_input", "grad_weight"), _names),
    **dict.fromkeys(("scale_rule", "rounding", "product"), str),
    **dict.fromkeys(("seed", "hadamard", "step", "layer"), int),
    "weight_block": lambda text: tuple(int(x) for x in text.split("x")),
    "knows_weight": {"True": True, "False": False}.__getitem__,
}


def _checked_pair(name: str, value: Any) -> Any:
    """Return a format, or a pair of two different ones; raise ModeError for others."""
    if value is None and name != "forward":
        return None
    pair = _pair(value)
    if not isinstance(pair, tuple | list) or len(pair) != 2:
        raise ModeError(f"{name} of a recipe is a format or a pair of formats, got {quoted(value)}")
    for each in pair:
        if not isinstance(each, str) or each not in FORMATS:
            raise ModeError(
                f"{name} of a recipe: {quoted(each)} is not a format; choose from: {', '.join(FORMATS)}"
                f"{did_you_mean(each, FORMATS)}"
            )
    a, b = map(str, pair)
    families = {x.removesuffix("_e5m2") for x in (a, b)}
    if len(families) > 1 and not families.isdisjoint(_ALONE):
        raise ModeError(f"{name} of a recipe: {a} and {b} cannot be multiplied; {' and '.join(_ALONE)} need one format")
    if a == b:
        return a
    return a, b


#: Formats whose products are with the same format alone.
_ALONE = ("int8", "fp8_blocks")


def _checked_integer(name: str, value: Any, bits: int) -> int | None:
    if value is None and name == "seed":
        return None
    try:
        number = operator.index(value)
    except TypeError:
        number = -1
    if isinstance(value, bool) or not 0 <= number < 1 << bits:
        raise ModeError(f"{name} of a recipe must be an integer from 0 to 2^{bits} - 1, got {quoted(value)}")
    return number


#: Operands of each product that are gradients, and those that are the weight.
_GRADIENTS = {"forward": (False, False), "grad_input": (True, False), "grad_weight": (False, True)}
_WEIGHTS = {"forward": (False, True), "grad_input": (False, True), "grad_weight": (False, False)}


@cache
def _rules(recipe: Recipe) -> tuple[Rule, Rule]:
    a, b = _pair(getattr(recipe, recipe.product) or recipe.forward)
    return _refined(FORMATS[a][0], recipe, 0), _refined(FORMATS[b][1], recipe, 1)


def _refined(rule: Rule, recipe: Recipe, operand: int) -> Rule:
    """Return the rule of a format with the settings of a recipe for operand 0 or 1."""
    seed = recipe.seed or 0
    is_gradient = _GRADIENTS[recipe.product][operand]
    is_weight = recipe.knows_weight and _WEIGHTS[recipe.product][operand]
    if rule.block_scale == "floor":
        rule = rule._replace(block_scale=recipe.scale_rule)
    if is_weight and recipe.weight_block and rule.block_scale == "e4m3":
        rule = rule._replace(block=recipe.weight_block)
    if recipe.rounding == "stochastic" or (recipe.rounding == "stochastic_gradients" and is_gradient):
        rule = rule._replace(rounding="stochastic", seed=seed)
    if recipe.product == "grad_weight" and recipe.hadamard:
        rule = rule._replace(hadamard=recipe.hadamard, seed=seed)
    return rule
