"""Signal handlers that multiply, or raise, in the middle of a product on a GPU."""

import gc

import numpy as np
import pytest

import lowprec
import software_cuda
from cuda_backend.cuda_reset import reset
from cuda_backend.device_fixture import SoftwareGpu
from lowprec.core import executors
from support import interrupts

pytestmark = pytest.mark.usefixtures("cheap_collections")

A = np.random.default_rng(0).integers(-3, 4, (16, 24)).astype(np.float32)
B = np.random.default_rng(1).integers(-3, 4, (24, 32)).astype(np.float32)


@pytest.fixture
def interrupted_gpu():
    """The software CUDA, of which an interrupt may lose an event or a block, but nothing may be done wrong."""
    found = software_cuda.install()
    executors.clear_caches()
    # Tracebacks are cycles that hold arrays. To free these waits for the device, also if it is just computing.
    gc.disable()
    yield SoftwareGpu(found)
    found.drain()
    gc.enable()
    executors.clear_caches()
    reset()
    software_cuda.uninstall()
    assert found.faults == []


class Products:
    """Products with a bias, each of numbers of its own."""

    def __init__(self, gpu, mode, *, cold=False):
        self.gpu = gpu
        self.mode = mode
        self.cold = cold
        self.count = 0
        self.a, self.b = gpu.put(A), gpu.put(B)

    def __call__(self):
        self.count += 1
        bias = np.full(32, self.count % 100, np.float32)
        if self.cold:
            executors.clear_caches()
        found = lowprec.matmul(self.a, self.b, bias=self.gpu.put(bias), math_mode=self.mode)
        np.testing.assert_array_equal(self.gpu.get(found), A @ B + bias)


def strike(multiply, step):
    """Multiply in the middle of a product, at each ``step``-th of its lines; return how many it has."""
    multiply()
    at = 0
    while interrupts.strike(multiply, at, multiply):
        at += step
    return at


# Products that rewrite their operands run kernels on the software devices, which takes time.
@pytest.mark.parametrize(("mode", "step"), [("fp32", 1), ("bf16", 3), ("fp16", 7)])
@pytest.mark.sampled(3)
def test_a_handler_that_multiplies_in_the_middle(software, mode, step):
    assert strike(Products(software, mode), step) > 30


@pytest.mark.parametrize(("mode", "step"), [("fp32", 3), ("bf16", 17), ("fp16", 41)])
@pytest.mark.sampled(3)
@pytest.mark.sweep
def test_a_handler_that_multiplies_in_the_middle_of_a_first_product(software, mode, step):
    assert strike(Products(software, mode, cold=True), step) > 100


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(("mode", "step"), [("fp32", 1), ("bf16", 3), ("fp16", 7)])
@pytest.mark.sampled(3)
@pytest.mark.sweep
def test_after_an_interrupt_the_next_product_is_right(interrupted_gpu, mode, step):
    multiply = Products(interrupted_gpu, mode)
    multiply()
    came = []
    for error in interrupts.interrupted(multiply, step=step):
        came.append(error is None)
        del error
        multiply()
    # What is raised in a finaliser, no one gets.
    assert came.count(False) > 10
    assert came.count(True) < len(came) / 4
