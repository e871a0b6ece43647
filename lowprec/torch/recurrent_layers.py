"""PyTorch's LSTM on the CPU inside an interception: products and functions that autograd records one by one.

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
    """Return the outputs, the last output, the last cell state, and no workspace; ``x`` is (steps, batch, width).

    The functions are those of PyTorch's layers for packed sequences and projections, so that these have the same bits.
    """
    *_, has_biases, _, _, _ = rest
    biases = (input_bias, state_bias) if has_biases else (None, None)
    steps = list(linear(x, of_input, biases[0]).unbind())
    if is_reverse:
        steps.reverse()
    outputs = []
    for step in steps:
        gates = linear(h, of_state, biases[1]).add_(step)
        entry, forget, cell, exit_ = gates.unsafe_chunk(4, 1)
        c = (forget.sigmoid_() * c).add_(entry.sigmoid_() * cell.tanh_())
        h = exit_.sigmoid_() * c.tanh()
        outputs.append(h)
    if is_reverse:
        outputs.reverse()
    return torch.stack(outputs), h, c, x.new_empty(0)
