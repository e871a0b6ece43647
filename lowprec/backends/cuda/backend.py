"""The functions of the CUDA backend; see ``backends.interface.Backend``."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from math import prod
from typing import Any

from lowprec.arrays import ArrayView, Device
from lowprec.backends.cuda import autotune, bindings, memory, runtime
from lowprec.backends.cuda.autotune import Progress
from lowprec.backends.cuda.epilogue import Epilogue, prepare_epilogue
from lowprec.backends.cuda.executor import GemmExecutor
from lowprec.backends.cuda.models import present
from lowprec.backends.cuda.steps import Addresses, queue_all
from lowprec.backends.interface import AlgorithmTiming, Arguments, Executor
from lowprec.errors import warn
from lowprec.formats import ComputeType, DType
from lowprec.planning import Capabilities, GemmPlan, MatrixStack
from lowprec.util.strides import Shape, contiguous_strides

release_memory = memory.release


#: Versions of cuBLAS that may compute wrong results on compute capability 10.x (pytorch issue 178333).
_WRONG_CUBLAS = range(120800, 130100)


def capabilities(device: Device) -> Capabilities:
    properties = runtime.properties(device.index)
    version = bindings.cublas_version()
    if properties.capability[0] == 10 and version in _WRONG_CUBLAS:
        warn(
            f"cuBLAS {bindings.cublas_version_text()} may compute wrong results on compute capability 10.x; install "
            "cuBLAS 13.1.0.3 or later, which lowprec's extra cuda13 brings",
            once="cuBLAS on 10.x",
        )
    return present(properties, version)


def info() -> dict[str, Any]:
    return {
        "devices": [_device(index) for index in range(runtime.call("cudaGetDeviceCount"))],
        "versions": {"cuda": runtime.driver_version(), "cublas": bindings.cublas_version_text()},
    }


def _device(index: int) -> dict[str, Any]:
    properties = runtime.properties(index)
    able = capabilities(Device(2, index))
    return {
        "device": able.device,
        "name": properties.name,
        "compute_capability": "{}.{}".format(*properties.capability),
        "memory_bytes": properties.memory_bytes,
        "multiprocessors": properties.multiprocessors,
        "clock_khz": properties.clock_khz,
        "peak_tflops": dict(able.peak_tflops),
        "workspace_bytes": able.workspace_bytes,
    }


def prepare(plan: GemmPlan) -> Executor:
    return (lambda _: None) if 0 in plan.out_shape else GemmExecutor(plan)


def reordered(view: ArrayView) -> None:
    """Return None: the codes are read as they are."""


def describe(plan: GemmPlan, arguments: Arguments) -> tuple[tuple[str, str], ...]:
    """Return cuBLASLt's description of the algorithm for pointers of this alignment, as (name, value) pairs."""
    if 0 in plan.out_shape or plan.call is None:
        return ()
    executor = GemmExecutor(plan)
    with runtime.on_device(arguments.a.device.index):
        sparse = executor.prepared_sparse(arguments)
        if not isinstance(sparse, str):
            return (("algorithm", sparse[0].info.text),)
        invocation = executor.use(arguments, lambda x: x.first_invocation(arguments))
        info = invocation.info
        call = executor.lowered(arguments).call
    rows = [("algorithm", info.text), ("units", info.units_text)]
    rows += [("failed", error) for error in invocation.failures.values()]
    if (
        plan.cublas_compute_type is ComputeType.COMPUTE_32F_FAST_TF32
        and info.uses_tensor_cores is False
    ):
        rows.append(
            (
                "note",
                "TF32 is allowed, but this algorithm multiplies float32 numbers, without tensor cores",
            )
        )
    fallback = executor.fallback
    if not fallback and call != plan.call:
        fallback = (
            "a pointer is not a multiple of 16 bytes: operands are packed, or the product is staged"
        )
    rows += [("fallback", reason) for reason in (fallback, sparse) if reason]
    return tuple(rows)


def execution_info(plan: GemmPlan, execute: Executor) -> tuple[bool | None, str | None]:
    if not isinstance(execute, GemmExecutor):
        return None, None
    last = getattr(execute.last, "invocation", None)
    if last is None:
        return None, None
    words = filter(None, (last.info.text, execute.fallback))
    return last.info.uses_tensor_cores, "; ".join(words)


def stopwatch(arguments: Arguments) -> autotune.EventStopwatch:
    with runtime.on_device(arguments.a.device.index):
        return autotune.EventStopwatch(arguments.a.device.index, arguments.stream)


def tune(
    execute: Executor, arguments: Arguments, *, candidates: int, progress: Progress | None = None
) -> tuple[AlgorithmTiming, ...]:
    """Measure the algorithms of a product, the fastest first, and use it from now on; empty without cuBLASLt."""
    if not isinstance(execute, GemmExecutor) or execute.plan.call is None:
        return ()
    with runtime.on_device(arguments.a.device.index):
        measured = execute.use(arguments, lambda x: x.tune(arguments, candidates, progress))
        return tuple(
            AlgorithmTiming(x.rank, x.median_ms, bindings.describe_algorithm(x.algorithm).text)
            for x in measured
        )


@contextlib.contextmanager
def temporary(shape: Shape, dtype: DType, device: Device, stream: int = 0) -> Iterator[ArrayView]:
    nbytes = prod(shape) * dtype.itemsize
    index = device.index
    with runtime.on_device(index), memory.temporary(nbytes, index, stream) as address:
        yield ArrayView(dtype, shape, contiguous_strides(shape), device, None, False, address)


def staging_dtype(dtype: DType) -> DType:
    """Return float32 for 16-bit types, whose sums are float32, and other types unchanged."""
    return DType.FLOAT32 if dtype in (DType.FLOAT16, DType.BFLOAT16) else dtype


def copy(source: ArrayView, out: ArrayView, stream: int = 0) -> None:
    # All dimensions are those of a batch of single elements.
    col_stride = out.strides[-1] if out.ndim else 1
    target = MatrixStack.of(out.dtype, 1, 1, 0, col_stride, out.shape, out.strides)
    with runtime.on_device(out.device.index):
        steps = prepare_epilogue(Epilogue(source.dtype, 1, target), out.device.index)
        queue_all(steps, Addresses(product=source.address, out=out.address), stream)
