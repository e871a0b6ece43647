"""``intercept``: lowprec computes the products of an unmodified program of NumPy, SciPy and scikit-learn, on Linux.

The BLAS calls of all loaded libraries arrive at `backends/cpu/native/blas.cpp`, so no function of NumPy is replaced,
and no Python runs in a product. Inner loops of NumPy's products are replaced, too: float16 never reaches the BLAS.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy._core import _multiarray_umath  # type: ignore[attr-defined]

from lowprec import policy
from lowprec.core import blas
from lowprec.core.interception import Interception
from lowprec.core.interception_report import (
    NO_STATISTICS,
    InterceptedProduct,
    InterceptionReport,
    PassedBy,
)
from lowprec.core.ledger import LedgerRow
from lowprec.core.operand_statistics import operand_statistics
from lowprec.core.recording import ANY_PASS, Kind, Recorder
from lowprec.core.rules import RulesLike
from lowprec.errors import ModeError
from lowprec.modes import MathMode, parse_mode
from lowprec.policy import entries
from lowprec.policy.entries import Entry

__all__ = ["intercept"]


def __dir__() -> list[str]:
    return __all__


#: By ``enum Reason`` of `native/blas.hpp`.
_REASONS = (
    None,
    PassedBy.ELEMENT_TYPE,
    PassedBy.LONG,
    PassedBy.NO_MEMORY,
    PassedBy.LINEAR_ALGEBRA,
    PassedBy.VECTORS,
    PassedBy.OTHER_THREAD,
    PassedBy.LAYER,
    PassedBy.OWN_LOOP,
)
#: NumPy's letters of the letters of the BLAS.
_LETTERS = {b"s": "f", b"c": "F", b"z": "D"}
_NOT_SEEN = (
    "Not seen: dot, inner and tensordot of float16, integers and objects, einsum without optimize, outer, banded, "
    "packed and sparse matrices, and others that are multiplied by loops of their own."
)


class intercept(Interception):
    """Compute the products of NumPy, SciPy, scikit-learn and other libraries of this process by lowprec, in a block.

    They are the calls of BLAS's ``gemm``, ``gemv``, ``symm``, ``hemm``, ``syrk``, ``herk``, ``gemmt``, ``trmm``,
    ``symv`` and ``hemv``, by ``@``, ``dot``, ``ndarray.dot``, ``einsum(optimize=True)``, ``scipy.linalg.blas`` and all
    others, and ``@`` of float16, in FP32 or a mode that quantises. Products of ``dot`` and ``ger`` and those inside
    LAPACK and other solvers keep their precision; modes that quantise compute products with vectors in ``bf16``.
    :meth:`report` names these, and products that are not seen.

    The block applies to this thread and to those that it starts. It is not to be left in another task of asyncio: leave
    it before an ``await``.

    Parameters
    ----------
    math_mode : str, MathMode, Recipe, mapping, list of pairs, or path
        Mode of the products, or rules by routine, as of :class:`lowprec.torch.intercept`: ``{"dot": "bf16", "*":
        "fp8"}``. ``"lapack"`` is the name of the products inside solvers. An ``fp32_guard`` overrides it. It acts on
        float32 and complex64.
    cast : bool
        Whether it also acts on float64 and complex128: these are rounded once, to the numbers of the mode, and the
        result is float64 or complex128 again.
    statistics : bool
        Whether to measure some vectors of the operands of the 1st, 2nd, 4th, 8th... product of a function and line, and
        the errors of all products, relative to those of the BLAS; see :class:`OperandStatistics`.

    Raises
    ------
    ModeError
        A mode or a pattern is illegal, or a pattern is neither a routine nor ``*``.
    UnsupportedError
        At entry: another system than Linux, no compiled kernels, or a mode without a kernel for all products.

    Examples
    --------
    >>> import numpy as np
    >>> x = np.full((4, 4), 1 + 2.0**-12)
    >>> with intercept("bf16", cast=True) as seen:
    ...     float((x @ x.copy())[0, 0])
    4.0
    >>> [(p.operator, p.dtype, p.count) for p in seen.report().taken]
    [('gemm', 'float64', 1)]
    """

    _of_all_threads = False

    def __init__(
        self, math_mode: RulesLike, cast: bool = False, *, statistics: bool = False
    ) -> None:
        recorder = Recorder(MathMode.FP64) if statistics else None
        super().__init__(math_mode, statistics)
        self.recorder = recorder
        self.cast = cast
        self._text += ", cast=True" if cast else ""
        for pattern, _ in self.rules:
            if not blas.applies(pattern):
                self._watch = None  # of a scope that is not made
                raise ModeError(
                    f"{pattern!r} matches no routine; they are {', '.join(blas.ROUTINES)}"
                )
        self._rule = blas.rule_of(self.rules)

    def _key(self) -> list[blas.Scope]:
        """Return the scope of a block, before those of guards inside the block."""
        return [self._scope(self._described())]

    def _described(self) -> blas.Blas:
        reference = self.alone and policy.resolve(self.alone[1]).mode
        return blas.described(self._rule, self.cast, reference)

    def _scope(self, rules: blas.Blas) -> blas.Scope:
        scope = blas.Scope(rules)
        records = self.recorder is not None
        reference = None if self.recorder is None else self.recorder.reference
        compares = reference is not None
        layer = ""
        if self.alone is not None:
            layer, reference = self.alone
        if records or layer:
            resolved = reference and policy.resolve(reference).mode
            scope.observe(records, compares, blas.number_of(rules, resolved), layer)
        return scope

    def _install(self) -> None:
        blas.install(True)
        if len(self._holders) == 1:
            _loops(True)

    def _uninstall(self) -> None:
        _loops(False)
        blas.install(False)

    def _hold(self, holder: Entry) -> None:
        super()._hold(holder)
        # not before, for a scope that is not used ends without the collector
        self.ledger.collect = self._collect
        holder.key[0].enter(self._of_all_threads)

    def _release(self, holder: Entry) -> None:
        for scope in reversed(holder.key):
            scope.leave()
            self._count(scope)
        super()._release(holder)

    def apply_to_process(
        self, folder: str | None, is_first: bool, show: Callable[[InterceptionReport], None]
    ) -> None:
        self._of_all_threads = True
        super().apply_to_process(folder, is_first, show)

    def _count(self, scope: blas.Scope) -> None:
        """Move the counters of a scope to the ledger."""
        for x in blas.take_counts(scope):
            reason = _REASONS[x.reason]
            row = _row(x, x.caller.decode(), "" if reason else _mode(scope, x.mode), reason)
            shapes = ((x.m, x.k), (x.k, x.n)) if x.m else ()
            self.ledger.add_sum(row, x.calls, x.multiplications, x.m * x.n * x.k, shapes)
        if self.recorder is not None:
            _record(self.recorder, scope)
        for x in blas.take_counts(None):
            self.ledger.mention(_row(x, "", "", PassedBy.OTHER_THREAD))

    def _adapt(self, block: Entry) -> None:
        """Let a scope follow the policy of this thread, if it is the innermost one."""
        first = block.key[0]
        for scope in block.key[1:]:
            if scope.is_innermost():
                scope.leave()
                self._count(scope)
                block.key.remove(scope)
        if first.is_innermost():
            rules = self._described()
            if bytes(rules) != bytes(first.rules):
                block.key.append(self._scope(rules))
                block.key[-1].enter(all_threads=False)

    def _collect(self) -> None:
        """Move the counters of all open blocks."""
        for block in self._holders:
            if block.scope is self:
                for scope in block.key:
                    self._count(scope)

    def settle(self) -> None:
        self._collect()

    def _place_of(self, kind: Kind) -> str:
        return kind.layer.removesuffix(f"({kind.operator})").rpartition(":")[0]

    def unobserved(self) -> list[InterceptedProduct]:
        return [p for p in self.report().products if not _is_observed(p)]

    def _remarks(self) -> list[str]:
        self._collect()
        taken = [
            x.dtype for _, x in self.ledger._sums.copy() if x.mode not in ("", "fp64_emulated")
        ]
        rounded = "float64" in taken or "complex128" in taken
        cast = (
            ["float64 operands were rounded once, to the numbers of the mode (cast=True)."]
            if rounded
            else []
        )
        return [*cast, _NOT_SEEN]


def _record(recorder: Recorder, scope: blas.Scope) -> None:
    """Record the products of a scope; the layer is the function and line that calls, and the routine."""
    order = blas.take_order(scope)
    places = blas.take_sites(scope)
    kinds = [_kind(scope, place) for place, _ in places]
    steps, numbers = np.unique(order, axis=0, return_inverse=True)
    shapes = [(*kinds[place][:3], (m, n)) for place, m, n in steps.tolist()]
    first = recorder.add_steps(shapes, numbers.reshape(-1))
    for kind, (_, records) in zip(kinds, places, strict=True):
        for sums in records:
            of_operands = (NO_STATISTICS, NO_STATISTICS)
            if kind.mode and sums.sampled:
                a, b = sums.sampled
                of_operands = operand_statistics(a, b.T, parse_mode(kind.mode))
            recorder.add_sums(kind, sums, first - scope.recorded, of_operands)
    scope.recorded += len(order)


def _kind(scope: blas.Scope, place: blas.Place) -> Kind:
    routine = blas.routine(place.routine)
    layer = " ".join(filter(None, (place.caller.decode(errors="replace"), f"({routine})")))
    mode = "" if place.reason else _mode(scope, place.mode)
    return Kind(layer, ANY_PASS, routine, mode)


def _mode(scope: blas.Scope, number: int) -> str:
    name: bytes = scope.rules.modes[number].name
    return "fp32" if number < 0 else name.decode()


def _is_observed(p: InterceptedProduct) -> bool:
    """Whether C records products of this kind."""
    is_counted_alone = p.passed_by in (
        PassedBy.LINEAR_ALGEBRA,
        PassedBy.OWN_LOOP,
        PassedBy.OTHER_THREAD,
    )
    return p.operator in blas.ROUTINES and p.dtype != "float16" and not is_counted_alone


def _row(x: blas.Count, layer: str, mode: str, reason: PassedBy | None) -> LedgerRow:
    dtype = np.dtype(_LETTERS.get(x.letter, x.letter.decode())).name
    return LedgerRow(layer, blas.routine(x.routine), dtype, mode=mode, passed_by=reason)


def _loops(is_on: bool) -> None:
    """Set loops of the compiled library, or NumPy's own ones, in NumPy's functions of products.

    Source: ``PyUFunc_ReplaceLoopBySignature``, entry 30 of NumPy's ``_UFUNC_API``.
    """
    pointer = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)
    pointer_of = pointer(("PyCapsule_GetPointer", ctypes.pythonapi))
    table = ctypes.cast(
        pointer_of(_multiarray_umath._UFUNC_API, None), ctypes.POINTER(ctypes.c_void_p)
    )
    functions = [getattr(np, name, None) for name in ("matmul", "matvec", "vecmat", "vecdot")]
    kinds = [(function, kind) for function in functions if function for kind in function.types]
    for slot, (function, (letter, *_)) in enumerate(kinds):
        blas.set_loop(slot, function, letter, np.dtype(letter).num, table[30], is_on)


def _follow(whole_process: bool) -> None:
    """Apply a guard that is entered or left in a block of this thread."""
    for block in intercept._holders:
        scope: Any = block.scope
        scope._adapt(block)


entries.on_change(_follow)
