"""Sums and dot products of shifted lines in host memory, compiled: convolutions of few channels a group."""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from typing import Any

import numpy as np

from lowprec.arrays.view import data_pointer
from lowprec.backends.cpu import library, threads
from lowprec.errors import BackendError

#: Numbers after the last one of an operand that may be read, for each column of its step.
SLACK = 16


def are_available() -> bool:
    """Whether the library has kernels for this CPU."""
    return library.library() is not None and bool(library.units())


def offsets(dimensions: Iterable[tuple[int, int]]) -> Any:
    """Return the offsets of all indices over dimensions, given by extent and stride, in row-major order."""
    return library.offsets(dimensions)


def lines_of(
    width: int, x_step: int, across: bool = False, dots: int = 0, **given: Any
) -> library.Lines:
    """Return the description of lines by arrays of offsets, named as in ``lp_lines``, which it keeps alive."""
    found = library.Lines(width=width, x_step=x_step, across=across, dots=dots)
    found.kept = []
    for name, values in given.items():
        array = np.ascontiguousarray(values, np.int64)
        found.kept.append(array)
        setattr(found, name, data_pointer(array))
    found.lines = len(given["out_lines"])
    found.terms = len(given["x_terms"])
    return found


def sum_lines(lines: library.Lines, x: int, w: int, bias: int, out: int) -> None:
    """Compute ``out[line] = bias + sum(x[line + term] * w[line + term])`` from addresses of float32 numbers."""
    call = library.functions().sum_lines
    _check(call(ctypes.byref(lines), x, w, bias, out, threads.num_threads()))


def dot_lines(lines: library.Lines, x: int, y: int, out: int) -> None:
    """Compute ``out[dot, term]``, the sum of ``x[dot + line + term] . y[dot + line]`` over lines."""
    call = library.functions().dot_lines
    _check(call(ctypes.byref(lines), x, y, out, threads.num_threads()))


def _check(status: int) -> None:
    if status:
        raise BackendError(f"the compiled library returned status {status} for a sum of lines")
