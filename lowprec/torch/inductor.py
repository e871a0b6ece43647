"""The products of a compiled model by lowprec: two passes over the graphs of Inductor.

The first one, before autograd, traces attention in its plain form, as matrix products. The second one replaces products
by lowprec's operator in the joint graph of forward and backward pass, before Inductor fuses patterns such as attention.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch
from torch._inductor.custom_graph_pass import CustomGraphPass
from torch.nn.attention import SDPBackend, sdpa_kernel

from lowprec._version import __version__
from lowprec.core.interception_report import PassedBy
from lowprec.core.rules import Layer, Rules, RulesLike, first_match, parse_rules, shown
from lowprec.errors import warn
from lowprec.modes import row
from lowprec.torch.aten import ACTED_ON, PRODUCTS, Terms, reason_of
from lowprec.torch.operator import ACCUMULATOR, OPERATOR

_aten = torch.ops.aten


def inductor_options(math_mode: RulesLike) -> dict[str, Any]:
    """Return options of ``torch.compile`` by which lowprec computes the products.

    They cover the products of :class:`intercept`, except those that Inductor turns into sums: k = 1, or a result of
    one element.

    Parameters
    ----------
    math_mode : str, MathMode, Recipe, mapping, list of pairs, or path
        Mode of the products, or rules as in :class:`intercept`. The layer of a product is the module whose ``forward``
        multiplies. An ``fp32_guard`` that is open when the compiled model runs overrides the modes.

    Returns
    -------
    dict
        For ``torch.compile(model, options=...)``; more options may be added. The mode is part of the key of Inductor's
        cache.

    Raises
    ------
    ModeError
        A mode or a pattern is illegal.

    Warns
    -----
    LowprecWarning
        At compilation, if the graph has fused kernels, whose products are left to PyTorch.

    Examples
    --------
    >>> sorted(inductor_options("bf16"))
    ['joint_custom_pre_pass', 'pre_grad_custom_pass']
    """
    rules = parse_rules(math_mode)
    return {
        "pre_grad_custom_pass": _Pass(_in_products, rules),
        "joint_custom_pre_pass": _Pass(_by_lowprec, rules),
    }


class _Pass(CustomGraphPass):
    """A function that changes a graph, with the key of Inductor's cache."""

    def __init__(self, change: Callable[[torch.fx.Graph, Rules], None], rules: Rules) -> None:
        self._change = change
        self._rules = rules

    def __call__(self, graph: torch.fx.Graph) -> None:
        self._change(graph, self._rules)

    def uuid(self) -> Any:
        return "lowprec", __version__, self._change.__name__, self._rules


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


def _in_products(graph: torch.fx.Graph, _: Rules) -> None:
    """Replace attention by its plain form."""
    for node in graph.nodes:
        if node.op == "call_function" and node.target in _ATTENTION:
            node.target = _ATTENTION[node.target]


#: Composites of which a graph shows the call alone.
_FAST_PATHS = ("_transformer_encoder_layer_fwd", "_native_multi_head_attention")


def _by_lowprec(graph: torch.fx.Graph, rules: Rules) -> None:
    """Replace products by lowprec's operator."""
    passed = set()
    for node in list(graph.nodes):
        if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
            continue
        name = node.target._opname
        reason = reason_of(name)
        if name in _FAST_PATHS:
            reason = PassedBy.ATTENTION
        if reason is not None:
            passed.add(f"{name} ({reason})")
        elif node.target in _REPLACED:
            _replace(graph, node, name, rules)
    graph.lint()
    if passed:
        warn(
            f"lowprec.torch.inductor_options({shown(rules)}) leaves products to PyTorch: "
            f"{', '.join(sorted(passed))}; to compile encoder layers product by product, call "
            "torch.backends.mha.set_fastpath_enabled(False) before the first call"
        )


def _replace(graph: torch.fx.Graph, node: torch.fx.Node, name: str, rules: Rules) -> None:
    """Replace a product if its mode acts on it."""
    terms = PRODUCTS[name].terms(*node.args, **node.kwargs)
    value = node.meta.get("val")
    layer = _layer_of(node)
    if not layer and isinstance(value, torch.Tensor) and value.shape[-2:].numel() == 1:
        name = "dot"
    mode = first_match(rules, layer, name)
    acts = (
        mode is not None
        and isinstance(value, torch.Tensor)
        and value.dtype in ACTED_ON[row(mode).mode]
    )
    if acts and isinstance(terms.alpha, int | float) and isinstance(terms.beta, int | float):
        _insert(graph, node, terms, str(mode))


def _insert(graph: torch.fx.Graph, node: torch.fx.Node, terms: Terms, mode: str) -> None:
    """Replace a product by lowprec's operator."""
    value = node.meta["val"]
    dtype = ""
    meta = node.meta  # shape, and forward or backward pass
    if terms.beta != 0 and value.dtype.itemsize == 2:  # the sum is rounded once
        dtype = ACCUMULATOR
        meta = {**meta, "val": value.float()}

    def call(meta: dict[str, Any], target: Any, *args: Any, **kwargs: Any) -> Any:
        added = graph.call_function(target, args, kwargs)
        added.meta = dict(meta)
        return added

    with graph.inserting_before(node):
        found = call(meta, OPERATOR, terms.a, terms.b, mode, mode, float(terms.alpha), dtype)
        if terms.beta != 0:
            found = call(meta, _aten.add.Tensor, found, terms.c, alpha=float(terms.beta))
        if dtype:
            found = call(
                node.meta, torch.ops.prims.convert_element_type.default, found, value.dtype
            )
    node.replace_all_uses_with(found)
    graph.erase_node(node)


#: Words of the compiler in the names of modules.
_WORDS = frozenset(["L", "getattr", "_modules"])


def _layer_of(node: torch.fx.Node) -> Layer:
    """Return the innermost module of a product, or of its forward product."""
    stack = node.meta.get("nn_module_stack") or node.meta.get("fwd_nn_module_stack")
    if not stack:
        return ()
    path, kind = list(stack.values())[-1]
    _, *parts = [word for word in re.findall(r"\w+", path) if word not in _WORDS]
    kind = getattr(kind, "__name__", str(kind)).rpartition(".")[2].removeprefix("Parametrized")
    return ((".".join(parts) or kind, kind),)


_REPLACED = (_aten.mm.default, _aten.bmm.default, _aten.addmm.default, _aten.baddbmm.default)
