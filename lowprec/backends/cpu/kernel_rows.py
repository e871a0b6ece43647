"""The CPU's kernels as data, in order of preference: requirements, costs and operand formats.

Costs are in units of an FP32 flop, measured by ``benchmarks/bench_gemm.py`` on 2048 x 2048 products with two threads,
for AMX on a Xeon, for vector units on a Zen 5.
"""

from __future__ import annotations

from lowprec.formats import DType
from lowprec.planning import KernelRow, ReasonKind, Summation

_MICRO_KERNELS = "lowprec.backends.cpu.packed.micro_kernels"

_TILES = KernelRow(
    name="",
    units="",
    executor="lowprec.backends.cpu.packed_products:prepare",
    cost_per_element=130.0,
    summation=Summation.TILES,
    products_per_complex=4,
    reads_any_strides=True,
    single_product=True,
    keeps_b=True,
    # Below, most of the kernel's work is padding.
    minimum_elements=8_000,
    minimum_elements_complex=100_000,
    minimum_k=16,
    minimum_extent_complex=64,
)

AMX_BF16 = _TILES._replace(
    name="amx_bf16",
    units="bfloat16 tile units (AMX)",
    formats=frozenset({"bfloat16"}),
    micro_kernel=f"{_MICRO_KERNELS}:AMX_BF16",
    requires="amx_bf16",
    decodes_b=True,
    instruction_sets=("avx512_bf16", "amx_tile", "amx_bf16"),
    cost_per_flop=0.09,
)

#: A TF32 or float16 value is the exact sum of two bfloat16 values.
AMX_BF16_PAIR = AMX_BF16._replace(
    name="amx_bf16_pair",
    units="bfloat16 tile units (AMX), on the exact sum of two bfloat16 parts",
    formats=frozenset({"tf32", "float16"}),
    cost_per_flop=0.35,
    # The overhead is larger, because the kernel may fall back.
    minimum_elements=20_000,
    parts=2,
    fallback=ReasonKind.NOT_FINITE_IN_TWO_PARTS,
)

#: All products of parts in one pass; as an estimate, each costs as much as a single product.
AMX_BF16_PARTS = AMX_BF16._replace(
    name="amx_bf16_parts",
    units="bfloat16 tile units (AMX), all products of parts in one pass",
    single_product=False,
    sums_products=True,
    minimum_elements=20_000,
    fallback=ReasonKind.NOT_FINITE_IN_PARTS,
)

#: The same for TF32 parts, each the exact sum of two bfloat16 parts.
AMX_BF16_PAIR_PARTS = AMX_BF16_PARTS._replace(
    name="amx_bf16_pair_parts",
    units="bfloat16 tile units (AMX), all products of parts, each the exact sum of two, in one pass",
    formats=frozenset({"tf32"}),
    cost_per_flop=AMX_BF16_PAIR.cost_per_flop,
    parts=2,
)

AMX_INT8 = _TILES._replace(
    name="amx_int8",
    units="int8 tile units (AMX)",
    formats=frozenset({"int8"}),
    micro_kernel=f"{_MICRO_KERNELS}:AMX_INT8",
    requires="amx_int8",
    instruction_sets=("amx_tile", "amx_int8"),
    cost_per_flop=0.06,
)

#: Not for TF32 and float16 values as bfloat16 parts: four products at half the cost of one in FP32 are slower.
AVX512_BF16 = _TILES._replace(
    name="avx512_bf16",
    units="bfloat16 vector units (AVX512-BF16)",
    micro_kernel=f"{_MICRO_KERNELS}:AVX512_BF16",
    formats=frozenset({"bfloat16"}),
    requires="avx512_bf16",
    decodes_b=True,
    instruction_sets=("avx512_bf16",),
    # Below, a BLAS multiplies the rounded operands in the time of the call overhead.
    minimum_elements=9_000,
    # Below, most of the work is padding.
    minimum_batch_flops=50_000,
    minimum_k=0,
    cost_per_flop=0.4,
    cost_per_element=40.0,
    summation=Summation.PAIRS,
)

#: Several products are slower than one in FP32, but faster than as many in FP32.
AVX512_BF16_PARTS = AVX512_BF16._replace(
    name="avx512_bf16_parts",
    units="bfloat16 vector units (AVX512-BF16), all products of parts in one pass",
    single_product=False,
    sums_products=True,
    minimum_elements=0,
    fallback=ReasonKind.NOT_FINITE_IN_PARTS,
)

AVX512_VNNI = AVX512_BF16._replace(
    name="avx512_vnni",
    units="int8 vector units (AVX512-VNNI)",
    micro_kernel=f"{_MICRO_KERNELS}:AVX512_VNNI",
    decodes_b=False,
    formats=frozenset({"int8"}),
    requires="avx512_vnni",
    instruction_sets=("avx512_vnni",),
    minimum_elements=0,
    # Below, NumPy computes a product in the time of padding a block.
    minimum_batch_flops=12_000,
    cost_per_flop=0.25,
    cost_per_element=10.0,
)

