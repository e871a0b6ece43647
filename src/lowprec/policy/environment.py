"""The environment variables, as one table, and the only place that reads them.

The table makes the documentation, the rows of ``info()`` and the texts of the errors.

Variables that decide a mode are read once per process, at the first use of a mode (a product, a plan,
``get_math_mode``), because cuBLAS reads ``NVIDIA_TF32_OVERRIDE`` once, too: a variable changed in mid-process
would act on one of the two libraries only. ``import lowprec`` reads nothing, so a bad value breaks the program that
multiplies, not every program that imports. An empty or blank value counts as unset.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Generic, NamedTuple, TypeVar

from lowprec.errors import EnvironmentVariableError, ModeError, quoted
from lowprec.modes import MathMode, mode_names, parse_mode
from lowprec.policy import entries

T = TypeVar("T")


def _no_remark(text: str) -> str | None:
    return None


@dataclass(frozen=True)
class Variable(Generic[T]):
    """One environment variable.

    Parameters
    ----------
    name : str
        The variable.
    meaning : str
        What it does, in one sentence.
    legal : str
        The values that it may hold, in words.
    default : str
        What holds where it is not set, in words.
    parse : callable
        From the text to the value in force; raises :class:`EnvironmentVariableError` if the text is not legal.
    show : callable
        From the value in force to words.
    remark : callable
        From a legal text to a warning, or to None.
    read_once : bool
        Whether the first use of a mode fixes the value for the rest of the process.
    """

    name: str
    meaning: str
    legal: str
    default: str
    parse: Callable[[str], T]
    show: Callable[[T], str] = str
    remark: Callable[[str], str | None] = _no_remark
    read_once: bool = False

    def text(self) -> str | None:
        """Return the text in the environment now, None where it is unset or blank."""
        return os.environ.get(self.name, "").strip() or None

    def value(self, text: str | None) -> T | None:
        """Return the value that this text stands for; raise :class:`EnvironmentVariableError` if it is not legal."""
        return None if text is None else self.parse(text)


def _mode_variable(name: str, meaning: str, default: str) -> Variable[MathMode]:
    def parse(text: str) -> MathMode:
        try:
            return parse_mode(text, what=f"environment variable {name}:")
        except ModeError as error:
            raise EnvironmentVariableError(f"{error}; or unset the variable") from None

    legal = f"{mode_names()}, or an alias of one of these"
    return Variable(name, meaning, legal, default, parse, read_once=True)


_MATH_MODE = _mode_variable(
    "LOWPREC_MATH_MODE",
    "The math mode where the program chooses none.",
    MathMode.FP32.value,
)
_FORCE_MATH_MODE = _mode_variable(
    "LOWPREC_FORCE_MATH_MODE",
    "The math mode whatever the program chooses; only fp32_guard stands above it.",
    "nothing is forced",
)


_SWITCH = {"0": False, "1": True}


def _switch_variable(
    name: str, meaning: str, default: str, words: tuple[str, str], *, read_once: bool = False
) -> Variable[bool]:
    def parse(text: str) -> bool:
        if text not in _SWITCH:
            choices = ", ".join(_SWITCH)
            raise EnvironmentVariableError(
                f"environment variable {name}: {quoted(text)} is neither of {choices}; or unset the variable"
            )
        return _SWITCH[text]

    legal = " or ".join(_SWITCH)
    return Variable(name, meaning, legal, default, parse, words.__getitem__, read_once=read_once)


_GUARD = _switch_variable(
    "LOWPREC_FP32_GUARD",
    "1 puts all of lowprec in the process inside fp32_guard, every thread of it; lowprec run --guard sets it.",
    "no guard",
    ("no guard", "no product is below full FP32"),
    read_once=True,
)


def _turns_tf32_off(text: str) -> bool:
    return text == "0"


def _tf32_effect(off: bool) -> str:
    return "TF32 is off" if off else "lowprec does not act on this value"


def _tf32_remark(text: str) -> str | None:
    if _turns_tf32_off(text):
        return None
    return f"NVIDIA_TF32_OVERRIDE={text}: NVIDIA reserves every value but 0, and lowprec does not act on it"


_TF32_OVERRIDE = Variable(
    "NVIDIA_TF32_OVERRIDE",
    "0 turns every mode that is based on TF32 into fp32, in cuBLAS as in lowprec, on the GPU as on the CPU.",
    "0; NVIDIA reserves every other value",
    "TF32 is allowed",
    _turns_tf32_off,
    _tf32_effect,
    _tf32_remark,
    read_once=True,
)


def _library_variable(name: str, meaning: str, legal: str, default: str) -> Variable[str]:
    return Variable(name, f"{meaning}; read by the library itself.", legal, default, str)


def _thread_variable(name: str, readers: str) -> Variable[str]:
    meaning = f"How many threads {readers} may use"
    legal = "a number of threads, as the library understands it"
    return _library_variable(name, meaning, legal, "the library's own choice")


#: Variables that other libraries read: name, meaning, legal values, default.
_LIBRARIES = {
    name: _library_variable(name, *rest)
    for name, *rest in (
        ("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "1 has PyTorch start with TF32 allowed in products on CUDA",
         "0 or 1", "PyTorch starts with full FP32"),
        ("JAX_DEFAULT_MATMUL_PRECISION", "The precision of products with which JAX starts",
         "a word or the name of an algorithm, as JAX knows them", "JAX's own choice for the device"),
        ("CUPY_TF32", "1 has CuPy use TF32 in products of float32", "0 or 1", "CuPy uses full FP32"),
        ("MLX_ENABLE_TF32", "0 keeps MLX from TF32, for which it has no other switch",
         "0 or 1", "MLX may use TF32"),
        ("CUBLAS_EMULATE_SINGLE_PRECISION",
         "1 lets cuBLAS compute FP32 by bfloat16 parts, on compute capability 10.0 and 10.3",
         "0 or 1", "cuBLAS computes in FP32"),
        ("CUBLAS_EMULATE_DOUBLE_PRECISION",
         "1 lets cuBLAS compute FP64 by integers, from compute capability 8.0 on",
         "0 or 1", "cuBLAS computes in FP64"),
        ("CUBLAS_EMULATION_STRATEGY", "Whether cuBLAS emulates where that is faster, or wherever it can",
         "performant or eager", "performant"),
    )
}  # fmt: skip
_AUTOTUNE = _switch_variable(
    "LOWPREC_AUTOTUNE",
    "1 measures cuBLASLt's algorithms for a product on a GPU that the cache does not hold, at its first use; 0 ignores "
    "the cache, too, and what was measured of the CPU.",
    "choices that were measured before are used",
    ("the library's own choice", "choices are measured at first use"),
)
_CACHE_DIR = Variable(
    "LOWPREC_CACHE_DIR",
    "The folder in which lowprec keeps compiled GPU kernels, measured choices and costs.",
    "a folder; it is made where there is none",
    "the system's folder for a user's caches",
    str,
)


def _names(name: str) -> Callable[[str], tuple[str, ...]]:
    def parse(text: str) -> tuple[str, ...]:
        found = tuple(part.strip() for part in text.split(",") if part.strip())
        wrong = [x for x in found if not x.replace(".", "_").isidentifier()]
        if wrong:
            raise EnvironmentVariableError(
                f"environment variable {name}: {quoted(wrong[0])} is no name of a function; or unset the variable"
            )
        return found

    return parse


def _list_variable(which: str, action: str) -> Variable[tuple[str, ...]]:
    name = f"LOWPREC_AMP_{which.upper()}LIST_{action}"
    words = {"ADD": "added to", "REMOVE": "taken from"}[action]
    return Variable(
        name,
        f"Functions {words} the {which} list of lowprec.amp's policies; a policy reads it when it is made.",
        "names of functions, between commas",
        "none",
        _names(name),
        ", ".join,
    )


#: By the name of the list and what is done to it.
_AMP_LISTS = {
    (which, action): _list_variable(which, action)
    for which in ("allow", "deny", "infer")
    for action in ("ADD", "REMOVE")
}
_MKL_THREADS = _thread_variable("MKL_NUM_THREADS", "MKL and lowprec")
_NUMBA_OFF = Variable(
    "NUMBA_DISABLE_JIT",
    "Any number but 0 switches off numba's compiler, and with it lowprec's own kernels.",
    "0 or 1",
    "0",
    str,
)


#: Instruction sets of x86-64 and the flags that each brings; a limit hides those of what comes after it.
_ISAS: dict[str, frozenset[str]] = {
    "baseline": frozenset(),
    "avx2": frozenset({"avx", "f16c", "fma", "avx2", "fma4", "xop", "vaes", "vpclmulqdq"}),
    "avx2_vnni": frozenset({"avx_vnni"}),
    "avx512": frozenset({"avx512f", "avx512cd", "avx512bw", "avx512dq", "avx512vl"}),
    "avx512_vnni": frozenset(
        {"avx512_vnni", "avx512ifma", "avx512vbmi", "avx512_vbmi2", "avx512_bitalg"}
        | {"avx512_vpopcntdq", "avx512_vp2intersect"}
    ),
    "avx512_bf16": frozenset({"avx512_bf16"}),
    "amx": frozenset({"amx_tile", "amx_bf16", "amx_int8", "avx512_fp16"}),
}


def _isa(text: str) -> str:
    if text not in _ISAS:
        raise EnvironmentVariableError(
            f"environment variable LOWPREC_MAX_CPU_ISA: {quoted(text)} is none of {', '.join(_ISAS)}; or unset the "
            "variable"
        )
    return text


_MAX_CPU_ISA = Variable(
    "LOWPREC_MAX_CPU_ISA",
    "The highest instruction set of an x86-64 processor that lowprec's kernels, its OpenBLAS and numba's compiler may "
    "use, as if the processor had no other: for tests and comparisons. NumPy's BLAS does not read it.",
    f"one of {', '.join(_ISAS)}",
    "all that the processor has",
    _isa,
    lambda isa: f"nothing above {isa} is used",
    read_once=True,
)


#: Every variable, in the order of the documentation.
VARIABLES: tuple[Variable[Any], ...] = (
    _MATH_MODE,
    _FORCE_MATH_MODE,
    _GUARD,
    _TF32_OVERRIDE,
    _AUTOTUNE,
    _CACHE_DIR,
    _MAX_CPU_ISA,
    *_AMP_LISTS.values(),
    *_LIBRARIES.values(),
    _thread_variable("OMP_NUM_THREADS", "OpenMP libraries (MKL, OpenBLAS, PyTorch)"),
    _MKL_THREADS,
    _thread_variable("OPENBLAS_NUM_THREADS", "OpenBLAS (NumPy's and SciPy's matrix products)"),
    _library_variable(
        "OPENBLAS_CORETYPE",
        "The processor for whose kernels NumPy's and SciPy's OpenBLAS are loaded. lowprec's copy goes by the processor "
        "itself",
        "the name of a processor, as OpenBLAS knows them (Haswell, SkylakeX)",
        "the processor's own, if OpenBLAS knows it",
    ),
    _NUMBA_OFF,
)


# eq=False: a snapshot is part of the key of every cached decision, so it is hashed by identity.
@dataclass(frozen=True, slots=True, eq=False)
class EnvironmentSnapshot:
    """The values that hold for the rest of the process.

    Parameters
    ----------
    math_mode : MathMode or None
        From ``LOWPREC_MATH_MODE``.
    force_math_mode : MathMode or None
        From ``LOWPREC_FORCE_MATH_MODE``.
    fp32_guard : bool
        Whether ``LOWPREC_FP32_GUARD`` is 1.
    tf32_off : bool
        Whether ``NVIDIA_TF32_OVERRIDE`` is 0.
    max_cpu_isa : str or None
        From ``LOWPREC_MAX_CPU_ISA``.
    texts : mapping of str to str or None
        What each variable held when it was read.
    """

    math_mode: MathMode | None
    force_math_mode: MathMode | None
    fp32_guard: bool
    tf32_off: bool
    max_cpu_isa: str | None
    texts: Mapping[str, str | None]


#: The snapshot, once it is taken. `setdefault` is one step, without a lock that a forked child or a signal handler
#: could find taken.
_taken: dict[None, EnvironmentSnapshot] = {}


def _take() -> EnvironmentSnapshot:
    texts = {v.name: v.text() for v in VARIABLES if v.read_once}
    return EnvironmentSnapshot(
        _MATH_MODE.value(texts[_MATH_MODE.name]),
        _FORCE_MATH_MODE.value(texts[_FORCE_MATH_MODE.name]),
        bool(_GUARD.value(texts[_GUARD.name])),
        bool(_TF32_OVERRIDE.value(texts[_TF32_OVERRIDE.name])),
        _MAX_CPU_ISA.value(texts[_MAX_CPU_ISA.name]),
        MappingProxyType(texts),
    )


def snapshot() -> EnvironmentSnapshot:
    """Return the variables that decide a mode, read at the first call and kept.

    A value that is not legal is not kept: the next call reads again.

    Raises
    ------
    EnvironmentVariableError
        If a variable holds a value that it may not hold.

    Examples
    --------
    >>> snapshot() is snapshot()
    True
    """
    # Two threads that start together must see the same values, even if a third one writes the environment.
    return _taken.get(None) or _taken.setdefault(None, _take())


def refresh() -> None:
    """Forget the snapshot, so that the next use of a mode reads the environment again.

    For tests and interactive work. It reaches lowprec only: cuBLAS keeps what it read.
    """
    _taken.clear()
    if entries.changed is not None:
        entries.changed(True)


class VariableRow(NamedTuple):
    """What ``info()`` tells about one variable.

    Parameters
    ----------
    name, meaning, legal : str
        As in :class:`Variable`.
    value : str or None
        The text in the environment now.
    effective : str
        What holds in this process, in words.
    problem : str or None
        A warning: a value that is refused, reserved, or changed too late.
    """

    name: str
    value: str | None
    effective: str
    meaning: str
    legal: str
    problem: str | None


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
    return _NUMBA_OFF.text() not in (None, "0")


def hidden_cpu_flags() -> frozenset[str]:
    """Return the flags of the instruction sets above ``LOWPREC_MAX_CPU_ISA``; raise if it names none.

    The variable decides which kernels there are, so its first value holds for as long as the snapshot's.
    """
    taken = _taken.get(None)
    limit = _MAX_CPU_ISA.value(_MAX_CPU_ISA.text()) if taken is None else taken.max_cpu_isa
    if limit is None:
        return frozenset()
    names = list(_ISAS)
    return frozenset().union(*(_ISAS[name] for name in names[names.index(limit) + 1 :]))


def autotune() -> bool | None:
    """Return what ``LOWPREC_AUTOTUNE`` says, None where it is not set; raise if it is neither 0 nor 1."""
    return _AUTOTUNE.value(_AUTOTUNE.text())


def cache_directory() -> str | None:
    """Return what ``LOWPREC_CACHE_DIR`` holds, None where it is not set."""
    return _CACHE_DIR.value(_CACHE_DIR.text())


def amp_list(which: str, action: str) -> tuple[str, ...]:
    """Return the names in ``LOWPREC_AMP_ALLOWLIST_ADD`` and its like; raise if one is no name.

    Parameters
    ----------
    which : {"allow", "deny", "infer"}
    action : {"ADD", "REMOVE"}
    """
    variable = _AMP_LISTS[which, action]
    return variable.value(variable.text()) or ()


def thread_limit() -> int | None:
    """Return the number in ``MKL_NUM_THREADS``, None where it is not set to a positive number."""
    text = _MKL_THREADS.text() or ""
    # int() refuses some digits of other scripts, and thousands of digits; nine are more threads than there are.
    digits = text.lstrip("0") if text.isascii() and text.isdigit() else ""
    return int(digits[:9]) if digits else None


def rows() -> tuple[VariableRow, ...]:
    """Return what ``info()`` and the documentation show, one row per variable.

    Nothing is raised and nothing is fixed by looking: without a snapshot the rows tell what it would hold.

    Examples
    --------
    >>> rows()[0].name
    'LOWPREC_MATH_MODE'
    """
    taken = _taken.get(None)
    return tuple(_row(v, taken) for v in VARIABLES)


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
    """Return the environment for a program that ``lowprec run`` starts; this process's stays as it is.

    Parameters
    ----------
    startup : str
        The folder that holds the start-up hook. It comes first in ``PYTHONPATH``, once.
    mode : MathMode or None
        The mode; None where the program is to choose, or with the guard.
    guard : bool
        Whether it runs under the guard.
    force : bool
        Whether the program cannot choose another mode.
    intercept : bool
        Whether PyTorch's products are taken through lowprec.
    profile : bool
        Whether lowprec's products are recorded, and shown at the end.

    Examples
    --------
    >>> child_environment("startup", MathMode.TF32)["LOWPREC_MATH_MODE"]
    'tf32'
    """
    found = dict(os.environ)
    if guard:
        found |= {
            RUN_VARIABLE: RUN_GUARD,
            _GUARD.name: "1",
            _LIBRARIES["MLX_ENABLE_TF32"].name: "0",
        }
    elif mode is not None:
        variable = _FORCE_MATH_MODE if force else _MATH_MODE
        found |= {RUN_VARIABLE: mode.value, variable.name: mode.value}
    for name, asked in ((RUN_INTERCEPT, intercept), (RUN_PROFILE, profile)):
        if asked:
            found[name] = str(os.getpid())
    paths = found.get("PYTHONPATH")
    others = [path for path in paths.split(os.pathsep) if path != startup] if paths else []
    found["PYTHONPATH"] = os.pathsep.join([startup, *others])
    return found
