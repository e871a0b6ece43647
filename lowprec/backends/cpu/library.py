"""The compiled library of the CPU's kernels, and the declarations of ``native/lowprec.h`` for ctypes."""

from __future__ import annotations

import ctypes
import errno
import functools
import os
import struct
import sys
import zlib
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any, TypeVar

import numpy as np

from lowprec.errors import BackendError
from lowprec.formats import BlockFormat, DType
from lowprec.policy import environment

T = TypeVar("T")

_I32, _I64, _POINTER = ctypes.c_int32, ctypes.c_int64, ctypes.c_void_p

#: ``lp_type`` by element type, and by format of quantised arrays; "uint4" is int4 with zeros.
TYPES = {
    DType.FLOAT32: 0, DType.BFLOAT16: 1, DType.FLOAT16: 2, DType.FLOAT8_E4M3FN: 3, DType.FLOAT8_E5M2: 4, DType.INT8: 5,
    DType.INT32: 6, DType.COMPLEX64: 7,
}  # fmt: skip
BLOCK_TYPES = {
    "mxfp8": 8, "mxfp4": 9, "nvfp4": 10, "fp8_rows": 11, "int8": 12, "int8_blocks": 12, "int4": 13, "uint4": 14,
}  # fmt: skip

CODES = frozenset(BLOCK_TYPES.values())

#: Instruction sets of the units, in the order of ``lp_unit``.
INSTRUCTION_SETS: dict[str, tuple[str, ...]] = {
    "fp32_avx2": ("avx2",),
    "int8_avx2": ("avx2",),
    "int8_avxvnni": ("avx2", "avx_vnni"),
    "fp32_avx512": ("avx512f",),
    "bf16_avx512": ("avx512f", "avx512_bf16"),
    "int8_avx512": ("avx512f", "avx512_vnni"),
    "bf16_amx": ("avx512f", "amx_tile", "amx_bf16"),
    "int8_amx": ("avx512f", "amx_tile", "amx_int8"),
    "fp32_neon": (),
    "bf16_neon": (),
    "int8_neon": (),
}
UNITS = tuple(INSTRUCTION_SETS)

#: Numbers of 32 bits in a vector.
_LANES = {"avx2": 8, "avxvnni": 8, "neon": 4}

#: Returns an ``lp_call``, in a tenth of the time of ctypes.
call_bytes = struct.Struct("@10P4diQ").pack

#: ``lp_status``.
OK, UNSUPPORTED, NO_MEMORY, NOT_FINITE = range(4)


class Matrix(ctypes.Structure):
    """``lp_matrix``."""

    _fields_ = (
        ("row", _I64), ("col", _I64),
        ("row_offsets", _POINTER), ("inner_offsets", _POINTER), ("batch_offsets", _POINTER),
        ("scale_col", _I64), ("block", _I64), ("type", _I32), ("packed", _I32),
    )  # fmt: skip


class Scheme(ctypes.Structure):
    """``lp_scheme``."""

    _fields_ = (
        ("format", _I32), ("parts_a", _I32), ("parts_b", _I32), ("part_exponent", _I32), ("sums_parts", _I32),
        ("scaled", _I32), ("pair_count", _I32), ("pair_a", _I32 * 9), ("pair_b", _I32 * 9),
        ("factor", ctypes.c_float * 9),
    )  # fmt: skip


class Quantizer(ctypes.Structure):
    """``lp_quantizer``."""

    _fields_ = (
        ("batches", _I64), ("vectors", _I64), ("k", _I64), ("vector", _I64), ("inner", _I64), ("to_vector", _I64),
        ("to_inner", _I64), ("offsets", _POINTER), ("to_offsets", _POINTER), ("scale_batch", _I64),
        ("scale_vector", _I64), ("scale_inner", _I64), ("block_vectors", _I64), ("block_k", _I64),
        ("seed", ctypes.c_uint64), ("stream", ctypes.c_uint64), ("type", _I32), ("elements", _I32), ("scaling", _I32),
        ("stochastic", _I32), ("hadamard", _I32), ("codes", _I32),
        ("powers", _I32), ("pad", _I32),
    )  # fmt: skip


