"""The software CUDA's kernels, which are checked at every access, and its arrays, which go by the rules of DLPack."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from lowprec.arrays import library_of
from lowprec.arrays.cupy_library import CupyLibrary
from lowprec.arrays.dlpack import import_array
from lowprec.formats import DType
from software_cuda import DeviceModel, Software, compiler
from software_cuda.probing import LEGACY, copy, peek, refused, stream, value
from software_cuda.runtime import host_bytes


@pytest.fixture
def cuda() -> Iterator[Software]:
    made = Software([DeviceModel(memory_bytes=1 << 20)] * 2, "lazy", 130100)
    yield made
    made.drain()
    assert made.faults == []


# -- kernels --------------------------------------------------------------------------------------

KERNELS = """
extern "C" __global__ void twice(const float* x, float* y, long long n, double by)
{
    long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = (float)(x[i] * by);
}
extern "C" __global__ void reversed(const float* x, float* y, long long n)
{
    __shared__ float held[64];
    held[threadIdx.x] = threadIdx.x < n ? x[threadIdx.x] : 0;
#ifndef RACE
    __syncthreads();
#endif
    if (threadIdx.x < n) y[threadIdx.x] = held[n - 1 - threadIdx.x];
}
extern "C" __global__ void wide(const float* x, float* y)
{
    struct alignas(16) Four { float items[4]; };
    *(Four*)y = *(const Four*)x;
}
"""


class OnStream:
    def __init__(self, handle: int) -> None:
        self.handle = handle

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self.handle


needs_compiler = pytest.mark.skipif(compiler() is None, reason="g++ is not installed")


def kernel(cuda: Software, name: str, source: str = KERNELS) -> Any:
    options = cuda.core.ProgramOptions(arch="sm_90", std="c++17")
    code = cuda.core.Program(source, "c++", options).compile("cubin").code
    return cuda.core.ObjectCode.from_cubin(code).get_kernel(name)


def launch(cuda: Software, made: Any, *arguments: Any, grid: int = 1, block: int = 32) -> None:
    config = cuda.core.LaunchConfig(grid=grid, block=block)
    cuda.core.launch(OnStream(LEGACY), config, made, *arguments)


def two_arrays(cuda: Software, count: int = 64) -> tuple[int, int]:
    x, y = (value(cuda.runtime.cudaMalloc(4 * count)) for _ in range(2))
    numbers = np.arange(count, dtype=np.float32)
    cuda.runtime.memory.at(x, numbers.nbytes, 0, "")[:] = numbers.view(np.uint8)
    return x, y


@needs_compiler
def test_kernels_run_when_their_stream_does(cuda: Software) -> None:
    x, y = two_arrays(cuda)
    launch(cuda, kernel(cuda, "twice"), x, y, np.int64(50), np.float64(2.0), grid=2)
    assert np.isnan(peek(cuda, y)).all()
    value(cuda.runtime.cudaDeviceSynchronize())
    found = np.array(peek(cuda, y, 64))
    assert found[:50].tolist() == list(range(0, 100, 2))
    assert np.isnan(found[50:]).all()


@needs_compiler
@pytest.mark.parametrize("races", [False, True])
def test_threads_meet_at_barriers(cuda: Software, races: bool) -> None:
    x, y = two_arrays(cuda)
    source = ("#define RACE\n" if races else "") + KERNELS
    launch(cuda, kernel(cuda, "reversed", source), x, y, np.int64(50), block=64)
    value(cuda.runtime.cudaDeviceSynchronize())
    assert (peek(cuda, y, 50) == list(range(49, -1, -1))) is not races


@needs_compiler
@pytest.mark.parametrize(
    ("name", "at", "words"),
    [
        ("read", (4 * 30, 0), "illegal read of 4 bytes"),
        ("write", (0, 4 * 30), "illegal write of 4 bytes"),
        ("write before", (0, -4), "illegal write of 4 bytes"),
    ],
)
def test_kernels_stay_inside_their_memory(cuda: Software, name: str, at: tuple[int, int], words: str) -> None:
    x, y = two_arrays(cuda)
    launch(cuda, kernel(cuda, "twice"), x + at[0], y + at[1], np.int64(40), np.float64(1), grid=2)
    refused(cuda.runtime.cudaDeviceSynchronize(), "cudaErrorIllegalAddress")
    assert words in cuda.faults.pop()


@needs_compiler
def test_kernels_stay_on_their_device_and_off_freed_memory(cuda: Software) -> None:
    x, y = two_arrays(cuda)
    value(cuda.runtime.cudaSetDevice(1))
    launch(cuda, kernel(cuda, "wide"), x, y, block=1)
    refused(cuda.runtime.cudaDeviceSynchronize(), "cudaErrorIllegalAddress")
    assert "kernel wide: illegal" in cuda.faults.pop()
    value(cuda.runtime.cudaSetDevice(0))
    value(cuda.runtime.cudaFree(y))
    launch(cuda, kernel(cuda, "reversed"), x, y, np.int64(1), block=2)
    refused(cuda.runtime.cudaDeviceSynchronize(), "cudaErrorIllegalAddress")
    assert "illegal write" in cuda.faults.pop()


@needs_compiler
def test_wide_accesses_are_aligned(cuda: Software) -> None:
    x, y = two_arrays(cuda)
    launch(cuda, kernel(cuda, "wide"), x + 16, y, block=1)
    value(cuda.runtime.cudaDeviceSynchronize())
    assert peek(cuda, y) == [4.0, 5.0, 6.0, 7.0]
    launch(cuda, kernel(cuda, "wide"), x + 4, y, block=1)
    refused(cuda.runtime.cudaDeviceSynchronize(), "cudaErrorIllegalAddress")
    assert "misaligned" in cuda.faults.pop()


@needs_compiler
def test_kernels_refused_by_the_driver(cuda: Software) -> None:
    x, y = two_arrays(cuda)
    twice = kernel(cuda, "twice")
    with pytest.raises(TypeError, match="kernel twice takes 'ppld'"):
        launch(cuda, twice, x, y, 50, np.float64(2.0))
    with pytest.raises(Exception, match="CUDA_ERROR_INVALID_VALUE: grid"):
        launch(cuda, twice, x, y, np.int64(1), np.float64(2.0), block=2048)
    with pytest.raises(Exception, match="CUDA_ERROR_NOT_FOUND"):
        kernel(cuda, "thrice")
    with pytest.raises(Exception, match="NVRTC_ERROR_COMPILATION"):
        kernel(cuda, "twice", "nonsense")
    program = cuda.core.Program(KERNELS, "c++", cuda.core.ProgramOptions(arch="sm_80"))
    code = program.compile("cubin").code
    with pytest.raises(Exception, match="CUDA_ERROR_NO_BINARY_FOR_GPU"):
        cuda.core.ObjectCode.from_cubin(code).get_kernel("twice")
    with pytest.raises(Exception, match="the cubin is damaged"):
        cuda.core.ObjectCode.from_cubin(code[:-1]).get_kernel("twice")
    with pytest.raises(Exception, match="CUDA_ERROR_INVALID_IMAGE"):
        cuda.core.ObjectCode.from_cubin(b"").get_kernel("twice")


# -- arrays ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", list(DType), ids=str)
@pytest.mark.parametrize("how", ["plain", "transposed", "reversed", "sliced", "broadcast", "empty"])
def test_arrays_come_as_they_are(cuda: Software, dtype: DType, how: str) -> None:
    base = (np.arange(24) % 8).reshape(4, 6).astype(getattr(ml_dtypes, dtype.label, dtype.label))
    values = {
        "plain": base,
        "transposed": base.T,
        "reversed": base[::-1, ::-1],
        "sliced": base[1:3, ::2],
        "broadcast": np.broadcast_to(base[0], (5, 6)),
        "empty": base[:0],
    }[how]
    array = cuda.array(values, device=1)
    view = import_array(array, LEGACY)
    assert str(view.device) == "cuda:1"
    assert (view.dtype, view.shape) == (dtype, values.shape)
    assert [s * values.itemsize for s in view.strides] == list(values.strides) or not values.size
    np.testing.assert_array_equal(array.to_numpy().astype(complex), values.astype(complex))
    np.testing.assert_array_equal(cuda.read(array).astype(complex), values.astype(complex))


def test_arrays_are_ready_for_those_who_ask_properly(cuda: Software) -> None:
    on = stream(cuda)
    numbers = np.ones(4, np.float32)
    for asked, ready in ((on, True), (None, False), (-1, False)):
        array = cuda.array(numbers)
        view = import_array(array, asked)
        value(cuda.runtime.cudaStreamSynchronize(on))
        assert (peek(cuda, view.address) == [1.0] * 4) is ready, asked
    array = cuda.array(numbers)
    view = import_array(array, None)  # made ready on the legacy default stream
    value(cuda.runtime.cudaStreamSynchronize(LEGACY))
    assert peek(cuda, view.address) == [1.0] * 4
    with pytest.raises(BufferError, match="stream 0 is not allowed"):
        array.__dlpack__(stream=0)


def test_an_array_that_is_not_held_is_another_owners(cuda: Software) -> None:
    on = stream(cuda)
    array = cuda.array(np.ones(4, np.float32))
    view, target = import_array(array, on), value(cuda.runtime.cudaMalloc(16))
    copy(cuda, target, view.address, on)
    del array, view
    gc.collect()
    refused(cuda.runtime.cudaStreamSynchronize(on), "cudaErrorIllegalAddress")
    assert "was freed" in cuda.faults.pop()


@pytest.mark.parametrize("device", [0, 1])
def test_cupys_arrays(cuda: Software, device: int) -> None:
    cupy = cuda.cupy()
    library = CupyLibrary(cupy)
    numbers = np.arange(12, dtype=np.float32).reshape(3, 4)
    with cupy.cuda.Device(device):
        own = cupy.cuda.Stream()
        with own:
            array = cupy.asarray(numbers)
            view = library.view(array.T)
            current = library.current_stream(view.device)
            made = library.allocate((2, 3), DType.BFLOAT16, view.device, array).owner
        assert library.current_stream(view.device) == LEGACY
    assert current == own.ptr
    assert (view.device.index, view.shape, view.strides) == (device, (4, 3), (1, 4))
    assert (made.shape, made.dtype, made.device.id) == ((2, 3), ml_dtypes.bfloat16, device)
    assert np.isnan(host_bytes(view.address, 16).view(np.float32)).all()
    own.synchronize()
    np.testing.assert_array_equal(cupy.asnumpy(array), numbers)
    np.testing.assert_array_equal(cuda.read(array), numbers)
    assert value(cuda.runtime.cudaGetDevice()) == 0


def test_cupys_memory_goes_back_in_the_order_of_its_stream(cuda: Software) -> None:
    cupy = cuda.cupy()
    target = value(cuda.runtime.cudaMalloc(16))
    with cupy.cuda.Stream() as own:
        array = cupy.asarray(np.ones(4, np.float32))
        copy(cuda, target, array.data.ptr, own.ptr)
        del array
    own.synchronize()
    assert peek(cuda, target) == [1.0] * 4
    cuda.drain()
    assert cuda.live()["blocks"] == 1


def test_lowprec_takes_them_for_what_they_are(cuda: Software) -> None:
    assert library_of(cuda.array(np.ones(3))).name == "dlpack"
