"""cuBLASLt with typed errors and owned objects: the only module that calls ``nvmath.bindings``.

Source: the cuBLAS documentation, chapter "Using the cuBLASLt API".
"""

from __future__ import annotations

import contextlib
import ctypes
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from lowprec.backends.cuda.libraries import cached, libraries
from lowprec.errors import BackendError, DeviceMemoryError, LowprecError, UnsupportedError

# ``cublasStatus_t``.
_ALLOC_FAILED = 3
_INVALID_VALUE = 7
_ARCH_MISMATCH = 8
_EXECUTION_FAILED = 13
_INTERNAL_ERROR = 14
_NOT_SUPPORTED = 15

#: Errors by status; all others are a :class:`BackendError`. An unsupported product has status "invalid value" in some
#: versions of cuBLASLt, "not supported" in others.
_REFUSALS = (_INVALID_VALUE, _ARCH_MISMATCH, _NOT_SUPPORTED)
_ERRORS = {_ALLOC_FAILED: DeviceMemoryError, **dict.fromkeys(_REFUSALS, UnsupportedError)}


def translate(error: Exception, doing: str) -> LowprecError:
    """Return lowprec's error for an error of the bindings; ``doing`` is the failed action."""
    kind = _ERRORS.get(int(getattr(error, "status", -1)), BackendError)
    return kind(f"cuBLASLt {cublas_version_text()} cannot {doing}: {error}")


def is_of_algorithm(error: Exception) -> bool:
    """Whether another algorithm may run where one ended with this error of the bindings."""
    return int(getattr(error, "status", -1)) in (*_REFUSALS, _EXECUTION_FAILED, _INTERNAL_ERROR)


@contextlib.contextmanager
def translated(doing: str) -> Iterator[None]:
    try:
        yield
    except (LowprecError, Warning):  # a filter may turn warnings into errors
        raise
    except Exception as error:
        raise translate(error, doing) from error


@cached
def cublas_version() -> int:
    """Return cuBLASLt's version as a number: 130100 is 13.1.0."""
    return int(libraries().cublas_lt.get_version())


def cublas_version_text() -> str:
    version = cublas_version()
    return f"{version // 10000}.{version // 100 % 100}.{version % 100}"


class Descriptor:
    """A cuBLASLt object in host memory, destroyed with this object."""

    def __init__(self, pointer: int, destroy: Callable[[int], None]) -> None:
        self.pointer = pointer
        #: Another object whose address is one of the attributes.
        self.uses: Descriptor | None = None
        # Not at exit, when the library may already be unloaded.
        weakref.finalize(self, _quietly, destroy, pointer).atexit = False


def _quietly(destroy: Callable[[int], None], pointer: int) -> None:
    with contextlib.suppress(Exception):  # a finalizer has no caller
        destroy(pointer)


def create_handle(library: str = "cublas_lt") -> int:
    """Return a new handle of a library, ``cublas_lt`` or ``cublas``, on the current device."""
    with translated(f"create a handle of {library}"):
        return int(getattr(libraries(), library).create())


@cached
def _attribute(kind: str, name: str) -> tuple[int, np.dtype[Any]]:
    """Return the number and the C type of an attribute of a kind of object, for example ``matmul_desc``."""
    cublas_lt = libraries().cublas_lt
    enumeration = "".join(word.capitalize() for word in kind.split("_")) + "Attribute"
    member = getattr(getattr(cublas_lt, enumeration), name)
    if name == "EMULATION_DESCRIPTOR":  # a pointer, to which the bindings give 4 bytes
        return int(member), np.dtype(np.uintp)
    return int(member), np.dtype(getattr(cublas_lt, f"get_{kind}_attribute_dtype")(member))


def set_attribute(kind: str, pointer: int, name: str, value: int) -> None:
    number, dtype = _attribute(kind, name)
    buffer = np.array([value], dtype)
    setter = getattr(libraries().cublas_lt, f"{kind}_set_attribute")
    setter(pointer, number, buffer.ctypes.data, buffer.nbytes)


