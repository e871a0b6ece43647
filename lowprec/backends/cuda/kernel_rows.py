"""What runs products on an NVIDIA GPU, as data.

Costs are published rates of a GH200 at 8192 (FP32 51.4, TF32 403 TFLOP/s), FP32 on the same device being 1, and twice
the TF32 rate for 16-bit data, as the data sheets of all capabilities have it. An element that is rounded is 4 bytes
read and twice 2 bytes of a 16-bit type, and a byte moved some 13 FP32 flops (4 TB/s).
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
