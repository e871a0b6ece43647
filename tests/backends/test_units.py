"""Each unit of this processor alone: the numbers that it multiplies, and what it makes of them.

Sums of k = 1 and of small integers are exact, so that results show the rounding of operands and results, and which
products of parts were formed, bit by bit.
"""

import itertools

import ml_dtypes
import numpy as np
import pytest

import lowprec
from lowprec.backends.cpu import cpuinfo, numpy_products, products, threads
from lowprec.backends.cpu.kernel_rows import kernels_of
from lowprec.modes import TABLE, MathMode, row
from lowprec.planning import ACTIVATIONS
from support import cpu_units, machines, oracles

BFLOAT16 = np.dtype(ml_dtypes.bfloat16)
U = 2.0**-24  # unit roundoff of the sums

float_units = cpu_units.units(*(x for x in cpu_units.UNITS if not x.startswith("int8")))
int8_units = cpu_units.units(*(x for x in cpu_units.UNITS if x.startswith("int8")))
SPLIT = [str(r.mode) for r in TABLE if r.parts > 1 and not r.sums_parts]


@pytest.fixture(autouse=True)
def _in_threads(monkeypatch):
    """Small products are shared by threads, too."""
    monkeypatch.setattr(products, "_ALONE", 0)


def with_modes(*modes, numpy=()):
    """Run a test on each unit in these modes for float32 operands, as far as the unit multiplies their format."""
    cases = [pytest.param("", mode, id=f"NumPy-{mode}") for mode in numpy]
    cases += [
        pytest.param(unit, mode, marks=cpu_units.needs(unit), id=f"{unit}-{mode}")
        for unit, mode in itertools.product(cpu_units.UNITS, modes)
        if multiplies(unit, row(MathMode(mode)).operand_format.name)
    ]
    return pytest.mark.parametrize(("unit", "mode"), cases)


def multiplies(unit, fmt):
    return any(
        x.requires == unit and fmt in (x.formats or ()) for x in kernels_of(cpuinfo.machine())
    )


def assert_runs(unit, a, b, mode):
    assert (lowprec.plan(a, b, math_mode=mode).kernel_row.requires or "") == unit


def patterns(dtype, rng):
    """Return finite numbers of every exponent between 2^-24 and 2^24, ties of each rounding among them."""
    if dtype == np.float32:
        exponents = np.repeat(np.arange(127 - 24, 127 + 14, dtype=np.uint32), 40)
        fraction = rng.integers(0, 1 << 23, exponents.size, dtype=np.uint32)
        ties = np.where(np.arange(fraction.size) % 2, 0x1000, 0x8000).astype(np.uint32)
        fraction = np.where(
            np.arange(fraction.size) % 4 < 2, fraction & ~(ties * 2 - 1) | ties, fraction
        )
        sign = rng.integers(0, 2, exponents.size, dtype=np.uint32) << 31
        return (sign | exponents << 23 | fraction).view(np.float32)
    bits = np.arange(1 << 16, dtype=np.uint16).view(dtype)
    with np.errstate(invalid="ignore"):
        wide = np.abs(bits.astype(np.float64))
    return bits[(wide >= 2.0**-24) & (wide < 2.0**15)]


@float_units
@pytest.mark.parametrize(
    ("dtype", "mode"),
    [
        *(("float32", mode) for mode in ("fp32", "tf32", "bf16", "fp16")),
        ("float16", "fp32"),
        ("bfloat16", "fp32"),
    ],
)
def test_products_of_two_numbers_are_exact(unit, dtype, mode, rng):
    """With at most 22 bits; those of whole float32 numbers are rounded once. In one row, and in many."""
    if not multiplies(
        unit, row(MathMode(mode)).operand_format.name if dtype == "float32" else dtype
    ):
        assert unit.startswith("bf16")
        return
    x = patterns(np.dtype(getattr(ml_dtypes, dtype, dtype)), rng)
    a, b = rng.permutation(x)[:1000, None], rng.permutation(x)[None, :1000]
    with machines.only(unit):
        assert_runs(unit, a, b, mode)
        found = lowprec.matmul(a, b, math_mode=mode, out_dtype="float32")
        few = lowprec.matmul(a[:3], b, math_mode=mode, out_dtype="float32")
    rounded = [oracles.widen(oracles.round_to(z, mode, axis)) for z, axis in ((a, -1), (b, -2))]
    want = (rounded[0] * rounded[1]).astype(np.float32)
    np.testing.assert_array_equal(found, want)
    np.testing.assert_array_equal(few, want[:3])


