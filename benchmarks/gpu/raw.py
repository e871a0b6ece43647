"""One bare `cublasLtMatmul` on NumPy arrays: the library's behaviour without lowprec's planning.

Memory is not freed: a part is a process of its own, which soon ends.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from gpu.arrays import numpy_dtype
from gpu.parts import short
from lowprec.backends.cuda import bindings, libraries, runtime
from lowprec.backends.cuda.bindings import Algorithm
from lowprec.formats import ComputeType, dtype_from_name

#: `cublasComputeType_t`, with those that lowprec does not use.
COMPUTE = {
    **{kind.name: kind.value for kind in ComputeType},
    "COMPUTE_32F_FAST_16F": 74,
    "COMPUTE_32F_FAST_16BF": 75,
}

#: The legacy default stream, by the handle that cuBLASLt accepts: it refuses CUDA's other handle, 1.
STREAM = 0
WORKSPACE_BYTES = 32 << 20
#: Algorithms that are tried: the first one of a search fails now and then when it runs.
_TRIED = 8
#: Sums of split products stay in the compute type.
FULL_REDUCTIONS = ("INPLACE", "COMPUTE_TYPE")


def synchronize() -> None:
    runtime.call("cudaStreamSynchronize", STREAM)


def upload(array: Any) -> int:
    array = np.ascontiguousarray(array)
    address = runtime.allocate(max(array.nbytes, 1))
    runtime.copy_async(address, array.ctypes.data, array.nbytes, STREAM)
    synchronize()
    return address


def download(address: int, shape: tuple[int, ...], dtype: Any) -> Any:
    array = np.empty(shape, dtype)
    runtime.copy_async(array.ctypes.data, address, array.nbytes, STREAM)
    synchronize()
    return array


@functools.cache
def handle() -> int:
    return bindings.create_handle()


@functools.cache
def _workspace() -> int:
    return runtime.allocate(WORKSPACE_BYTES)


class LtProduct:
    """The product of row-major NumPy arrays, computed as the column-major transpose."""

    def __init__(
        self,
        a: Any,
        b: Any,
        *,
        compute: str = "COMPUTE_32F",
        out_dtype: str = "float32",
        scale_dtype: str = "float32",
    ) -> None:
        (m, k), n = a.shape, b.shape[1]
        self.shape = (m, n)
        self.out_dtype, self.scale_dtype = numpy_dtype(out_dtype), numpy_dtype(scale_dtype)
        self.nbytes = m * n * self.out_dtype.itemsize
        self._first, self._second = upload(b), upload(a)
        self._d = runtime.allocate(self.nbytes)
        attributes = {
            "TRANSA": 0,
            "TRANSB": 0,
            "EPILOGUE": int(libraries.libraries().cublas_lt.Epilogue.DEFAULT),
        }
        operation = bindings.create(
            "matmul_desc", (COMPUTE[compute], _cuda(scale_dtype)), attributes
        )

        def layout(dtype: str, rows: int, columns: int) -> Any:
            return bindings.create("matrix_layout", (_cuda(dtype), rows, columns, rows), {})

        result = layout(out_dtype, n, m)
        layouts = (layout(b.dtype.name, n, k), layout(a.dtype.name, k, m), result, result)
        self._descriptors = (operation, *layouts)
        self.pointers = tuple(x.pointer for x in self._descriptors)

    def algorithms(
        self, count: int, schemes: Sequence[str] = FULL_REDUCTIONS
    ) -> tuple[Algorithm, ...]:
        """Return up to `count` algorithms as the heuristics rank them; none where the product is not supported."""
        wanted = bindings.preference(WORKSPACE_BYTES, 256, schemes)
        return bindings.heuristics(handle(), self.pointers, wanted, count)

    def bound(self, algorithm: Algorithm) -> Callable[[], None]:
        """Return the bare call: it queues the product and does nothing else."""
        data = np.frombuffer(algorithm.data, np.uint8).copy()
        factors = np.array([1, 0], self.scale_dtype)
        operation, first, second, c_layout, d_layout = self.pointers
        at = factors.ctypes.data
        arguments = (
            handle(), operation, at, self._first, first, self._second, second, at + factors.itemsize,
            self._d, c_layout, self._d, d_layout, data.ctypes.data, _workspace(),
            algorithm.workspace_bytes, STREAM,
        )  # fmt: skip
        matmul = libraries.libraries().cublas_lt.matmul
        # The default arguments hold the memory at these addresses.
        return lambda held=(self, data, factors): matmul(*arguments)

    def first(self) -> tuple[Algorithm, Any]:
        """Return the first algorithm that runs, and its result; without one, raise the error of the last."""
        refusal: Exception = ValueError("cuBLASLt offers no algorithm")
        for algorithm in self.algorithms(_TRIED):
            try:
                return algorithm, self.run(algorithm)
            except Exception as error:  # noqa: BLE001 - the bindings raise several classes
                refusal = error
        raise refusal

    def run(self, algorithm: Algorithm) -> Any:
        # An element that is not written shows as NaN.
        poison = np.full(self.shape, np.nan).astype(self.out_dtype)
        runtime.copy_async(self._d, upload(poison), self.nbytes, STREAM)
        synchronize()
        self.bound(algorithm)()
        return download(self._d, self.shape, self.out_dtype)


def _cuda(name: str) -> int:
    return dtype_from_name(name).cuda_data_type


def described(algorithm: Algorithm) -> dict[str, Any]:
    """Return cuBLASLt's description of an algorithm; a result counts even where the description fails."""
    try:
        info = bindings.describe_algorithm(algorithm)
    except Exception as error:  # noqa: BLE001 - the row shows it
        return {"description_error": short(error)}
    names = ("id", "tile", "stages", "split_k", "reduction", "units", "accumulator")
    values = {name: getattr(info, name) for name in names}
    return {**values, "input": info.input_type, "tensor_cores": info.uses_tensor_cores}
