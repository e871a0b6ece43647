"""A software cuSPARSELt: the functions of ``nvmath.bindings.cusparseLt`` that lowprec calls.

What real cuSPARSELt refuses is refused, with its status. A compressed matrix is a mark, and op(A) with two elements of
each group. Source: the cuSPARSELt documentation, *cuSPARSELt Functions*. Uncertain, and decided for refusal: a
workspace that is null, the default streams by other handles than 0, and a leading dimension of a structured matrix that
is not a multiple of 32 bytes.
"""

import functools
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
    INTERNAL_ERROR = 7
    NOT_SUPPORTED = 10


HANDLE, MATRIX, OPERATION, SELECTION, PLAN = KINDS = (
    "cuSPARSELt handle", "mat_descriptor", "matmul_descriptor", "matmul_alg_selection", "matmul_plan",
)  # fmt: skip

#: Types of A and B, of C and D, and of the computation; lowprec uses no others.
_TYPES = {
    (tables.R_16F, tables.R_16F, real.ComputeType.COMPUTE_32F),
    (tables.R_16BF, tables.R_16BF, real.ComputeType.COMPUTE_32F),
    (tables.R_8I, tables.R_32I, real.ComputeType.COMPUTE_32I),
}
_MARK = b"2:4 software cuSPARSELt".ljust(32)
_WORKSPACE_BYTES, _BUFFER_BYTES = 2048, 512


