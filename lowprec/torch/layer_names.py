"""The layer of a product, by the memory of its operands.

Module hooks know the layer in an eager forward pass alone. The memory of parameters is the same in compiled graphs and
in backward passes, and PyTorch keeps attributes of a storage while its memory is in use. A weight gradient has no
parameter as its operand: its layer is that of the parameter behind the current node of autograd or, in a compiled
graph, that of the forward product with the same activation.
"""

from __future__ import annotations

import gc
import re
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules import module as hooks
from torch.nn.utils import parametrize
from torch.utils.weak import WeakIdKeyDictionary

from lowprec.core.rules import Layer
from lowprec.recipes import Pass
from lowprec.torch.copies import call_site, calling_module, holds, parameters_behind


class Part(NamedTuple):
    """A product's layer, which of the layer's three products it is, and the order of its operands.

    The products are ``input @ weight``, ``gradient @ weight.T`` and ``input.T @ gradient``; ``place`` is the index of
    the operand that is the second one there, None if it is unknown.
    """

    layer: Layer
    product: Pass = "forward"
    place: int | None = None


class _Module(NamedTuple):
    """A module with its layer, and the layers of its matrices by their extents."""

    module: ref[torch.nn.Module]
    layer: Layer
    by_shape: dict[Any, Layer]


_NO_PART = Part(())

#: Attributes of storages: the end and layer of each parameter by its first byte, and the layer of an activation.
_PARAMETERS = "_lowprec_parameters"
_ACTIVATION = "_lowprec_activation"

_MOST_LAYERS = 16  # of one activation
_MOST_VIEWS = 4
_MOST_SITES = 4096
#: Names by which compiled, parallel and other wrappers hold a model.
_WRAPPERS = ("", "_orig_mod", "module")
#: The part of a module's name that belongs to a parametrized one.
_PARAMETRIZED = re.compile(r"(?:^|\.)parametrizations\..*")


