"""Whether memory, kernels and products take the stream handles 1 and 2, which stand for the default streams."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import lowprec
from gpu import libraries, raw
from gpu.parts import Options, Part
from lowprec.backends.cuda import runtime
from lowprec.backends.cuda.packing import Packing, prepare_packing
from lowprec.formats import DType
from lowprec.planning import MatrixStack

#: 2 is a stream of its own in each thread.
HANDLES = {"legacy default": 1, "default of the thread": 2}
_SIDE = 64


def _numbers(seed: int) -> Any:
    """Return small whole numbers: sums and roundings are exact."""
    return np.random.default_rng(seed).integers(-3, 4, (2, _SIDE, _SIDE)).astype(np.float32)


def _copy(stream: int, seed: int) -> bool:
    (a, _), back = _numbers(seed), np.zeros((_SIDE, _SIDE), np.float32)
    address = raw.upload(np.zeros_like(a))
    for target, source in ((address, a.ctypes.data), (back.ctypes.data, address)):
        runtime.copy_async(target, source, a.nbytes, stream)
    event = runtime.create_event()
    runtime.call("cudaEventRecord", event, stream)
    runtime.wait_for_event(event)
    runtime.call("cudaEventDestroy", event)
    return bool(np.array_equal(a, back))


def _kernel(stream: int, seed: int) -> bool:
    a, _ = _numbers(seed)
    address = runtime.allocate(a.nbytes // 2)
    packing = Packing(MatrixStack.of(DType.FLOAT32, _SIDE, _SIDE, _SIDE, 1), DType.BFLOAT16, _SIDE, _SIDE)
    prepare_packing(packing, 0)(raw.upload(a), address, 0, stream)
    runtime.call("cudaStreamSynchronize", stream)
    return bool(np.array_equal(raw.download(address, a.shape, libraries.numpy_dtype("bfloat16")).astype(a.dtype), a))


def _product(stream: int, seed: int) -> bool:
    a, b = _numbers(seed)
    product = raw.LtProduct(a, b)
    return bool(np.array_equal(product.run(product.algorithms(1)[0], stream=stream), a @ b))


def _lowprec(stream: int, seed: int) -> bool:
    """A packed product and its temporary memory, on PyTorch's current stream."""
    torch = libraries.TorchArrays()
    a, b = _numbers(seed)
    with torch.torch.cuda.stream(torch.torch.cuda.ExternalStream(stream)):
        found = torch.get(lowprec.matmul(torch.put(a), torch.put(b), math_mode="bf16"))
    return bool(np.array_equal(found, a @ b))


STEPS: dict[str, Callable[[int, int], bool]] = {
    "copy and event": _copy, "kernel": _kernel, "cublasLtMatmul": _product, "lowprec.matmul": _lowprec,
}  # fmt: skip


def run(part: Part, options: Options) -> None:
    """Try every step on every stream."""
    for stream, handle in HANDLES.items():
        for step, take in STEPS.items():
            with part.attempt(stream=stream, step=step):
                part.row(ok=take(handle, options.seed), stream=stream, step=step)
