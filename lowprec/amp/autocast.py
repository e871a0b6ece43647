"""A namespace of the Array API whose functions cast by a policy, and whose products are lowprec's.

Only functions are wrapped: ``xp.matmul(a, b)`` is cast, but ``a @ b`` is the library's own operator.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import astuple, dataclass
from threading import get_ident
from types import ModuleType
from typing import Any

from lowprec import contractions, plotting
from lowprec.amp.casting import by_list, has_type, is_operand
from lowprec.amp.policy import Policy, as_policy
from lowprec.arrays import DLPackArray, library_name, library_of
from lowprec.arrays.namespaces import dtype_name
from lowprec.core import dispatch
from lowprec.errors import ArrayError, quoted
from lowprec.formats import OPERAND_DTYPES
from lowprec.report import Report
from lowprec.util.tables import Table

_log = logging.getLogger("lowprec.amp")

_PRODUCTS: dict[str, Callable[..., Any]] = {
    "matmul": dispatch.matmul,
    "tensordot": contractions.tensordot,
    "vecdot": contractions.vecdot,
    "linear": contractions.linear,
}

#: Namespaces within a namespace.
_PARTS = ("linalg", "fft", "nn", "functional")

#: Element types of lowprec's operands; the library multiplies others (integers, booleans).
_DTYPES = frozenset(dtype.label for dtype in OPERAND_DTYPES)

#: Functions of the standard that PyTorch lacks or defines differently.
_TORCH: dict[str, Callable[[Any], Any]] = {
    "astype": lambda torch: lambda x, dtype, copy=True: x.to(dtype, copy=copy),
    "permute_dims": lambda torch: torch.permute,
    "matrix_transpose": lambda torch: lambda x: x.mT,
    "expand_dims": lambda torch: lambda x, axis=0: x.unsqueeze(axis),
    "max": lambda torch: torch.amax,
    "min": lambda torch: torch.amin,
    "vecdot": lambda torch: lambda x, y, axis=-1: torch.linalg.vecdot(x, y, dim=axis),
}


@dataclass(frozen=True)
class AutocastRow:
    """Counts of the calls of one function.

    >>> AutocastRow("matmul", "allow", 2, 2, 2, "bfloat16").cast
    2
    """

    function: str
    list: str  #: ``"allow"``, ``"deny"``, ``"infer"``, or ``"-"`` for a function on none.
    calls: int
    cast: int  #: Number of calls with cast operands or rounded products.
    by_lowprec: int  #: Number of calls computed by lowprec.
    to: str  #: Types of the casts, ``"-"`` if there was none.


@dataclass(frozen=True)
class AutocastReport(Report):
    """The calls through a namespace, one row per function; ``print`` shows a table.

    >>> AutocastReport(Policy.preset("O1"), (AutocastRow("matmul", "allow", 2, 2, 2, "float16"),)).calls
    2
    """

    policy: Policy
    rows: tuple[AutocastRow, ...]

    @property
    def calls(self) -> int:
        return sum(row.calls for row in self.rows)

    @property
    def cast(self) -> int:
        """Number of calls with cast operands or rounded products."""
        return sum(row.cast for row in self.rows)

    def tables(self) -> list[Table]:
        title = f"converted {self.cast} of {self.calls} calls (compute={self.policy.compute})"
        columns = ("function", "list", ">calls", ">cast", ">by lowprec", "to")
        rows = [list(map(str, astuple(row))) for row in self.rows]
        return [Table(title, columns, rows)]

    def figure(self) -> Any:
        names = [r.function for r in self.rows]
        counts = {
            "cast": [r.cast for r in self.rows],
            "as they are": [r.calls - r.cast for r in self.rows],
        }
        return plotting.bar_figure("autocast", names, counts, "calls")


#: Number of calls by thread (so that no lock is needed), function, type of the cast, and whether lowprec computed it.
_Counts = dict[tuple[int, str, str | None, bool], int]


class AutocastNamespace:
    """The functions of a namespace, by a policy; see :func:`autocast`.

    >>> import numpy as np
    >>> autocast(np, "O1").policy.compute
    'float16'
    """

    def __init__(self, xp: Any, policy: Policy, counts: _Counts, whole: Any = None) -> None:
        self._base = xp
        self._policy = policy
        self._counts = counts
        #: The namespace that holds the element types, for a part such as ``linalg``.
        self._whole = xp if whole is None else whole

    @property
    def policy(self) -> Policy:
        """The settings on which casts depend."""
        return self._policy

    def __repr__(self) -> str:
        return f"autocast({getattr(self._whole, '__name__', self._whole)}, {self._policy})"

    def __dir__(self) -> list[str]:
        return dir(self._base)

    def __enter__(self) -> AutocastNamespace:
        return self

    def __exit__(self, *_: object) -> None:
        self.report()

    def report(self) -> AutocastReport:
        """Return the calls so far, and log their casts (``lowprec.amp``, level INFO)."""
        rows = list(self._rows())
        rows.sort(key=lambda row: (-row.cast, row.function))
        report = AutocastReport(self._policy, tuple(rows))
        _log.info("converted %d of %d calls", report.cast, report.calls)
        return report

    def _rows(self) -> Iterator[AutocastRow]:
        kinds: dict[str, list[tuple[str | None, bool, int]]] = {}
        for key, n in self._counts.copy().items():
            _, name, to, by_lowprec = key
            kinds.setdefault(name, []).append((to, by_lowprec, n))
        for name, counted in kinds.items():
            types = dict.fromkeys(to for to, _, _ in counted if to)
            yield AutocastRow(
                name,
                self._policy.list_of(name) or "-",
                calls=sum(n for _, _, n in counted),
                cast=sum(n for to, _, n in counted if to),
                by_lowprec=sum(n for _, by_lowprec, n in counted if by_lowprec),
                to=", ".join(types) or "-",
            )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__array_namespace_info__":
            raise AttributeError(name)
        base = self._base
        if name in _TORCH and getattr(base, "__name__", "") == "torch":
            value = _TORCH[name](base)
        else:
            value = getattr(base, name)
        if isinstance(value, ModuleType) and name in _PARTS:
            value = AutocastNamespace(value, self._policy, self._counts, self._whole)
        elif callable(value) and not isinstance(value, type | ModuleType) and name[0] != "_":
            value = self._wrapped(name, value)
        self.__dict__[name] = value
        return value

    def _wrapped(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        policy = self._policy
        counts = self._counts
        whole = self._whole
        is_product = name in _PRODUCTS
        which = None
        if policy.functions:
            which = policy.list_of(name)
        elif is_product and not has_type(whole, policy.compute):
            which = "allow"  # the library lacks the 16-bit type, so a math mode rounds the operands
        inputs = getattr(function, "nin", None)  # NumPy's functions also accept a positional `out`

        def call(*args: Any, **kwargs: Any) -> Any:
            if inputs is not None and len(args) > inputs:
                outs = args[inputs:]
                args = args[:inputs]
                kwargs["out"] = outs if len(outs) > 1 else outs[0]
            to = None
            scope: AbstractContextManager[Any] = nullcontext()
            if which is not None:
                args, kwargs, to, scope = by_list(policy.compute, which, args, kwargs, whole)
            with scope:
                by_lowprec = is_product and _are_multiplied(name, args)
                if by_lowprec:
                    result = _multiplied(whole, name, args, kwargs)
                else:
                    result = function(*args, **kwargs)
            key = get_ident(), name, to, by_lowprec
            counts[key] = counts.get(key, 0) + 1
            return result

        return functools.update_wrapper(
            call, function, assigned=("__name__", "__doc__"), updated=()
        )


def _are_multiplied(name: str, args: tuple[Any, ...]) -> bool:
    """Whether lowprec computes the product; for arguments of other kinds it raises the error."""
    if name == "linear" and (len(args) < 2 or args[1].ndim != 2):
        return False  # PyTorch accepts keywords of its own, and a vector
    return all(dtype_name(x) in _DTYPES for x in args if is_operand(x))


def _multiplied(xp: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    multiply = _PRODUCTS[name]
    if "dims" in kwargs:  # PyTorch's word
        kwargs["axes"] = kwargs.pop("dims")
    libraries = [library_name(x) for x in args if is_operand(x)]
    if "dlpack" not in libraries:
        return multiply(*args, **kwargs)
    result = multiply(*map(_as_numpy, args), **kwargs)
    if not result.ndim:
        return xp.from_dlpack(result.reshape(()))
    return xp.from_dlpack(DLPackArray(result))


def _as_numpy(x: Any) -> Any:
    """Return an array as NumPy's; other arguments are returned unchanged."""
    if is_operand(x):
        return library_of(x).view(x).ndarray()
    return x


