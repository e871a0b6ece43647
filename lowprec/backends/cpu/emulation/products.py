"""Products of arrays by an emulated tensor core: batches and complex numbers."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np

from lowprec.arrays.view import data_pointer
from lowprec.backends.cpu import library, threads
from lowprec.backends.cpu.emulation import arrays
from lowprec.planning.tensor_cores import Accumulation


def multiply(a: Any, b: Any, c: Any | None, model: Accumulation, scales: Any = None) -> Any:
    """Return ``c + a @ b`` in the arithmetic of a tensor core, as a new float32 array; batches broadcast.

    ``a`` (..., m, k) and ``b`` (..., k, n) are float32 numbers of the format of ``model``; ``c`` is None for zero.
    ``scales`` are the exponents of the scales of groups of ``a`` (..., m, groups) and ``b`` (..., groups, n), None for
    zeros.
    """
    shapes = [x.shape[:-2] for x in (a, b, c) if x is not None]
    batch = np.broadcast_shapes(*shapes)
    out = np.zeros((*batch, a.shape[-2], b.shape[-1]), np.float32)
    if c is not None:
        out[...] = c
    a, b = (np.broadcast_to(x, batch + x.shape[-2:]) for x in (a, b))
    exponents = None
    if scales is not None:
        scales = [np.broadcast_to(x, batch + x.shape[-2:]) for x in scales]
    for i in np.ndindex(batch):
        if scales is not None:
            exponents = [np.ascontiguousarray(x[i], np.int32) for x in scales]
        _accumulate(a[i], b[i], out[i], model, exponents)
    return out


def multiply_scaled(a: Any, b: Any, scales: Any, emins: Any, model: Accumulation) -> Any:
    """Return the product of numbers whose blocks along k have scales, of groups in order, as a new float32 array.

    ``scales`` are those of each number, ``emins`` the exponents of the least normal numbers of both formats, or of the
    scales if these are factors of whole dot products.
    """
    of_a, of_b = scales
    step = model.group
    if model.dot > 1:
        step = model.dot
    blocks = of_a[..., ::step], of_b[..., ::step, :]
    if model.dot > 1:
        return arrays.sum_dots(a, b, blocks, emins, model)
    with np.errstate(invalid="ignore"):
        # as numbers of one format, whose least exponent is that of the model
        least = [model.emin - emin for emin in emins]
        numbers = []
        exponents = []
        for values, of_each, of_blocks, shift in zip((a, b), scales, blocks, least, strict=True):
            known = np.where(np.isnan(of_each), np.nan, values)
            numbers.append(np.ldexp(known, shift).astype(np.float32))
            exponents.append(np.frexp(of_blocks)[1] - 1 - shift)
    x, y = numbers
    return multiply(x, y, None, model, exponents)


def _accumulate(a: Any, b: Any, c: Any, model: Accumulation, scales: Any) -> None:
    """Compute ``c += a @ b`` in place; ``c`` is contiguous."""
    functions = library.library()
    status = library.UNSUPPORTED
    if functions is not None:
        a = np.ascontiguousarray(a, np.float32)
        b = np.ascontiguousarray(b, np.float32)
        core = (ctypes.c_int32 * 6)(*model[1:7])  # an ``lp_tensor_core_model``
        exponents: list[int | None] = [None, None]
        if scales is not None:
            exponents = [data_pointer(x) for x in scales]
        status = functions.emulate(
            data_pointer(a),
            data_pointer(b),
            data_pointer(c),
            *c.shape,
            a.shape[-1],
            *exponents,
            ctypes.addressof(core),
            threads.num_threads(),
        )
    if status == library.UNSUPPORTED:
        arrays.accumulate(a, b, c, model, scales)
