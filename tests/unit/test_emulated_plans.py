"""Plans of the modes that cuBLASLt emulates itself: where it does, what it costs, and the reasons elsewhere."""

import warnings
from types import SimpleNamespace

import numpy as np
import pytest

import lowprec
from lowprec.backends.cuda import models
from lowprec.formats import ComputeType, DType
from lowprec.modes import MathMode
from lowprec.planning import GemmProblem, OperandSpec, plan_gemm
from lowprec.planning.costs import expected_cost
from lowprec.planning.lowering.call import lower
from lowprec.planning.selection import select_mode
from support import machines

pytestmark = pytest.mark.usefixtures("clean_policy")

BF16X9, FIXED_POINT = (
    ComputeType.COMPUTE_32F_EMULATED_16BFX9,
    ComputeType.COMPUTE_64F_EMULATED_FIXEDPOINT,
)
SINGLE, DOUBLE = (DType.FLOAT32, DType.COMPLEX64), (DType.FLOAT64, DType.COMPLEX128)


def present(capability, version=131000):
    """Return the capabilities of a device with some version of cuBLAS."""
    properties = type("Properties", (SimpleNamespace,), {"__hash__": object.__hash__})
    found = properties(
        index=0, name="a GPU", capability=capability, multiprocessors=100, clock_khz=0
    )
    return models.present(found, version)


def square(n, dtype=DType.FLOAT32, **more):
    return GemmProblem(*[OperandSpec.contiguous(dtype, (n, n))] * 2, **more)


@pytest.mark.parametrize(
    ("capability", "version", "single", "double"),
    [
        ((7, 0), 120903, False, False),
        ((7, 5), 131000, False, False),
        ((8, 0), 131000, False, True),
        ((9, 0), 130100, False, True),
        # CUDA 13.0 update 1 has cuBLAS 13.0.2, update 2 has 13.1.0.
        ((9, 0), 130002, False, False),
        ((10, 0), 120803, False, False),
        ((10, 0), 120900, True, False),
        ((10, 0), 131000, True, True),
        ((11, 0), 131000, False, True),
        ((12, 1), 131000, False, True),
    ],
)
def test_devices_and_versions(capability, version, single, double):
    able = present(capability, version)
    for dtype in SINGLE:
        plan = plan_gemm(square(512, dtype), able, MathMode.BF16X9)
        assert (plan.cublas_compute_type is BF16X9) is single
        assert plan.mode_has_effect
        assert (plan.products == 1) is single
        words = "cuBLASLt emulates FP32 on compute capability 10.0 and 10.3 only, from cuBLAS 12.9"
        assert (words in plan.kernel_reason) is not single
    for dtype in DOUBLE:
        plan = plan_gemm(square(512, dtype), able, MathMode.FP64_EMULATED)
        assert plan.cublas_compute_type is (FIXED_POINT if double else ComputeType.COMPUTE_64F)
        assert plan.mode_has_effect is double
        assert (
            "cuBLASLt emulates FP64 on compute capability 8.x" in plan.kernel_reason
        ) is not double
        assert ("cuBLASLt does not emulate" in plan.note) is not double


@pytest.mark.parametrize(
    ("mode", "native", "dtypes"),
    [(MathMode.BF16X9, MathMode.FP32, SINGLE), (MathMode.FP64_EMULATED, MathMode.FP32, DOUBLE)],
)
def test_the_plan_is_that_of_native_arithmetic_with_another_compute_type(mode, native, dtypes):
    """The same data, copies and call; the bound is the native one, which cuBLAS documents to hold."""
    for dtype in dtypes:
        for problem in (square(600, dtype), square(600, dtype, k_chunk=600)):
            found, plain = (plan_gemm(problem, present((10, 0)), x) for x in (mode, native))
            assert (
                found.call.compute_type
                is lower(found).compute_type
                is (BF16X9 if dtype in SINGLE else FIXED_POINT)
            )
            for name in ("first", "second", "d", "scale_dtype", "staged", "pack_a", "pack_b"):
                assert getattr(found.call, name) == getattr(plain.call, name), name
            for name in ("schedule", "copies", "multiplied_dtype", "rounded", "accumulator"):
                assert getattr(found, name) == getattr(plain, name), name
            for name in ("relative", "probable", "operand_absolute", "result_absolute"):
                assert getattr(found.bound, name) == getattr(plain.bound, name), name
            assert (
                found.bound.formula
                == plain.bound.formula + "; cuBLAS documents its emulation to be as accurate"
            )
            assert found.bound.condition == "finite operands; " + plain.bound.condition


@pytest.mark.parametrize(
    ("mode", "dtypes"), [(MathMode.BF16X9, SINGLE), (MathMode.FP64_EMULATED, DOUBLE)]
)
def test_chunks_of_k_are_those_of_lowprec_s_products(mode, dtypes):
    """So ``k_chunk`` gives the split of bfloat16 parts, with its smaller bound."""
    for dtype in dtypes:
        found, other = (
            plan_gemm(square(600, dtype, k_chunk=256), present(c), mode) for c in ((10, 0), (7, 5))
        )
        assert found.kernel == "cublaslt"
        assert found.schedule == other.schedule
        assert "sets its own chunks of k and does not support k_chunk=" in found.kernel_reason
        assert found.cublas_compute_type is (
            ComputeType.COMPUTE_32F if dtype in SINGLE else ComputeType.COMPUTE_64F
        )


