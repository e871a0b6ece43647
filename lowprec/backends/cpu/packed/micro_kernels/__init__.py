"""The micro-kernels as data: instruction sets, element type, module that emits the code, and availability.

A micro-kernel multiplies a strip of 32 rows of A by a strip of 32 columns of B over some steps of k; see
``macro_kernel``. The emitting module is given by name, because it imports numba.
"""

from __future__ import annotations

import ctypes
import sys
from dataclasses import dataclass
from functools import lru_cache

from lowprec.backends.cpu import numba_import
from lowprec.backends.cpu.cpuinfo import cpu_flags, is_x86_64, system_flags
from lowprec.planning.bounds import CHUNK_STEPS

_AVX512 = frozenset({"avx512f", "avx512bw", "avx512vl"})

#: Indices of parts of A and B that are multiplied, in the order of summation.
Pairs = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class MicroKernel:
    """Properties and requirements of one micro-kernel."""

    name: str  # also the name of the feature in ``KernelRow.requires``
    unit: str  # description of the hardware units
    cpu_flags: frozenset[str]  # operating system's names, including those for packing and epilogue
    storage: str  # multiplied element type: ``"bfloat16"``, ``"int8"`` or ``"float32"``
    module: str  # its ``emit`` returns the address for a name and the products of parts
    #: Packed A of a task: half of the L2 cache of processors with AMX and with AVX-512 (measured on a Zen 5), three
    #: quarters of that of others.
    block_bytes: int = 1 << 20
    #: Piece of a strip of B that is reused for several strips of A: the size of the L1 cache, or twice that if the L2
    #: cache is fast enough, which saves loads and stores of accumulators.
    inner_bytes: int = 32 << 10
    #: Steps of k per chunk of packed A, if there are more than `CHUNK_STEPS`.
    chunk_steps: int = CHUNK_STEPS
    #: Multiplications from which several threads are used; the hand-over takes 1 to 10 us.
    shared_from: int = 1 << 20
    has_tiles: bool = False  # tiles must be configured, with permission of the system
    offset_a: int = 0  # added to each element of A while packing, so that it is unsigned
    #: CPU flags with which OpenBLAS is used instead, because the two have not been compared there.
    unmeasured_with: frozenset[str] = frozenset()

    def is_for(self, flags: frozenset[str]) -> bool:
        """Whether this micro-kernel is used on a processor with these flags."""
        return self.cpu_flags <= flags and not self.unmeasured_with & flags


_AMX = "tile units (AMX)"
_AMX_FLAGS = frozenset({"amx_tile", "amx_bf16", "amx_int8", "avx512_bf16"}) | _AVX512

AMX_BF16 = MicroKernel("amx_bf16", _AMX, _AMX_FLAGS, "bfloat16", "amx", has_tiles=True)
AMX_INT8 = MicroKernel("amx_int8", _AMX, _AMX_FLAGS, "int8", "amx", has_tiles=True)

AVX512_BF16 = MicroKernel(
    "avx512_bf16", "bfloat16 vector units (AVX512-BF16)", frozenset({"avx512_bf16"}) | _AVX512, "bfloat16", "vectors",
    block_bytes=512 << 10, inner_bytes=64 << 10,
)  # fmt: skip
AVX512_VNNI = MicroKernel(
    "avx512_vnni", "int8 vector units (AVX512-VNNI)", frozenset({"avx512_vnni"}) | _AVX512, "int8", "vectors",
    block_bytes=512 << 10, inner_bytes=64 << 10, offset_a=128,
)  # fmt: skip
#: Pieces of B have 384 steps, as in a BLAS, for errors of the same size. If k is long, A is packed in shorter chunks of
#: more rows, because float32 numbers are twice as wide as bfloat16.
AVX512_FP32 = MicroKernel(
    "avx512_fp32", "FP32 vector units (AVX-512)", _AVX512, "float32", "vectors",
    block_bytes=512 << 10, inner_bytes=48 << 10, chunk_steps=8,
    unmeasured_with=frozenset({"amx_bf16"}),
)  # fmt: skip
#: For processors without AVX-512.
AVX_VNNI = MicroKernel(
    "avx_vnni", "int8 vector units (AVX-VNNI)", frozenset({"avx2", "fma", "avx_vnni"}), "int8", "vectors",
    block_bytes=768 << 10, offset_a=128,
)  # fmt: skip

MICRO_KERNELS = (AMX_BF16, AMX_INT8, AVX512_BF16, AVX512_VNNI, AVX512_FP32, AVX_VNNI)


def _request_permission() -> bool:
    """Request permission from the operating system to use tile data."""
    arch_prctl, req_xcomp_perm, xtiledata = 158, 0x1023, 18
    libc = ctypes.CDLL(None, use_errno=True)
    return int(libc.syscall(arch_prctl, req_xcomp_perm, xtiledata)) == 0


@lru_cache(maxsize=len(MICRO_KERNELS))
def unsupported_reason(kernel: MicroKernel) -> str:
    """Return the reason why a micro-kernel cannot run here, or an empty string; cached.

    It needs Linux on x86-64, its instruction sets, numba, and for tiles the system's permission, which is requested
    here.
    """
    if sys.platform != "linux" or not is_x86_64():
        return f"the {kernel.unit} are used on Linux on x86-64 only"
    absent = sorted(kernel.cpu_flags - cpu_flags())
    if absent and kernel.cpu_flags <= system_flags():
        return f"LOWPREC_MAX_CPU_ISA hides the {kernel.unit} of this CPU"
    if absent:
        return f"this CPU has no {kernel.unit}: {absent[0]} is missing"
    if reason := numba_import.missing():  # numba is not imported here, which takes 0.3 s
        return reason
    if kernel.has_tiles and not _request_permission():
        return f"the system does not grant this process the {kernel.unit}"
    return ""


def is_available(kernel: MicroKernel) -> bool:
    """Whether a micro-kernel can run here."""
    return not unsupported_reason(kernel)
