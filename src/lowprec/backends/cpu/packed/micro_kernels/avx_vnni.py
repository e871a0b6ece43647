"""The AVX-VNNI micro-kernel: ``VPDPBUSD``, as AVX512-VNNI has it, on 256 bits."""

from __future__ import annotations

from functools import cache

from lowprec.backends.cpu.packed.job import MICRO_ARITY
from lowprec.backends.cpu.packed.micro_kernels import Pairs, format_pairs
from lowprec.backends.cpu.packed.micro_kernels.vectors import AVX2, micro_kernel_intrinsic
from lowprec.backends.cpu.packed.native import compile_kernel

_micro = micro_kernel_intrinsic(AVX2, "{vex} vpdpbusd", offset=128)


@cache
def micro_kernel(products: Pairs) -> int:
    """Address of the micro-kernel for these products of parts."""
    pairs = format_pairs(products)

    def micro(a, b, acc, steps, add, following):
        _micro(pairs, a, b, acc, steps, add, following)
        return 0

    return compile_kernel(micro, MICRO_ARITY)
