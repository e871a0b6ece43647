"""A prepared ``cublasLtMatmul``: descriptors and algorithm are created once; a later call is one library call.

The heuristics' first choice may fail when it runs (pytorch 91436, rapidsai/raft 3098). The first use tries the choices
in their order and keeps the first that runs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from operator import add
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from lowprec.arrays.device_memory import LEGACY_STREAM, PER_THREAD_STREAM
from lowprec.arrays.view import NUMPY_DTYPES
from lowprec.backends.cuda import bindings, handles, memory, runtime
from lowprec.backends.cuda.bindings import Algorithm, AlgorithmInfo, Descriptor
from lowprec.backends.cuda.libraries import cached, libraries
from lowprec.errors import UnsupportedError
from lowprec.formats import ComputeType, DType
from lowprec.planning.cublaslt.calls import MANTISSA_BITS, CublasLtCall, LtMatrix

#: Largest alignment that matters.
ALIGNMENT_BYTES = 256

#: Address and bytes of a workspace; a product that needs more allocates its own.
Workspace: TypeAlias = tuple[int, int]
NO_WORKSPACE = (0, 0)

#: Attributes of the operation that are addresses.
_POINTERS = ("BIAS_POINTER", "A_SCALE_POINTER", "B_SCALE_POINTER")

#: Fixed-point emulation with as many mantissa bits as the data need for the accuracy of FP64, or else native FP64.
_FIXED_POINT = {
    "FIXEDPOINT_MANTISSA_CONTROL": 0,
    "FIXEDPOINT_MAX_MANTISSA_BIT_COUNT": MANTISSA_BITS,
}

#: ``cublasOperation_t``.
OPERATIONS = {"N": 0, "T": 1}


class LtOperands(NamedTuple):
    """Addresses of a call in cuBLASLt's order (bias and scales: 0 for none), and its factors."""

    first: int
    second: int
    c: int
    d: int
    bias: int
    scale_first: int
    scale_second: int
    alpha: complex
    beta: complex

    @property
    def attributes(self) -> tuple[int, int, int]:
        return self[4:7]


def alignment_of(*addresses: int) -> int:
    """Return the largest power of two, up to 256, that divides all addresses: of 512 and 48 it is 16."""
    bits = ALIGNMENT_BYTES
    for address in addresses:
        bits |= address
    return bits & -bits


class Number(NamedTuple):
    """Alpha or beta in host memory, and its address."""

    value: complex
    address: int
    memory: np.ndarray[Any, Any]


def number(value: complex, dtype: DType) -> Number:
    """Return a factor for a call."""
    return _number(value, dtype, repr(value))


@functools.lru_cache(maxsize=64)
def _number(value: complex, dtype: DType, _: str) -> Number:
    # The text distinguishes numbers that compare equal, as those that differ in the sign of a zero.
    memory = np.empty(1, NUMPY_DTYPES[dtype])
    memory[0] = value if dtype.is_complex else value.real
    return Number(value, memory.ctypes.data, memory)


@cached
def _failures(device: int, call: CublasLtCall, alignment_bytes: int) -> dict[bytes, str]:
    """Return the errors of algorithms that failed at their first use on a device, for all invocations of a product."""
    return {}