class CusparseLt(Registry):
    """Replaces ``nvmath.bindings.cusparseLt``."""

    handle_kind = HANDLE

    def __init__(self, recorder, runtime):
        super().__init__("cusparse_lt", real, recorder, runtime)

    def error(self, status, reason):
        if not isinstance(status, Status):  # of the registry, in cuBLAS's numbers
            known = {None: Status.INTERNAL_ERROR, ALLOC_FAILED: Status.ALLOC_FAILED}
            status = known.get(status, Status.INVALID_VALUE)
        return error_of(real.cuSPARSELtError, status, f"{status.name} ({status}): {reason}")

    def live(self):
        return {f"{kind}s": self.count(kind) for kind in KINDS}

    @function
    def get_property(self, number):
        return (0, 8, 1)[number]

    @function
    def init(self):
        return self.add(Handle(HANDLE, self.runtime))

    @function
    def destroy(self, handle):
        self.destroy_handle(handle)

    def _new(self, handle, kind, **fields):
        made = Object(kind)
        vars(made).update(fields, owner=self.handle(handle))
        return self.add(made)

    def _matrix(self, handle, nbytes, rows, cols, ld, alignment, kind, order):
        assert (alignment, order) == (16, 1), "lowprec uses no others"
        steps = [x * tables.DTYPES[kind].itemsize / nbytes for x in (rows, cols, ld)]
        if ld < rows or not all(x > 0 and x.is_integer() for x in steps):
            raise Refusal(
                Status.NOT_SUPPORTED, f"{rows} x {cols}, ld {ld}: not in steps of {nbytes} bytes"
            )
        return self._new(
            handle, MATRIX, matrix=Matrix("sparse", kind, rows, cols, ld), is_sparse=nbytes == 32
        )

    @function
    def dense_descriptor_init(self, handle, *stored):
        return self._matrix(handle, 16, *stored)

    @function
    def structured_descriptor_init(self, handle, *stored):
        *stored, sparsity = stored
        assert sparsity == real.Sparsity.SPARSITY_50_PERCENT, "there is no other"
        return self._matrix(handle, 32, *stored)

    @function
    def matmul_descriptor_init(self, handle, op_a, op_b, a, b, c, d, compute):
        found = [self.get(x, MATRIX) for x in (a, b, c, d)]
        (m, k), (other, n), out = (
            self._shape(x.matrix, op) for x, op in zip(found[:3], (op_a, op_b, 0), strict=True)
        )
        if (
            [x.is_sparse for x in found] != [True, False, False, False]
            or c != d
            or k != other
            or (m, n) != out
        ):
            raise Refusal(
                Status.INVALID_VALUE,
                f"{m} x {k}, {other} x {n} and {out}: A alone is structured, and C is D",
            )
        kinds = [x.matrix.type for x in found]
        if kinds[0] != kinds[1] or (*kinds[1:3], compute) not in _TYPES:
            raise Refusal(Status.NOT_SUPPORTED, f"types {kinds}, compute {compute}")
        if kinds[0] == tables.R_8I and (op_a, op_b) != (1, 0):
            raise Refusal(Status.NOT_SUPPORTED, "int8 matrices are contiguous along k")
        return self._new(
            handle, OPERATION, matrices=[x.matrix for x in found], ops=(op_a, op_b), bias=0
        )

    @staticmethod
    def _shape(x, op):
        return (x.cols, x.rows) if op else (x.rows, x.cols)

    @function
    def matmul_desc_set_attribute(self, _, number, attribute, address, nbytes):
        assert (attribute, nbytes) == (real.MatmulDescAttribute.BIAS_POINTER, 8), (
            "others are not modelled"
        )
        self.get(number, OPERATION).bias = int(
            np.frombuffer(read_host(address, nbytes), np.uint64)[0]
        )

    @function
    def matmul_alg_selection_init(self, handle, operation, algorithm):
        assert algorithm == real.MatmulAlg.DEFAULT, "others are not modelled"
        return self._new(handle, SELECTION, operation=self.get(operation, OPERATION))

    @function
    def matmul_plan_init(self, handle, operation, selection):
        found = self.get(operation, OPERATION)
        assert self.get(selection, SELECTION).operation is found, (
            "the algorithm is of another product"
        )
        # The bias is read here: a later change has no effect.
        return self._new(handle, PLAN, operation=found, bias=found.bias)

    @function
    def matmul_get_workspace(self, _, plan):
        self.get(plan, PLAN)
        return _WORKSPACE_BYTES

    @function
    def sp_mma_compressed_size2(self, _, number):
        x = self.get(number, MATRIX).matrix
        return len(_MARK) + x.rows * x.cols * x.dtype.itemsize, _BUFFER_BYTES

    @function
    def sp_mma_prune_check2(self, _, number, is_a, op, source, invalid, stream):
        def check(device):
            broken = (np.count_nonzero(self._groups(number, op, source, device), axis=-1) > 2).any()
            self.runtime.memory.at(invalid, 4, device, "prune check").view(np.int32)[0] = broken

        assert is_a == 1
        self._queue(stream, "prune check", check, source, invalid)

    @function
    def sp_mma_compress2(self, _, number, is_a, op, source, target, buffer, stream):
        def compress(device):
            dense = self._groups(number, op, source, device).copy()
            # Elements that are not zero come first; of more than two the others are lost.
            lost = np.argsort(dense == 0, axis=-1, kind="stable")[..., 2:]
            np.put_along_axis(dense, lost, 0, -1)
            self.runtime.memory.at(buffer, _BUFFER_BYTES, device, "the buffer of a compression")[
                ...
            ] = 0xA5
            data = np.frombuffer(_MARK + dense.tobytes(), np.uint8)
            self.runtime.memory.at(target, data.size, device, "a compressed matrix")[...] = data

        assert is_a == 1
        self._queue(stream, "compress", compress, source, target, buffer)

    def _groups(self, number, op, source, device):
        """Return op(A) of a structured matrix with shape (rows, groups, 4)."""
        x = self.get(number, MATRIX).matrix
        dense = self._at(x, op, source, device)
        return dense.reshape(len(dense), -1, 4)

    def _at(self, x, op, pointer, device):
        found = strided(self.runtime.memory, x, pointer, device)[0]
        return found.T if op else found

    def _queue(self, stream, label, run, *pointers):
        for pointer in pointers:
            if not pointer or pointer % 16:
                raise Refusal(Status.INVALID_VALUE, f"a pointer of {label} is {pointer:#x}")
        if stream in (1, 2) and self.recorder.switches.default_streams:
            raise Refusal(Status.INVALID_VALUE, f"stream {stream}")
        device = self.runtime.device
        with self.runtime.lock:
            self.runtime.enqueue(
                self.runtime.stream(stream, current=True), label, lambda: run(device), 0.02
            )

    @function
    def matmul(self, handle, plan, alpha, a, b, beta, c, d, workspace, streams, count):
        with Use(self.handle(handle), self.recorder):
            found = self.get(plan, PLAN)
            if found.owner is not self.handle(handle):
                self.recorder.faults.append("a plan is used with another handle")
            factors = [np.frombuffer(read_host(x, 4), np.float32)[0] for x in (alpha, beta)]
            assert count == 1, "several streams are not modelled"
            stream = int(np.frombuffer(read_host(streams, 8), np.uint64)[0])
            multiply = functools.partial(self._multiply, found, *factors, a, b, c, d, workspace)
            self._queue(stream, "sparse matmul", multiply, a, b, c, d, workspace, found.bias or d)

    def _multiply(self, plan, alpha, beta, a, b, c, d, workspace, device):
        (sparse, dense, _, result), ops = plan.operation.matrices, plan.operation.ops
        memory = self.runtime.memory
        nbytes = len(_MARK) + sparse.rows * sparse.cols * sparse.dtype.itemsize
        data = memory.at(a, nbytes, device, "a compressed matrix").tobytes()
        if not data.startswith(_MARK):
            raise Fault("this is no compressed matrix")
        left = np.frombuffer(data, sparse.dtype, offset=len(_MARK)).reshape(
            self._shape(sparse, ops[0])
        )
        memory.at(workspace, _WORKSPACE_BYTES, device, "the workspace of a sparse product")[...] = (
            0xA5
        )
        wide = np.int64 if sparse.type == tables.R_8I else np.float64
        with np.errstate(all="ignore"):
            value = left.astype(wide) @ self._at(dense, ops[1], b, device).astype(wide)
            if wide is np.int64:
                assert (alpha, beta, plan.bias) == (1, 0, 0), (
                    "an epilogue of integers is not modelled"
                )
            else:
                value = alpha * value.astype(np.float32)
            if beta != 0:
                value = value + beta * self._at(result, 0, c, device).astype(np.float32)
            if plan.bias:
                bias = Matrix("bias", result.type, result.rows, 1, result.rows)
                value = value + self._at(bias, 0, plan.bias, device).astype(np.float32)
            self._at(result, 0, d, device)[...] = value.astype(result.dtype)


for _kind in KINDS[1:]:
    setattr(CusparseLt, f"{_kind}_destroy", functools.partialmethod(Registry.remove, kind=_kind))
