"""Programs on a device: libraries' own products in and out of the guard, and lowprec inside PyTorch.

On a device the errors show TF32 and FP32. Without one the tests run in host memory, except those of cuBLAS's handles,
for which there is a software CUDA; there nothing is in TF32 but what cuBLAS multiplies.
"""

import contextlib
import os
from pathlib import Path

import numpy as np
import pytest

import lowprec
from cuda_backend.device_fixture import has_real_gpu, sgemm
from lowprec import amp
from lowprec.backends.cuda import bindings, libraries
from support import oracles
from support.programs import run_python

TESTS, DEVICE = Path(__file__).parents[1], "cuda" if has_real_gpu() else "cpu"

#: On Hopper cuBLAS was seen to run TF32 on tensor cores from 512 on.
N = 512 if has_real_gpu() else 64
A, B = np.random.default_rng(7).standard_normal((2, N, N), np.float32)
TRUE = oracles.product(A, B)
#: Rounding two operands to 11 or 8 bits costs about 2^-11 / sqrt(6) or 2^-8 / sqrt(6) each; sums in FP32 stay below
#: sqrt(N) units of 2^-24.
FP32, TF32, BF16 = (0.0, 2e-6), (1e-4, 1e-3), (1e-3, 1e-2)
_TF32_MATH = 3


def error(result, true=TRUE):
    if hasattr(result, "detach"):
        result = result.detach().cpu().numpy()
    result = result.get() if hasattr(result, "get") else np.asarray(result)
    return float(np.linalg.norm(result - true) / np.linalg.norm(true))


def within(value, limits):
    low, high = limits
    return low <= value < high


def check_in_and_out(record_property, measure, loose=TF32):
    """Compare the errors before, in and after the guard."""
    found = []
    for scope in (contextlib.nullcontext, lowprec.fp32_guard, contextlib.nullcontext):
        with scope():
            found.append(measure())
    record_property("measured", found)
    wanted = (loose, FP32, loose)
    assert all(map(within, found, wanted)), f"errors {found}, expected {wanted}"


# -- products and solvers in the guard ------------------------------------------------------------


@pytest.mark.feature("guard: `cublasSgemm` on lowprec's handle")
def test_sgemm_on_the_handle_of_lowprec(gpu, record_property):
    handle, x, y, out = lowprec.cublas_handle(), *map(gpu.put, (A, B, A))

    def measure():
        sgemm(handle, x, y, out)
        return error(gpu.get(out))

    check_in_and_out(record_property, measure, FP32)
    with lowprec.math_mode("tf32", frameworks=True):
        check_in_and_out(record_property, measure)
    bindings.set_math_mode(handle, _TF32_MATH)
    check_in_and_out(record_property, measure)
    bindings.set_math_mode(handle, 0)


@pytest.mark.feature("a user's own cuBLAS handle keeps its mode in the guard")
def test_sgemm_on_a_handle_of_the_user(gpu):
    """No guard knows the handle: the documentation recommends lowprec's."""
    x, y, out = map(gpu.put, (A, B, A))
    handle = bindings.create_handle("cublas")
    try:
        bindings.set_math_mode(handle, _TF32_MATH)
        with lowprec.fp32_guard():
            sgemm(handle, x, y, out)
            assert bindings.math_mode(handle) == _TF32_MATH
            assert within(error(gpu.get(out)), TF32)
            bindings.set_math_mode(handle, 0)
            sgemm(handle, x, y, out)
            assert within(error(gpu.get(out)), FP32)
    finally:
        libraries.libraries().cublas.destroy(handle)


@contextlib.contextmanager
def tf32_in_pytorch(torch):
    matmul = torch.backends.cuda.matmul
    # Older versions of PyTorch have the other switch.
    name, value = (
        ("fp32_precision", "tf32") if hasattr(matmul, "fp32_precision") else ("allow_tf32", True)
    )
    before = getattr(matmul, name)
    setattr(matmul, name, value)
    try:
        yield lambda host: torch.tensor(host, device=DEVICE), torch.matmul, torch.linalg.solve
    finally:
        setattr(matmul, name, before)


@contextlib.contextmanager
def tf32_in_cupy(cupy):
    core = cupy._core
    before = core.get_compute_type("f")
    core.set_compute_type("f", core.COMPUTE_TYPE_TF32)
    try:
        yield cupy.asarray, cupy.matmul, cupy.linalg.solve
    finally:
        core.set_compute_type("f", before)


@contextlib.contextmanager
def tf32_in_jax(jax):
    """Change nothing: on GPUs TF32 is JAX's default."""
    if has_real_gpu() and jax.default_backend() != "gpu":
        pytest.skip("JAX sees no GPU")
    yield jax.numpy.asarray, jax.numpy.matmul, jax.numpy.linalg.solve


PROGRAMS = {
    "PyTorch": ("torch", tf32_in_pytorch),
    "CuPy": ("cupy", tf32_in_cupy),
    "JAX": ("jax", tf32_in_jax),
}


@pytest.mark.feature("guard: product and solver of {library}")
@pytest.mark.parametrize("library", PROGRAMS)
def test_products_and_solvers_of_libraries(library, record_property):
    name, allowing = PROGRAMS[library]
    if name == "cupy" and not has_real_gpu():
        pytest.skip("CuPy needs a GPU")
    with allowing(pytest.importorskip(name, reason=f"{name} is not installed")) as (
        put,
        matmul,
        solve,
    ):
        x, y = put(A), put(B)
        check_in_and_out(
            record_property, lambda: error(matmul(x, y)), TF32 if has_real_gpu() else FP32
        )
        # Its eigenvalues are about 2 to 4: FP32 loses little more than in a product, and TF32 a thousand times as much.
        system = put((A / np.sqrt(N) + 3 * np.eye(N)).astype(np.float32))
        right = put((A / np.sqrt(N) + 3 * np.eye(N)).astype(np.float32) @ B)
        with lowprec.fp32_guard():
            assert within(error(solve(system, right), B), (0.0, 1e-5))


