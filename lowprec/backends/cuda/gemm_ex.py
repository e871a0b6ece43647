"""A product by ``cublasGemmStridedBatchedEx``, where no algorithm of cuBLASLt runs.

Source: the cuBLAS documentation, ``cublasGemmStridedBatchedEx()`` and ``cublasSetWorkspace()``.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace

from lowprec.arrays.device_memory import LEGACY_STREAM
from lowprec.backends.cuda import bindings, handles, libraries, memory
from lowprec.backends.cuda.bindings import Algorithm
from lowprec.backends.cuda.invocation import NO_WORKSPACE, OPERATIONS, Number, Operands, Workspace, byte_offsets, number
from lowprec.planning.cublaslt.calls import CublasLtCall

#: ``CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION``, by which sums of split products stay in FP32, and
#: ``CUBLAS_GEMM_DEFAULT``.
_MATH_MODE, _ALGORITHM = 16, -1


def _create() -> int:
    handle = bindings.create_handle("cublas")
    bindings.set_math_mode(handle, _MATH_MODE)
    return handle


_pool = handles.HandlePool(_create)


class GemmEx:
    """A product without an epilogue, with the methods of an :class:`Invocation`."""

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
        own, cublas, (first, second, product) = _pool.handle(device, stream), libraries.cublas, self._matrices
        with memory.temporary(nbytes, device, stream) as address, bindings.translated(lambda: f"run {self._product}"):
            cublas.set_stream(own, 0 if stream == LEGACY_STREAM else stream)  # which resets the workspace
            cublas.set_workspace(own, address, nbytes)
            for a, b, _, d in pointers:
                cublas.gemm_strided_batched_ex_64(
                    own, *self._extents, alpha.address, a, *first, b, *second,
                    beta.address, d, *product, call.batch_count, call.compute_type.value, _ALGORITHM,
                )  # fmt: skip
