"""Array libraries with streams and graphs, so that one test runs on a real device and on the software CUDA."""

import contextlib

import pytest

from cuda_backend.device_fixture import has_real_gpu
from software_cuda.arrays import DeviceArray, read

#: Clock cycles for which a stream is kept busy before it writes an operand: about 5 ms.
_BUSY_CYCLES = 10_000_000


class OnlyDLPack:
    """An array behind DLPack and nothing else."""

    def __init__(self, array):
        self._array = array

    def __dlpack__(self, **keywords):
        return self._array.__dlpack__(**keywords)

    def __dlpack_device__(self):
        return self._array.__dlpack_device__()


class StreamedLibrary:
    """A library with streams and graphs.

    ``stream`` makes a new stream current; ``late`` returns an array that the current stream has yet to write; ``write``
    writes one that is no operand of queued work; ``get`` returns the elements after the work of the current stream;
    ``other`` is ``late`` of another library; ``adopt`` returns the elements of an array that is known by DLPack alone;
    ``capture`` captures a call on the current stream, and returns a function that replays it, and the call's result.
    """

    #: Whether a result may be allocated while the product is captured.
    allocates_while_capturing = False


class Cupy(StreamedLibrary):
    def __init__(self, cupy):
        self.cupy = cupy

    def stream(self):
        return self.cupy.cuda.Stream(non_blocking=True)

    def late(self, host):
        # The copy of pageable memory would wait for the work before it, the copy on the device does not.
        there, made = self.cupy.asarray(host), self.cupy.zeros(host.shape, host.dtype)
        for _ in range(10):
            self.cupy.sort(self.cupy.zeros(1 << 22, "float32"))
        made[...] = there
        return made

    def write(self, array, host):
        array.set(host)
        self.cupy.cuda.get_current_stream().synchronize()

    def get(self, array):
        return self.cupy.asnumpy(array)

    def other(self, host):
        return Torch(pytest.importorskip("torch", reason="torch is not installed")).late(host)

    def adopt(self, result):
        return self.get(self.cupy.from_dlpack(result))

    def capture(self, call):
        stream = self.cupy.cuda.get_current_stream()
        stream.begin_capture()
        result = call()
        graph = stream.end_capture()
        return lambda: graph.launch(stream), result


class SoftwareCupy(Cupy):
    """The replacement of CuPy on the software CUDA, whose streams are always late."""

    def late(self, host):
        return self.cupy.asarray(host)

    def write(self, array, host):
        array.memory[...] = host

    def other(self, host):
        return DeviceArray(self.cupy.runtime, host)

    def adopt(self, result):
        return read(self.cupy.runtime, result)

    def capture(self, call):
        runtime, pointer = self.cupy.runtime, self.cupy.current().ptr
        runtime.begin_capture(pointer)
        result = call()
        graph = runtime.end_capture(pointer)
        return lambda: graph.replay(pointer), result


class Torch(StreamedLibrary):
    allocates_while_capturing = True

    def __init__(self, torch):
        self.torch = torch

    @contextlib.contextmanager
    def stream(self):
        made = self.torch.cuda.Stream()
        with self.torch.cuda.stream(made):
            yield made

    def late(self, host):
        there = self.torch.as_tensor(host, device="cuda")
        made = self.torch.zeros_like(there)
        self.torch.cuda._sleep(_BUSY_CYCLES)
        made.copy_(there)
        return made

    def write(self, array, host):
        array.copy_(self.torch.as_tensor(host))

    def get(self, array):
        return array.cpu().numpy()

    def other(self, host):
        return Cupy(pytest.importorskip("cupy", reason="cupy is not installed")).late(host)

    def adopt(self, result):
        return self.get(self.torch.from_dlpack(result))

    def capture(self, call):
        torch = self.torch
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream()
        stream.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            result = call()
        return graph.replay, result


#: The libraries of this machine; without a device, CuPy is replaced by software.
STREAMED = ("torch", "cupy") if has_real_gpu() else ("cupy",)
