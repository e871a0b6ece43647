"""The table of environment variables: meaning, legal values, parser.

The documentation, the rows of ``info()`` and the error messages come from it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from lowprec.errors import EnvironmentVariableError, ModeError, quoted
from lowprec.modes import MathMode, mode_names, parse_mode

T = TypeVar("T")


@dataclass(frozen=True)
class Variable(Generic[T]):
    """One environment variable."""

    name: str
    meaning: str  # one sentence
    legal: str  # a description of the legal values
    default: str  # a description of the value where the variable is not set
    #: From the text to the value in force; raises :class:`EnvironmentVariableError` if the text is not legal.
    parse: Callable[[str], T]
    show: Callable[[T], str] = str  # from the value in force to its description
    remark: Callable[[str], str | None] = lambda text: None  # from a legal text to a warning
    #: Whether the first use of a mode fixes the value for the rest of the process.
    read_once: bool = False

    def text(self) -> str | None:
        """Return the current text, None where it is unset or blank."""
        return os.environ.get(self.name, "").strip() or None

    def value(self, text: str | None) -> T | None:
        """Return the value of this text; raise :class:`EnvironmentVariableError` if it is not legal."""
        return None if text is None else self.parse(text)


def _mode_variable(name: str, meaning: str, default: str) -> Variable[MathMode]:
    def parse(text: str) -> MathMode:
        try:
            return parse_mode(text, what=f"environment variable {name}:")
        except ModeError as error:
            raise EnvironmentVariableError(f"{error} (or unset the variable)") from None

    legal = f"{mode_names()}, or an alias of one of these"
    return Variable(name, meaning, legal, default, parse, read_once=True)


MATH_MODE = _mode_variable("LOWPREC_MATH_MODE", "The math mode where the program chooses none.", MathMode.FP32.value)
FORCE_MATH_MODE = _mode_variable(
    "LOWPREC_FORCE_MATH_MODE",
    "The math mode instead of the program's choice; only fp32_guard takes precedence.",
    "nothing is forced",
)


def _one_of(name: str, legal: Collection[str]) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if text not in legal:
            raise EnvironmentVariableError(
                f"environment variable {name}: {quoted(text)} is none of {', '.join(legal)}; or unset the variable"
            )
        return text

    return parse


_SWITCH = {"0": False, "1": True}


def _switch_variable(
    name: str, meaning: str, default: str, words: tuple[str, str], *, read_once: bool = False
) -> Variable[bool]:
    word, legal = _one_of(name, _SWITCH), " or ".join(_SWITCH)
    return Variable(
        name, meaning, legal, default, lambda text: _SWITCH[word(text)], words.__getitem__, read_once=read_once
    )  # fmt: skip


GUARD = _switch_variable(
    "LOWPREC_FP32_GUARD",
    "1 puts all of lowprec in the process inside fp32_guard, every thread of it; lowprec run --guard sets it.",
    "no guard",
    ("no guard", "no product is below full FP32"),
    read_once=True,
)


TF32_OVERRIDE = Variable(
    "NVIDIA_TF32_OVERRIDE",
    "0 turns every mode that is based on TF32 into fp32, in cuBLAS as in lowprec, on the GPU as on the CPU.",
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


AUTOTUNE = _switch_variable(
    "LOWPREC_AUTOTUNE",
    "1 measures cuBLASLt's algorithms for a product on a GPU that the cache does not hold, at its first use; 0 ignores "
    "the cache, too.",
    "choices that were measured before are used",
    ("the library's own choice", "choices are measured at first use"),
)
CACHE_DIR = Variable(
    "LOWPREC_CACHE_DIR",
    "The folder in which lowprec keeps compiled kernels and measured choices.",
    "a folder; it is created where it does not exist",
    "the system's folder for a user's caches",
    str,
)
THREADS = Variable(
    "LOWPREC_THREADS",
    "In a process that has imported PyTorch, own runs products on lowprec's own workers, openmp on the threads of "
    "PyTorch's OpenMP runtime.",
    "own or openmp",
    "openmp",
    _one_of("LOWPREC_THREADS", ("own", "openmp")),
    lambda word: "lowprec's own workers" if word == "own" else "PyTorch's threads where it is loaded",
)


def _list_variable(which: str, action: str) -> Variable[tuple[str, ...]]:
    name = f"LOWPREC_AMP_{which.upper()}LIST_{action}"
    words = {"ADD": "added to", "REMOVE": "taken from"}[action]

    def parse(text: str) -> tuple[str, ...]:
        found = tuple(part.strip() for part in text.split(",") if part.strip())
        for x in found:
            if not x.replace(".", "_").isidentifier():
                raise EnvironmentVariableError(
                    f"environment variable {name}: {quoted(x)} is not the name of a function; or unset the variable"
                )
        return found

    return Variable(
        name,
        f"Functions {words} the {which} list of lowprec.amp's policies; a policy reads it when it is created.",
        "names of functions, between commas",
        "none",
        parse,
        ", ".join,
    )


#: By the name of the list and the action.
AMP_LISTS = {
    (which, action): _list_variable(which, action)
    for which in ("allow", "deny", "infer")
    for action in ("ADD", "REMOVE")
}
NUMBA_OFF = Variable(
    "NUMBA_DISABLE_JIT",
    "Any number but 0 switches off numba's compiler, and with it lowprec's own kernels.",
    "0 or 1",
    "0",
    str,
)

#: Instruction sets of x86-64 and the flags that each adds; a limit hides those of later rows.
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


MAX_CPU_ISA = Variable(
    "LOWPREC_MAX_CPU_ISA",
    "The highest instruction set of an x86-64 processor that lowprec's kernels, its OpenBLAS and numba's compiler may "
    "use, as if the processor had no other: for tests and comparisons. NumPy's BLAS does not read it.",
    f"one of {', '.join(ISAS)}",
    "all instruction sets of the processor",
    _one_of("LOWPREC_MAX_CPU_ISA", ISAS),
    lambda isa: f"nothing above {isa} is used",
    read_once=True,
)


_THREADS = "a number of threads, as the library understands it", "the library's own choice"

#: Variables that other libraries read: name, meaning, legal values, default.
_LIBRARIES = (
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
    ("OMP_NUM_THREADS", "How many threads OpenMP libraries (MKL, OpenBLAS, PyTorch) may use", *_THREADS),
    ("MKL_NUM_THREADS", "How many threads MKL and lowprec may use", *_THREADS),
    ("OPENBLAS_NUM_THREADS",
     "How many threads OpenBLAS (NumPy's and SciPy's matrix products) may use", *_THREADS),
    ("OPENBLAS_CORETYPE",
     "The processor for whose kernels NumPy's and SciPy's OpenBLAS are loaded, unlike lowprec's copy",
     "the name of a processor, as OpenBLAS knows them (Haswell, SkylakeX)",
     "the processor's own, if OpenBLAS knows it"),
)  # fmt: skip

#: Every variable, in the order of the documentation.
VARIABLES: tuple[Variable[Any], ...] = (
    MATH_MODE,
    FORCE_MATH_MODE,
    GUARD,
    TF32_OVERRIDE,
    AUTOTUNE,
    CACHE_DIR,
    MAX_CPU_ISA,
    THREADS,
    *AMP_LISTS.values(),
    *(
        Variable(name, f"{meaning}; read by the library itself.", legal, default, str)
        for name, meaning, legal, default in _LIBRARIES
    ),
    NUMBA_OFF,
)
