"""What is known of a model of GPU: rates of the data sheets, and which CUDA serves it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import lowprec
import oracles
import software_cuda
from device_fixture import SoftwareGpu
from lowprec import executors
from lowprec.arrays import Device
from lowprec.backends import cuda
from lowprec.backends.cuda import compiling

A = np.random.default_rng(0).integers(-3, 4, (16, 16)).astype(np.float32)

Install = Callable[..., SoftwareGpu]


@pytest.fixture
def install() -> Iterator[Install]:
    """Stand a device of some model in, with some version of CUDA."""
    made: list[Any] = []

    def new(capability: tuple[int, int], version: int = 130100, **model: Any) -> SoftwareGpu:
        found = software_cuda.install(1, version=version, capability=capability, **model)
        made.append(found)
        executors.forget()
        compiling._kernels.clear()
        return SoftwareGpu(found)

    yield new
    for found in made:
        found.drain()
        executors.forget()
        cuda.reset()
        software_cuda.uninstall()


#: Data sheets, dense, in TFLOP/s: multiprocessors, highest clock in kHz, rates.
NAMES = {
    (7, 0): "Tesla V100-SXM2-16GB",
    (8, 0): "NVIDIA A100-SXM4-40GB",
    (9, 0): "NVIDIA H100 80GB HBM3",
    (10, 0): "NVIDIA B200",
}
SHEETS: dict[tuple[int, int], tuple[int, int, dict[str, float]]] = {
    (7, 0): (80, 1_530_000, {"float16": 125}),
    (8, 0): (108, 1_410_000, {"tf32": 156, "float16": 312, "bfloat16": 312, "int8": 624}),
    (9, 0): (132, 1_980_000, {"float16": 989, "float8_e4m3fn": 1979, "int8": 1979}),
    (10, 0): (148, 1_965_000, {"tf32": 1130, "float16": 2250, "float8_e4m3fn": 4500, "int8": 4500}),
}


@pytest.mark.parametrize("capability", SHEETS, ids=str)
def test_peak_rates(install: Install, capability: tuple[int, int]) -> None:
    count, clock, sheet = SHEETS[capability]
    install(capability, name=NAMES[capability], multiprocessors=count, clock_khz=clock)
    found = cuda.capabilities(Device(2, 0))
    told = dict(found.peak_tflops)
    for name, rate in sheet.items():
        assert told[name] == pytest.approx(rate, rel=0.03)
    assert ("float8_e4m3fn" in told) is found.has_float8
    assert ("bfloat16" in told) is (capability >= (8, 0))


def test_no_rates_without_a_clock_or_a_sheet(install: Install) -> None:
    install((8, 0), name=NAMES[8, 0], clock_khz=0)
    assert cuda.capabilities(Device(2, 0)).peak_tflops == ()
    install((8, 6), name="a model to come")
    assert cuda.capabilities(Device(2, 0)).peak_tflops == ()


@pytest.mark.parametrize("capability", [(7, 0), (7, 2)], ids=str)
def test_a_v100_needs_cuda_12(install: Install, capability: tuple[int, int]) -> None:
    gpu = install(capability)
    x = gpu.put(A)
    with pytest.raises(
        lowprec.BackendError, match=r"not compiled for sm_7[02](.|\n)*V100(.|\n)*lowprec\[cuda12\]"
    ):
        lowprec.matmul(x, x, math_mode="fp16")
    with (
        gpu.failing_call("matmul_algo_get_heuristic", status=8),
        pytest.raises(lowprec.UnsupportedError, match=r"ARCH_MISMATCH(.|\n)*lowprec\[cuda12\]"),
    ):
        lowprec.matmul(x, x)


def test_a_v100_has_it_in_cuda_12(install: Install) -> None:
    gpu = install((7, 0), version=120900)
    x = gpu.put(A)
    found = gpu.get(lowprec.matmul(x, x, math_mode="fp16"))
    np.testing.assert_array_equal(found, oracles.product(A, A))


def test_a_later_device_is_told_of_both(install: Install) -> None:
    gpu = install((9, 0))
    x = gpu.put(A)
    with (
        gpu.failing_call("core.compile"),
        gpu.failing_call("core.from_cubin"),
        pytest.raises(lowprec.BackendError, match=r"\[cuda13\].*\[cuda12\]"),
    ):
        lowprec.matmul(x, x, math_mode="fp16")
