"""Controller of the process-wide switches of PyTorch 2.9 and later; the module is the controller.

The old switches are for all products, the newer ones for a backend and an operation. An old switch cannot be read
while it disagrees with the newer ones. A newer switch with value ``"none"`` inherits the value of its backend, or of
all backends. To restore all switches exactly, each one's own value is saved. If these rules hide a value, other
switches are set to full FP32 while it is read; the guard sets them so in any case.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from types import ModuleType, SimpleNamespace
from typing import Any, TypeVar

from lowprec.errors import BackendError, UnsupportedError
from lowprec.modes import MathMode
from lowprec.policy.protocol import raised_in

T = TypeVar("T")
Pair = tuple[str, str]

_OLD = "get_float32_matmul_precision()"
_OLD_CUDNN = "backends.cudnn.allow_tf32"
#: Public name and description of each newer switch, by the arguments of PyTorch's getter.
_LEAVES: dict[Pair, tuple[str, str]] = {
    ("cuda", "matmul"): ("backends.cuda.matmul.fp32_precision", "products on CUDA"),
    ("cuda", "conv"): ("backends.cudnn.conv.fp32_precision", "convolutions on CUDA"),
    ("cuda", "rnn"): ("backends.cudnn.rnn.fp32_precision", "recurrent networks on CUDA"),
    ("mkldnn", "matmul"): ("backends.mkldnn.matmul.fp32_precision", "products on the CPU (oneDNN)"),
    ("mkldnn", "conv"): ("backends.mkldnn.conv.fp32_precision", "convolutions on the CPU"),
    ("mkldnn", "rnn"): ("backends.mkldnn.rnn.fp32_precision", "recurrent networks on the CPU"),
}
_PAIRS = tuple(_LEAVES)
_MATMULS: tuple[Pair, ...] = (("cuda", "matmul"), ("mkldnn", "matmul"))
_CUDNN: tuple[Pair, ...] = (("cuda", "conv"), ("cuda", "rnn"))
_ALL: Pair = ("generic", "all")
_BACKENDS: tuple[Pair, ...] = (("cuda", "all"), ("mkldnn", "all"))
_NAMES = (_OLD, _OLD_CUDNN, *(name for name, _ in _LEAVES.values()))
# The pairs as two argument lists for `map`, for speed.
_FIRST, _SECOND = zip(*_PAIRS, strict=True)
_EVERY_FIRST, _EVERY_SECOND = zip(*_PAIRS, _ALL, *_BACKENDS, strict=True)
_PASSED_ON = ["none"] * (1 + len(_BACKENDS))

# Values of the old switch, and of the newer switches of CUDA and oneDNN, in each mode. CUDA has no bfloat16 for float32
# operands; PyTorch's "medium" means TF32 there.
_WORDS: dict[MathMode, tuple[str, str, str]] = {
    MathMode.FP32: ("highest", "ieee", "ieee"),
    MathMode.FP32_PEDANTIC: ("highest", "ieee", "ieee"),
    MathMode.TF32: ("high", "tf32", "tf32"),
    MathMode.BF16: ("medium", "tf32", "bf16"),
}
_VALUES: dict[MathMode, list[str]] = {}
#: Result of `save` in each mode.
_SET: dict[MathMode, dict[str, Any]] = {}
for _mode, (_old, _cuda, _onednn) in _WORDS.items():
    _VALUES[_mode] = [_cuda if _backend == "cuda" else _onednn for _backend, _ in _PAIRS]
    _SET[_mode] = dict(zip(_NAMES, (_old, _cuda == "tf32", *_VALUES[_mode]), strict=True))


#: The functions behind `torch.get_float32_matmul_precision`, `torch.backends.*.fp32_precision` and so on, ten times as
#: fast.
_FUNCTIONS = {
    "get_old": "_get_float32_matmul_precision",
    "put_old": "_set_float32_matmul_precision",
    "get_cudnn": "_get_cudnn_allow_tf32",
    "put_cudnn": "_set_cudnn_allow_tf32",
    "get": "_get_fp32_precision_getter",
    "put": "_set_fp32_precision_setter",
}


@cache
def _functions(torch: ModuleType) -> SimpleNamespace:
    try:
        functions = SimpleNamespace(
            **{name: getattr(torch._C, function) for name, function in _FUNCTIONS.items()}
        )
    except AttributeError as error:
        raise UnsupportedError(
            f"the switches of PyTorch {getattr(torch, '__version__', 'of an unknown version')} are not those of 2.9 "
            f"and later, which lowprec supports: {error}"
        ) from None
    # Some versions warn once that the old switches are deprecated, which a filter may turn into an error.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _read(functions.get_old)
        _read(functions.get_cudnn)
    return functions


name = "torch"
module = "torch"
tier = "process"
modes = tuple(_WORDS)
switches: Mapping[str, str] = {
    _OLD: "products, all devices",
    _OLD_CUDNN: "cuDNN: convolutions, recurrent networks",
    **dict(_LEAVES.values()),
}


def save() -> dict[str, Any]:
    do = _functions(sys.modules["torch"])
    leaves = list(map(do.get, _EVERY_FIRST, _EVERY_SECOND))
    parents = leaves[len(_PAIRS) :]
    del leaves[len(_PAIRS) :]
    if parents != _PASSED_ON:
        leaves = _own_values(do, leaves)
    old, cudnn = _read(do.get_old), _read(do.get_cudnn)
    # While the newer switches are at full FP32, the old one for products can always be read, that of cuDNN only if
    # it is False.
    if old is None:
        old = _while_set(do, _held(leaves, _MATMULS), "ieee", do.get_old)
    if cudnn is None:
        read = partial(_read, do.get_cudnn)
        cudnn = _while_set(do, _held(leaves, _CUDNN), "ieee", read) is not False
    return dict(zip(_NAMES, (old, cudnn, *leaves)))  # noqa: B905 - equal lengths; strict is slower


def set_mode(mode: MathMode) -> Mapping[str, Any]:
    """Set every switch, the old ones first, because they also set some of the newer ones."""
    old, cuda, _ = _WORDS[mode]
    values = _VALUES[mode]
    do = _functions(sys.modules["torch"])
    do.put_old(old)
    do.put_cudnn(cuda == "tf32")
    list(map(do.put, _FIRST, _SECOND, values))
    if list(map(do.get, _FIRST, _SECOND)) != values or do.get_old() != old:
        raise BackendError(f"PyTorch's switches did not take {old!r}")
    return _SET[mode]


def restore(saved: Mapping[str, Any]) -> None:
    """Restore every switch, the old ones first, because they also set some of the newer ones."""
    do = _functions(sys.modules["torch"])
    old, cudnn, *leaves = map(saved.__getitem__, _NAMES)
    do.put_old(old)
    do.put_cudnn(cudnn)
    list(map(do.put, _FIRST, _SECOND, leaves))


def describe() -> dict[str, Any]:
    do = _functions(sys.modules["torch"])
    found: dict[str, Any] = {_OLD: _read(do.get_old), _OLD_CUDNN: _read(do.get_cudnn)}
    for name, value in found.items():
        if value is None:
            found[name] = "refused by PyTorch: the old and the newer switches do not agree"
    for pair, (name, _) in _LEAVES.items():
        found[name] = do.get(*pair)
    return found


def _read(getter: Callable[[], T]) -> T | None:
    try:
        return getter()
    except RuntimeError as error:
        if not raised_in(error, __name__):
            raise
        return None


def _held(leaves: Sequence[str], pairs: Sequence[Pair]) -> dict[Pair, str]:
    return {pair: leaves[_PAIRS.index(pair)] for pair in pairs}


def _while_set(
    do: SimpleNamespace, held: Mapping[Pair, str], value: str, read: Callable[[], T]
) -> T:
    """Call ``read`` while some newer switches have this value, then restore the values ``held``."""
    try:
        for pair in held:
            do.put(*pair, value)
        return read()
    finally:
        for pair, before in held.items():
            do.put(*pair, before)


def _own_values(do: SimpleNamespace, leaves: list[str]) -> list[str]:
    """Return the newer switches' own values: "none" for one that inherits its value."""
    passes_on = _followers(do, _ALL, (*_BACKENDS, *_PAIRS))

    def below_backends() -> set[Pair]:
        followers: set[Pair] = set()
        for parent in _BACKENDS:
            children = [pair for pair in _PAIRS if pair[0] == parent[0]]
            followers |= _followers(do, parent, children)
        return followers

    # A backend whose switch is "none" inherits from the switch of all backends. That switch is set to "none" as well
    # for this test, because its value could equal the one that the backend's switch had.
    passes_on |= _while_set(do, {_ALL: do.get(*_ALL)}, "none", below_backends)
    return [
        "none" if pair in passes_on else leaf for pair, leaf in zip(_PAIRS, leaves, strict=True)
    ]


def _followers(do: SimpleNamespace, parent: Pair, children: Sequence[Pair]) -> set[Pair]:
    held = do.get(*parent)
    if held == "none":
        return set()

    def values() -> list[str]:
        return [do.get(*child) for child in children]

    before = values()
    # "none" and "ieee" both mean full FP32 for the products of other threads meanwhile.
    other = "none" if held == "ieee" else "ieee"
    after = _while_set(do, {parent: held}, other, values)
    rows = zip(children, before, after, strict=True)
    return {child for child, old, new in rows if old != new}
