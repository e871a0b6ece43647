"""Layers whose products are lowprec's."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.overrides import has_torch_function

from lowprec.contractions import linear
from lowprec.modes import BoundName, Mode, ModeLike, Recipe, parse_mode
from lowprec.planning import check_bound, check_rtol
from lowprec.torch.current_mode import current_mode

#: Numbers of layers, of 20 bits, in the order in which these are made.
_numbers = itertools.cycle(range(1, 1 << 20))


def _of_layer(mode: str | Mode, number: int) -> str:
    """Return the name of a mode; a recipe knows that ``b`` is a weight, and the layer's number unless it has one."""
    mode = parse_mode(mode)
    if isinstance(mode, Recipe) and any(x.weight_block for x in mode.settings):
        mode = replace(mode, knows_weight=True)
    if isinstance(mode, Recipe) and not mode.layer:
        is_random = any(x.rounding != "nearest" for x in mode.settings)
        mode = mode.at(layer=number if is_random else 0)
    return str(mode)


_of_layer._dynamo_marked_constant = True  # type: ignore[attr-defined]  # as in lowprec.torch.functions


class Linear(torch.nn.Linear):
    """``torch.nn.Linear`` with its product by lowprec, and the same state.

    Parameters
    ----------
    in_features, out_features, bias, device, dtype
        As for ``torch.nn.Linear``.
    math_mode : str, MathMode or Recipe, optional
        Mode of the forward product; by default the current mode.
    rtol, bound
        Instead of ``math_mode``: each forward product uses the cheapest mode within ``rtol``.
    backward_mode : str, MathMode or Recipe, optional
        Mode of the backward pass; by default the forward product's.
    number : int, optional
        Number from 1 to 2^20 - 1 by which the random numbers of recipes without a ``layer`` differ from those of other
        layers; by default layers are numbered in the order in which they are made in the process.

    Raises
    ------
    ModeError
        A mode, ``rtol`` or ``bound`` is illegal.

    Examples
    --------
    >>> import torch
    >>> layer = Linear.sharing(torch.nn.Linear(4, 2), math_mode="bf16")
    >>> layer(torch.ones(3, 4)).shape
    torch.Size([3, 2])
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: object = None,
        dtype: torch.dtype | None = None,
        *,
        math_mode: ModeLike | None = None,
        rtol: float | None = None,
        bound: BoundName | None = None,
        backward_mode: ModeLike | None = None,
        number: int | None = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, device, dtype)
        self.math_mode: Any = math_mode
        self.rtol = rtol
        self.bound: Any = bound
        self.backward_mode: Any = backward_mode
        self.number: int = next(_numbers) if number is None else number
        if math_mode is not None:
            self.math_mode = _of_layer(parse_mode(math_mode), self.number)
        if rtol is not None:
            self.rtol = check_rtol(rtol)
        if bound is not None:
            self.bound = check_bound(bound)
        if backward_mode is not None:
            self.backward_mode = _of_layer(parse_mode(backward_mode, "backward_mode"), self.number)

    @classmethod
    def sharing(cls, layer: torch.nn.Linear, **modes: Any) -> Linear:
        """Return a layer that shares the parameters of ``layer``; ``modes`` as for the class."""
        made = cls(layer.in_features, layer.out_features, layer.bias is not None, "meta", **modes)
        made.weight = layer.weight
        made.bias = layer.bias
        return made.train(layer.training)

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - torch's name
        """Return ``input @ weight.T + bias``, shape (..., out_features).

        A weight with functions of its own, as of ``torchao.quantize_``, is multiplied by these.
        """
        if has_torch_function((self.weight,)):
            return super().forward(input)
        mode = self.math_mode
        if mode is None and self.rtol is None and "(" in (current := current_mode()):
            mode = _of_layer(current, self.number)
        return linear(
            input, self.weight, self.bias,
            math_mode=mode, rtol=self.rtol, bound=self.bound, backward_mode=self.backward_mode,
        )  # fmt: skip

    def extra_repr(self) -> str:
        """Return torch's text and the modes that are set."""
        texts = [super().extra_repr()]
        for name in ("math_mode", "rtol", "bound", "backward_mode"):
            value = getattr(self, name)
            if value is not None:
                texts.append(f"{name}={value}")
        return ", ".join(texts)
