"""The environment, read only here and in ``policy.variables``.

Variables that decide a mode are read once per process, at the first use of a mode (a product, a plan,
``get_math_mode``), because cuBLAS reads ``NVIDIA_TF32_OVERRIDE`` once, too. ``import lowprec`` reads nothing, so an
illegal value breaks only a program that multiplies. An empty or blank value counts as unset.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

from lowprec.errors import EnvironmentVariableError, quoted
from lowprec.modes import MathMode
from lowprec.policy import entries, variables
from lowprec.policy.variables import VARIABLES as VARIABLES
from lowprec.policy.variables import Variable


# eq=False: a snapshot is part of the key of every cached decision, so it is hashed by identity.
@dataclass(frozen=True, slots=True, eq=False)
class EnvironmentSnapshot:
    """The values that hold for the rest of the process."""

    math_mode: MathMode | None  # from ``LOWPREC_MATH_MODE``
    force_math_mode: MathMode | None  # from ``LOWPREC_FORCE_MATH_MODE``
    fp32_guard: bool  # whether ``LOWPREC_FP32_GUARD`` is 1
    tf32_off: bool  # whether ``NVIDIA_TF32_OVERRIDE`` is 0
    max_cpu_isa: str | None  # from ``LOWPREC_MAX_CPU_ISA``
    texts: Mapping[str, str | None]  # of each variable, when it was read


#: The snapshot, once it is taken. `setdefault` is one step, without a lock that could be held when a process is forked
#: or a signal handler runs.
_taken: dict[None, EnvironmentSnapshot] = {}


def _take() -> EnvironmentSnapshot:
    texts = {v.name: v.text() for v in VARIABLES if v.read_once}
    return EnvironmentSnapshot(
        variables.MATH_MODE.value(texts["LOWPREC_MATH_MODE"]),
        variables.FORCE_MATH_MODE.value(texts["LOWPREC_FORCE_MATH_MODE"]),
        bool(variables.GUARD.value(texts["LOWPREC_FP32_GUARD"])),
        bool(variables.TF32_OVERRIDE.value(texts["NVIDIA_TF32_OVERRIDE"])),
        variables.MAX_CPU_ISA.value(texts["LOWPREC_MAX_CPU_ISA"]),
        MappingProxyType(texts),
    )


def snapshot() -> EnvironmentSnapshot:
    """Return the variables that decide a mode, read at the first call and kept.

    Raises EnvironmentVariableError if a variable holds an illegal value; the next call reads again.
    """
    # Two threads that start together must see the same values, even if a third one writes the environment.
    return _taken.get(None) or _taken.setdefault(None, _take())


def refresh() -> None:
    """Forget the snapshot, so that the next use of a mode reads the environment again.

    For tests and interactive work. cuBLAS keeps the value that it has read.
    """
    _taken.clear()
    entries.notify(True)
    _taken.clear()  # a listener has resolved a mode, which does not count as a use


class VariableRow(NamedTuple):
    """One variable in ``info()``; name, meaning and legal are those of :class:`Variable`."""

    name: str
    value: str | None  # the current text
    effect: str  # a description of the value in force
    meaning: str
    legal: str
    problem: str | None  # a warning: a value that is illegal, reserved, or changed too late


def _row(variable: Variable[Any], taken: EnvironmentSnapshot | None) -> VariableRow:
    now = variable.text()
    used = taken.texts[variable.name] if taken is not None and variable.read_once else now
    effect, problem = variable.default, None
    try:
        if used is not None:
            effect, problem = variable.show(variable.parse(used)), variable.remark(used)
    except EnvironmentVariableError as error:
        effect, problem = "refused", str(error)
    if used != now:
        was, is_now = ("unset" if text is None else quoted(text) for text in (used, now))
        problem = (
            f"{variable.name} was {was} when lowprec read it and is {is_now} now; "
            "the first value holds until the process ends"
        )
    return VariableRow(variable.name, now, effect, variable.meaning, variable.legal, problem)


def numba_is_off() -> bool:
    """Whether ``NUMBA_DISABLE_JIT`` switches numba's compiler off, as numba reads it."""
    return variables.NUMBA_OFF.text() not in (None, "0")


