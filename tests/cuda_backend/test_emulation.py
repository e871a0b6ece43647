"""cuBLASLt's own emulation of FP32 (``bf16x9``) and of FP64 (``fp64_emulated``): results, descriptors, workspace."""

import numpy as np
import pytest

import lowprec
from cuda_backend.cuda_reset import reset
from cuda_backend.device_fixture import TorchGpu, has_real_gpu
from lowprec.backends.cuda.models import BF16X9, FIXED_POINT
from lowprec.core import executors
from lowprec.formats import DType
from lowprec.planning import GemmProblem, OperandSpec, plan_gemm
from software_cuda.emulation import DYNAMIC, Emulation
from support import machines

KERNELS = {"bf16x9": BF16X9.name, "fp64_emulated": FIXED_POINT.name}
CASES = [
    ("bf16x9", "float32"),
    ("bf16x9", "complex64"),
    ("fp64_emulated", "float64"),
    ("fp64_emulated", "complex128"),
]
cases = pytest.mark.parametrize(("mode", "dtype"), CASES)

#: Small products are slower emulated, and then native.
SIZES = (
    [(512, 512, 512), (2048, 1040, 1024)]
    if has_real_gpu()
    else [(1, 1, 40), (33, 17, 40), (64, 48, 100)]
)


def normal(rng, shape, dtype):
    x = rng.standard_normal(shape)
    return (x + 1j * rng.standard_normal(shape) if np.dtype(dtype).kind == "c" else x).astype(dtype)


@pytest.fixture
def emulating(request):
    """A GPU on which cuBLASLt emulates."""
    if not has_real_gpu():
        return request.getfixturevalue("install")()
    gpu, mode, dtype = TorchGpu(), request.getfixturevalue("mode"), request.getfixturevalue("dtype")
    x = gpu.put(np.ones((8, 8), dtype))
    if lowprec.plan(x, x, math_mode=mode).kernel != KERNELS[mode]:
        pytest.skip(f"this GPU or cuBLAS does not emulate {dtype} products")
    return gpu


# -- results --------------------------------------------------------------------------------------


def check(gpu, a, b, mode, **rest):
    """Compare a product with one in higher precision, under the plan's bound."""
    x, y = gpu.put(a), gpu.put(b)
    plan = lowprec.plan(x, y, math_mode=mode, **rest)
    assert plan.kernel == KERNELS[mode]
    found = gpu.get(lowprec.matmul(x, y, math_mode=mode, **rest))
    wide = np.clongdouble if a.dtype.kind == "c" else np.longdouble
    exact = a.astype(wide) @ b.astype(wide)
    squares = 0.0
    for i in np.ndindex(exact.shape[:-2]):
        norms = [
            float(np.linalg.norm(np.broadcast_to(v, (*exact.shape[:-2], *v.shape[-2:]))[i]))
            for v in (a, b)
        ]
        squares += plan.bound.frobenius(*norms, *exact.shape[-2:]) ** 2
    error = float(np.sqrt((np.abs(found.astype(wide) - exact) ** 2).sum()))
    assert 0 < error <= squares**0.5


@pytest.mark.feature("{mode} of {dtype} by a compute type of cuBLAS")
@cases
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize("order", ["nn", "tn", "nt"])
def test_errors_are_within_the_bound(emulating, rng, mode, dtype, size, order):
    m, n, k = size
    a, b = normal(rng, (m, k), dtype), normal(rng, (k, n), dtype)
    a, b = (
        np.asarray(x, order="F" if o == "t" else "C") for x, o in zip((a, b), order, strict=True)
    )
    check(emulating, a, b, mode)


@cases
def test_batches_and_strides(emulating, rng, mode, dtype):
    a, b = normal(rng, (3, 20, 50), dtype), normal(rng, (50, 12), dtype)
    check(emulating, a, b, mode)
    check(emulating, a, normal(rng, (3, 50, 12), dtype), mode)
    check(emulating, normal(rng, (40, 100), dtype)[::2, ::2], b, mode)


@cases
def test_epilogues(emulating, rng, mode, dtype):
    """Small integers are exact, so wrong addends and factors give wrong numbers."""
    a, b, c, bias = (
        rng.integers(-3, 4, s).astype(dtype) for s in ((9, 8), (8, 16), (9, 16), (16,))
    )
    x, y, z, w = map(emulating.put, (a, b, c, bias))
    found = lowprec.matmul(x, y, math_mode=mode, alpha=2.0, c=z, beta=-1.0, bias=w)
    np.testing.assert_array_equal(emulating.get(found), 2 * (a @ b) - c + bias)


