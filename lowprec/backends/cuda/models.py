"""Capabilities of GPUs for planning: of a device, or of a model by published figures."""

from __future__ import annotations

import functools
import sys
from typing import Any

from lowprec.backends.cuda.runtime import DeviceProperties
from lowprec.formats import ComputeType
from lowprec.planning import Capabilities, KernelRow
from lowprec.planning.gpus import flops_per_byte, model_of, parse_capability, parse_model
from lowprec.planning.tensor_cores import Capability

CUBLASLT = KernelRow(
    name="cublaslt",
    units="cuBLASLt on a GPU",
    costs=(("tf32", 51.4 / 403), ("bfloat16", 51.4 / 806), ("float16", 51.4 / 806)),
    cost_per_element=100.0,
    cost_per_byte=13.0,
    summation="tensor_cores",
    concatenates=True,
    keeps_b=True,
    is_cublaslt=True,
    truncates_tf32=True,
)

BF16X9 = CUBLASLT._replace(
    name="cublaslt_bf16x9",
    units="cuBLASLt's BF16x9 emulation of FP32, or FP32 where cuBLASLt expects that to be faster",
    requires="bf16x9",
    missing="cuBLASLt emulates FP32 on compute capability 10.0 and 10.3 only, from cuBLAS 12.9",
    cost_per_flop=9 * 51.4 / 806,
    cublas_emulation=ComputeType.COMPUTE_32F_EMULATED_16BFX9,
    part_format="bfloat16",
    part_products=9,
)
FIXED_POINT = CUBLASLT._replace(
    name="cublaslt_fixed_point",
    units="cuBLASLt's fixed-point emulation of FP64, or FP64 where cuBLASLt expects that to be faster",
    requires="fixed_point",
    missing="cuBLASLt emulates FP64 on compute capability 8.x, 9.0, 10.x, 11.0 and 12.x only, from cuBLAS 13.1",
    cublas_emulation=ComputeType.COMPUTE_64F_EMULATED_FIXEDPOINT,
    part_format="int8",
)
KERNELS = (BF16X9, FIXED_POINT, CUBLASLT)

#: Versions of cuBLAS with BF16x9 (CUDA 12.9) and with fixed-point emulation (CUDA 13.0 update 2, cuBLAS 13.1.0).
_BF16X9_SINCE = 120900
_FIXED_POINT_SINCE = 130100

#: cuBLASLt's workspace by compute capability (cuBLAS documentation, ``cublasSetWorkspace()``).
_LARGE_WORKSPACE = 32 << 20
_SMALL_WORKSPACE = 4 << 20
_LARGE_SINCE = (9, 0)


def _features(capability: Capability, cublas_version: int) -> frozenset[str]:
    """Return the emulations that cuBLAS supports (cuBLAS documentation, "Floating Point Emulation")."""
    features = set()
    if cublas_version >= _BF16X9_SINCE and capability in ((10, 0), (10, 3)):
        features.add("bf16x9")
    has_fixed_point = capability[0] in (8, 10, 12) or capability in ((9, 0), (11, 0))
    if cublas_version >= _FIXED_POINT_SINCE and has_fixed_point:
        features.add("fixed_point")
    return frozenset(features)


@functools.cache
def present(device: DeviceProperties, cublas_version: int = 0) -> Capabilities:
    """Return the capabilities of a GPU with these properties, by this version of cuBLAS."""
    peaks: tuple[tuple[str, float], ...] = ()
    model = model_of(device.name)
    capability = device.capability
    if model and device.clock_khz:
        # Cards of a model differ in clocks and multiprocessors (PCIe).
        share = (
            device.multiprocessors
            * device.clock_khz
            / 1e3
            / (model.multiprocessors * model.clock_mhz)
        )
        peaks = tuple((fmt, rate * share) for fmt, rate in model.peak_tflops.items())
    return _capabilities(
        capability,
        cublas_version,
        device=f"cuda:{device.index}",
        name=device.name,
        flops_per_byte=flops_per_byte(device.name, capability),
        peak_tflops=peaks,
    )


def predicted(device: str) -> Capabilities:
    """Return the capabilities of a model with the latest cuBLAS; raise DeviceError if it is unknown."""
    model = parse_model(device)
    capability = parse_capability(device)
    stands_for = "" if capability is None else ", for compute capability {}.{}".format(*capability)
    return _capabilities(
        model.compute_capability,
        sys.maxsize,
        device="cuda",
        name=model.name + stands_for,
        flops_per_byte=model.flops_per_byte,
        peak_tflops=tuple(model.peak_tflops.items()),
        bytes_per_second=model.bandwidth * 1e9,
        source=model.source,
    )


def _capabilities(capability: Capability, cublas_version: int, **others: Any) -> Capabilities:
    return Capabilities(
        kernels=KERNELS,
        features=_features(capability, cublas_version),
        compute_capability=capability,
        workspace_bytes=_LARGE_WORKSPACE if capability >= _LARGE_SINCE else _SMALL_WORKSPACE,
        **others,
    )
