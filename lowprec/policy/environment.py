"""Environment variables, which only this module reads; documentation, ``info()`` and error messages use its table.

Variables that set a mode are read once per process, at the first use of a mode (a product, a plan, ``get_math_mode``),
as cuBLAS reads ``NVIDIA_TF32_OVERRIDE`` once. ``import lowprec`` reads none, so an illegal value raises only in a
program that multiplies. A blank value counts as unset.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Generic, TypeVar

from lowprec.errors import EnvironmentVariableError, ModeError, did_you_mean, quoted
from lowprec.modes import MathMode, Mode, mode_names, parse_mode
from lowprec.policy import entries

T = TypeVar("T")


@dataclass(frozen=True)
class Variable(Generic[T]):
    """One environment variable."""

    name: str
    meaning: str  # one sentence
    legal: str  # description of the legal values
    default: str  # description of the default
    # from text to value; raises EnvironmentVariableError for illegal text
    parse: Callable[[str], T]
    show: Callable[[T], str] = str  # from value to its description
    # from legal text to a warning, None for none
    remark: Callable[[str], str | None] = lambda text: None
    read_once: bool = False  # read at the first use of a mode only

    def text(self) -> str | None:
        """Return the current text, None if unset or blank."""
        return os.environ.get(self.name, "").strip() or None

    def current(self) -> T | None:
        """Return the current value, None if unset; raise :class:`EnvironmentVariableError` if it is illegal."""
        return self.value(self.text())

    def value(self, text: str | None) -> T | None:
        """Return the value of this text; raise :class:`EnvironmentVariableError` if it is illegal."""
        return None if text is None else self.parse(text)


def _mode_variable(name: str, meaning: str, default: str) -> Variable[Mode]:
    def parse(text: str) -> Mode:
        try:
            return parse_mode(text, what=f"environment variable {name}:")
        except ModeError as error:
            raise EnvironmentVariableError(f"{error} (or unset the variable)") from None

    legal = f"{mode_names()}, or an alias of one of these"
    return Variable(name, meaning, legal, default, parse, read_once=True)


MATH_MODE = _mode_variable(
    "LOWPREC_MATH_MODE", "The math mode where the program chooses none.", MathMode.FP32.value
)
FORCE_MATH_MODE = _mode_variable(
    "LOWPREC_FORCE_MATH_MODE",
    "The math mode instead of the program's choice; only fp32_guard takes precedence.",
    "nothing is forced",
)


def _choice(
    name: str,
    meaning: str,
    default: str,
    choices: Mapping[str, tuple[T, str]],
    *,
    read_once: bool = False,
) -> Variable[T]:
    """Return a variable with few legal texts, each with its value and the description of that."""
    shown = dict(choices.values())

    def parse(text: str) -> T:
        if text not in choices:
            raise EnvironmentVariableError(
                f"environment variable {name} must be one of {', '.join(choices)}, got {quoted(text)}; or unset it"
            )
        return choices[text][0]

    legal = " or ".join(choices) if len(choices) == 2 else f"one of {', '.join(choices)}"
    return Variable(name, meaning, legal, default, parse, shown.__getitem__, read_once=read_once)


GUARD = _choice(
    "LOWPREC_FP32_GUARD",
    "1 applies fp32_guard to lowprec in all threads of the process; lowprec run --guard sets it.",
    "no guard",
    {"0": (False, "no guard"), "1": (True, "no product is below full FP32")},
    read_once=True,
)
TF32_OVERRIDE = Variable(
    "NVIDIA_TF32_OVERRIDE",
    "0 turns every mode that is based on TF32 into fp32, in cuBLAS and in lowprec, on GPU and CPU.",
    "0; NVIDIA reserves every other value",
    "TF32 is allowed",
    lambda text: text == "0",
    lambda off: "TF32 is off" if off else "lowprec does not act on this value",
    lambda text: (
        None
        if text == "0"
        else f"NVIDIA_TF32_OVERRIDE={text}: NVIDIA reserves every value but 0, and lowprec does not act on it"
    ),
    read_once=True,
)
PEER_ACCESS = _choice(
    "LOWPREC_PEER_ACCESS",
    "1 allocates results for JAX and DLPack such that other GPUs can access them, which takes longer.",
    "results are accessible from their own GPU",
    {
        "0": (False, "results are accessible from their own GPU"),
        "1": (True, "other GPUs may access results"),
    },
)
CACHE_DIR = Variable(
    "LOWPREC_CACHE_DIR",
    "The folder for GPU kernels and measured choices of algorithms.",
    "a folder; created if missing",
    "the user's cache folder of the system",
    str,
)
THREADS = _choice(
    "LOWPREC_THREADS",
    "If PyTorch is loaded: own runs products on lowprec's workers, openmp on the threads of PyTorch's OpenMP runtime.",
    "openmp",
    {
        "own": ("own", "lowprec's own workers"),
        "openmp": ("openmp", "PyTorch's threads if it is loaded"),
    },
)


def _parse_threads(text: str) -> int:
    count = _thread_count(text)
    if count is None:
        raise EnvironmentVariableError(
            f"environment variable LOWPREC_NUM_THREADS must be a positive number, got {quoted(text)}; or unset it"
        )
    return count


NUM_THREADS = Variable(
    "LOWPREC_NUM_THREADS",
    "The most threads of a product on the CPU; other limits, such as OMP_NUM_THREADS, apply, too.",
    "a positive number",
    "the other limits alone",
    _parse_threads,
)

#: Instruction sets of x86-64 and the CPU flags that each adds; a limit hides the flags of later rows.
ISAS: dict[str, frozenset[str]] = {
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

MAX_CPU_ISA = _choice(
    "LOWPREC_MAX_CPU_ISA",
    "The highest x86-64 instruction set of lowprec's kernels, for tests and comparisons. NumPy's BLAS ignores it.",
    "all instruction sets of the processor",
    {isa: (isa, f"nothing above {isa} is used") for isa in ISAS},
    read_once=True,
)

_THREADS = "a number of threads", "the library's own choice"

#: Variables that other libraries read: name, meaning, legal values, default.
_LIBRARIES = (
    ("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "1 allows TF32 in PyTorch's products on CUDA at start",
     "0 or 1", "PyTorch starts with full FP32"),
    ("JAX_DEFAULT_MATMUL_PRECISION", "JAX's initial precision of products",
     "a precision or the name of an algorithm of JAX", "JAX's own choice for the device"),
    ("CUPY_TF32", "1 enables TF32 in CuPy's float32 products", "0 or 1", "CuPy uses full FP32"),
    ("MLX_ENABLE_TF32", "0 disables TF32 in MLX, which has no other switch for it",
     "0 or 1", "MLX may use TF32"),
    ("CUBLAS_EMULATE_SINGLE_PRECISION",
     "1 lets cuBLAS emulate FP32 with bfloat16 parts, on compute capability 10.0 and 10.3",
     "0 or 1", "cuBLAS computes in FP32"),
    ("CUBLAS_EMULATE_DOUBLE_PRECISION",
     "1 lets cuBLAS emulate FP64 with integers, from compute capability 8.0",
     "0 or 1", "cuBLAS computes in FP64"),
    ("CUBLAS_EMULATION_STRATEGY", "Whether cuBLAS emulates where that is faster, or where it is supported",
     "performant or eager", "performant"),
    ("CUBLAS_FIXEDPOINT_EMULATION_MANTISSA_BIT_COUNT",
     "Mantissa bits of cuBLAS's emulation of FP64, whose errors then have no documented bound",
     "a number of bits", "as many as the data need"),
    ("OMP_NUM_THREADS", "Number of threads of OpenMP libraries (MKL, OpenBLAS, PyTorch) and lowprec", *_THREADS),
    ("MKL_NUM_THREADS", "Number of threads of MKL and lowprec", *_THREADS),
    ("OPENBLAS_NUM_THREADS",
     "Number of threads of OpenBLAS (NumPy's and SciPy's matrix products) and lowprec", *_THREADS),
    ("OPENBLAS_CORETYPE",
     "Processor whose kernels NumPy's and SciPy's OpenBLAS use",
     "the name of a processor in OpenBLAS (Haswell, SkylakeX)",
     "the actual processor, if OpenBLAS supports it"),
)  # fmt: skip

#: Every variable, in the order of the documentation.
VARIABLES: tuple[Variable[Any], ...] = (
    MATH_MODE,
    FORCE_MATH_MODE,
    GUARD,
    TF32_OVERRIDE,
    PEER_ACCESS,
    CACHE_DIR,
    MAX_CPU_ISA,
    THREADS,
    NUM_THREADS,
    *(
        Variable(name, f"{meaning}; read by the library itself.", legal, default, str)
        for name, meaning, legal, default in _LIBRARIES
    ),
)


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
        MATH_MODE.value(texts["LOWPREC_MATH_MODE"]),
        FORCE_MATH_MODE.value(texts["LOWPREC_FORCE_MATH_MODE"]),
        bool(GUARD.value(texts["LOWPREC_FP32_GUARD"])),
        bool(TF32_OVERRIDE.value(texts["NVIDIA_TF32_OVERRIDE"])),
        MAX_CPU_ISA.value(texts["LOWPREC_MAX_CPU_ISA"]),
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


def _row(variable: Variable[Any], first: EnvironmentSnapshot | None) -> dict[str, Any]:
    """Return one variable as in ``info()``; ``problem`` is a warning about its value, or None."""
    now = variable.text()
    used = now
    if first is not None and variable.read_once:
        used = first.texts[variable.name]
    effect = variable.default
    problem = None
    try:
        if used is not None:
            effect = variable.show(variable.parse(used))
            problem = variable.remark(used)
    except EnvironmentVariableError as error:
        effect = "refused"
        problem = str(error)
    if used != now:
        problem = (
            f"{variable.name} was {_shown(used)} when lowprec read it and is {_shown(now)} now; "
            "the first value is used until the process ends"
        )
    return {
        "name": variable.name,
        "value": now,
        "effect": effect,
        "meaning": variable.meaning,
        "legal": variable.legal,
        "problem": problem,
    }


def _shown(text: str | None) -> str:
    return "unset" if text is None else quoted(text)


def hidden_cpu_flags() -> frozenset[str]:
    """Return the CPU flags above ``LOWPREC_MAX_CPU_ISA``, which is read once."""
    first = _snapshots.get(None)
    limit = MAX_CPU_ISA.current() if first is None else first.max_cpu_isa
    if limit is None:
        return frozenset()
    names = list(ISAS)
    above = names[names.index(limit) + 1 :]
    return frozenset().union(*map(ISAS.__getitem__, above))


def _thread_count(text: str) -> int | None:
    """Return a positive number of threads, the first of a list; None for other texts."""
    text = text.partition(",")[0].strip()
    # int() raises for thousands of digits; nine are enough.
    digits = text.lstrip("0")
    if not digits or not text.isascii() or not text.isdigit():
        return None
    return int(digits[:9])


def thread_limit(*, of_blas: bool) -> int:
    """Return the least number of threads that a variable sets; ``of_blas``: also by variables that OpenBLAS reads."""
    names = "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS"
    mkl, openblas, omp = (_thread_count(os.environ.get(name, "")) for name in names)
    limits = NUM_THREADS.current(), mkl, of_blas and (openblas or omp)
    return min(limit or sys.maxsize for limit in limits)


def rows() -> list[dict[str, Any]]:
    """Return one row per variable for ``info()``, without raising or taking the snapshot."""
    return [_row(v, _snapshots.get(None)) for v in VARIABLES]


def problems() -> tuple[str, ...]:
    """Return the warnings among :func:`rows`."""
    known = [v.name for v in VARIABLES]
    # Others are those of the launcher, of builds and of checks.
    ours = [
        name for name in sorted(os.environ) if re.match("LOWPREC_(?!RUN|BUILD|CI_|EMULATOR_)", name)
    ]
    found = [r["problem"] for r in rows() if r["problem"] is not None]
    for name in ours:
        if name not in known:
            found.append(f"{name} is not a variable of lowprec{did_you_mean(name, known)}")
    return tuple(found)


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
    record: str = "",
    against: str = "",
    preloaded: tuple[str, str] | None = None,
) -> dict[str, str]:
    """Return the environment for a program that ``lowprec run`` starts.

    ``startup``, the folder of the start-up hook, is put first in ``PYTHONPATH``. ``mode`` is None if the program
    chooses its modes, or with the guard; with ``force`` the program cannot change it. ``intercept`` is a JSON list of
    rules, and ``folder`` is for the counts of the program's processes. ``record`` is the file for the products of one
    of two runs that are compared, ``against`` the mode of the other one. ``preloaded`` is a library with BLAS entry
    points, and its mode.
    """
    child = dict(os.environ)
    if guard:
        child |= {RUN_VARIABLE: RUN_GUARD, "LOWPREC_FP32_GUARD": "1", "MLX_ENABLE_TF32": "0"}
    elif mode is not None:
        variable = FORCE_MATH_MODE if force else MATH_MODE
        child |= {RUN_VARIABLE: mode.value, variable.name: mode.value}
    child[f"{RUN_VARIABLE}_PROGRAM"] = str(os.getpid())  # on POSIX also the program's
    hooks = {"INTERCEPT": intercept, "PROFILE": "1" if profile else "", "FOLDER": folder}
    hooks |= {"RECORD": record, "AGAINST": against}
    child |= {f"{RUN_VARIABLE}_{name}": value for name, value in hooks.items() if value}
    # an outer run's is removed, also that of another copy of lowprec
    start = os.sep.join(startup.split(os.sep)[-5:])
    child["PYTHONPATH"] = _put_first(startup, child.get("PYTHONPATH", ""), os.pathsep, start)
    if preloaded is not None:
        path, mode_of_blas = preloaded
        child["LOWPREC_BLAS"] = mode_of_blas
        child["LD_PRELOAD"] = _put_first(
            path, child.get("LD_PRELOAD", ""), ":", os.path.basename(path)
        )
    return child


def _put_first(path: str, paths: str, separator: str, end: str) -> str:
    """Return a list of paths with ``path`` first, without others of this end."""
    found = [path]
    if paths:
        found += [x for x in paths.split(separator) if not x.endswith(end)]
    return separator.join(found)
