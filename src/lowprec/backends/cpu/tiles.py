"""Products on the AMX tile units, by lowprec's own kernel.

The kernel takes one product at a time, at any strides, and applies the epilogue as it writes. An Inf or NaN in an
operand of two parts would meet the zero low part of the other and become NaN; the kernel sees that before it writes
and leaves the product alone, which then runs on FP32 units with the same rounded operands.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from lowprec.backends.cpu import amx, fp32_units
from lowprec.backends.cpu.stacks import (
    ACCUMULATOR,
    Stacks,
    finish_stacks,
    has_epilogue,
    scratch,
    stacks_of,
)
from lowprec.backends.execution import Arguments
from lowprec.formats import BFLOAT16, FLOAT16, TF32, DType
from lowprec.planning import GemmPlan, Kernel

__all__ = ["execute"]

#: The kernel's words for what float32 operands become.
_ROUNDINGS = {None: "exact", TF32: "tf32_away", BFLOAT16: "bf16", FLOAT16: "fp16"}


def execute(plan: GemmPlan, arguments: Arguments) -> None:
    """Run a plan whose kernel is one of the tile kernels."""
    one_product = _ONE_PRODUCT.get(plan.compute_dtype, _real_product)
    for single in _singles(stacks_of(plan, arguments)):
        if not one_product(plan, arguments, single):
            fallback = Kernel.MKL if plan.capabilities.mkl else Kernel.NUMPY
            fp32_units.execute_stacks(plan, fallback, arguments, single)


def _singles(stacks: Stacks) -> list[Stacks]:
    """Return the products of a batch one by one."""
    batch = stacks.out.shape[:-2]
    if not batch:
        return [stacks]
    a, b = (np.broadcast_to(x, batch + x.shape[-2:]) for x in (stacks.a, stacks.b))
    c, bias = stacks.c, stacks.bias
    return [
        Stacks(a[i], b[i], stacks.out[i], None if c is None else c[i], bias)
        for i in np.ndindex(batch)
    ]


def _operand(x: Any) -> amx.Operand:
    row_stride, col_stride = x.strides
    return amx.Operand(
        x.ctypes.data, x.dtype.name, row_stride // x.itemsize, col_stride // x.itemsize
    )


def _in_compute_dtype(plan: GemmPlan, x: Any) -> Any:
    """Return ``x``, converted (exactly) where the other operand's dtype is wider."""
    name = plan.compute_dtype.label
    return x if x.dtype.name == name else x.astype(name)


def _real_product(plan: GemmPlan, arguments: Arguments, single: Stacks) -> bool:
    a, b = _in_compute_dtype(plan, single.a), _in_compute_dtype(plan, single.b)
    bias = single.bias
    return amx.gemm(
        a.shape[0],
        b.shape[1],
        a.shape[1],
        _operand(a),
        _operand(b),
        _operand(single.out),
        rounding=_ROUNDINGS[fp32_units.rounding_format(plan)],
        alpha=float(arguments.alpha.real),
        beta=float(arguments.beta.real),
        c=None if single.c is None else _operand(single.c),
        bias=None
        if bias is None
        else (bias.ctypes.data, bias.dtype.name, bias.strides[0] // bias.itemsize),
        activation=plan.problem.activation,
    )


def _complex_product(plan: GemmPlan, arguments: Arguments, single: Stacks) -> bool:
    """Compute a complex product as four real ones on the components, which lie two steps apart."""
    dtype = ACCUMULATOR[plan.compute_dtype]
    a, b = (x if x.dtype == dtype else x.astype(dtype) for x in (single.a, single.b))
    m, n, k = a.shape[0], b.shape[1], a.shape[1]
    rounding = _ROUNDINGS[fp32_units.rounding_format(plan)]
    with scratch((m, n), dtype) as product:
        for x, y, target, sign, accumulate in (
            (a.real, b.real, product.real, 1.0, False),
            (a.imag, b.imag, product.real, -1.0, True),
            (a.real, b.imag, product.imag, 1.0, False),
            (a.imag, b.real, product.imag, 1.0, True),
        ):
            out = _operand(target)
            done = amx.gemm(
                m,
                n,
                k,
                _operand(x),
                _operand(y),
                out,
                rounding=rounding,
                alpha=sign,
                beta=float(accumulate),
                c=out if accumulate else None,
            )
            if not done:
                return False
        finish_stacks(plan, arguments, product, single)
    return True


def _int8_product(plan: GemmPlan, arguments: Arguments, single: Stacks) -> bool:
    a, b, out = single.a, single.b, single.out
    amx.gemm(
        a.shape[0],
        b.shape[1],
        a.shape[1],
        _operand(a),
        _operand(b),
        _operand(out),
        rounding="exact",
    )
    if has_epilogue(plan):
        finish_stacks(plan, arguments, out, single)
    return True


_ONE_PRODUCT = {DType.COMPLEX64: _complex_product, DType.INT8: _int8_product}
