"""Plans for GPUs that are not there, and the table of models behind them."""

import json
from types import SimpleNamespace

import numpy as np
import pytest

import lowprec
from lowprec.backends.cuda import models
from lowprec.core.arguments import described, spec_of
from lowprec.modes import available_modes, row
from lowprec.planning import GemmProblem, plan_gemm
from lowprec.planning.gpus import MODELS, model_of, parse_model
from support import machines

SQUARE = lowprec.ShapeDtype((4096, 4096), "float32")
BYTES = 4096 * 4096 * 4
KEYS = [model.key for model in MODELS]

#: Flops per clock and multiprocessor by the white papers: FP32 units, and tensor cores on float16 with sums in FP32
#: (GeForce cards: half of it).
PER_CLOCK = {
    (7, 0): (128, 1024), (7, 5): (128, 1024), (8, 0): (128, 2048), (8, 6): (256, 1024), (8, 9): (256, 1024),
    (9, 0): (256, 4096), (10, 0): (256, 8192), (12, 0): (256, 1024),
}  # fmt: skip


@pytest.mark.parametrize("model", MODELS, ids=KEYS)
def test_rates_are_those_of_the_units_and_dense(model):
    """A rate with sparsity, or of sums in 16 bits, would be off by two."""
    fp32, float16 = PER_CLOCK[model.compute_capability]
    is_geforce = "GeForce" in model.name
    clocks = model.multiprocessors * model.clock_mhz * 1e6 / 1e12
    peak = model.peak_tflops
    # The data sheets of H100 and B200 assume lower clocks for tensor cores than the highest: 8 % and 6 %.
    assert peak["float32"] == pytest.approx(fp32 * clocks, rel=0.09)
    assert peak["float16"] == pytest.approx(float16 * clocks / (2 if is_geforce else 1), rel=0.09)
    assert peak.get("bfloat16", peak["float16"]) == peak["float16"]
    # Half as many TF32 numbers, twice as many FP8; int8 knows no halved rate.
    assert peak.get("tf32", peak["float16"] / 2) == pytest.approx(peak["float16"] / 2, rel=0.03)
    assert peak.get("float8_e4m3fn", 2 * peak["float16"]) == pytest.approx(
        2 * peak["float16"], rel=0.03
    )
    eight = (4 if is_geforce else 2) * peak["float16"]
    assert peak.get("int8", eight) == pytest.approx(eight, rel=0.03)


@pytest.mark.parametrize("model", MODELS, ids=KEYS)
def test_rates_of_the_formats_of_the_tensor_cores(model):
    from lowprec.planning.tensor_cores import tensor_cores_multiply

    for fmt in ("tf32", "bfloat16", "float16", "float8_e4m3fn", "int8"):
        multiplies = tensor_cores_multiply(fmt, model.compute_capability)
        assert (fmt in model.peak_tflops) is multiplies, fmt


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("h200", "h200"),
        (" RTX 4090 ", "rtx-4090"),
        ("Tesla T4", "t4"),
        ("A100 40GB", "a100-40gb"),
        ("sm_90", "h100"),
        ("sm90a", "h100"),
        ("9.0", "h100"),
        ("SM_120", "rtx-5090"),
    ],
)
def test_a_model_has_many_names(name, key):
    assert parse_model(name).key == key


@pytest.mark.parametrize(
    "name", ["h300", "", "nvidia", "cuda:0", "sm_61", "9", "9.00", None, 90, []]
)
def test_an_unknown_model_lists_the_known_ones(name):
    with pytest.raises(ValueError, match=r"choose one of: cpu, v100, t4, .*9\.0") as caught:
        lowprec.plan(SQUARE, SQUARE, device=name) if name is not None else parse_model(name)
    assert isinstance(caught.value, lowprec.LowprecError)


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("NVIDIA H200", "h200"),
        ("NVIDIA GH200 480GB", "gh200"),
        ("NVIDIA A100-SXM4-40GB", "a100-40gb"),
        ("Tesla V100-SXM2-16GB", "v100"),
        ("Tesla T4", "t4"),
        ("NVIDIA GeForce RTX 2080 Ti", "rtx-2080-ti"),
        # Cards whose rates no row has: half the L40S's, a fraction of the H200's.
        ("NVIDIA L40", None),
        ("NVIDIA H20", None),
        ("NVIDIA GeForce RTX 2080", None),
    ],
)
def test_a_present_gpu_is_known_by_its_driver_s_name(name, key):
    found = model_of(name)
    assert (found and found.key) == key


def _found(**values):
    """Properties of a GPU, as a driver reports them."""
    reported = {"index": 0, "name": "NVIDIA H200", "capability": (9, 0), "multiprocessors": 132}
    properties = type("Properties", (SimpleNamespace,), {"__hash__": object.__hash__})
    return properties(**{**reported, "clock_khz": 1_980_000, **values})


def test_the_rates_of_a_present_gpu_follow_its_clock_and_size():
    published = parse_model("h200").peak_tflops
    assert dict(models.present(_found()).peak_tflops) == pytest.approx(published)
    card = dict(
        models.present(
            _found(name="NVIDIA H100 PCIe", multiprocessors=114, clock_khz=1_755_000)
        ).peak_tflops
    )
    # NVIDIA's data sheet of the card: 51, 378, 756 and 1513 TFLOP/s.
    wanted = {"float32": 51, "tf32": 378, "bfloat16": 756, "float8_e4m3fn": 1513}
    assert {fmt: card[fmt] for fmt in wanted} == pytest.approx(wanted, rel=0.01)
    assert models.present(_found(name="NVIDIA H20")).peak_tflops == ()
    assert models.present(_found(clock_khz=0)).peak_tflops == ()
    # An unknown model of a capability between two known ones has the older one's ratio.
    between = models.present(_found(name="NVIDIA A2", capability=(8, 7)))
    assert between.flops_per_byte == parse_model("rtx-3090").flops_per_byte


