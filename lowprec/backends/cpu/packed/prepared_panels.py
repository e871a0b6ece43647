"""The packed panels of a prepared operand.

The layout of packed B, contiguous strips of 32 columns, depends on k, n, the element types and the micro-kernel. All
matrices of a stack are packed in the first product.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from lowprec.arrays.prepared_view import PackedOperand, PreparedView, QuantizedView
from lowprec.arrays.view import data_pointer
from lowprec.backends.cpu import buffers, team, threads
from lowprec.backends.cpu.packed import job as J
from lowprec.backends.cpu.packed.jobs import Words, kernels_of, operand_of, packing_job
from lowprec.backends.cpu.packed.micro_kernels import MicroKernel

_PAGE = 4096
#: Elements from which several threads pack.
_SHARED_FROM = 1 << 20


class Panels(NamedTuple):
    """Packed matrices of B, one after the other."""

    memory: Any  # owner of the memory, because the operand may release it during a product
    #: Address of the first matrix, and bytes between matrices.
    address: int
    step: int
    offsets: Any  # of the operand's matrices in bytes, ascending
    finite: tuple[bool, ...]  # for operands in two parts: whether all rounded values are finite
    dtype: str  # element type when packed
    #: For panels of codes: address of the kernel that decodes them, and strides in bytes between strips and steps.
    unpack: tuple[int, int, int] | None = None

    def panels_at(self, offset: int) -> Panels:
        """Return the panels of the matrix at an offset."""
        i = int(np.searchsorted(self.offsets, offset))
        return self._replace(address=self.address + i * self.step, finite=self.finite[i : i + 1])

    def from_column(self, column: int) -> Panels:
        """Return panels of codes from a column on, a multiple of 32."""
        assert self.unpack is not None, "other panels are used as a whole"
        return self._replace(address=self.address + column // 32 * self.unpack[1])

    def addresses(self, offsets: Any) -> Any:
        """Return the addresses of the panels of matrices by their offsets."""
        return self.address + self.step * np.searchsorted(self.offsets, offsets)


class PackedAs(NamedTuple):
    """The parameters of packing B, in addition to its elements."""

    micro_kernel: MicroKernel
    a_dtype: str
    b_dtype: str
    rounding: str
    component: int = 0  # 0 for the number or its real part, 1 for the imaginary part

    def key(self, shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[Any, ...]:
        """Return the cache key of the panels; it differs for the transpose."""
        return (
            self.micro_kernel.name, self.a_dtype, self.b_dtype, self.rounding, self.component, shape, strides,
        )  # fmt: skip


#: Casts a matrix to the type in which it is multiplied.
Convert = Callable[[Any, buffers.Workspace], Any]


def panels_of(view: PreparedView, packed_as: PackedAs, convert: Convert) -> Panels:
    """Return the panels of a prepared matrix, or of one of a stack."""
    offset = view.address - view.whole.address
    return stack_of(view.whole, packed_as, convert).panels_at(offset)


def stack_of(view: PreparedView, packed_as: PackedAs, convert: Convert) -> Panels:
    """Return the panels of a prepared operand, packed in the first product."""

    def make() -> PackedOperand:
        made = _coded(view, packed_as) or _pack(packed_as, dict(_matrices(view)), convert)
        return PackedOperand(made, 0 if made.unpack else made.memory.nbytes)

    found: Panels = view.packed_operand(packed_as.key(view.shape, view.strides), make)
    return found


def _matrices(view: PreparedView) -> Iterator[tuple[int, Any]]:
    x = view.ndarray()
    if x.ndim == 1:
        x = x[:, None]
    steps = x.strides[:-2]
    for index in np.ndindex(*[n if step else 1 for n, step in zip(x.shape, steps, strict=False)]):
        yield sum(i * step for i, step in zip(index, steps, strict=True)), x[index]


def _coded(view: PreparedView, packed_as: PackedAs) -> Panels | None:
    """Return the panels of an operand that is kept as codes; None for others."""
    if not (isinstance(view, QuantizedView) or view.dtype.is_float8):
        return None
    from lowprec.backends.cpu.packed import codes

    key = "records", view.shape, view.strides  # the same for all kernels
    name, records, offsets = view.packed_operand(key, lambda: _records(view))
    step, strip_bytes, step_bytes = records.strides
    kernel = codes.unpack_kernel(name, is_wide=packed_as.micro_kernel.storage == "float32")
    finite, unpack = (True,) * len(offsets), (kernel, strip_bytes, step_bytes)
    return Panels(records, data_pointer(records), step, offsets, finite, packed_as.b_dtype, unpack)


def _records(view: PreparedView) -> PackedOperand:
    """Return the format of an operand, the records of its matrices, and their offsets in bytes."""
    from lowprec.backends.cpu.packed.codes import records_of

    name, matrices = view.dtype.label, {}
    if isinstance(view, QuantizedView) and view.quantized.scales is not None:
        name = view.blocks.format
        parts = [np.atleast_2d(np.asarray(x)) for x in (view.quantized.codes, view.quantized.scales)]
        steps = [step * view.dtype.itemsize for step in view.strides[:-2]]
        for index in np.ndindex(view.shape[:-2]):
            offset = sum(i * step for i, step in zip(index, steps, strict=True))
            matrices[offset] = records_of(name, parts[0][index], parts[1][index])
    else:
        for offset, x in _matrices(view):
            matrices[offset] = records_of(name, np.ascontiguousarray(x.T).view(np.uint8), None)
    offsets = sorted(matrices)
    records = np.stack([matrices[x] for x in offsets])
    return PackedOperand((name, records, np.array(offsets)), records.nbytes)


def _pack(packed_as: PackedAs, matrices: dict[int, Any], convert: Convert) -> Panels:
    memory, address, finite = np.empty(0, np.uint8), 0, []
    offsets, kernels = sorted(matrices), kernels_of(*packed_as[:4])
    for i, offset in enumerate(offsets):
        with buffers.Workspace() as workspace:
            x = convert(matrices[offset], workspace)
            (k, n), b = x.shape, operand_of(x)
            job = packing_job(kernels, packed_as.micro_kernel, n, k, b)
            step = job.packed_bytes
            if not i:
                memory = np.empty(len(offsets) * step + _PAGE, np.uint8)
                address = -(-data_pointer(memory) // _PAGE) * _PAGE
            words = Words.from_buffer_copy(job.words)
            words[J.B], words[J.B_PACKED] = data_pointer(x), address + i * step
            workers = threads.num_threads() if k * n >= _SHARED_FROM else 1
            nbytes = job.workspace_bytes
            with buffers.borrow(workers * nbytes) as scratch:
                team.run(kernels.macro_kernel, ctypes.addressof(words), workers, scratch, nbytes)
        finite.append(not words[J.NOT_FINITE])
    return Panels(memory, address, step, np.array(offsets), tuple(finite), packed_as.b_dtype)
