"""The kernels that pack operands and apply epilogues, bit by bit against NumPy and ml_dtypes.

The very sources that a GPU runs are executed here, compiled for the host.
"""

import mmap
from dataclasses import replace
from itertools import product
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cuda_backend.device_fixture import few_blocks
from lowprec.arrays.view import NUMPY_DTYPES
from lowprec.backends.cuda import compiling
from lowprec.backends.cuda.epilogue import Epilogue, prepare_epilogue, prepare_recomputing
from lowprec.backends.cuda.packing import prepare_packing
from lowprec.backends.cuda.staging import epilogue
from lowprec.backends.cuda.steps import Addresses, queue_all
from lowprec.errors import LowprecError
from lowprec.formats import DType
from lowprec.modes import available_modes
from lowprec.planning import ACTIVATIONS, GemmProblem, MatrixStack, OperandSpec, plan_gemm
from lowprec.planning.cublaslt.calls import PACKED, Packing
from support import oracles
from support.kernel_oracles import (
    LAYOUTS,
    DeviceCopies,
    Guarded,
    aligned,
    assert_same_bits,
    every_rounding,
    exponents_of,
    lay_out,
    owner_of,
    packed,
    random_bits,
    random_numbers,
    stack_of,
    with_epilogue,
    with_nans,
)
from support.kernel_variants import (
    ADDENDS,
    EVERY_PACKING,
    FLOAT8,
    IN_PARTS,
    QUANTIZED,
    REAL,
    RESULTS,
)
from support.machines import gpu

STREAM = 1
D = DType


@pytest.fixture(scope="module", autouse=True)
def device():
    with few_blocks():
        yield


def each_of(variants):
    """Parametrize a test by packings."""
    names = [f"{a}-{b}-{'scaled' if s else 'as it is'}-{how}" for a, b, s, how in variants]
    return pytest.mark.parametrize("variant", variants, ids=names)


def packing_of(array, source, target, scaled, how, pad):
    """Describe the packing of an array with this much padding, in source elements."""
    rows, cols = array.shape[-2:]
    lines = (rows + pad[0]) * (2 if how == "rotated" else 1)
    leading = (cols + pad[1]) * (1 if how == "no" else 2)
    return Packing(stack_of(array, source), target, leading, lines, scaled, how)


def check_pack(array, packing, offset=0):
    """Run a packing on an array and compare all that it writes, and that it writes nothing else."""
    want, want_exponents = packed(array, packing)
    out = Guarded.of(want.size, want.dtype, offset)
    exponents = Guarded.of(want_exponents.size, np.int32)
    before = array.copy()
    with DeviceCopies(STREAM) as device:
        source, target, scales = (device.put(x) for x in (array, out.inside, exponents.inside))
        addresses = Addresses(a=source, packed_a=target, scales_a=scales)
        queue_all(prepare_packing(packing, 0), addresses, STREAM)
        device.fetch()
    out.check()
    exponents.check()
    assert_same_bits(array.copy(), before)
    np.testing.assert_array_equal(exponents.inside, want_exponents.reshape(-1))
    assert_same_bits(out.inside.reshape(want.shape), want)


# -- packing --------------------------------------------------------------------------------------


@pytest.mark.feature("kernels that pack operands")
@each_of(EVERY_PACKING)
def test_every_packing(variant, rng):
    """Through the kernels for contiguous columns, contiguous rows and any strides, padded and not."""
    for layout in ("rows", "columns", "every third"):
        for pad in ((0, 0), (3, 8)):
            array = lay_out(random_bits(rng, variant[0], 40 * 48), (40, 48), layout)
            check_pack(array, packing_of(array, *variant, pad))


SIMPLE = (D.FLOAT32, D.BFLOAT16, False, "no")
ROWS_SCALED = (D.FLOAT32, D.FLOAT16, True, "no")
BYTES = (D.INT8, D.INT8, False, "no")
WIDENED = (D.FLOAT8_E4M3FN, D.COMPLEX128, False, "no")
ROTATED = (D.COMPLEX64, D.FLOAT16, True, "rotated")
FEW = [SIMPLE, ROWS_SCALED, BYTES, WIDENED, ROTATED]


