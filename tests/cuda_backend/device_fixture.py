"""Arrays on a GPU for tests: on the software CUDA, and for the same tests on a real device where there is one."""

import contextlib
import os
from collections import deque
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from lowprec.arrays import Device, library_of
from lowprec.arrays.dlpack import export
from lowprec.arrays.quantized import QuantizedArray
from lowprec.arrays.view import NUMPY_DTYPES, memory_at
from lowprec.backends.cuda import libraries
from lowprec.formats import dtype_from_name
from software_cuda import compiler, install, uninstall
from software_cuda.runtime import host_bytes

#: Bytes before and after an array, so that its address is not aligned for all kernels.
_MARGIN_BYTES = 64


def draw(seed, *shape, dtype=np.float32):
    """Return small whole numbers, which every format and order of summation keeps exact."""
    return np.random.default_rng(seed).integers(-3, 4, shape).astype(dtype)


def span(array):
    """Return the bytes from the lowest element to the first one, and from that to the end of the highest."""
    below = sum(-s * (n - 1) for s, n in zip(array.strides, array.shape, strict=True) if s < 0)
    above = sum(s * (n - 1) for s, n in zip(array.strides, array.shape, strict=True) if s > 0)
    return below, above + array.itemsize


def beyond_alignment(array):
    """Return the offset of a view from a multiple of 16, at which NumPy's own arrays begin."""
    return array.ctypes.data % 16 if array.size else 0


class Gpu:
    """A GPU: the software CUDA, or a real one with PyTorch's arrays.

    ``put_with_memory`` returns an array with the elements of a host array and, where the device's library can, its
    strides, and all the memory that it is in, as bytes; ``get`` returns the elements once they are computed;
    ``untouched_outside`` is whether only the array's elements of its memory differ from before; ``free_bytes`` is the
    device's free memory once all work is done.
    """

    def put(self, host, device=0):
        """Return the array of :meth:`put_with_memory`."""
        return self.put_with_memory(host, device)[0]

    def quantized(self, host):
        """Return a quantised array with codes and scales on the device."""
        parts = (None if x is None else self.put_bytes(x) for x in (host.codes, host.scales))
        return QuantizedArray(*parts, host.format, host.shape, host.axis, host.scale)

    def put_bytes(self, host):
        """Return an array of uint8 with these elements."""
        raise NotImplementedError


class SoftwareArray:
    """An array in the memory of a software device, known by DLPack alone."""

    def __init__(self, address, like, device, owner):
        self.address = address
        self.like = like
        self.device = device
        self.owner = owner

    def view(self):
        dtype = NUMPY_DTYPES[dtype_from_name(self.like.dtype.name)]
        if 0 in self.like.shape:
            return np.empty(self.like.shape, dtype)
        below, _ = span(self.like)
        memory = memory_at(self.address - below, self.owner)
        return np.ndarray(self.like.shape, dtype, memory, below, self.like.strides)

    def __dlpack_device__(self):
        return (2, self.device)

    def __dlpack__(self, *, stream=None, max_version=None):
        dtype = dtype_from_name(self.like.dtype.name)
        return export(self.view(), dtype, max_version, device=Device(2, self.device), copied=False)


class SoftwareBytes(SoftwareArray):
    """An array of uint8 with as much of the Array API as quantised arrays need."""

    def __init__(self, made):
        super().__init__(made.address, made.like, made.device, made.owner)
        self.shape, self.dtype, self.nbytes = made.like.shape, np.dtype(np.uint8), made.like.nbytes

    def __array_namespace__(self):
        return SimpleNamespace(int8=np.int8, permute_dims=None, reshape=None)

    def view(self, dtype=None):
        return (
            super().view()
            if dtype is None
            else SoftwareArray(self.address, self.like, self.device, self.owner)
        )


class _Block:
    """Memory of a software device; its finaliser, which may run anywhere, appends the address to ``dead``."""

    def __init__(self, software, nbytes, device, dead):
        runtime = software.runtime
        before = runtime.cudaGetDevice()[1]
        runtime.cudaSetDevice(device)
        status, self.address = runtime.cudaMalloc(nbytes)
        runtime.cudaSetDevice(before)
        assert status == 0, status
        self.nbytes = nbytes
        self.device = device
        self._dead = dead

    def __del__(self):
        self._dead.append(self.address)


