"""The BLAS calls of a process, which `native/blas.cpp` computes in the mode of a scope."""

from __future__ import annotations

import ctypes
import functools
import platform
import struct
import sys
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np

from lowprec import policy
from lowprec.arrays import CPU
from lowprec.backends.cpu import descriptions, library, observing, quantizing, threads
from lowprec.backends.cpu.device import capabilities
from lowprec.backends.cpu.library import untaken  # noqa: F401 - for other packages
from lowprec.core.rules import ALL, Rules, first_match, names
from lowprec.errors import UnsupportedError
from lowprec.formats import DType
from lowprec.modes import MathMode, Mode, row
from lowprec.planning import GemmPlan, GemmProblem, OperandSpec, plan_gemm
from lowprec.planning.bounds import MAX_K_INT8

_I32 = ctypes.c_int32
_I64 = ctypes.c_int64
_POINTER = ctypes.c_void_p
_ANY_K = 2**63 - 1
_NO_MODE = -1
_MOST_ROWS = 640
_MOST_PLACES = 1024
_MOST_STEPS = 1 << 14
#: Extents of the product whose kernel and scheme are those of every product of a program.
_SHAPE = (1000, 1000)

#: The routines with rules of their own, in the order of ``enum Routine``.
ROUTINES = (
    "gemm",
    "gemv",
    "symm",
    "hemm",
    "syrk",
    "herk",
    "gemmt",
    "trmm",
    "symv",
    "hemv",
    "dot",
    "ger",
    "lapack",
)
#: Those that modes that quantise compute in ``bf16`` unless a rule names them.
_OF_VECTORS = frozenset(["gemv", "symv", "hemv"])


class _Mode(ctypes.Structure):
    """``lp_blas_mode``."""

    _fields_ = (
        ("name", ctypes.c_char * 24), ("scheme", library.Scheme * 2), ("unit", _I32 * 2), ("unit_of_few", _I32),
        ("quantises", _I32), ("is_native", _I32), ("piece", _I32), ("last_unit", _I32), ("pad", _I32),
        ("most_k", _I64), ("rounding", library.Quantizer * 2),
    )  # fmt: skip


class Blas(ctypes.Structure):
    """``lp_blas``."""

    _fields_ = (
        ("version", ctypes.c_uint64), ("casts", _I32), ("threads", _I32), ("units", ctypes.c_int64),
        ("rules", _I32 * 16), ("modes", _Mode * 6),
    )  # fmt: skip


class Count(ctypes.Structure):
    """``lp_blas_count``."""

    _fields_ = (
        *((name, _I64) for name in ("calls", "multiplications", "m", "n", "k")),
        *((name, _I32) for name in ("routine", "reason", "mode")),
        ("letter", ctypes.c_char), ("caller", ctypes.c_char * 91),
    )  # fmt: skip


class Place(ctypes.Structure):
    """``lp_blas_site``."""

    _fields_ = (
        ("first", _POINTER), *((name, _I32) for name in ("routine", "reason", "mode")),
        ("letter", ctypes.c_char), ("caller", ctypes.c_char * 103), ("pad", _I32 * 2),
    )  # fmt: skip


#: Returns an ``lp_blas_observation``.
_observation = struct.Struct("@3i127sx").pack

#: The mode of a routine; None: that of the BLAS.
Rule: TypeAlias = Callable[[str], "Mode | None"]


def applies(pattern: str) -> bool:
    """Whether a pattern of a rule is a routine, or that of all products."""
    return pattern == ALL or pattern in ROUTINES


def rule_of(rules: Rules) -> Rule:
    """Return the mode of each routine by the rules and the policy of the caller."""

    def rule(routine: str) -> Mode | None:
        mode = first_match(rules, (), routine)
        if mode is None:
            return None
        mode = policy.resolve(mode).mode
        if row(mode).quantizes and routine in _OF_VECTORS and not names(rules, routine):
            return MathMode.BF16
        return mode

    return rule


def described(rule: Rule, casts: bool, reference: Mode | None = None) -> Blas:
    """Return the rules for C, with the reference of a comparison as the last mode.

    Raises
    ------
    UnsupportedError
        The system or the library has no entry points of the BLAS, or a product of a mode is no single call of a kernel.
    """
    if sys.platform != "linux":
        raise UnsupportedError(f"the BLAS calls of a program are not taken on {platform.system()}")
    if library.library() is None:
        raise UnsupportedError(library.unavailable_reason() or "")
    functions = library.functions()
    found = Blas(
        functions.version(),
        casts=casts,
        threads=threads.num_threads(),
        units=functions.units(),
        rules=(_NO_MODE,) * 16,
    )
    modes = [rule(routine) for routine in ROUTINES]
    distinct = [x for x in dict.fromkeys([*modes, reference]) if x is not None]
    numbers = {x: number for number, x in enumerate(distinct)}
    if len(numbers) > len(found.modes):
        raise UnsupportedError(f"the BLAS calls of a program have at most {len(found.modes)} modes")
    for number, x in enumerate(distinct):
        _describe(found.modes[number], x)
    for i, mode in enumerate(modes):
        found.rules[i] = _NO_MODE if mode is None else numbers[mode]
    return found


def number_of(rules: Blas, mode: Mode | None) -> int:
    """Return the number of a mode of the rules; -1 if it is none of them."""
    names = [x.name.decode() for x in rules.modes]
    text = str(mode)[:23]
    return names.index(text) if text in names else _NO_MODE


def preloaded(rules: Rules) -> tuple[str, str]:
    """Return the path of the library to preload, and the rules as the text of ``LOWPREC_BLAS``."""
    described_rules = described(rule_of(rules), casts=True)
    return library.path(), bytes(described_rules).hex()


