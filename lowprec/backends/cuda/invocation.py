"""A prepared ``cublasLtMatmul``: descriptors and algorithm are created once; a later call is one library call.

The heuristics' first choice may fail when it runs (pytorch 91436, rapidsai/raft 3098). The first use tries the choices
in their order and keeps the first that runs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from lowprec.arrays.device_memory import LEGACY_STREAM, PER_THREAD_STREAM
from lowprec.arrays.view import NUMPY_DTYPES
from lowprec.backends.cuda import bindings, handles, libraries, memory, runtime
from lowprec.backends.cuda.bindings import Algorithm, AlgorithmInfo, Descriptor, MatmulDescriptors
from lowprec.backends.cuda.libraries import cached
from lowprec.errors import UnsupportedError
from lowprec.formats import ComputeType, DType
from lowprec.planning.cublaslt.calls import MANTISSA_BITS, CublasLtCall, LtMatrix

#: Largest alignment that matters.
ALIGNMENT_BYTES = 256

#: Address and bytes of a workspace; a product that needs more allocates its own.
Workspace: TypeAlias = tuple[int, int]
NO_WORKSPACE: Workspace = (0, 0)

#: Attributes of the operation that are addresses.
_POINTERS = ("BIAS_POINTER", "A_SCALE_POINTER", "B_SCALE_POINTER")

#: Fixed-point emulation with as many mantissa bits as the data need for the accuracy of FP64, or else native FP64.
_FIXED_POINT = {"FIXEDPOINT_MANTISSA_CONTROL": 0, "FIXEDPOINT_MAX_MANTISSA_BIT_COUNT": MANTISSA_BITS}

#: ``cublasOperation_t``.
OPERATIONS = {"N": 0, "T": 1}


class Operands(NamedTuple):
    """Addresses of a call in cuBLASLt's order (bias and scales: 0 for none), and its factors."""

    first: int
    second: int
    c: int
    d: int
    bias: int = 0
    scale_first: int = 0
    scale_second: int = 0
    alpha: complex = 1.0
    beta: complex = 0.0

    @property
    def attributes(self) -> tuple[int, int, int]:
        return self.bias, self.scale_first, self.scale_second


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
    # Numbers that differ in the sign of a zero compare equal.
    differ = not value or type(value) is complex
    return _cached_number(value, dtype, repr(value) if differ else "")


@functools.lru_cache(maxsize=64)
def _cached_number(value: complex, dtype: DType, text: str) -> Number:
    """Return a factor for a call; ``text`` distinguishes equal values."""
    memory = np.empty(1, NUMPY_DTYPES[dtype])
    memory[0] = value if dtype.is_complex else value.real
    return Number(value, memory.ctypes.data, memory)


@cached
def _failures(device: int, call: CublasLtCall, alignment_bytes: int) -> dict[bytes, str]:
    """Return the errors of algorithms that failed at their first use on a device, for all invocations of a product."""
    return {}