@pytest.mark.feature("kernels that pack operands")
@each_of(FEW)
def test_operands_that_are_broadcast(variant, rng):
    row = lay_out(random_bits(rng, variant[0], 40), (1, 40), "rows")
    for shape in ((20, 40), (3, 20, 40)):
        array = np.broadcast_to(row, shape)
        check_pack(array, packing_of(array, *variant, (0, 0)))
        turned = np.swapaxes(array, -1, -2)
        check_pack(turned, packing_of(turned, *variant, (1, 4)))
    windows = np.lib.stride_tricks.sliding_window_view(row[0], 16)  # both strides are 1
    check_pack(windows, packing_of(windows, *variant, (0, 0)))
    matrix = lay_out(random_bits(rng, variant[0], 400), (16, 24), "columns")
    check_pack(m := np.broadcast_to(matrix, (2, 3, 16, 24)), packing_of(m, *variant, (0, 0)))


@each_of(FEW)
@pytest.mark.parametrize("layout", ["rows", "columns"])
def test_more_work_than_blocks(variant, layout, rng):
    # More for every kernel than the 32 blocks that the software device takes; the largest pieces are tiles of bytes, of
    # 128 each way, and strips of 32 rows by 512 columns, in which maxima are sought.
    array = lay_out(random_bits(rng, variant[0], 1 << 17), (9, 36, 518), layout)
    check_pack(array, packing_of(array, *variant, (4, 2)))


@each_of(FEW)
def test_batches_of_many_dimensions(variant, rng):
    """Five dimensions of which no two are one: more than a launch walks."""
    array = lay_out(random_bits(rng, variant[0], 1 << 13), (2, 2, 2, 4, 2, 9, 10), "gaps")[
        ..., ::-1, :, :, :
    ]
    for matrices in (array, np.swapaxes(array, -1, -2)):
        check_pack(matrices, packing_of(matrices, *variant, (1, 2)))


@settings(max_examples=60)
@given(data=st.data())
def test_any_shape_and_strides(data):
    variant = data.draw(st.sampled_from(FEW))
    shape = (
        *data.draw(st.lists(st.integers(0, 3), max_size=4)),
        data.draw(st.integers(0, 70)),
        data.draw(st.integers(0, 70)),
    )
    layout, offset = data.draw(st.sampled_from(list(LAYOUTS))), data.draw(st.integers(0, 4))
    pad = data.draw(st.tuples(st.integers(0, 3), st.integers(0, 17)))
    rng = np.random.default_rng(data.draw(st.integers(0, 1 << 30)))
    array = lay_out(random_bits(rng, variant[0], 1 << 12), shape, layout, offset)
    check_pack(array, packing_of(array, *variant, pad), data.draw(st.integers(0, 4)))


def test_distances_beyond_32_bits():
    """Two rows in two allocations, between which the process reserves 4 GiB of addresses."""
    near, far = np.zeros(1 << 26, np.int8), np.zeros(1 << 26, np.int8)
    near[:32], far[:32] = np.arange(32), -np.arange(32)
    with DeviceCopies(STREAM) as device:
        first = device.put(near)
        with mmap.mmap(-1, 1 << 32, prot=mmap.PROT_READ):
            second = device.put(far)
        if abs(second - first) < 1 << 31:
            pytest.skip("the device's memory is close together whatever the host's is")
        for col_stride in (1, 2):
            source = MatrixStack.of(D.INT8, 2, 16, second - first, col_stride)
            out = np.zeros((2, 16), np.int8)
            steps = prepare_packing(Packing(source, D.INT8, 16, 2), 0)
            queue_all(steps, Addresses(a=first, packed_a=device.put(out)), STREAM)
            device.fetch()
            np.testing.assert_array_equal(out[0], near[: 16 * col_stride : col_stride])
            np.testing.assert_array_equal(out[1], far[: 16 * col_stride : col_stride])


