"""Rounding of operands to narrow formats: the compiled library, NumPy, PyTorch and JAX give the same bits.

The reference is `narrow_twin`, exact and one number at a time; on many numbers, ml_dtypes.
"""

import ctypes
import itertools
import math

import ml_dtypes
import numpy as np
import pytest

from lowprec.arrays import block_codes, random_words
from lowprec.arrays.numpy_library import host_view
from lowprec.backends.cpu import library, quantizing, threads
from lowprec.core.quantize import quantize
from lowprec.planning.layout import MatrixStack
from lowprec.recipes import Rule, parse_recipe
from lowprec.util.strides import packed_strides

BLOCKS = [
    Rule(e, "block", b, s)
    for e, s, b in [
        *itertools.product(("e4m3", "e5m2", "e2m1"), ("floor", "rceil", "even"), ((1, 32), (16, 16))),
        ("e2m1", "e4m3", (1, 16)), ("e2m1", "e4m3", (16, 16)),
        ("e4m3", "float32", (1, 128)), ("e4m3", "float32", (128, 128)),
    ]
]  # fmt: skip
WHOLE = [
    Rule("e4m3", "tensor"),
    Rule("e5m2", "tensor"),
    *(Rule(e, "vector") for e in ("e4m3", "e5m2", "int8")),
]
MEASURES = [
    {},
    {"rounding": "stochastic", "seed": 2**63 + 12345, "stream": 2**64 - 7},
    {"hadamard": 16, "seed": 99},
    {"rounding": "stochastic", "seed": 5, "hadamard": 16},
]
POWERS = [x._replace(power_scales=True) for x in (BLOCKS[-2], BLOCKS[-1], *WHOLE[:4])]
RULES = [rule._replace(**measures) for rule in (*BLOCKS, *WHOLE, *POWERS) for measures in MEASURES]

needs_kernels = pytest.mark.skipif(library.library() is None, reason="the kernels are not compiled")


def name_of(value):
    return "-".join(map(str, value)) if isinstance(value, Rule) else None


def reference(x, inner, rule):
    with np.errstate(all="ignore"):
        values, scales, scale = block_codes.rounded(x, inner, rule, np)
    return values, scales, float(scale)


def same(found, want):
    """Assert the same values and scales, bit for bit; NaN has no sign."""
    for x, y in zip(found, want, strict=True):
        if x is None or y is None:
            assert x is y
            continue
        x, y = np.asarray(x).astype(np.float32), np.asarray(y).astype(np.float32)
        np.testing.assert_array_equal(x, y)
        np.testing.assert_array_equal(np.signbit(x)[~np.isnan(x)], np.signbit(y)[~np.isnan(y)])


