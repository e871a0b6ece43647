"""One order of summation: an element depends on its row of a, its column of b and k alone."""

import ml_dtypes
import numpy as np
import pytest

import lowprec
from lowprec.backends.cpu import numpy_products, products, threads
from lowprec.modes import TABLE, MathMode, row
from lowprec.planning.schedule import chunk_length, make_schedule
from support import cpu_units, machines, oracles

#: Modes of FP32 units, without those that quantise or that NumPy computes.
_OTHER = (MathMode.FP64, MathMode.FP64_EMULATED, MathMode.FP32_EMULATED)
MODES = [str(r.mode) for r in TABLE if r.mode not in _OTHER and not r.quantizes]

fp32_units = cpu_units.units(*(unit for unit in cpu_units.UNITS if unit.startswith("fp32")))


def alone(unit):
    """Return the context of a machine that has this unit and no other."""
    return machines.without(set(cpu_units.UNITS) - {unit})


def added(total, x, y):
    """Return ``total + x * y``, rounded once to float32, by float64 arithmetic that is rounded to odd."""
    product, total = x.astype(np.float64) * y, total.astype(np.float64)
    found = product + total
    other = found - product
    lost = (product - (found - other)) + (total - other)
    bits = found.view(np.int64)
    inexact = (lost != 0) & (bits & 1 == 0)
    return (
        np.where(inexact, bits + np.where((lost > 0) == (found > 0), 1, -1), bits).view(np.float64).astype(np.float32)
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
    total, length = None, chunk_length(k, 768)
    for first in range(0, k, length):
        for part in make_schedule(scheme, (fmt is not None,) * 2, k):
            found = np.zeros((len(a), b.shape[1]), np.float32)
            for i in range(first, min(first + length, k)):
                found = added(found, x[part.a_part][:, i, None], y[part.b_part][i])
            found = found * np.float32(part.factor)
            total = found if total is None else total + found
    return np.ldexp(total, -(e + f)) if is_scaled else total


@fp32_units
@pytest.mark.parametrize("mode", MODES)
def test_the_order_on_fp32_units(unit, mode, rng):
    with alone(unit):
        for k in (1, 2, 7, 64, 767, 768, 769, 1000, 1537):
            a, b = (rng.standard_normal(shape, dtype=np.float32) for shape in ((3, k), (k, 5)))
            want = sums(a, b, mode)
            np.testing.assert_array_equal(lowprec.matmul(a, b, math_mode=mode), want, f"k = {k}")
            a, want = (np.concatenate([x] * 40) for x in (a, want))
            np.testing.assert_array_equal(lowprec.matmul(a, b, math_mode=mode), want, f"k = {k}, more rows")


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
    with alone(unit):
        want = lowprec.matmul(a, b, math_mode="fp16")
        for m in (1, 2, 3, 4, 8):
            np.testing.assert_array_equal(lowprec.matmul(a[:m], b, math_mode="fp16"), want[:m], f"{m} rows")


#: By name: dtypes of a and b, a format of b, and modes.
KINDS = {
    "float32": (np.float32, np.float32, "", MODES),
    "complex64": (np.complex64, np.complex64, "", MODES),
    "bfloat16": (ml_dtypes.bfloat16, ml_dtypes.bfloat16, "", ["fp32"]),
    "float16": (np.float16, np.float16, "", ["fp32"]),
    "float8": (ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2, "", ["fp32"]),
    "int8": (np.int8, np.int8, "", ["fp32"]),
    "float32 and float16": (np.float32, np.float16, "", ["fp32", "tf32", "bf16x3"]),
    "mxfp8": (np.float32, np.float32, "mxfp8", ["fp32", "bf16", "tf32"]),
    "mxfp4": (ml_dtypes.bfloat16, np.float32, "mxfp4", ["fp32"]),
    "nvfp4": (np.float32, np.float32, "nvfp4", ["fp32", "bf16x3"]),
}


def numbers(rng, dtype, *shape):
    if dtype is np.int8:
        return rng.integers(-128, 128, shape).astype(np.int8)
    x = rng.standard_normal(shape, dtype=np.float32)
    return (x + 1j * rng.standard_normal(shape) if dtype is np.complex64 else x).astype(dtype)


@cpu_units.units()
@pytest.mark.parametrize("kind", KINDS)
def test_a_row_is_the_same_alone_and_in_any_batch(unit, kind, rng, monkeypatch):
    if (kind == "int8") != unit.startswith("int8"):
        return
    a_dtype, b_dtype, fmt, modes = KINDS[kind]
    rows, k, n = 60, 1700, 300
    a, b = numbers(rng, a_dtype, rows, k), numbers(rng, b_dtype, k, n)
    stored = lowprec.quantize(b, fmt, axis=0) if fmt else b
    monkeypatch.setattr(products, "_ALONE", 0)
    with alone(unit):
        for mode in modes:
            if lowprec.plan(a, stored, math_mode=mode).kernel == "numpy":  # not for units of bfloat16
                continue
            monkeypatch.setattr(threads, "num_threads", lambda: 1)
            want = lowprec.matmul(a, stored, math_mode=mode)

            def check(found, want, *words, mode=mode):
                np.testing.assert_array_equal(found, want, f"{mode}, {words}")

            for count in (1, 2):
                monkeypatch.setattr(threads, "num_threads", lambda count=count: count)
                for first, m in ((0, 1), (7, 1), (59, 1), (3, 2), (5, 3), (1, 4), (2, 5), (8, 8), (4, 13), (9, 33)):
                    check(
                        lowprec.matmul(a[first : first + m], stored, math_mode=mode), want[first : first + m], first, m
                    )
                check(lowprec.matmul(a[7], stored, math_mode=mode), want[7], "a vector")
                check(lowprec.matmul(np.asfortranarray(a), stored, math_mode=mode), want, "columns of a")
                turned = a.reshape(20, 3, k).swapaxes(0, 1)  # sequence first
                found = lowprec.matmul(turned, stored, math_mode=mode)
                check(found, want.reshape(20, 3, n).swapaxes(0, 1), "a batch by offsets of rows")
                out = np.empty_like(want, order="F")
                check(lowprec.matmul(a, stored, math_mode=mode, out=out), want, "columns of the result")
                check(lowprec.matmul(a, lowprec.prepare(stored, math_mode=mode), math_mode=mode), want, "prepared")
                if not fmt:
                    check(lowprec.matmul(a, np.asfortranarray(b), math_mode=mode), want, "columns of b")
                    check(lowprec.matmul(a[:4], np.asfortranarray(b), math_mode=mode), want[:4], "columns of b")
                    check(lowprec.matmul(a[:4], b[:, 5:21], math_mode=mode), want[:4, 5:21], "some columns")
                    check(lowprec.matmul(a, b[:, 3], math_mode=mode), want[:, 3], "one column")
                    pair = lowprec.matmul(a, np.stack([b, b]), math_mode=mode)
                    check(pair[1], want, "a batch")


@cpu_units.units()
def test_a_caller_that_flushes_subnormal_numbers(unit):
    torch = pytest.importorskip("torch")
    if unit.startswith("int8"):
        return
    a, c = np.zeros((40, 40), np.float32), np.full((40, 40), 1e-40, np.float32)
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor does not flush subnormal numbers")
    try:
        with alone(unit):
            found = [lowprec.matmul(a, a, c=c, beta=1.0, math_mode=mode) for mode in ("bf16", "bf16x3")]
    finally:
        torch.set_flush_denormal(False)
    for result in found:
        np.testing.assert_array_equal(result.view(np.int32), c.view(np.int32))
