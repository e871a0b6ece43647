"""The AVX512-BF16 micro-kernel: ``VDPBF16PS``, pairs of bfloat16 into float32."""

from __future__ import annotations

from functools import cache

from lowprec.backends.cpu.packed.job import MICRO_ARITY
from lowprec.backends.cpu.packed.micro_kernels import Pairs, format_pairs
from lowprec.backends.cpu.packed.micro_kernels.vectors import AVX512, micro_kernel_intrinsic
from lowprec.backends.cpu.packed.native import compile_kernel

_micro = micro_kernel_intrinsic(AVX512, "vdpbf16ps")


@cache
def micro_kernel(products: Pairs) -> int:
    """Address of the micro-kernel for these products of parts."""
    pairs = format_pairs(products)

    def micro(a, b, acc, steps, add, following):
        _micro(pairs, a, b, acc, steps, add, following)
        return 0

    return compile_kernel(micro, MICRO_ARITY)
