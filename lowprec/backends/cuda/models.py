"""Capabilities of GPUs for planning: of a device, or of a model by published figures."""

from __future__ import annotations

import functools

from lowprec.backends.cuda.runtime import DeviceProperties
from lowprec.planning import Capabilities, KernelRow, Summation
from lowprec.planning.gpus import flops_per_byte, model_of, parse_capability, parse_model

CUBLASLT = KernelRow(
    name="cublaslt",
    units="cuBLASLt on a GPU",
    executor="lowprec.backends.cuda.executor:GemmExecutor",
    costs=(("tf32", 51.4 / 403), ("bfloat16", 51.4 / 806), ("float16", 51.4 / 806)),
    cost_per_element=100.0,
    cost_per_byte=13.0,
    summation=Summation.TENSOR_CORES,
    concatenates=True,
    keeps_b=True,
    is_cublaslt=True,
    truncates_tf32=True,
)

KERNELS = (CUBLASLT,)

#: cuBLASLt's workspace by compute capability (cuBLAS documentation, ``cublasSetWorkspace()``).
_LARGE_WORKSPACE, _SMALL_WORKSPACE = 32 << 20, 4 << 20
_LARGE_SINCE = (9, 0)


@functools.lru_cache(maxsize=64)
def present(found: DeviceProperties) -> Capabilities:
    """Return the capabilities of a GPU with these properties."""
    peaks: tuple[tuple[str, float], ...] = ()
    model = model_of(found.name)
    if model and found.clock_khz:
        # Cards of a model differ in clocks and multiprocessors (PCIe).
        here = found.multiprocessors * found.clock_khz / 1e3
        share = here / (model.multiprocessors * model.clock_mhz)
        peaks = tuple((fmt, rate * share) for fmt, rate in model.peak_tflops.items())
    return Capabilities(
        device=f"cuda:{found.index}",
        name=found.name,
        kernels=KERNELS,
        flops_per_byte=flops_per_byte(found.name, found.capability),
        compute_capability=found.capability,
        workspace_bytes=_workspace_bytes(found.capability),
        peak_tflops=peaks,
    )


def predicted(device: str) -> Capabilities:
    """Return the capabilities of a model; raise DeviceError if it is unknown."""
    model, capability = parse_model(device), parse_capability(device)
    stands_for = "" if capability is None else ", for compute capability {}.{}".format(*capability)
    return Capabilities(
        device="cuda",
        name=model.name + stands_for,
        kernels=KERNELS,
        flops_per_byte=model.flops_per_byte,
        compute_capability=model.compute_capability,
        workspace_bytes=_workspace_bytes(model.compute_capability),
        peak_tflops=tuple(model.peak_tflops.items()),
        bytes_per_second=model.bandwidth * 1e9,
        source=model.source,
    )


def _workspace_bytes(capability: tuple[int, int]) -> int:
    return _LARGE_WORKSPACE if capability >= _LARGE_SINCE else _SMALL_WORKSPACE
