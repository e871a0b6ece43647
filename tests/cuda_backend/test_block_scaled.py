"""Products of quantised arrays on a GPU: cuBLASLt's block-scaled modes, and widened operands."""

import gc
from copy import copy
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest

import lowprec
import software_cuda
from cuda_backend.cuda_reset import reset
from cuda_backend.device_fixture import TorchGpu, has_real_gpu
from lowprec.arrays import library_of
from lowprec.arrays.quantized import QuantizedArray
from support import oracles

BF16 = np.dtype(ml_dtypes.bfloat16)
FORMATS = ("mxfp8", "nvfp4")

#: m, n, k: rows and blocks that are not whole tiles of scales, and the last block not whole.
SHAPES = [(64, 48, 160), (16, 16, 64), (144, 16, 192), (304, 272, 1056), (16, 32, 57)]


def quantised(rng, shape, name, axis):
    """Numbers of rows of every magnitude."""
    x = rng.standard_normal(shape) * np.exp2(rng.integers(-6, 7, (*shape[:-1], 1)))
    return lowprec.quantize(x.astype(np.float32), name, axis)


def values(x):
    return x.dequantize().astype(np.float64)


def check(found, a, b, plan, factor=1.0):
    """Compare with float64 under the plan's bound, and one rounding of the arrays' scales in alpha."""
    left, right = values(a), values(b)
    norms = float(np.linalg.norm(left)) * abs(factor), float(np.linalg.norm(right))
    error = np.linalg.norm(oracles.widen(found) - factor * (left @ right))
    assert error <= plan.bound.frobenius(*norms, *found.shape[-2:]) + 2.0**-22 * norms[0] * norms[1]


@pytest.fixture
def install(install, monkeypatch):
    """The library of the simulated devices widens quantised arrays on the host."""

    def new(capability):
        gpu = install(capability)

        def widened(x):
            codes, scales = (gpu.get(y).view(np.uint8) for y in (x.codes, x.scales))
            wide = gpu.put(
                QuantizedArray(codes, scales, x.format, x.shape, x.axis, x.scale)
                ._values(1.0)
                .astype(BF16)
            )
            return library_of(wide).view(wide)

        monkeypatch.setattr(QuantizedArray, "_widened", widened)
        return gpu

    return new


def gpu_of(request, capability):
    """Return software of a compute capability, or a real GPU of one on the same side of 10.0."""
    if not has_real_gpu():
        return request.getfixturevalue("install")(capability)
    gpu = TorchGpu()
    here = gpu.torch.cuda.get_device_capability()
    if (here >= (10, 0)) is not (capability >= (10, 0)):
        pytest.skip(f"the GPU is of another compute capability: {here}")
    return gpu


@pytest.fixture
def blackwell(request):
    return gpu_of(request, (10, 0))


def runs_on_codes(plan):
    return plan.compute_type.endswith(("mxfp8 data", "nvfp4 data"))