def test_division_of_large_indices(monkeypatch):
    """Quotients and remainders on both sides of 32 bits."""
    program = (
        'extern "C" __global__ void split(const long long* numbers, long long* results, long long count)\n'
        "{ for (long long i = blockIdx.x * blockDim.x + threadIdx.x; i < count; i += gridDim.x * blockDim.x) {\n"
        "  Split x(numbers[2 * i], numbers[2 * i + 1]);\n"
        "  results[2 * i] = x.quotient; results[2 * i + 1] = x.remainder; } }\n"
    )
    elements = Path(compiling.__file__).with_name("kernels") / "elements.cuh"
    source = elements.read_text("utf-8") + program
    monkeypatch.setattr(compiling, "source_text", lambda *_: source)
    edges = [0, 1, 6, 7, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 32, (1 << 45) + 12345]
    numbers = np.array([(a, b) for a in edges for b in edges if b], np.int64)
    results = np.zeros_like(numbers)
    launch = compiling.Launch("split", "", {}, 0, 1, (8,), "2Q", [len(numbers)])
    with DeviceCopies(STREAM) as device:
        launch(STREAM, device.put(numbers), device.put(results))
        device.fetch()
    quotients, remainders = np.divmod(numbers[:, 0], numbers[:, 1])
    np.testing.assert_array_equal(results[:, 0], quotients)
    np.testing.assert_array_equal(results[:, 1], remainders)


# -- parts ----------------------------------------------------------------------------------------


@pytest.mark.feature("kernels that pack operands")
@pytest.mark.parametrize("name", IN_PARTS)
def test_parts(name, rng):
    """Side by side and one after another, up and down, through every kernel; any bits, NaN and infinities too."""
    variant, (parts, exponent, summed, as_tf32) = IN_PARTS[name]
    for layout in ("rows", "columns", "every third"):
        for side_by_side, descending in ((True, True), (False, False)):
            for shape, pad in (((2, 17, 24), (0, 0)), ((3, 9, 13), (3, 3))):
                array = lay_out(random_bits(rng, variant[0], 1 << 12), shape, layout)
                made = replace(
                    packing_of(array, *variant, pad),
                    parts=parts, part_exponent=exponent, summed=summed, as_tf32=as_tf32,
                    side_by_side=side_by_side, descending=descending,
                )  # fmt: skip
                check_pack(array, made)


# -- rounding -------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", [D.FLOAT16, D.BFLOAT16])
def test_every_rounding_of_float32(target):
    for values in every_rounding():
        array = values.reshape(1, -1)
        check_pack(array, packing_of(array, D.FLOAT32, target, False, "no", (0, 0)))


@pytest.mark.parametrize("source", [D.FLOAT16, D.BFLOAT16, *FLOAT8])
@pytest.mark.parametrize("target", [D.FLOAT16, D.BFLOAT16, D.FLOAT32, D.FLOAT64])
def test_every_number_of_8_and_16_bits(source, target):
    array = (
        np.arange(1 << source.bits, dtype=f"u{source.itemsize}")
        .view(NUMPY_DTYPES[source])
        .reshape(1, -1)
    )
    check_pack(array, packing_of(array, source, target, False, "no", (0, 0)))


# -- scaling --------------------------------------------------------------------------------------


def every_kind_of_row():
    """Return rows of float32 that are hard to scale."""
    inf, nan, tiny = np.inf, np.nan, 1e-45
    rows = [
        [0, -0.0, 0, 0],
        [inf, -inf, nan, 0],
        [inf, 1, nan, -3],
        [tiny, 0, -tiny, 0],
        [2.0**-126, tiny, -(2.0**-127), 2.0**-140],
        [np.finfo(np.float32).max, 1, tiny, -65504],
        [-np.finfo(np.float32).max, 2.0**103, 2.0**102, 2.0**90],
        [65504, 65519.996, 65520, 1e-8],
        [2.0**-14, 2.0**-24, 2.0**-25, 2.0**-39],
        [1, 2.0**-38, 3 * 2.0**-40, 2.0**-39],
        [nan, nan, nan, nan],
    ]
    return np.array(rows, np.float32)