@with_modes("bf16", numpy=["bf16"])
@pytest.mark.parametrize("out_dtype", [BFLOAT16, np.dtype(np.float16)], ids=str)
def test_results_are_rounded_once(unit, mode, out_dtype, rng):
    """Products of bfloat16 numbers are exact in float32, so the result is their nearest even neighbour."""
    x = patterns(np.dtype(np.float32), rng)
    a, b = rng.permutation(x)[:800, None], rng.permutation(x)[None, :800]
    with machines.only(unit):
        found = lowprec.matmul(a, b, math_mode=mode, out_dtype=out_dtype)
    with np.errstate(over="ignore"):
        want = (oracles.round_to(a, mode) * oracles.round_to(b, mode)).astype(out_dtype)
    np.testing.assert_array_equal(found.view(np.uint16), want.view(np.uint16))
    assert np.isinf(want.astype(np.float32)).any() == (out_dtype == np.float16)


@with_modes(*SPLIT, numpy=SPLIT)
@pytest.mark.parametrize("side", ["a", "b"])
def test_parts_add_up_to_the_number(unit, mode, side, rng):
    """Times one, with the smallest added first: bit for bit for three parts, and for numbers of so many bits."""
    # Where the last part falls below 2^-126 units may take it for zero; rows and columns of one number are scaled.
    x = oracles.every_exponent(rng, 16)
    x = x[(np.abs(x) < 2.0**128 - 2.0**119) & (np.abs(x) >= 2.0**-98)]
    if "unscaled" in mode:
        x = x[(np.abs(x) < 2.0**15) & (np.abs(x) >= 2.0**-3)]
    bits = {"bf16x3": 16, "bf16x6": 24, "bf16x9": 24}.get(mode, 22)
    x = (x.view(np.uint32) & np.uint32(2**32 - (1 << (24 - bits)))).view(np.float32)
    one = np.ones((1, 1), np.float32)
    a, b = (x[:, None], one) if side == "a" else (one, x[None, :])
    with machines.only(unit):
        assert_runs(unit, a, b, mode)
        np.testing.assert_array_equal(lowprec.matmul(a, b, math_mode=mode).ravel(), x)


@with_modes(*SPLIT, numpy=SPLIT)
def test_the_pairs_of_the_mode_are_formed_and_no_others(unit, mode, rng):
    """Of numbers whose parts have few bits the sum of the products that the mode forms is one float32."""
    found = row(MathMode(mode))
    step = 2.0 ** -(found.operand_format.precision - 1)
    x, y = (
        1 + rng.integers(0, 2, 40) * step / 16 + rng.integers(0, 2, 40) * step**2 / 16 for _ in "ab"
    )
    a, b = x.astype(np.float32)[:, None], y.astype(np.float32)[None, :]
    parts = [
        numpy_products.split(z, z.dtype, found, found.operand_format, found.parts)[0]
        for z in (a, b)
    ]
    terms = [(i, j, found.factor((i, j))) for i, j in found.pairs]
    want = sum(
        f * parts[0][i].astype(np.float64) @ parts[1][j].astype(np.float64) for i, j, f in terms
    )
    with machines.only(unit):
        assert_runs(unit, a, b, mode)
        np.testing.assert_array_equal(
            lowprec.matmul(a, b, math_mode=mode), np.asarray(want, np.float32)
        )


@with_modes("bf16x6", "tf32x3", "fp16x3")
def test_small_products_do_not_cost_accuracy(unit, mode, rng):
    """Less error than one FP32 sum over the same k, although there are several products for each of its own."""
    a, b = (rng.standard_normal(s, dtype=np.float32) for s in ((96, 4096), (4096, 96)))
    exact = a.astype(np.float64) @ b.astype(np.float64)
    single = np.zeros((96, 96), np.float32)
    for i in range(4096):
        single += a[:, i, None] * b[i]
    with machines.only(unit):
        found = lowprec.matmul(a, b, math_mode=mode)
    assert np.linalg.norm(found - exact) < 0.7 * np.linalg.norm(single - exact)


@pytest.mark.parametrize("x", [-8.0, -3.0, -0.25, 0.5, 6.0])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_gelu_of_numpy_is_rounded_once(x, dtype):
    """In float64 each of the 10 operations, and the exponential, is off by 2^-52 at most, times its argument of 51."""
    want = x / (
        1 + np.exp(np.longdouble(-2) * np.sqrt(2 / np.longdouble(np.pi)) * (x + 0.044715 * x**3))
    )
    with np.errstate(over="ignore"):
        found, of_infinity = (
            ACTIVATIONS["gelu"].host(np.array([x, -np.inf], dtype), np).astype(dtype)
        )
    assert of_infinity == 0
    error = abs(found - want)
    assert error <= (np.finfo(dtype).eps / 2 + 64 * 2.0**-52) * abs(want)