def _get_attribute(kind: str, pointer: int, name: str) -> int:
    number, dtype = _attribute(kind, name)
    buffer = np.zeros(1, dtype)
    written = np.zeros(1, np.uint64)
    getter = getattr(libraries().cublas_lt, f"{kind}_get_attribute")
    getter(pointer, number, buffer.ctypes.data, buffer.nbytes, written.ctypes.data)
    return int(buffer[0])


def create(kind: str, arguments: Sequence[int], attributes: Mapping[str, int]) -> Descriptor:
    """Create an object of a kind with these attributes; ``arguments`` are those of its create function."""
    cublas_lt = libraries().cublas_lt
    pointer = getattr(cublas_lt, f"{kind}_create")(*arguments)
    descriptor = Descriptor(int(pointer), getattr(cublas_lt, f"{kind}_destroy"))
    for name, value in attributes.items():
        set_attribute(kind, descriptor.pointer, name, value)
    return descriptor


def preference(
    workspace_bytes: int, alignment_bytes: int, reduction_schemes: Sequence[str]
) -> Descriptor:
    """Return all constraints of a search; the defaults are a workspace of 0 and pointers aligned to 256 bytes."""
    schemes = libraries().cublas_lt.ReductionScheme
    mask = sum(int(getattr(schemes, name)) for name in reduction_schemes)
    attributes = {"MAX_WORKSPACE_BYTES": workspace_bytes, "REDUCTION_SCHEME_MASK": mask}
    attributes |= {f"MIN_ALIGNMENT_{x}_BYTES": alignment_bytes for x in "ABCD"}
    return create("matmul_preference", (), attributes)


class Algorithm(NamedTuple):
    """A ``cublasLtMatmulAlgo_t``: 64 opaque bytes, valid for one version of cuBLAS and one GPU model."""

    data: bytes
    workspace_bytes: int


#: Pointers to the descriptors of a product: the operation, a, b, c and d.
Pointers: TypeAlias = tuple[int, ...]


def heuristics(
    handle: int, pointers: Pointers, wanted: Descriptor, count: int
) -> tuple[Algorithm, ...]:
    """Return up to ``count`` algorithms, the most promising first; may be empty."""
    cublas_lt = libraries().cublas_lt
    results = cublas_lt.MatmulHeuristicResult(count)
    returned = np.zeros(1, np.int32)
    try:
        cublas_lt.matmul_algo_get_heuristic(
            handle, *pointers, wanted.pointer, count, results.ptr, returned.ctypes.data
        )
    except cublas_lt.cuBLASLtError as error:
        if int(error.status) == _NOT_SUPPORTED:
            return ()
        raise
    return _supported(results, int(returned[0]))


def _supported(results: Any, count: int) -> tuple[Algorithm, ...]:
    """Return the supported algorithms among the first ``count`` of a ``MatmulHeuristicResult``."""
    dtype = libraries().cublas_lt.matmul_heuristic_result_dtype
    data = ctypes.string_at(results.ptr, count * dtype.itemsize)
    found = []
    for x in np.frombuffer(data, dtype):
        if x["state"] == 0:
            found.append(Algorithm(bytes(x["algo"]), int(x["workspace_size"])))
    return tuple(found)


def check_algorithm(handle: int, pointers: Pointers, algorithm: bytes) -> Algorithm | None:
    """Return a stored algorithm if it can run this product on this device, None if it cannot."""
    cublas_lt = libraries().cublas_lt
    if len(algorithm) != cublas_lt.matmul_algo_dtype.itemsize:
        return None
    result = cublas_lt.MatmulHeuristicResult(1)
    data = np.frombuffer(algorithm, np.uint8).copy()
    try:
        cublas_lt.matmul_algo_check(handle, *pointers, data.ctypes.data, result.ptr)
    except cublas_lt.cuBLASLtError:
        return None
    for supported in _supported(result, 1):
        return supported._replace(data=algorithm)
    return None