def autocast(xp: Any, policy: Policy | str = "O1") -> AutocastNamespace:
    """Return a namespace of the Array API whose functions cast by a policy.

    lowprec computes ``matmul``, ``tensordot``, ``vecdot`` and PyTorch's ``nn.functional.linear``. Where a library lacks
    a 16-bit type, float32 operands are multiplied in the math mode of that type. Inside ``fp32_guard`` the functions on
    the allow list compute in float32. ``jax.jit`` and other transformations count a call when it is traced.

    Parameters
    ----------
    xp : module
        NumPy, PyTorch, ``jax.numpy``, CuPy, array_api_strict or another namespace. The policy replaces that of a
        namespace returned by :func:`autocast`.
    policy : Policy or {"O0", "O1", "O2", "O3"}

    Returns
    -------
    AutocastNamespace
        Threads may share it. At the end of a ``with`` block it logs the number of cast calls.

    Raises
    ------
    ArrayError
        ``xp`` has no ``matmul``.
    SettingError
        ``policy`` is not a policy.

    Examples
    --------
    >>> import numpy as np
    >>> xp = autocast(np, Policy.preset("O1", half="bfloat16"))
    >>> x = xp.ones((2, 2), dtype=xp.float32)
    >>> xp.matmul(x, x).dtype.name, xp.exp(xp.matmul(x, x)).dtype.name
    ('bfloat16', 'float32')
    >>> print(xp.report())
    converted 3 of 4 calls (compute=bfloat16)
      function  list   calls  cast  by lowprec  to
      matmul    allow      2     2           2  bfloat16
      exp       deny       1     1           0  float32
      ones      -          1     0           0  -
    """
    base = xp._base if isinstance(xp, AutocastNamespace) else xp
    if not hasattr(base, "matmul"):
        raise ArrayError(f"autocast takes a namespace of arrays, such as numpy, got {quoted(base)}")
    return AutocastNamespace(base, as_policy(policy), {})