@pytest.mark.parametrize("mode", ["fp32", "tf32", "bf16", "fp16"])
def test_a_prediction_is_the_plan_of_the_device(mode):
    spec = spec_of(described(SQUARE))
    there = plan_gemm(GemmProblem(spec, spec), machines.gpu((9, 0)), lowprec.MathMode(mode))
    made = lowprec.plan(SQUARE, SQUARE, math_mode=mode, device="h200")
    for name in ("call", "layout", "copies", "bound", "schedule", "flops", "kernel_row"):
        assert getattr(made, name) == getattr(there, name), name
    assert made.capabilities.predicted is True
    assert there.capabilities.predicted is False
    assert "prediction" in str(made)
    assert "prediction" not in str(there)
    assert made.algorithm == ()


def test_the_roofline_by_hand():
    made = lowprec.plan(SQUARE, SQUARE, device="h200").roofline
    assert made.arithmetic == pytest.approx(2 * 4096**3 / 67e12)
    assert made.memory == pytest.approx(3 * BYTES / 4.8e12)
    assert (made.rewriting, made.seconds) == (0.0, made.arithmetic)
    assert made.units == "float32 without tensor cores"


def test_the_roofline_of_operands_that_are_rewritten():
    made = lowprec.plan(SQUARE, SQUARE, math_mode="bf16", device="h200").roofline
    assert made.arithmetic == pytest.approx(2 * 4096**3 / 989.5e12)
    # Two operands of half the bytes, and the result; before, each is read, and written at half its size.
    assert made.memory == pytest.approx(2 * BYTES / 4.8e12)
    assert made.rewriting == pytest.approx(3 * BYTES / 4.8e12)
    assert made.seconds == pytest.approx(made.arithmetic + made.rewriting)
    staged = lowprec.plan(SQUARE, SQUARE, math_mode="fp16", device="h200").roofline
    # The product is staged, and written again.
    assert staged.rewriting == pytest.approx(5 * BYTES / 4.8e12)


def test_the_roofline_of_a_product_that_memory_bounds():
    vector = lowprec.ShapeDtype((4096,), "float32")
    made = lowprec.plan(SQUARE, vector, device="l4").roofline
    assert made.seconds == made.memory == pytest.approx((BYTES + 2 * 4096 * 4) / 300e9)


def test_numbers_that_no_tensor_core_multiplies_are_those_of_fp32_units():
    """On a V100 neither bfloat16 nor TF32."""
    half = lowprec.ShapeDtype((4096, 4096), "bfloat16")
    for made in (
        lowprec.plan(half, half, device="v100"),
        lowprec.plan(SQUARE, SQUARE, math_mode="tf32", device="v100"),
    ):
        assert made.roofline.units == "float32 without tensor cores"
        assert made.roofline.tflops == 15.7
    bytes_ = lowprec.ShapeDtype((64, 64), "int8")
    assert lowprec.plan(bytes_, bytes_, device="v100").roofline is None


def test_rtol_takes_a_mode_of_the_device():
    found = {
        key: str(lowprec.plan(SQUARE, SQUARE, rtol=1e-2, device=key).mode) for key in ("t4", "h200")
    }
    # Turing's tensor cores have no bfloat16; on Hopper float16 costs a staged result more.
    assert found == {"t4": "fp16", "h200": "bf16"}


@pytest.mark.parametrize("library", ["numpy", "torch", "jax"])
def test_arrays_of_any_library_in_host_memory(library):
    x = np.ones((24, 8), np.float32)
    made = x
    if library != "numpy":
        module = pytest.importorskip(library, reason=f"{library} is not installed")
        made = module.tensor(x) if library == "torch" else module.numpy.asarray(x)
    plan = lowprec.plan(made.T, made, math_mode="tf32", device="h200")
    assert plan.capabilities.name == "NVIDIA H200 SXM"
    assert plan.out_shape == (8, 8)
    # JAX's transpose is a new array.
    assert plan.layout.a.op == ("N" if library == "jax" else "T")


@pytest.mark.parametrize("shapes", [((0, 4), (4, 3)), ((3, 0), (0, 4)), ((2, 0, 4), (4, 3))])
def test_empty_products(shapes):
    a, b = (lowprec.ShapeDtype(shape, "float32") for shape in shapes)
    made = lowprec.plan(a, b, math_mode="fp16", device="h200")
    assert made.roofline is None
    assert made.call is None
    assert "prediction" in str(made)


@pytest.mark.parametrize("key", KEYS)
def test_predictions_read_well_and_are_json(key):
    shapes = ((3, 100, 70), (3, 70, 50))
    for mode in available_modes():
        for dtype in ("float32", "complex64", "float64", "float16", "int8"):
            if row(mode).quantizes and dtype in ("float32", "float16"):
                continue
            a, b = (lowprec.ShapeDtype(shape, dtype) for shape in shapes)
            made = lowprec.plan(a, b, math_mode=mode, device=key)
            assert max(map(len, str(made).splitlines())) <= 80
            found = json.loads(json.dumps(made.to_dict(), allow_nan=False))
            assert found["capabilities"]["source"] == parse_model(key).source
            roofline = found["roofline"]
            if roofline is not None:
                parts = max(roofline["arithmetic"], roofline["memory"]) + roofline["rewriting"]
                assert roofline["seconds"] == pytest.approx(parts)
                assert parts > 0


def test_the_cpu_is_a_device():
    assert lowprec.plan(SQUARE, SQUARE, math_mode="bf16", device="cpu") == lowprec.plan(
        SQUARE, SQUARE, math_mode="bf16"
    )
