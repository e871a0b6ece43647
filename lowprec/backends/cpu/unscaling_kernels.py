"""Compiled kernels that multiply by the inverse scale and find Inf and NaN. Importing this module imports numba."""

from __future__ import annotations

from functools import cache
from typing import Any

from numba import types
from numba.extending import intrinsic

from lowprec.backends.cpu.packed.compilation import compile_kernel
from lowprec.backends.cpu.packed.native import F32, F64, load, pointer

#: By element type: what kernels call it.
KINDS = {"float32": "f32", "float64": "f64"}
_ELEMENTS = {"f32": (F32, types.float32), "f64": (F64, types.float64)}


# LLVM makes vectors of a loop over the elements of a pointer, and none of one over addresses.
@intrinsic(prefer_literal=True)
def _elements_at(typing_context, address, kind):
    element, numba_type = _ELEMENTS[kind.literal_value]

    def generate(context, builder, signature, args):
        return pointer(builder, args[0], element)

    return types.CPointer(numba_type)(types.intp, kind), generate


def _unscale_function(kind: str) -> Any:
    def unscale(source, target, count, inverse):
        found = False
        factor = load(inverse, kind)
        x, y = _elements_at(source, kind), _elements_at(target, kind)
        if source == target:  # LLVM would take the loop below for one that may overlap
            for i in range(count):
                found |= x[i] - x[i] != 0  # NaN of Inf and NaN alone
                x[i] *= factor
        else:
            for i in range(count):
                found |= x[i] - x[i] != 0
                y[i] = x[i] * factor
        return int(found)

    return unscale


@cache
def unscale_kernel(dtype: str) -> int:
    """Return the address of the kernel of ``"float32"`` or ``"float64"``, a function of four integers.

    Addresses of the numbers and of the results (the same, or not overlapping), the count, and the address of the
    inverse scale of the same type. It returns 1 if a number was Inf or NaN, else 0.
    """
    return compile_kernel(_unscale_function(KINDS[dtype]), 4)
