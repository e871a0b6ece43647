"""Tensor-core arithmetic in software: against hardware, against exact arithmetic, and against published errors."""

import numpy as np
import pytest

import lowprec
from backends.tensor_core_oracle import dot
from lowprec.architectures import Architecture, parse_architecture
from lowprec.backends.cpu import library
from lowprec.backends.cpu.emulation.arithmetic import arithmetic, formats_of
from lowprec.backends.cpu.emulation.products import multiply
from lowprec.emulation import BLACKWELL_MMA_SYNC, TensorCore, mma
from lowprec.formats import BFLOAT16, FLOAT8_E4M3FN, FLOAT8_E5M2, FLOAT16, TF32
from lowprec.planning.tensor_cores import accumulation
from support import tensor_core_vectors as vectors
from support.rounding_oracle import round_to_format

FORMATS = {fmt.name: fmt for fmt in (FLOAT16, BFLOAT16, TF32, FLOAT8_E4M3FN, FLOAT8_E5M2)}
MODELS = [(arch, fmt) for arch in Architecture for fmt in formats_of(arch)]
NAN = 0x7FFFFFFF

needs_kernels = pytest.mark.skipif(library.library() is None, reason="the kernels are not compiled")


def bits(x):
    return np.asarray(x, np.float32).view(np.uint32)


def rounded(x, fmt):
    return round_to_format(x, FORMATS[fmt] if isinstance(fmt, str) else fmt)


def scalar_twin(a, b, c, model):
    found = [
        [
            dot(row.tolist(), column.tolist(), float(z), model)
            for column, z in zip(b.T, line, strict=True)
        ]
        for row, line in zip(a, c, strict=True)
    ]
    out = np.array(found, np.float64).astype(np.float32)
    out.view(np.uint32)[np.isnan(out)] = NAN
    return out


@pytest.fixture(params=[pytest.param("compiled", marks=needs_kernels), "NumPy"])
def twin(request, monkeypatch):
    if request.param == "NumPy":
        monkeypatch.setattr(library, "library", lambda: None)
    return multiply


# -- hardware -------------------------------------------------------------------------------------


def in_one_call(twin, found, model):
    a, b, c = found.a[:, None, :], found.b[:, :, None], found.c[:, None, None]
    return twin(a, b, c, model)[:, 0, 0]


def model_of(gpu, fmt):
    cores = BLACKWELL_MMA_SYNC
    if gpu != "B200":
        cores = parse_architecture(vectors.ARCHITECTURES[gpu])
    return arithmetic(cores, vectors.FORMATS[fmt])


@pytest.mark.parametrize(("gpu", "fmt"), vectors.SETS)
def test_the_sample_read_off_hardware_agrees_bit_for_bit(gpu, fmt, twin):
    found, model = vectors.sample(gpu, fmt), model_of(gpu, fmt)
    assert len(found.d) == 16
    assert (bits(in_one_call(twin, found, model)) == bits(found.d)).all()
    rows = zip(found.a.tolist(), found.b.tolist(), found.c.tolist(), strict=True)
    assert (bits([dot(*row, model) for row in rows]) == bits(found.d)).all()


@pytest.mark.parametrize(("gpu", "fmt"), vectors.SETS + vectors.NARROW_SETS)
def test_all_vectors_read_off_hardware_agree_bit_for_bit(gpu, fmt, twin):
    found = vectors.full(gpu, fmt)
    if found is None:
        pytest.skip(vectors.ABSENT)
    assert len(found.d) == 1000
    assert (bits(in_one_call(twin, found, model_of(gpu, fmt))) == bits(found.d)).all()


# -- other tensor cores ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("core", "arch", "fmt"),
    [
        (TensorCore(group=8, fraction_bits=24, least_exponent=-132), "ampere", "fp16"),
        (TensorCore(group=32, fraction_bits=13, result_bits=13), "hopper", "e4m3"),
        (TensorCore(group=32, fraction_bits=25), "blackwell", "e5m2"),
    ],
)
def test_a_tensor_core_as_a_value(core, arch, fmt, rng):
    name = {"fp16": "float16", "e4m3": "float8_e4m3fn", "e5m2": "float8_e5m2"}[fmt]
    a, b = wild(rng, (5, 70), name, 20), wild(rng, (70, 6), name, 20)
    c = wild(rng, (5, 6), "float16", 20)
    assert (
        bits(mma(a, b, c, arch=core, format=fmt)) == bits(mma(a, b, c, arch=arch, format=fmt))
    ).all()


