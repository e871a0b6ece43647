"""One prepared ``cublasLtMatmul``: descriptors and algorithm, made once; a warm call is one call of the library."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from lowprec.arrays.view import NUMPY_DTYPES
from lowprec.backends.cuda import bindings, handles, memory, runtime
from lowprec.backends.cuda.bindings import Algorithm, AlgorithmInfo, Descriptor, MatmulDescriptors
from lowprec.backends.cuda.libraries import libraries
from lowprec.errors import UnsupportedError
from lowprec.formats import DType
from lowprec.planning.calls import CublasLtCall

#: Alignments beyond this make no difference.
ALIGNMENT_BYTES = 256

#: Address and bytes of memory that a product may have for its workspace; where it is too little, it takes some.
Room: TypeAlias = tuple[int, int]
NO_ROOM: Room = (0, 0)

#: Attributes of the operation that hold addresses.
_POINTERS = ("BIAS_POINTER", "A_SCALE_POINTER", "B_SCALE_POINTER")

#: ``cublasOperation_t``.
_OPERATIONS = {"N": 0, "T": 1}


class Operands(NamedTuple):
    """Addresses of what a call reads and writes, in cuBLASLt's order, and its factors.

    ``bias``, ``scale_first`` and ``scale_second`` are 0 where there is none; alpha and beta are numbers.
    """

    first: int
    second: int
    c: int
    d: int
    bias: int = 0
    scale_first: int = 0
    scale_second: int = 0
    alpha: complex = 1.0
    beta: complex = 0.0


def alignment_of(*addresses: int) -> int:
    """Return the largest power of two, up to 256, of which all addresses are multiples: of 512 and 48 it is 16."""
    bits = ALIGNMENT_BYTES
    for address in addresses:
        bits |= address
    return bits & -bits


class Number(NamedTuple):
    """Alpha or beta in memory of the host, and its address."""

    value: complex
    address: int
    memory: np.ndarray[Any, Any]


def number(value: complex, dtype: DType) -> Number:
    """Return a factor for a call; kept, as the same few come back."""
    # 0.0 and -0.0 are equal, and so are complex numbers that differ in the sign of a zero.
    differ = not value or type(value) is complex
    return _kept_number(value, dtype, repr(value) if differ else "")


@functools.lru_cache(maxsize=64)
def _kept_number(value: complex, dtype: DType, text: str) -> Number:
    """Return a factor for a call; ``text`` tells apart what is equal."""
    memory = np.empty(1, NUMPY_DTYPES[dtype])
    memory[0] = value if dtype.is_complex else value.real
    return Number(value, memory.ctypes.data, memory)


class Invocation:
    """A product ready to run on one device, for pointers of one alignment.

    ``operands`` are those of the first call; the search looks at their alignment and reads nothing. ``choose`` returns
    the algorithm for this invocation, whose descriptors are made; None if there is none, an UnsupportedError then.
    ``describe`` returns the product in words, for errors.
    """

    def __init__(
        self,
        call: CublasLtCall,
        alignment_bytes: int,
        workspace_bytes: int,
        operands: Operands,
        choose: Callable[[Invocation], Algorithm | None],
        describe: Callable[[], str],
    ) -> None:
        self.call = call
        self.alignment_bytes = alignment_bytes
        self.workspace_bytes = workspace_bytes
        self._describe = describe
        self._offsets = byte_offsets(call)
        with bindings.translated(lambda: f"prepare {describe()}"):
            self.descriptors = _descriptors(call, operands)
            #: Descriptors of the operation that no thread uses at the moment, with the pointers that are set in them.
            self._idle = [(self.descriptors.operation, _pointers_of(operands))]
            try:
                algorithm = choose(self)
                if algorithm is None:
                    raise UnsupportedError(
                        f"cuBLASLt {bindings.cublas_version_text()} has no algorithm on this device for {describe()}"
                    )
            except BaseException:
                self.descriptors.close()
                raise
        self.use(algorithm)

    def use(self, algorithm: Algorithm) -> None:
        """Run this algorithm from now on."""
        data = np.frombuffer(algorithm.data, np.uint8).copy()
        self._pointers = self.descriptors.pointers
        self._chosen = (data.ctypes.data, algorithm.workspace_bytes, data)
        self.algorithm = algorithm
        self.__dict__.pop("info", None)

    @functools.cached_property
    def info(self) -> AlgorithmInfo:
        """What cuBLASLt tells of the algorithm."""
        return bindings.describe_algorithm(self.algorithm)

    def run(self, handle: int, stream: int, operands: Operands, room: Room = NO_ROOM) -> None:
        """Queue the product; alpha and beta are read before this returns."""
        scale_dtype = self.call.scale_dtype
        alpha, beta = number(operands.alpha, scale_dtype), number(operands.beta, scale_dtype)
        a, b, c, d = operands[:4]
        places = [(a + x, b + y, c + z, d + w) for x, y, z, w in self._offsets]
        # Some pointers are part of the descriptor, which is read before matmul returns: until then it is this call's
        # own. If the call fails, the descriptor goes, and what is set in it need not be known.
        pointers = _pointers_of(operands)
        try:
            operation, found = self._idle.pop()
        except IndexError:
            with bindings.translated(lambda: f"run {self._describe()}"):
                operation, found = _operation(self.call, operands), pointers
        if found != pointers:
            with bindings.translated(lambda: f"run {self._describe()}"):
                for name, address in zip(_POINTERS, pointers, strict=True):
                    if address:
                        bindings.set_attribute("matmul_desc", operation.pointer, name, address)
        self.queue(handle, stream, alpha, beta, places, room, operation.pointer)
        self._idle.append((operation, pointers))

    def queue(
        self,
        handle: int,
        stream: int,
        alpha: Number,
        beta: Number,
        places: Sequence[tuple[int, int, int, int]],
        room: Room = NO_ROOM,
        operation: int = 0,
    ) -> None:
        """Queue calls for these addresses of the first, the second, c and d.

        ``operation`` is a descriptor of the caller's own; 0 where no pointers are part of it.
        """
        algorithm, needed_bytes, _ = self._chosen
        workspace, nbytes = room
        if nbytes < needed_bytes:
            with memory.temporary(needed_bytes, handles.device_of(handle), stream) as own:
                room = (own, needed_bytes)
                self.queue(handle, stream, alpha, beta, places, room, operation)
            return
        of_all, first_layout, second_layout, c_layout, d_layout = self._pointers
        matmul = libraries().cublas_lt.matmul
        try:
            for first, second, c, d in places:
                matmul(
                    handle, operation or of_all,
                    alpha.address, first, first_layout, second, second_layout,
                    beta.address, c, c_layout, d, d_layout,
                    algorithm, workspace, nbytes, stream,
                )  # fmt: skip
        except Exception as error:
            raise bindings.translate(error, f"run {self._describe()}") from error

    def search(self, handle: int, count: int) -> tuple[Algorithm, ...]:
        """Return up to ``count`` algorithms as cuBLASLt's heuristics rank them, the most promising first."""
        schemes = ["COMPUTE_TYPE"]
        if self.call.d.dtype is self.call.scale_dtype:
            # Sums "in place" pass through D's own element type.
            schemes.append("INPLACE")
        wanted = bindings.preference(self.workspace_bytes, self.alignment_bytes, schemes)
        try:
            with runtime.relaxed_capture():
                return bindings.heuristics(handle, self.descriptors, wanted, count)
        finally:
            wanted.close()


