"""Plans: what each problem becomes, what is refused, and how a plan prints."""

import dataclasses
import json
import pickle

import pytest

from lowprec.backends.cpu.kernel_rows import kernels_of
from lowprec.errors import DTypeError, SettingError, ShapeError, UnsupportedError
from lowprec.formats import OPERAND_DTYPES, DType
from lowprec.modes import MathMode, ModeSource, ResolvedMode, available_modes, row
from lowprec.planning import Capabilities, GemmProblem, OperandSpec, parse_activation, plan_gemm
from lowprec.planning.bounds import MAX_K_INT8
from support import machines
from support.machines import AMX, AVX2, AVX512, BARE, ROWS

F64, F32, F16, BF16 = DType.FLOAT64, DType.FLOAT32, DType.FLOAT16, DType.BFLOAT16
C64, C128, I8, I32 = DType.COMPLEX64, DType.COMPLEX128, DType.INT8, DType.INT32

NEON = Capabilities(
    "cpu",
    "a CPU with NEON",
    kernels_of("aarch64"),
    frozenset({"fp32_neon", "bf16_neon", "int8_neon"}),
)


def array(dtype, *shape):
    return OperandSpec.contiguous(dtype, shape)


def problem(a, b=None, size=512, **kwargs):
    return GemmProblem(array(a, size, size), array(b or a, size, size), **kwargs)


def plan(p, mode=MathMode.FP32, capabilities=BARE):
    return machines.report_on(plan_gemm(p, capabilities, mode))


@pytest.mark.parametrize(
    ("dtype", "mode", "avx2", "avx512", "amx", "neon"),
    [
        (F64, MathMode.FP32, "numpy", "numpy", "numpy", "numpy"),
        (F32, MathMode.FP32, "fp32_avx2", "fp32_avx512", "fp32_avx512", "fp32_neon"),
        (F32, MathMode.FP32_PEDANTIC, "fp32_avx2", "fp32_avx512", "fp32_avx512", "fp32_neon"),
        (F32, MathMode.FP64, "numpy", "numpy", "numpy", "numpy"),
        (F32, MathMode.TF32, "fp32_avx2", "fp32_avx512", "bf16_amx_pair", "fp32_neon"),
        (F32, MathMode.FP16, "fp32_avx2", "fp32_avx512", "bf16_amx_pair", "fp32_neon"),
        (F32, MathMode.BF16, "fp32_avx2", "bf16_avx512", "bf16_amx", "bf16_neon"),
        (F32, MathMode.BF16X3, "fp32_avx2", "bf16_avx512", "bf16_amx", "bf16_neon"),
        (F32, MathMode.TF32X3, "fp32_avx2", "fp32_avx512", "bf16_amx_pair", "fp32_neon"),
        (C64, MathMode.FP32, "fp32_avx2", "fp32_avx512", "fp32_avx512", "fp32_neon"),
        (C64, MathMode.TF32, "fp32_avx2", "fp32_avx512", "bf16_amx_pair", "fp32_neon"),
        (C64, MathMode.BF16, "fp32_avx2", "bf16_avx512", "bf16_amx", "bf16_neon"),
        (C128, MathMode.BF16, "numpy", "numpy", "numpy", "numpy"),
        (F16, MathMode.FP32, "fp32_avx2", "fp32_avx512", "bf16_amx_pair", "fp32_neon"),
        (BF16, MathMode.FP32, "fp32_avx2", "bf16_avx512", "bf16_amx", "bf16_neon"),
        (I8, MathMode.FP32, "int8_avx2", "int8_avx512", "int8_amx", "int8_neon"),
    ],
)
def test_the_kernel_is_the_best_that_the_device_has(dtype, mode, avx2, avx512, amx, neon):
    p = problem(dtype)
    found = [plan(p, mode, c).kernel for c in (BARE, AVX2, AVX512, AMX, NEON)]
    assert found == ["numpy", avx2, avx512, amx, neon]


