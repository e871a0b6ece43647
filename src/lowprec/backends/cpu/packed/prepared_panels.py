"""The packed panels of a prepared operand, which any product with it multiplies.

How B is packed depends on k, n, the element types and the micro-kernel, and on no other operand: strips of 32 columns,
each whole, one after the other. Where a result is written past the caches a shift puts columns of zeros before the
first, which depends on the address of the result; with panels it is left out.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import numpy as np

from lowprec.arrays.prepared_view import Form, PreparedView
from lowprec.backends.cpu import buffers, threads
from lowprec.backends.cpu.packed import job as J
from lowprec.backends.cpu.packed.micro_kernels import MicroKernel

_PAGE = 4096
#: Elements from which several threads pack.
_SHARED_FROM = 1 << 20


class Panels(NamedTuple):
    """B as a micro-kernel reads it.

    Parameters
    ----------
    memory : numpy.ndarray
        What holds them.
    address : int
        Of the first.
    finite : bool
        Whether no value became infinite or NaN; looked at where operands have two parts.
    dtype : str
        In which it was multiplied.
    """

    memory: Any
    address: int
    finite: bool
    dtype: str


class PackedAs(NamedTuple):
    """What the packing of B depends on, beside its elements."""

    micro_kernel: MicroKernel
    a_dtype: str
    b_dtype: str
    out_dtype: str
    rounding: str


def panels_of(
    view: PreparedView,
    packed_as: PackedAs,
    matrix: Callable[[], AbstractContextManager[Any]],
    component: int = 0,
) -> Panels:
    """Return the panels of the one matrix of a view, made with the first product.

    Parameters
    ----------
    view : PreparedView
    packed_as : PackedAs
    matrix : callable
        Returns a context manager of what is packed, shape (k, n), in the type in which it is multiplied.
    component : int
        0 for the number or its real part, 1 for the imaginary part.
    """
    micro_kernel, *names = packed_as
    key = (micro_kernel.name, *names, component, view.address, view.shape, view.strides)

    def make() -> Form:
        with matrix() as x:
            panels = _pack(packed_as, x)
        return Form(panels, panels.memory.nbytes)

    found: Panels = view.form(key, make)
    return found


def _pack(packed_as: PackedAs, x: Any) -> Panels:
    from lowprec.backends.cpu.packed import packed_gemm

    k, n = x.shape
    shared = k * n >= _SHARED_FROM
    job = packed_gemm.packing_job(*packed_as, n, k, packed_gemm.operand_of(x))
    memory = np.empty(job.packed_b_bytes + _PAGE, np.uint8)
    address = -(-int(memory.ctypes.data) // _PAGE) * _PAGE
    job.job[J.B_PACKED] = address
    job_address = ctypes.addressof(job.job)

    def work() -> None:
        with buffers.borrow(job.scratch_bytes) as scratch:
            job.drive(job_address, scratch)

    threads.run(work, threads.num_threads() if shared else 1)
    return Panels(memory, address, not job.job[J.NOT_FINITE], packed_as.b_dtype)
