"""Every micro-kernel against float64 oracles of the rounded operands, under derived bounds.

With u = 2^-24 and P exact products in the sum of one element, each product passes through at most
P - 1 roundings of sums, in whatever order they are taken, so the sum is within gamma(P) |A| |B| of
the exact one (ASNA section 3.1). Parts of a number have its sign and sum to it exactly, so P is 4 k
for operands in two parts, and |A| |B| stays that of the whole numbers. Where a mode splits operands, |A| |B| is the sum
over the products of parts that it forms, and P is k for each of them. The units take
subnormal numbers, going in and coming out, for zero: at most 2^-126 for each product and each sum.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from lowprec.backends.cpu import threads
from lowprec.backends.cpu.packed import jobs, run
from lowprec.backends.cpu.packed.micro_kernels import (
    AMX_BF16,
    AVX512_BF16,
    AVX512_FP32,
    AVX512_VNNI,
    MICRO_KERNELS,
    MicroKernel,
)
from support import oracles
from support.cpu_units import needs

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
DTYPES = {
    "float32": np.dtype(np.float32),
    "bfloat16": BFLOAT16,
    "float16": np.dtype(np.float16),
    "int8": np.dtype(np.int8),
    "int32": np.dtype(np.int32),
}
#: Micro-kernel, storage of the operands, rounding, parts.
KINDS: list[tuple[MicroKernel, str, str, int]] = [
    (AMX_BF16, "float32", "bf16", 1),
    (AMX_BF16, "float32", "tf32", 2),
    (AMX_BF16, "float32", "fp16", 2),
    (AMX_BF16, "bfloat16", "exact", 1),
    (AMX_BF16, "float16", "exact", 2),
    (AVX512_BF16, "float32", "bf16", 1),
    (AVX512_BF16, "float32", "tf32", 2),
    (AVX512_BF16, "float32", "fp16", 2),
    (AVX512_BF16, "bfloat16", "exact", 1),
    (AVX512_BF16, "float16", "exact", 2),
    (AVX512_FP32, "float32", "exact", 1),
    (AVX512_FP32, "float32", "bf16", 1),
    (AVX512_FP32, "float32", "tf32", 1),
    (AVX512_FP32, "float32", "fp16", 1),
    (AVX512_FP32, "bfloat16", "exact", 1),
    (AVX512_FP32, "float16", "exact", 1),
]
#: Unit roundoff of the sums.
U = 2.0**-24
#: The modes that split operands, and in how many bfloat16 parts.
SPLITS = {"bf16x3": 2, "bf16x6": 3, "bf16x9": 3, "tf32x3": 4}
SPLIT_KINDS = [(kernel, "float32", mode, parts) for kernel in (AMX_BF16, AVX512_BF16) for mode, parts in SPLITS.items()]
INT8 = [(x, "int8", "exact") for x in MICRO_KERNELS if x.storage == "int8"]


def of_kinds(names: str, cases: list[tuple[Any, ...]]) -> Any:
    """Parametrise by cases that begin with a micro-kernel; those whose units are not here are skipped."""
    return pytest.mark.parametrize(
        names.split(),
        [pytest.param(*case, marks=needs(case[0]), id="-".join([case[0].name, *map(str, case[1:])])) for case in cases],
    )


kinds = of_kinds("kernel dtype rounding parts", KINDS + SPLIT_KINDS)
whole_kinds = of_kinds("kernel dtype rounding parts", KINDS)
ROUNDED = [kind for kind in KINDS if kind[1] == "float32" and kind[2] != "exact"]
#: One kind in one part, one in two, and one that is split.
FEW = [kind for kind in ROUNDED + SPLIT_KINDS if kind[2] in ("bf16", "tf32", "bf16x6")]
#: For what is the same for all kinds of operands, or for those in two parts.
bfloat16_kernels = of_kinds("kernel", [(x,) for x in MICRO_KERNELS if x.storage == "bfloat16"])
two_part_kernels = bfloat16_kernels
int8_kernels = of_kinds("kernel", [kind[:1] for kind in INT8])


def rounded(x: np.ndarray, rounding: str) -> np.ndarray:
    """Return the operand as it is multiplied, in float64."""
    if rounding == "fp16" and x.dtype == np.float32:
        return oracles.float16_digits(x).astype(np.float64)
    return oracles.widen(oracles.round_to(x, rounding))


def multiply(
    kernel: MicroKernel, a: np.ndarray, b: np.ndarray, rounding: str, out: np.ndarray | str = "float32", **given: Any
) -> np.ndarray | None:
    """Return the result, or None if the kernel declined."""
    if isinstance(out, str):
        out = np.zeros((a.shape[0], b.shape[1]), DTYPES[out])
    given |= {"c": _with_absurd_strides(given["c"])} if given.get("c") is not None else {}
    done = run.gemm(kernel, *map(_with_absurd_strides, (a, b, out)), rounding=rounding, **given)
    return out if done else None


def _with_absurd_strides(x: np.ndarray) -> np.ndarray:
    """Return a matrix whose strides of extents of 1, which are never used, are absurd."""
    strides = [s if n > 1 else 12345 * x.itemsize for s, n in zip(x.strides, x.shape, strict=True)]
    return np.lib.stride_tricks.as_strided(x, strides=strides)


def split(x: np.ndarray, mode: str) -> list[np.ndarray]:
    """The parts of an operand, in float64; what is stored in 16 bits is one."""
    if x.dtype != np.float32:
        return [x.astype(np.float64)]
    parts, rest = [], x
    for _ in range({"bf16x3": 2, "tf32x3": 2}.get(mode, 3)):
        part = rounded(rest, "tf32" if mode == "tf32x3" else "bf16").astype(np.float32)
        parts.append(part.astype(np.float64))
        rest = rest - part
    return parts


def product_and_bound(a: np.ndarray, b: np.ndarray, rounding: str, parts: int) -> tuple[np.ndarray, np.ndarray]:
    """The product of the rounded operands in float64, and how far a float32 sum may be from it."""
    if rounding in SPLITS:
        x, y = split(a, rounding), split(b, rounding)
        # Orders of products of parts: below the third, but for bf16x9.
        pairs = [
            (x[i], y[j])
            for i, j in itertools.product(range(len(x)), range(len(y)))
            if i + j < {"bf16x6": 3, "bf16x9": 5}.get(rounding, 2)
        ]
    else:
        pairs = [(rounded(a, rounding), rounded(b, rounding))]
    x, y = (np.concatenate(side, axis) for side, axis in zip(zip(*pairs, strict=True), (1, 0), strict=True))
    count = a.shape[1] * (len(pairs) * (4 if rounding == "tf32x3" else 1) if rounding in SPLITS else parts * parts)
    # The oracle's own error: float64 sums of the same products.
    bound = (oracles.gamma(count, U) + oracles.gamma(x.shape[1], 2.0**-53)) * (np.abs(x) @ np.abs(y))
    flushed = 2 * count * 2.0**-126 * (1 + np.abs(x).max() + np.abs(y).max())
    return x @ y, bound + flushed


def assert_within(got: np.ndarray | None, want: np.ndarray, bound: np.ndarray) -> None:
    """Compare under an elementwise bound, widened by the one rounding to the result's type."""
    assert got is not None, "the kernel declined"
    unit, tiny = oracles.STORAGE[got.dtype.name]
    allowed = bound * (1 + unit) + unit * np.abs(want) + tiny
    error = np.abs(got.astype(np.float64) - want)
    worst = np.unravel_index(np.argmax(error / allowed), error.shape)
    assert (error <= allowed).all(), f"at {worst}: {got[worst]} for {want[worst]}, bound {allowed[worst]}"


