"""``intercept``: lowprec computes the products of an unmodified model, by a PyTorch mode below autograd."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Mapping
from threading import get_ident
from types import MappingProxyType
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch._C import DispatchKey, _len_torch_dispatch_stack
from torch._C import _SetExcludeDispatchKeyGuard as _exclude
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _python_dispatch
from torch.utils._python_dispatch import TorchDispatchMode

from lowprec import policy
from lowprec.core import dispatch
from lowprec.errors import ArrayError, DeviceError, DTypeError, ShapeError, UnsupportedError, warn
from lowprec.modes import MathMode, ModeName, parse_mode
from lowprec.policy.decorators import decorated
from lowprec.policy.protocol import Tier
from lowprec.policy.switches import Hold, acquire, release
from lowprec.torch.aten import ACTED_ON, Rule, Terms, rule_of
from lowprec.torch.interception_report import InterceptedProduct, InterceptionReport, PassedBy
from lowprec.util.lock import locked

_PLAIN = frozenset((Tensor, torch.nn.Parameter))
#: Errors raised before any computation; PyTorch then computes the product.
_REFUSALS = (ArrayError, DTypeError, DeviceError, ShapeError, UnsupportedError)

F = TypeVar("F", bound=Callable[..., Any])
#: The fields of an InterceptedProduct but its count.
_Key = tuple[str, tuple[tuple[int, ...], ...], str, bool, str, PassedBy | None, str]


_FLAGS_OF_ATTENTION = ("flash", "mem_efficient", "cudnn", "overrideable", "math")
_FAST_PATH = "mha fast path"


class _AttentionController:
    """PyTorch's process-wide switches for attention; overlapping blocks of threads restore them once, in any order."""

    name = "torch attention"
    module = "torch"
    tier = Tier.PROCESS
    modes = (MathMode.FP32,)
    switches: Mapping[str, str] = MappingProxyType({})

    def save(self) -> dict[str, Any]:
        flags = _FLAGS_OF_ATTENTION
        found = {flag: getattr(torch._C, f"_get_{flag}_sdp_enabled")() for flag in flags}
        return {**found, _FAST_PATH: torch.backends.mha.get_fastpath_enabled()}

    def set_mode(self, mode: MathMode) -> dict[str, Any]:
        plain = dict.fromkeys(_FLAGS_OF_ATTENTION, False) | {"math": True, _FAST_PATH: False}
        self.restore(plain)
        return plain

    def restore(self, saved: Mapping[str, Any]) -> None:
        for flag in _FLAGS_OF_ATTENTION:
            getattr(torch._C, f"_set_sdp_use_{flag}")(saved[flag])
        torch.backends.mha.set_fastpath_enabled(saved[_FAST_PATH])

    describe = save


_ATTENTION = _AttentionController()


#: Process-wide flags that disable PyTorch's compiler. Overlapping modes of several threads restore them wrongly, so
#: this module restores them.
_FLAGS = [
    name
    for name in ("_is_in_torch_dispatch_mode", "_is_in_non_infra_torch_dispatch_mode")
    if hasattr(_python_dispatch, name)
]

#: The open blocks of all threads, and the flags outside of all.
_open: dict[_Entry, None] = {}
_outside: dict[str, bool] = {}


class _Entry(Hold):
    __slots__ = ("_depth", "scope")

    def __init__(self, scope: intercept) -> None:
        super().__init__()
        self.scope = scope
        self._depth = _len_torch_dispatch_stack()

    def open(self) -> None:
        """Push the mode, and switch attention to its plain form."""
        locked(self._set_process)
        self.scope._mode.__enter__()

    def _set_process(self) -> None:
        if not _open:
            _outside.update({name: getattr(_python_dispatch, name) for name in _FLAGS})
        _open[self] = None
        acquire(self, [_ATTENTION], MathMode.FP32)

    def _restore_process(self) -> None:
        for name, value in _outside.items():
            setattr(_python_dispatch, name, value or bool(_open.keys() - {self}))
        release(self)
        _open.pop(self, None)

    def close(self) -> None:
        """Pop the mode and all above it."""
        while _len_torch_dispatch_stack() > self._depth:
            try:
                self.scope._mode.__exit__(None, None, None)
            except IndexError:  # after an interrupt the mode's stack of flags lacks an entry
                _python_dispatch._pop_mode()
        locked(self._restore_process)


