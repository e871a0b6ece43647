"""Compiled kernels that multiply by the inverse scale and find Inf and NaN. Importing this module imports numba."""

from __future__ import annotations

from functools import cache
from typing import Any

from numba import types

from lowprec.backends.cpu.packed.compilation import compile_kernel
from lowprec.backends.cpu.packed.native import F32, F64, emitted, load, pointer

#: Element types: the names in `load`, in LLVM and in numba.
KINDS = {"float32": ("f32", F32, types.float32), "float64": ("f64", F64, types.float64)}


def _unscale_function(kind: str, element: Any, numba_type: Any) -> Any:
    # LLVM vectorises a loop over the elements of a pointer, but not one over addresses.
    elements_at = emitted(types.CPointer(numba_type))(lambda builder, address: pointer(builder, address, element))

    def unscale(source, target, count, inverse):
        found = False
        factor = load(inverse, kind)
        x, y = elements_at(source), elements_at(target)
        if source == target:  # separate, because LLVM must assume overlap in the loop below
            for i in range(count):
                found |= x[i] - x[i] != 0  # x - x is NaN for Inf and NaN only
                x[i] *= factor
        else:
            for i in range(count):
                found |= x[i] - x[i] != 0
                y[i] = x[i] * factor
        return int(found)

    return unscale


@cache
def unscale_kernel(dtype: str) -> int | None:
    """Return the address of the kernel of ``"float32"`` or ``"float64"``, a function of four integers; otherwise None.

    They are the addresses of the numbers and of the results (the same, or not overlapping), the count, and the address
    of the inverse scale, of the same type. It returns 1 if a number is Inf or NaN, otherwise 0.
    """
    return compile_kernel(_unscale_function(*KINDS[dtype])) if dtype in KINDS else None