def normal(rng: np.random.Generator, shape: tuple[int, ...], dtype: str) -> np.ndarray:
    return rng.standard_normal(shape, dtype=np.float32).astype(DTYPES[dtype])


# --- shapes and strides -----------------------------------------------------------------------

SHAPES = [
    (1, 1, 1), (1, 40, 7), (40, 1, 33), (16, 16, 32), (31, 33, 65), (64, 96, 32), (65, 31, 2), (100, 70, 1030),
    (33, 300, 2100), (300, 33, 4100),
]  # fmt: skip


@kinds
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.sampled(4)
def test_shapes_by_any_number_of_threads(
    kernel: MicroKernel, rng: np.random.Generator, monkeypatch: pytest.MonkeyPatch,
    dtype: str, rounding: str, parts: int, shape: tuple[int, int, int],
) -> None:  # fmt: skip
    m, n, k = shape
    a, b = normal(rng, (m, k), dtype), normal(rng, (k, n), dtype)
    results = []
    for count in (1, 2, 7):
        monkeypatch.setattr(threads, "num_threads", lambda count=count: count)
        results.append(multiply(kernel, a, b, rounding))
    assert_within(results[0], *product_and_bound(a, b, rounding, parts))
    for other in results[1:]:
        np.testing.assert_array_equal(other, results[0])


