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
COMPUTE = {**{kind.name: kind.value for kind in ComputeType}, "COMPUTE_32F_FAST_16F": 74, "COMPUTE_32F_FAST_16BF": 75}

#: The legacy default stream.
STREAM = 1
WORKSPACE_BYTES = 32 << 20
#: Sums of split products stay in the compute type.
FULL_REDUCTIONS = ("INPLACE", "COMPUTE_TYPE")


def synchronize(stream: int = STREAM) -> None:
    runtime.call("cudaStreamSynchronize", stream)


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


def is_broken() -> bool:
    """Whether an error of this process lasts: every further call of CUDA fails."""
    try:
        runtime.call("cudaDeviceSynchronize")
    except Exception:  # noqa: BLE001 - any error is the answer
        return True
    return False


@functools.cache
def handle() -> int:
    return bindings.create_handle()


@functools.cache
def _workspace() -> int:
    return runtime.allocate(WORKSPACE_BYTES)


class LtProduct:
    """`d = epilogue(alpha a b + beta c + bias)` for row-major matrices, computed as the column-major transpose.

    Operands are NumPy arrays, types of ml_dtypes included; `scales` are FP8's factors of a and b, in memory of the
    device; `inner_contiguous` stores b transposed, as int8 and FP8 require; `two_layouts` describes c and d by two
    descriptors of the same contents.
    """

    def __init__(
        self,
        a: Any,
        b: Any,
        *,
        compute: str = "COMPUTE_32F",
        out_dtype: str = "float32",
        scale_dtype: str = "float32",
        epilogue: str = "DEFAULT",
        bias: Any = None,
        scales: Sequence[float] = (),
        inner_contiguous: bool = False,
        two_layouts: bool = False,
    ) -> None:
        (m, k), n = a.shape, b.shape[1]
        self.shape = (m, n)
        self.out_dtype, self.scale_dtype = numpy_dtype(out_dtype), numpy_dtype(scale_dtype)
        self.nbytes = m * n * self.out_dtype.itemsize
        self._first = upload(b.T if inner_contiguous else b)
        self._second = upload(a)
        self._d = runtime.allocate(self.nbytes)
        attributes = {"TRANSA": int(inner_contiguous), "TRANSB": 0}
        attributes["EPILOGUE"] = int(getattr(libraries.cublas_lt.Epilogue, epilogue))
        if bias is not None:
            attributes["BIAS_POINTER"] = upload(bias)
        # In cuBLASLt's order: its first operand is b.
        for name, scale in zip(("B_SCALE_POINTER", "A_SCALE_POINTER"), scales, strict=False):
            attributes[name] = upload(np.array([scale], np.float32))
        operation = bindings.create("matmul_desc", (COMPUTE[compute], _cuda(scale_dtype)), attributes)

        def layout(dtype: str, rows: int, columns: int) -> Any:
            return bindings.create("matrix_layout", (_cuda(dtype), rows, columns, rows), {})

        result = layout(out_dtype, n, m)
        self.product = bindings.MatmulDescriptors(
            operation,
            layout(b.dtype.name, *((k, n) if inner_contiguous else (n, k))),
            layout(a.dtype.name, k, m),
            layout(out_dtype, n, m) if two_layouts else result,
            result,
        )

    def algorithms(self, count: int, schemes: Sequence[str] = FULL_REDUCTIONS) -> tuple[Algorithm, ...]:
        """Return up to `count` algorithms as the heuristics rank them; none where the product is not supported."""
        wanted = bindings.preference(WORKSPACE_BYTES, 256, schemes)
        return bindings.heuristics(handle(), self.product, wanted, count)

    def bound(
        self, algorithm: Algorithm, *, alpha: float = 1.0, beta: float = 0.0, c: int = 0, stream: int = STREAM
    ) -> Callable[[], None]:
        """Return the bare call: it queues the product and does nothing else."""
        data = np.frombuffer(algorithm.data, np.uint8).copy()
        factors = np.array([alpha, beta], self.scale_dtype)
        operation, first, second, c_layout, d_layout = self.product.pointers
        at = factors.ctypes.data
        arguments = (
            handle(), operation, at, self._first, first, self._second, second, at + factors.itemsize,
            c or self._d, c_layout, self._d, d_layout, data.ctypes.data, _workspace(),
            algorithm.workspace_bytes, stream,
        )  # fmt: skip
        matmul = libraries.cublas_lt.matmul
        # The default arguments hold the memory at these addresses.
        return lambda held=(self, data, factors): matmul(*arguments)

    def run(
        self, algorithm: Algorithm, *, alpha: float = 1.0, beta: float = 0.0, c: Any = None, stream: int = STREAM
    ) -> Any:
        # An element that is not written shows as NaN, or as -1 in integers.
        poison = np.full(self.shape, -1 if self.out_dtype.kind in "iu" else np.nan).astype(self.out_dtype)
        runtime.copy_async(self._d, upload(poison), self.nbytes, STREAM)
        synchronize()
        self.bound(algorithm, alpha=alpha, beta=beta, c=0 if c is None else upload(c), stream=stream)()
        synchronize(stream)
        return download(self._d, self.shape, self.out_dtype)

    def run_in_place(self, algorithm: Algorithm, c: Any) -> Any:
        """Return `a b + c`, where d has the memory of c."""
        runtime.copy_async(self._d, upload(c), self.nbytes, STREAM)
        self.bound(algorithm, beta=1.0)()
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
