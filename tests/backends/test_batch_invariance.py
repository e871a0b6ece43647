"""One order of summation: the bits of an element depend on its row of a, its column of b and k alone.

Not on the other rows and columns, nor on layouts, threads, batches and preparation; and in modes whose products run on
FP32 units, and for int8, not on the instruction set. NumPy computes float64, complex128 and mode ``fp64``, and promises
none of this.
"""

import itertools

import ml_dtypes
import numpy as np
import pytest

import lowprec
from lowprec.backends.cpu import library, numpy_products, products, threads
from lowprec.formats import BLOCK_FORMATS
from lowprec.modes import MathMode, available_modes, row
from lowprec.planning.schedule import chunk_length, make_schedule
from support import cpu_units, machines, oracles

needs_kernels = pytest.mark.skipif(library.library() is None, reason="lowprec has no kernels")

#: Modes that NumPy computes, that choose another mode, or that have one scale for all rows of an operand.
_OTHER = (
    MathMode.FP64,
    MathMode.FP32_EMULATED,
    MathMode.FP64_EMULATED,
    MathMode.FP8,
    MathMode.NVFP4,
)
MODES = [str(x) for x in available_modes() if x not in _OTHER]
TYPES = {name: np.dtype(getattr(ml_dtypes, name, name))
         for name in ("bfloat16", "float16", "float8_e4m3fn", "int8", "complex64")}  # fmt: skip
#: Formats of quantised arrays; int8 is a type here.
FORMATS = [name for name in BLOCK_FORMATS if name not in TYPES]
#: Type of a, type or format of b, and mode.
KINDS = [
    *[("float32", "float32", mode) for mode in MODES],
    *[(name, name, "fp32") for name in TYPES],
    *[("complex64", "complex64", mode) for mode in ("bf16", "tf32x3", "fp16")],
    *[("float32", "bfloat16", mode) for mode in ("fp32", "bf16x3", "fp16")],
    *[("bfloat16", fmt, "fp32") for fmt in FORMATS],
    *[("float32", fmt, "tf32") for fmt in FORMATS],
]  # fmt: skip
#: Rows of a product: those of few rows, around the heights of tiles, and others.
HEIGHTS = (1, 2, 3, 4, 5, 7, 8, 9, 13, 16, 17, 31, 33, 48, 63, 65, 100, 129, 256, 257)


def numbers(rng, shape, name):
    if name == "int8":
        return rng.integers(-128, 128, shape, np.int8)
    x = rng.standard_normal(shape, np.float32)
    if name == "complex64":
        return (x + 1j * rng.standard_normal(shape, np.float32)).astype(np.complex64)
    if name in FORMATS:
        return lowprec.quantize(x, name, axis=0)
    return x.astype(TYPES.get(name, np.dtype(np.float32)))


def bits(x):
    """Return the bits of a result, with one NaN for all."""
    x = np.ascontiguousarray(x)
    x = x.view(np.float32) if x.dtype.kind == "c" else x
    found = x.view(f"u{x.itemsize}").copy()
    if x.dtype.kind != "i":
        found[np.isnan(x)] = 1 << 8 * x.itemsize - 1
    return found


def assert_same(found, want, *what):
    differ = bits(found) != bits(want)
    assert not differ.any(), (
        f"{np.count_nonzero(differ)} of {differ.size} elements have other bits",
        *what,
    )


# -- layouts --------------------------------------------------------------------------------------


def in_steps(x):
    """Return the same numbers in every second column and third row of others."""
    wide = np.zeros((3 * x.shape[0], 2 * x.shape[1]), x.dtype)
    wide[::3, ::2] = x
    return wide[::3, ::2]


def by_columns(a, b, **given):
    turned = b if isinstance(b, lowprec.QuantizedArray) else np.asfortranarray(b)
    return lowprec.matmul(np.asfortranarray(a), turned, **given)