def _describe(to: _Mode, mode: Mode) -> None:
    """Set the units, schemes and rounding of products of both element types; unit -1 if the mode does not act on it."""
    to.name = str(mode).encode()[:23]
    to.most_k = _ANY_K
    to.is_native = row(mode).acts(DType.FLOAT64)
    to.unit_of_few = _unit_of(_plan(MathMode.FP32, DType.FLOAT32))
    for number, dtype in enumerate((DType.FLOAT32, DType.COMPLEX64)):
        to.unit[number] = _NO_MODE
        if row(mode).acts(dtype):
            _describe_type(to, number, mode, dtype)


def _describe_type(to: _Mode, number: int, mode: Mode, dtype: DType) -> None:
    plan = _plan(mode, dtype)
    if not plan.kernel_row.packs:
        raise UnsupportedError(
            f"the BLAS calls of a program are not taken in {mode}, which has no compiled kernel"
        )
    if plan.quantized is not None:
        to.quantises = True
        to.piece = plan.quantized.k_piece
        to.last_unit = _unit_of(plan.quantized.last)
        for i, rule in enumerate(plan.quantized.rules):
            assert rule is not None
            quantizing.add_rule(to.rounding[i], rule, dtype)
            to.rounding[i].codes = plan.kernel_row.summation == "blocks"
            if rule.number_format is None:
                to.most_k = MAX_K_INT8
        plan = plan.quantized.inner
    to.unit[number] = _unit_of(plan)
    to.scheme[number] = descriptions.scheme_of(plan)


def _plan(mode: Mode, dtype: DType) -> GemmPlan:
    operand = OperandSpec.contiguous(dtype, _SHAPE)
    return plan_gemm(GemmProblem(operand, operand), capabilities(CPU), mode)


def _unit_of(plan: GemmPlan) -> int:
    return library.UNITS.index(plan.kernel_row.requires or "")


# -- scopes of this process -----------------------------------------------------------------------


_function = functools.partial(library.function, ctypes.CDLL)


def install(is_on: bool) -> None:
    """Let calls of the BLAS in all loaded libraries, and in those loaded later, reach the scopes; or no longer."""
    library.pass_blas = _function("blas_pass", _I32, _I32) if is_on else None
    _function("blas_install", None, _I32)(is_on)


@functools.cache
def _set_loop() -> Any:
    """Return the function that is called with the interpreter's lock."""
    arguments = (_I32, ctypes.py_object, ctypes.c_char_p, ctypes.c_char, _I32, _POINTER, _I32)
    prototype = ctypes.PYFUNCTYPE(_I32, *arguments)
    return prototype(("lp_blas_set_loop", ctypes.PyDLL(library.path())))


def set_loop(slot: int, function: Any, letter: str, number: int, replace: int, is_on: bool) -> None:
    """Set the library's loop for a type of NumPy's function, or NumPy's own one, in one step."""
    name = function.__name__.encode()
    _set_loop()(slot, function, name, letter.encode(), number, replace, is_on)


class Scope:
    """A scope for the thread that enters it and those that it starts, or for all threads without one."""

    #: Null until the scope exists, also if an exception of a handler comes before.
    address: int | None = None
    recorded = 0  # products whose order has been taken

    def __init__(self, rules: Blas) -> None:
        self.rules = rules
        self.address = _function("blas_create", _POINTER, _POINTER)(ctypes.byref(rules))
        if self.address is None:
            raise MemoryError("there is no memory for a scope")

    def __del__(self) -> None:
        _function("blas_free", None, _POINTER)(self.address)

    def enter(self, all_threads: bool) -> None:
        if _function("blas_enter", _I32, _POINTER, _I32)(self.address, all_threads):
            raise MemoryError("there is no memory for a scope")

    def leave(self) -> None:
        _function("blas_leave", None, _POINTER)(self.address)

    def observe(self, records: bool, compares: bool, reference: int, alone: str) -> None:
        """Observe the products of the scope, before it is entered."""
        observation = _observation(records, compares, reference, alone.encode())
        if _function("blas_observe", _I32, _POINTER, ctypes.c_char_p)(self.address, observation):
            raise MemoryError("there is no memory for records")

    def is_innermost(self) -> bool:
        return bool(_function("blas_scope", _POINTER)() == self.address)


def take_counts(scope: Scope | None) -> list[Count]:
    """Return the products since the last call; None: those of threads without a scope."""
    rows = (Count * _MOST_ROWS)()
    address = None if scope is None else scope.address
    size = _function("blas_counts", _I64, _POINTER, _POINTER)(address, rows)
    return rows[:size]


def take_sites(scope: Scope) -> list[tuple[Place, list[observing.Sums]]]:
    """Return the functions and routines with observed products, and the sums of these since the last call."""
    places = (Place * _MOST_PLACES)()
    size = _function("blas_sites", _I64, _POINTER, _POINTER)(scope.address, places)
    return [(place, observing.taken(place.first)) for place in places[:size]]


def take_order(scope: Scope) -> Any:
    """Return the place, by its number, and the extents of the result of each product since the last call."""
    parts: list[Any] = []
    while not parts or len(parts[-1]) == _MOST_STEPS:
        steps = np.empty((_MOST_STEPS, 3), np.int32)
        size = _function("blas_order", _I64, _POINTER, _POINTER, _I64)(
            scope.address, steps.ctypes.data, _MOST_STEPS
        )
        parts.append(steps[:size])
    return np.concatenate(parts)


@functools.cache
def routine(number: int) -> str:
    name: bytes = _function("blas_name", ctypes.c_char_p, _I32)(number)
    return name.decode()