@pytest.mark.parametrize(
    "mode", [MathMode.FP32, MathMode.TF32, MathMode.BF16, MathMode.BF16X6, MathMode.FP16X3]
)
@pytest.mark.parametrize("dtype", [F32, C64, BF16, F16, I8])
def test_the_kernel_does_not_depend_on_the_extents(dtype, mode):
    shapes = [((1, k), (k, 1)) for k in (1, 16, 5000)]
    shapes += [((m, 64), (64, n)) for m, n in ((1, 1), (3, 2000), (2000, 3), (5000, 5000))]
    shapes += [((99, m, 32), (99, 32, 8)) for m in (1, 8, 300)]
    shapes += [((2**31, 1), (1, 1))]
    for able in (AVX2, AVX512, AMX, NEON):
        found = {
            plan(GemmProblem(array(dtype, *a), array(dtype, *b)), mode, able).kernel
            for a, b in shapes
        }
        assert len(found) == 1


def test_chunks_that_are_asked_for_go_to_a_kernel_that_does_not_choose_its_own():
    assert plan(problem(F32), MathMode.BF16X3, AMX).kernel == "bf16_amx"
    made = plan(problem(F32, k_chunk=256), MathMode.BF16X3, AMX)
    assert (made.kernel, made.k_chunk) == ("numpy", 256)
    assert "bf16_amx sets its own chunks of k and does not support k_chunk=" in made.kernel_reason


@pytest.mark.parametrize(
    ("dtype", "mode", "capabilities", "products", "parts"),
    [
        (F32, MathMode.TF32, BARE, 1, 1),
        (F32, MathMode.TF32, AMX, 4, 2),
        (F32, MathMode.BF16, AMX, 1, 1),
        (C64, MathMode.BF16, BARE, 1, 1),
        (C64, MathMode.BF16, AMX, 4, 1),
        (C64, MathMode.TF32, AMX, 16, 2),
        (C64, MathMode.FP32, AMX, 4, 1),
        (C64, MathMode.FP32, BARE, 1, 1),
    ],
)
def test_products_are_those_that_the_kernel_runs(dtype, mode, capabilities, products, parts):
    made = plan(problem(dtype), mode, capabilities)
    assert (made.products, made.parts) == (products, parts)
    assert ("four real products" in made.kernel_reason) is (products in (4, 16) and dtype is C64)
    # What the caller asked for costs the same, however it is computed.
    assert made.flops == (8 if dtype is C64 else 2) * 512**3


@pytest.mark.parametrize(
    ("a", "b", "mode", "a_becomes", "b_becomes"),
    [
        (F32, F32, MathMode.FP32, "float32, as it is", "float32, as it is"),
        (F32, F32, MathMode.BF16, "bfloat16, held in float32", "bfloat16, held in float32"),
        (F16, F32, MathMode.BF16, "bfloat16, held in float32", "bfloat16, held in float32"),
        (
            BF16,
            F32,
            MathMode.BF16,
            "bfloat16 values, unchanged, held in float32",
            "bfloat16, held in float32",
        ),
        (
            BF16,
            F32,
            MathMode.FP16,
            "float16, held in float32, each row scaled by a power of two",
            "float16, held in float32, each column scaled by a power of two",
        ),
        (F64, F32, MathMode.BF16, "float64, as it is", "float32 values, unchanged"),
        (F16, BF16, MathMode.FP32, "float16 values, unchanged", "bfloat16 values, unchanged"),
        (I8, I8, MathMode.BF16, "int8, as it is", "int8, as it is"),
    ],
)
def test_types_of_the_operands(a, b, mode, a_becomes, b_becomes):
    made = plan(problem(a, b), mode)
    assert (made.a_becomes, made.b_becomes) == (a_becomes, b_becomes)


@pytest.mark.parametrize("dtype", [F64, F16, BF16, C128, I8])
@pytest.mark.parametrize("mode", available_modes())
def test_a_mode_leaves_other_storage_alone_and_says_so(dtype, mode):
    if row(mode).acts(dtype):
        return
    made = plan(problem(dtype), mode, AMX)
    plain = plan(problem(dtype), MathMode.FP32, AMX)
    assert not made.mode_has_effect
    assert f"the mode {mode} has no effect" in made.note
    assert (made.kernel, made.bound, made.a_becomes) == (plain.kernel, plain.bound, plain.a_becomes)


