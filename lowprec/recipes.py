"""Recipes: how a quantising mode rounds the operands of a product and of its two gradients."""

from __future__ import annotations

import operator
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Any, ClassVar, Literal, TypeAlias

from lowprec import formats
from lowprec.errors import ModeError, did_you_mean, quoted
from lowprec.rounding_rules import FORMATS, Format, Rule, rules_of_format
from lowprec.util.texts import split_at_commas, text_of

ScaleRule: TypeAlias = Literal["floor", "rceil", "even"]
Rounding: TypeAlias = Literal["nearest", "stochastic", "stochastic_gradients"]
Pass: TypeAlias = Literal["forward", "grad_input", "grad_weight"]

#: The bit of a stream where the step begins.
STEP_BIT = 23

#: Formats that are modes: E5M2 is for gradients alone.
MODES = tuple(row.name for row in formats.NARROW if row.is_mode)

_PAIRS = ("forward", "grad_input", "grad_weight")
_LEGAL: dict[str, tuple[Any, ...]] = {
    "backward_override": (None, "high_precision", "dequantized"),
    "scale_rule": ("floor", "rceil", "even"),
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
    forward : str, Format, or pair of these
        Format of both operands, or those of ``a`` and ``b``: ``"fp8"``, ``"fp8_rows"``, ``"fp8_blocks"``, ``"mxfp8"``,
        ``"mxfp4"``, ``"nvfp4"``, ``"int8"``, ``"int8_blocks"``, or one of the first four with E5M2 elements
        (``"fp8_e5m2"``); ``"mxfp6"``, ``"mxfp6_e2m3"``, ``"fp6_rows"``, ``"fp8_fnuz"``, ``"fp8_fnuz_e5m2"``, or a
        :class:`lowprec.Format`.
    grad_input, grad_weight : str, pair of str, or Recipe, optional
        Formats of the products of the backward pass; by default those of ``forward``. Also a mode that does not
        quantise: ``"fp32"``, ``"tf32"``, ``"bf16"``, ``"fp16"``, ``"bf16x3"`` or ``"bf16x6"``; or a recipe with the
        settings of this product.
    backward_override : {"high_precision", "dequantized"}, optional
        Products of the backward pass are in FP32 and do not round gradients, as in TransformerEngine. The input and
        the weight are the original ones, or as the forward product rounds them, along the axis that it sums over.
    scale_rule : {"floor", "rceil", "even"}
        Scales of the MX formats: rounded down as in the OCP specification, which clips the largest numbers of a block,
        up as by cuBLAS and TransformerEngine, or down from the largest number as it is rounded to the precision of the
        elements. ``"rceil"`` also rounds the float32 scales of ``"fp8"``, ``"fp8_rows"`` and ``"fp8_blocks"`` up to
        powers of two.
    rounding : {"nearest", "stochastic", "stochastic_gradients"}
        Stochastic rounding of all operands, or of gradients alone.
    seed : int, optional
        Seed from 0 to 2^64 - 1. Required for stochastic rounding and for the Hadamard transform.
    hadamard : {0, 16}
        Length of the Hadamard transform, with random signs, of both operands of the gradient of the weight.
    weight_block : tuple of int, optional
        ``(16, 16)``: blocks of weights in NVFP4, so that the forward and the backward product see the same numbers.
        Weights are known in layers (``lowprec.torch.Linear``) and in intercepted models only.
    fast_accum : tuple of str, optional
        Products, such as ``("forward",)``, whose FP8 sums over all of k are those of tensor cores in
        :class:`lowprec.emulate`, as with ``use_fast_accum=True`` of PyTorch. On Ada and Hopper others are added in FP32
        every 128 products, the default of libraries.
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
    grad_input: str | tuple[str, str] | Recipe | None = None
    grad_weight: str | tuple[str, str] | Recipe | None = None
    backward_override: Literal["high_precision", "dequantized"] | None = None
    scale_rule: ScaleRule = "floor"
    rounding: Rounding = "nearest"
    seed: int | None = None
    hadamard: int = 0
    weight_block: tuple[int, int] | None = None
    fast_accum: tuple[Pass, ...] = ()
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
        if not isinstance(self.fast_accum, tuple) or not {*self.fast_accum} <= {*_PAIRS}:
            raise ModeError(
                f"fast_accum of a recipe is a tuple of {', '.join(map(repr, _PAIRS))}, got {quoted(self.fast_accum)}"
            )
        for name, bits in (("seed", 64), ("step", 40), ("layer", 20)):
            object.__setattr__(self, name, _checked_integer(name, getattr(self, name), bits))
        self._check_effects()
        if self.seed is None and (self.rounding != "nearest" or self.hadamard):
            measure = "a Hadamard transform" if self.hadamard else "stochastic rounding"
            raise ModeError(f"a recipe with {measure} needs a seed; pass seed=")
        value = text_of(self.forward)
        given = ",".join(f"{name}={text_of(x)}" for name, x in self._given())
        if given:
            value = f"{value}({given})"
        # An attribute, because PyTorch's compiler reads it.
        object.__setattr__(self, "value", value)

    def _check_effects(self) -> None:
        """Raise ModeError for an option that changes none of the three products."""
        own = [name for name in _PAIRS if not isinstance(getattr(self, name), Recipe)]
        rules = [rule for name in own for rule in _formats_of(self, name)]
        fast = [_formats_of(self, name) for name in self.fast_accum]
        options = {
            "fast_accum": all(pair and all(rule.is_float8 for rule in pair) for pair in fast),
            "scale_rule": self.scale_rule == "floor"
            or any(rule.scaled_by(self.scale_rule) != rule for rule in rules),
            "weight_block": not self.weight_block
            or any(rule.block_scale == "e4m3" for rule in rules),
        }
        recipe = text_of(self.forward)
        if self.backward_override:
            recipe += f" with backward_override={self.backward_override}"
            options |= {x: not getattr(self, x) for x in ("grad_input", "grad_weight", "hadamard")}
            options["fast_accum"] = options["fast_accum"] and self.fast_accum in ((), ("forward",))
            options["rounding"] = self.rounding != "stochastic_gradients"
        for name, has_effect in options.items():
            if not has_effect:
                text = text_of(getattr(self, name))
                raise ModeError(
                    f"{name}={text} has no effect on a recipe of {recipe}; omit {name}="
                )

    def in_pass(self, product: Pass) -> str | Recipe:
        """Return the recipe of one of the three products, or its mode's name."""
        names = getattr(self, product)
        if self.backward_override == "high_precision" and product != "forward":
            return "fp32"
        if isinstance(names, str) and names in PLAIN:
            return names
        return self.of(product)

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
        return cls(
            "nvfp4", rounding="stochastic_gradients", seed=seed, hadamard=16, weight_block=(16, 16)
        )

    def at(self, step: int | None = None, layer: int | None = None) -> Recipe:
        """Return the recipe for a step and a layer, each with its random numbers."""
        given: dict[str, Any] = {"step": step, "layer": layer}
        return replace(self, **{name: x for name, x in given.items() if x is not None})

    def of(self, product: Pass) -> Recipe:
        """Return the recipe of one of the three products."""
        if product == self.product:
            return self
        return replace(self, product=product)

    @property
    def settings(self) -> tuple[Recipe, ...]:
        """The recipes with the settings of the three products: this one, or their own."""
        own = (getattr(self, name) for name in _PAIRS)
        return tuple(x if isinstance(x, Recipe) else self for x in own)

    @property
    def base(self) -> str:
        """Name of the mode of ``a`` in the forward product."""
        name, _ = _pair(self.forward)
        base = str(name).removesuffix("_e5m2")
        return base if base in MODES else "mxfp8"

    @property
    def draw(self) -> int:
        """Step, layer and product as one number of 62 bits."""
        return self.step << (STEP_BIT - 1) | self.layer << 2 | _PAIRS.index(self.product)

    @property
    def rules(self) -> tuple[Rule | None, Rule | None]:
        """The rules of both operands of this product, None for one that is not rounded."""
        return _rules(self)

    @property
    def plannable(self) -> Recipe:
        """The recipe without step and layer, on which no plan depends."""
        if self.step or self.layer:
            return replace(self, step=0, layer=0)
        return self

    def _given(self) -> list[tuple[str, Any]]:
        _, *optional = fields(self)
        return [(f.name, x) for f in optional if (x := getattr(self, f.name)) != f.default]

    def __repr__(self) -> str:
        given = [f"{name}={x!r}" for name, x in self._given()]
        return f"Recipe({', '.join([repr(self.forward), *given])})"

    def __str__(self) -> str:
        return self.value

    def __format__(self, spec: str) -> str:
        return format(self.value, spec)


@cache
def parse_recipe(text: str) -> Recipe:
    """Return the recipe of a text such as ``"fp8(grad_input=fp8_e5m2/fp8)"``; raise ModeError if it is none."""
    name, _, rest = "".join(text.split()).partition("(")
    given: dict[str, Any] = {}
    for item in filter(None, split_at_commas(rest.removesuffix(")"))):
        key, _, value = item.partition("=")
        if key not in _READERS or not value or key in given:
            raise ModeError(
                f"{quoted(item)} in the recipe {quoted(text)} is not one of: {', '.join(_READERS)}"
            )
        try:
            given[key] = _READERS[key](value)
        except (ValueError, KeyError):
            raise ModeError(
                f"{quoted(item)} in the recipe {quoted(text)} has no legal value"
            ) from None
    return Recipe(_names(name), **given)


def _names(text: str) -> Any:
    if "(" in text:
        return parse_recipe(text)
    return tuple(text.split("/")) if "/" in text else text


def _pair(names: Any) -> Any:
    if isinstance(names, str):
        return names, names
    return names


_READERS: dict[str, Any] = {
    **dict.fromkeys(("grad_input", "grad_weight"), _names),
    **dict.fromkeys(("backward_override", "scale_rule", "rounding", "product"), str),
    **dict.fromkeys(("seed", "hadamard", "step", "layer"), int),
    "weight_block": lambda text: tuple(int(x) for x in text.split("x")),
    "fast_accum": lambda text: tuple(text.split("/")),
    "knows_weight": {"True": True, "False": False}.__getitem__,
}


def _canonical(name: Any) -> Any:
    """Return the text of a format; other objects unchanged."""
    if isinstance(name, Format):
        return str(name)
    if isinstance(name, str) and ":" in name:
        return str(Format.parse(name))
    return name


def _checked_pair(name: str, value: Any) -> Any:
    """Return a format, or a pair of two different ones; raise ModeError for others."""
    if value is None and name != "forward":
        return None
    if isinstance(value, Recipe) and name != "forward":
        return _checked_recipe(name, value)
    pair = _pair(str(value) if isinstance(value, Format) else value)
    if not isinstance(pair, tuple | list) or len(pair) != 2:
        raise ModeError(f"{name} of a recipe is a format or a pair of formats, got {quoted(value)}")
    if isinstance(value, str) and value in PLAIN and name != "forward":
        return str(value)
    pair = tuple(_canonical(each) for each in pair)
    for each in pair:
        if not isinstance(each, str) or (each not in FORMATS and ":" not in each):
            raise ModeError(
                f"{name} of a recipe: {quoted(each)} is not a format; choose from: {', '.join(FORMATS)}"
                f"{did_you_mean(each, FORMATS)}"
            )
    a, b = map(str, pair)
    families = {x.removesuffix("_e5m2") for x in (a, b)}
    with_float_blocks = {
        x for x in families if ":" in x and rules_of_format(x)[0].block_scale == "float32"
    }
    if len(families) > 1 and families & {*_ALONE, *with_float_blocks}:
        raise ModeError(
            f"{name} of a recipe: {a} and {b} cannot be multiplied; {' and '.join(_ALONE)} need one format"
        )
    return a if a == b else (a, b)


def _checked_recipe(name: str, recipe: Recipe) -> Any:
    """Return the recipe of one product, or its formats if it has no settings; raise ModeError for other options."""
    given = dict(recipe._given())
    refused = {*given} - {"scale_rule", "rounding", "seed", "hadamard", "weight_block"}
    if name != "grad_weight":
        refused |= {*given} & {"hadamard"}
    if refused:
        raise ModeError(
            f"{name} of a recipe: {', '.join(sorted(refused))} of {recipe} have no effect there; omit them"
        )
    return recipe if given else recipe.forward


#: Modes that do not quantise, for the products of the backward pass.
PLAIN = ("fp32", "tf32", "bf16", "fp16", "bf16x3", "bf16x6")
#: Formats whose products are with the same format alone.
_ALONE = ("int8", "fp8_blocks")


def _checked_integer(name: str, value: Any, bits: int) -> int | None:
    if value is None and name == "seed":
        return None
    number = -1
    with suppress(TypeError):
        number = operator.index(value)
    if isinstance(value, bool) or not 0 <= number < 1 << bits:
        raise ModeError(
            f"{name} of a recipe must be an integer from 0 to 2^{bits} - 1, got {quoted(value)}"
        )
    return number


#: Operands of each product that are gradients, and those that are the weight.
_GRADIENTS = {"forward": (False, False), "grad_input": (True, False), "grad_weight": (False, True)}
_WEIGHTS = {"forward": (False, True), "grad_input": (False, True), "grad_weight": (False, False)}


def _formats_of(recipe: Recipe, product: str) -> tuple[Rule, ...]:
    """Return the rules of the formats of both operands of a product, none for a mode that does not quantise."""
    names = getattr(recipe, product) or recipe.forward
    if isinstance(names, Recipe):
        names = names.forward
    if names in PLAIN:
        return ()
    a, b = _pair(names)
    return rules_of_format(a)[0], rules_of_format(b)[1]


@cache
def _rules(recipe: Recipe) -> tuple[Rule | None, Rule | None]:
    if recipe.backward_override and recipe.product != "forward":
        first, second = [r and r._replace(across=True) for r in _rules(recipe.of("forward"))]
        return (None, second) if recipe.product == "grad_input" else (first, None)
    rules = _formats_of(recipe, recipe.product)
    if not rules:
        raise ModeError(f"the product {recipe.product} of the recipe {recipe} does not quantise")
    a, b = rules
    settings = recipe.settings[_PAIRS.index(recipe.product)]
    if settings is not recipe:
        recipe = replace(settings, product=recipe.product, knows_weight=recipe.knows_weight)
    return _refined(a, recipe, 0), _refined(b, recipe, 1)


def _refined(rule: Rule, recipe: Recipe, operand: int) -> Rule:
    """Return the rule of a format with the settings of a recipe for operand 0 or 1."""
    seed = recipe.seed or 0
    is_gradient = _GRADIENTS[recipe.product][operand]
    is_weight = recipe.knows_weight and _WEIGHTS[recipe.product][operand]
    rule = rule.scaled_by(recipe.scale_rule)
    if recipe.product == "grad_weight" and rule.block_scale == "float32":
        rule = rule._replace(block=(1, rule.block[1]))  # both operands are activations or gradients
    if is_weight and recipe.weight_block and rule.block_scale == "e4m3":
        rule = rule._replace(block=recipe.weight_block)
    if recipe.rounding == "stochastic" or (
        recipe.rounding == "stochastic_gradients" and is_gradient
    ):
        rule = rule._replace(rounding="stochastic", seed=seed)
    if recipe.product == "grad_weight" and recipe.hadamard:
        rule = rule._replace(hadamard=recipe.hadamard, seed=seed)
    return rule