@pytest.mark.feature("{name} by cuBLASLt's block-scaled mode")
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("out", [None, "float32"])
def test_products_of_codes(blackwell, rng, name, shape, out):
    m, n, k = shape
    a, b = quantised(rng, (m, k), name, -1), quantised(rng, (k, n), name, 0)
    x, y = blackwell.quantized(a), blackwell.quantized(b)
    plan = lowprec.plan(x, y, out_dtype=out)
    assert runs_on_codes(plan)
    # FP8 is multiplied in steps of 128 along k.
    padded = [str(copy.reasons[0]) for copy in plan.copies if copy.operand != "out"]
    words = "mxfp8 kernels multiply k in multiples of 128"
    assert padded == ([words] * 2 if name == "mxfp8" and -(-k // 32) % 4 else [])
    for _ in range(2):  # the second with the scales that the first has arranged
        check(blackwell.get(lowprec.matmul(x, y, out_dtype=out)), a, b, plan)
    check(blackwell.get(lowprec.matmul(x, y, out_dtype=out, alpha=-0.5)), a, b, plan, -0.5)


@pytest.mark.feature("{name} by cuBLASLt's block-scaled mode")
@pytest.mark.parametrize("name", FORMATS)
def test_epilogues_batches_and_results(blackwell, rng, name):
    a, b = quantised(rng, (3, 16, 128), name, -1), quantised(rng, (32, 128), name, 1)
    x, y = blackwell.quantized(a), blackwell.quantized(b).T
    product = values(a) @ values(b).T
    plan = lowprec.plan(x, y)
    assert runs_on_codes(plan)  # one product of all rows
    check(blackwell.get(lowprec.matmul(x, y)).reshape(48, 32), _rows(a), b.T, plan)
    scale = np.abs(product).max()
    bias, c = (rng.integers(-3, 4, shape).astype(BF16) for shape in ((32,), (3, 16, 32)))
    out = blackwell.put(np.zeros((3, 32, 16), BF16).swapaxes(1, 2))
    want = np.maximum(product + c.astype(np.float64) + bias.astype(np.float64), 0)
    words = {"bias": blackwell.put(bias), "c": blackwell.put(c), "beta": 1.0, "activation": "relu"}
    for target in ({}, {"out": out}):
        found = oracles.widen(blackwell.get(lowprec.matmul(x, y, **words, **target)))
        np.testing.assert_allclose(found, want, atol=2.0**-7 * (scale + 6))
    found = oracles.widen(blackwell.get(lowprec.matmul(x, y, bias=words["bias"])))
    np.testing.assert_allclose(found, product + bias.astype(np.float64), atol=2.0**-7 * (scale + 3))


@pytest.mark.parametrize(
    ("name", "activation"), [("mxfp8", None), ("mxfp8", "relu"), ("nvfp4", None), ("nvfp4", "gelu")]
)
def test_cublaslt_adds_a_bias_to_fp4_only_with_an_activation(name, activation):
    a, b = (lowprec.quantize(np.ones((128, 128), np.float32), name, axis) for axis in (1, 0))
    plan = lowprec.plan(
        a, b, bias=lowprec.ShapeDtype((128,), "bfloat16"), activation=activation, device="b200"
    )
    assert runs_on_codes(plan)
    staged = [str(copy.reason) for copy in plan.copies]
    assert bool(staged) is (name == "nvfp4" and activation is None)
    assert all("for nvfp4 only with an activation" in text for text in staged)


def _rows(x):
    shape = (-1, x.shape[-1])
    codes, scales = (y.reshape(-1, y.shape[-1]) for y in (x.codes, x.scales))
    return QuantizedArray(codes, scales, x.format, values(x).reshape(shape).shape, 1, x.scale)


@pytest.mark.feature("quantised operands, widened")
@pytest.mark.parametrize("name", [*FORMATS, "mxfp4", "fp8"])
@pytest.mark.parametrize("capability", [(9, 0), (10, 0), (12, 0)], ids=str)
def test_operands_that_are_widened(request, rng, name, capability):
    """Of other devices, formats, extents, with an ordinary array, in a true batch, with blocks along another axis."""
    gpu = gpu_of(request, capability)
    a, b = quantised(rng, (16, 64), name, -1), quantised(rng, (64, 16), name, 0)
    few, wide = quantised(rng, (5, 64), name, -1), rng.standard_normal((16, 64)).astype(BF16)
    across, narrow = quantised(rng, (64, 16), name, 1), quantised(rng, (64, 6), name, 0)
    batch = quantised(rng, (2, 16, 64), name, -1), quantised(rng, (2, 64, 16), name, 1)
    for left, right in ((a, b), (few, b), (wide, b), (a, across), (a, narrow), batch):
        x, y = (
            gpu.quantized(z) if isinstance(z, QuantizedArray) else gpu.put(z) for z in (left, right)
        )
        on_codes = (left, right) == (a, b) and name in FORMATS and capability >= (10, 0)
        assert runs_on_codes(lowprec.plan(x, y)) is on_codes
        exact = [
            values(z) if isinstance(z, QuantizedArray) else z.astype(np.float64)
            for z in (left, right)
        ]
        found = oracles.widen(gpu.get(lowprec.matmul(x, y)))
        # One rounding to bfloat16, and sums of 64 products in FP32; of FP8 on tensor cores before 10.0 with 13 bits.
        limit = (2.0**-8 + 2.0**-9) * (np.abs(exact[0]) @ np.abs(exact[1])) + 2.0**-120
        assert (np.abs(found - exact[0] @ exact[1]) <= limit).all()


REASONS = [
    ("mxfp8", "mxfp8", "h200", (64, 64, 64), "need tensor cores of compute capability 10.0"),
    ("mxfp4", "mxfp4", "b200", (64, 64, 64), "mxfp8 or nvfp4, not mxfp4 and mxfp4"),
    ("mxfp8", "nvfp4", "b200", (64, 64, 64), "mxfp8 or nvfp4, not mxfp8 and nvfp4"),
    ("nvfp4", None, "b200", (64, 64, 64), "mxfp8 or nvfp4, not nvfp4 and bfloat16"),
    (
        "nvfp4",
        "nvfp4",
        "b200",
        (64, 64, 48),
        "nvfp4 kernels need m and n in multiples of 16, and k of 32",
    ),
    (
        "mxfp8",
        "mxfp8",
        "rtx-5090",
        (64, 24, 64),
        "mxfp8 kernels need m and n in multiples of 16, and k of 32",
    ),
    (
        "mxfp8",
        "mxfp8",
        "b200",
        (8, 64, 64),
        "mxfp8 kernels need m and n in multiples of 16, and k of 32",
    ),
]


@pytest.mark.parametrize(("first", "second", "device", "shape", "words"), REASONS)
def test_a_plan_names_the_reason_to_widen(first, second, device, shape, words):
    m, n, k = shape
    a, b = np.ones((m, k), np.float32), np.ones((k, n), np.float32)
    x = lowprec.quantize(a, first)
    y = lowprec.quantize(b, second, 0) if second else b.astype(BF16)
    plan = lowprec.plan(x, y, device=device)
    assert words in plan.kernel_reason
    assert plan.compute_type == "COMPUTE_32F on bfloat16 data"
    assert {copy.operand for copy in plan.copies} == ({"a", "b"} if second else {"a"})


def test_a_plan_of_codes():
    a, b = (lowprec.quantize(np.ones((256, 256), np.float32), "mxfp8", axis) for axis in (1, 0))
    plan = lowprec.plan(a, b, device="b200")
    assert plan.kernel_reason == "cuBLASLt on a GPU"
    assert (plan.a_becomes, plan.b_becomes) == ("mxfp8, as it is",) * 2
    assert plan.roofline.units == "float8_e4m3fn on tensor cores"
    assert plan.bytes_moved == 2 * (256 * 256 + 256 * 8) + 2 * 256 * 256
    assert "keeps its scales" in str(plan.prepared)
    a, b = (lowprec.quantize(np.ones((256, 256), np.float32), "nvfp4", axis) for axis in (1, 0))
    assert lowprec.plan(a, b, device="b200").roofline is None  # no published rate is known


# -- what is known in a call ----------------------------------------------------------------------


def test_a_refused_product_is_widened(install, rng):
    gpu = install((10, 0))
    a, b = quantised(rng, (16, 64), "mxfp8", 1), quantised(rng, (64, 16), "mxfp8", 0)
    x, y = gpu.quantized(a), gpu.quantized(b)
    with (  # with a workspace, and without
        gpu.failing_call("matmul_algo_get_heuristic", status=15),
        gpu.failing_call("matmul_algo_get_heuristic", status=15),
    ):
        found = gpu.get(lowprec.matmul(x, y))
    check(found, a, b, lowprec.plan(a, b))
    rows = dict(lowprec.plan(x, y).algorithm)
    assert "block-scaled operands are widened: " in rows["fallback"]
    check(gpu.get(lowprec.matmul(x, y)), a, b, lowprec.plan(a, b))


@pytest.mark.parametrize("change", ["codes apart", "codes at an odd address", "scales apart"])
def test_codes_that_cublaslt_cannot_read(install, rng, change):
    gpu = install((10, 0))
    a, b = quantised(rng, (16, 64), "mxfp8", 1), quantised(rng, (64, 16), "mxfp8", 0)
    codes, scales = a.codes, a.scales
    if change == "codes apart":
        codes = np.repeat(codes, 2, 0)[::2]
    elif change == "scales apart":
        scales = np.repeat(scales, 2, 0)[::2]
    else:
        memory = np.zeros(codes.size + 64, np.uint8)
        start = 4 - memory.ctypes.data % 16 + 16
        codes = memory[start : start + codes.size].reshape(codes.shape)
        codes[...] = a.codes
    x = QuantizedArray(
        gpu.put_bytes(codes), gpu.put_bytes(scales), a.format, a.shape, a.axis, a.scale
    )
    y = gpu.quantized(b)
    assert "fallback" in dict(lowprec.plan(x, y).algorithm)
    check(gpu.get(lowprec.matmul(x, y)), a, b, lowprec.plan(a, b))
    # A result at an odd address, too.
    out = gpu.put(np.zeros(16 * 16 + 1, BF16)[1:].reshape(16, 16))
    check(gpu.get(lowprec.matmul(gpu.quantized(a), y, out=out)), a, b, lowprec.plan(a, b))


def test_special_values(install):
    """A block with NaN, and blocks of zeros, give what their numbers give."""
    gpu = install((10, 0))
    for name in FORMATS:
        x = np.zeros((16, 64), np.float32)
        x[0, 5], x[1, 40], x[2] = np.nan, 3.0, 1e-30
        a, b = (
            lowprec.quantize(x, name),
            lowprec.quantize(np.eye(64, 16, dtype=np.float32), name, 0),
        )
        found = oracles.widen(
            gpu.get(lowprec.matmul(gpu.quantized(a), gpu.quantized(b), out_dtype="float32"))
        )
        assert np.isnan(found[0]).all()
        np.testing.assert_array_equal(found[1:], (values(a) @ values(b))[1:])


def test_algorithms_are_measured(install, rng, tmp_path, monkeypatch):
    """On copies of the codes, which are half as many bytes as elements where they have 4 bits."""
    monkeypatch.setenv("LOWPREC_CACHE_DIR", str(tmp_path))
    gpu = install((10, 0))
    reset()
    for name in FORMATS:
        a, b = quantised(rng, (160, 64), name, 1), quantised(rng, (64, 32), name, 0)
        x, y = gpu.quantized(a), gpu.quantized(b)
        assert lowprec.autotune(x, y).timed
        check(gpu.get(lowprec.matmul(x, y)), a, b, lowprec.plan(x, y))
    stored = (tmp_path / "autotune.json").read_text()
    assert "mxfp8 128x160 ld 128" in stored
    assert "nvfp4 64x160 ld 64" in stored


@pytest.fixture
def software(install):
    """The devices of ``cupy``, too."""
    return install((10, 0))


def on_cupy(cupy, x):
    return QuantizedArray(
        cupy.asarray(x.codes), cupy.asarray(x.scales), x.format, x.shape, x.axis, x.scale
    )


def test_a_graph_needs_the_scales_in_order(cupy, rng):
    """The first product arranges them, in memory that does not belong to a graph."""
    runtime = cupy.runtime
    a, b = quantised(rng, (16, 64), "nvfp4", 1), quantised(rng, (64, 16), "nvfp4", 0)
    with cupy.cuda.Stream() as stream:
        x, y, cold = (on_cupy(cupy, z) for z in (a, b, a))
        out = cupy.empty((16, 16), BF16)
        lowprec.matmul(x, y, out=out)
        runtime.begin_capture(stream.ptr)
        with pytest.raises(lowprec.BackendError, match="scales of a quantised operand"):
            lowprec.matmul(cold, y, out=out)
        lowprec.matmul(x, y, out=out)
        graph = runtime.end_capture(stream.ptr)
        first = cupy.asnumpy(out)
        out[...] = cupy.asarray(np.zeros((16, 16), BF16))
        graph.replay(stream.ptr)
        np.testing.assert_array_equal(cupy.asnumpy(out), first)
        check(first, a, b, lowprec.plan(x, y))


class StreamedBytes(software_cuda.DeviceArray):
    """An array of uint8 known by DLPack alone, written by work on a stream and freed as soon as it is unreachable."""

    def __array_namespace__(self):
        return SimpleNamespace(int8=np.int8, permute_dims=None, reshape=None)

    def __getattr__(self, name):
        if name not in ("shape", "dtype", "nbytes", "size"):
            raise AttributeError(name)
        return getattr(self.memory, name)

    def view(self, dtype):
        found = copy(self)
        found.memory = self.memory.view(dtype)
        return found


@pytest.mark.parametrize("widened", [False, True])
def test_codes_on_another_stream(cupy, rng, widened, monkeypatch):
    """The product waits for codes, scales and widened numbers of another library, and keeps them."""
    runtime = cupy.runtime
    a, b = quantised(rng, (16, 64), "mxfp8", 1), quantised(rng, (64, 16), "mxfp8", int(widened))

    def widen(x):
        on_left = isinstance(x.codes, cupy.ndarray)
        wide = (a if on_left else b)._values(1.0).astype(BF16)
        made = cupy.asarray(wide) if on_left else software_cuda.DeviceArray(runtime, wide)
        return library_of(made).view(made)

    monkeypatch.setattr(QuantizedArray, "_widened", widen)
    plan = lowprec.plan(a, b, device="b200")
    for _ in range(2):
        with cupy.cuda.Stream():
            x = on_cupy(cupy, a)
            y = QuantizedArray(
                *(StreamedBytes(runtime, z) for z in (b.codes, b.scales)),
                b.format,
                b.shape,
                b.axis,
                b.scale,
            )
            product = lowprec.matmul(x, y)
            del x, y
            gc.collect()
            check(cupy.asnumpy(product), a, b, plan)