def with_gaps(a, b, **given):
    return lowprec.matmul(
        in_steps(a),
        b if isinstance(b, lowprec.QuantizedArray) else in_steps(b[::-1])[::-1],
        **given,
    )


def into_columns(a, b, **given):
    plan = lowprec.plan(a, b, **given)
    out = np.zeros(plan.out_shape[::-1], TYPES.get(plan.out_dtype.label, plan.out_dtype.label)).T
    return lowprec.matmul(a, b, out=out, **given)


def sequence_first(a, b, **given):
    """Multiply rows whose matrix has no single stride between rows."""
    count = next(x for x in (3, 2, 1) if len(a) % x == 0)
    stacked = a.reshape(count, len(a) // count, a.shape[1])
    return lowprec.matmul(stacked.swapaxes(0, 1).copy().swapaxes(0, 1), b, **given).reshape(
        len(a), -1
    )


def in_a_batch(a, b, **given):
    """Multiply as the second product of a batch in which every matrix is another one."""
    if isinstance(b, lowprec.QuantizedArray):
        return lowprec.matmul(np.stack([a[::-1], a]), b, **given)[1]
    return lowprec.matmul(np.stack([a[::-1], a]), np.stack([b[::-1], b]), **given)[1]


LAYOUTS = (lowprec.matmul, by_columns, with_gaps, into_columns, sequence_first, in_a_batch)


def pieces(rng, *, every):
    """Yield ranges of rows: each of the first 257 alone, and batches of 1 to 257; or a part of these."""
    for height in range(1, 258) if every else HEIGHTS:
        first = int(rng.integers(0, 258 - height))
        yield slice(first, first + height)
    for first in range(257) if every else rng.integers(0, 257, 8).tolist():
        yield slice(first, first + 1)


def kind_id(kind):
    return "-".join(dict.fromkeys(kind))


@needs_kernels
@pytest.mark.parametrize(
    "every", [False, pytest.param(True, marks=pytest.mark.sweep)], ids=["some", "every"]
)
@pytest.mark.parametrize("kind", KINDS, ids=kind_id)
def test_rows_alone_and_in_batches(kind, every, rng, monkeypatch):
    of_a, of_b, mode = kind
    a, b = numbers(rng, (1000, 1000), of_a), numbers(rng, (1000, 1000), of_b)
    monkeypatch.setattr(threads, "num_threads", lambda: 2)
    given = {"math_mode": mode}
    want = lowprec.matmul(a, b, **given)
    prepared = lowprec.prepare(b, math_mode=mode)
    for number, rows in enumerate(pieces(rng, every=every)):
        workers = 1 + number % 2
        monkeypatch.setattr(threads, "num_threads", lambda workers=workers: workers)
        found = lowprec.matmul(a[rows], prepared, **given)
        assert_same(found, want[rows], "prepared", rows, workers)
        layout = LAYOUTS[number % len(LAYOUTS)]
        assert_same(layout(a[rows], b, **given), want[rows], layout.__name__, rows, workers)


@needs_kernels
@pytest.mark.parametrize(
    "kind", [x for x in KINDS if x[1] not in FORMATS and x[2] != "fp8_blocks"], ids=kind_id
)
def test_columns_alone_and_in_batches(kind, rng):
    of_a, of_b, mode = kind
    a, b = numbers(rng, (200, 700), of_a), numbers(rng, (700, 400), of_b)
    want = lowprec.matmul(a, b, math_mode=mode)
    for rows, width in itertools.product((1, 2, 5, 200), (1, 2, 4, 15, 17, 33, 100, 257)):
        first = int(rng.integers(0, 400 - width))
        columns = slice(first, first + width)
        found = lowprec.matmul(a[:rows], b[:, columns], math_mode=mode)
        assert_same(found, want[:rows, columns], rows, columns)
    assert_same(lowprec.matmul(a, b[:, 7], math_mode=mode), want[:, 7], "a vector")
    assert_same(lowprec.matmul(a[7], b, math_mode=mode), want[7], "a vector")


@needs_kernels
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["float32", "complex64"])
def test_elements_that_are_not_finite_change_no_other_row(mode, name, rng):
    """They may need another computation, which the rest of the product must not take part in."""
    a, b = numbers(rng, (300, 500), name), numbers(rng, (500, 200), name)
    # the last is infinite in bfloat16
    a[280, 3], a[281, 4], a[282, 5] = np.inf, np.nan, 3.4028235e38
    b[7, 190] = -np.inf
    want = lowprec.matmul(a, b, math_mode=mode)
    assert np.isfinite(want[:280, :190]).all()
    for rows in (
        slice(0, 1),
        slice(100, 103),
        slice(0, 280),
        slice(279, 283),
        slice(281, 282),
        slice(0, 300),
    ):
        assert_same(lowprec.matmul(a[rows], b, math_mode=mode), want[rows], rows)
        assert_same(
            lowprec.matmul(a[rows], b[:, :190], math_mode=mode),
            want[rows, :190],
            rows,
            "without the column",
        )
        assert_same(
            lowprec.matmul(a[rows], lowprec.prepare(b, math_mode=mode), math_mode=mode),
            want[rows],
            rows,
        )