def _operation(call: CublasLtCall, operands: Operands) -> Descriptor:
    """Return a descriptor of a call's operation, with its pointers set."""
    attributes = {
        "TRANSA": _OPERATIONS[call.op_first],
        "TRANSB": _OPERATIONS[call.op_second],
        "EPILOGUE": int(getattr(libraries().cublas_lt.Epilogue, call.epilogue)),
    }
    attributes |= {name: x for name, x in zip(_POINTERS, _pointers_of(operands), strict=True) if x}
    types = (call.compute_type.value, call.scale_dtype.cuda_data_type)
    return bindings.create("matmul_desc", types, attributes)


def _descriptors(call: CublasLtCall, operands: Operands) -> MatmulDescriptors:
    """Return the descriptors of a call; those made so far are destroyed where one cannot be made."""
    made: list[Descriptor] = []
    try:
        made.append(_operation(call, operands))
        # Without an addend D stands for C, which is then not read. cuBLASLt 13 refuses one matrix by two descriptors.
        c = None if call.c in (None, call.d) else call.c
        for x in (call.first, call.second, call.d, *([c] if c else ())):
            stored = (x.dtype.cuda_data_type, x.rows, x.cols, x.leading_dimension)
            made.append(bindings.matrix_layout(*stored, (call.batch_count, x.batch_stride)))
    except BaseException:
        for descriptor in made:
            descriptor.close()
        raise
    operation, first, second, d = made[:4]
    return MatmulDescriptors(operation, first, second, made[-1], d)


def _pointers_of(operands: Operands) -> tuple[int, int, int]:
    """Return the pointers that are attributes of the operation, 0 for none."""
    return operands.bias, operands.scale_first, operands.scale_second


def byte_offsets(call: CublasLtCall) -> tuple[tuple[int, int, int, int], ...]:
    """Return where each call of cuBLASLt begins, in bytes of the first, the second, c (d where there is none) and d."""
    c = call.c or call.d
    sizes = [matrix.dtype.itemsize for matrix in (call.first, call.second, c, call.d)]
    return tuple(
        (first * sizes[0], second * sizes[1], (c_at if call.c else d) * sizes[2], d * sizes[3])
        for first, second, c_at, d in call.offsets
    )
