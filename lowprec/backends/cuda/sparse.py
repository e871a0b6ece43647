"""Products with a 2:4 sparse ``b`` by cuSPARSELt.

The structured matrix is the first operand of the column-major product ``D^T = B^T A^T``, as in a call of cuBLASLt. It
is compressed once and kept with the prepared operand. Source: the cuSPARSELt documentation, *cuSPARSELt Functions*.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np

from lowprec.arrays import Device
from lowprec.arrays.sparsity import TWO_OF_FOUR
from lowprec.backends.cuda import handles, libraries, memory, runtime
from lowprec.backends.cuda.bindings import Descriptor
from lowprec.backends.cuda.invocation import number
from lowprec.backends.cuda.staging import Staging, packed_block
from lowprec.backends.interface import Arguments
from lowprec.errors import BackendError, DeviceMemoryError, LowprecError, UnsupportedError
from lowprec.formats import DType
from lowprec.planning import GemmPlan, ReasonKind
from lowprec.planning.cublaslt.calls import CublasLtCall, LtMatrix
from lowprec.planning.stored import sparse_reason

# ``cusparseStatus_t``.
_NOT_INITIALIZED, _ALLOC_FAILED, _INVALID_VALUE, _ARCH_MISMATCH, _NOT_SUPPORTED = 1, 2, 3, 4, 10
_REFUSALS = (_NOT_INITIALIZED, _INVALID_VALUE, _ARCH_MISMATCH, _NOT_SUPPORTED)
_ERRORS = {_ALLOC_FAILED: DeviceMemoryError, **dict.fromkeys(_REFUSALS, UnsupportedError)}

#: ``cusparseOrder_t`` and ``cusparseOperation_t``.
_COLUMN_MAJOR, _OPERATIONS = 1, {"N": 0, "T": 1}

_ALIGNMENT_BYTES = 16
#: Most invocations of a plan: for threads, and addresses of a bias.
_MOST_INVOCATIONS = 64

_INSTALL = "install lowprec with its extra sparse13 (sparse12 for CUDA 12)"


@contextlib.contextmanager
def _translated(doing: str) -> Iterator[None]:
    """Translate the errors of a block; bindings that cannot load the library raise errors without a status."""
    try:
        yield
    except (LowprecError, Warning):
        raise
    except Exception as error:
        status = getattr(error, "status", None)
        if status is None:
            raise UnsupportedError(f"cuSPARSELt cannot be loaded: {error}; {_INSTALL}") from error
        raise _ERRORS.get(int(status), BackendError)(f"cuSPARSELt cannot {doing}: {error}") from error


def _create_handle() -> int:
    with _translated("create a handle"):
        return int(libraries.cusparse_lt.init())


_pool = handles.HandlePool(_create_handle)


class SparseInvocation:
    """A product ready to run with one handle and one address of a bias, 0 for none."""

    def __init__(self, call: CublasLtCall, handle: int, bias: int) -> None:
        lt = self._lt = libraries.cusparse_lt
        self.handle = handle
        self._operation_b = _OPERATIONS[call.op_first]

        def matrix(x: LtMatrix, *structure: int) -> Descriptor:
            create = lt.structured_descriptor_init if structure else lt.dense_descriptor_init
            stored = (x.rows, x.cols, x.leading_dimension, _ALIGNMENT_BYTES, x.dtype.cuda_data_type, _COLUMN_MAJOR)
            return Descriptor(int(create(handle, *stored, *structure)), lt.mat_descriptor_destroy)

        integers = call.first.dtype is DType.INT8
        compute_type = lt.ComputeType.COMPUTE_32I if integers else lt.ComputeType.COMPUTE_32F
        with _translated("prepare a sparse product"):
            self._b, a = matrix(call.first, int(lt.Sparsity.SPARSITY_50_PERCENT)), matrix(call.second)
            d = matrix(call.d)
            described = lt.matmul_descriptor_init(
                handle, self._operation_b, _OPERATIONS[call.op_second],
                self._b.pointer, a.pointer, d.pointer, d.pointer, int(compute_type),
            )  # fmt: skip
            operation = Descriptor(int(described), lt.matmul_descriptor_destroy)
            if bias:
                name = lt.MatmulDescAttribute.BIAS_POINTER
                value = np.array([bias], lt.get_matmul_desc_attribute_dtype(name))
                lt.matmul_desc_set_attribute(handle, operation.pointer, int(name), value.ctypes.data, value.nbytes)
            selected = lt.matmul_alg_selection_init(handle, operation.pointer, int(lt.MatmulAlg.DEFAULT))
            selection = Descriptor(int(selected), lt.matmul_alg_selection_destroy)
            plan = lt.matmul_plan_init(handle, operation.pointer, selection.pointer)
            self.plan = Descriptor(int(plan), lt.matmul_plan_destroy)
            self.workspace_bytes = int(lt.matmul_get_workspace(handle, self.plan.pointer))
            self.compressed_bytes, self._buffer_bytes = lt.sp_mma_compressed_size2(handle, self._b.pointer)
            version = ".".join(str(lt.get_property(i)) for i in range(3))
        text = f"cuSPARSELt {version}, its default algorithm, workspace {self.workspace_bytes} B"
        self.info = SimpleNamespace(text=text, uses_tensor_cores=True)
        self._owners = (a, d, operation, selection)  # the plan may refer to them

    def compress(self, source: int, target: int, device: Device, stream: int) -> None:
        """Compress ``b``; raise UnsupportedError if cuSPARSELt does not find the pattern in it."""
        lt, invalid = self._lt, np.zeros(1, np.int32)
        of_b = (self.handle, self._b.pointer, 1, self._operation_b, source)
        buffer_bytes = max(self._buffer_bytes, invalid.nbytes)
        with _translated("compress b"), memory.temporary(buffer_bytes, device.index, stream) as buffer:
            lt.sp_mma_prune_check2(*of_b, buffer, stream)
            runtime.copy_async(invalid.ctypes.data, buffer, invalid.nbytes, stream)
            lt.sp_mma_compress2(*of_b, target, buffer, stream)
        memory.synchronize(stream, device)
        if invalid[0]:
            raise UnsupportedError("cuSPARSELt does not find the 2:4 pattern in b")


class SparseCall(NamedTuple):
    """An invocation and the compressed ``b``."""

    invocation: SparseInvocation
    compressed: memory.Block

    def run(self, arguments: Arguments, pointers: tuple[int, int, int], *, staged: bool) -> None:
        """Queue the product of these addresses of ``a``, ``b`` and the result; an epilogue follows if ``staged``."""
        invocation, stream = self.invocation, arguments.stream
        c, beta = pointers[2], 0.0 if staged or arguments.c is None else arguments.beta
        if beta and arguments.c is not None:
            c = arguments.c.address
        first, second = number(1.0 if staged else arguments.alpha, DType.FLOAT32), number(beta, DType.FLOAT32)
        block = memory.temporary(invocation.workspace_bytes, arguments.a.device.index, stream)
        streams = np.array([stream], np.uint64)
        with block as workspace, _translated("run a sparse product"):
            libraries.cusparse_lt.matmul(
                invocation.handle, invocation.plan.pointer, first.address, self.compressed.address, pointers[0],
                second.address, c, pointers[2], workspace, streams.ctypes.data, 1,
            )  # fmt: skip


class SparseProducts:
    """The sparse products of a lowered plan; an unsupported one is dense, with a reason."""

    def __init__(self, plan: GemmPlan, call: CublasLtCall | None, staging: Staging | None) -> None:
        self._call, self._staging = call, staging
        #: Why cuSPARSELt does not support the product, "" if the plan shows it, None if it does.
        self._refusal = None if sparse_reason(plan, call).kind is ReasonKind.SPARSE else ""
        self._invocations: dict[tuple[int, int], SparseInvocation] = {}

    def call(self, arguments: Arguments) -> SparseCall | str:
        """Return the call for these arguments, or the reason for a dense product, "" if the plan shows it."""
        call, view = self._call, arguments.b
        if self._refusal is not None or call is None:
            return self._refusal or ""
        packed = self._staging.packed_b(arguments) if call.pack_b and self._staging else None
        if call.pack_b and packed is None:
            return "b is not kept packed for this mode: a dense product"
        source = packed.block.address if packed else view.address
        bias = arguments.bias.address if call.epilogue == "BIAS" and arguments.bias is not None else 0
        addresses = bias | source | (0 if call.pack_a else arguments.a.address)
        if not call.staged:
            addresses |= arguments.out.address | (arguments.c.address if arguments.c is not None else 0)
        if addresses % _ALIGNMENT_BYTES:
            return f"cuSPARSELt needs pointers that are multiples of {_ALIGNMENT_BYTES} bytes: a dense product"
        key, stream = (TWO_OF_FOUR, call.first, call.op_first, call.pack_b, view.address), arguments.stream
        try:
            invocation = self._invocation(call, arguments, bias)
            compress = partial(invocation.compress, source, device=view.device, stream=stream)
            nbytes = invocation.compressed_bytes
            return SparseCall(invocation, packed_block(view, key, nbytes, stream, compress, "the compressed b"))
        except UnsupportedError as error:
            self._refusal = f"{error}: a dense product"
            return self._refusal

    def _invocation(self, call: CublasLtCall, arguments: Arguments, bias: int) -> SparseInvocation:
        handle = _pool.handle(arguments.a.device.index, arguments.stream)
        invocation = self._invocations.get((handle, bias))
        if invocation is None:
            runtime.refuse_capture(arguments.stream, "a plan of cuSPARSELt")
            if len(self._invocations) >= _MOST_INVOCATIONS:
                self._invocations.clear()
            invocation = self._invocations.setdefault((handle, bias), SparseInvocation(call, handle, bias))
        return invocation