class AlgorithmInfo(NamedTuple):
    """Properties of an algorithm as reported by cuBLASLt, by the names of its enumerations."""

    id: int
    tile: str
    stages: str
    split_k: int  # number of parts of the inner dimension
    reduction: str  # reduction scheme of these parts
    workspace_bytes: int
    # From the numerical implementation flags: instruction, operands and sums.
    units: str
    input_type: str
    accumulator: str
    uses_tensor_cores: bool | None  # None if the flags do not include an instruction

    @property
    def text(self) -> str:
        splits = f"split-K {self.split_k}"
        if self.split_k > 1:
            splits += f" ({self.reduction})"
        return f"id {self.id}, tile {self.tile}, stages {self.stages}, {splits}, workspace {self.workspace_bytes} B"

    @property
    def units_text(self) -> str:
        used = {True: ": tensor cores", False: ": no tensor cores", None: ""}
        return f"{self.units} on {self.input_type}, summed in {self.accumulator}{used[self.uses_tensor_cores]}"


#: ``cublasLtNumericalImplFlags_t``: the instruction, the accumulator and the input, by bit.
_UNITS = {0: "FMA", 1: "HMMA", 2: "IMMA", 3: "DMMA"}
_ACCUMULATORS = {8: "float16", 9: "float32", 10: "float64", 11: "int32"}
_INPUTS = {
    16: "float16",
    17: "bfloat16",
    18: "tf32",
    19: "float32",
    20: "float64",
    21: "int8",
    22: "float8_e4m3fn",
    23: "float8_e5m2",
}
#: Bits of all instructions, and of tensor-core instructions, including unknown newer ones.
_INSTRUCTIONS = 0xFF
_TENSOR_CORES = 0xFE


@cached
def describe_algorithm(algorithm: Algorithm) -> AlgorithmInfo:
    data = np.frombuffer(algorithm.data, np.uint8).copy()
    flags = _get_attribute("matmul_algo_cap", data.ctypes.data, "NUMERICAL_IMPL_FLAGS")

    def config(name: str) -> int:
        return _get_attribute("matmul_algo_config", data.ctypes.data, name)

    def member(enumeration: str, name: str) -> str:
        """Return the name of an enumeration's value, or its number if it is unknown."""
        members = getattr(libraries().cublas_lt, enumeration)
        try:
            return str(members(config(name)).name)
        except ValueError:
            return str(config(name))

    def named(names: Mapping[int, str]) -> str:
        found = [name for bit, name in names.items() if flags >> bit & 1]
        return " and ".join(found) or "not reported"

    uses_tensor_cores = None
    if flags & _INSTRUCTIONS:
        uses_tensor_cores = bool(flags & _TENSOR_CORES)
    return AlgorithmInfo(
        id=config("ID"),
        tile=member("MatmulTile", "TILE_ID").removeprefix("TILE_"),
        stages=member("MatmulStages", "STAGES_ID").removeprefix("STAGES_"),
        split_k=max(config("SPLITK_NUM"), 1),
        reduction=member("ReductionScheme", "REDUCTION_SCHEME"),
        workspace_bytes=algorithm.workspace_bytes,
        units=named(_UNITS),
        input_type=named(_INPUTS),
        accumulator=named(_ACCUMULATORS),
        uses_tensor_cores=uses_tensor_cores,
    )


def math_mode(handle: int) -> int:
    """Return a handle's ``cublasMath_t``, flags included."""
    with translated("read the math mode of a cuBLAS handle"):
        return int(libraries().cublas.get_math_mode(handle))


def set_math_mode(handle: int, raw: int) -> None:
    with translated(f"set the math mode {raw} of a cuBLAS handle"):
        libraries().cublas.set_math_mode(handle, raw)


def reset_handle(handle: int, math_mode: int) -> None:
    """Set the state of a new cuBLAS handle: default stream and workspace, host pointers, no atomics, no SM target."""
    cublas = libraries().cublas
    with translated("reset a cuBLAS handle"):
        cublas.set_stream(handle, 0)  # which also restores the default workspace
        for name in ("pointer_mode", "atomics_mode", "sm_count_target"):
            getattr(cublas, f"set_{name}")(handle, 0)
        cublas.set_math_mode(handle, math_mode)