@float_units
def test_gelu_is_right_to_a_few_units(unit, rng):
    """The argument of the exponential, at most 88, is off by 7 roundings, and its value by 2 units in the last place.

    So e^-2y is off by 88 * 7 + 4 times u at most, and the sum and the division add 2. What is given up where y is below
    -44 is at most 10.1 e^-88.
    """
    x = np.concatenate([np.linspace(-14, 14, 4000), rng.standard_normal(96) * 1e-3]).astype(
        BFLOAT16
    )[None]
    one = np.ones((1, 1), BFLOAT16)
    special = np.array([[np.nan, np.inf, -np.inf, 0.0, -0.0, 1e-36, -1e30, 1e30]], BFLOAT16)
    with machines.only(unit):
        found = lowprec.matmul(one, x, activation="gelu", out_dtype="float32")
        of_special = lowprec.matmul(one, special, activation="gelu", out_dtype="float32")
    wide = x.astype(np.float64)
    want = wide / (1 + np.exp(-2 * np.sqrt(2 / np.pi) * (wide + 0.044715 * wide**3)))
    error = np.abs(found - want)
    assert (error <= 622 * U * np.abs(want) + 10.1 * np.exp(-88)).all()
    assert (error <= 8 * U * np.abs(want))[np.abs(wide) < 0.5].all()
    large = special.astype(np.float32)[0, -1]
    np.testing.assert_allclose(
        of_special, [[np.nan, np.inf, 0, 0, 0, 5e-37, 0, large]], atol=1e-40, rtol=0.01
    )


@with_modes("bf16", "bf16x6", "tf32")
@pytest.mark.parametrize("order", ["C", "F"])
def test_out_that_is_c_is_added_once_although_a_sum_is_computed_again(unit, mode, order, rng):
    a, b = (rng.standard_normal(s, dtype=np.float32) for s in ((40, 50), (50, 45)))
    a[3, 4] = np.float32(3.4028235e38)  # infinite in bfloat16
    b[4] = np.abs(b[4]) * 0.01
    out = np.ones((40, 45), np.float32, order=order)
    want = a.astype(np.float64) @ b + 2.0
    with machines.only(unit):
        lowprec.matmul(a, b, c=out, beta=2.0, out=out, math_mode=mode)
    rest = np.arange(40) != 3
    np.testing.assert_allclose(out[rest], want[rest], rtol=0.02, atol=0.3)
    if mode == "bf16x6":
        np.testing.assert_allclose(out[3], want[3], rtol=1e-5)


@int8_units
@pytest.mark.parametrize(
    "shape",
    [
        (1, 1, 1),
        (1, 70, 9000),
        (3, 17, 65),
        (4, 300, 70),
        (13, 32, 64),
        (33, 17, 65),
        (64, 64, 64),
        (50, 70, 9000),
    ],
)
@pytest.mark.parametrize("orders", list(itertools.product("CF", repeat=3)), ids="".join)
def test_int8_is_exact(unit, shape, orders, rng):
    m, n, k = shape
    a = np.asarray(rng.integers(-128, 128, (m, k), dtype=np.int8), order=orders[0])
    b = np.asarray(rng.integers(-128, 128, (k, n), dtype=np.int8), order=orders[1])
    a[0], b[:, 0] = -128, -128
    out = np.zeros((m, n), np.int32, order=orders[2])
    with machines.only(unit):
        assert_runs(unit, a, b, "fp32")
        lowprec.matmul(a, b, out=out)
    np.testing.assert_array_equal(out, a.astype(np.int64) @ b.astype(np.int64))


@cpu_units.units()
@pytest.mark.parametrize(
    "shape", [(700, 3000, 40), (40, 5000, 900), (1300, 70, 2600), (5, 9000, 300), (260, 270, 5000)]
)
def test_blocks_and_threads(unit, shape, rng, monkeypatch):
    """Several blocks of rows, of columns and of k; sums of small integers are exact."""
    m, n, k = shape
    dtype = {"int8": np.int8, "bf16": BFLOAT16}.get(unit[:4], np.float32)
    a, b = (rng.integers(-3, 4, s).astype(dtype) for s in ((m, k), (k, n)))
    bias = rng.integers(-3, 4, n).astype(np.int32 if dtype is np.int8 else np.float32)
    want = a.astype(np.float32) @ b.astype(np.float32) + bias
    for count in (1, 2, 7):
        monkeypatch.setattr(threads, "num_threads", lambda count=count: count)
        with machines.only(unit):
            found = lowprec.matmul(
                a, b, bias=bias, out_dtype=None if dtype is np.int8 else "float32"
            )
        np.testing.assert_array_equal(found, want)
