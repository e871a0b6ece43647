"""The epilogue of the packed kernels, applied to a float32 product of another library."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

from lowprec.backends.cpu import cpuinfo
from lowprec.backends.cpu.packed import job as J
from lowprec.backends.cpu.packed.jobs import Operand, Vector, Words, epilogue_words, float_bits, words_of
from lowprec.backends.execution import imported

_KERNELS = "lowprec.backends.cpu.packed.epilogue"

#: Function of the addresses of product, result, c and bias (0 for none), alpha, beta, and the address of
#: `J.BLOCK_SCRATCH_BYTES` of memory at a multiple of 64.
Epilogue = Callable[[int, int, int, int, float, float, int], None]


@functools.cache
def is_usable() -> bool:
    """Whether the epilogue can be compiled; without F16C, LLVM aborts for lack of a float16 conversion."""
    return "f16c" in cpuinfo.cpu_flags()


@functools.lru_cache(maxsize=512)
def epilogue_of(
    m: int, n: int, out: Operand, c: Operand | None, bias: Vector | None, activation: str | None, computes: bool = True
) -> Epilogue:
    """Return the epilogue of m contiguous rows of n numbers.

    Without ``computes`` it only casts and writes. It requires numba and :func:`is_usable`.
    """
    # Imported here, because imports fail during the exit of Python.
    write: int = imported(f"{_KERNELS}:epilogue_kernel")(out.dtype, computes)
    words = {J.M: m, J.N: n, J.EPILOGUE: write, **out.words(J.OUT)}
    kernel: Callable[[int, int, int], int] = imported(f"{_KERNELS}:rows_kernel")()
    made = words_of(words | epilogue_words(c, bias, activation))

    def apply(product: int, out: int, c: int, bias: int, alpha: float, beta: float, scratch: int) -> None:
        job = Words.from_buffer_copy(made)
        job[J.OUT], job[J.C], job[J.BIAS] = out, c, bias
        job[J.ALPHA], job[J.BETA] = float_bits(alpha), float_bits(beta if c else 0.0)
        kernel(product, ctypes.addressof(job), scratch)

    return apply