def test_fp32_emulated_takes_the_emulation_where_it_is_the_cheapest():
    found = plan_gemm(square(4096), present((10, 0)), MathMode.FP32_EMULATED)
    assert (found.runs_as, found.kernel) == (MathMode.BF16X9, "cublaslt_bf16x9")
    split, fp32 = (
        plan_gemm(square(4096), machines.gpu((10, 0)), m) for m in (MathMode.BF16X9, MathMode.FP32)
    )
    assert expected_cost(found) < expected_cost(split)
    # Nine products at the cost of bfloat16's, without packing.
    assert expected_cost(found) == pytest.approx(9 * expected_cost(fp32) * 51.4 / 806)
    assert "scheme        bf16x9\n" in str(machines.report_on(found))


def test_rtol_takes_bf16x9_by_the_bound_of_fp32_and_never_fp64_emulated():
    able = present((10, 0))
    bound = plan_gemm(square(2048), able, MathMode.FP32).bound.relative
    candidates = {c.mode: c for c in select_mode(square(2048), able, bound)[1]}
    assert candidates[MathMode.BF16X9].bound == bound
    assert MathMode.FP64_EMULATED not in candidates
    _, (only,) = select_mode(square(2048, DType.FLOAT64), able, 1e-9)
    assert only.mode is MathMode.FP32


def test_predictions_show_it():
    a, b = lowprec.ShapeDtype((256, 4096), "float32"), lowprec.ShapeDtype((4096, 4096), "float32")
    made = lowprec.plan(a, b, math_mode="bf16x9", device="sm_100")
    text = " ".join(str(made).split())
    assert "kernel cublaslt_bf16x9: cuBLASLt's BF16x9 emulation of FP32" in text
    assert "compute type COMPUTE_32F_EMULATED_16BFX9" in text
    assert "a becomes float32, split by cuBLASLt into bfloat16 parts" in text
    # Nine products of bfloat16 numbers at the B200's peak rate.
    assert made.roofline.arithmetic == pytest.approx(9 * 2 * 256 * 4096 * 4096 / 2250e12)
    wide = lowprec.ShapeDtype((64, 64), "float64")
    made = lowprec.plan(wide, wide, math_mode="fp64_emulated", device="rtx-5090")
    assert made.compute_type == "COMPUTE_64F_EMULATED_FIXEDPOINT"
    assert made.roofline is None, "the number of products depends on the data"
    for device, mode in (("h100", "bf16x9"), ("rtx-5090", "bf16x9"), ("t4", "fp64_emulated")):
        x = a if mode == "bf16x9" else wide
        assert lowprec.plan(x, x if x is wide else b, math_mode=mode, device=device).passed_over


@pytest.mark.parametrize(
    "dtype", ["float32", "complex64", "float16", "int8", "float64", "complex128"]
)
def test_on_the_cpu_fp64_emulated_is_the_same_as_fp32(dtype):
    """Which computes float64 operands in FP64."""
    rng = np.random.default_rng(0)
    a, b = (rng.integers(-9, 9, shape).astype(dtype) for shape in ((9, 8), (8, 7)))
    found, plain = (lowprec.plan(a, b, math_mode=mode) for mode in ("fp64_emulated", "fp32"))
    assert found.kernel == plain.kernel
    assert found.bound == plain.bound
    assert not found.mode_has_effect
    acts = dtype in ("float64", "complex128")
    assert ("cuBLASLt does not emulate" in found.note) is acts
    assert ("it acts on float64 and complex128 only" in found.note) is not acts
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", lowprec.LowprecWarning)
        result = lowprec.matmul(a, b, math_mode="fp64_emulated")
    np.testing.assert_array_equal(result, lowprec.matmul(a, b, math_mode="fp32"))


@pytest.mark.parametrize(
    ("arch", "mode", "chunk"),
    [
        ("hopper", "fp8", 128), ("ada", "fp8_rows", 128), ("blackwell", "fp8", 1000),
        ("hopper", "fp8(fast_accum=forward)", 1000), ("hopper", "fp8(fast_accum=grad_input/grad_weight)", 128),
        ("hopper", lowprec.Recipe("fp8", fast_accum=("grad_input",)).of("grad_input"), 1000),
    ],
    ids=str,
)  # fmt: skip
def test_fp8_is_summed_as_libraries_do(arch, mode, chunk):
    x = lowprec.ShapeDtype((1000, 1000), "float32")
    with lowprec.emulate(arch):
        plan = lowprec.plan(x, x, math_mode=mode)
        assert lowprec.plan(x, x, math_mode=mode, k_chunk=256).quantized.inner.k_chunk == 256
    assert plan.quantized.inner.k_chunk == chunk


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"forward": "mxfp4", "fast_accum": ("forward",)}, "fast_accum=forward has no effect on a recipe of mxfp4"),
        ({"forward": "fp8", "fast_accum": ("all",)}, "fast_accum of a recipe is a tuple of 'forward', 'grad_input'"),
    ],
)  # fmt: skip
def test_bad_fast_accumulation(given, words):
    with pytest.raises(lowprec.ModeError, match=words):
        lowprec.Recipe(**given)