OVERRIDDEN = """
import sys
import lowprec
from cuda_backend import device_fixture as fixture, test_programs as programs
from lowprec.backends.cuda import bindings
is_real = fixture.has_real_gpu()
gpu = fixture.TorchGpu() if is_real else fixture.SoftwareGpu(fixture.install(1))
handle, (x, y, out) = lowprec.cublas_handle(), map(gpu.put, (programs.A, programs.B, programs.A))
bindings.set_math_mode(handle, 3)
fixture.sgemm(handle, x, y, out)
print(programs.error(gpu.get(out)), programs.error(gpu.get(lowprec.matmul(x, y, math_mode="tf32"))))
"""


@pytest.mark.feature("`NVIDIA_TF32_OVERRIDE`, handles and modes")
@pytest.mark.parametrize("value", [None, "0"])
def test_the_override(value, record_property):
    given = {"NVIDIA_TF32_OVERRIDE": value} if value else {}
    given["PYTHONPATH"] = os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")])
    found = [float(word) for word in run_python(OVERRIDDEN, **given).split()]
    record_property("measured", {str(value): found})
    assert len(found) == 2
    assert all(within(x, FP32 if value else TF32) for x in found), found


# -- lowprec inside PyTorch -----------------------------------------------------------------------


@pytest.fixture
def tensors(torch):
    return [torch.tensor(host, device=DEVICE, requires_grad=True) for host in (A, B)]


def check_gradients(a, b, weights):
    """Compare with those of the sum of the products times weights."""
    assert within(error(a.grad, oracles.product(weights, B.T)), BF16)
    assert within(error(b.grad, oracles.product(A.T, weights)), BF16)


@pytest.mark.feature("`lowprec.matmul` in PyTorch: gradients")
def test_gradients(torch, tensors):
    a, b = tensors
    result = lowprec.matmul(a, b, math_mode="bf16")
    assert within(error(result), BF16)
    (result * torch.tensor(TRUE.astype(np.float32), device=DEVICE)).sum().backward()
    check_gradients(a, b, TRUE)


@pytest.mark.feature("`intercept` in PyTorch, with gradients")
def test_intercept(torch, tensors):
    a, b = tensors
    weights = torch.tensor(TRUE.astype(np.float32), device=DEVICE)
    with lowprec.torch.intercept("bf16") as seen:
        result = a @ b
        (result * weights).sum().backward()
        with lowprec.fp32_guard():
            assert within(error(a @ b), FP32)
    assert within(error(result), BF16)
    check_gradients(a, b, TRUE)
    assert {(x.operator, x.backward, x.mode, x.count) for x in seen.report().taken} == {
        ("mm", False, "bf16", 1), ("mm", True, "bf16", 2), ("mm", False, "fp32", 1),
    }  # fmt: skip
    assert within(error(a @ b), FP32)


@pytest.mark.feature("`lowprec.matmul` in a compiled graph")
def test_the_compiled_operator(torch, tensors):
    compiled = torch.compile(
        lambda a, b: lowprec.matmul(a, b, math_mode="bf16"), fullgraph=True, backend="aot_eager"
    )
    a, b = tensors
    result = compiled(a, b)
    assert torch.equal(result, lowprec.matmul(a, b, math_mode="bf16"))
    (result * torch.tensor(TRUE.astype(np.float32), device=DEVICE)).sum().backward()
    check_gradients(a, b, TRUE)


@pytest.mark.feature("`audit` finds TF32")
def test_audit(torch, record_property):
    with tf32_in_pytorch(torch):
        loose = lowprec.audit(["torch"], sizes=[N])
        with lowprec.fp32_guard():
            tight = lowprec.audit(["torch"], sizes=[N])
    record_property("measured", {f"{x.operation} on {x.device}": x.precision for x in loose.rows})
    assert [x for x in tight.below("fp32") if x.device.startswith(DEVICE)] == []
    found = {x.operation for x in loose.below("fp32") if x.device.startswith("cuda")}
    assert ("matmul" in found) is has_real_gpu()


@pytest.mark.feature("`linalg.solve` by refinement")
def test_solve_by_refinement(torch, record_property):
    a = torch.tensor(A, device=DEVICE, dtype=torch.float64)
    b = a @ torch.ones(N, device=DEVICE, dtype=torch.float64)
    x, report = lowprec.linalg.solve(a, b, method="refine", full_output=True)
    record_property("measured", str(report))
    assert (str(report.method), report.fallbacks) == ("refine", 0)
    assert x.device == a.device
    # The report's own measure, in units of the matrix and the solution.
    residual = float((a @ x - b).norm() / (a.norm() * x.norm()))
    assert residual < 2.0**-53


@pytest.mark.feature("loss scaling with PyTorch: a step, and one that overflows")
def test_loss_scaling(torch):
    weight = torch.tensor(A, device=DEVICE, requires_grad=True)
    optimizer, scaler = torch.optim.SGD([weight], lr=1.0), amp.LossScaler(1024.0)
    for factor, stepped in ((1.0, True), (float("inf"), False)):
        before = weight.detach().clone()
        optimizer.zero_grad()
        scaler.scale(weight.sum() * factor).backward()
        scaler.unscale([weight.grad], out=[weight.grad])
        scaler.step(optimizer.step)
        assert torch.equal(weight, before - 1.0 if stepped else before)
        scaler.update()
    assert scaler.get_scale() == 512.0