@pytest.mark.parametrize("group", [1, 3, 64])
def test_more_bits_than_those_of_gpus_are_exact(group, rng):
    a, b = wild(rng, (4, 64), "float16", 4), wild(rng, (64, 3), "float16", 4)
    c = wild(rng, (4, 3), "float16", 4)
    core = TensorCore(group=group, fraction_bits=35)
    assert (
        bits(mma(a, b, c, arch=core, format="fp16"))
        == bits(scalar_twin(a, b, c, arithmetic(core, "float16")))
    ).all()


def test_a_tensor_core_that_is_not_possible():
    with pytest.raises(
        lowprec.SettingError, match="group of a tensor core is an integer from 1 to 128, got 0"
    ):
        TensorCore(group=0, fraction_bits=25)


# -- exact arithmetic -----------------------------------------------------------------------------


def wild(rng, shape, fmt, spread):
    """Return numbers of a format over many exponents, zeros of both signs among them, subnormal ones where they fit."""
    x = rng.standard_normal(shape) * 2.0 ** rng.integers(-spread, spread + 1, shape)
    x = np.clip(x, -FORMATS[fmt].largest, FORMATS[fmt].largest)
    x = np.where(rng.random(shape) < 0.1, rng.choice([0.0, -0.0], shape), x)
    return rounded(x, fmt)


@pytest.mark.parametrize("specials", [0.0, 0.03])
@pytest.mark.parametrize("spread", [2, 20, 130])
@pytest.mark.parametrize(("arch", "fmt"), MODELS)
def test_the_twins_agree(arch, fmt, spread, specials, twin, rng):
    # At a spread of 130 sums are subnormal or overflow; 37 is no multiple of a group.
    a, b = wild(rng, (5, 37), fmt, spread), wild(rng, (37, 6), fmt, spread)
    c = np.where(rng.random((5, 6)) < 0.2, 0, wild(rng, (5, 6), "tf32", spread)).astype(np.float32)
    for x in (a, b, c):
        where = rng.random(x.shape) < specials
        x[where] = rng.choice([np.inf, -np.inf, np.nan], where.sum())
    model = arithmetic(arch, fmt)
    assert (bits(twin(a, b, c, model)) == bits(scalar_twin(a, b, c, model))).all()


S = 2.0**-149  # the smallest float32
T = 127 * 2.0**-81  # of bfloat16, which has 8 bits
H, B = Architecture.HOPPER, Architecture.BLACKWELL
E4M3, E5M2 = "float8_e4m3fn", "float8_e5m2"