class Invocation:
    """A product ready to run on one device, for pointers of one alignment.

    ``operands`` are those of the first call, whose alignment the search for algorithms uses. ``choose`` returns the
    algorithms to try; none raises UnsupportedError. ``product`` describes the product in errors.
    """

    def __init__(
        self, call: CublasLtCall, alignment_bytes: int, workspace_bytes: int, operands: Operands,
        choose: Callable[[Invocation], Sequence[Algorithm]], product: str,
    ) -> None:  # fmt: skip
        self.call = call
        self.alignment_bytes = alignment_bytes
        self.workspace_bytes = workspace_bytes
        self.has_scales = bool(operands.scale_first)
        self.failures = _failures(runtime.current_device(), call, alignment_bytes)
        self._product = product
        self._offsets = byte_offsets(call)
        with bindings.translated(lambda: f"prepare {product}"):
            self.descriptors = _descriptors(call, operands)
            #: Descriptors of the operation that are not in use by a thread, with the pointers set in them.
            self._idle = [(self.descriptors.operation, operands.attributes)]
            choices = [x for x in choose(self) if x.data not in self.failures]
            if not choices:
                errors = "".join(f"; {error}" for error in list(self.failures.values())[:1])
                raise UnsupportedError(
                    f"cuBLASLt {bindings.cublas_version_text()} has no algorithm on this device for {product}{errors}"
                )
        self.use(*choices)

    def use(self, algorithm: Algorithm, *others: Algorithm) -> None:
        """Use this algorithm from now on, or the first of ``others`` that runs if its first use fails."""
        self._others: tuple[Algorithm, ...] | None = others
        data = np.frombuffer(algorithm.data, np.uint8).copy()
        self._pointers = self.descriptors.pointers
        self._chosen = (data.ctypes.data, algorithm.workspace_bytes, data)
        self.algorithm = algorithm
        self._info: AlgorithmInfo | None = None

    @property
    def info(self) -> AlgorithmInfo:
        if self._info is None:
            with bindings.translated(lambda: f"describe the algorithm of {self.call}"):
                self._info = bindings.describe_algorithm(self.algorithm)
        return self._info

    def run(self, handle: int, stream: int, operands: Operands, workspace: Workspace = NO_WORKSPACE) -> None:
        """Queue the product; alpha and beta are read before this returns."""
        scale_dtype = self.call.scale_dtype
        alpha, beta = number(operands.alpha, scale_dtype), number(operands.beta, scale_dtype)
        a, b, c, d = operands[:4]
        pointers = [(a + x, b + y, c + z, d + w) for x, y, z, w in self._offsets]
        # Bias and scales are part of the descriptor, so no other thread may use it until cublasLtMatmul returns. If the
        # call fails, the descriptor is destroyed.
        attributes = operands.attributes
        try:
            operation, current = self._idle.pop()
        except IndexError:
            with bindings.translated(lambda: f"run {self._product}"):
                operation, current = _operation(self.call, operands), attributes
        if current != attributes:
            with bindings.translated(lambda: f"run {self._product}"):
                for name, address in zip(_POINTERS, attributes, strict=True):
                    if address:
                        bindings.set_attribute("matmul_desc", operation.pointer, name, address)
        self.queue(handle, stream, alpha, beta, pointers, workspace, operation.pointer)
        self._idle.append((operation, attributes))

    def queue(
        self, handle: int, stream: int, alpha: Number, beta: Number, pointers: Sequence[tuple[int, int, int, int]],
        workspace: Workspace = NO_WORKSPACE, operation: int = 0,
    ) -> None:  # fmt: skip
        """Queue calls for these addresses; ``operation`` is a descriptor of this thread, 0 if it has no pointers."""
        if stream == PER_THREAD_STREAM:
            with handles.stream_of_thread(handle) as stream:
                self.queue(handle, stream, alpha, beta, pointers, workspace, operation)
            return
        chosen = algorithm, needed_bytes, _ = self._chosen
        address, nbytes = workspace
        if nbytes < needed_bytes:
            with memory.temporary(needed_bytes, handles.device_of(handle), stream) as address:
                self.queue(handle, stream, alpha, beta, pointers, (address, needed_bytes), operation)
            return
        shared, first_layout, second_layout, c_layout, d_layout = self._pointers
        matmul = libraries.cublas_lt.matmul
        try:
            for first, second, c, d in pointers:
                matmul(
                    handle, operation or shared,
                    alpha.address, first, first_layout, second, second_layout,
                    beta.address, c, c_layout, d, d_layout,
                    algorithm, address, nbytes, 0 if stream == LEGACY_STREAM else stream,
                )  # fmt: skip
                self._others = None
        except Exception as error:  # noqa: BLE001 - raised again, unless another algorithm runs
            self._use_next(chosen, stream, error)
            self.queue(handle, stream, alpha, beta, pointers, workspace, operation)

    def _use_next(self, failed: tuple[int, int, Any], stream: int, error: Exception) -> None:
        """Use the next algorithm if the first use of one has failed; otherwise raise the error."""
        translated, others = bindings.translate(error, f"run {self._product}"), self._others
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
                algorithms = bindings.heuristics(handle, self.descriptors, wanted, count)
            if algorithms:
                return algorithms
        return ()


def _operation(call: CublasLtCall, operands: Operands) -> Descriptor:
    """Return a descriptor of a call's operation, with its pointers set."""
    attributes = {
        "TRANSA": OPERATIONS[call.op_first],
        "TRANSB": OPERATIONS[call.op_second],
        "EPILOGUE": int(getattr(libraries.cublas_lt.Epilogue, call.epilogue)),
    }
    for name, mode in zip(("A_SCALE_MODE", "B_SCALE_MODE"), call.scale_modes, strict=True):
        if mode not in ("", "SCALAR_32F"):
            attributes[name] = int(getattr(libraries.cublas_lt.MatmulMatrixScale, mode))
    attributes |= {x: address for x, address in zip(_POINTERS, operands.attributes, strict=True) if address}
    emulation = None
    if call.compute_type is ComputeType.COMPUTE_64F_EMULATED_FIXEDPOINT:
        emulation = bindings.create("emulation_desc", (), _FIXED_POINT)
        attributes["EMULATION_DESCRIPTOR"] = emulation.pointer
    types = (call.compute_type.value, call.scale_dtype.cuda_data_type)
    operation = bindings.create("matmul_desc", types, attributes)
    operation.uses = emulation
    return operation