class Product(ctypes.Structure):
    """``lp_product``."""

    _fields_ = (
        ("m", _I64), ("n", _I64), ("k", _I64), ("batches", _I64),
        ("a", Matrix), ("b", Matrix), ("out", Matrix), ("c", Matrix), ("bias", Matrix),
        ("scheme", Scheme), ("unit", _I32), ("activation", _I32),
        ("rounding", Quantizer * 2), ("scale_order", _POINTER * 2), ("piece", _I64), ("last_unit", _I32), ("pad", _I32),
    )  # fmt: skip


class Lines(ctypes.Structure):
    """``lp_lines``."""

    _fields_ = (
        ("lines", _I64), ("width", _I64), ("terms", _I64), ("dots", _I64), ("x_step", _I64),
        ("out_lines", _POINTER), ("x_lines", _POINTER), ("w_lines", _POINTER), ("bias_lines", _POINTER),
        ("x_terms", _POINTER), ("w_terms", _POINTER), ("across", _I32), ("pad", _I32),
    )  # fmt: skip


class Heads(ctypes.Structure):
    """``lp_heads``."""

    _fields_ = (
        ("at", _POINTER), ("image", _I64), ("head", _I64), ("token", _I64), ("column", _I64),
    )  # fmt: skip


class AttentionHeads(ctypes.Structure):
    """``lp_attention``."""

    _fields_ = (
        ("q", Heads), ("k", Heads), ("v", Heads), ("mask", Heads), ("out", Heads),
        ("of_q", Heads), ("of_k", Heads), ("of_v", Heads),
        ("largest", _POINTER), ("sums", _POINTER), ("ranges", _POINTER), ("first_blocks", _POINTER),
        ("tasks", _I64), ("heads", _I64), ("groups", _I64), ("queries", _I64), ("width", _I64), ("chunk", _I64),
        ("scale", ctypes.c_float), ("is_causal", _I32), ("product", Product), ("threads", _I32), ("pad", _I32),
    )  # fmt: skip


#: Types of the results and arguments of the functions; None for one that gets references, which need no conversion.
_SIGNATURES: dict[str, tuple[Any, tuple[Any, ...] | None]] = {
    "version": (ctypes.c_uint64, ()),
    "units": (_I64, ()),
    "use_units": (None, (_I64,)),
    "gemm": (_I32, None),  # reference to a Product, bytes of an lp_call -> status
    # Product, bytes of an lp_call, target -> bytes
    "pack": (_I64, (_POINTER, ctypes.c_char_p, _POINTER)),
    "unscale": (_I32, (_POINTER, _I64, ctypes.c_double, _I32)),
    # Quantizer, source, target, scales, scale, threads -> status
    "quantize": (_I32, (_POINTER, _POINTER, _POINTER, _POINTER, _POINTER, _I32)),
    "emulate": (
        _I32,
        (_POINTER, _POINTER, _POINTER, _I64, _I64, _I64, _POINTER, _POINTER, _POINTER, _I32),
    ),
    "sum_lines": (_I32, (_POINTER, _POINTER, _POINTER, _POINTER, _POINTER, _I32)),
    "dot_lines": (_I32, (_POINTER, _POINTER, _POINTER, _POINTER, _I32)),
    "attend": (_I32, None),
    "use_openmp": (None, (_POINTER, _POINTER)),
    "release_memory": (None, ()),
    "kept_bytes": (_I64, ()),
    "run": (None, (_POINTER, _POINTER, ctypes.c_int)),
}

# By `os.path`, because importing pathlib takes longer than loading the library.
_FOLDER = os.path.dirname(os.path.abspath(__file__))
_PATH = os.path.join(
    _FOLDER, "_kernels" + {"win32": ".dll", "darwin": ".dylib"}.get(sys.platform, ".so")
)


def _sources_hash() -> int | None:
    """Return the hash of the sources as `hatch_build.py` computes it; None where the package is not in a checkout."""
    native, build = (
        os.path.join(_FOLDER, "native"),
        os.path.join(_FOLDER, *[os.pardir] * 3, "hatch_build.py"),
    )
    if not (os.path.isdir(native) and os.path.isfile(build)):
        return None
    names = [x for x in sorted(os.listdir(native)) if x.endswith((".cpp", ".hpp", ".h"))]
    return zlib.crc32(
        b"".join(_read(x) for x in [*(os.path.join(native, name) for name in names), build])
    )