class Invocation:
    """A product ready to run on one device, which is current, for pointers of one alignment.

    ``operands`` are those of the first call, whose alignment the search for algorithms uses. ``choose`` returns the
    algorithms to try; none raises UnsupportedError. ``product`` describes the product in errors.
    """

    def __init__(
        self,
        device: int,
        call: CublasLtCall,
        alignment_bytes: int,
        workspace_bytes: int,
        operands: LtOperands,
        choose: Callable[[Invocation], Sequence[Algorithm]],
        product: str,
    ) -> None:
        self.call = call
        self.alignment_bytes = alignment_bytes
        self.workspace_bytes = workspace_bytes
        self.has_scales = bool(operands.scale_first)
        self._device = device
        self.failures = _failures(device, call, alignment_bytes)
        self._product = product
        self._offsets = byte_offsets(call)
        with bindings.translated(f"prepare {product}"):
            self._descriptors = _descriptors(call, operands)
            self.pointers = tuple(x.pointer for x in self._descriptors)
            #: Descriptors of the operation that are not in use by a thread, with the pointers set in them.
            self._idle = [(self._descriptors[0], operands.attributes)]
            choices = [x for x in choose(self) if x.data not in self.failures]
            if not choices:
                first_errors = list(self.failures.values())[:1]
                errors = "; ".join(["", *first_errors])
                raise UnsupportedError(
                    f"cuBLASLt {bindings.cublas_version_text()} has no algorithm on this device for {product}{errors}"
                )
        self.use(*choices)

    def use(self, algorithm: Algorithm, *others: Algorithm) -> None:
        """Use this algorithm from now on, or the first of ``others`` that runs if its first use fails."""
        self._others: tuple[Algorithm, ...] | None = others
        data = np.frombuffer(algorithm.data, np.uint8).copy()
        self._chosen = (data.ctypes.data, algorithm.workspace_bytes, data)
        self.algorithm = algorithm

    @property
    def info(self) -> AlgorithmInfo:
        with bindings.translated(f"describe the algorithm of {self._product}"):
            return bindings.describe_algorithm(self.algorithm)

    def run(
        self, handle: int, stream: int, operands: LtOperands, workspace: Workspace = NO_WORKSPACE
    ) -> None:
        """Queue the product; alpha and beta are read before this returns."""
        scale_dtype = self.call.scale_dtype
        alpha = number(operands.alpha, scale_dtype)
        beta = number(operands.beta, scale_dtype)
        pointers = [tuple(map(add, operands[:4], offsets)) for offsets in self._offsets]
        # Bias and scales are part of the descriptor, so no other thread may use it until cublasLtMatmul returns. If the
        # call fails, the descriptor is destroyed.
        operation = self._operation(operands)
        self.queue(handle, stream, alpha, beta, pointers, workspace, operation.pointer)
        self._idle.append((operation, operands.attributes))

    def _operation(self, operands: LtOperands) -> Descriptor:
        """Return a descriptor for this thread alone, with the pointers of these operands."""
        attributes = operands.attributes
        try:
            operation, current = self._idle.pop()
        except IndexError:
            operation = None
            current = None
        if operation is None or current != attributes:
            with bindings.translated(f"run {self._product}"):
                operation = operation or _operation(self.call)
                _set_pointers(operation, operands)
        return operation

    def queue(
        self,
        handle: int,
        stream: int,
        alpha: Number,
        beta: Number,
        pointers: Sequence[tuple[int, ...]],
        workspace: Workspace = NO_WORKSPACE,
        operation: int = 0,
    ) -> None:
        """Queue calls for these addresses; ``operation`` is a descriptor of this thread, 0 if it has no pointers."""
        if stream == PER_THREAD_STREAM:
            with handles.library_stream(self._device, stream) as own:
                self.queue(handle, own, alpha, beta, pointers, workspace, operation)
            return
        chosen = algorithm, needed_bytes, _ = self._chosen
        address, nbytes = workspace
        if nbytes < needed_bytes:
            with memory.temporary(needed_bytes, self._device, stream) as address:
                self.queue(
                    handle, stream, alpha, beta, pointers, (address, needed_bytes), operation
                )
            return
        shared, first_layout, second_layout, c_layout, d_layout = self.pointers
        matmul = libraries().cublas_lt.matmul
        try:
            for first, second, c, d in pointers:
                matmul(
                    handle,
                    operation or shared,
                    alpha.address,
                    first,
                    first_layout,
                    second,
                    second_layout,
                    beta.address,
                    c,
                    c_layout,
                    d,
                    d_layout,
                    algorithm,
                    address,
                    nbytes,
                    0 if stream == LEGACY_STREAM else stream,
                )
                self._others = None
        except Exception as error:  # noqa: BLE001 - raised again, unless another algorithm runs
            self._use_next(chosen, stream, error)
            self.queue(handle, stream, alpha, beta, pointers, workspace, operation)

    def _use_next(self, failed: tuple[int, int, Any], stream: int, error: Exception) -> None:
        """Use the next algorithm if the first use of one has failed; otherwise raise the error."""
        translated = bindings.translate(error, f"run {self._product}")
        others = self._others
        if self._chosen is not failed:  # another thread has replaced it
            return
        # The last condition raises the error of a lost device.
        if others is None or not bindings.is_of_algorithm(error) or runtime.is_capturing(stream):
            raise translated from error
        self.failures[failed[2].tobytes()] = str(translated)
        if not others:
            raise UnsupportedError(str(translated)) from error
        self.use(*others)

    def search(self, handle: int, count: int) -> tuple[Algorithm, ...]:
        """Return up to ``count`` algorithms in the order of cuBLASLt's heuristics.

        Some int8 products have algorithms only for a workspace of 0, which is what PyTorch passes for them.
        """
        schemes = ["COMPUTE_TYPE"]
        if self.call.d.dtype is self.call.scale_dtype:
            # "INPLACE" reductions are rounded to D's element type.
            schemes.append("INPLACE")
        for workspace_bytes in (self.workspace_bytes, 0):
            wanted = bindings.preference(workspace_bytes, self.alignment_bytes, schemes)
            with runtime.relaxed_capture():
                algorithms = bindings.heuristics(handle, self.pointers, wanted, count)
            if algorithms:
                return algorithms
        return ()


