"""The mode of one product of an intercepted layer: recipes distinguish weights, gradients, steps and layers.

Quantising modes are those of linear layers. Products of two activations, as in attention, and products with vectors use
bfloat16 unless a rule names them.
"""

from __future__ import annotations

import zlib
from dataclasses import replace
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from lowprec.core.rules import names
from lowprec.modes import MathMode, Mode, Recipe, of_pass, row, rules_of
from lowprec.torch.layer_names import Part

_UNKNOWN = (
    "In compiled backward passes, and where no operand or both are known from the forward pass, gradients are not "
    "distinguished from activations: both have the formats and the rounding of the forward product."
)


#: Names of the backward formulas of solvers and factorisations.
_SOLVERS = ("Linalg", "Cholesky", "Lu", "TriangularSolve", "Geqrf", "Ormqr")


def routine_of(operator: str, part: Part, a: Tensor, b: Tensor) -> str:
    """Return the name of a product for the rules: ``"lapack"`` in a solver's gradient, ``"dot"`` of two vectors."""
    node = torch._C._current_autograd_node()
    if node is not None and type(node).__name__.startswith(_SOLVERS):
        return "lapack"
    if not part.layer and a.shape[-2:-1].numel() == b.shape[1:][-1:].numel() == 1:
        return "dot"
    return operator


def mode_of_product(
    scope: Any, mode: Mode | None, part: Part, routine: str, is_matrix: bool
) -> tuple[Any, bool]:
    """Return the mode of a product in a layer of this mode, and whether its operands change places."""
    if mode is None or not row(mode).quantizes:
        return mode, False
    if not ((part.layer and is_matrix) or names(scope.rules, routine)):
        return MathMode.BF16, False
    if isinstance(mode, Recipe):
        if part.product != "forward" and (part.place is None or _is_compiled()):
            scope.ledger.notes[_UNKNOWN] = None
            part = part._replace(product="forward")
        mode = _refined(mode, part, scope.step_number)
    elif part.product == "grad_weight" and part.place is not None and not _is_compiled():
        mode = of_pass(mode, part.product)
    if not row(mode).quantizes:
        return mode, False
    first, second = rules_of(mode)
    # each operand has its random numbers
    is_stochastic = first is not None and first.is_stochastic
    return mode, part.place == 0 and (first != second or is_stochastic)


def _is_compiled() -> bool:
    return type(torch._C._current_autograd_node()).__name__ == "CompiledFunctionBackward"


@lru_cache(4096)
def _refined(recipe: Recipe, part: Part, step: int) -> Mode:
    found = of_pass(recipe, part.product)
    if not isinstance(found, Recipe):
        return found
    number = 0
    if part.layer:
        number = zlib.crc32(part.layer[0][0].encode()) % (1 << 20)
    blocks_weights = any(each.weight_block for each in recipe.settings)
    knows_weight = bool(part.layer and part.place is not None and blocks_weights)
    return replace(recipe, step=step, layer=number, product=part.product, knows_weight=knows_weight)