def _read(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()


@functools.cache
def _loaded() -> tuple[SimpleNamespace | None, str]:
    if not os.path.isfile(_PATH):
        note = os.path.splitext(_PATH)[0] + ".txt"
        why = (
            _read(note).decode().strip() if os.path.isfile(note) else "run `python hatch_build.py`"
        )
        if getattr(sys, "frozen", False):
            why = f"this program was packed without {os.path.basename(_PATH)}: add the files of lowprec to it"
        elif not os.path.isdir(os.path.dirname(_PATH)):
            why = "no library can be loaded from an archive: install lowprec instead"
        return None, f"built without kernels ({why})"
    try:
        open(_PATH, "rb").close()  # the loader's error has no number
        library, holding_gil = ctypes.CDLL(_PATH), ctypes.PyDLL(_PATH)
    except OSError as error:
        # raised, so that the next product tries again
        if error.errno in (errno.EMFILE, errno.ENFILE):
            raise BackendError(
                f"the kernels cannot be loaded ({error}); close files and multiply again"
            ) from None
        # of a signal handler, as TimeoutError
        if type(error) not in (OSError, FileNotFoundError, PermissionError):
            raise
        return None, f"the kernels cannot be loaded ({error})"
    library.lp_version.restype = ctypes.c_uint64
    # before its functions, which may be others
    if _sources_hash() not in (None, library.lp_version()):
        raise BackendError(
            f"{_PATH} was compiled from other sources than those of this checkout: run `python hatch_build.py`"
        )
    found: dict[str, Any] = {name: getattr(library, f"lp_{name}") for name in _SIGNATURES}
    # for products that take less time than a switch of threads
    found["gemm_holding_gil"] = holding_gil.lp_gemm
    for name, function in found.items():
        function.restype, function.argtypes = _SIGNATURES[name.partition("_holding")[0]]
    return SimpleNamespace(**found), ""


#: Set while calls of the BLAS are intercepted (`core/blas.py`): lets those of this thread pass, or no longer.
pass_blas: Callable[[int], int] | None = None


def untaken(function: Callable[..., T], *args: Any, **keywords: Any) -> T:
    """Call a function whose products no interception takes."""
    set_depth = pass_blas
    if set_depth is None:
        return function(*args, **keywords)
    before = set_depth(1)
    try:
        return function(*args, **keywords)
    finally:
        set_depth(before)


def path() -> str:
    """Return the path of the library."""
    return _PATH


@functools.cache
def function(loader: type[ctypes.CDLL], name: str, result: Any, *arguments: Any) -> Any:
    """Return another function of the library, without the prefix, by the types of its result and arguments."""
    found = getattr(loader(_PATH), f"lp_{name}")
    found.restype = result
    found.argtypes = arguments
    return found


def library() -> SimpleNamespace | None:
    """Return the functions of the library, without the prefix ``lp_``; None without it. Loads it at the first call.

    Other threads run during a call.
    """
    return _loaded()[0]


def functions() -> SimpleNamespace:
    """Return the functions of the library; raise BackendError without it."""
    found = library()
    if found is None:
        raise BackendError(unavailable_reason() or "")
    return found


def unavailable_reason() -> str | None:
    """Return why there is no library; None if there is."""
    return _loaded()[1] or None


@functools.cache
def units() -> frozenset[str]:
    """Return the units of this CPU without those that ``LOWPREC_MAX_CPU_ISA`` hides, also from the library.

    Empty without the library. Raises EnvironmentVariableError for an illegal value.
    """
    found = library()
    if found is None:
        return frozenset()
    hidden = environment.hidden_cpu_flags()
    found.use_units(
        sum(1 << i for i, name in enumerate(UNITS) if hidden.isdisjoint(INSTRUCTION_SETS[name]))
    )
    usable = found.units()
    return frozenset(name for i, name in enumerate(UNITS) if usable >> i & 1)


def lanes(unit: int) -> int:
    """Return the numbers of 32 bits in a vector of a unit, on which the order of stored codes depends."""
    return _LANES.get(UNITS[unit].partition("_")[2], 16)


def block_type(fmt: BlockFormat) -> int:
    """Return the ``lp_type`` of a format."""
    return BLOCK_TYPES["uint4" if fmt.has_zeros else fmt.name]


def offsets(dimensions: Iterable[tuple[int, int]]) -> Any:
    """Return the offsets of all indices over dimensions, given by extent and stride, in row-major order."""
    total = np.zeros(1, np.int64)
    for extent, stride in dimensions:
        total = np.add.outer(total, np.arange(extent) * stride).ravel()
    return total
