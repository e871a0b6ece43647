"""Native kernels that multiply numbers by the inverse scale and look for Inf and NaN in the same pass.

Importing this module imports numba.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from numba import types
from numba.extending import intrinsic

from lowprec.backends.cpu.packed.compilation import compile_kernel
from lowprec.backends.cpu.packed.native import (
    F32,
    F64,
    atomic_add,
    callable_at,
    load,
    pointer,
)

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
    def unscale(job, count, inverse):
        found = False
        factor = load(inverse, kind)
        index = atomic_add(job, 1)
        while index < count:
            piece = job + 8 + 24 * index
            source, target = load(piece, "i64"), load(piece + 8, "i64")
            x, y = _elements_at(source, kind), _elements_at(target, kind)
            if source == target:  # LLVM would take the loop below for one that may overlap
                for i in range(load(piece + 16, "i64")):
                    found |= x[i] - x[i] != 0  # NaN of Inf and NaN alone
                    x[i] *= factor
            else:
                for i in range(load(piece + 16, "i64")):
                    found |= x[i] - x[i] != 0
                    y[i] = x[i] * factor
            index = atomic_add(job, 1)
        return int(found)

    return unscale


@cache
def unscale_kernel(dtype: str) -> Callable[[int, int, int], int]:
    """Return the kernel of ``"float32"`` or ``"float64"``, to be called by each thread with three integers.

    Address of the job; how many pieces it has; the address of the inverse scale, of the same element type. A job is
    int64: 0, which counts the pieces that were taken, and for each piece the address of its numbers, the address of
    the results, the same one or memory that does not overlap, and how many there are. The kernel returns 1 if a number
    was Inf or NaN, else 0.
    """
    return callable_at(compile_kernel(_unscale_function(KINDS[dtype]), 3), 3)
