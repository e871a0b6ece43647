"""``intercept``: lowprec computes the products of an unmodified program of NumPy, SciPy and scikit-learn, on Linux.

The BLAS calls of all loaded libraries arrive at `backends/cpu/native/blas.cpp`, so no function of NumPy is replaced,
and no Python runs in a product.
"""

from __future__ import annotations

from collections.abc import Callable
from fnmatch import fnmatchcase
from typing import Any

from lowprec import policy
from lowprec.core import blas
from lowprec.core.interception import Interception, Modes
from lowprec.core.interception_report import InterceptionReport, LedgerRow, PassedBy
from lowprec.errors import ModeError
from lowprec.modes import Mode
from lowprec.policy import entries
from lowprec.policy.entries import Entry

#: By ``enum Reason`` of `native/blas.hpp`.
_REASONS = (
    None,
    PassedBy.ELEMENT_TYPE,
    PassedBy.LINEAR_ALGEBRA,
    PassedBy.VECTORS,
    PassedBy.LONG,
    PassedBy.NO_MEMORY,
    PassedBy.OTHER_THREAD,
    PassedBy.LAYER,
)
_TYPES = {b"s": "float32", b"d": "float64", b"c": "complex64", b"z": "complex128"}
_NOT_SEEN = (
    "Not seen: products of float16 and integers, of a column and a row, einsum without optimize, and others that "
    "NumPy's own loops multiply."
)


class intercept(Interception):
    """Compute the products of NumPy, SciPy, scikit-learn and other libraries of this process by lowprec, in a block.

    They are the calls of BLAS's ``gemm``, ``gemv``, ``symm``, ``hemm``, ``syrk``, ``herk``, ``gemmt``, ``trmm``,
    ``symv`` and ``hemv``, by ``@``, ``dot``, ``ndarray.dot``, ``einsum(optimize=True)``, ``scipy.linalg.blas`` and all
    others. Products of ``dot`` and ``ger`` and those inside LAPACK and other solvers keep their precision; modes that
    quantise compute products with vectors in ``bf16``. :meth:`report` names these, and products that are not seen.

    The block applies to this thread and to those that it starts. It is not to be left in another task of asyncio: leave
    it before an ``await``.

    Parameters
    ----------
    modes : str, MathMode, Recipe or mapping
        Mode of the products, or modes by patterns of the routines' names, of which the first that matches is used:
        ``{"dot": "bf16", "*": "fp8"}``. ``"lapack"`` is the name of the products inside solvers. An ``fp32_guard``
        overrides it. It acts on float32 and complex64.
    cast : bool
        Whether it also acts on float64 and complex128: these are rounded once, to the numbers of the mode, and the
        result is float64 or complex128 again.

    Raises
    ------
    ModeError
        A mode is unknown, or a pattern matches no routine.
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

    def __init__(self, modes: Modes, cast: bool = False) -> None:
        super().__init__(modes)
        self.cast = cast
        self._text += ", cast=True" if cast else ""
        for pattern, _ in self._patterns:
            if not any(fnmatchcase(routine, pattern) for routine in blas.ROUTINES):
                self._watch = None  # of a scope that is not made
                raise ModeError(f"{pattern!r} matches no routine; they are {', '.join(blas.ROUTINES)}")

    def _rule(self, routine: str) -> Mode | None:
        for pattern, mode in self._patterns:
            resolved = policy.resolve(mode).mode
            if pattern == "*":
                return blas.rule_of(resolved)(routine)
            if fnmatchcase(routine, pattern):
                return resolved
        return None

    def _key(self) -> list[blas.Scope]:
        """Return the scope of a block, before those of guards inside the block."""
        return [blas.Scope(blas.described(self._rule, self.cast))]

    def _install(self) -> None:
        blas.install(True)

    def _uninstall(self) -> None:
        blas.install(False)

    def _hold(self, holder: Entry) -> None:
        super()._hold(holder)
        self.ledger.collect = self._collect  # not before, for a scope that is not used ends without the collector
        holder.key[0].enter(self._of_all_threads)

    def _release(self, holder: Entry) -> None:
        for scope in reversed(holder.key):
            scope.leave()
            self._count(scope)
        super()._release(holder)

    def apply_to_process(self, folder: str | None, is_first: bool, show: Callable[[InterceptionReport], None]) -> None:
        self._of_all_threads = True
        super().apply_to_process(folder, is_first, show)

    def _count(self, scope: blas.Scope) -> None:
        """Move the counters of a scope to the ledger."""
        for x in blas.take_counts(scope):
            reason = _REASONS[x.reason]
            mode = "" if reason else scope.rules.modes[x.mode].name.decode()
            row = LedgerRow(x.caller.decode(), blas.routine(x.routine), _TYPES[x.letter], mode=mode, passed_by=reason)
            shapes = ((x.m, x.k), (x.k, x.n)) if x.m else ()
            self.ledger.add_sum(row, x.calls, x.multiplications, x.m * x.n * x.k, shapes)
        for x in blas.take_counts(None):
            self.ledger.mention(
                LedgerRow("", blas.routine(x.routine), _TYPES[x.letter], passed_by=PassedBy.OTHER_THREAD)
            )

    def _adapt(self, block: Entry) -> None:
        """Let a scope follow the policy of this thread, if it is the innermost one."""
        first = block.key[0]
        for scope in block.key[1:]:
            if scope.is_innermost():
                scope.leave()
                self._count(scope)
                block.key.remove(scope)
        if first.is_innermost():
            rules = blas.described(self._rule, self.cast)
            if bytes(rules) != bytes(first.rules):
                block.key.append(blas.Scope(rules))
                block.key[-1].enter(all_threads=False)

    def _collect(self) -> None:
        """Move the counters of all open blocks."""
        for block in self._holders:
            if block.scope is self:
                for scope in block.key:
                    self._count(scope)

    def _remarks(self) -> list[str]:
        self._collect()
        taken = [x.dtype for _, x in self.ledger._sums.copy() if x.mode not in ("", "fp64_emulated")]
        rounded = "float64" in taken or "complex128" in taken
        cast = ["float64 operands were rounded once, to the numbers of the mode (cast=True)."] if rounded else []
        return [*cast, _NOT_SEEN]


def _follow(whole_process: bool) -> None:
    """Apply a guard that is entered or left in a block of this thread."""
    for block in intercept._holders:
        scope: Any = block.scope
        scope._adapt(block)


entries.on_change(_follow)
