"""Environment variables, which only this module and ``policy.variables`` read.

Variables that set a mode are read once per process, at the first use of a mode (a product, a plan, ``get_math_mode``),
as cuBLAS reads ``NVIDIA_TF32_OVERRIDE`` once. ``import lowprec`` reads none, so an illegal value raises only in a
program that multiplies. A blank value counts as unset.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

from lowprec.errors import EnvironmentVariableError, quoted
from lowprec.modes import Mode
from lowprec.policy import entries, variables
from lowprec.policy.variables import VARIABLES as VARIABLES
from lowprec.policy.variables import Variable


# eq=False: hashed by identity, because a snapshot is part of cache keys.
@dataclass(frozen=True, slots=True, eq=False)
class EnvironmentSnapshot:
    """Values of the variables that are read once per process."""

    math_mode: Mode | None  # from ``LOWPREC_MATH_MODE``
    force_math_mode: Mode | None  # from ``LOWPREC_FORCE_MATH_MODE``
    fp32_guard: bool  # whether ``LOWPREC_FP32_GUARD`` is 1
    tf32_off: bool  # whether ``NVIDIA_TF32_OVERRIDE`` is 0
    max_cpu_isa: str | None  # from ``LOWPREC_MAX_CPU_ISA``
    texts: Mapping[str, str | None]  # text of each variable when it was read


#: Contains the snapshot once it has been read. `setdefault` is atomic and needs no lock, which could be held during a
#: fork or in a signal handler.
_snapshots: dict[None, EnvironmentSnapshot] = {}


def _read() -> EnvironmentSnapshot:
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
    """Return the variables that set a mode; read by the first call that finds no illegal value."""
    return _snapshots.get(None) or _snapshots.setdefault(None, _read())


def refresh() -> None:
    """Drop the snapshot: the next use of a mode reads the environment again. cuBLAS keeps its own first value."""
    _snapshots.clear()
    entries.notify(True)
    _snapshots.clear()  # again, because a listener that resolves modes takes a snapshot


class VariableRow(NamedTuple):
    """One variable in ``info()``; ``name``, ``meaning`` and ``legal`` as in :class:`Variable`."""

    name: str
    value: str | None  # the current text
    effect: str  # description of the value in use
    meaning: str
    legal: str
    problem: str | None  # warning about a value that is illegal, reserved, or was changed after it was read


def _row(variable: Variable[Any], first: EnvironmentSnapshot | None) -> VariableRow:
    now = variable.text()
    used = first.texts[variable.name] if first is not None and variable.read_once else now
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
            "the first value is used until the process ends"
        )
    return VariableRow(variable.name, now, effect, variable.meaning, variable.legal, problem)


def hidden_cpu_flags() -> frozenset[str]:
    """Return the CPU flags above ``LOWPREC_MAX_CPU_ISA``, which is read once."""
    first = _snapshots.get(None)
    limit = variables.MAX_CPU_ISA.current() if first is None else first.max_cpu_isa
    if limit is None:
        return frozenset()
    names = list(variables.ISAS)
    return frozenset().union(*(variables.ISAS[name] for name in names[names.index(limit) + 1 :]))


def thread_limit() -> int | None:
    """Return the number in ``MKL_NUM_THREADS``, None unless it is positive."""
    text = os.environ.get("MKL_NUM_THREADS", "").strip()
    # int() raises for thousands of digits; nine are enough.
    digits = text.lstrip("0") if text.isascii() and text.isdigit() else ""
    return int(digits[:9]) if digits else None


def rows() -> tuple[VariableRow, ...]:
    """Return one row per variable for ``info()`` and the documentation, without raising or taking the snapshot."""
    return tuple(_row(v, _snapshots.get(None)) for v in VARIABLES)


def problems() -> tuple[str, ...]:
    """Return the warnings among :func:`rows`."""
    return tuple(r.problem for r in rows() if r.problem is not None)


def variables_set(names: Iterable[str]) -> dict[str, str]:
    """Return other libraries' variables that are set."""
    return {name: os.environ[name] for name in names if name in os.environ}


#: A mode or :data:`RUN_GUARD`, passed by ``lowprec run`` to its start-up hook. Not in the table, because only the
#: launcher sets it.
RUN_VARIABLE = "LOWPREC_RUN"
RUN_GUARD = "fp32_guard"


def child_environment(
    startup: str,
    mode: Mode | None,
    *,
    guard: bool = False,
    force: bool = False,
    intercept: str = "",
    profile: bool = False,
    folder: str = "",
) -> dict[str, str]:
    """Return the environment for a program that ``lowprec run`` starts.

    ``startup``, the folder of the start-up hook, is put first in ``PYTHONPATH``. ``mode`` is None if the program
    chooses its modes, or with the guard; with ``force`` the program cannot change it. ``intercept`` is a JSON object of
    modes by layer, and ``folder`` is for the counts of the program's processes.
    """
    child = dict(os.environ)
    if guard:
        child |= {RUN_VARIABLE: RUN_GUARD, "LOWPREC_FP32_GUARD": "1", "MLX_ENABLE_TF32": "0"}
    elif mode is not None:
        variable = variables.FORCE_MATH_MODE if force else variables.MATH_MODE
        child |= {RUN_VARIABLE: mode.value, variable.name: mode.value}
    child[f"{RUN_VARIABLE}_PROGRAM"] = str(os.getpid())  # on POSIX also the program's
    hooks = {"INTERCEPT": intercept, "PROFILE": "1" if profile else "", "FOLDER": folder}
    child |= {f"{RUN_VARIABLE}_{name}": value for name, value in hooks.items() if value}
    start = os.sep.join(startup.split(os.sep)[-5:])  # an outer run's is removed, also that of another copy of lowprec
    paths = child.get("PYTHONPATH")
    others = [path for path in paths.split(os.pathsep) if not path.endswith(start)] if paths else []
    child["PYTHONPATH"] = os.pathsep.join([startup, *others])
    return child
