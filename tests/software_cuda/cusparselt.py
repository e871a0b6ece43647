"""A software cuSPARSELt: the functions of ``nvmath.bindings.cusparseLt`` that lowprec calls.

What real cuSPARSELt refuses is refused, with its status. The bytes of a compressed matrix are of our own: a mark, and
op(A) with two elements of each group. Source: the cuSPARSELt documentation, *cuSPARSELt Functions*.
Uncertain, and decided for refusal: a workspace that is null, and a structured matrix whose leading dimension is not a
multiple of 32 bytes.
"""

import functools
from dataclasses import dataclass
from enum import IntEnum

import numpy as np
from nvmath.bindings import cusparseLt as real

from software_cuda import tables
from software_cuda.arithmetic import strided
from software_cuda.objects import ALLOC_FAILED, Handle, Object, Registry, Use, error_of, read_host
from software_cuda.problem import Matrix
from software_cuda.recorder import Fault, Refusal, function


class Status(IntEnum):
    """``cusparseStatus_t``."""

    ALLOC_FAILED = 2
    INVALID_VALUE = 3
    ARCH_MISMATCH = 4
    INTERNAL_ERROR = 7
    NOT_SUPPORTED = 10


HANDLE, MATRIX, OPERATION, SELECTION, PLAN = KINDS = (
    "cuSPARSELt handle", "mat_descriptor", "matmul_descriptor", "matmul_alg_selection", "matmul_plan",
)  # fmt: skip

#: Types of A and B, of C and D, and of the computation.
_TYPES = {
    (tables.R_16F, tables.R_16F, real.ComputeType.COMPUTE_32F),
    (tables.R_16BF, tables.R_16BF, real.ComputeType.COMPUTE_32F),
    (tables.R_32F, tables.R_32F, real.ComputeType.COMPUTE_32F),
    *((tables.R_8I, d, real.ComputeType.COMPUTE_32I) for d in (tables.R_8I, tables.R_32I, tables.R_16F, tables.R_16BF)),
}
_STORED = {x for a, d, _ in _TYPES for x in (a, d)}
_MARK = np.frombuffer(b"2:4 software cuSPARSELt  ".ljust(32), np.uint8)
_WORKSPACE_BYTES, _BUFFER_BYTES = 2048, 512


@dataclass(frozen=True)
class _Sparse:
    """A structured matrix with its operation: rows of op(A), of which groups along k are compressed."""

    matrix: Matrix
    operation: int

    @property
    def shape(self):
        _, rows, cols = self.matrix.shape
        return (cols, rows) if self.operation else (rows, cols)

    @property
    def nbytes(self):
        rows, k = self.shape
        return len(_MARK) + rows * k * self.matrix.dtype.itemsize

    def dense(self, x):
        """Return op(A) of shape (rows, groups, 4)."""
        return (x[0].T if self.operation else x[0]).reshape(self.shape[0], -1, 4)