@pytest.mark.parametrize(
    ("dtype", "mode", "compute_type"),
    [
        (F32, MathMode.FP32, "COMPUTE_32F"),
        (F32, MathMode.FP32_PEDANTIC, "COMPUTE_32F_PEDANTIC"),
        (C64, MathMode.TF32, "COMPUTE_32F_FAST_TF32"),
        (F64, MathMode.TF32, "COMPUTE_64F"),
        (F16, MathMode.TF32, "COMPUTE_32F on float16 data"),
        (BF16, MathMode.TF32, "COMPUTE_32F on bfloat16 data"),
        (I8, MathMode.TF32, "COMPUTE_32I"),
    ],
)
def test_compute_type(dtype, mode, compute_type):
    assert plan(problem(dtype), mode).compute_type == compute_type


@pytest.mark.parametrize("compute", OPERAND_DTYPES)
def test_every_legal_result_type_is_planned_and_no_other(compute):
    assert plan(problem(compute)).out_dtype is compute.results[0]
    for dtype in DType:
        if dtype in compute.results:
            assert plan(problem(compute, out_dtype=dtype)).out_dtype is dtype
            out = array(dtype, 512, 512)
            assert plan(problem(compute, out=out)).out_dtype is dtype
        else:
            with pytest.raises(
                DTypeError, match=f"out_dtype {dtype} is not supported .* supported:"
            ):
                plan(problem(compute, out_dtype=dtype))


@pytest.mark.parametrize(
    ("p", "error", "words"),
    [
        (problem(I8, F32), DTypeError, "int8 and float32 have no common type"),
        (problem(I32), DTypeError, "a has dtype int32; supported: float64, float32"),
        (problem(DType.FLOAT8_E4M3FN, out_dtype=F64), DTypeError,
         "supported: bfloat16 or float32 or float16 or float8_e4m3fn or float8_e5m2"),
        (problem(F64, DType.FLOAT8_E5M2, out_dtype=DType.FLOAT8_E5M2), DTypeError, "supported: float64$"),
        (problem(F32, out_dtype=F16, out=array(F32, 512, 512)), DTypeError,
         "out has dtype float32, but the result has dtype float16"),
        (problem(F32, out=array(F64, 512, 512)), DTypeError,
         "^out of dtype float64 is not supported for .* supported: float32 or"),
        (problem(F32, out=array(F32, 512, 1)), ShapeError, r"out has shape \(512, 1\)"),
        (problem(F32, bias=array(F32, 1)), ShapeError, r"bias has shape \(1,\), but must have shape \(512,\)"),
        (problem(F32, c=array(F32, 2, 512, 512)), ShapeError, "c has shape .* does not broadcast"),
        (problem(F32, bias=array(F64, 512)), DTypeError,
         "bias has dtype float64, but is added in float32; it may be float32, float16, bfloat16"),
        (problem(F64, c=array(C64, 512)), DTypeError, "c has dtype complex64, but is added in float64"),
        (problem(I8, bias=array(F32, 512)), DTypeError, "it may be int8, int32"),
        (problem(I8, has_alpha=True), UnsupportedError, "alpha cannot be used with int8 operands"),
        (problem(I8, c=array(I32, 512)), UnsupportedError, "beta and c cannot be used with int8 operands"),
        (problem(I8, activation="gelu"), UnsupportedError, "activation gelu cannot be used with int8"),
        (problem(C64, activation="relu"), UnsupportedError, "relu is not defined for complex64"),
        (GemmProblem(array(I8, 1, MAX_K_INT8 + 1), array(I8, MAX_K_INT8 + 1, 1)), UnsupportedError,
         "k = 131072: sums of more than 131071 products may overflow int32"),
        (GemmProblem(array(F32, 2, 3), array(F32, 4, 5)), ShapeError, "size 4 is different from 3"),
        (GemmProblem(array(F32, 2, 1), array(F32, 4, 5)), ShapeError, "size 4 is different from 1"),
        (GemmProblem(array(F32, 2, 3), array(F32, 1, 5)), ShapeError, "size 1 is different from 3"),
    ],
)  # fmt: skip
def test_impossible_products_are_refused_before_any_work(p, error, words):
    with pytest.raises(error, match=words):
        plan(p)