@pytest.mark.parametrize("layout", ["rows", "columns", "every third"])
def test_rows_that_are_hard_to_scale(layout, rng):
    rows = np.tile(every_kind_of_row(), (1, 4))
    array = lay_out(rows.reshape(-1), rows.shape, layout)
    np.testing.assert_array_equal(array, rows)
    check_pack(array, packing_of(array, *ROWS_SCALED, (0, 0)))
    exponents = exponents_of(rows)
    assert {0, 14, 163, -113} <= set(exponents.tolist())


# -- epilogues ------------------------------------------------------------------------------------


def run_epilogue(spec, arrays, alpha, beta):
    """Run it on product, out, c, bias and exponents, of which the last may be missing."""
    with DeviceCopies(STREAM) as device:
        names = ("product", "out", "c", "bias", "scales_a", "scales_b")
        at = {name: device.put(x) for name, x in zip(names, arrays, strict=False)}
        queue_all(prepare_epilogue(spec, 0), Addresses(**at, alpha=alpha, beta=beta), STREAM)
        device.fetch()


def check_epilogue(
    rng,
    product,
    out,
    c=None,
    bias=None,
    *,
    shape=(2, 19, 24),
    out_layout="rows",
    c_layout="rows",
    pad=0,
    activation=None,
    scaled=False,
    alpha=1.0,
    beta=0.0,
    offset=0,
    c_offset=0,
    bias_stride=1,
):
    """Make a result and compare all that is written; GELU within the error of the hyperbolic tangent."""
    *batch, rows, cols = shape
    values = np.zeros((*batch, rows, cols + pad), NUMPY_DTYPES[product])
    numbers = random_numbers(rng, product, values.size)
    values[...] = (numbers if product is D.INT32 else with_nans(numbers)).reshape(values.shape)
    memory = aligned(values.size, values.dtype)
    memory[:] = values.reshape(-1)
    target = lay_out(np.zeros(1, NUMPY_DTYPES[out]), shape, out_layout, offset)
    whole = owner_of(target).reshape(-1)
    before = whole.copy()
    addend = lay_out(random_numbers(rng, c, 1 << 12), shape, c_layout, c_offset) if c else None
    added = random_numbers(rng, bias, max(1, cols * bias_stride))[::bias_stride] if bias else None
    row = rng.integers(-113, 164, (*batch, rows), np.int32)
    col = rng.integers(-113, 164, (*batch, cols), np.int32)
    spec = Epilogue(
        product, cols + pad, stack_of(target, out), stack_of(addend, c) if addend is not None and c else None,
        OperandSpec(bias, (cols,), (bias_stride,)) if bias else None, activation, scaled,
    )  # fmt: skip
    exponents = row[..., :, None] + col[..., None, :] if scaled else None
    run_epilogue(
        spec, [memory, target, addend, added, *([row, col] if scaled else [])], alpha, beta
    )
    want = with_epilogue(spec, values[..., :rows, :cols], addend, added, exponents, alpha, beta)
    if activation == "gelu":
        # Two units in the last place of the result, and of 1 where 1 + tanh cancels.
        u = np.finfo(values.dtype).eps
        coarse = float(ml_dtypes.finfo(want.dtype).eps)
        got, wide = target.astype(np.float64), want.astype(np.float64)
        with np.errstate(invalid="ignore"):
            near = np.abs(got - wide) <= 2 * coarse * np.abs(wide) + 8 * u
        assert (near | (got == wide) | (np.isnan(got) & np.isnan(wide))).all()
    else:
        assert_same_bits(target.copy(), want)
    target[...] = 0
    assert_same_bits(whole, before)