def _set_pointers(operation: Descriptor, operands: LtOperands) -> None:
    for name, address in zip(_POINTERS, operands.attributes, strict=True):
        if address:
            bindings.set_attribute("matmul_desc", operation.pointer, name, address)


def _operation(call: CublasLtCall) -> Descriptor:
    """Return a descriptor of a call's operation without pointers."""
    cublas_lt = libraries().cublas_lt
    attributes = {
        "TRANSA": OPERATIONS[call.op_first],
        "TRANSB": OPERATIONS[call.op_second],
        "EPILOGUE": int(getattr(cublas_lt.Epilogue, call.epilogue)),
    }
    for name, mode in zip(("A_SCALE_MODE", "B_SCALE_MODE"), call.scale_modes, strict=True):
        if mode not in ("", "SCALAR_32F"):
            attributes[name] = int(getattr(cublas_lt.MatmulMatrixScale, mode))
    emulation = None
    if call.compute_type is ComputeType.COMPUTE_64F_EMULATED_FIXEDPOINT:
        emulation = bindings.create("emulation_desc", (), _FIXED_POINT)
        attributes["EMULATION_DESCRIPTOR"] = emulation.pointer
    types = (call.compute_type.value, call.scale_dtype.cuda_data_type)
    operation = bindings.create("matmul_desc", types, attributes)
    operation.uses = emulation
    return operation


def _descriptors(call: CublasLtCall, operands: LtOperands) -> tuple[Descriptor, ...]:
    """Return the descriptors of the operation, the operands, C and D."""

    def layout(x: LtMatrix) -> Descriptor:
        stored = (x.cuda_data_type, x.rows, x.cols, x.leading_dimension)
        batch = {}
        if call.batch_count > 1:
            batch["BATCH_COUNT"] = call.batch_count
            batch["STRIDED_BATCH_OFFSET"] = x.batch_stride
        return bindings.create("matrix_layout", stored, batch)

    d = layout(call.d)
    # Without an addend D is passed as C, which is not read; with one descriptor, because cuBLASLt 13 rejects two.
    c = d
    if call.c is not None and call.c != call.d:
        c = layout(call.c)
    operation = _operation(call)
    _set_pointers(operation, operands)
    return operation, layout(call.first), layout(call.second), c, d


def byte_offsets(call: CublasLtCall) -> list[tuple[int, ...]]:
    """Return the offsets of each call of cuBLASLt in bytes, in first, second, c (d if there is none) and d."""
    matrices = (call.first, call.second, call.c or call.d, call.d)
    return [tuple(map(LtMatrix.nbytes, matrices, offsets)) for offsets in call.offsets]
