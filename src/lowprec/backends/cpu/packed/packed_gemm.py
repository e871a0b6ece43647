"""Matrix products by the macro-kernel and a micro-kernel of x86-64 CPUs: any strides, any epilogue.

`gemm` computes ``out = activation(alpha * A @ B + beta * C + bias)``. What the operands become is
the caller's choice (`rounding`); products of the rounded values are exact, sums are in float32
(int32 for int8), and the result is rounded once to the type of `out`.

A float16 or TF32 value has 11 significant bits and is the exact sum of two bfloat16 values, so on units for bfloat16
`fp16`, `tf32` and float16 storage run as four bfloat16 products that share one accumulator. So do all products of the
parts into which a mode such as `bf16x6` splits the operands: three, six or nine, and four for each of TF32 parts.

Numerics
--------
With u = 2**-24 and P products summed for each element (P = k in one part, 4 k in two),

    |computed - exact| <= gamma(P + 1) * (|A| @ |B|) + 2 * P * 2**-126 * (1 + max|A| + max|B|)

where A and B are the rounded operands and the parts of a pair, having one sign, sum to no more than
the value. gamma(p) = p * u / (1 - p * u). The second term, which FP32 units do not have, is absolute:
``TDPBF16PS`` takes subnormal inputs as zero and writes subnormal sums as zero, and so does the conversion of float32 to
bfloat16; a low part below 2**-126 is lost in the same way. It matters only to operands or results
near the lower end of the range of float32. Rounding of sums is to nearest even, whatever the
processor's rounding mode says.

The result does not depend on the number of threads, bit for bit.

Infinities and NaN: in one part they behave as in any product. In two parts Inf * 0 would appear
between the parts, so `gemm` finds them while packing and declines. Of operands that are split, every element that such
a value enters comes out NaN or infinite, and `gemm` tells that there is one.

Split operands: each chunk of k, of 2048 / parts at most, is summed anew and added to those before; `planning.bounds`
has the bound.
"""

from __future__ import annotations

import ctypes
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from lowprec.backends.cpu import buffers, threads
from lowprec.backends.cpu.packed import job as J
from lowprec.backends.cpu.packed.cutting import is_streamed
from lowprec.backends.cpu.packed.micro_kernels import MicroKernel
from lowprec.backends.cpu.packed.templates import (
    INT8_ALONE,
    Operand,
    Product,
    Template,
    Vector,
    anywhere,
    float_bits,
    product_of,
)

if TYPE_CHECKING:
    from lowprec.backends.cpu.packed.prepared_panels import Panels

_Job = ctypes.c_int64 * J.WORDS


def gemm(
    micro_kernel: MicroKernel,
    m: int,
    n: int,
    k: int,
    a: Operand,
    b: Operand,
    out: Operand,
    *,
    rounding: str,
    alpha: float = 1.0,
    beta: float = 0.0,
    c: Operand | None = None,
    bias: Vector | None = None,
    activation: str | None = None,
    panels: Panels | None = None,
) -> bool:
    """Compute ``out = activation(alpha * a @ b + beta * c + bias)``.

    All extents are at least 1. `a` (m x k) and `b` (k x n) are float32, bfloat16 or float16 in any combination, or both
    int8; `out` (m x n) is one of the three, or int32 for int8 operands. It must not overlap `a` or `b`, and may be the
    same memory as `c`, element by element. `c` (m x n) is float32, bfloat16 or float16, and not read if `beta` is 0.
    `alpha` and `beta` are rounded to float32; int8 takes the defaults only. `bias` (address, dtype, stride in elements)
    is added to each row; `activation` is "relu" or "gelu", in its tanh form.

    `rounding` ("bf16", "tf32", "fp16", "bf16x3", "bf16x6", "bf16x9", "tf32x3") is what float32 operands become: the
    nearest, or parts of the mode of this name; ties go to even, in TF32 away from zero. "fp16" means float16's
    digits: whoever calls has looked at the range. Storage of 16 or 8 bits stays what it is; "exact" is for products
    that have no float32 operand. With `panels` of `b`, that is not looked at; the
    columns of `out` are not contiguous then, unless its rows are, too.

    Returned is True if done. False if an operand in two parts (float32 in mode tf32 or fp16, or float16, on units for
    bfloat16) holds a value that is not finite after rounding: then `c` is as it was, also where `out` is the same
    memory; without `c` what `out` holds is undefined. False, too, if operands were split and a sum is NaN or infinite:
    then all is done, and such elements are NaN or infinite in what alpha, c, bias and activation were applied to.
    Raises ValueError if the types do not go together or are not the micro-kernel's, or int8 comes with an epilogue.
    """
    if panels is not None:
        b = Operand(0, panels.dtype, 0, 0)
    if beta == 0:
        c = None
    product = product_of(
        micro_kernel, m, n, k, anywhere(a), anywhere(b), anywhere(out), rounding,
        c and anywhere(c), bias and (0, *bias[1:]), activation,
    )  # fmt: skip
    return multiply(
        product, a.address, b.address, out.address, c.address if c else 0, bias[0] if bias else 0,
        alpha, beta, panels,
    )  # fmt: skip


def multiply(
    product: Product,
    a: int,
    b: int,
    out: int,
    c: int = 0,
    bias: int = 0,
    alpha: float = 1.0,
    beta: float = 0.0,
    panels: Panels | None = None,
) -> bool:
    """Compute a product of operands at these addresses; the rest is as `gemm` has it."""
    if panels is not None:
        assert not product.transposed, "panels of b are no panels of its transpose"
        if not panels.finite and product.kernels.parts_b > 1:
            return False
    workers = threads.num_threads() if product.shared else 1
    streams = is_streamed(product.m, product.n, product.out, out)
    template = product.template(workers, streams, panels is not None)
    job = _Job.from_buffer_copy(template.job)
    if product.transposed:
        a, b = b, a
    job[J.A], job[J.B], job[J.OUT], job[J.C], job[J.BIAS] = a, b, out, c, bias
    if alpha != 1:
        if product.out.dtype == "int32":
            raise ValueError(INT8_ALONE)
        job[J.ALPHA] = float_bits(alpha)
        job[J.EPILOGUE] = product.kernels.epilogue(True)
    job[J.BETA] = float_bits(beta)
    return _run(template, job, min(workers, max(template.tasks, 1)), panels)


def _run(template: Template, job: Any, workers: int, panels: Panels | None = None) -> bool:
    """Pack B into borrowed memory, if there are no panels, and let `workers` threads drive the job."""
    drive, scratch_bytes = template.drive, template.scratch_bytes
    with (
        buffers.borrow(template.packed_b_bytes)
        if panels is None
        else nullcontext(panels.address) as packed_b
    ):
        job[J.B_PACKED] = packed_b
        address = ctypes.addressof(job)

        def work() -> None:
            with buffers.borrow(scratch_bytes) as scratch:
                drive(address, scratch)

        threads.run(work, workers)
        return not (job[J.NOT_FINITE] or job[J.SUM_NOT_FINITE])