@pytest.mark.feature("kernels that apply epilogues")
@pytest.mark.parametrize(("product", "out"), RESULTS, ids=str)
@pytest.mark.parametrize("out_layout", ["rows", "columns", "every third", "backwards"])
@pytest.mark.sampled(2)
def test_results(product, out, out_layout, rng):
    for pad in (0, 8, 1):
        check_epilogue(rng, product, out, out_layout=out_layout, pad=pad, shape=(2, 3, 19, 24))


def float8_neighbours(dtype, product):
    """Numbers of a float8 type, the ties between them, and the numbers of a wider type next to both, of either sign."""
    codes = np.arange(1 << 7, dtype=np.uint8).view(NUMPY_DTYPES[dtype]).astype(np.float64)
    codes = np.sort(codes[np.isfinite(codes)])
    beyond = codes[-1] + np.array([1, 2, 4]) * (codes[-1] - codes[-2])
    values = np.concatenate([codes, beyond])
    values = np.concatenate([values, (values[1:] + values[:-1]) / 2]).astype(NUMPY_DTYPES[product])
    near = [
        values,
        np.nextafter(values, values.dtype.type(np.inf)),
        np.nextafter(values, values.dtype.type(0)),
    ]
    found = np.concatenate([*near, oracles.nans(values.dtype), np.array([np.inf], values.dtype)])
    return np.concatenate([found, -found]).reshape(1, -1)


@pytest.mark.feature("kernels that apply epilogues")
@pytest.mark.parametrize("product", [D.FLOAT32, D.FLOAT64], ids=str)
@pytest.mark.parametrize("dtype", FLOAT8, ids=str)
def test_results_in_float8_are_rounded_once(product, dtype):
    """To nearest, ties to even; beyond the largest number and half a step to NaN (E4M3) and infinity (E5M2)."""
    values = float8_neighbours(dtype, product)
    out = np.zeros(values.shape, NUMPY_DTYPES[dtype])
    run_epilogue(Epilogue(product, values.size, stack_of(out, dtype)), [values, out], 1.0, 0.0)
    fmt = dtype.format
    assert fmt is not None
    # Numbers as whole multiples of the last digit's value, which rint rounds as float8 is; both steps are exact.
    with np.errstate(all="ignore"):
        wide = values.astype(np.float64)
        step = np.exp2(
            np.maximum(np.frexp(np.where(np.isfinite(wide), wide, 0))[1] - 1, fmt.emin)
            - fmt.precision
            + 1
        )
        want = np.rint(wide / step) * step
        want[np.abs(want) > fmt.largest] *= np.inf if fmt.has_infinity else np.nan
    np.testing.assert_array_equal(oracles.widen(out), want)
    np.testing.assert_array_equal(np.signbit(out), np.signbit(values))


@pytest.mark.feature("kernels that apply epilogues")
@pytest.mark.parametrize(("product", "addend"), ADDENDS, ids=str)
def test_factors_addend_and_bias(product, addend, rng):
    factors = [(1, 1), (1, 0), (-1.3, 0.7)]
    if product.is_complex:
        factors.append((0.3 - 2j, 1j))
    for alpha, beta in factors:
        check_epilogue(rng, product, product, addend, alpha=alpha, beta=beta)
    check_epilogue(rng, product, product, addend, addend, alpha=0.1, beta=3)
    check_epilogue(rng, product, product, None, addend, bias_stride=3)