def test_the_bound_is_that_of_the_scheme():
    made = plan(GemmProblem(array(F32, 3, 5), array(F32, 5, 11)), MathMode.BF16X6)
    assert dataclasses.replace(made, mode=MathMode.FP32_EMULATED).bound == made.bound


@pytest.mark.parametrize("dtype", [F32, F16, BF16])
@pytest.mark.parametrize("shape", [(), (512,), (1, 512), (512, 1), (512, 512)])
def test_c_broadcasts_and_may_be_narrower(dtype, shape):
    made = plan(problem(F32, c=array(dtype, *shape), has_beta=True))
    assert made.bytes_moved == 3 * 4 * 512**2 + array(dtype, *shape).stored_bytes


def test_a_c_without_beta_is_not_read():
    assert plan(problem(F32, c=array(F32, 512, 512))).bytes_moved == plan(problem(F32)).bytes_moved


@pytest.mark.parametrize("name", ["swish", "", 3])
def test_an_unknown_activation_is_refused_with_the_legal_ones(name):
    with pytest.raises(SettingError, match="choose one of: relu, gelu, None"):
        parse_activation(name)


STEPPED = OperandSpec(F32, (512, 512), (1024, 2))
TRANSPOSED = OperandSpec(F32, (512, 512), (1, 512))
HALF = dataclasses.replace(STEPPED, dtype=F16)


@pytest.mark.parametrize(
    ("p", "mode", "capabilities", "copied"),
    [
        (GemmProblem(TRANSPOSED, TRANSPOSED), MathMode.FP32, BARE, []),
        (GemmProblem(STEPPED, TRANSPOSED), MathMode.FP32, BARE, ["a"]),
        (problem(F32, out=STEPPED), MathMode.FP32, BARE, ["out"]),
        # Rounded and widened operands are new arrays, and compiled kernels read and write any strides.
        (GemmProblem(STEPPED, STEPPED), MathMode.TF32, BARE, []),
        (GemmProblem(HALF, HALF), MathMode.FP32, BARE, []),
        (GemmProblem(STEPPED, STEPPED, out=STEPPED), MathMode.BF16, AMX, []),
    ],
)
def test_copies_are_made_only_where_blas_cannot_express_the_strides(p, mode, capabilities, copied):
    copies = plan(p, mode, capabilities).copies
    assert [(copy.operand, copy.nbytes) for copy in copies] == [
        (name, 4 * 512**2) for name in copied
    ]
    assert all("BLAS cannot" in copy.reason for copy in copies)


def test_plans_are_cached_hashable_and_picklable():
    first = plan_gemm(problem(F32), BARE, MathMode.TF32)
    assert plan_gemm(problem(F32), BARE, MathMode.TF32) is first
    assert plan_gemm(problem(F32), BARE, MathMode.BF16) is not first
    assert plan_gemm(problem(F32), AVX2, MathMode.TF32) is not first
    assert hash(first) == hash(dataclasses.replace(first))
    assert pickle.loads(pickle.dumps(first)) == first
    report = machines.report_on(first)
    assert hash(report) == hash(machines.report_on(first))
    assert pickle.loads(pickle.dumps(report)) == report


@pytest.mark.parametrize(
    "shapes",
    [
        ((3, 5, 7), (2, 1, 7, 9)),
        ((0, 3), (3, 2)),
        ((2, 0), (0, 2)),
        ((0, 2, 3), (3, 2)),
        ((3,), (3,)),
    ],
)
@pytest.mark.parametrize("capabilities", [BARE, AVX2, AMX])
@pytest.mark.parametrize("dtype", OPERAND_DTYPES)
def test_any_shapes_are_planned_and_printed_in_80_columns(shapes, capabilities, dtype):
    a, b = (array(dtype, *s) for s in shapes)
    for mode in available_modes():
        text = str(plan(GemmProblem(a, b), mode, capabilities))
        assert text.startswith(f"{dtype} {shapes[0]} @ ")
        assert max(map(len, text.splitlines())) <= 80


