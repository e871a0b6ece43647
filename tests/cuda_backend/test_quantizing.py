"""Modes that quantise on a GPU: codes and scales of the CPU's bits, and products of the rounded numbers."""

import itertools
from math import prod

import ml_dtypes
import numpy as np
import pytest

import lowprec
from cuda_backend.device_fixture import TorchGpu, has_real_gpu
from lowprec import recipes
from lowprec.arrays import block_codes
from lowprec.arrays.view import NUMPY_DTYPES
from lowprec.backends.cuda.packing import prepare_packing
from lowprec.backends.cuda.steps import Addresses, queue_all
from lowprec.errors import UnsupportedError
from lowprec.formats import DType, dtype_from_name
from lowprec.profiling.records import multiplied_format
from lowprec.recipes import FORMATS, Recipe, Rule
from software_cuda import tables
from support import quantized_cases
from support.kernel_oracles import DeviceCopies, Guarded, assert_same_bits, lay_out, stack_of
from support.kernel_variants import QUANTIZED, quantizing, target_of
from support.quantized_cases import close

#: The modes of GPUs.
MODES = [mode for mode in recipes.MODES if mode != "int8_blocks"]

STREAM = 1
D = DType
BF16 = np.dtype(ml_dtypes.bfloat16)

MEASURES = [
    {"rounding": "stochastic", "seed": 2**64 - 12345, "stream": 2**63 + 7},
    {"hadamard": 16, "seed": 99},
    {"rounding": "stochastic", "seed": 5, "hadamard": 16},
]
RULES = [*QUANTIZED, *(rule._replace(**MEASURES[i % 3]) for i, rule in enumerate(QUANTIZED))]


def name_of(value):
    return "-".join(map(str, value)) if isinstance(value, Rule) else None


