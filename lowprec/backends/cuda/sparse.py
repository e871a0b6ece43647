"""Products with a 2:4 sparse ``b`` by cuSPARSELt.

The structured matrix is the first operand of the column-major product ``D^T = B^T A^T``, as in a call of cuBLASLt. It
is compressed once and kept with the prepared operand. Source: the cuSPARSELt documentation, *cuSPARSELt Functions*.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace

import numpy as np

from lowprec.arrays import Device
from lowprec.arrays.sparsity import TWO_OF_FOUR
from lowprec.backends.cuda import handles, memory, runtime
from lowprec.backends.cuda.bindings import Descriptor
from lowprec.backends.cuda.invocation import OPERATIONS, number
from lowprec.backends.cuda.libraries import cached, libraries
from lowprec.backends.cuda.staging import packed_block
from lowprec.backends.cuda.steps import Addresses
from lowprec.backends.interface import Arguments
from lowprec.errors import BackendError, DeviceMemoryError, LowprecError, UnsupportedError
from lowprec.formats import DType
from lowprec.planning.cublaslt.calls import STEP_BYTES, CublasLtCall, LtMatrix

#: Errors by ``cusparseStatus_t``: not initialised, invalid value, wrong architecture, not supported; out of memory.
_ERRORS = dict.fromkeys((1, 3, 4, 10), UnsupportedError) | {2: DeviceMemoryError}

#: ``cusparseOrder_t``.
_COLUMN_MAJOR = 1


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
            remedy = "install lowprec with its extra sparse13 (sparse12 for CUDA 12)"
            raise UnsupportedError(f"cuSPARSELt cannot be loaded: {error}; {remedy}") from error
        raise _ERRORS.get(int(status), BackendError)(
            f"cuSPARSELt cannot {doing}: {error}"
        ) from error


@_translated("create a handle")
def _create_handle() -> int:
    return int(libraries().cusparse_lt.init())


_pool = handles.HandlePool(_create_handle)


class SparseProduct:
    """A product ready to run with one handle and one address of a bias, 0 for none."""

    @_translated("prepare a sparse product")
    def __init__(self, call: CublasLtCall, handle: int, bias: int) -> None:
        lt = libraries().cusparse_lt
        create = partial(_create, handle)
        self._handle = handle
        self._op_b = OPERATIONS[call.op_first]
        self._is_staged = bool(call.staged)
        half = int(lt.Sparsity.SPARSITY_50_PERCENT)
        self._b = create("structured_descriptor", *_stored(call.first), half, kind="mat_descriptor")
        create_dense = partial(create, "dense_descriptor", kind="mat_descriptor")
        a = create_dense(*_stored(call.second))
        d = create_dense(*_stored(call.d))
        name = "COMPUTE_32I" if call.first.dtype is DType.INT8 else "COMPUTE_32F"
        ops = (self._op_b, OPERATIONS[call.op_second])
        matrices = (self._b.pointer, a.pointer, d.pointer, d.pointer)
        compute_type = int(getattr(lt.ComputeType, name))
        product = create("matmul_descriptor", *ops, *matrices, compute_type)
        if bias:
            value = np.array([bias], np.uintp)
            attribute = int(lt.MatmulDescAttribute.BIAS_POINTER)
            lt.matmul_desc_set_attribute(
                handle, product.pointer, attribute, value.ctypes.data, value.nbytes
            )
        chosen = create("matmul_alg_selection", product.pointer, int(lt.MatmulAlg.DEFAULT))
        self._plan = create("matmul_plan", product.pointer, chosen.pointer)
        self._used = (a, d, product, chosen)  # the plan may refer to them
        self._workspace_bytes = int(lt.matmul_get_workspace(handle, self._plan.pointer))
        self.compressed_bytes, self._buffer_bytes = lt.sp_mma_compressed_size2(
            handle, self._b.pointer
        )
        version = ".".join(map(str, map(lt.get_property, range(3))))
        text = f"cuSPARSELt {version}, its default algorithm, workspace {self._workspace_bytes} B"
        self.info = SimpleNamespace(text=text, uses_tensor_cores=True)

    @_translated("compress b")
    def compress(self, source: int, stream: int, target: int) -> None:
        """Compress ``b``; raise UnsupportedError if cuSPARSELt does not find the pattern in it."""
        lt = libraries().cusparse_lt
        invalid = np.zeros(1, np.int32)
        of_b = (self._handle, self._b.pointer, 1, self._op_b, source)
        with _temporary(self._buffer_bytes + invalid.nbytes, stream) as (buffer, queue):
            lt.sp_mma_prune_check2(*of_b, buffer, queue)
            runtime.copy_async(invalid.ctypes.data, buffer, invalid.nbytes, queue)
            lt.sp_mma_compress2(*of_b, target, buffer, queue)
        memory.synchronize(stream, Device(2, runtime.current_device()))
        if invalid[0]:
            raise UnsupportedError("cuSPARSELt does not find the 2:4 pattern in b")

    @_translated("run a sparse product")
    def __call__(self, addresses: Addresses, stream: int) -> SparseProduct:
        """Queue the product with the compressed ``b`` at ``packed_b``, and return it."""
        alpha = number(1.0, DType.FLOAT32)
        beta = number(0.0, DType.FLOAT32)
        c = addresses.product
        if not self._is_staged:
            alpha = number(addresses.alpha, DType.FLOAT32)
            if addresses.c:
                beta = number(addresses.beta, DType.FLOAT32)
                c = addresses.c
        with _temporary(self._workspace_bytes, stream) as (workspace, queue):
            streams = np.array([queue], np.uint64)
            libraries().cusparse_lt.matmul(
                self._handle,
                self._plan.pointer,
                alpha.address,
                addresses.packed_b,
                addresses.packed_a,
                beta.address,
                c,
                addresses.product,
                workspace,
                streams.ctypes.data,
                streams.size,
            )
        return self


def _create(handle: int, name: str, *arguments: int, kind: str = "") -> Descriptor:
    """Create an object by the function of a name; ``kind``, the name by default, is that of objects to destroy."""
    lt = libraries().cusparse_lt
    pointer = getattr(lt, f"{name}_init")(handle, *arguments)
    return Descriptor(int(pointer), getattr(lt, f"{kind or name}_destroy"))


def _stored(x: LtMatrix) -> tuple[int, ...]:
    return x.rows, x.cols, x.leading_dimension, STEP_BYTES, x.dtype.cuda_data_type, _COLUMN_MAJOR


@contextlib.contextmanager
def _temporary(nbytes: int, stream: int) -> Iterator[tuple[int, int]]:
    """Yield the address of temporary memory, and the stream for the library's work."""
    device = runtime.current_device()
    with (
        memory.temporary(nbytes, device, stream) as address,
        handles.library_stream(device, stream) as queue,
    ):
        yield address, queue


#: Prepared products, also of threads that have finished, whose handles others reuse.
_product = cached(SparseProduct)


def prepared_product(
    call: CublasLtCall, arguments: Arguments, addresses: Addresses
) -> tuple[SparseProduct, int] | str:
    """Return the product and the address of the compressed ``b``, or the reason for a dense product.

    The pointers' alignment is such a reason. Raise UnsupportedError where cuSPARSELt does not support the product.
    """
    stream = arguments.stream
    bias = addresses.bias if "BIAS" in call.epilogue else 0
    if any(address % STEP_BYTES for address in addresses[:5]):
        return (
            f"cuSPARSELt needs pointers that are multiples of {STEP_BYTES} bytes: a dense product"
        )
    handle = _pool.handle(arguments.a.device.index, stream)
    product = _product(call, handle, bias)
    compress = partial(product.compress, addresses.b, stream)
    key = (TWO_OF_FOUR, call.first, call.op_first, addresses.b)
    block = packed_block(
        arguments.b, key, product.compressed_bytes, stream, compress, "the compressed b"
    )
    return product, block.address
