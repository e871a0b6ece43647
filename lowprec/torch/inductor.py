"""Every product of a compiled model by lowprec: two passes of Inductor's over the graphs that it makes.

The first one, before autograd, keeps attention in its plain form, whose products are matrix products. The second one
puts lowprec's operator in the place of these, in the graph of the forward and the backward pass together: before
Inductor looks for patterns, of which attention is one that it would fuse.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.nn.attention import SDPBackend, sdpa_kernel

from lowprec._version import __version__
from lowprec.errors import LowprecWarning
from lowprec.modes import MathMode, parse_mode
from lowprec.torch.operator import OPERATOR
from lowprec.torch.products import ACTED_ON, form_of

_aten = torch.ops.aten


def inductor_options(math_mode: str | MathMode) -> dict[str, Any]:
    """Return options of ``torch.compile`` that take a model's products through lowprec, forward and backward.

    What :class:`intercept` takes is taken here, but for products that PyTorch turns into sums while it compiles: those
    with an inner dimension of 1, or with a result of one element.

    Parameters
    ----------
    math_mode : str or MathMode
        Of the products; an ``fp32_guard`` that is open when the compiled model runs stands above it.

    Returns
    -------
    dict
        For ``torch.compile(model, options=...)``; more options may be added. The mode is part of the key under which
        Inductor caches what it has compiled.

    Raises
    ------
    ModeError
        If there is no such mode.

    Warns
    -----
    LowprecWarning
        While a graph is compiled that holds products in fused kernels, which are left to PyTorch.

    Examples
    --------
    >>> sorted(inductor_options("bf16"))
    ['joint_custom_pre_pass', 'pre_grad_custom_pass']
    """
    mode = parse_mode(math_mode).value
    return {
        "pre_grad_custom_pass": _PlainAttention(mode),
        "joint_custom_pre_pass": _Products(mode),
    }


class _Pass(CustomGraphPass):
    def __init__(self, mode: str) -> None:
        self._mode = mode

    def uuid(self) -> Any:
        """Return what Inductor's cache knows the pass by."""
        return "lowprec", __version__, type(self).__name__, self._mode


# -- attention ------------------------------------------------------------------------------------


def _in_plain_form(function: Callable[..., Any]) -> Callable[..., Any]:
    def plain(*args: Any, **kwargs: Any) -> Any:
        with sdpa_kernel(SDPBackend.MATH):
            return function(*args, **kwargs)

    plain.__name__ = f"plain_{function.__name__}"
    return plain


_ATTENTION = {
    function: _in_plain_form(function)
    for function in (
        torch.nn.functional.scaled_dot_product_attention,
        torch.nn.functional.multi_head_attention_forward,
    )
}


class _PlainAttention(_Pass):
    """Trace attention into matrix products."""

    def __call__(self, graph: torch.fx.Graph) -> None:
        for node in graph.nodes:
            if node.op == "call_function" and node.target in _ATTENTION:
                node.target = _ATTENTION[node.target]


# -- products -------------------------------------------------------------------------------------


class _Products(_Pass):
    """Put lowprec's operator in the place of PyTorch's products."""

    def __call__(self, graph: torch.fx.Graph) -> None:
        passed = set()
        for node in list(graph.nodes):
            if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
                continue
            form = form_of(node.target)
            if form is not None and form.passed_by is not None:
                passed.add(f"{form.name} ({form.passed_by})")
            elif node.target in _TERMS and _acted_on(node):
                self._replace(graph, node)
        graph.lint()
        if passed:
            warnings.warn(
                f"lowprec.torch.inductor_options({self._mode!r}) leaves products to PyTorch: "
                f"{', '.join(sorted(passed))}; torch.backends.mha.set_fastpath_enabled(False), before the first call, "
                "has encoder layers compiled product by product",
                LowprecWarning,
                stacklevel=2,
            )

    def _replace(self, graph: torch.fx.Graph, node: torch.fx.Node) -> None:
        def call(target: Any, *args: Any) -> torch.fx.Node:
            made = graph.call_function(target, args)
            made.meta = dict(node.meta)  # shape, and which pass it belongs to
            return made

        *added, a, b = node.args
        alpha, beta = node.kwargs.get("alpha", 1), node.kwargs.get("beta", 1)
        with graph.inserting_before(node):
            found = call(OPERATOR, a, b, self._mode, self._mode, float(alpha))
            if added and beta != 0:
                found = call(_aten.add.Tensor, found, *added)
                if beta != 1:
                    found.kwargs = {"alpha": beta}
        node.replace_all_uses_with(found)
        graph.erase_node(node)


_TERMS = frozenset((_aten.mm.default, _aten.bmm.default, _aten.addmm.default, _aten.baddbmm.default))  # fmt: skip


def _acted_on(node: torch.fx.Node) -> bool:
    value = node.meta.get("val")
    factors = (node.kwargs.get("alpha", 1), node.kwargs.get("beta", 1))
    return (
        isinstance(value, torch.Tensor)
        and value.dtype in ACTED_ON
        and all(isinstance(x, int | float) for x in factors)
    )