class CusparseLt(Registry):
    """Replaces ``nvmath.bindings.cusparseLt``; if ``is_missing``, every function fails as without the library."""

    handle_kind = HANDLE
    harmless = frozenset({"get_matmul_desc_attribute_dtype", "get_matmul_alg_attribute_dtype"})

    def __init__(self, recorder, runtime):
        super().__init__("cusparse_lt", real, recorder, runtime)
        self.is_missing = False

    def error(self, status, reason):
        if self.is_missing:
            return RuntimeError("The cusparseLt library was not found")
        if not isinstance(status, Status):  # of the registry, in cuBLAS's numbers
            known = {None: Status.INTERNAL_ERROR, ALLOC_FAILED: Status.ALLOC_FAILED}
            status = known.get(status, Status.INVALID_VALUE)
        return error_of(real.cuSPARSELtError, status, f"{status.name} ({status}): {reason}")

    def live(self):
        return {f"{kind}s": self.count(kind) for kind in KINDS}

    # -- objects ----------------------------------------------------------------------------------

    @function
    def get_property(self, number):
        return (0, 8, 1)[number]

    @function
    def init(self):
        if self.is_missing:
            raise Refusal(None)
        if self.runtime.devices[self.runtime.device].capability < (8, 0):
            raise Refusal(Status.ARCH_MISMATCH, "no sparse tensor cores")
        return self.add(Handle(HANDLE, self.runtime))

    @function
    def destroy(self, handle):
        self.destroy_handle(handle)

    def _add(self, kind, **fields):
        made = Object(kind)
        vars(made).update(fields)
        return self.add(made)

    def _descriptor(self, handle, rows, cols, ld, alignment, kind, order, nbytes):
        self.handle(handle)
        if order not in (1, 2) or kind not in _STORED or min(rows, cols) < 1 or ld < (rows if order == 1 else cols):
            raise Refusal(Status.INVALID_VALUE, f"{rows} x {cols}, ld {ld}, order {order}, type {kind}")
        step = nbytes // tables.DTYPES[kind].itemsize
        if rows % step or cols % step or ld % step or alignment < 16 or alignment % 16:
            raise Refusal(Status.NOT_SUPPORTED, f"{rows} x {cols}, ld {ld}, in steps of {step}; alignment {alignment}")
        matrix = Matrix("sparse" if nbytes == 32 else "dense", kind, rows, cols, ld, order - 1)
        return self._add(MATRIX, matrix=matrix, is_sparse=nbytes == 32, alignment=alignment)

    @function
    def dense_descriptor_init(self, handle, rows, cols, ld, alignment, kind, order):
        return self._descriptor(handle, rows, cols, ld, alignment, kind, order, 16)

    @function
    def structured_descriptor_init(self, handle, rows, cols, ld, alignment, kind, order, sparsity):
        assert sparsity == real.Sparsity.SPARSITY_50_PERCENT, "there is no other"
        return self._descriptor(handle, rows, cols, ld, alignment, kind, order, 32)

    @function
    def matmul_descriptor_init(self, handle, op_a, op_b, a, b, c, d, compute):
        self.handle(handle)
        found = [self.get(x, MATRIX) for x in (a, b, c, d)]
        x, y, z, w = (f.matrix for f in found)
        if [f.is_sparse for f in found] != [True, False, False, False] or not {op_a, op_b} <= {0, 1}:
            raise Refusal(Status.INVALID_VALUE, "A is structured here, and no other matrix")
        (m, k), (other, n) = ((v.cols, v.rows) if op else (v.rows, v.cols) for v, op in ((x, op_a), (y, op_b)))
        if k != other or (z.rows, z.cols) != (m, n) or (w.rows, w.cols) != (m, n):
            raise Refusal(Status.INVALID_VALUE, f"extents do not fit: {x.shape}, {y.shape}, {w.shape}")
        if x.type != y.type or z.type != w.type or (x.type, w.type, compute) not in _TYPES:
            raise Refusal(Status.NOT_SUPPORTED, f"types {x.type}, {y.type}, {z.type}, {w.type}, compute {compute}")
        if (z.ld, z.order) != (w.ld, w.order):
            raise Refusal(Status.NOT_SUPPORTED, "C and D differ in layout")
        if x.type == tables.R_8I and (op_a != 1 - x.order or op_b != y.order):
            raise Refusal(Status.NOT_SUPPORTED, "int8 matrices are contiguous along k")
        return self._add(OPERATION, sparse=_Sparse(x, op_a), b=y, op_b=op_b, d=w, owners=found, bias=0)

    @function
    def matmul_desc_set_attribute(self, handle, number, attribute, address, nbytes):
        self.handle(handle)
        found = self.get(number, OPERATION)
        assert (attribute, nbytes) == (real.MatmulDescAttribute.BIAS_POINTER, 8), "others are not modelled"
        found.bias = int(np.frombuffer(read_host(address, nbytes), np.uint64)[0])

    @function
    def matmul_alg_selection_init(self, handle, operation, algorithm):
        self.handle(handle)
        assert algorithm == real.MatmulAlg.DEFAULT, "others are not modelled"
        return self._add(SELECTION, operation=self.get(operation, OPERATION))

    @function
    def matmul_plan_init(self, handle, operation, selection):
        found = self.get(operation, OPERATION)
        assert self.get(selection, SELECTION).operation is found, "the algorithm is of another product"
        # The bias is read here: a later change has no effect.
        return self._add(PLAN, operation=found, bias=found.bias, owner=self.handle(handle))

    @function
    def matmul_get_workspace(self, handle, plan):
        self._plan(handle, plan)
        return _WORKSPACE_BYTES

    def _plan(self, handle, number):
        found = self.get(number, PLAN)
        if found.owner is not self.handle(handle):
            self.recorder.faults.append("a plan is used with another handle")
        return found

    # -- compression ------------------------------------------------------------------------------

    def _structured(self, handle, number, is_a=1, operation=0):
        self.handle(handle)
        found = self.get(number, MATRIX)
        if not found.is_sparse or is_a != 1 or operation not in (0, 1):
            raise Refusal(Status.INVALID_VALUE, "A is structured here, and no other matrix")
        return _Sparse(found.matrix, operation)

    @function
    def sp_mma_compressed_size2(self, handle, number):
        return self._structured(handle, number).nbytes, _BUFFER_BYTES

    @function
    def sp_mma_prune_check2(self, handle, number, is_a, operation, source, invalid, stream):
        found = self._structured(handle, number, is_a, operation)

        def check(device):
            dense = found.dense(self._at(found.matrix, source, device))
            broken = (np.count_nonzero(dense, axis=-1) > 2).any()
            self.runtime.memory.at(invalid, 4, device, "prune check").view(np.int32)[0] = broken

        self._queue(stream, "prune check", check, source, invalid)

    @function
    def sp_mma_compress2(self, handle, number, is_a, operation, source, target, buffer, stream):
        found = self._structured(handle, number, is_a, operation)

        def compress(device):
            dense = found.dense(self._at(found.matrix, source, device)).copy()
            # Elements that are not zero come first; of more than two the others are lost.
            lost = np.argsort(dense == 0, axis=-1, kind="stable")[..., 2:]
            np.put_along_axis(dense, lost, 0, -1)
            self.runtime.memory.at(buffer, _BUFFER_BYTES, device, "the buffer of a compression")[...] = 0xA5
            memory = self.runtime.memory.at(target, found.nbytes, device, "a compressed matrix")
            memory[...] = np.frombuffer(_MARK.tobytes() + dense.tobytes(), np.uint8)

        self._queue(stream, "compress", compress, source, target, buffer)

    def _at(self, x, pointer, device):
        return strided(self.runtime.memory, x, pointer, device)

    def _queue(self, stream, label, run, *pointers):
        for pointer in pointers:
            if not pointer or pointer % 16:
                raise Refusal(Status.INVALID_VALUE, f"a pointer of {label} is {pointer:#x}")
        device = self.runtime.device
        with self.runtime.lock:
            self.runtime.enqueue(self.runtime.stream(stream, current=True), label, lambda: run(device), 0.02)

    # -- the product ------------------------------------------------------------------------------

    @function
    def matmul(
        self, handle, plan, alpha, a, b, beta, c, d,
        workspace, streams, count,
    ):  # fmt: skip
        with Use(self.handle(handle), self.recorder):
            found = self._plan(handle, plan)
            factors = [np.frombuffer(read_host(x, 4), np.float32)[0] for x in (alpha, beta)]
            assert count == 1, "several streams are not modelled"
            stream = int(np.frombuffer(read_host(streams, 8), np.uint64)[0])
            bias = found.bias
            pointers = (a, b, c, d, workspace, *([bias] if bias else []))
            multiply = functools.partial(self._multiply, found, *factors, *pointers[:5])
            self._queue(stream, "sparse matmul", multiply, *pointers)

    def _multiply(self, plan, alpha, beta, a, b, c, d, workspace, device):
        x, memory = plan.operation, self.runtime.memory
        wide = np.int64 if x.b.dtype.kind == "i" else np.float64
        right = self._at(x.b, b, device)[0].astype(wide)
        memory.at(workspace, _WORKSPACE_BYTES, device, "the workspace of a sparse product")[...] = 0xA5
        with np.errstate(all="ignore"):
            product = self._decompressed(x.sparse, a, device).astype(wide) @ (right.T if x.op_b else right)
            value = alpha * product.astype(np.float32)
            target = self._at(x.d, d, device)[0]
            if beta != 0:
                value = value + beta * self._at(x.d, c, device)[0].astype(np.float32)
            if plan.bias:
                shape = Matrix("bias", x.d.type, x.d.rows, 1, x.d.rows)
                value = value + self._at(shape, plan.bias, device)[0].astype(np.float32)
            if target.dtype.kind == "i":
                plain = alpha == 1 and beta == 0 and not plan.bias
                value = product if plain else np.rint(value.astype(np.float64))
                limits = np.iinfo(target.dtype)
                value = np.clip(value, limits.min, limits.max)
            target[...] = value.astype(target.dtype)

    def _decompressed(self, x, pointer, device):
        memory = self.runtime.memory
        if (memory.at(pointer, len(_MARK), device, "a compressed matrix") != _MARK).any():
            raise Fault("this is no compressed matrix")
        data = memory.at(pointer, x.nbytes, device, "a compressed matrix")
        return data[len(_MARK) :].view(x.matrix.dtype).reshape(x.shape)


def _functions(kind):
    def destroy(self, number):
        self.remove(number, kind)

    return destroy


for _kind in KINDS[1:]:
    _method = _functions(_kind)
    _method.__name__ = f"{_kind}_destroy"
    setattr(CusparseLt, _method.__name__, function(_method))