@of_kinds("kernel dtype rounding parts", ROUNDED)
def test_rounding_is_done_and_nothing_more(
    kernel: MicroKernel, rng: np.random.Generator, dtype: str, rounding: str, parts: int
) -> None:
    """Half of what rounding the inputs must cause is far above the bound of the sums."""
    a, b = normal(rng, (96, 64), dtype), normal(rng, (64, 96), dtype)
    got = multiply(kernel, a, b, rounding)
    assert_within(got, *product_and_bound(a, b, rounding, parts))
    assert got is not None
    exact = a.astype(np.float64) @ b.astype(np.float64)
    error = np.linalg.norm(got - exact) / np.linalg.norm(exact)
    assert error > (2.0**-10 if rounding == "bf16" else 2.0**-13)


def within(x: np.ndarray, shape: tuple[int, int], inside: Any) -> np.ndarray:
    """The same numbers among others, which are 77."""
    wide = np.full(shape, 77, x.dtype)
    wide[inside] = x
    return wide[inside]


#: The same numbers in each layout.
LAYOUTS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "rows": np.ascontiguousarray,
    "columns": np.asfortranarray,
    "backwards": lambda x: np.ascontiguousarray(x[::-1, ::-1])[::-1, ::-1],
    "rows backwards": lambda x: np.ascontiguousarray(x[::-1])[::-1],
    "padded": lambda x: within(x, (x.shape[0], x.shape[1] + 13), np.s_[:, 5 : 5 + x.shape[1]]),
    "steps": lambda x: within(x, (3 * x.shape[0], 2 * x.shape[1]), np.s_[::3, ::2]),
}


@of_kinds("kernel dtype rounding", [kind[:3] for kind in KINDS + SPLIT_KINDS] + INT8)
def test_layouts_of_operands(kernel: MicroKernel, rng: np.random.Generator, dtype: str, rounding: str) -> None:
    """The same numbers give the same bits in every layout."""
    m, n, k = 70, 90, 200
    out = "int32" if dtype == "int8" else "float32"
    if dtype == "int8":
        a, b = (rng.integers(-128, 128, s).astype(np.int8) for s in ((m, k), (k, n)))
    else:
        a, b = normal(rng, (m, k), dtype), normal(rng, (k, n), dtype)
    want = multiply(kernel, a, b, rounding, out)
    for of_a, of_b in itertools.product(LAYOUTS, LAYOUTS):
        got = multiply(kernel, LAYOUTS[of_a](a), LAYOUTS[of_b](b), rounding, out)
        np.testing.assert_array_equal(got, want, err_msg=f"{of_a}, {of_b}")


