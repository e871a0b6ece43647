"""The kernel row of cuBLASLt.

Costs are relative to FP32 at published rates of a GH200 at 8192 (FP32 51.4, TF32 403 TFLOP/s), 16-bit data at twice the
TF32 rate as in the data sheets. Rounding an element reads 4 bytes and moves 2 bytes twice; a byte costs 13 FP32 flops
(4 TB/s).
"""

from __future__ import annotations

from lowprec.planning import KernelRow, Summation

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
    cuts_tf32=True,
)

KERNELS = (CUBLASLT,)