def numbers(kind, size, dtype, rng):
    """Numbers of ordinary size, of every size with zeros, or any bits, NaN and infinities among them."""
    if kind == "bits":
        return rng.integers(0, 256, size * dtype.itemsize, np.uint8).view(NUMPY_DTYPES[dtype])
    x = rng.standard_normal(size)
    if kind == "scaled":
        x = np.ldexp(x, np.repeat(rng.integers(-140, 100, -(-size // 100)), 100)[:size])
        x = np.where(rng.random(size) < 0.1, rng.choice([0.0, -0.0], size), x)
    with np.errstate(over="ignore"):
        return x.astype(np.float32).astype(NUMPY_DTYPES[dtype])


def written(x, packing, at=0):
    """Return the elements and the scales that the kernels write."""
    size = prod(x.shape[:-2]) * packing.matrix_stride
    out, scales = (
        Guarded.of(size, NUMPY_DTYPES[packing.dtype], at),
        Guarded.of(packing.scale_bytes // 4, np.float32),
    )
    with DeviceCopies(STREAM) as copies:
        source, target, at_scales = (copies.put(y) for y in (x, out.inside, scales.inside))
        addresses = Addresses(
            a=source, packed_a=target, scales_a=at_scales, draw_a=packing.rule.stream
        )
        queue_all(prepare_packing(packing, 0), addresses, STREAM)
        copies.fetch()
    out.check()
    scales.check()
    return out.inside, scales.inside


def quantised(x, rule, target, pad, at=0):
    """Return the lines that the kernels write for vectors along the last axis, padding included, and the scales."""
    shape = (*x.shape[:-2], x.shape[-2] + pad[0], x.shape[-1] + pad[1])
    packing = quantizing(
        stack_of(x, dtype_from_name(x.dtype.name)), rule, target, shape[-1], shape[-2]
    )
    out, scales = written(x, packing, at)
    return out.reshape(shape), scales[: prod(x.shape[:-1])].reshape(
        x.shape[:-1]
    ) if packing.scaled else None


def expected(x, rule, target):
    with np.errstate(all="ignore"):
        values, scales, scale = block_codes.rounded(x.astype(np.float32), -1, rule, np)
        if rule.block_scale == "float32":  # multiplied in
            high, wide = rule.block
            each = np.repeat(np.repeat(scales, wide, -2), high, -1).swapaxes(-1, -2)
            values, scales = (
                values.astype(np.float32) * each[..., : x.shape[-2], : x.shape[-1]],
                None,
            )
        values = values.astype(np.float32).astype(NUMPY_DTYPES[target])
    if rule.has_tensor_scale:
        scales = np.full(x.shape[:-1], scale, np.float32)
    return values, scales


def check(x, rule, target, pad=(0, 0), at=0):
    before = x.copy()
    (found, scales), (want, want_scales) = (
        quantised(x, rule, target, pad, at),
        expected(x, rule, target),
    )
    rows, cols = x.shape[-2:]
    assert_same_bits(np.ascontiguousarray(found[..., :rows, :cols]), want)
    assert not found[..., rows:, :].view(f"u{found.itemsize}").any()
    assert not np.ascontiguousarray(found[..., cols:]).view(f"u{found.itemsize}").any()
    assert (scales is None) is (want_scales is None)
    if scales is not None:
        assert_same_bits(np.array(scales), np.array(want_scales))
    assert_same_bits(x.copy(), before)


@pytest.mark.usefixtures("few_blocks")
@pytest.mark.feature("kernels that quantise operands")
@pytest.mark.parametrize("rule", RULES, ids=name_of)
def test_codes_and_scales_are_those_of_the_cpu(rule, rng):
    """Of any strides, contiguous along k, along the vectors or neither, through several tiles and with padding."""
    for shape, kind in (
        ((3, 5), "bits"),
        ((2, 33, 150), "scaled"),
        ((130, 161), "bits"),
        ((17, 32), "normal"),
    ):
        for layout, pad in (("rows", (0, 0)), ("columns", (3, 8)), ("every third", (0, 5))):
            x = lay_out(numbers(kind, prod(shape), D.FLOAT32, rng), shape, layout)
            check(x, rule, target_of(rule), pad)


@pytest.mark.usefixtures("few_blocks")
@pytest.mark.parametrize(
    "rule", [rule for rule in RULES if rule.block_scale == "e4m3"], ids=name_of
)
def test_codes_of_4_bits(rule, rng):
    """Codes of two in a byte and scales in tiles are the rounded numbers, and codes those of stored arrays."""
    for (rows, cols), kind in (
        ((3, 5), "bits"),
        ((140, 161), "scaled"),
        ((33, 32), "bits"),
        ((17, 300), "normal"),
    ):
        x = lay_out(numbers(kind, rows * cols, D.FLOAT32, rng), (rows, cols), "columns")
        tall, wide = -(-rows // 16) * 16, -(-cols // 32) * 32
        packing = quantizing(stack_of(x, D.FLOAT32), rule, D.INT8, wide // 2, tall, "VEC16_UE4M3")
        codes, memory = written(x, packing)
        want, factors = expected(x, rule, D.BFLOAT16)
        assert_same_bits(memory[:rows].copy(), factors)
        tiles = (
            memory[tall : packing.scale_words].view(np.uint8).reshape(-(-tall // 128), -1, 32, 4, 4)
        )
        scales = tiles.transpose(0, 3, 2, 1, 4).reshape(tiles.shape[0] * 128, -1)
        codes = codes.view(np.uint8).reshape(tall, -1)
        if rule == FORMATS["nvfp4"][0]:
            stored = lowprec.quantize(np.ascontiguousarray(x), "nvfp4", 1)
            np.testing.assert_array_equal(codes[:rows, : stored.codes.shape[1]], stored.codes)
        found = (
            np.stack([codes & 15, codes >> 4], -1).reshape(tall, -1).view(ml_dtypes.float4_e2m1fn)
        )
        each = scales.view(ml_dtypes.float8_e4m3fn).astype(np.float32).repeat(16, 1)
        found = found.astype(np.float32)[:rows, :cols] * each[:rows, :cols]
        assert_same_bits(found.astype(BF16), want)


@pytest.mark.usefixtures("few_blocks")
@pytest.mark.parametrize(
    ("source", "target"), [*itertools.product((D.FLOAT16, D.BFLOAT16), (D.BFLOAT16, D.FLOAT32))]
)
def test_other_types(source, target, rng):
    for name, kind in itertools.product(MODES, ("bits", "normal")):
        x = lay_out(numbers(kind, 40 * 70, source, rng), (40, 70), "columns")
        check(x, FORMATS[name][1], D.FLOAT32 if name == "fp8_blocks" else target, (1, 2), 3)


@pytest.mark.usefixtures("few_blocks")
@pytest.mark.parametrize("rule", [r for r in RULES if r.hadamard == 0], ids=name_of)
def test_batches_of_many_dimensions(rule, rng):
    """Five dimensions of which no two are one, more than a launch takes; and broadcast ones."""
    x = lay_out(numbers("normal", 4000, D.FLOAT32, rng), (2, 3, 2, 3, 2, 5, 18), "rows")[
        :, ::2, :, ::-2
    ]
    check(x[..., ::-1, :, :], rule, target_of(rule))
    if rule.is_stochastic:  # the same random numbers for the same matrix
        part = x[:, :1, 0, 0, :1]
        again = np.broadcast_to(part, (2, 3, 4, 5, 18))
        found, want = (
            quantised(y, rule, target_of(rule), (0, 0)) for y in (again, np.ascontiguousarray(part))
        )
        assert_same_bits(found[0], np.broadcast_to(want[0], again.shape).copy())


# -- products --------------------------------------------------------------------------------------


def rounded(x, axis, rule):
    """Return the numbers that the CPU multiplies, scales included, in float64; each number has its own random bits."""
    if rule is None:
        return x.astype(np.float64)
    shape = x.shape
    if x.ndim == 1:
        return rounded(x[None], -1, rule)[0]
    values, scales, scale = block_codes.rounded(x.astype(np.float32), axis, rule, np)
    values = values.astype(np.float64) * float(scale)
    if rule.scaling == "vector":
        values *= np.expand_dims(scales, axis)
    elif scales is not None:
        high, wide = rule.block
        each = np.repeat(np.repeat(scales, wide, -2), high, -1)
        each = each if axis == -2 else each.swapaxes(-1, -2)
        values *= each[..., : shape[-2], : shape[-1]]
    return values


def operands(a, b, mode):
    rules = FORMATS[mode] if isinstance(mode, str) else mode.rules
    draw = 0 if isinstance(mode, str) else mode.draw
    return rounded(a, -1, rules[0].drawn(draw, 0)), rounded(
        b, -2 if b.ndim > 1 else -1, rules[1].drawn(draw, 1)
    )


RECIPES = [
    Recipe("mxfp8", rounding="stochastic", seed=7, step=3, layer=2),
    Recipe("nvfp4", rounding="stochastic", seed=7, hadamard=16, product="grad_weight"),
    Recipe.nvfp4_training(seed=4).of("grad_weight"),
    Recipe("int8", rounding="stochastic", seed=2**64 - 1, step=2**40 - 1, layer=2**20 - 1),
    Recipe(("fp8", "mxfp4"), scale_rule="rceil"),
    Recipe("fp8_blocks", scale_rule="rceil"),
    Recipe("fp8_blocks", product="grad_weight"),
    Recipe("mxfp4", scale_rule="even"),
    Recipe("nvfp4", weight_block=(16, 16), knows_weight=True),
]


@pytest.fixture(params=[(8, 0), (8, 9), (9, 0), (10, 0)], ids=str)
def any_gpu(request):
    """A device of each kind: without FP8 units, with one scale an operand, with float32 scales, with powers of two."""
    if not has_real_gpu():
        return request.getfixturevalue("install")(request.param)
    gpu = TorchGpu()
    if gpu.torch.cuda.get_device_capability() != request.param:
        pytest.skip(f"the GPU is not of compute capability {request.param}")
    return gpu


@pytest.mark.feature("mode {mode}")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.sampled(2)
def test_products_are_those_of_the_rounded_numbers(any_gpu, mode):
    check_products(any_gpu, mode)


@pytest.mark.parametrize("of_b", [(64, 8), (2, 4, 64, 8)], ids=str)
def test_a_broadcast_view_has_the_random_numbers_of_its_copy(gpu, of_b):
    recipe, rng = Recipe("mxfp4", rounding="stochastic", seed=1), np.random.default_rng(5)
    a, b = rng.standard_normal((2, 1, 3, 64), np.float32), rng.standard_normal(of_b, np.float32)
    view = np.broadcast_to(a, (2, 4, 3, 64))
    found = gpu.get(lowprec.matmul(gpu.put(view), gpu.put(b), math_mode=recipe))
    x, y = operands(view.copy(), b, recipe)
    assert close(found, np.matmul(x, y), x, y)


@pytest.mark.feature("recipes with stochastic rounding and a Hadamard transform")
@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_products_of_recipes(gpu, recipe):
    check_products(gpu, recipe)


def check_products(gpu, mode):
    for a, b, given, exact, x, y in quantized_cases.products(lambda a, b: operands(a, b, mode), 15):
        x_there, y_there = gpu.put(a), gpu.put(b)
        put = {name: gpu.put(v) if isinstance(v, np.ndarray) else v for name, v in given.items()}
        found = gpu.get(lowprec.matmul(x_there, y_there, math_mode=mode, **put))
        units = lowprec.plan(x_there, y_there, math_mode=mode).quantized.inner.bound.relative
        assert (found.dtype, found.shape) == (np.float32, exact.shape)
        words = mode, a.shape, b.shape, a.strides, b.strides, given
        assert close(found, exact, 2 * x, y, units * has_real_gpu()), words


@pytest.mark.parametrize(
    "mode",
    ["fp8_rows", "fp8_blocks", "mxfp8", Recipe(("mxfp8", "mxfp8_e5m2")), "nvfp4", *RECIPES[1::4]],
    ids=str,
)
def test_each_block_has_its_scale(any_gpu, mode, rng):
    """Several tiles of scales each way, and blocks of every magnitude."""
    a, b = rng.standard_normal((144, 700), np.float32), rng.standard_normal((700, 280), np.float32)
    a *= np.exp2(rng.integers(-8, 9, (144, 22))).repeat(32, 1)[:, :700]
    b *= np.exp2(rng.integers(-8, 9, (22, 280))).repeat(32, 0)[:700]
    found = any_gpu.get(lowprec.matmul(any_gpu.put(a), any_gpu.put(b), math_mode=mode))
    x, y = operands(a, b, mode)
    units = lowprec.plan(
        any_gpu.put(a), any_gpu.put(b), math_mode=mode
    ).quantized.inner.bound.relative
    assert close(found, x @ y, x, y, units * has_real_gpu())


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", ["float32", "bfloat16"])
def test_the_bound_holds(gpu, mode, name, rng):
    """With results of the operands' type, into an array given by the caller too."""
    dtype = np.dtype(getattr(ml_dtypes, name, name))
    a, b = (rng.standard_normal(s, np.float32).astype(dtype) for s in ((48, 300), (300, 40)))
    x, y, out = gpu.put(a), gpu.put(b), gpu.put(np.zeros((40, 48), dtype).T)
    plan = lowprec.plan(x, y, math_mode=mode)
    wide = a.astype(np.float64), b.astype(np.float64)
    exact, norms = wide[0] @ wide[1], [float(np.linalg.norm(v)) for v in wide]
    for found in (
        lowprec.matmul(x, y, math_mode=mode),
        lowprec.matmul(x, y, math_mode=mode, out=out),
    ):
        error = np.linalg.norm(gpu.get(found).astype(np.float64) - exact)
        assert 1e-3 * np.linalg.norm(exact) < error <= plan.bound.frobenius(*norms, 48, 40)


@pytest.mark.parametrize("mode", MODES)
def test_numbers_that_are_not_finite_and_large_scales(gpu, mode):
    a, b = np.ones((40, 160), np.float32), np.ones((160, 48), np.float32)
    a[3, 5], b[100, 7] = np.inf, np.nan
    found = gpu.get(lowprec.matmul(gpu.put(a), gpu.put(b), math_mode=mode))
    assert np.isnan(found[3]).all()
    assert np.isnan(found[:, 7]).all()
    assert np.isfinite(np.delete(np.delete(found, 3, 0), 7, 1)).all()
    for large in (3e19, 3e38) if mode != "fp8" else ():  # whose scales cuBLASLt multiplies
        a, b = np.array([[3e38, 0]], np.float32), np.array([[0], [large]], np.float32)
        assert gpu.get(lowprec.matmul(gpu.put(a), gpu.put(b), math_mode=mode, alpha=-1e3)) == 0


def test_integers_whose_sums_exceed_int32(gpu):
    a = np.full((1, 140000), 127, np.float32)
    found = gpu.get(lowprec.matmul(gpu.put(a), gpu.put(a.T), math_mode="int8"))
    assert np.allclose(found, 140000 * 127.0**2, rtol=1e-3)


@pytest.mark.parametrize("mode", [*MODES, Recipe("mxfp8", rounding="stochastic", seed=7)], ids=str)
def test_a_prepared_operand_is_quantised_once(gpu, mode, rng):
    a, b = (rng.standard_normal(s, np.float32) for s in ((2, 33, 150), (150, 40)))
    x = gpu.put(a)
    y = lowprec.prepare(gpu.put(b), math_mode=mode)
    assert "keeps its packed b" in str(lowprec.plan(x, y, math_mode=mode).prepared)
    want = gpu.get(lowprec.matmul(x, gpu.put(b), math_mode=mode))
    for _ in range(2):
        np.testing.assert_array_equal(gpu.get(lowprec.matmul(x, y, math_mode=mode)), want)
    assert len(y._view.packed) == 1


@pytest.mark.parametrize("mode", ["fp8", "fp8_rows", "fp8_blocks", "nvfp4", "int8"])
def test_a_graph_quantises_what_it_finds(software, cupy, mode, rng):
    first, second, b = (
        rng.standard_normal(s, np.float32) for s in ((32, 150), (32, 150), (150, 48))
    )
    runtime = software.software.runtime
    with cupy.cuda.Stream() as stream:
        x, y, out = cupy.asarray(first), cupy.asarray(b), cupy.empty((32, 48), np.float32)
        lowprec.matmul(x, y, out=out, math_mode=mode)
        stream.synchronize()
        runtime.begin_capture(stream.ptr)
        lowprec.matmul(x, y, out=out, math_mode=mode)
        graph = runtime.end_capture(stream.ptr)
        x[...] = cupy.asarray(10 * second)
        graph.replay(stream.ptr)
        want = lowprec.matmul(x, y, math_mode=mode)
        np.testing.assert_array_equal(cupy.asnumpy(out), cupy.asnumpy(want))


def test_a_stored_operand_is_not_quantised_again(gpu, rng):
    a, b = rng.standard_normal((16, 64), np.float32), rng.standard_normal((64, 16), np.float32)
    b = b.astype(ml_dtypes.float8_e4m3fn)
    plan = lowprec.plan(gpu.put(a), gpu.put(b), math_mode="mxfp4")
    assert plan.b_becomes.startswith("float8_e4m3fn values")
    found = gpu.get(lowprec.matmul(gpu.put(a), gpu.put(b), math_mode="mxfp4", out_dtype="float32"))
    x, y = rounded(a, -1, FORMATS["mxfp4"][0]), b.astype(np.float64)
    assert close(found, x @ y, x, y)


def test_each_step_has_its_random_numbers(gpu, rng):
    a, b = (rng.standard_normal(s, np.float32) for s in ((16, 64), (64, 16)))
    found = []
    for step in (0, 1, 0):
        mode = RECIPES[0].at(step)
        x, y = operands(a, b, mode)
        found.append(gpu.get(lowprec.matmul(gpu.put(a), gpu.put(b), math_mode=mode)))
        assert close(found[-1], x @ y, x, y)
    np.testing.assert_array_equal(found[0], found[2])
    assert not np.array_equal(found[0], found[1])


#: By device and mode: the types that are multiplied, and cuBLASLt's modes of the scales of ``b`` and ``a``.
UNITS = [
    ("a100", "fp8", "bfloat16", ("", "")),
    ("a100", "int8", "int8", ("", "")),
    ("l40s", "fp8", "float8_e4m3fn", ("SCALAR_32F", "SCALAR_32F")),
    ("l40s", "fp8_rows", "float8_e4m3fn", ("", "")),
    ("l40s", "fp8_blocks", "float32", ("", "")),
    ("h100", "fp8_rows", "float8_e4m3fn", ("OUTER_VEC_32F", "OUTER_VEC_32F")),
    ("h100", "fp8/fp8_rows", "float8_e4m3fn", ("OUTER_VEC_32F", "OUTER_VEC_32F")),
    ("h100", "fp8_blocks", "float8_e4m3fn", ("BLK128x128_32F", "VEC128_32F")),
    ("h100", "mxfp8", "bfloat16", ("", "")),
    ("h100", "fp8/mxfp8", "bfloat16", ("", "")),
    ("h100", Recipe("fp8_e5m2"), "bfloat16", ("", "")),
    ("h100", "fp8_e5m2/fp8", "float8_e4m3fn", ("SCALAR_32F", "SCALAR_32F")),
    ("b200", "mxfp8", "float8_e4m3fn", ("VEC32_UE8M0", "VEC32_UE8M0")),
    ("b200", "fp8_rows", "float8_e4m3fn", ("", "")),
    ("b200", "nvfp4", "nvfp4", ("VEC16_UE4M3", "VEC16_UE4M3")),
    ("h100", "nvfp4", "bfloat16", ("", "")),
    ("b200", "nvfp4/mxfp4", "bfloat16", ("", "")),
]


@pytest.mark.parametrize(
    ("device", "mode", "k"),
    [
        ("b200", "mxfp8", 256),
        ("h100", "fp8_blocks", 256),
        ("b200", "nvfp4", 192),
        ("h100", "fp8", 176),
    ],
)
def test_k_is_padded_to_whole_blocks(device, mode, k):
    plan = lowprec.plan(
        *(lowprec.ShapeDtype(x, "float32") for x in ((64, 176), (176, 64))),
        math_mode=mode,
        device=device,
    )
    assert plan.call.first.rows == plan.call.second.rows == k


@pytest.mark.parametrize(
    ("mode", "reads"), [("mxfp8", 1), ("nvfp4", 2), ("fp8", 2), ("fp8_rows", 2), ("fp8_blocks", 2)]
)
def test_the_least_time_counts_a_second_read(mode, reads):
    """Largest magnitudes of more than a tile are sought before the numbers are rounded."""
    a, b = (lowprec.ShapeDtype(x, "float32") for x in ((1024, 4096), (4096, 1024)))
    plan = lowprec.plan(a, b, math_mode=mode, device="h100")
    call, seconds = plan.call, plan.roofline.rewriting
    of_b = 2 if mode == "fp8_blocks" else reads  # rows of a have a scale for 128 numbers
    of_a = 1 if mode == "fp8_blocks" else reads
    read = (of_a + of_b) * 1024 * 4096 * 4
    staged = call.product_bytes + 4 * 1024 * 1024 if call.staged else 0
    nbytes = read + call.pack_a.nbytes + call.pack_b.nbytes + staged
    assert seconds == pytest.approx(nbytes / 3.35e12, rel=1e-3)


@pytest.mark.parametrize(("device", "mode", "multiplied", "modes"), UNITS)
def test_units_of_each_device(device, mode, multiplied, modes):
    a = lowprec.ShapeDtype((256, 256), "float32")
    plan = lowprec.plan(a, a, math_mode=mode, device=device)
    assert plan.a_becomes.endswith(f"multiplied as {multiplied}")
    assert "a kernel quantises it" in str(plan)
    assert plan.call.scale_modes == modes
    assert plan.call.pack_a.nbytes == plan.call.second.nbytes(256 * 256)
    # of which profiles count the units
    assert multiplied_format(plan) == multiplied.replace("nvfp4", "bfloat16")
    # cuBLASLt writes the result, unless a kernel applies the scales of the tensors
    if modes != ("", ""):
        assert {copy.operand for copy in plan.copies} == {
            "a",
            "b",
            *(["out"] if multiplied == "nvfp4" else []),
        }


def test_extents_without_fp8_units():
    for mode, m, batch, device, multiplied in (
        ("fp8_blocks", 30, 1, "h100", "float32"), ("fp8_blocks", 32, 2, "h100", "float32"),
        ("mxfp8", 24, 1, "b200", "bfloat16"), ("mxfp8", 32, 2, "b200", "bfloat16"),
        ("nvfp4", 24, 1, "b200", "bfloat16"), ("nvfp4", 32, 2, "b200", "bfloat16"),
    ):  # fmt: skip
        a, b = (
            lowprec.ShapeDtype((batch, m, 64), "float32"),
            lowprec.ShapeDtype((batch, 64, 64), "float32"),
        )
        plan = lowprec.plan(a, b, math_mode=mode, device=device)
        assert plan.a_becomes.endswith(f"multiplied as {multiplied}")
    a = lowprec.ShapeDtype((64, 64), "float32")
    for mode, device in (("fp8", "h100"), ("nvfp4", "b200")):
        chunked = lowprec.plan(a, a, math_mode=mode, device=device, k_chunk=32)
        assert chunked.a_becomes.endswith("multiplied as bfloat16")


@pytest.mark.parametrize("any_gpu", [(10, 0)], ids=str, indirect=True)
@pytest.mark.parametrize("refused", [False, True])
def test_algorithms_for_codes_of_4_bits(any_gpu, refused, monkeypatch, rng):
    """The algorithm is sought before the first product, and measured; without one, bfloat16 numbers are multiplied."""
    refused = refused and not has_real_gpu()
    monkeypatch.setattr(tables, "has_block_scales", lambda capability: not refused)
    a, b = (rng.standard_normal(s, np.float32) for s in ((32, 200), (200, 40)))
    x, y = any_gpu.put(a), any_gpu.put(b)
    assert ("fallback" in dict(lowprec.plan(x, y, math_mode="nvfp4").algorithm)) is refused
    assert lowprec.autotune(x, y, math_mode="nvfp4").timed
    left, right = operands(a, b, "nvfp4")
    for each in (y, lowprec.prepare(y, math_mode="nvfp4")):
        assert close(
            any_gpu.get(lowprec.matmul(x, each, math_mode="nvfp4")), left @ right, left, right
        )


@pytest.mark.parametrize("mode", ["fp8_rows", "fp8_blocks"])
def test_a_cublaslt_without_the_scale_modes(any_gpu, mode, monkeypatch):
    """The numbers are multiplied in a type of all devices."""
    if has_real_gpu():
        pytest.skip("the library has them")
    monkeypatch.setattr(tables, "has_float_scales", lambda capability: False)
    rng = np.random.default_rng(3)
    a, b = (rng.standard_normal(s, np.float32) for s in ((32, 200), (200, 48)))
    found = any_gpu.get(lowprec.matmul(any_gpu.put(a), any_gpu.put(b), math_mode=mode))
    x, y = operands(a, b, mode)
    assert close(found, x @ y, x, y)


def test_int8_in_blocks_is_refused(gpu):
    x = gpu.put(np.ones((4, 64), np.float32))
    with pytest.raises(
        UnsupportedError, match=r"the mode int8_blocks is for CPUs: on a GPU choose int8"
    ):
        lowprec.matmul(x, gpu.put(np.ones((64, 4), np.float32)), math_mode="int8_blocks")
