"""The AVX512-VNNI micro-kernel: ``VPDPBUSD``, fours of unsigned by signed int8 into int32."""

from __future__ import annotations

from functools import cache

from lowprec.backends.cpu.packed.job import MICRO_ARITY
from lowprec.backends.cpu.packed.micro_kernels.vectors import AVX512, micro_kernel_intrinsic
from lowprec.backends.cpu.packed.native import FINGERPRINT, compile_kernel

_micro = micro_kernel_intrinsic(AVX512, "vpdpbusd", offset=128)


@cache
def micro_kernel(parts_a: int, parts_b: int) -> int:
    """Address of the micro-kernel for operands in one part."""
    fingerprint = FINGERPRINT

    def micro(a, b, acc, steps, add, following):
        _micro(a, b, acc, steps, add, following)
        return fingerprint & 0

    return compile_kernel(micro, MICRO_ARITY)