@pytest.mark.parametrize("out_dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("layout", LAYOUTS)
@of_kinds("kernel dtype rounding parts", FEW)
def test_layouts_of_out(
    kernel: MicroKernel, rng: np.random.Generator, out_dtype: str, layout: str, dtype: str, rounding: str, parts: int
) -> None:
    """Only the elements of `out` are written, in any layout."""
    m, n, k = 45, 70, 64
    a, b = normal(rng, (m, k), dtype), normal(rng, (k, n), dtype)
    out = LAYOUTS[layout](np.zeros((m, n), DTYPES[out_dtype]))
    got = multiply(kernel, a, b, rounding, out)
    assert_within(got, *product_and_bound(a, b, rounding, parts))
    if layout in ("padded", "steps"):
        out[...] = 77
        assert out.base is not None
        assert (out.base == 77).all()


@of_kinds(
    "kernel rounding dtypes",
    [(AMX_BF16, "tf32", x) for x in itertools.product(["float32", "bfloat16", "float16"], repeat=2)]
    + [(AVX512_BF16, "bf16", x) for x in itertools.product(["float32", "bfloat16"], repeat=2)]
    + [
        (kernel, mode, x)
        for kernel in (AMX_BF16, AVX512_BF16)
        for mode, narrow in (("bf16x6", "bfloat16"), ("tf32x3", "float16"), ("tf32x3", "bfloat16"))
        for x in (("float32", narrow), (narrow, "float32"))
    ],
)
def test_mixed_storage(kernel: MicroKernel, rng: np.random.Generator, rounding: str, dtypes: tuple[str, str]) -> None:
    """Each operand goes into the parts that it needs: 16-bit storage stays, float32 is rounded."""
    a, b = normal(rng, (40, 70), dtypes[0]), normal(rng, (70, 50), dtypes[1])
    assert_within(multiply(kernel, a, b, rounding), *product_and_bound(a, b, rounding, 2))


# --- panels -----------------------------------------------------------------------------------


# --- single products --------------------------------------------------------------------------


def patterns(dtype: str, rng: np.random.Generator) -> np.ndarray:
    """Finite numbers of every exponent between 2^-24 and 2^24, ties of each rounding among them."""
    if dtype == "float32":
        exponents = np.repeat(np.arange(127 - 24, 127 + 14, dtype=np.uint32), 40)
        fraction = rng.integers(0, 1 << 23, exponents.size, dtype=np.uint32)
        ties = np.where(np.arange(fraction.size) % 2, 0x1000, 0x8000).astype(np.uint32)
        fraction = np.where(np.arange(fraction.size) % 4 < 2, fraction & ~(ties * 2 - 1) | ties, fraction)
        sign = rng.integers(0, 2, exponents.size, dtype=np.uint32) << 31
        return (sign | exponents << 23 | fraction).view(np.float32)
    bits = np.arange(1 << 16, dtype=np.uint16).view(DTYPES[dtype])
    with np.errstate(invalid="ignore"):
        wide = np.abs(bits.astype(np.float64))
    keep = (wide >= 2.0**-24) & (wide < 2.0**15)
    return bits[keep]


@whole_kinds
def test_single_products_are_exact(
    kernel: MicroKernel, rng: np.random.Generator, dtype: str, rounding: str, parts: int
) -> None:
    """With k = 1 the product is the result: exact where it has at most 22 bits, of whole float32 rounded once."""
    x = patterns(dtype, rng)
    a, b = rng.permutation(x)[:1000, None], rng.permutation(x)[None, :1000]
    got = multiply(kernel, a, b, rounding)
    want = rounded(a, rounding) * rounded(b, rounding)
    if (dtype, rounding) == ("float32", "exact"):
        want = want.astype(np.float32)
    np.testing.assert_array_equal(got, want)


@bfloat16_kernels
@pytest.mark.parametrize("out_dtype", ["bfloat16", "float16"])
def test_results_are_rounded_once(kernel: MicroKernel, rng: np.random.Generator, out_dtype: str) -> None:
    """Products of k = 1 are exact in float32, so the output must be their nearest even neighbour."""
    x = patterns("float32", rng)
    a, b = rng.permutation(x)[:800, None], rng.permutation(x)[None, :800]
    with np.errstate(over="ignore"):
        want = (rounded(a, "bf16") * rounded(b, "bf16")).astype(np.float32).astype(DTYPES[out_dtype])
    got = multiply(kernel, a, b, "bf16", out_dtype)
    assert got is not None
    np.testing.assert_array_equal(got.view(np.uint16), want.view(np.uint16))
    assert np.isinf(want.astype(np.float32)).any() == (out_dtype == "float16")


# --- infinities and NaN -----------------------------------------------------------------------


TWO_PARTS = [kind[:3] for kind in KINDS if kind[3] == 2]
BAD = {"float32": [np.inf, -np.inf, np.nan, np.float32(np.finfo(np.float32).max)], "float16": [np.inf, -np.inf, np.nan]}


@of_kinds("kernel dtype rounding", TWO_PARTS)
@pytest.mark.parametrize("side", ["a", "b"])
@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("place", [(0, 0), (37, 50), (69, 99)])
def test_two_parts_decline_nonfinite_values(
    kernel: MicroKernel,
    rng: np.random.Generator,
    dtype: str,
    rounding: str,
    side: str,
    order: Any,
    place: tuple[int, int],
) -> None:
    bad = [*BAD[dtype]]
    if dtype == "float32":
        bad.append(np.array([0x7FFFFFFF], np.uint32).view(np.float32)[0])
    for value in bad:
        a, b = normal(rng, (70, 100), dtype), normal(rng, (100, 70), dtype)
        c = normal(rng, (70, 70), "float32")
        (a if side == "a" else b.T)[place] = value
        a, b = np.asarray(a, order=order), np.asarray(b, order=order)
        before = c.copy()
        assert multiply(kernel, a, b, rounding) is None, value
        # `out` is `c`: the caller must find it as it was, to compute the result by other means.
        assert multiply(kernel, a, b, rounding, c, c=c, beta=0.5) is None, value
        np.testing.assert_array_equal(c, before)


@two_part_kernels
@pytest.mark.parametrize("place", [(0, 0), (1199, 1099)])
def test_c_is_untouched_when_the_last_task_finds_a_nan(
    kernel: MicroKernel, rng: np.random.Generator, place: tuple[int, int]
) -> None:
    """Several blocks of rows and several chunks of k: the NaN is in the first or in the last."""
    a, b = normal(rng, (1200, 1100), "float32"), normal(rng, (1100, 64), "float32")
    c = normal(rng, (1200, 64), "float32")
    before = c.copy()
    a[place] = np.nan
    assert multiply(kernel, a, b, "tf32", c, c=c, beta=1.0) is None
    np.testing.assert_array_equal(c, before)


@two_part_kernels
def test_two_parts_keep_the_largest_finite_values(kernel: MicroKernel) -> None:
    """Just below what rounds to infinity nothing is declined."""
    largest = np.array([0x7F7FEFFF], np.uint32).view(np.float32).reshape(1, 1)
    one = np.ones((1, 1), np.float32)
    for rounding in ("tf32", "fp16"):
        assert multiply(kernel, largest, one, rounding) == (2 - 2.0**-10) * 2.0**127


# --- epilogues --------------------------------------------------------------------------------


@bfloat16_kernels
@pytest.mark.parametrize("activation", [None, "relu", "gelu"])
@pytest.mark.parametrize("with_bias", [None, "float32", "bfloat16", "float16"])
@pytest.mark.parametrize("with_c", [None, "float32", "bfloat16", "float16"])
@pytest.mark.parametrize("order", ["C", "F"])
def test_epilogues(
    kernel: MicroKernel, rng: np.random.Generator, activation: str, with_bias: str, with_c: str, order: Any
) -> None:
    m, n, k = 70, 45, 50
    a, b = normal(rng, (m, k), "float32"), normal(rng, (k, n), "float32")
    given: dict[str, Any] = {"alpha": 0.75, "activation": activation}
    if with_c:
        given |= {"c": np.asarray(normal(rng, (m, n), with_c), order=order), "beta": -1.5}
    if with_bias:
        given["bias"] = normal(rng, (2 * n,), with_bias)[::-2]
    out = np.zeros((m, n), np.float32, order=order)
    assert multiply(kernel, a, b, "bf16", out, **given) is out
    oracles.assert_expression(out, a, b, "bf16", oracles.Epilogue(**given))


@bfloat16_kernels
def test_gelu_closely(kernel: MicroKernel, rng: np.random.Generator) -> None:
    """About a dozen roundings, and those of the argument of exp(-2y) where that is at most 20."""
    x = np.linspace(-5, 5, 2000, dtype=np.float32).astype(BFLOAT16)[None, :]
    got = multiply(kernel, np.ones((1, 1), BFLOAT16), x, "exact", activation="gelu")
    wide = x.astype(np.float64)
    assert got is not None
    # gelu'(y) decays as exp(-2y) does, so that 2y times the relative error of y stays below 1.
    assert (np.abs(got - oracles.gelu(wide)) <= oracles.gamma(16, U) * np.abs(wide)).all()


@pytest.mark.parametrize("order", ["C", "F"])
@of_kinds("kernel dtype rounding parts", FEW)
def test_out_may_be_c(
    kernel: MicroKernel, rng: np.random.Generator, order: Any, dtype: str, rounding: str, parts: int
) -> None:
    a, b = normal(rng, (150, 3000), dtype), normal(rng, (3000, 130), dtype)
    c = normal(rng, (150, 130), "float32")
    want, bound = product_and_bound(a, b, rounding, parts)
    want, bound = want + 2.0 * c, bound + oracles.gamma(3, U) * (np.abs(want) + bound + 2.0 * np.abs(c))
    c = np.asarray(c, order=order)
    assert_within(multiply(kernel, a, b, rounding, c, c=c, beta=2.0), want, bound)


# --- int8 -------------------------------------------------------------------------------------


@int8_kernels
@pytest.mark.parametrize("shape", [(1, 1, 1), (33, 17, 65), (64, 64, 64), (50, 70, 9000)])
@pytest.mark.parametrize("orders", list(itertools.product("CF", repeat=3)))
def test_int8_is_exact(
    kernel: MicroKernel, rng: np.random.Generator, shape: tuple[int, int, int], orders: tuple[Any, Any, Any]
) -> None:
    m, n, k = shape
    a = np.asarray(rng.integers(-128, 128, (m, k), dtype=np.int8), order=orders[0])
    b = np.asarray(rng.integers(-128, 128, (k, n), dtype=np.int8), order=orders[1])
    a[0], b[:, 0] = -128, -128
    out = np.zeros((m, n), np.int32, order=orders[2])
    np.testing.assert_array_equal(multiply(kernel, a, b, "exact", out), a.astype(np.int64) @ b.astype(np.int64))


# --- the choice of units ----------------------------------------------------------------------


def test_processors_with_amx_leave_float32_to_openblas() -> None:
    flags = AVX512_FP32.cpu_flags
    assert AVX512_FP32.is_for(flags | {"avx512_bf16"})
    assert not AVX512_FP32.is_for(flags | AMX_BF16.cpu_flags)
    assert not AVX512_FP32.is_for(flags - {"avx512f"})
    assert AMX_BF16.is_for(flags | AMX_BF16.cpu_flags)


# --- blocks of columns ------------------------------------------------------------------------


@pytest.mark.parametrize("order", ["C", "F"])
@of_kinds(
    "kernel rounding", [(AVX512_BF16, "bf16"), (AVX512_BF16, "bf16x3"), (AVX512_FP32, "tf32"), (AVX512_VNNI, "exact")]
)
def test_blocks_of_columns_change_no_bit(
    kernel: MicroKernel, rounding: str, order: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A wide B is packed in blocks of columns, here of 32 or 64; each column has its own c and bias."""
    rng = np.random.default_rng(7)
    m, k, n = 301, 500, 777
    keywords: dict[str, Any] = {}
    if kernel is AVX512_VNNI:
        a, b = rng.integers(-99, 99, (m, k), np.int8), rng.integers(-99, 99, (k, n), np.int8)
        dtype = np.dtype(np.int32)
    else:
        a, b = (rng.standard_normal(shape, np.float32) for shape in ((m, k), (k, n)))
        c, bias = (rng.standard_normal(shape, np.float32) for shape in ((m, n), n))
        keywords = {"alpha": 2.0, "beta": 0.5, "c": c, "bias": bias, "activation": "relu"}
        dtype = np.dtype(np.float32)

    def product() -> np.ndarray:
        out = np.full((m, n), 7, dtype, order=order)
        jobs.job_of.cache_clear()
        assert run.gemm(kernel, a, b, out, rounding=rounding, **keywords)
        return out

    whole = product()
    monkeypatch.setattr(jobs, "_MOST_PACKED", 1 << 16)
    in_blocks = product()
    jobs.job_of.cache_clear()
    np.testing.assert_array_equal(in_blocks, whole)
