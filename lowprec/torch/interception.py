"""Every product of an unmodified model by lowprec: a mode of PyTorch's that sees its operators below autograd."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from threading import get_ident
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
from lowprec.errors import (
    ArrayError,
    DeviceError,
    DTypeError,
    LowprecError,
    ShapeError,
    UnsupportedError,
)
from lowprec.modes import MathMode, parse_mode
from lowprec.policy.decorators import decorated
from lowprec.policy.entries import Entry, Scope
from lowprec.policy.switches import hold, release
from lowprec.torch.attention import CONTROLLER
from lowprec.torch.interception_report import InterceptedProduct, InterceptionReport, PassedBy
from lowprec.torch.products import ACTED_ON, Form, Terms, form_of

_PLAIN = frozenset((Tensor, torch.nn.Parameter))
#: What is raised before any work is done: PyTorch multiplies then.
_REFUSALS = (ArrayError, DTypeError, DeviceError, ShapeError, UnsupportedError)

F = TypeVar("F", bound=Callable[..., Any])
_Key = tuple[str, tuple[tuple[int, ...], ...], str, bool, str, PassedBy | None, str]


#: By which PyTorch's compiler knows that such a mode is active, and compiles nothing. They belong to the process, and
#: modes of threads that overlap leave them wrong, so they are put back here.
_FLAGS = [
    name
    for name in ("_is_in_torch_dispatch_mode", "_is_in_non_infra_torch_dispatch_mode")
    if hasattr(_python_dispatch, name)
]

#: The blocks of all threads that are open, and the flags outside of all.
_open: dict[_Visit, None] = {}
_outside: dict[str, bool] = {}


class _Visit(Entry):
    """One run of a block."""

    __slots__ = ("_depth",)

    def open(self, scope: intercept) -> None:
        """Push the mode, and switch attention to its plain form."""
        self.scope = scope
        self._depth = _len_torch_dispatch_stack()
        if not _open:
            _outside.update({name: getattr(_python_dispatch, name) for name in _FLAGS})
        self.is_open = True
        _open[self] = None
        hold(self, [CONTROLLER], MathMode.FP32, False)
        scope._mode.__enter__()

    def close(self) -> list[str]:
        """Pop the mode and all above it."""
        if not self.is_open:
            return []
        while _len_torch_dispatch_stack() > self._depth:
            try:
                self.scope._mode.__exit__(None, None, None)
            except IndexError:  # the mode's own stack of flags is one short if this was interrupted
                _python_dispatch._pop_mode()
        _open.pop(self, None)
        for name, value in _outside.items():
            setattr(_python_dispatch, name, value or bool(_open))
        release(self)
        self.is_open = False
        self.statement = None
        return []


class intercept(Scope):
    """Take the products of PyTorch's own operators through lowprec.

    It is entered as a ``with`` block, or decorates a function.

    Taken are ``mm``, ``bmm``, ``mv``, ``dot``, ``addmm``, ``baddbmm``, ``addmv``, ``addbmm``, and all that PyTorch
    makes of them: ``matmul``, ``linear``, ``einsum``, layers, attention (in its plain form, to which the block switches
    the process), under ``torch.inference_mode`` too. Products on whose element types no mode acts, and those inside
    fused kernels, are left to PyTorch; :meth:`report` names them.

    The block sees the operators that run inside it, in this thread and in the threads of a backward pass that it
    starts. A backward pass after the block is PyTorch's own. What ``torch.compile`` would compile runs as it is, as
    under every such mode of PyTorch's; :func:`inductor_options` is for compiled models.

    Parameters
    ----------
    math_mode : str or MathMode
        Of the products; an ``fp32_guard`` stands above it.

    Raises
    ------
    ModeError
        If there is no such mode.

    Examples
    --------
    >>> import torch
    >>> layer = torch.nn.Linear(4, 2)
    >>> with intercept("bf16") as seen:
    ...     layer(torch.ones(3, 4)).sum().backward()
    >>> [(p.operator, p.backward, p.count) for p in seen.report().taken]
    [('addmm', False, 1), ('mm', True, 1)]
    """

    _entry_type = _Visit

    def __init__(self, math_mode: str | MathMode) -> None:
        self.math_mode = parse_mode(math_mode)
        self._mode = _Intercepting(self.math_mode)

    def _last_entry(self) -> _Visit | None:
        found = [visit for visit in list(_open) if visit.scope is self]
        return found[-1] if found else None

    def __call__(self, function: F) -> F:
        """Return the function with this block around each of its calls; those of all calls are in one report.

        Raises TypeError for an ``async def``: the block is the thread's, and other tasks run while one waits.
        """
        if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
            raise TypeError(
                f"{self!r} decorates functions that run in one piece, got an async one; open a block around what it "
                "calls between two awaits"
            )
        return cast(F, decorated(self, function))

    def report(self) -> InterceptionReport:
        """Return which products were taken so far, and which passed by and why."""
        return self._mode.report()

    def __repr__(self) -> str:
        return f"lowprec.torch.intercept({self.math_mode.value!r})"


class _Intercepting(TorchDispatchMode):
    def __init__(self, math_mode: MathMode) -> None:
        super().__init__()
        self._math_mode = math_mode
        # By thread too, so that each thread writes its own entries and no lock is needed.
        self._counts: dict[tuple[int, _Key], int] = {}
        self._records_grad = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        # PyTorch excludes these keys in here, and kernels that conjugate lazily, as pinv's does, would not conjugate.
        with _exclude(DispatchKey.Conjugate, False), _exclude(DispatchKey.Negative, False):
            return self._dispatch(func, types, args, kwargs or {})

    def _dispatch(self, func: Any, types: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        form = form_of(func)
        if not _PLAIN.issuperset(types):
            # A subclass splits the operator into those of the tensors it holds, and this mode sees them. A fake one
            # holds none: it stands for a shape, as where a DTensor's is worked out.
            is_fake = any(issubclass(t, FakeTensor) for t in types)
            return func(*args, **kwargs) if is_fake else NotImplemented
        if form is None:
            return func(*args, **kwargs)
        if form.decomposes:
            with self:
                return func.decompose(*args, **kwargs)
        if form.terms is None:
            found = func(*args, **kwargs)
            self._count(form.name, (*args, *kwargs.values()), "", form.passed_by)
            return found
        return self._multiply(form, func, args, kwargs)

    def _multiply(self, form: Form, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        given = dict(kwargs)
        out = given.pop("out", None)
        assert form.terms is not None
        terms = form.terms(*args, **given)
        if terms.alpha == 0:  # no product: PyTorch, as BLAS, does not read the factors
            return func(*args, **kwargs)
        operands = (terms.a, terms.b)
        why, detail = PassedBy.ELEMENT_TYPE, ""
        if terms.a.dtype in ACTED_ON and form.takes(terms, out):  # else PyTorch says what is wrong
            try:
                mode = policy.resolve(self._math_mode).mode.value
                found = _product(terms, mode)
            except LowprecError as error:
                if not isinstance(error, _REFUSALS):
                    raise
                why, detail = PassedBy.REFUSED, str(error)
            else:
                self._count(form.name, operands, mode, None)
                return _stored(found, args[0] if form.in_place else out)
        result = func(*args, **kwargs)
        self._count(form.name, operands, "", why, detail)
        return result

    # -- counting ---------------------------------------------------------------------------------

    def _count(
        self, name: str, arguments: Any, mode: str, why: PassedBy | None, detail: str = ""
    ) -> None:
        tensors = [x for x in arguments if isinstance(x, Tensor)]
        shapes = tuple(tuple(x.shape) for x in tensors)
        dtype = str(tensors[0].dtype).removeprefix("torch.") if tensors else ""
        backward = torch._C._current_autograd_node() is not None
        if torch.is_grad_enabled() and any(x.requires_grad for x in tensors):
            self._records_grad = True
        key = get_ident(), (name, shapes, dtype, backward, mode, why, detail)
        self._counts[key] = self._counts.get(key, 0) + 1

    def report(self) -> InterceptionReport:
        """Return the counts of all threads."""
        sums: dict[_Key, int] = {}
        for (_, key), count in self._counts.copy().items():
            sums[key] = sums.get(key, 0) + count
        products = tuple(
            InterceptedProduct(name, shapes, dtype, backward, mode, count, why, detail)
            for (name, shapes, dtype, backward, mode, why, detail), count in sums.items()
        )
        remarks: tuple[str, ...] = ()
        if self._records_grad and not any(p.backward for p in products):
            remarks = (
                "No backward pass ran inside the block; one that runs after it is PyTorch's own, in full precision.",
            )
        return InterceptionReport(self._math_mode.value, products, remarks)


def _product(terms: Terms, mode: str) -> Tensor:
    """Multiply; here autograd is done with the operands, which may still say that they require grad."""
    a, b, c, alpha, beta = terms
    rest: dict[str, Any] = {}
    if (
        c is not None
        and c.ndim == 1
        and a.ndim == b.ndim == 2
        and alpha == beta == 1
        and len(c) == b.shape[-1]
    ):
        rest = {"bias": c.detach()}
    elif c is not None:
        rest = {"alpha": alpha} if beta == 0 else {"c": c.detach(), "alpha": alpha, "beta": beta}
    found: Tensor = dispatch.matmul(a.detach(), b.detach(), math_mode=mode, **rest)
    return found


def _stored(found: Tensor, out: Tensor | None) -> Tensor:
    if out is None:
        return found
    if out.shape != found.shape:
        out.resize_(found.shape)
    return out.copy_(found)