class intercept:
    """Compute the products of PyTorch's own operators by lowprec, in a block.

    The operators are ``mm``, ``bmm``, ``mv``, ``dot``, ``addmm``, ``baddbmm``, ``addmv``, ``addbmm``, and all that are
    made of them: ``matmul``, ``linear``, ``einsum``, layers, attention (the block switches the process to its plain
    form), also under ``torch.inference_mode``. PyTorch computes products of element types on which no mode acts, and
    those inside fused kernels; :meth:`report` names them.

    The block applies to this thread and the threads of a backward pass that starts inside it. A later backward pass is
    PyTorch's own. As under every such mode, ``torch.compile`` compiles nothing; use :func:`inductor_options` for
    compiled models.

    Parameters
    ----------
    math_mode : str or MathMode
        Mode of the products; an ``fp32_guard`` overrides it.

    Raises
    ------
    ModeError
        ``math_mode`` is unknown.

    Examples
    --------
    >>> import torch
    >>> layer = torch.nn.Linear(4, 2)
    >>> with intercept("bf16") as seen:
    ...     layer(torch.ones(3, 4)).sum().backward()
    >>> [(p.operator, p.backward, p.count) for p in seen.report().taken]
    [('addmm', False, 1), ('mm', True, 1)]
    """

    def __init__(self, math_mode: ModeName | MathMode) -> None:
        self.math_mode = parse_mode(math_mode)
        self._mode = _Intercepting(self.math_mode)

    def __enter__(self) -> intercept:
        entry = _Entry(self)
        try:
            entry.open()
        except BaseException:
            entry.close()
            raise
        return self

    def __exit__(self, *exc_info: object) -> None:
        opened = [entry for entry in list(_open) if entry.scope is self and entry.thread == get_ident()]
        if opened:
            opened[-1].close()
        else:
            warn(f"{self!r} was left in another thread than it was entered in, where it stays open")

    def __call__(self, function: F) -> F:
        """Return the function with this block around each of its calls, which share one report.

        Raises TypeError for an ``async def``: the block belongs to the thread, in which other tasks run meanwhile.
        """
        if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
            raise TypeError(
                f"{self!r} decorates functions that run in one piece, got an async one; open a block in it, between "
                "two awaits"
            )
        return cast(F, decorated(self, function))

    def report(self) -> InterceptionReport:
        """Return the products so far, with the reason for each that PyTorch computed."""
        return self._mode.report()

    def __repr__(self) -> str:
        return f"lowprec.torch.intercept({self.math_mode.value!r})"


class _Intercepting(TorchDispatchMode):
    def __init__(self, math_mode: MathMode) -> None:
        super().__init__()
        self._math_mode = math_mode
        # By thread, so that no lock is needed.
        self._counts: dict[tuple[int, _Key], int] = {}
        self._records_grad = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # PyTorch excludes these keys here; kernels with lazy conjugation (pinv) would then omit the conjugation.
        with _exclude(DispatchKey.Conjugate, False), _exclude(DispatchKey.Negative, False):
            return self._dispatch(func, types, args, kwargs or {})

    def _dispatch(self, func: Any, types: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        if not _PLAIN.issuperset(types):
            # A subclass splits the operator into those of its plain tensors, which this mode sees. A fake tensor has
            # none: it is only a shape, as in DTensor's sharding rules.
            is_fake = any(issubclass(t, FakeTensor) for t in types)
            return func(*args, **kwargs) if is_fake else NotImplemented
        rule = rule_of(func)
        if rule is None:
            return func(*args, **kwargs)
        if rule.decomposes:
            with self:
                return func.decompose(*args, **kwargs)
        if rule.terms is None:
            found = func(*args, **kwargs)
            self._count(rule.name, (*args, *kwargs.values()), "", rule.passed_by)
            return found
        return self._multiply(rule, rule.terms, func, args, kwargs)

    def _multiply(self, rule: Rule, make: Callable[..., Terms], func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        given = dict(kwargs)
        out = given.pop("out", None)
        terms = make(*args, **given)
        if terms.alpha == 0:  # no product: PyTorch, as BLAS, does not read the factors
            return func(*args, **kwargs)
        operands = (terms.a, terms.b)
        reason, detail = PassedBy.ELEMENT_TYPE, ""
        if terms.a.dtype in ACTED_ON[self._math_mode] and rule.accepts(terms, out):  # else PyTorch raises its error
            try:
                mode = policy.resolve(self._math_mode).mode.value
                found = _product(terms, mode)
            except _REFUSALS as error:
                reason, detail = PassedBy.REFUSED, str(error)
            else:
                self._count(rule.name, operands, mode, None)
                return _stored(found, args[0] if rule.in_place else out)
        result = func(*args, **kwargs)
        self._count(rule.name, operands, "", reason, detail)
        return result

    def _count(self, name: str, arguments: Any, mode: str, reason: PassedBy | None, detail: str = "") -> None:
        tensors = [x for x in arguments if isinstance(x, Tensor)]
        shapes = tuple(tuple(x.shape) for x in tensors)
        dtype = str(tensors[0].dtype).removeprefix("torch.") if tensors else ""
        backward = torch._C._current_autograd_node() is not None
        if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
            self._records_grad = True
        key = get_ident(), (name, shapes, dtype, backward, mode, reason, detail)
        self._counts[key] = self._counts.get(key, 0) + 1

    def report(self) -> InterceptionReport:
        """Return the counts of all threads."""
        sums: Counter[_Key] = Counter()
        for (_, key), count in self._counts.copy().items():
            sums[key] += count
        products = tuple(InterceptedProduct(*key[:5], count, *key[5:]) for key, count in sums.items())
        remarks: tuple[str, ...] = ()
        if self._records_grad and not any(p.backward for p in products):
            remarks = (
                "No backward pass ran inside the block; one that runs after it is PyTorch's own, in full precision.",
            )
        return InterceptionReport(self._math_mode.value, products, remarks)


def _product(terms: Terms, mode: Any) -> Tensor:
    a, b, c, alpha, beta = terms
    rest: dict[str, Any] = {}
    if c is not None and c.ndim == 1 and c.shape == b.shape[1:] and alpha == beta == 1:
        rest = {"bias": c.detach()}
    elif c is not None:
        rest = {"alpha": alpha} if beta == 0 else {"c": c.detach(), "alpha": alpha, "beta": beta}
    return dispatch.matmul(a.detach(), b.detach(), math_mode=mode, **rest)


def _stored(found: Tensor, out: Tensor | None) -> Tensor:
    if out is None:
        return found
    if out.shape != found.shape:
        out.resize_(found.shape)
    return out.copy_(found)