@pytest.mark.parametrize(
    ("arch", "fmt", "a", "b", "c", "expected"),
    [
        # Of 1 and 2^-24 Volta keeps 23 fraction bits, Ampere 24; two of those that are kept are 2^-23.
        (Architecture.VOLTA, "float16", [2.0**-12] * 2, [2.0**-12] * 2, 1.0, 1.0),
        (Architecture.AMPERE, "float16", [2.0**-12] * 2, [2.0**-12] * 2, 1.0, 1 + 2.0**-23),
        # Hopper keeps 25: four times 2^-25 count, four times 2^-26 do not.
        (H, "float16", [2.0**-13] * 4, [2.0**-12] * 4, 1.0, 1 + 2.0**-23),
        (H, "float16", [2.0**-13] * 4, [2.0**-13] * 4, 1.0, 1.0),
        # 1.5 * 1.5 is not normalised: its exponent is 0 although it exceeds 2, so 2^-25 is kept, and kept from
        # the sum 2.25 - 2^-25, which loses it again toward zero.
        (H, "float16", [1.5, -(2.0**-13)], [1.5, 2.0**-12], 0.0, 2.25 - 2.0**-22),
        # A subnormal factor has the exponent -14: 2^-24 * 1 is aligned like 2^-14, and of 2^-40 nothing is left.
        (H, "float16", [2.0**-24, 2.0**-20], [1.0, 2.0**-20], 0.0, 2.0**-24),
        (H, "bfloat16", [2.0**-24, 2.0**-20], [1.0, 2.0**-20], 0.0, 2.0**-24 + 2.0**-40),
        # The sum is rounded toward zero, for either sign.
        (H, "tf32", [1.0, 2.0**-24], [1.0, 1.5], 0.0, 1.0),
        (H, "tf32", [-1.0, -(2.0**-24)], [1.0, 1.5], 0.0, -1.0),
        # Group after group: sixteen small numbers next to 1 are lost one by one, or kept as a group before it comes.
        (H, "tf32", [1.0] + [2.0**-26] * 16, [1.0] * 17, 0.0, 1.0),
        (H, "tf32", [2.0**-26] * 16 + [1.0], [1.0] * 17, 0.0, 1 + 2.0**-22),
        # Subnormal results are kept, and cut to multiples of 2^-149.
        (H, "bfloat16", [2.0**-75], [2.0**-74], 0.0, S),
        (H, "bfloat16", [2.0**-75] * 3, [2.0**-75] * 3, 0.0, S),
        # Terms are aligned to 2^-133 at least, of which 25 fraction bits are 2^-158. The first product is
        # 2^-149 - 2^-156: four times 2^-158 make up for it, eight times 2^-159 do not. On Ampere, which keeps 24 bits
        # below 2^-132, four times 2^-158 do not either.
        (H, "bfloat16", [T, *[2.0**-79] * 4], [2.0**-75, *[2.0**-79] * 4], 0.0, S),
        (H, "bfloat16", [T, *[2.0**-80] * 8], [2.0**-75, *[2.0**-79] * 8], 0.0, 0.0),
        (Architecture.AMPERE, "bfloat16", [T, *[2.0**-79] * 4], [2.0**-75, *[2.0**-79] * 4], 0.0, 0.0),
        # Beyond the largest float32 comes an infinity, which stays, or meets another one.
        (H, "tf32", [2.0**127] * 2, [1.0] * 2, 0.0, np.inf),
        (H, "tf32", [2.0**127] * 2 + [0.0] * 6 + [-(2.0**127)], [1.0] * 9, 0.0, np.inf),
        (H, "tf32", [2.0**127] * 2 + [0.0] * 6 + [-np.inf], [1.0] * 9, 0.0, np.nan),
        (H, "tf32", [2.0**127, 2.0**127, -np.inf], [1.0] * 3, 0.0, -np.inf),
        # 2^128 - 2^103 is nearest to 2^128, and rounded toward zero.
        (H, "tf32", [2.0**127, 2.0**127 - 2.0**116, 2.0**116 - 2.0**105, 2.0**105 - 2.0**103], [1.0] * 4, 0.0,
         2.0**128 - 2.0**104),
        # Products may exceed it, as long as the sum does not; the 1 is far below their bits.
        (H, "tf32", [2.0**127, -(2.0**127)], [2.0, 2.0], 1.0, 0.0),
        (H, "tf32", [np.inf], [0.0], 0.0, np.nan),
        (H, "tf32", [np.inf], [1.0], -np.inf, np.nan),
        # FP8 keeps 13 fraction bits of terms and sums; Blackwell 25 of terms, of which c is one.
        (H, E4M3, [2.0**-6] * 2, [2.0**-6, 2.0**-8], 1.0, 1 + 2.0**-12),
        (H, E4M3, [1.0, 2.0**-7], [1.0, 2.0**-7], 0.0, 1.0),
        (H, E4M3, [1.5, 2.0**-6], [1.5, 2.0**-7], 0.0, 2.25),
        (Architecture.ADA, E4M3, [2.0**-7] * 32, [2.0**-7] * 32, 1.0, 1.0),
        (H, E4M3, [1.0, *[0.0] * 15, 2.0**-6], [1.0, *[0.0] * 15, 2.0**-7], 0.0, 1 + 2.0**-13),
        (B, E5M2, [2.0**-12, 2.0**-13], [2.0**-12] * 2, 1.0, 1.0),
        (B, E5M2, [1.0, 2.0**-14], [1.0, 2.0**-12], 0.0, 1.0),
        (B, E5M2, [0.0], [1.0], -0.0, 0.0),
        # An exact zero is +0; what is cut to nothing keeps its sign.
        (H, "tf32", [1.0, -1.0], [1.0, 1.0], -0.0, 0.0),
        (H, "bfloat16", [-(2.0**-76)], [2.0**-75], 0.0, -0.0),
        (H, "bfloat16", [-0.0], [1.0], -0.0, 0.0),
    ],
)  # fmt: skip
def test_cases_that_can_be_followed_by_hand(arch, fmt, a, b, c, expected, twin):
    model = arithmetic(arch, fmt)
    wanted = np.uint32(NAN) if np.isnan(expected) else bits(expected)
    x, y = np.array([a], np.float32), np.array(b, np.float32)[:, None]
    z = np.array([[c]], np.float32)
    assert bits(twin(x, y, z, model))[0, 0] == wanted
    assert bits(scalar_twin(x, y, z, model))[0, 0] == wanted


@pytest.mark.parametrize(("arch", "fmt"), MODELS)
def test_a_chain_of_instructions_is_the_whole(arch, fmt, rng):
    model, facts = arithmetic(arch, fmt), accumulation(fmt, arch.capability)
    assert facts is not None
    assert facts.instruction_k % model.group == 0
    a, b = wild(rng, (4, 50), fmt, 4), wild(rng, (50, 3), fmt, 4)
    chained = np.zeros((4, 3), np.float32)
    for k in range(0, 50, facts.instruction_k):
        inner = slice(k, k + facts.instruction_k)
        chained = multiply(a[:, inner], b[inner], chained, model)
    assert (bits(chained) == bits(multiply(a, b, None, model))).all()


