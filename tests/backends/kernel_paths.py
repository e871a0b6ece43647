"""The kernel paths of the CPU: which products lead to which kernel."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from lowprec.backends.cpu.kernel_rows import (
    AVX512_BF16,
    AVX512_BF16_PARTS,
    AVX512_FP32_ROUNDED,
    AVX512_VNNI,
    GEMV,
    GEMV_INT8,
    GEMV_WIDE,
    OPENBLAS,
)
from lowprec.modes import TABLE, MathMode
from lowprec.planning import KernelRow

#: Multiples of the kernels' blocks, their neighbours, and primes.
_EXTENTS = (1, 2, 3, 5, 7, 8, 15, 16, 17, 31, 32, 33, 45, 48, 63, 64, 65, 96, 113, 129, 160, 230, 257, 272, 290)
_LONG = (1, 2, 9, 16, 27, 33, 128, 250, 2049, 4099)

#: So that an example takes milliseconds.
MOST_FLOPS, _MOST_ELEMENTS = 1 << 20, 1 << 16


class Shape(NamedTuple):
    """Extents of each product, and how many there are."""

    m: int
    n: int
    k: int
    count: int = 1

    @property
    def elements(self) -> int:
        """Of a, b and the result."""
        return self.m * self.k + self.k * self.n + self.m * self.n

    @property
    def flops(self) -> int:
        return 2 * self.m * self.n * self.k


def numpy_dtype(name: str) -> np.dtype[Any]:
    return np.dtype(getattr(ml_dtypes, name, name))


def promoted(a: str, b: str) -> str:
    """Return in which type operands of two are multiplied."""
    if a == b:
        return a
    if {a, b} == {"bfloat16", "float16"}:
        return "float32"
    others = [x for x in (a, b) if x != "bfloat16"]
    return np.result_type(*others).name


@dataclass(frozen=True)
class KernelPath:
    """Products that one kernel runs."""

    kernel: str
    dtypes: tuple[tuple[str, str], ...]  # of a and b, which may change places
    modes: tuple[str, ...]
    takes: Callable[[Shape], bool]
    without: frozenset[str] = frozenset()  # features that would lead elsewhere
    needs: frozenset[str] = frozenset()
    #: Whether something follows each product; where nothing does, and strides allow it, one call of a BLAS is all.
    has_epilogue: bool | None = None
    at_any_size: bool = False  # whether what is too small for the kernel is led there nevertheless
    costs: int = 1  # about how many times as long as of the others its examples take

    @functools.cached_property
    def shapes(self) -> tuple[Shape, ...]:
        extents = {*product(_EXTENTS, repeat=3), *product(_LONG, repeat=3)}
        found = [
            shape
            for extent in sorted(extents)
            if (shape := Shape(*extent)).elements <= 2 * _MOST_ELEMENTS
            and self.takes(shape)
            and (self.costs > 1 or (shape.elements <= _MOST_ELEMENTS and shape.flops <= MOST_FLOPS))
        ]
        if self.costs > 1:
            least = min(shape.flops for shape in found)
            found = [shape for shape in found if shape.flops <= 1.2 * least]
        assert found, self.kernel
        return tuple(found)


def _modes(*, split: bool, of: str = "") -> tuple[str, ...]:
    return tuple(str(r.mode) for r in TABLE if (r.parts > 1) is split and str(r.mode).startswith(of))


PLAIN = ("fp32", "fp32_pedantic")
ROUNDING = ("tf32", "bf16", "fp16")
ALL = tuple(str(r.mode) for r in TABLE if r.mode is not MathMode.FP32_EMULATED)
_IN_BFLOAT16 = _modes(split=True, of="bf16")
_IN_OTHERS = tuple(m for m in _modes(split=True) if m not in _IN_BFLOAT16)

_SINGLE = ("float32", "float32")
_HALVES = (("float32", "bfloat16"), ("float32", "float16"), ("bfloat16", "float16"))
_COMPLEX = (("complex64", "complex64"), ("complex64", "float32"), ("complex64", "float16"))
_TILES = frozenset({"amx_bf16", "amx_int8"})


def _meets_vectors(shape: Shape, row: KernelRow = GEMV) -> bool:
    vectors = row.vectors or range(0)
    return min(shape.m, shape.n) in vectors and shape.elements >= row.minimum_elements


def _of_one_call(shape: Shape) -> bool:
    return shape.count == 1 or shape.flops >= OPENBLAS.minimum_batch_flops


def _meets_more(shape: Shape) -> bool:
    return _meets_vectors(shape, GEMV_WIDE)


def _without_bfloat16(shape: Shape) -> bool:
    return not (_meets_vectors(shape) or _meets_more(shape)) and _of_one_call(shape)


def _is_packed(shape: Shape, row: KernelRow = AVX512_BF16) -> bool:
    if shape.count > 1:
        return shape.flops >= row.minimum_batch_flops
    return shape.elements >= row.minimum_elements


def _is_rounded_as_packed(shape: Shape) -> bool:
    row = AVX512_FP32_ROUNDED
    return not _meets_vectors(shape) and _is_packed(shape, row) and min(shape.m, shape.n) >= row.minimum_mn


def _path(
    kernel: str, dtypes: Any, modes: Any, takes: Any, needs: str = "", without: Any = (), **more: Any
) -> KernelPath:
    return KernelPath(
        kernel, tuple(dtypes), tuple(modes), takes, frozenset(without), frozenset(needs.split()), **more
    )  # fmt: skip


def _in_eight_bits(shape: Shape) -> bool:
    enough = shape.count == 1 or shape.flops >= AVX512_VNNI.minimum_batch_flops
    return enough and not _meets_vectors(shape, GEMV_INT8)


def _is_large_complex(shape: Shape) -> bool:
    row = AVX512_BF16
    return shape.elements >= row.minimum_elements_complex and min(shape[:3]) >= row.minimum_extent_complex


KERNEL_PATHS: dict[str, KernelPath] = {
    "gemv": _path("gemv", [_SINGLE, *_HALVES], ROUNDING, _meets_vectors, "numba"),
    "gemv of 16 bits": _path(
        "gemv", [("bfloat16", "bfloat16"), ("float16", "float16")], ALL, _meets_vectors, "numba"
    ),
    "gemv_wide": _path(
        "gemv_wide", [_SINGLE, *_HALVES], ["tf32", "fp16"], _meets_more, "numba",
        [*_TILES, "avx512_fp32"], costs=4,
    ),
    "gemv of int8": _path(
        "gemv_int8", [("int8", "int8")], ALL, lambda x: _meets_vectors(x, GEMV_INT8), "numba", costs=4
    ),
    "bfloat16": _path(
        "avx512_bf16", [_SINGLE, *_HALVES], ["bf16"],
        lambda x: _is_packed(x) and not _meets_vectors(x), "avx512_bf16", _TILES,
    ),
    "bfloat16 as stored": _path(
        "avx512_bf16", [("bfloat16", "bfloat16")], ALL,
        lambda x: _is_packed(x) and not _meets_vectors(x), "avx512_bf16", _TILES,
    ),
    "bfloat16, complex": _path(
        "avx512_bf16", _COMPLEX, ["bf16"], _is_large_complex, "avx512_bf16", _TILES,
        costs=8,
    ),
    "parts": _path(
        "avx512_bf16_parts", [_SINGLE, *_HALVES[:2]], _IN_BFLOAT16,
        lambda x: _is_packed(x, AVX512_BF16_PARTS),
        "avx512_bf16", _TILES,
    ),
    "parts, complex": _path(
        "avx512_bf16_parts", _COMPLEX[:2], _IN_BFLOAT16, _is_large_complex, "avx512_bf16", _TILES,
        costs=8,
    ),
    "int8": _path(
        "avx512_vnni", [("int8", "int8")], ALL, _in_eight_bits, "avx512_vnni", _TILES
    ),
    "int8 of AVX": _path(
        "avx_vnni", [("int8", "int8")], ALL, _in_eight_bits, "avx_vnni",
        [*_TILES, "avx512_vnni"],
    ),
    "FP32 units": _path(
        "avx512_fp32", [_SINGLE], PLAIN, lambda x: True, "avx512_fp32", has_epilogue=False, at_any_size=True,
    ),
    "FP32 units, and an epilogue": _path(
        "avx512_fp32", [_SINGLE], PLAIN, lambda x: True, "avx512_fp32",
        has_epilogue=True, at_any_size=True, costs=4,
    ),
    "rounded": _path(
        "avx512_fp32_rounded", [_SINGLE, *_HALVES], ROUNDING, _is_rounded_as_packed, "avx512_fp32",
        [*_TILES, "avx512_bf16"], costs=4,
    ),
    "rounded, of 16 bits": _path(
        "avx512_fp32_rounded", [("float16", "float16"), ("bfloat16", "bfloat16")], ALL, _is_rounded_as_packed,
        "avx512_fp32", [*_TILES, "avx512_bf16"], costs=4,
    ),
    "OpenBLAS": _path(
        "openblas", [_SINGLE, ("float64", "float64"), ("float64", "float32")], ["fp32", "fp64"],
        _of_one_call, "openblas", has_epilogue=True,
    ),
    "OpenBLAS, one call": _path(
        "openblas", [(x, x) for x in ("float32", "float64", "complex64", "complex128")], PLAIN, _of_one_call,
        "openblas", has_epilogue=False,
    ),
    "OpenBLAS, rounded": _path(
        "openblas", [_SINGLE, *_HALVES], ["tf32", "fp16"], _without_bfloat16, "openblas",
        [*_TILES, "avx512_fp32"],
    ),
    "OpenBLAS, complex": _path(
        "openblas", [*_COMPLEX, ("complex128", "complex128"), ("complex128", "float32")],
        ["fp32", "fp64", "tf32", "fp16"], _of_one_call, "openblas", _TILES,
    ),
    "OpenBLAS, parts": _path(
        "openblas", [_SINGLE, *_HALVES[:2]], _IN_OTHERS,
        _of_one_call, "openblas", _TILES,
    ),
    "OpenBLAS, complex parts": _path("openblas", _COMPLEX[:2], _IN_OTHERS, _of_one_call, "openblas", _TILES),
    "NumPy": _path(
        "numpy", [_SINGLE, *_HALVES, ("float64", "float64"), *_COMPLEX, ("float16", "float16"), ("int8", "int8")],
        ALL, lambda x: x.flops <= 1 << 20,
        without=[*_TILES, "avx512_bf16", "avx512_vnni", "avx512_fp32", "avx_vnni", "openblas", "numba"],
    ),
}  # fmt: skip
