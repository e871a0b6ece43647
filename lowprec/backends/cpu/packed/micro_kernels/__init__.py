"""The micro-kernels as data: instruction sets, element type, module that emits the code, and availability.

A micro-kernel multiplies a strip of 32 rows of A by a strip of 32 columns of B over some steps of k, as
``macro_kernel`` calls it. Its row names the emitting module, so that numba is imported with the first product.
"""

from __future__ import annotations

import ctypes
import sys
from dataclasses import dataclass
from functools import lru_cache

from lowprec.backends.cpu import numba_import
from lowprec.backends.cpu.cpuinfo import cpu_flags, is_x86_64, system_flags
from lowprec.planning.bounds import CHUNK_STEPS
from lowprec.policy import environment

_AVX512 = frozenset({"avx512f", "avx512bw", "avx512vl"})

#: Which part of A is multiplied with which part of B, in the order in which the products are summed.
Pairs = tuple[tuple[int, int], ...]


def format_pairs(pairs: Pairs) -> str:
    """Return pairs as a text, which a kernel's code can hold as a constant."""
    return " ".join(f"{i}{j}" for i, j in pairs)


def parse_pairs(text: str) -> Pairs:
    """Return the pairs of a text."""
    return tuple((int(pair[0]), int(pair[1])) for pair in text.split())


@dataclass(frozen=True, slots=True)
class MicroKernel:
    """What one micro-kernel is and needs."""

    name: str  # also that of the feature which kernels' rows require
    unit: str  # the units it runs on, for people
    cpu_flags: frozenset[str]  # as the system calls them; packing and epilogue need theirs as well
    storage: str  # the element type it multiplies: ``"bfloat16"``, ``"int8"`` or ``"float32"``
    module: str  # whose ``emit`` returns its address by its name and the products of parts
    #: Packed A of a task: half of the second-level cache of processors with AMX and of those with AVX-512 (measured on
    #: a Zen 5), three quarters of that of others.
    block_bytes: int = 1 << 20
    #: A piece of a strip of B that several strips of A run past: as large as the first-level cache, or twice that where
    #: the second-level cache feeds the units and fewer visits to the accumulators are worth more.
    inner_bytes: int = 32 << 10
    #: Steps of k for which A is packed at a time where there are more than `CHUNK_STEPS`.
    chunk_steps: int = CHUNK_STEPS
    #: Products of numbers from which threads share the work: handing it over takes 1 to 10 us.
    shared_from: int = 1 << 20
    has_tiles: bool = False  # whether tiles are to be configured, which the system must permit
    offset_a: int = 0  # added to each element of A while packing, so that it is unsigned
    #: Flags of processors that leave its products to OpenBLAS, because the two have not been compared there.
    unmeasured_with: frozenset[str] = frozenset()

    def is_for(self, flags: frozenset[str]) -> bool:
        """Whether a processor with these flags has the units, and products are to run on them."""
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
#: Pieces of B are as long as a BLAS sums, 384 products, so that errors are as large; where k is long, A is packed in
#: shorter chunks, over more rows for each reading of B, because the numbers are twice as wide.
AVX512_FP32 = MicroKernel(
    "avx512_fp32", "FP32 vector units (AVX-512)", _AVX512, "float32", "vectors",
    block_bytes=512 << 10, inner_bytes=48 << 10, chunk_steps=8,
    unmeasured_with=frozenset({"amx_bf16"}),
)  # fmt: skip
#: Of processors that have no AVX-512.
AVX_VNNI = MicroKernel(
    "avx_vnni", "int8 vector units (AVX-VNNI)", frozenset({"avx2", "fma", "avx_vnni"}), "int8", "vectors",
    block_bytes=768 << 10, offset_a=128,
)  # fmt: skip

MICRO_KERNELS = (AMX_BF16, AMX_INT8, AVX512_BF16, AVX512_VNNI, AVX512_FP32, AVX_VNNI)


def _request_permission() -> bool:
    """Ask the kernel to let this process use tile data; it is off until asked for."""
    arch_prctl, req_xcomp_perm, xtiledata = 158, 0x1023, 18
    libc = ctypes.CDLL(None, use_errno=True)
    return int(libc.syscall(arch_prctl, req_xcomp_perm, xtiledata)) == 0


@lru_cache(maxsize=len(MICRO_KERNELS))
def unsupported_reason(kernel: MicroKernel) -> str:
    """Return the reason why a micro-kernel does not run here, or an empty string; cached.

    It needs Linux on x86-64, its instruction sets, numba, and for tiles the kernel's permission, which is requested
    here.
    """
    if sys.platform != "linux" or not is_x86_64():
        return f"the {kernel.unit} are used on Linux on x86-64 only"
    absent = sorted(kernel.cpu_flags - cpu_flags())
    if absent and kernel.cpu_flags <= system_flags():
        return f"LOWPREC_MAX_CPU_ISA hides the {kernel.unit} of this CPU"
    if absent:
        return f"this CPU has no {kernel.unit}: {absent[0]} is missing"
    reason = numba_import.failure()
    # Whether numba is there, not whether it can be imported: a product that does not need it should not pay 0.3 s.
    if not numba_import.is_installed():
        reason = 'numba is not installed (pip install "lowprec[cpu]")'
    elif not reason and environment.numba_is_off():
        reason = "NUMBA_DISABLE_JIT is set"
    if reason:
        return f"{reason}, so the {kernel.unit} stay idle"
    if kernel.has_tiles and not _request_permission():
        return f"the system does not grant this process the {kernel.unit}"
    return ""


def is_available(kernel: MicroKernel) -> bool:
    """Whether a micro-kernel can run here."""
    return not unsupported_reason(kernel)