@pytest.mark.parametrize("shape", [(0, 5, 3), (3, 0, 4), (3, 5, 0), (1, 1, 1), (33, 7, 1030)])
def test_every_shape(shape, twin, rng):
    m, k, n = shape
    model = arithmetic(H, "tf32")
    a, b = wild(rng, (m, k), "tf32", 3), wild(rng, (k, n), "tf32", 3)
    c = wild(rng, (m, n), "tf32", 3)
    found = twin(a, b, c, model)
    assert found.shape == (m, n)
    rows, columns = np.arange(m)[:3], np.arange(n)[-3:]
    expected = scalar_twin(a[rows], b[:, columns], c[np.ix_(rows, columns)], model)
    expected = expected.reshape(len(rows), len(columns))
    assert (bits(found[np.ix_(rows, columns)]) == bits(expected)).all()


def test_strides_and_batches(twin, rng):
    model = arithmetic(H, "float16")
    a, b = wild(rng, (2, 1, 19, 4), "float16", 3), wild(rng, (3, 40, 6), "float16", 3)
    a, b = a.swapaxes(-1, -2)[..., ::-1], np.broadcast_to(b[:, 1:39:2, ::-1], (2, 3, 19, 6))
    found = twin(a, b, np.ones((3, 1, 6), np.float32), model)
    assert found.shape == (2, 3, 4, 6)
    for i in np.ndindex(2, 3):
        expected = scalar_twin(a[i[0], 0], b[i], np.ones((4, 6), np.float32), model)
        assert (bits(found[i]) == bits(expected)).all()


@needs_kernels
@pytest.mark.parametrize("specials", [0, 40])
@pytest.mark.parametrize(("arch", "fmt"), MODELS)
def test_kernels_and_numpy_agree_on_many_blocks(arch, fmt, specials, rng, monkeypatch):
    # Three blocks of rows, some of columns whatever the vectors' width, and of k; the second is shared by threads.
    model = arithmetic(arch, fmt)
    a, b = wild(rng, (70, 291), fmt, 60), wild(rng, (291, 37), fmt, 60)
    c = wild(rng, (70, 37), "tf32", 126) * np.float32(1 + 2.0**-23)
    for x in (a, b, c):
        x.flat[rng.integers(0, x.size, specials)] = rng.choice([np.inf, -np.inf, np.nan], specials)
    found = multiply(a, b, c, model)
    monkeypatch.setattr(library, "library", lambda: None)
    assert (bits(found) == bits(multiply(a, b, c, model))).all()


@pytest.mark.parametrize(
    "change", [{"fraction_bits": 26}, {"group": 200}, {"group": 7}, {"group": 24}]
)
def test_groups_and_bits_beyond_those_of_tensor_cores(change):
    # Eight of the largest terms of 26 fraction bits exceed an int32.
    a, b = np.full((1, 300), 2 - 2.0**-10, np.float32), np.full((300, 1), 2 - 2.0**-10, np.float32)
    c, model = np.ones((1, 1), np.float32), arithmetic(H, "float16")._replace(**change)
    assert (bits(multiply(a, b, c, model)) == bits(scalar_twin(a, b, c, model))).all()


def test_a_caller_that_flushes_subnormal_numbers(torch):
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor does not flush subnormal numbers")
    try:
        a = np.full((1, 1), 2.0**-75, np.float32)
        found = multiply(a, a * np.float32(2), None, arithmetic(H, "bfloat16"))
    finally:
        torch.set_flush_denormal(False)
    assert bits(found)[0, 0] == 1


def test_tensor_cores_are_given_scaled_numbers(rng):
    """Their arithmetic treats float16's subnormal numbers in its own way, so that factors matter."""
    a, b = (rng.standard_normal(shape, dtype=np.float32) for shape in ((6, 40), (40, 5)))
    a *= np.float32(2.0**-20)
    with lowprec.emulate("hopper"):
        found = lowprec.matmul(a, b, math_mode="fp16")
    exponents, parts = [], []
    for x, axis in ((a, -1), (b, -2)):
        e = 15 - np.frexp(np.abs(x).max(axis, keepdims=True))[1]
        exponents.append(e)
        parts.append(np.ldexp(x, e).astype(np.float16).astype(np.float32))
    zero = np.zeros((6, 5), np.float32)
    want = np.ldexp(mma(*parts, zero, arch="hopper", format="fp16"), -sum(exponents))
    np.testing.assert_array_equal(found, want)