class LayerNames:
    """Layers of the parameters of all modules, of their casts, and of the activations that were multiplied by them."""

    def __init__(self) -> None:
        # the last one that was multiplied by a parameter
        self._gradient: StorageWeakRef | None = None
        self._layers = WeakIdKeyDictionary()  # by parameter; empty for those without a module
        self._modules: dict[int, _Module] = {}  # by id
        #: By instruction that multiplied two activations: its code, which keeps its id.
        self._sites: dict[Any, Any] = {}
        self._is_current = False
        self._is_watching = False

    def of(
        self, a: Tensor, b: Tensor, backward: bool, is_named: bool = False, is_needed: bool = True
    ) -> Part:
        """Return the part of a product in its layer; ``is_named`` for those of two activations, too.

        ``is_needed`` says whether its mode depends on its layer.
        """
        layer, place = self._weight(a, b, backward, is_needed)
        other = a if place else b
        if layer and backward:
            self._gradient = StorageWeakRef(other.untyped_storage())
            return Part(layer, "grad_input", place)
        if layer:
            _remember(other, layer)
            return Part(layer, "forward", place)
        if backward:
            return self._of_gradient(a, b)
        if is_named:
            _remember(a, ())
            _remember(b, ())
        return _NO_PART

    def of_convolution(self, x: Tensor, weight: Tensor) -> Part:
        """Return the part of a convolution in its layer; Inductor copies weights to another memory format."""
        layer = self._of_parameter(weight)
        if not layer:
            layer = self._of_copy(weight) or self._of_equal(weight)
            if layer:
                _record(weight, layer)
        if layer:
            _remember(x, layer)
        return Part(layer, "forward", 1)

    def _of_equal(self, x: Tensor) -> Layer:
        """Return the layer of the parameter of this shape whose first filter has the same numbers."""
        if x.requires_grad:
            return ()
        if not self._is_current:
            self._scan()
        for p, layer in list(self._layers.items()):
            if layer and p.shape == x.shape and torch.equal(p[0], x[0]):
                return layer
        return ()

    def _weight(self, a: Tensor, b: Tensor, backward: bool, is_needed: bool) -> tuple[Layer, int]:
        """Return the layer of the operand that is a weight or a copy of one, and its place."""
        for place, x in ((1, b), (0, a)):
            layer = self._of_parameter(x)
            if layer:
                return layer, place
        if backward:
            return (), 0
        # The names of copies are for the report alone, unless modes differ by layer.
        site, code = (None, None) if is_needed else call_site(a, b)
        if code is not None and self._sites.get(site) is code:
            return (), 0
        for place, x in ((1, b), (0, a)):
            layer = self._of_copy(x)
            if not layer and place and x.ndim == 2:
                layer = self._of_module(x)
            if layer:
                _record(x, layer)
                return layer, place
        if code is not None and len(self._sites) < _MOST_SITES:
            self._sites[site] = code
        return (), 0

    def _of_copy(self, x: Tensor) -> Layer:
        """Return the layers of the parameters that a tensor is a function of, if all are known."""
        if x.ndim < 2:
            return ()
        leaves = parameters_behind(x, lambda factor: bool(self._of_parameter(factor)))
        layers = [self._of_parameter(_local(p)) for p in leaves]
        if not all(layers):
            return ()
        return tuple(dict.fromkeys(each for found in layers for each in found))

    def _of_module(self, x: Tensor) -> Layer:
        """Return the layer of a matrix that a module multiplies in its ``forward``.

        The matrix is the module's own, as in `functional_call`, or no result that autograd knows, and has the shape of
        the module's weight.
        """
        module = calling_module()
        if module is None:
            return ()
        known = self._known(module)
        if holds(module, x):
            return known.layer
        if x.requires_grad or _of_activation(x) is not None:
            return ()
        layer: Layer = self._layers_by_shape(module, known.by_shape).get(frozenset(x.shape), ())
        return layer if len(layer) <= 1 else known.layer

    def _known(self, module: torch.nn.Module) -> _Module:
        known = self._modules.get(id(module))
        if not self._is_current or known is None or known.module() is not module:
            self._scan()
            name = type(module).__name__
            known = self._modules.setdefault(id(module), _Module(ref(module), ((name, name),), {}))
        return known

    def of_caller(self) -> Layer:
        """Return the module whose ``forward`` calls, as a layer; none in compiled graphs."""
        module = calling_module(own_frames=1)
        return () if module is None else self._known(module).layer

    def of_activation(self, x: Tensor, layer: Layer = ()) -> Layer:
        """Return the layer that was recorded for a result, after recording another one."""
        if layer:
            _remember(x, layer)
        return _of_activation(x) or ()

    def _layers_by_shape(
        self, module: torch.nn.Module, found: dict[Any, Layer]
    ) -> dict[Any, Layer]:
        if found:
            return found
        found[None] = ()
        matrices = [(p, self._of_parameter(_local(p))) for p in module.parameters() if p.ndim == 2]
        for p, layer in matrices:
            layers = (*found.get(frozenset(p.shape), ()), *layer)
            found[frozenset(p.shape)] = tuple(dict.fromkeys(layers))
        for k in {n for p, _ in matrices for n in p.shape}:  # of all matrices, concatenated
            joined = [(p, layer) for p, layer in matrices if k in p.shape]
            total = sum(p.numel() // k for p, _ in joined)
            layers = tuple(dict.fromkeys(each for _, layer in joined for each in layer))
            found.setdefault(frozenset((k, total)), layers)
        return found

    def add_cast(self, x: Tensor, cast: Tensor) -> None:
        """Record that a tensor is a copy of another one, in case that is a parameter."""
        layer = self.of_any([x])
        if layer and x.device == cast.device:
            _record(cast, layer)

    def _of_gradient(self, a: Tensor, b: Tensor) -> Part:
        """Return the part of a product without a parameter in a backward pass."""
        of_a = _of_activation(a)
        of_b = _of_activation(b)
        layer = of_a or of_b or ()
        if len(layer) != 1:
            layer = self._of_node() or layer
        a_is_gradient = of_a is None
        b_is_gradient = of_b is None
        if a_is_gradient == b_is_gradient:
            # Checkpointing omits the last product of the forward pass.
            a_is_gradient = self._is_gradient(a)
            b_is_gradient = self._is_gradient(b)
        elif a_is_gradient and not layer:  # of attention
            return Part(layer, "grad_input", 1)
        place = None
        if a_is_gradient != b_is_gradient:
            place = 0 if a_is_gradient else 1
        return Part(layer, "grad_weight", place)

    def _is_gradient(self, x: Tensor) -> bool:
        return self._gradient is not None and self._gradient == StorageWeakRef(x.untyped_storage())

    def _of_node(self) -> Layer:
        """Return the layer of the only parameter whose gradient the current node of the backward pass computes."""
        found = []
        for node, _ in getattr(torch._C._current_autograd_node(), "next_functions", ()):
            parameter = _parameter(node)
            if parameter is not None:
                found.append(self._of_parameter(parameter))
        found = [layer for layer in found if layer]
        return found[0] if len(found) == 1 else ()

    def of_any(self, tensors: list[Tensor]) -> Layer:
        """Return the layer of the first tensor that is a parameter."""
        for x in tensors:
            if x.layout is torch.strided and not x.is_quantized:
                layer = self._of_parameter(x)
                if layer:
                    return layer
        return ()

    def _of_parameter(self, x: Tensor) -> Layer:
        found = _find(x)
        if found:
            return found
        if not self._is_current:
            self._scan()
            return _find(x)
        # A parameter whose memory was replaced, as by `model.to` and sharding, is not found.
        base = x._base if x._is_view() else x
        if type(base) is Tensor:
            return ()
        if not isinstance(base, torch.nn.Parameter):
            return ()
        if base not in self._layers:
            self._scan()
        layer: Layer = self._layers.setdefault(base, ())
        if layer:
            _record(base, layer)
        return layer

    def _scan(self) -> None:
        if not self._is_watching:
            hooks.register_module_parameter_registration_hook(self._expire)
            hooks.register_module_buffer_registration_hook(self._expire)
            self._is_watching = True
        self._is_current = True  # before the scan, during which another thread may add a parameter
        modules: list[Any] = [x for x in gc.get_objects() if issubclass(type(x), torch.nn.Module)]
        children = {id(child) for x in modules for child in x._modules.values()}
        self._modules = {}
        found: dict[int, tuple[Tensor, Layer]] = {}
        for root in modules:
            if id(root) in children:
                continue
            named = dict(root.named_modules())
            for name, each in named.items():
                owner = _PARAMETRIZED.sub("", name)
                kind = parametrize.type_before_parametrizations(named[owner])
                self._modules[id(each)] = _Module(
                    ref(each), ((_shown(owner, kind), kind.__name__),), {}
                )
                for p in _matrices(each):
                    _add(found, _local(p), _shown(owner, kind), kind)
        for p, layer in found.values():
            self._layers[p] = layer
            _record(p, layer)

    def _expire(self, *_: Any) -> None:
        self._is_current = False


def _matrices(module: torch.nn.Module) -> list[Any]:
    """Return the parameters of a module, and the buffers in its state that may be weights."""
    found: list[Any] = list(module._parameters.values())
    for name, x in module._buffers.items():
        if (
            x is not None
            and x.ndim > 1
            and x.is_floating_point()
            and name not in module._non_persistent_buffers_set
        ):
            found.append(x)
    return found


def _add(found: dict[int, tuple[Tensor, Layer]], p: Any, name: str, kind: type) -> None:
    if type(p) not in (Tensor, torch.nn.Parameter):
        return
    try:
        start = p.data_ptr()
    except RuntimeError:
        return
    if not start:
        return
    _, layer = found.get(start, (p, ()))
    if (name, kind.__name__) not in layer:
        # An embedding that shares its weight does not multiply.
        others = tuple(x for x in layer if x[1] != "Embedding")
        if not others or not issubclass(kind, torch.nn.Embedding):
            layer = (*others, (name, kind.__name__))
    found[start] = (p, layer)


def _first_byte(x: Tensor) -> int:
    return x.storage_offset() * x.element_size()


def _find(x: Tensor) -> Layer:
    ranges: dict[int, tuple[int, Layer]] | None = getattr(x.untyped_storage(), _PARAMETERS, None)
    if ranges is not None:
        first = _first_byte(x)
        for start, (end, layer) in ranges.items():
            if start <= first < end:
                return layer
    return ()


def _record(p: Tensor, layer: Layer) -> None:
    memory = p.untyped_storage()
    start = _first_byte(p)
    extent = 1 + sum((n - 1) * s for n, s in zip(p.shape, p.stride(), strict=True))
    ranges = {**getattr(memory, _PARAMETERS, {}), start: (start + extent * p.element_size(), layer)}
    setattr(memory, _PARAMETERS, ranges)


def _remember(activation: Tensor, layer: Layer) -> None:
    """Record the layer of an activation, which may be the operand of several layers."""
    layers = dict.fromkeys((*(_of_activation(activation) or ()), *layer))
    setattr(activation.untyped_storage(), _ACTIVATION, tuple(layers)[:_MOST_LAYERS])


def _of_activation(x: Tensor) -> Layer | None:
    """Return the layers of an operand of the forward pass; None for other tensors."""
    return getattr(x.untyped_storage(), _ACTIVATION, None)


def _local(p: Any) -> Any:
    """Return this process's part of a parameter that several share."""
    return getattr(p, "_local_tensor", p)


def _parameter(node: Any) -> Tensor | None:
    """Return the matrix that accumulates the gradient of a node, behind views and casts."""
    for _ in range(_MOST_VIEWS):
        variable = _local(getattr(node, "variable", None))
        if variable is not None:
            return variable if variable.ndim > 1 else None
        following: Any = getattr(node, "next_functions", ())
        if len(following) != 1:
            return None
        node = following[0][0]
    return None


def _shown(name: str, kind: type) -> str:
    parts = name.split(".")
    while parts and parts[0] in _WRAPPERS:
        del parts[0]
    return ".".join(parts) or kind.__name__


NAMES = LayerNames()