def test_flops_bytes_and_intensity():
    made = plan(GemmProblem(array(F32, 8, 256, 128), array(F32, 128, 64)))
    assert made.flops == 2 * 8 * 256 * 128 * 64
    assert made.bytes_moved == 4 * (8 * 256 * 128 + 128 * 64 + 8 * 256 * 64)
    assert made.arithmetic_intensity == made.flops / made.bytes_moved


def test_to_dict_is_ready_for_json():
    made = plan(problem(F32, bias=array(F32, 512), activation="gelu"), MathMode.TF32, AMX)
    plain = json.loads(json.dumps(made.to_dict(), allow_nan=False))
    assert plain["mode"] == "tf32"
    assert plain["problem"]["a"] == {
        "dtype": "float32",
        "shape": [512, 512],
        "strides": [512, 1],
        "blocks": None,
        "inner_offsets": None,
    }
    assert plain["kernel"] == "bf16_amx_pair"
    assert plain["bound"]["relative"] == made.bound.relative
    assert plain["resolved"]["source"] == "default"


def test_an_infinite_bound_is_null_in_json():
    made = plan(GemmProblem(array(F32, 1, 2**24), array(F32, 2**24, 1)))
    assert made.to_dict()["bound"]["relative"] is None


def test_a_plan_prints_as_a_table(monkeypatch):
    a = array(F32, 8, 512, 1001)
    b = OperandSpec(F32, (1001, 256), (1, 1001))
    p = GemmProblem(a, b, bias=array(F32, 256), activation="relu")
    resolved = ResolvedMode(
        MathMode.TF32,
        ModeSource.CONTEXT,
        reasons=("with math_mode('tf32') is the innermost scope.",),
    )
    made = dataclasses.replace(plan(p, MathMode.TF32, AMX), resolved=resolved)
    monkeypatch.setattr(type(made), "advice", ("k = 1001 is odd: pad",))
    assert str(made) == TABLE


TABLE = """\
float32 (8, 512, 1001) @ float32 (1001, 256) -> float32 (8, 512, 256)
  device        cpu: a CPU with AMX
  mode          tf32, from with math_mode(...)
  because       with math_mode('tf32') is the innermost scope.
  a becomes     TF32 (8-bit exponent, 10-bit mantissa), as the exact sum of 2
                bfloat16 parts
  b becomes     TF32 (8-bit exponent, 10-bit mantissa), as the exact sum of 2
                bfloat16 parts
  products      4, each operand in 2 parts
  kernel        bf16_amx_pair: bfloat16 tile units (AMX)
  compute type  COMPUTE_32F_FAST_TF32
  fallback      NaN and infinite elements of the result are recomputed in FP32
  layout        m 4096, n 256, k 1001, the batch as rows of one product
    a           row-major, leading dimension 1001, op N
    b           col-major, leading dimension 1001, op T
    out         row-major, leading dimension 256, op N
  epilogue      bias (float32 (256,)), relu
  copies        none
  work          2.1 Gflop, 21.6 MB moved, 97.1 flop/B
  error         at most 0.000979 |A| |B| (Frobenius norms)
  because       (1 + 2^-11)^2 (1 + gamma_40) - 1; gamma_d = d u / (1 - d u)
                bounds d roundings, u = 2^-24
  probably      at most 0.000979, with probability 0.999, for rounding errors of
                mean zero
  underflow     2^-126 per element of an operand, 2^-126 per product (units that
                flush subnormals to zero)
  provided      no rounded operand or partial sum beyond float32's range
  advice        k = 1001 is odd: pad"""


def test_a_device_without_a_kernel_for_the_numbers_says_so():
    kernel = ROWS["bf16_amx"]
    device = Capabilities("ext_dev:0", "a device of one format", (kernel,))
    with pytest.raises(UnsupportedError, match=r"ext_dev:0 supports .* of tf32 numbers;"):
        plan(problem(F32), MathMode.TF32, device)
    with pytest.raises(UnsupportedError, match=r"of bfloat16 numbers \(no bfloat16 tile units"):
        plan(problem(F32), MathMode.BF16, device)