# -- calls ----------------------------------------------------------------------------------------


@cases
def test_one_call_without_packing(install, rng, mode, dtype):
    gpu = install()
    x, y = gpu.put(normal(rng, (24, 40), dtype)), gpu.put(normal(rng, (40, 16), dtype))
    lowprec.matmul(x, y, math_mode=mode)
    calls = gpu.software.calls
    before = len(calls)
    lowprec.matmul(x, y, math_mode=mode)
    warm = [c for c in calls[before:] if c.startswith("cublas_lt") or "Launch" in c]
    assert warm == ["cublas_lt.matmul"]
    units = dict(lowprec.plan(x, y, math_mode=mode).algorithm)["units"]
    assert units.startswith("HMMA on bfloat16" if mode == "bf16x9" else "IMMA on int8")


@cases
def test_a_profile_names_the_format_of_the_parts(install, rng, mode, dtype):
    gpu = install()
    x = gpu.put(normal(rng, (16, 16), dtype))
    with lowprec.profile() as profile:
        lowprec.matmul(x, x, math_mode=mode)
    (record,) = profile.records
    assert record.mode_has_effect
    assert (record.kernel, record.number_format) == (
        KERNELS[mode],
        "bfloat16" if mode == "bf16x9" else "int8",
    )
    assert (record.units_eligible, record.units_used, record.units_reason) == (
        True,
        True,
        "tensor cores",
    )


@cases
def test_other_devices(install, rng, mode, dtype):
    """bf16x9 splits the operands, and fp64_emulated is native FP64; no emulation descriptor is created."""
    gpu = install((9, 0), version=130002)
    x, y = gpu.put(normal(rng, (24, 40), dtype)), gpu.put(normal(rng, (40, 16), dtype))
    plan = lowprec.plan(x, y, math_mode=mode)
    assert plan.kernel == "cublaslt"
    found = gpu.get(lowprec.matmul(x, y, math_mode=mode))
    assert gpu.software.count("emulation_desc_create") == 0
    if mode == "fp64_emulated":
        np.testing.assert_array_equal(found, gpu.get(lowprec.matmul(x, y)))
    else:
        assert plan.products == 9


@pytest.mark.parametrize("dtype", ["float64", "complex128"])
def test_the_descriptor_of_fixed_point_numbers(install, rng, dtype):
    """It has the dynamic control with at most 79 bits, and lives as long as the operation's descriptor."""
    gpu = install((9, 0))
    x = gpu.put(normal(rng, (16, 16), dtype))
    lowprec.matmul(x, x, math_mode="fp64_emulated")
    lt = gpu.software.cublas_lt
    operations, emulations = (
        [o for o in lt._alive.values() if o.kind == kind]
        for kind in ("matmul_desc", "emulation_desc")
    )
    assert {int.from_bytes(o.attributes[38], "little") for o in operations} == {
        e.number for e in emulations
    }
    assert len(operations) == len(emulations) == 1
    values = {i: int.from_bytes(v, "little") for i, v in emulations[0].attributes.items()}
    assert values == {2: DYNAMIC, 3: 79}
    executors.clear_caches()
    reset()
    assert lt.live()["emulations"] == 0


@pytest.mark.parametrize("dtype", [DType.FLOAT64, DType.COMPLEX128])
@pytest.mark.parametrize(
    "shape", [(1, 1, 1), (64, 48, 100), (5000, 3000, 20000), (16384, 16384, 16384)], ids=str
)
@pytest.mark.parametrize("batch", [1, 3])
def test_the_workspace_is_the_documented_bound(dtype, shape, batch):
    m, n, k = shape
    stacked = (batch,) if batch > 1 else ()
    a, b = (OperandSpec.contiguous(dtype, (*stacked, *s)) for s in ((m, k), (k, n)))
    able = machines.gpu((9, 0), 32 << 20, FIXED_POINT.requires)
    found, plain = (
        plan_gemm(GemmProblem(a, b), able, lowprec.MathMode(x)).call
        for x in ("fp64_emulated", "fp32")
    )
    assert found is not None
    assert plain is not None
    wanted = Emulation(max_bits=79).workspace_bytes(n, m, k, batch, is_complex=dtype.is_complex)
    assert found.emulation_bytes == wanted
    assert plain.emulation_bytes == 0