#: Units and, without a name, NumPy.
units_and_numpy = pytest.mark.parametrize(
    "unit",
    [
        "",
        *(
            pytest.param(x, marks=cpu_units.needs(x))
            for x in cpu_units.UNITS
            if not x.startswith("int8")
        ),
    ],
)


@units_and_numpy
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["float32", "complex64"])
@pytest.mark.sampled(3)
def test_sums_beyond_float32_keep_their_bits_next_to_nan_and_inf(unit, mode, name, rng):
    """Rows whose sums exceed float32 on the way, when they are unscaled, or not at all, since their terms cancel."""
    for m, n, k in ((12, 40, 96), (20, 70, 400)):
        a = rng.choice(np.float32([-1e38, 1e38, 2e38, 1.0]), (m, k)).astype(
            TYPES.get(name, np.float32)
        )
        a[::4] = np.tile(np.repeat(np.float32([-1e38, 1e38]), (4, 8)), k)[:k]
        b = rng.choice(np.float32([-1.0, 1.0, 1.0, 0.01]), (k, n)).astype(a.dtype)
        b[:, ::2] = 1
        others = np.arange(m) != 5
        given = {"math_mode": mode}
        of_c = {**given, "c": numbers(rng, (m, n), name), "beta": -1.0}
        prepared = lowprec.prepare(b, **given)
        with machines.only(unit):
            for multiply, y, how in [*((layout, b, given) for layout in LAYOUTS),
                                     (lowprec.matmul, prepared, given), (lowprec.matmul, b, of_c)]:  # fmt: skip
                want = multiply(a, y, **how)
                # Scaled operands are below 2^16, and so are sums until they are unscaled.
                assert "fp16x" not in mode or "unscaled" in mode or want[0, 0].real == np.inf
                for value in (np.nan, np.inf):
                    x = a.copy()
                    x[5, 3 * (value == np.inf) :] = value
                    assert_same(
                        multiply(x, y, **how)[others],
                        want[others],
                        m,
                        value,
                        multiply.__name__,
                        y is b,
                    )


@needs_kernels
@pytest.mark.parametrize("mode", ["fp32", "bf16", "bf16x6", "fp16x3"])
@pytest.mark.parametrize("out_dtype", ["float32", "bfloat16"])
def test_epilogues(mode, out_dtype, rng):
    a, b, c = (numbers(rng, shape, "float32") for shape in ((150, 333), (333, 120), (150, 120)))
    given = {"math_mode": mode, "out_dtype": out_dtype, "alpha": 0.7, "beta": -1.3, "bias": c[0]}
    want = lowprec.matmul(a, b, c=c, activation="gelu", **given)
    for rows in (slice(0, 1), slice(7, 9), slice(0, 33), slice(140, 150)):
        assert_same(
            lowprec.matmul(a[rows], b, c=c[rows], activation="gelu", **given), want[rows], rows
        )