def test_addends_that_are_broadcast_unread_or_the_result(rng):
    product = random_numbers(rng, D.FLOAT32, 2 * 8 * 16).reshape(2, 8, 16)

    def check(c, beta, out, dtype=D.FLOAT32):
        want = (product + (c.astype(np.float32) * np.float32(beta) if beta else 0)).astype(
            out.dtype
        )
        run_epilogue(
            Epilogue(D.FLOAT32, 16, stack_of(out, dtype), stack_of(c, dtype)),
            [product, out, c],
            1.0,
            beta,
        )
        assert_same_bits(out, want)

    for shape in ((16,), (8, 1), (2, 1, 1), (1, 8, 16)):
        c = random_numbers(rng, D.FLOAT32, int(np.prod(shape))).reshape(shape)
        check(np.broadcast_to(c, product.shape), 2.0, np.zeros_like(product))
    check(np.full_like(product, np.nan), 0.0, np.zeros_like(product))  # not read where beta is 0
    out = random_numbers(rng, D.FLOAT16, product.size).reshape(product.shape)
    check(out, 1.0, out, D.FLOAT16)


@pytest.mark.parametrize("product", [D.FLOAT32, D.COMPLEX64])
@pytest.mark.parametrize("out_layout", ["rows", "columns"])
def test_powers_of_two_are_undone(product, out_layout, rng):
    """With exponents whose sum is beyond float32's, results that overflow and results that underflow."""
    factors = [1, -0.3, 1e30, 1e-30, 0.0]
    for alpha in factors + ([2 - 0.7j] if product.is_complex else []):
        for shape in ((2, 19, 24), (7, 5)):
            check_epilogue(
                rng, product, product, product, product, shape=shape, out_layout=out_layout, scaled=True,
                alpha=alpha, beta=0.5, pad=3,
            )  # fmt: skip


@pytest.mark.feature("kernels that apply epilogues")
@pytest.mark.parametrize("out", [*REAL, D.FLOAT64])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("scaled", [False, True])
def test_activations(out, activation, scaled, rng):
    if out is D.FLOAT64:
        check_epilogue(rng, D.FLOAT64, out, activation=activation)
    else:
        check_epilogue(
            rng, D.FLOAT32, out, None, out, activation=activation, alpha=2.5, scaled=scaled
        )


@pytest.mark.feature("kernels that apply epilogues")
@pytest.mark.parametrize("bias", [D.INT8, D.INT32])
@pytest.mark.parametrize("activation", [None, "relu"])
def test_integers(bias, activation, rng):
    for pad in (0, 8, 3):
        check_epilogue(rng, D.INT32, D.INT32, None, bias, activation=activation, pad=pad)


@pytest.mark.parametrize("scaled", [False, True])
def test_results_of_many_dimensions(scaled, rng):
    """Five dimensions of which no two are one: more than a launch walks."""
    check_epilogue(
        rng, D.FLOAT32, D.FLOAT32, shape=(3, 2, 3, 2, 2, 5, 8), out_layout="gaps", scaled=scaled
    )


@settings(max_examples=60)
@given(data=st.data())
def test_any_result(data):
    def draw(*values):
        return data.draw(st.sampled_from(values))

    extents = st.tuples(st.integers(0, 40), st.integers(0, 40))
    check_epilogue(
        np.random.default_rng(data.draw(st.integers(0, 1 << 30))),
        D.FLOAT32, draw(D.FLOAT32, D.FLOAT16), draw(None, D.FLOAT16), draw(None, D.FLOAT16),
        shape=(*data.draw(st.lists(st.integers(0, 3), max_size=4)), *data.draw(extents)),
        out_layout=draw(*LAYOUTS), c_layout=draw(*LAYOUTS), pad=draw(*range(10)), scaled=draw(False, True),
        alpha=draw(1.0, 0.3), beta=draw(0.0, 1.0, -0.7), offset=draw(*range(4)), c_offset=draw(*range(4)),
    )  # fmt: skip


# -- plans ----------------------------------------------------------------------------------------