def hidden_cpu_flags() -> frozenset[str]:
    """Return the flags of the instruction sets above ``LOWPREC_MAX_CPU_ISA``; raise if it names none.

    The variable decides which kernels there are, so its first value holds for as long as the snapshot's.
    """
    taken = _taken.get(None)
    limit = variables.MAX_CPU_ISA.value(variables.MAX_CPU_ISA.text()) if taken is None else taken.max_cpu_isa
    if limit is None:
        return frozenset()
    names = list(variables.ISAS)
    return frozenset().union(*(variables.ISAS[name] for name in names[names.index(limit) + 1 :]))


def autotune() -> bool | None:
    """Return the value of ``LOWPREC_AUTOTUNE``, None where it is not set; raise if it is neither 0 nor 1."""
    return variables.AUTOTUNE.value(variables.AUTOTUNE.text())


def cache_directory() -> str | None:
    """Return the folder in ``LOWPREC_CACHE_DIR``, None where it is not set."""
    return variables.CACHE_DIR.value(variables.CACHE_DIR.text())


def amp_list(which: str, action: str) -> tuple[str, ...]:
    """Return the names in ``LOWPREC_AMP_ALLOWLIST_ADD`` and similar variables; raise if one is not a name.

    ``which`` is "allow", "deny" or "infer", ``action`` is "ADD" or "REMOVE".
    """
    variable = variables.AMP_LISTS[which, action]
    return variable.value(variable.text()) or ()


def uses_own_threads() -> bool:
    """Return whether ``LOWPREC_THREADS`` is ``own``; raise if it is neither that nor ``openmp``."""
    return variables.THREADS.value(variables.THREADS.text()) == "own"


def thread_limit() -> int | None:
    """Return the number in ``MKL_NUM_THREADS``, None where it is not set to a positive number."""
    text = os.environ.get("MKL_NUM_THREADS", "").strip()
    # int() refuses some digits of other scripts, and thousands of digits; nine are enough.
    digits = text.lstrip("0") if text.isascii() and text.isdigit() else ""
    return int(digits[:9]) if digits else None


def rows() -> tuple[VariableRow, ...]:
    """Return one row per variable for ``info()`` and the documentation; raises nothing, and takes no snapshot."""
    return tuple(_row(v, _taken.get(None)) for v in VARIABLES)


def problems() -> tuple[str, ...]:
    """Return the warnings among :func:`rows`."""
    return tuple(r.problem for r in rows() if r.problem is not None)


@contextmanager
def c_variables(values: Mapping[str, str]) -> Iterator[None]:
    """Set variables for the C libraries that are loaded in a ``with`` block; ``os.environ`` does not change."""
    before = {name: os.environ.get(name) for name in values}
    try:
        for name, value in values.items():
            os.putenv(name, value)
        yield
    finally:
        for name, old in before.items():
            if old is None:
                os.unsetenv(name)
            else:
                os.putenv(name, old)


#: The order of ``lowprec run`` for its start-up hook: a mode, or :data:`RUN_GUARD`. Not in the table, since only the
#: launcher sets it.
RUN_VARIABLE = "LOWPREC_RUN"
RUN_GUARD = "fp32_guard"


def child_environment(
    startup: str,
    mode: MathMode | None,
    *,
    guard: bool = False,
    force: bool = False,
    intercept: bool = False,
    profile: bool = False,
) -> dict[str, str]:
    """Return the environment for a program that ``lowprec run`` starts.

    ``startup`` is the folder of the start-up hook; it comes first in ``PYTHONPATH``, once. ``mode`` is None where the
    program is to choose, or with the guard; with ``force`` the program cannot choose another one.
    """
    found = dict(os.environ)
    if guard:
        found |= {RUN_VARIABLE: RUN_GUARD, "LOWPREC_FP32_GUARD": "1", "MLX_ENABLE_TF32": "0"}
    elif mode is not None:
        variable = variables.FORCE_MATH_MODE if force else variables.MATH_MODE
        found |= {RUN_VARIABLE: mode.value, variable.name: mode.value}
    # The launcher's process id, which on POSIX is the program's.
    for name, is_set in (("INTERCEPT", intercept), ("PROFILE", profile)):
        if is_set:
            found[f"{RUN_VARIABLE}_{name}"] = str(os.getpid())
    paths = found.get("PYTHONPATH")
    others = [path for path in paths.split(os.pathsep) if path != startup] if paths else []
    found["PYTHONPATH"] = os.pathsep.join([startup, *others])
    return found