AVX_VNNI = AVX512_VNNI._replace(
    name="avx_vnni",
    units="int8 vector units (AVX-VNNI)",
    micro_kernel=f"{_MICRO_KERNELS}:AVX_VNNI",
    requires="avx_vnni",
    instruction_sets=("avx_vnni",),
    cost_per_flop=0.55,
)

#: The fastest kernel for few vectors, because its cost is reading the matrix once.
GEMV = KernelRow(
    name="gemv",
    units="FP32 units, rounding a matrix as it is read, for 1 to 4 vectors",
    executor="lowprec.backends.cpu.matrix_vector:prepare",
    formats=frozenset({"tf32", "bfloat16", "float16"}),
    requires="numba",
    cost_per_element=0.0,
    holds_in=DType.FLOAT32,
    single_product=True,
    keeps_b=True,
    real_only=True,
    vectors=range(1, 5),
    # Below, a BLAS multiplies the rounded operands in the time of the call overhead.
    minimum_elements=49_152,
)

#: Without rounding; a BLAS's matrix product packs its operands.
GEMV_FP32 = GEMV._replace(
    name="gemv_fp32",
    units="FP32 units, reading a matrix once, for 2 to 4 vectors",
    formats=frozenset({"float32"}),
    vectors=range(2, 5),
    # Below, OpenBLAS has kernels that do not pack.
    minimum_elements=400_000,
)

#: For processors without AVX-512: twice as fast as a BLAS, which packs the matrix.
GEMV_WIDE = GEMV._replace(
    name="gemv_wide",
    units="FP32 units, rounding a matrix as it is read, for 5 to 8 vectors",
    vectors=range(5, 9),
    minimum_elements=80_000,
)

#: Reads a quarter of the bytes of float32, and packs nothing.
GEMV_INT8 = GEMV._replace(
    name="gemv_int8",
    units="integer vector units, widening an int8 matrix as it is read, for 1 to 4 vectors",
    formats=frozenset({"int8"}),
    holds_in=None,
    keeps_b=False,
    # Below, the packed kernel is faster than the call overhead of this one.
    minimum_elements=100_000,
)

#: For formats without units: operands are rounded and widened while they are packed.
AVX512_FP32_ROUNDED = AVX512_BF16._replace(
    name="avx512_fp32_rounded",
    units="FP32 vector units (AVX-512), rounding the operands as they are packed",
    micro_kernel=f"{_MICRO_KERNELS}:AVX512_FP32",
    formats=frozenset({"tf32", "bfloat16", "float16"}),
    requires="avx512_fp32",
    missing="no AVX-512, or AMX, with which it has not been measured",
    instruction_sets=(),
    cost_per_flop=1.0,
    cost_per_element=0.0,
    holds_in=DType.FLOAT32,
    summation=Summation.SEQUENTIAL,
    real_only=True,
    minimum_elements=12_000,
    minimum_mn=5,
)

#: Each thread of a BLAS packs its own operands; this kernel shares them, but packs more of B before the first product.
AVX512_FP32 = AVX512_FP32_ROUNDED._replace(
    name="avx512_fp32",
    units="FP32 vector units (AVX-512)",
    formats=frozenset({"float32"}),
    # Below, it saves less time than importing numba takes.
    minimum_elements=3_000_000,
    minimum_batch_flops=0,
    minimum_mn=512,
    is_shallow=True,
)

#: numpy.matmul on the rounded operands.
NUMPY = KernelRow(
    name="numpy",
    units="NumPy's BLAS",
    executor="lowprec.backends.cpu.fp32_units:prepare",
    blas="lowprec.backends.cpu.gemm:NUMPY",
    cost_per_element=300.0,
    holds_in=DType.FLOAT32,
    keeps_b=True,
)

#: cblas_?gemm on the rounded operands.
OPENBLAS = NUMPY._replace(
    name="openblas",
    units="OpenBLAS",
    blas="lowprec.backends.cpu.gemm:OPENBLAS",
    requires="openblas",
    missing="scipy-openblas64 is not installed, or the address space is too limited for it",
    # Rounded by numba's kernels.
    cost_per_element=100.0,
    # Below, NumPy's loop over a batch is faster, and its BLAS uses one thread in any case.
    minimum_batch_flops=(1 << 19) + 1,
    minimum_batch_flops_vector=8_192,
    minimum_batch_flops_complex=65_536,
)

KERNELS = (
    GEMV, GEMV_FP32, GEMV_INT8, AMX_BF16_PARTS, AMX_BF16_PAIR_PARTS, AMX_BF16, AMX_BF16_PAIR, AMX_INT8,
    AVX512_BF16_PARTS, AVX512_BF16, AVX512_VNNI, AVX_VNNI, AVX512_FP32_ROUNDED, GEMV_WIDE, AVX512_FP32,
    OPENBLAS, NUMPY,
)  # fmt: skip
