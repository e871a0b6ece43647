"""PyTorch's LSTM on the CPU inside an interception: a product for each step, and one for a weight's gradient.

oneDNN's kernel keeps a workspace for its own gradient. Here nothing depends on it, so that a gradient is right inside
and outside of the block.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from lowprec.torch.accounting import Found, reason_against
from lowprec.torch.aten import Kernel
from lowprec.torch.layer_names import NAMES
from lowprec.torch.registration import Function

#: The name of the products in reports and rules.
_NAME = "addmm"


def lstm_kernel(kernel: Kernel, own: Function, watched: Function) -> Function:
    """Return the function that computes a layer of an LSTM in one direction.

    ``watched`` returns the function that counts a kernel as PyTorch's.
    """

    def act(found: Found, keyset: Any, args: Any, kwargs: Any) -> Any:
        x = args[0]
        mode = found[0].mode_of(NAMES.of_any(args[1:3]), _NAME)
        reason = reason_against(mode, mode, _NAME, x.dtype)
        if reason is None:
            return _computed(*args)
        if kernel.key == "CPU":  # which autograd's kernel calls
            return watched(kernel._replace(passed_by=reason), own)(found, keyset, args, kwargs)
        return own(keyset, *args, **kwargs)

    return act


def _computed(
    x: Tensor,
    of_input: Tensor,
    of_state: Tensor,
    input_bias: Tensor,
    state_bias: Tensor,
    h: Tensor,
    c: Tensor,
    is_reverse: bool,
    *rest: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the outputs, the last output, the last cell state, and no workspace; ``x`` is (steps, batch, width)."""
    *_, has_biases, _, _, _ = rest
    biases = (input_bias, state_bias) if has_biases else (None, None)
    entries = linear(x, of_input, biases[0])
    if is_reverse:
        entries = entries.flip(0)
    given = (entries, of_state, biases[1], h, c)
    records = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in given)
    is_transformed = torch._C._are_functorch_transforms_active() or _current_level() >= 0
    if records and not is_transformed and type(x) is Tensor:
        outputs, h, c = _Steps.apply(*given)
    else:
        outputs, h, c = _steps(*given)
    if is_reverse:
        outputs = outputs.flip(0)
    return outputs, h, c, x.new_empty(0)


def _current_level() -> int:
    """Return the level of forward-mode differentiation, -1 outside of it."""
    level: int = torch.autograd.forward_ad._current_level
    return level


def _steps(
    entries: Tensor, weight: Tensor, bias: Any, h: Tensor, c: Tensor, kept: Any = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the outputs, the last one, and the last cell state; append the gates and cells of each step to ``kept``.

    The functions are those of PyTorch's layers for packed sequences and projections, so that these have the same bits.
    """
    outputs = []
    for step in entries.unbind():
        gates = linear(h, weight, bias).add_(step)
        entry, forget, cell, exit_ = gates.unsafe_chunk(4, 1)
        c = (forget.sigmoid_() * c).add_(entry.sigmoid_() * cell.tanh_())
        h = exit_.sigmoid_() * c.tanh()
        outputs.append(h)
        if kept is not None:
            kept.append((gates, c))
    return torch.stack(outputs), h, c


class _Steps(torch.autograd.Function):
    """The steps of a layer, whose gradient of the weight is one product."""

    @staticmethod
    def forward(
        ctx: Any, entries: Tensor, weight: Tensor, bias: Any, h: Tensor, c: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        kept: list[tuple[Tensor, Tensor]] = []
        outputs, *last = _steps(entries, weight, bias, h, c, kept)
        gates, cells = (torch.stack(each) for each in zip(*kept, strict=True))
        ctx.save_for_backward(entries, weight, bias, h, c, outputs, gates, cells)
        return outputs, *last

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        *given, outputs, gates, cells = ctx.saved_tensors
        needed = ctx.needs_input_grad
        if torch.is_grad_enabled():
            return _differentiated(given, needed, gradients)
        _, weight, _, h, c = given
        befores = torch.cat((h[None], outputs[:-1]))
        cells_before = torch.cat((c[None], cells[:-1]))
        of_gates, of_h, of_c = _backwards(weight, gates, cells_before, cells, gradients, needed[3])
        of_weight = of_bias = None
        if needed[1]:
            NAMES.of_activation(befores, NAMES.of_any([weight]))
            of_weight = of_gates.flatten(0, 1).t() @ befores.flatten(0, 1)
        if needed[2]:
            of_bias = of_gates.sum((0, 1))
        return of_gates, of_weight, of_bias, of_h, of_c


def _differentiated(given: Any, needed: Any, gradients: Any) -> Any:
    """Return gradients that autograd can differentiate."""
    wanted = [x for x, is_needed in zip(given, needed, strict=True) if is_needed]
    found = iter(torch.autograd.grad(_steps(*given), wanted, gradients, create_graph=True))
    return tuple(next(found) if is_needed else None for is_needed in needed)


def _backwards(
    weight: Tensor, gates: Tensor, before: Tensor, after: Tensor, gradients: Any, needs_h: bool
) -> tuple[Tensor, Tensor | None, Tensor]:
    """Return the gradients of the gates' sums, the first state and the first cell, from the last step to the first.

    ``before`` and ``after`` are the cells of each step.
    """
    of_outputs, of_h, of_c = gradients
    entry, forget, cell, exit_ = gates.chunk(4, 2)
    bounded = after.tanh()
    slopes = torch.stack(
        (
            cell * entry * (1 - entry),
            before * forget * (1 - forget),
            entry * (1 - cell * cell),
            bounded * exit_ * (1 - exit_),
        ),
        2,
    )
    found = torch.empty_like(slopes)
    of_gates = found.flatten(2)
    steps = (exit_ * (1 - bounded * bounded), slopes, forget, found, of_gates)
    others = [None, *of_outputs.unbind()]
    of_h = of_h + others.pop()
    for step in reversed([*zip(*(x.unbind() for x in steps), strict=True)]):
        of_cell, of_sums, kept, to, sums = step
        of_c = torch.addcmul(of_c, of_h, of_cell)
        torch.mul(of_c.unsqueeze(1), of_sums[:, :3], out=to[:, :3])
        torch.mul(of_h, of_sums[:, 3], out=to[:, 3])
        of_c = of_c * kept
        other = others.pop()
        if other is not None:
            of_h = torch.addmm(other, sums, weight)
        elif needs_h:
            of_h = sums @ weight
    return of_gates, of_h, of_c