def every_plan(mode):
    """Yield plans for all element types, on arrays of which every second element counts: none is left in place."""

    def spec(dtype, *shape):
        return OperandSpec(dtype, shape, (2 * shape[-1], 2)[-len(shape) :])

    operands = [dtype for dtype in D if dtype.results]
    for a, b, out, addend, activation in product(
        operands, operands, D, (None, *D), (None, *ACTIVATIONS)
    ):
        c = spec(addend, 6, 8) if addend and a is not D.INT8 else None
        problem = GemmProblem(
            spec(a, 6, 10), spec(b, 10, 8), out, spec(out, 6, 8), c, spec(addend, 8) if addend else None,
            has_beta=c is not None, activation=activation,
        )  # fmt: skip
        try:
            yield plan_gemm(problem, gpu(), mode)
        except LowprecError:  # there is no such product
            continue


@pytest.mark.sampled(4)
@pytest.mark.parametrize("mode", available_modes(), ids=str)
def test_plans_use_only_tested_packings_and_epilogues(mode):
    asked = []
    for plan in every_plan(mode):
        call = plan.call
        assert call is not None
        for x in filter(None, (call.pack_a, call.pack_b)):
            asked.append(
                (x.source.dtype, x.dtype, x.scaled, x.complex_as) if x.rule is None else x.rule
            )
            lines, elements = PACKED[x.complex_as]
            assert x.leading_dimension >= x.source.cols * elements
            assert x.padded_rows >= x.source.rows * lines
        e = epilogue(plan, call)
        # the type of the arithmetic
        product_dtype = D.FLOAT32 if any(e.factors) else e.product_dtype
        assert (product_dtype, e.out.dtype) in RESULTS
        added = {(product_dtype, x.dtype) for x in (e.c, e.bias) if x}
        integers = {(D.INT32, D.INT8), (D.INT32, D.INT32)} if e.c is None else set()
        assert added <= {*ADDENDS, *integers}
        assert not e.scaled or product_dtype in (D.FLOAT32, D.COMPLEX64)
        legal = {D.FLOAT32: {*ACTIVATIONS}, D.FLOAT64: {*ACTIVATIONS}, D.INT32: {"relu"}}
        assert e.activation in {None, *legal.get(product_dtype, ())}
    assert len(asked) > 100
    assert set(asked) <= {*EVERY_PACKING, *QUANTIZED}


# -- non-finite results --------------------------------------------------------------------------


@pytest.mark.feature("kernels that pack operands")
@pytest.mark.parametrize(
    ("product", "a", "b"),
    [(D.FLOAT32, D.FLOAT32, D.FLOAT32), (D.FLOAT32, D.BFLOAT16, D.FLOAT32), (D.COMPLEX64, D.COMPLEX64, D.FLOAT32)],
    ids=str,
)  # fmt: skip
def test_nonfinite_results_are_recomputed(product, a, b):
    """And nothing else: batches, any strides, a product with padding; small integers, so that sums are exact."""
    rng = np.random.default_rng(0)
    left = rng.integers(-3, 4, (2, 3, 5, 8)).astype(NUMPY_DTYPES[a])[:, ::2, ::-1, ::2]
    right = rng.integers(-3, 4, (2, 1, 6, 4)).astype(NUMPY_DTYPES[b]).swapaxes(-1, -2)
    right = np.broadcast_to(right, (2, 2, 4, 6))
    sums = np.full((2, 2, 5, 8), 7, NUMPY_DTYPES[product])
    sums[0, 0, 1, 2], sums[1, 1, 4, 5], sums[0, 1, 0, 0] = np.nan, np.inf, -np.inf
    want = sums.copy()
    exact = left.astype(NUMPY_DTYPES[product]) @ right.astype(NUMPY_DTYPES[product])
    again = ~np.isfinite(sums)
    want[again] = exact[again[..., :6]]
    steps = prepare_recomputing(product, 8, stack_of(left, a), stack_of(right, b), 0)
    with DeviceCopies(STREAM) as device:
        at = {name: device.put(x) for name, x in {"product": sums, "a": left, "b": right}.items()}
        queue_all(steps, Addresses(**at), STREAM)
        device.fetch()
    np.testing.assert_array_equal(sums, want)