def _descriptors(call: CublasLtCall, operands: Operands) -> MatmulDescriptors:
    def layout(x: LtMatrix) -> Descriptor:
        stored = (x.cuda_data_type, x.rows, x.cols, x.leading_dimension)
        batch = {"BATCH_COUNT": call.batch_count, "STRIDED_BATCH_OFFSET": x.batch_stride}
        return bindings.create("matrix_layout", stored, batch if call.batch_count > 1 else {})

    d = layout(call.d)
    # Without an addend D is passed as C, which is not read; with one descriptor, because cuBLASLt 13 rejects two.
    c = layout(call.c) if call.c not in (None, call.d) else d
    return MatmulDescriptors(_operation(call, operands), layout(call.first), layout(call.second), c, d)


def byte_offsets(call: CublasLtCall) -> tuple[tuple[int, int, int, int], ...]:
    """Return the offsets of each call of cuBLASLt in bytes, in first, second, c (d if there is none) and d."""
    matrices = (call.first, call.second, call.c or call.d, call.d)
    return tuple(tuple(x.nbytes(at) for x, at in zip(matrices, row, strict=True)) for row in call.offsets)  # type: ignore[misc]


#: Of cuBLAS: ``CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION``, by which sums of split products stay in FP32, and
#: ``CUBLAS_GEMM_DEFAULT``.
_MATH_MODE, _ALGORITHM = 16, -1


def _create() -> int:
    handle = bindings.create_handle("cublas")
    bindings.set_math_mode(handle, _MATH_MODE)
    return handle


_gemm_ex_handles = handles.HandlePool(_create)


class GemmEx:
    """A product by ``cublasGemmStridedBatchedEx``, where no algorithm of cuBLASLt runs; it has no epilogue.

    It has the methods of an :class:`Invocation`. Source: the cuBLAS documentation, ``cublasGemmStridedBatchedEx()`` and
    ``cublasSetWorkspace()``.
    """

    info = SimpleNamespace(text="cublasGemmStridedBatchedEx", units_text="not reported", uses_tensor_cores=None)

    def __init__(self, call: CublasLtCall, workspace_bytes: int, product: str) -> None:
        self.algorithm = Algorithm(b"", workspace_bytes)
        self.failures: dict[bytes, str] = {}
        self._call, self._product = call, product
        first, second, d = call.first, call.second, call.d
        k = first.cols if call.op_first == "N" else first.rows
        self._extents = (OPERATIONS[call.op_first], OPERATIONS[call.op_second], d.rows, d.cols, k)
        self._matrices = [(x.cuda_data_type, x.leading_dimension, x.batch_stride) for x in (first, second, d)]

    def run(self, handle: int, stream: int, operands: Operands, workspace: Workspace = NO_WORKSPACE) -> None:
        alpha, beta = (number(x, self._call.scale_dtype) for x in (operands.alpha, operands.beta))
        a, b, _, d = operands[:4]
        pointers = [(a + x, b + y, d + w, d + w) for x, y, _, w in byte_offsets(self._call)]
        self.queue(handle, stream, alpha, beta, pointers)

    def queue(
        self, handle: int, stream: int, alpha: Number, beta: Number, pointers: Sequence[tuple[int, int, int, int]],
        workspace: Workspace = NO_WORKSPACE,
    ) -> None:  # fmt: skip
        """Queue calls for these addresses, with a workspace of their own; ``handle`` is one of cuBLASLt."""
        device, nbytes, call = handles.device_of(handle), self.algorithm.workspace_bytes, self._call
        cublas_handle, cublas, (first, second, product) = (
            _gemm_ex_handles.handle(device, stream),
            libraries.cublas,
            self._matrices,
        )
        with memory.temporary(nbytes, device, stream) as address, bindings.translated(lambda: f"run {self._product}"):
            cublas.set_stream(cublas_handle, 0 if stream == LEGACY_STREAM else stream)  # which resets the workspace
            cublas.set_workspace(cublas_handle, address, nbytes)
            for a, b, _, d in pointers:
                cublas.gemm_strided_batched_ex_64(
                    cublas_handle, *self._extents, alpha.address, a, *first, b, *second,
                    beta.address, d, *product, call.batch_count, call.compute_type.value, _ALGORITHM,
                )  # fmt: skip