# -- every k --------------------------------------------------------------------------------------

#: Types and modes of each kind of unit.
OF_UNITS = {
    "fp32": [("float32", "fp32"), ("float32", "tf32"), ("float32", "fp16x3"), ("float16", "fp32")],
    "bf16": [("bfloat16", "fp32"), ("float32", "bf16"), ("float32", "bf16x3")],
    "int8": [("int8", "fp32")],
}


@cpu_units.units()
def test_every_k(unit, rng, monkeypatch):
    """One row, few rows and many, in each layout and on one or two threads; sums of small integers are exact."""
    kinds = OF_UNITS[unit[:4]]
    monkeypatch.setattr(products, "_ALONE", 0)
    with machines.only(unit):
        for k in range(1, 1201):
            name, mode = kinds[k % len(kinds)]
            a, b = numbers(rng, (35, k), name), numbers(rng, (k, 33), name)
            want = lowprec.matmul(a, b, math_mode=mode)
            few = 1 + k % 5
            layout = LAYOUTS[k // len(kinds) % len(LAYOUTS)]
            monkeypatch.setattr(threads, "num_threads", lambda k=k: 1 + k % 2)
            for rows in (slice(2, 3), slice(35 - few, 35), slice(0, 35)):
                assert_same(
                    layout(a[rows], b, math_mode=mode), want[rows], k, rows, mode, layout.__name__
                )
            if k % 16 == 0 or k < 40:
                assert lowprec.plan(a, b, math_mode=mode).kernel_row.requires == unit
                prepared = lowprec.prepare(b, math_mode=mode)
                assert_same(lowprec.matmul(a, prepared, math_mode=mode), want, k, "prepared")
                i, j = (rng.integers(-9, 10, shape).astype(a.dtype) for shape in ((35, k), (k, 33)))
                exact = i.astype(np.float64) @ j.astype(np.float64)
                found = lowprec.matmul(
                    i, j, math_mode=mode, out_dtype=None if name == "int8" else "float32"
                )
                np.testing.assert_array_equal(found, exact)


# -- instruction sets -----------------------------------------------------------------------------

#: The modes whose products run on FP32 units on every processor without AMX.
SAME = [mode for mode in MODES if mode.startswith(("fp32", "tf32", "fp16"))]
_FP32 = [x for x in cpu_units.UNITS if x.startswith("fp32")]


@pytest.mark.skipif(sum(map(cpu_units.has, _FP32)) < 2, reason=cpu_units.NO_AVX512)
@pytest.mark.parametrize("mode", SAME)
def test_units_have_the_same_bits(mode, rng):
    for m, n, k in ((1, 300, 900), (3, 65, 385), (130, 70, 1300), (70, 1, 77), (33, 40, 4099)):
        for name in ("float32", "complex64"):
            a, b = numbers(rng, (m, k), name), numbers(rng, (k, n), name)
            found = []
            for x in _FP32:
                with machines.only(x):
                    found.append(lowprec.matmul(a, b, math_mode=mode))
            assert_same(*found, (m, n, k), name)


# -- the order on FP32 units ----------------------------------------------------------------------

#: Modes of FP32 units, without those that quantise or that NumPy computes.
ORDERED = [mode for mode in MODES if not row(MathMode(mode)).quantizes]

fp32_units = cpu_units.units(*_FP32)


def added(total, x, y):
    """Return ``total + x * y``, rounded once to float32, by float64 arithmetic that is rounded to odd."""
    product, total = x.astype(np.float64) * y, total.astype(np.float64)
    found = product + total
    other = found - product
    lost = (product - (found - other)) + (total - other)
    bits = found.view(np.int64)
    inexact = (lost != 0) & (bits & 1 == 0)
    return (
        np.where(inexact, bits + np.where((lost > 0) == (found > 0), 1, -1), bits)
        .view(np.float64)
        .astype(np.float32)
    )


def sums(a, b, mode):
    """Return the product by the order of FP32 units: fused multiply-adds over chunks of k, the smallest parts first."""
    scheme, k = row(MathMode(mode)), a.shape[1]
    fmt = scheme.operand_format if mode in oracles.ROUNDING_MODES or scheme.parts > 1 else None
    is_scaled = fmt is not None and "fp16" in mode
    made = (
        numpy_products.split(x, np.dtype("f4"), scheme, fmt, scheme.parts + scheme.sums_parts, axis)
        for x, axis in ((a, -1 if is_scaled else None), (b, -2 if is_scaled else None))
    )
    (x, e), (y, f) = made
    total, length = None, chunk_length(k, 384)
    for first in range(0, k, length):
        for part in make_schedule(scheme, (fmt is not None,) * 2, k):
            found = np.zeros((len(a), b.shape[1]), np.float32)
            for i in range(first, min(first + length, k)):
                found = added(found, x[part.a_part][:, i, None], y[part.b_part][i])
            found = found * np.float32(part.factor)
            total = found if total is None else total + found
    return np.ldexp(total, -(e + f)) if is_scaled else total


@fp32_units
@pytest.mark.parametrize("mode", ORDERED)
def test_the_order_on_fp32_units(unit, mode, rng):
    with machines.only(unit):
        for k in (1, 2, 7, 64, 383, 384, 385, 1000, 1537):
            a, b = (rng.standard_normal(shape, dtype=np.float32) for shape in ((3, k), (k, 5)))
            want = sums(a, b, mode)
            np.testing.assert_array_equal(lowprec.matmul(a, b, math_mode=mode), want, f"k = {k}")
            a, want = (np.concatenate([x] * 40) for x in (a, want))
            np.testing.assert_array_equal(
                lowprec.matmul(a, b, math_mode=mode), want, f"k = {k}, more rows"
            )


#: Two numbers of a column of zeros, and of the two columns of a that multiply them: few rows round to float16 without
#: scaling only where that gives the same bits.
UNUSUAL = {
    "29 binades below the largest": ((1, 1.37 * 2.0**-29), (0, 1.37)),
    "large": ((2.0**115, 0), (1.37, 1.37)),
    "small": ((0, 1.37 * 2.0**-120), (2.0**100, 1.37 * 2.0**73)),
    "subnormal": ((0, 1.37 * 2.0**-140), (1.37, 1.37)),
    "NaN that looks like infinity": ((0, np.uint32(0x7F800001).view(np.float32)), (1.37, 1.37)),
}


@fp32_units
@pytest.mark.parametrize("kind", UNUSUAL)
def test_few_rows_in_fp16_are_scaled_where_many_are(unit, kind):
    a, b = np.ones((200, 10), np.float32), np.zeros((10, 64), np.float32)
    b[:2, 5], a[:, :2] = UNUSUAL[kind]
    with machines.only(unit):
        want = lowprec.matmul(a, b, math_mode="fp16")
        for m in (1, 2, 3, 4, 8):
            np.testing.assert_array_equal(
                lowprec.matmul(a[:m], b, math_mode="fp16"), want[:m], f"{m} rows"
            )


@cpu_units.units()
def test_a_caller_that_flushes_subnormal_numbers(torch, unit):
    if unit.startswith("int8"):
        return
    a, c = np.zeros((40, 40), np.float32), np.full((40, 40), 1e-40, np.float32)
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor does not flush subnormal numbers")
    try:
        with machines.only(unit):
            found = [
                lowprec.matmul(a, a, c=c, beta=1.0, math_mode=mode) for mode in ("bf16", "bf16x3")
            ]
    finally:
        torch.set_flush_denormal(False)
    for result in found:
        np.testing.assert_array_equal(result.view(np.int32), c.view(np.int32))
