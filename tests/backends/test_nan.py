"""A NaN in an operand reaches every element of the result that it touches, whatever its bits and position.

Integer arithmetic on the bits of a NaN carries its payload into the exponent or the sign: 0x7fffffff becomes a zero,
0x7f800001 an infinity. So every class of payload goes through every kind of stride, and through the kernels that
pack operands and write results on tile units, which need AVX-512 alone.
"""

from __future__ import annotations

import ctypes
import importlib.util
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import lowprec
from lowprec import formats
from lowprec.backends.cpu.cpuinfo import cpu_flags
from lowprec.backends.cpu.packed.micro_kernels import AVX512_FP32
from lowprec.backends.cpu.rounding import round_float32
from support import oracles
from support.cpu_units import needs
from support.machines import MACHINES, fixture

bfloat16 = np.dtype(ml_dtypes.bfloat16)
FORMATS = {"tf32": formats.TF32, "bf16": formats.BFLOAT16, "fp16": formats.FLOAT16}

modes = pytest.mark.parametrize("mode", oracles.ALL_MODES)


def scattered(view: np.ndarray) -> list[tuple[int, ...]]:
    """Return an element at the beginning, one in the middle, and one at the end of a view."""
    return sorted({tuple(n // 2 for n in view.shape), (0,) * view.ndim, tuple(n - 1 for n in view.shape)})


def put(view: np.ndarray, index: tuple[int, ...], nan: np.ndarray) -> None:
    """Write the bits of a NaN: an assignment of floats may quieten it."""
    bits = np.dtype(f"u{nan.itemsize}")
    real = view.real if view.dtype.kind == "c" else view
    real.view(bits)[index] = nan.view(bits)


# -- rounding -------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", FORMATS)
@pytest.mark.parametrize("strides", oracles.STRIDES)
def test_rounding_keeps_every_nan(mode: str, strides: str, rng: np.random.Generator) -> None:
    for nan in oracles.nans(np.float32):
        writable, view = oracles.STRIDES[strides](oracles.random_matrix(rng, (6, 8), np.float32))
        for index in scattered(writable):
            put(writable, index, nan)
        before = view.copy()
        got = np.full(view.shape, 777.0, np.float32)
        round_float32(view, FORMATS[mode], got)
        want = oracles.round_to(view, mode)
        assert (np.isnan(got) == np.isnan(view)).all(), hex(int(nan.view(np.uint32)))
        np.testing.assert_array_equal(got, want)
        np.testing.assert_array_equal(view.view(np.uint32), before.view(np.uint32))


@pytest.mark.parametrize("mode", FORMATS)
def test_rounding_in_place(mode: str, rng: np.random.Generator) -> None:
    x = oracles.random_matrix(rng, (1 << 10, 1 << 9), np.float32)  # several blocks
    nans = oracles.nans(np.float32)
    x[5, : nans.size] = nans
    x[7::101, ::103] = np.inf
    want = oracles.round_to(x, mode)
    assert np.isnan(x).sum() == nans.size
    round_float32(x, FORMATS[mode], x)
    np.testing.assert_array_equal(x, want)


# -- products -------------------------------------------------------------------------------------


machine = fixture(*MACHINES)


#: m, n, k; the second is cut into tiles where there are any.
SIZES = {"small": (6, 5, 8), "tiles": (70, 66, 96)}


@modes
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", ["float32", "complex64"])
@pytest.mark.sampled(6)
def test_every_nan_reaches_the_result(mode: str, size: str, dtype: str, machine: str, rng: np.random.Generator) -> None:
    m, n, k = SIZES[size]
    patterns = oracles.nans(np.float32)
    for name, strided in oracles.STRIDES.items():
        some = patterns if size == "small" else patterns[:: len(patterns) // 4]
        for nan in some:
            for side in ("a", "b"):
                shape = (m, k) if side == "a" else (k, n)
                writable, x = strided(oracles.random_matrix(rng, shape, dtype))
                put(writable, tuple(extent // 2 for extent in writable.shape), nan)
                other = oracles.random_matrix(rng, (k, n) if side == "a" else (m, k), dtype)
                other[other == 0] = 1
                a, b = (x, other) if side == "a" else (other, x)
                got = lowprec.matmul(a, b, math_mode=mode)
                lines = np.isnan(x).any(axis=1 if side == "a" else 0)
                touched = np.isnan(got) if side == "a" else np.isnan(got).T
                case = name, side, hex(int(nan.view(np.uint32)))
                assert lines.any(), case
                assert (touched == lines[:, None]).all(), case
                oracles.assert_within_bound(got, a, b, mode)


@pytest.mark.parametrize("dtype", [np.dtype(np.float16), bfloat16], ids=str)
@pytest.mark.parametrize("out_dtype", ["float32", None])
def test_every_nan_of_16_bits_reaches_the_result(
    dtype: Any, out_dtype: str | None, machine: str, rng: np.random.Generator
) -> None:
    for strided in oracles.STRIDES.values():
        for nan in oracles.nans(dtype):
            writable, a = strided(oracles.random_matrix(rng, (6, 8), dtype))
            put(writable, tuple(extent // 2 for extent in writable.shape), nan)
            b = oracles.random_matrix(rng, (8, 5), dtype)
            got = lowprec.matmul(a, b, out_dtype=out_dtype)
            lines = np.isnan(oracles.widen(a)).any(axis=1)
            assert lines.any()
            assert (np.isnan(oracles.widen(got)) == lines[:, None]).all()
            oracles.assert_within_bound(got, a, b)


@pytest.mark.parametrize("out_dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("activation", [None, "relu", "gelu"])
def test_every_nan_of_an_addend_reaches_the_result(
    out_dtype: str, activation: str | None, machine: str, rng: np.random.Generator
) -> None:
    a, b = (oracles.random_matrix(rng, (64, 64), np.float32) for _ in range(2))
    for nan in oracles.nans(np.float32):
        c, bias = np.zeros((64, 64), np.float32), np.zeros(64, np.float32)
        put(c, (3, 4), nan)
        put(bias, (7,), nan)
        got = lowprec.matmul(
            a, b, c=c, beta=1.0, bias=bias, activation=activation, out_dtype=out_dtype, math_mode="bf16"
        )  # fmt: skip
        want = np.zeros((64, 64), bool)
        want[3, 4] = want[:, 7] = True
        np.testing.assert_array_equal(np.isnan(got), want)


@pytest.mark.parametrize("size", [2, 70, 140])
@pytest.mark.parametrize("dtype", [np.dtype("f4"), np.dtype("f8"), np.dtype("f2"), bfloat16], ids=str)
def test_gelu_of_minus_infinity_is_zero_on_every_kernel(size: int, dtype: Any, machine: str) -> None:
    a = np.eye(size, dtype=dtype)
    c = np.zeros((size, size), dtype)
    c[0, 0], c[1, 1], c[1, 0], c[0, 1] = -np.inf, np.inf, np.nan, -60000
    got = lowprec.matmul(a, a, c=c, beta=1.0, activation="gelu")
    np.testing.assert_array_equal(oracles.widen(got)[:2, :2], [[0, 0], [np.nan, np.inf]])


# -- the kernels around the tile units ------------------------------------------------------------

needs_kernels = pytest.mark.skipif(
    not importlib.util.find_spec("numba") or not {"avx512f", "avx512bw", "avx512vl", "avx512_bf16"} <= cpu_flags(),
    reason="the packing kernels need numba and a CPU with AVX512-BF16",
)


def page(nbytes: int) -> tuple[Any, int]:
    """Return memory and an address in it that is a multiple of 4096 bytes."""
    memory = np.zeros(nbytes + 4096, np.uint8)
    return memory, -(-memory.ctypes.data // 4096) * 4096


def pack(x: np.ndarray, scheme: Any, *, is_b: bool) -> tuple[np.ndarray, bool]:
    """Return lanes x k packed: the values of each part, (parts, lanes, k); and whether the kernel declined."""
    from lowprec.backends.cpu.packed import native, packing

    lanes, k = x.shape
    strips, steps = -(-lanes // 32), -(-k // scheme.step)
    strip_bytes = steps * scheme.parts * 2048
    (_, target), (_, scratch) = held = page(strips * strip_bytes), page(packing.SCRATCH_BYTES)
    kernel = native.compiled(packing._pack_function(scheme))
    flags = kernel(
        x.ctypes.data, *x.strides, lanes, k, 0, strips, 0, steps, target, strip_bytes, int(is_b), scratch, 0
    )  # fmt: skip
    in_pairs = scheme.step == 32  # bfloat16: a row holds a dword of k for each lane
    raw = np.frombuffer((ctypes.c_char * (strips * strip_bytes)).from_address(target), np.uint16 if in_pairs else "f4")
    tiles = raw.reshape(strips, steps, scheme.parts, 2, 16, 16, -1).copy()
    del held
    if is_b:
        tiles = tiles.swapaxes(4, 5)
    if in_pairs:
        tiles = (tiles.astype(np.uint32) << np.uint32(16)).view(np.float32)
    ordered = tiles.transpose(2, 0, 3, 4, 1, 5, 6).reshape(scheme.parts, strips * 32, -1)
    return ordered[:, :lanes, :k], flags != 0


PACKINGS = [("float32", "bf16"), ("float32", "tf32"), ("float32", "fp16"), ("float16", "exact")]


@needs_kernels
@pytest.mark.parametrize(("dtype", "rounding"), PACKINGS)
@pytest.mark.parametrize("is_b", [False, True], ids="ab")
@pytest.mark.parametrize("strides", oracles.STRIDES)
def test_packing_loses_no_nan(dtype: str, rounding: str, is_b: bool, strides: str, rng: np.random.Generator) -> None:
    from lowprec.backends.cpu.packed import tile_rows

    for nan in [None, *oracles.nans(dtype)]:
        writable, x = oracles.STRIDES[strides](oracles.random_matrix(rng, (40, 72), dtype))
        if nan is not None:
            put(writable, tuple(extent // 2 for extent in writable.shape), nan)
        parts, declined = pack(x, tile_rows.SCHEMES[dtype, rounding], is_b=is_b)
        if len(parts) == 1:
            assert not declined
            np.testing.assert_array_equal(parts[0], oracles.round_to(x, rounding))
        elif nan is not None:  # the product then runs on FP32 units
            assert declined, hex(int(nan.view(f"u{nan.itemsize}")))
        else:
            assert not declined
            want = oracles.round_to(x, rounding).astype(np.float32)
            if (dtype, rounding) == ("float32", "fp16"):
                want = oracles.float16_digits(x)
            np.testing.assert_array_equal(parts[0] + parts[1], want)


#: float32, and bfloat16 and float16 as they are.
FP32_PACKINGS = [
    *[("float32", rounding) for rounding in ("exact", "bf16", "tf32", "fp16")],
    ("bfloat16", "exact"),
    ("float16", "exact"),
]


@needs(AVX512_FP32)
@pytest.mark.parametrize(("dtype", "rounding"), FP32_PACKINGS)
@pytest.mark.parametrize("is_b", [False, True], ids="ab")
@pytest.mark.parametrize("strides", oracles.STRIDES)
@pytest.mark.sampled(3)
def test_packing_float32_loses_no_nan(
    dtype: str, rounding: str, is_b: bool, strides: str, rng: np.random.Generator
) -> None:
    """NaN, infinities, what rounds to one, zeros of both signs and subnormal numbers."""
    from lowprec.backends.cpu.packed import tile_rows

    largest = np.finfo(np.float32).max
    special = [np.inf, -np.inf, largest, -largest, 0.0, -0.0]
    if rounding != "fp16":  # whose operands are scaled where there are such numbers
        special += [1e-39, -1e-45]
    with np.errstate(over="ignore"):
        numbers = [*oracles.nans(dtype), *np.array(special, np.float32).astype(getattr(ml_dtypes, dtype, dtype))]
    for number in numbers:
        writable, x = oracles.STRIDES[strides](oracles.random_matrix(rng, (40, 72), dtype))
        put(writable, tuple(extent // 2 for extent in writable.shape), number)
        want = x.astype(np.float32) if rounding == "exact" else oracles.round_to(x, rounding)
        if rounding == "fp16":
            with np.errstate(over="ignore"):
                want = oracles.float16_digits(x)
        (got,), declined = pack(x, tile_rows.FP32_SCHEMES[dtype, rounding], is_b=is_b)
        assert not declined
        np.testing.assert_array_equal(got, want)
        np.testing.assert_array_equal(np.signbit(got), np.signbit(want))
