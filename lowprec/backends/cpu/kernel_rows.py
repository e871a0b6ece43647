"""The CPU's kernels as data, in order of preference: requirements, costs and operand formats.

A compiled unit is required by its name in ``library.UNITS``. Costs are in units of an FP32 flop of the same processor,
measured by ``benchmarks/bench_gemm.py`` on 2048 x 2048 products with two threads, for AMX on a Xeon, for vector units
on a Zen 5.
"""

from __future__ import annotations

from typing import Any

from lowprec.backends.cpu.library import BLOCK_TYPES, INSTRUCTION_SETS
from lowprec.formats import DType
from lowprec.planning import KernelRow
from lowprec.planning.kernels import BLOCKS, BLOCKS_CHUNK

_COMPILED = KernelRow(name="", units="", products_per_complex=4, packs=True, keeps_b=True)
_FP32 = _COMPILED._replace(
    formats=frozenset({"float32", "tf32", "float16", "bfloat16"}),
    k_chunk=384,
    holds_in=DType.FLOAT32,
    decodes_b=frozenset(BLOCK_TYPES),
)
#: Chunks of as many bytes as in FP32.
_BF16 = _COMPILED._replace(
    formats=frozenset({"bfloat16"}), cost_per_flop=0.4, cost_per_element=40.0, summation="pairs", k_chunk=768,
    decodes_b=frozenset({"mxfp8", "mxfp4", "nvfp4"}),
)  # fmt: skip
_INT8 = _COMPILED._replace(formats=frozenset({"int8"}), cost_per_flop=0.25, cost_per_element=10.0)


def _on(kernel: KernelRow, unit: str, words: str, **differences: Any) -> KernelRow:
    """Return the row of a kernel on one unit of the library."""
    sets = INSTRUCTION_SETS[unit]
    return kernel._replace(
        name=unit, requires=unit, units=words, instruction_sets=sets, **differences
    )


BF16_AMX = _on(
    _BF16, "bf16_amx", "bfloat16 tile units (AMX)",
    cost_per_flop=0.09, cost_per_element=130.0, summation="tiles",
)  # fmt: skip
#: A TF32 or float16 value is the exact sum of two bfloat16 values.
BF16_AMX_PAIR = BF16_AMX._replace(
    name="bf16_amx_pair", formats=frozenset({"tf32", "float16"}), cost_per_flop=0.35, parts=2
)
#: Four products at 0.4 of the cost of one in FP32 would be slower, so that TF32 and float16 have no such row.
BF16_AVX512 = _on(_BF16, "bf16_avx512", "bfloat16 vector units (AVX512-BF16)")
FP32_AVX512 = _on(_FP32, "fp32_avx512", "FP32 vector units (AVX-512)")
FP32_AVX2 = _on(_FP32, "fp32_avx2", "FP32 vector units (AVX2)")
INT8_AMX = _on(
    _INT8, "int8_amx", "int8 tile units (AMX)",
    cost_per_flop=0.06, cost_per_element=130.0,
)  # fmt: skip
INT8_AVX512 = _on(_INT8, "int8_avx512", "int8 vector units (AVX512-VNNI)")
INT8_AVXVNNI = _on(_INT8, "int8_avxvnni", "int8 vector units (AVX-VNNI)", cost_per_flop=0.55)
INT8_AVX2 = _on(_INT8, "int8_avx2", "int16 vector units (AVX2)", cost_per_flop=0.6)
BF16_NEON = _on(_BF16, "bf16_neon", "bfloat16 vector units (NEON)", summation="pairs_to_odd")
FP32_NEON = _on(_FP32, "fp32_neon", "FP32 vector units (NEON)")
INT8_NEON = _on(_INT8, "int8_neon", "int8 vector units (NEON)")

#: Every product, within the same bounds.
NUMPY = KernelRow(
    name="numpy", units="NumPy's BLAS", cost_per_element=300.0, holds_in=DType.FLOAT32, keeps_b=True
)


def _of_blocks(kernel: KernelRow) -> KernelRow:
    """Return the row for integers in blocks of a kernel that multiplies int8."""
    return kernel._replace(
        name=f"{kernel.name}_blocks",
        formats=frozenset({BLOCKS}),
        k_chunk=BLOCKS_CHUNK,
        summation="blocks",
        decodes_b=frozenset({"mxfp4", "nvfp4", "int8_blocks", "int8", "int4"}),
        cost_per_flop=kernel.cost_per_flop * 1.5,
    )


_X86_64 = (
    BF16_AMX, BF16_AMX_PAIR, BF16_AVX512, FP32_AVX512, FP32_AVX2, INT8_AMX, INT8_AVX512, INT8_AVXVNNI, INT8_AVX2,
    *map(_of_blocks, (INT8_AVX512, INT8_AVXVNNI, INT8_AVX2)),
)  # fmt: skip
_AARCH64 = (BF16_NEON, FP32_NEON, INT8_NEON, _of_blocks(INT8_NEON))
_NUMPY = (_of_blocks(NUMPY)._replace(name=NUMPY.name, decodes_b=frozenset()), NUMPY)
KERNELS = (*_X86_64, *_AARCH64, *_NUMPY)

_BY_MACHINE = {"x86_64": _X86_64, "aarch64": _AARCH64}


def kernels_of(machine: str) -> tuple[KernelRow, ...]:
    """Return the kernels of processors of an architecture, by Linux's name."""
    return (*_BY_MACHINE.get(machine, ()), *_NUMPY)
