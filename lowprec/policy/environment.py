"""What the environment says, read here and, variable by variable, in ``policy.variables``, and nowhere else.

Variables that decide a mode are read once per process, at the first use of a mode (a product, a plan,
``get_math_mode``), because cuBLAS reads ``NVIDIA_TF32_OVERRIDE`` once, too: a variable changed in mid-process
would act on one of the two libraries only. ``import lowprec`` reads nothing, so a bad value breaks the program that
multiplies, not every program that imports. An empty or blank value counts as unset.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

from lowprec.errors import EnvironmentVariableError, quoted
from lowprec.modes import MathMode
from lowprec.policy import entries
from lowprec.policy.variables import (
    AMP_LISTS,
    AUTOTUNE,
    CACHE_DIR,
    FORCE_MATH_MODE,
    GUARD,
    ISAS,
    LIBRARIES,
    MATH_MODE,
    MAX_CPU_ISA,
    MKL_THREADS,
    NUMBA_OFF,
    TF32_OVERRIDE,
    Variable,
)
from lowprec.policy.variables import (
    VARIABLES as VARIABLES,
)


# eq=False: a snapshot is part of the key of every cached decision, so it is hashed by identity.
@dataclass(frozen=True, slots=True, eq=False)
class EnvironmentSnapshot:
    """The values that hold for the rest of the process."""

    math_mode: MathMode | None  # from ``LOWPREC_MATH_MODE``
    force_math_mode: MathMode | None  # from ``LOWPREC_FORCE_MATH_MODE``
    fp32_guard: bool  # whether ``LOWPREC_FP32_GUARD`` is 1
    tf32_off: bool  # whether ``NVIDIA_TF32_OVERRIDE`` is 0
    max_cpu_isa: str | None  # from ``LOWPREC_MAX_CPU_ISA``
    texts: Mapping[str, str | None]  # what each variable held when it was read


#: The snapshot, once it is taken. `setdefault` is one step, without a lock that a forked child or a signal handler
#: could find taken.
_taken: dict[None, EnvironmentSnapshot] = {}


def _take() -> EnvironmentSnapshot:
    texts = {v.name: v.text() for v in VARIABLES if v.read_once}
    return EnvironmentSnapshot(
        MATH_MODE.value(texts[MATH_MODE.name]),
        FORCE_MATH_MODE.value(texts[FORCE_MATH_MODE.name]),
        bool(GUARD.value(texts[GUARD.name])),
        bool(TF32_OVERRIDE.value(texts[TF32_OVERRIDE.name])),
        MAX_CPU_ISA.value(texts[MAX_CPU_ISA.name]),
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

    For tests and interactive work. It reaches lowprec only: cuBLAS keeps what it read.
    """
    _taken.clear()
    entries.notify(True)
    _taken.clear()  # a listener has looked, which is no use of a mode


class VariableRow(NamedTuple):
    """What ``info()`` tells about one variable; name, meaning and legal are those of :class:`Variable`."""

    name: str
    value: str | None  # the text in the environment now
    effective: str  # what holds in this process, in words
    meaning: str
    legal: str
    problem: str | None  # a warning: a value that is refused, reserved, or changed too late


def _row(variable: Variable[Any], taken: EnvironmentSnapshot | None) -> VariableRow:
    now = variable.text()
    used = taken.texts[variable.name] if taken is not None and variable.read_once else now
    effective, problem = variable.default, None
    try:
        if used is not None:
            effective, problem = variable.show(variable.parse(used)), variable.remark(used)
    except EnvironmentVariableError as error:
        effective, problem = "refused", str(error)
    if used != now:
        problem = (
            f"{variable.name} was {_shown(used)} when lowprec read it and is {_shown(now)} now; "
            "the first value holds until the process ends"
        )
    return VariableRow(variable.name, now, effective, variable.meaning, variable.legal, problem)


def _shown(text: str | None) -> str:
    return "unset" if text is None else quoted(text)


def numba_is_off() -> bool:
    """Whether ``NUMBA_DISABLE_JIT`` switches numba's compiler off, as numba reads it."""
    return NUMBA_OFF.text() not in (None, "0")


def hidden_cpu_flags() -> frozenset[str]:
    """Return the flags of the instruction sets above ``LOWPREC_MAX_CPU_ISA``; raise if it names none.

    The variable decides which kernels there are, so its first value holds for as long as the snapshot's.
    """
    taken = _taken.get(None)
    limit = MAX_CPU_ISA.value(MAX_CPU_ISA.text()) if taken is None else taken.max_cpu_isa
    if limit is None:
        return frozenset()
    names = list(ISAS)
    return frozenset().union(*(ISAS[name] for name in names[names.index(limit) + 1 :]))


def autotune() -> bool | None:
    """Return what ``LOWPREC_AUTOTUNE`` says, None where it is not set; raise if it is neither 0 nor 1."""
    return AUTOTUNE.value(AUTOTUNE.text())


def cache_directory() -> str | None:
    """Return what ``LOWPREC_CACHE_DIR`` holds, None where it is not set."""
    return CACHE_DIR.value(CACHE_DIR.text())


def amp_list(which: str, action: str) -> tuple[str, ...]:
    """Return the names in ``LOWPREC_AMP_ALLOWLIST_ADD`` and its like; raise if one is no name.

    ``which`` is "allow", "deny" or "infer", ``action`` is "ADD" or "REMOVE".
    """
    variable = AMP_LISTS[which, action]
    return variable.value(variable.text()) or ()


def thread_limit() -> int | None:
    """Return the number in ``MKL_NUM_THREADS``, None where it is not set to a positive number."""
    text = MKL_THREADS.text() or ""
    # int() refuses some digits of other scripts, and thousands of digits; nine are more threads than there are.
    digits = text.lstrip("0") if text.isascii() and text.isdigit() else ""
    return int(digits[:9]) if digits else None


def rows() -> tuple[VariableRow, ...]:
    """Return one row per variable for ``info()`` and the documentation; raises nothing, and takes no snapshot."""
    return tuple(_row(v, _taken.get(None)) for v in VARIABLES)


def problems() -> tuple[str, ...]:
    """Return the warnings among :func:`rows`."""
    return tuple(r.problem for r in rows() if r.problem is not None)


# -- for a program that lowprec starts ------------------------------------------------------------

#: Tells the start-up hook of ``lowprec run`` what to do: a mode, or :data:`RUN_GUARD`. Not in the table: it is set by
#: the launcher and by nobody else.
RUN_VARIABLE = "LOWPREC_RUN"
RUN_GUARD = "fp32_guard"
#: Tell it to take PyTorch's products through lowprec, and to record those of lowprec: the launcher's process id, which
#: on POSIX is the program's.
RUN_INTERCEPT = "LOWPREC_RUN_INTERCEPT"
RUN_PROFILE = "LOWPREC_RUN_PROFILE"


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
        found |= {
            RUN_VARIABLE: RUN_GUARD,
            GUARD.name: "1",
            LIBRARIES["MLX_ENABLE_TF32"].name: "0",
        }
    elif mode is not None:
        variable = FORCE_MATH_MODE if force else MATH_MODE
        found |= {RUN_VARIABLE: mode.value, variable.name: mode.value}
    for name, asked in ((RUN_INTERCEPT, intercept), (RUN_PROFILE, profile)):
        if asked:
            found[name] = str(os.getpid())
    paths = found.get("PYTHONPATH")
    others = [path for path in paths.split(os.pathsep) if path != startup] if paths else []
    found["PYTHONPATH"] = os.pathsep.join([startup, *others])
    return found