class SoftwareGpu(Gpu):
    def __init__(self, software):
        self.software = software
        self._dead: deque[int] = deque()

    def drain(self):
        """Run everything that is queued, and free the memory of arrays that died."""
        self.software.drain()
        while self._dead:
            self.software.runtime.cudaFree(self._dead.popleft())

    def put_with_memory(self, host, device=0):
        if self._dead:
            self.drain()
        below, above = span(host)
        offset = (below + _MARGIN_BYTES) // 16 * 16 + beyond_alignment(host)
        block = _Block(self.software, offset + above + _MARGIN_BYTES, device, self._dead)
        made = SoftwareArray(block.address + offset, host, device, block)
        made.view()[...] = host
        return made, block

    def get(self, array):
        self.software.drain()
        if isinstance(array, _Block):
            return host_bytes(array.address, array.nbytes).copy()
        if isinstance(array, SoftwareArray):
            return array.view().copy()
        view = library_of(array).view(array)
        dtype = NUMPY_DTYPES[view.dtype]
        if not view.size:
            return np.empty(view.shape, dtype)
        return host_bytes(view.address, view.nbytes).view(dtype).reshape(view.shape).copy()

    def put_bytes(self, host):
        return SoftwareBytes(self.put(host.view(np.int8)))

    def transpose(self, array):
        return SoftwareArray(array.address, array.like.T, array.device, array.owner)

    def untouched_outside(self, array, memory, before):
        now = self.get(memory)
        below, above = span(array.like)
        start = array.address - memory.address - below
        touched = np.zeros(len(now), bool)
        inside = np.ndarray(
            (*array.like.shape, array.like.itemsize), bool, touched.data, start + below, (*array.like.strides, 1)
        )  # fmt: skip
        inside[...] = True
        assert start >= 0
        assert start + below + above <= len(now)
        return np.array_equal(now[~touched], before[~touched])

    def free_bytes(self):
        self.drain()
        memory = self.software.runtime.memory
        return memory.limits[0] - memory.used[0]

    # -- faults -----------------------------------------------------------------------------------

    def calls_made(self):
        return len(self.software.calls)

    def failing(self, position):
        """Make the call of this number fail, of all calls of all libraries."""
        return self.software.fail("*", at=position)

    def failing_call(self, function, *, at=1, status=None):
        return self.software.fail(function, at=at, status=status)

    def forgive(self):
        self.software.drain()
        self.software.forgive()

    def live(self):
        self.drain()
        return self.software.live()

    def same_speed(self):
        self.software.cublas_lt.times = _Always()


class _Always(dict[Any, float]):
    def get(self, key, default=None):
        return 1.0


class TorchGpu(Gpu):
    """A real device, with arrays of PyTorch's."""

    def __init__(self):
        import torch

        self.torch = torch

    def _tensor(self, host, device):
        torch = self.torch
        name = host.dtype.name
        if hasattr(torch, name) and name not in ("bfloat16", "float8_e4m3fn", "float8_e5m2"):
            return torch.as_tensor(host, device=f"cuda:{device}")
        bits = host.view(np.int16 if host.itemsize == 2 else np.uint8)
        return torch.as_tensor(bits, device=f"cuda:{device}").view(getattr(torch, name))

    def put_with_memory(self, host, device=0):
        torch = self.torch
        if any(s < 0 for s in host.strides):  # which torch does not support
            host = np.ascontiguousarray(host)
        # torch refuses to write elements that share memory.
        once = tuple(slice(None) if s else slice(1) for s in host.strides)
        _, above = span(host)
        offset = beyond_alignment(host) // host.itemsize
        memory = self._tensor(np.zeros(offset + max(above // host.itemsize, 1), host.dtype), device)
        strides = [s // host.itemsize for s in host.strides]
        array = torch.as_strided(memory, host.shape, strides, offset)
        if 0 not in host.shape:
            array[once].copy_(self._tensor(np.array(host[once], order="C"), device))
        return array, memory

    def get(self, array):
        array = array.detach().contiguous().cpu()
        name = str(array.dtype).removeprefix("torch.")
        dtype = NUMPY_DTYPES[dtype_from_name(name)]
        if name in ("bfloat16", "float8_e4m3fn", "float8_e5m2"):
            bits = self.torch.int16 if dtype.itemsize == 2 else self.torch.uint8
            array = array.view(bits)
        return array.numpy().view(dtype)

    def put_bytes(self, host):
        return self.torch.as_tensor(host.copy(), device="cuda:0")

    def transpose(self, array):
        return array.T

    def untouched_outside(self, array, memory, before):
        mask = self.torch.ones(memory.shape, dtype=self.torch.bool)
        where = array.storage_offset()
        self.torch.as_strided(mask, array.shape, array.stride(), where)[...] = False
        outside = mask.numpy()
        return bool(np.array_equal(self.get(memory)[outside], before[outside]))

    def free_bytes(self):
        self.torch.cuda.synchronize()
        return int(self.torch.cuda.mem_get_info()[0])


def sgemm(handle, a, b, out):
    """Multiply square float32 arrays by ``cublasSgemm`` on a handle, whose math mode determines the precision."""
    factors = np.array([1, 0], np.float32)
    alpha = factors.ctypes.data
    views = [library_of(x).view(x) for x in (b, a, out)]
    n = views[0].shape[0]
    first, second, result = (x.address for x in views)
    libraries.libraries().cublas.sgemm(
        handle, 0, 0, n, n, n, alpha, first, n, second, n, alpha + 4, result, n
    )


def has_real_gpu():
    """Whether to test on a device, by the environment."""
    return os.environ.get("LOWPREC_TEST_DEVICE") == "gpu"


@contextlib.contextmanager
def few_blocks():
    """Use a GPU; where there is none, one in software with so few multiprocessors that blocks take turns."""
    if has_real_gpu():
        yield
        return
    if compiler() is None:
        pytest.skip("g++ is not installed")
    software = install(1, multiprocessors=1)
    yield
    uninstall()
    assert not software.faults