def compiled(x, inner, rule):
    """Return the numbers, in the order of the source's rows or columns, and scales of the compiled library, if any."""
    if not library.units() or not x.size:
        return reference(x, inner, rule)
    view, batch = host_view(x), x.shape[:-2]
    strides = packed_strides(view.shape, view.strides)
    source, to = (
        MatrixStack.of(view.dtype, *x.shape[-2:], *steps[-2:], batch, steps[:-2])
        for steps in (view.strides, strides)
    )
    described, offsets = quantizing.describe(source, to, -1 - inner, rule)
    memory = np.zeros(x.size, np.int8 if rule.elements == "int8" else ml_dtypes.bfloat16)
    values = np.lib.stride_tricks.as_strided(
        memory, x.shape, [step * memory.itemsize for step in strides]
    )
    scales, scale = None, ctypes.c_float()
    high, wide = rule.block
    if rule.scaling == "vector":
        scales = np.empty((*batch, described.vectors), np.float32)
    elif rule.block_scale == "float32":
        scales = np.empty(
            (*batch, -(-described.k // wide), -(-described.vectors // high)), np.float32
        )
    status = library.functions().quantize(
        ctypes.addressof(described), view.address, memory.ctypes.data, None if scales is None else scales.ctypes.data,
        ctypes.addressof(scale), threads.num_threads(),
    )  # fmt: skip
    assert status == library.OK
    assert len(offsets) == 2
    return values, scales, scale.value


def numbers(kind, shape, rng):
    if kind == "normal":
        return rng.standard_normal(shape).astype(np.float32)
    if kind == "bits":  # NaN and infinities among them
        return rng.integers(0, 1 << 32, shape, dtype=np.uint32).view(np.float32)
    x = np.ldexp(rng.standard_normal(shape), rng.integers(-140, 100, (*shape[:-1], 1))).astype(
        np.float32
    )
    return np.where(rng.random(shape) < 0.1, rng.choice(np.float32([0.0, -0.0]), shape), x)


# -- the compiled library --------------------------------------------------------------------------


@needs_kernels
@pytest.mark.parametrize("rule", RULES, ids=name_of)
def test_kernels_and_numpy_agree(rule, rng):
    """Any strides: the vectorised axis is that of k, that of the vectors, or none."""
    for shape in ((1, 1), (3, 5), (17, 33), (5, 1100), (1100, 5), (2, 3, 40, 70), (2, 130, 161)):
        for kind in ("normal", "bits", "scaled"):
            x = numbers(kind, shape, rng)
            gaps = np.zeros((*shape[:-1], 2 * shape[-1]), np.float32)
            gaps[..., ::-2] = x
            turned = np.ascontiguousarray(x.swapaxes(-1, -2)).swapaxes(-1, -2)
            for inner in (-1, -2):
                want = reference(x, inner, rule)
                for layout in (x, turned, gaps[..., ::-2]):
                    same(compiled(layout, inner, rule), want)
    values = compiled(turned, -1, rule)[0]
    assert values.strides[-2] == values.itemsize  # as in the source


@needs_kernels
@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("rule", [BLOCKS[0], BLOCKS[-4], *WHOLE], ids=name_of)
def test_16_bits(rule, dtype, rng):
    x = rng.standard_normal((70, 90)).astype(dtype)
    x[5, 6], x[60, 1] = np.nan, -np.inf
    for layout, inner in itertools.product((x, x.T), (-1, -2)):
        same(compiled(layout, inner, rule), reference(layout.astype(np.float32), inner, rule))


@needs_kernels
@pytest.mark.parametrize("rule", RULES[:: len(MEASURES) - 1], ids=name_of)
def test_threads_and_batches(rule, rng, monkeypatch):
    """The counter of random numbers is the vector's position in the batch."""
    x = rng.standard_normal((3, 200, 400)).astype(np.float32)
    found = []
    for count in (1, 2, 3):
        monkeypatch.setattr(threads, "num_threads", lambda count=count: count)
        found.append(compiled(x, -1, rule))
    same(found[1], found[0])
    same(found[2], found[0])
    if rule.block[0] == 1 and rule.scaling != "tensor" and rule.block_scale != "e4m3":
        flat = compiled(x.reshape(600, 400), -1, rule)
        same((flat[0].reshape(x.shape),), found[0][:1])


@pytest.mark.parametrize("rule", [*BLOCKS, *WHOLE], ids=name_of)
def test_arrays_without_elements(rule):
    for shape in ((0, 5), (5, 0), (2, 0, 3)):
        for inner in (-1, -2):
            values, scales, scale = compiled(np.zeros(shape, np.float32), inner, rule)
            assert values.shape == shape
            assert scale == 1
            if rule.scaling == "vector":
                assert scales.shape == np.zeros(shape).sum(inner).shape


# -- references ------------------------------------------------------------------------------------


@pytest.mark.parametrize(("rule", "name"), [
    (Rule("e4m3", "block", (1, 32), "floor"), "mxfp8"),
    (Rule("e4m3", "block", (1, 32), "rceil"), "mxfp8"),
    (Rule("e2m1", "block", (1, 32), "floor"), "mxfp4"),
    (Rule("e2m1", "block", (1, 32), "rceil"), "mxfp4"),
    (Rule("e4m3", "block", (1, 32), "even"), "mxfp8"),
    (Rule("e2m1", "block", (1, 32), "even"), "mxfp4"),
    (Rule("e2m1", "block", (1, 16), "e4m3"), "nvfp4"),
    (Rule("e4m3", "tensor"), "fp8"),
], ids=name_of)  # fmt: skip
def test_the_numbers_of_quantize(rule, name, rng):
    """Of `quantize`, whose codes `test_quantized.py` compares with the scalar twin."""
    for kind in ("normal", "bits", "scaled"):
        x = numbers(kind, (33, 200), rng)
        values, _, scale = compiled(x, -1, rule)
        want = quantize(x, name, scale_rule=rule.block_scale if name[:2] == "mx" else "floor")
        assert want.scale == scale
        with np.errstate(all="ignore"):
            exact = want._values(1.0).astype(ml_dtypes.bfloat16)[..., :200]
        same((values,), (exact,))


@pytest.mark.parametrize("elements", ["e4m3", "e5m2"])
def test_millions_of_numbers_against_ml_dtypes(elements, rng):
    """With a scale of 1 a number is rounded as by ml_dtypes, where it is within the format."""
    dtype, largest = (
        (ml_dtypes.float8_e4m3fn, 448.0) if elements == "e4m3" else (ml_dtypes.float8_e5m2, 57344.0)
    )
    x = rng.integers(0, 1 << 32, (1000, 2048), dtype=np.uint32).view(np.float32)
    x = np.where(np.abs(x) <= largest, x, rng.standard_normal(x.shape).astype(np.float32))
    x[:, 0] = largest
    for rule in (Rule(elements, "tensor"), Rule(elements, "vector")):
        found, scales, scale = compiled(x, -1, rule)
        assert scale == 1
        assert scales is None or (scales == 1).all()
        same((found,), (x.astype(dtype),))


def test_int8_rounds_to_even_and_is_symmetric(rng):
    x = np.concatenate((np.arange(-127, 127.5, 0.5), np.nextafter(np.arange(0.5, 127), 0))).astype(
        np.float32
    )[None]
    found, scales, _ = compiled(x, -1, Rule("int8", "vector"))
    assert scales[0] == 1
    np.testing.assert_array_equal(found, np.rint(x))
    x = rng.standard_normal((500, 2000)).astype(np.float32)
    found, scales, _ = compiled(x, -1, Rule("int8", "vector"))
    np.testing.assert_array_equal(scales, np.abs(x).max(1) / np.float32(127))
    np.testing.assert_array_equal(found, np.rint(x / scales[:, None]))
    x[7, 3], x[8, 3] = np.nan, np.inf
    found, scales, _ = compiled(x, -1, Rule("int8", "vector"))
    assert np.isnan(scales[7:9]).all()
    assert not found[7:9].any()
    assert np.isfinite(np.delete(scales, [7, 8])).all()


# -- random numbers --------------------------------------------------------------------------------


def words(counter, seed):
    signed = [np.full(1, word, np.uint32).view(np.int32) for word in (counter,) * 4]
    return [int(x[0]) & 0xFFFFFFFF for x in random_words.philox(tuple(signed), seed)]


def test_philox_has_the_published_values():
    """The known answers of the authors' library, Random123, for philox4x32 with 10 rounds."""
    assert words(0, 0) == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    assert words(0xFFFFFFFF, 2**64 - 1) == [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]


@pytest.mark.parametrize(
    "rule", [r for r in RULES if r.rounding == "stochastic" and not r.hadamard], ids=name_of
)
def test_stochastic_rounding_is_unbiased(rule):
    """The mean of many roundings is the number: for numbers between the same two neighbours.

    A result is one of two neighbours at a distance of `step`, with a variance of at most step^2 / 4. The mean of n
    independent results differs from x by more than t step / (2 sqrt(n)) with a probability below 2 exp(-t^2 / 2)
    (Hoeffding). Random words have 30 bits, which changes the mean by less than 2^-29 step. With t = 6 all 200 numbers
    agree with a probability of 1 - 6e-6.
    """
    n, t = 4096, 6.0
    x = np.random.default_rng(3).uniform(0.02, 1, 200).astype(np.float32)
    x[0] = 1.0
    many = np.broadcast_to(x, (n, 200))
    found, scales, scale = compiled(
        many, -1, rule._replace(block=(1, rule.block[1])) if rule.block[0] > 1 else rule
    )
    values = found.astype(np.float64) * scale
    if rule.scaling == "vector":
        values = values * scales[:, None].astype(np.float64)
    elif rule.block_scale == "float32":
        values = values * np.repeat(scales.T, 128, 1)[:, :200].astype(np.float64)
    low, high = values.min(0), values.max(0)
    clipped = high < x * (1 - 2.0**-22)  # beyond the largest number of its block
    assert (rule.block_scale in ("floor", "even", "e4m3")) or not clipped.any()
    assert ((low <= x * (1 + 1e-6)) | clipped).all()
    error = np.abs(values.mean(0) - x.astype(np.float64)) * ~clipped
    # A quotient is rounded to float32 before.
    assert (error <= t / (2 * math.sqrt(n)) * (high - low) + 2.0**-23 * x).all()
    assert ((high - low) > 0).sum() > 100


def test_streams_and_seeds_differ(rng):
    x = rng.standard_normal((64, 256)).astype(np.float32)
    base = Rule("e2m1", "block", (1, 32), "floor", "stochastic", 1, 1)
    found = [compiled(x, -1, r)[0] for r in (base, base._replace(seed=2), base._replace(stream=2),
                                            base._replace(seed=1 << 32), base._replace(stream=1 << 32))]  # fmt: skip
    for one, other in itertools.combinations(found, 2):
        assert 0.05 < (one != other).mean() < 0.95
    same((compiled(x, -1, base)[0],), found[:1])
    # Of an element and of its neighbours along both axes.
    up = np.abs(compiled(np.full((64, 256), 0.7, np.float32), -1, base)[0].astype(np.float32)) > 0.7
    for axis in (0, 1):
        agree = (up == np.roll(up, 1, axis)).mean()
        p = up.mean()
        assert agree == pytest.approx(p * p + (1 - p) ** 2, abs=0.03)


# -- the Hadamard transform ------------------------------------------------------------------------


@pytest.mark.parametrize("k", [16, 48, 40, 15, 100])
def test_hadamard_products_are_plain_ones(k, rng):
    """Sums of small integers, quarters and sixteenths are exact, and the transform is orthogonal."""
    a, b = (rng.integers(-4, 5, shape).astype(np.float32) for shape in ((20, k), (k, 30)))
    turned = [random_words.transformed(x[None], 77, np)[0] for x in (a, b.T)]
    np.testing.assert_array_equal(turned[0] @ turned[1].T, a @ b)
    assert k < 16 or (turned[0] != a).mean() > 0.3
    np.testing.assert_array_equal(turned[0][:, k // 16 * 16 :], a[:, k // 16 * 16 :])
    # The rounding that follows keeps these numbers, so that the product of the rounded operands is the plain one.
    rule = Rule("e4m3", "block", (1, 16), "floor", hadamard=16, seed=77)
    x = np.zeros((16, 32), np.float32)
    x[:, 3] = 4.0 * (1 + np.arange(16) % 2)
    x[:, 20] = 8.0
    y = np.eye(32, dtype=np.float32)[:, :20] * np.float32(4)
    left, right = (
        compiled(x, -1, rule)[0].astype(np.float32),
        compiled(y, -2, rule)[0].astype(np.float32),
    )
    np.testing.assert_array_equal(left @ right, x @ y)


def test_the_transform_flattens_outliers(rng):
    x = rng.standard_normal((64, 256)).astype(np.float32)
    x[:, ::16] *= 50
    rule = Rule("e2m1", "block", (1, 16), "floor")
    plain = compiled(x, -1, rule)[0].astype(np.float32)
    assert (plain == 0).mean() > 0.5
    assert (compiled(x, -1, rule._replace(hadamard=16))[0].astype(np.float32) == 0).mean() < 0.2


# -- other libraries -------------------------------------------------------------------------------


def in_torch(x, inner, rule):
    torch = pytest.importorskip("torch")
    for part in block_codes.rounded(torch.from_numpy(x.copy()), inner, rule, torch):
        yield None if part is None else part.to(torch.float32).numpy()


def in_jax(x, inner, rule):
    jax = pytest.importorskip("jax")
    rounded = jax.jit(lambda y: block_codes.rounded(y, inner, rule, jax.numpy))
    for part in rounded(jax.numpy.asarray(x)):
        yield None if part is None else np.asarray(part.astype(jax.numpy.float32))


@pytest.mark.parametrize("twin", [in_torch, in_jax])
@pytest.mark.parametrize("rule", RULES[:: 2 * len(MEASURES) + 1], ids=name_of)
def test_other_libraries_give_the_same_bits(rule, twin, rng):
    """PyTorch, and JAX in a compiled function; of float32 numbers that are not subnormal, which XLA flushes."""
    for shape, inner in (((19, 150), -1), ((2, 3, 40, 33), -2)):
        x = numbers("normal", shape, rng)
        want = reference(x, inner, rule)
        same(twin(x, inner, rule), want)
        same(compiled(x, inner, rule), want)


@pytest.mark.parametrize("axis", [-1, -2])
@pytest.mark.parametrize(
    "recipe", ["fp8", "fp8_e5m2/fp8_e5m2", "fp8(scale_rule=rceil)", "fp8_rows(rounding=stochastic,seed=3)"]
)  # fmt: skip
def test_float8_numbers_by_the_library_are_those_of_numpy(rng, recipe, axis):
    """Emulated tensor cores multiply the rounded numbers themselves."""
    x = (rng.standard_normal((2, 30, 40)) * 2.0 ** rng.integers(-9, 9, 40)).astype(np.float32)
    x[0, 3] = np.inf, *x[0, 3, 1:]
    rule = parse_recipe(recipe).rules[0].drawn(5, 0)
    for operand in (x, x.swapaxes(0, 1), x[:, ::2, ::-1]):
        expected = block_codes.rounded(operand, axis, rule, np)
        values, scales, scale = quantizing.rounded(host_view(operand), axis, rule)
        found = np.moveaxis(values, -1, axis).astype(np.float32)
        np.testing.assert_array_equal(found, expected[0].astype(np.float32))
        np.testing.assert_array_equal(scales, expected[1])
        assert scale == expected[2]
