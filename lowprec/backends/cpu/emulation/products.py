"""Products of arrays by an emulated tensor core: batches, complex numbers, threads."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np

from lowprec.architectures import Architecture, parse_architecture
from lowprec.backends.cpu import casting, team, threads
from lowprec.backends.cpu.emulation import arrays
from lowprec.backends.cpu.emulation.arithmetic import Arithmetic, arithmetic
from lowprec.backends.cpu.emulation.arrays import NAN, Operand

#: Rows and columns of a block of the result; b's part of a block is read from the L2 cache.
_ROWS, _COLUMNS = 16, 512

_Accumulate = Callable[[Operand, Operand, Any, slice, slice, Arithmetic], None]


def __getattr__(name: str) -> SimpleNamespace:
    """Return the emulation of a kernel's row by name, such as ``hopper_tf32``, for use as a ``KernelRow.blas``."""
    architecture, _, fmt = name.partition("_")
    if architecture not in [x.value for x in Architecture]:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = arithmetic(parse_architecture(architecture), fmt)
    return SimpleNamespace(multiply=functools.partial(_multiply_into, found))


def _multiply_into(model: Arithmetic, a: Any, b: Any, out: Any) -> None:
    if out.dtype.kind != "c":
        out[...] = multiply(a, b, None, model)
        return
    # One chain of 2k products per component.
    out.real = multiply(-a.imag, b.imag, multiply(a.real, b.real, None, model), model)
    out.imag = multiply(a.imag, b.real, multiply(a.real, b.imag, None, model), model)


def multiply(a: Any, b: Any, c: Any | None, model: Arithmetic) -> Any:
    """Return ``c + a @ b`` in the arithmetic of a tensor core, as a new float32 array; batches broadcast.

    ``a`` (..., m, k) and ``b`` (..., k, n) are float32 numbers of the format of ``model``; ``c`` is None for zero.
    """
    shapes = [x.shape[:-2] for x in (a, b, c) if x is not None]
    batch = np.broadcast_shapes(*shapes)
    out = np.zeros((*batch, a.shape[-2], b.shape[-1]), np.float32)
    if c is not None:
        out[...] = c
    a, b = (np.broadcast_to(x, batch + x.shape[-2:]) for x in (a, b))
    with np.errstate(all="ignore"):
        for i in np.ndindex(batch):
            _product(a[i], b[i], out[i], model)
    out.view(np.uint32)[np.isnan(out)] = NAN
    return out


def _product(a: Any, b: Any, c: Any, model: Arithmetic) -> None:
    accumulate, (m, n) = _twin(), c.shape
    x, y = Operand.of(a, model.emin), Operand.of(b, model.emin)
    blocks = [
        (slice(i, min(i + _ROWS, m)), slice(j, min(j + _COLUMNS, n)))
        for j in range(0, n, _COLUMNS)
        for i in range(0, m, _ROWS)
    ]

    def run(block: tuple[slice, slice]) -> None:
        with np.errstate(all="ignore"):  # thread-local
            accumulate(x, y, c, *block, model)

    team.distribute(run, blocks, threads.num_threads())


@functools.cache
def _twin() -> _Accumulate:
    if not casting.can_compile():
        return arrays.accumulate
    from lowprec.backends.cpu.emulation import compiled

    return compiled.accumulate
