"""The layer of a product, by the memory of its operands.

Module hooks know the layer in an eager forward pass alone. The addresses of parameters are the same in compiled graphs
and in backward passes. A weight gradient has no parameter as its operand: its layer is that of the parameter behind the
current node of autograd or, in a compiled graph, that of the forward product with the same activation.
"""

from __future__ import annotations

import gc
from bisect import bisect_right
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules import module as hooks
from torch.utils.weak import WeakIdKeyDictionary

from lowprec.recipes import Pass

#: (name, class) of each layer that a product may belong to; empty if it is unknown.
Layer = tuple[tuple[str, str], ...]


class Part(NamedTuple):
    """A product's layer, which of the layer's three products it is, and the order of its operands.

    The products are ``input @ weight``, ``gradient @ weight.T`` and ``input.T @ gradient``; ``place`` is the index of
    the operand that is the second one there, None if it is unknown.
    """

    layer: Layer
    product: Pass = "forward"
    place: int | None = None


_NO_PART = Part(())

_MOST_ACTIVATIONS = 1 << 16
_MOST_LAYERS = 16  # of one activation
_MOST_VIEWS = 4
#: Names by which compiled, parallel and other wrappers hold a model.
_WRAPPERS = ("", "_orig_mod", "module")


class LayerNames:
    """Layers of the parameters of all modules, and of the activations that were multiplied by them."""

    def __init__(self) -> None:
        #: Start addresses of parameters; by parameter, the end address, layer and memory.
        self._table: tuple[list[int], list[tuple[int, Layer, StorageWeakRef]]] = [], []
        self._activations: dict[int, tuple[Layer, StorageWeakRef]] = {}
        self._gradient: tuple[int, StorageWeakRef] | None = None  # the last one that was multiplied by a parameter
        self._orphans = WeakIdKeyDictionary()  # parameters without a module
        self._is_current = False
        self._is_watching = False

    def of(self, a: Tensor, b: Tensor, backward: bool, attention: bool = False) -> Part:
        """Return the part of a product in its layer; ``attention`` for those of two activations, too."""
        try:
            x, y = a.data_ptr(), b.data_ptr()
        except RuntimeError:  # without memory
            return _NO_PART
        layer, place = self._of_parameter(y, b), 1
        if not layer:
            layer, place = self._of_parameter(x, a), 0
        if layer:
            address, other = (x, a) if place else (y, b)
            if backward:
                self._gradient = address, StorageWeakRef(other.untyped_storage())
            else:
                self._remember(address, other, layer)
            return Part(layer, "grad_input" if backward else "forward", place)
        if backward:
            return self._of_gradient(x, y)
        if attention:
            self._remember(x, a, ())
            self._remember(y, b, ())
        return _NO_PART

    def _of_gradient(self, x: int, y: int) -> Part:
        """Return the part of a product without a parameter in a backward pass, by the addresses of its operands."""
        of_a, of_b = self._of_activation(x), self._of_activation(y)
        found = of_a or of_b or ()
        layer = self._of_node() or found if len(found) != 1 else found
        if (of_a is None) == (of_b is None):
            # Checkpointing omits the last product of the forward pass.
            address, memory = self._gradient or (0, None)
            is_known = memory is not None and not memory.expired() and (x == address) != (y == address)
            return Part(layer, "grad_weight", int(y == address) if is_known else None)
        if of_a is None and not layer:  # of attention
            return Part(layer, "grad_input", 1)
        return Part(layer, "grad_weight", 0 if of_a is None else 1)

    def _of_node(self) -> Layer:
        """Return the layer of the only parameter whose gradient the current node of the backward pass computes."""
        nodes = getattr(torch._C._current_autograd_node(), "next_functions", ())
        parameters = [p for node, _ in nodes if (p := _parameter(node)) is not None]
        found = [layer for p in parameters if (layer := self._of_parameter(p.data_ptr(), p))]
        return found[0] if len(found) == 1 else ()

    def _remember(self, address: int, activation: Tensor, layer: Layer) -> None:
        """Record the layer of an activation, which may be the operand of several layers."""
        before = self._of_activation(address) or ()
        if not set(layer) <= set(before) and len(before) < _MOST_LAYERS:
            layer = before + layer
        elif before:
            layer = before
        self._activations[address] = layer, StorageWeakRef(activation.untyped_storage())
        if len(self._activations) > _MOST_ACTIVATIONS:
            self._activations.pop(next(iter(self._activations)), None)

    def _of_activation(self, address: int) -> Layer | None:
        """Return the layers of an operand of the forward pass; None for other tensors."""
        found = self._activations.get(address)
        return None if found is None or found[1].expired() else found[0]

    def of_any(self, tensors: list[Tensor]) -> Layer:
        """Return the layer of the first tensor that is a parameter."""
        for x in tensors:
            if x.layout is torch.strided and not x.is_quantized and (layer := self._of_parameter(x.data_ptr(), x)):
                return layer
        return ()

    def _of_parameter(self, address: int, x: Tensor) -> Layer:
        found = self._find(address)
        if found:
            return found
        if not self._is_current:
            self._scan()
            return self._find(address)
        # A parameter whose memory was replaced, as by `model.to`, is not found.
        base = x._base if x._is_view() else x
        if not isinstance(base, torch.nn.Parameter) or base in self._orphans:
            return ()
        self._scan()
        found = self._find(address)
        if not found:
            self._orphans[base] = True
        return found

    def _find(self, address: int) -> Layer:
        starts, ranges = self._table
        i = bisect_right(starts, address) - 1
        if i < 0 or address >= ranges[i][0]:
            return ()
        _, layer, memory = ranges[i]
        if memory.expired():
            self._is_current = False
            return ()
        return layer

    def _scan(self) -> None:
        if not self._is_watching:
            hooks.register_module_parameter_registration_hook(self._expire)
            self._is_watching = True
        self._is_current = True  # before the scan, during which another thread may add a parameter
        modules: list[Any] = [x for x in gc.get_objects() if issubclass(type(x), torch.nn.Module)]
        children = {id(child) for x in modules for child in x._modules.values()}
        found: dict[int, tuple[int, Layer, StorageWeakRef]] = {}
        for root in modules:
            if id(root) in children:
                continue
            for name, each in root.named_modules():
                for p in each._parameters.values():
                    if p is not None:
                        self._add(found, p, _shown(name, each), type(each))
        starts = sorted(found)
        self._table = starts, [found[start] for start in starts]

    def _add(self, found: dict[int, tuple[int, Layer, StorageWeakRef]], p: Any, name: str, kind: type) -> None:
        if type(p) not in (Tensor, torch.nn.Parameter) or p.is_meta or p.layout is not torch.strided or not p.numel():
            return
        try:
            start = p.data_ptr()
        except RuntimeError:
            return
        extent = 1 + sum((n - 1) * s for n, s in zip(p.shape, p.stride(), strict=True))
        layer = found[start][1] if start in found else ()
        if (name, kind.__name__) not in layer:
            # An embedding that shares its weight does not multiply.
            others = tuple(x for x in layer if x[1] != "Embedding")
            layer = layer if others and issubclass(kind, torch.nn.Embedding) else (*others, (name, kind.__name__))
        found[start] = start + extent * p.element_size(), layer, StorageWeakRef(p.untyped_storage())

    def _expire(self, *_: Any) -> None:
        self._is_current = False


def _parameter(node: Any) -> Tensor | None:
    """Return the matrix that accumulates the gradient of a node, behind views and casts."""
    for _ in range(_MOST_VIEWS):
        variable = getattr(node, "variable", None)
        if variable is not None:
            return variable if variable.ndim > 1 else None
        following: Any = getattr(node, "next_functions", ())
        if len(following) != 1:
            return None
        node = following[0][0]
    return None


def _shown(name: str, module: Any) -> str:
    parts = name.split(".")
    while parts and parts[0] in _WRAPPERS:
        del parts[0]
    return ".".join(parts) or type(module).__name__


NAMES = LayerNames()
