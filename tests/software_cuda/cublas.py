"""A software cuBLAS: handles, their math modes, a product that depends on a handle's mode, and one of any types.

Source: the cuBLAS documentation, ``cublasSetMathMode()``, ``cublasSetStream()``, ``cublasSetWorkspace()``,
``cublasSgemm()`` and ``cublasGemmStridedBatchedEx()``.
"""

import numpy as np
from nvmath.bindings import cublas as real

from software_cuda import tables
from software_cuda.algorithms import candidates
from software_cuda.arithmetic import Call
from software_cuda.objects import INVALID_VALUE, NOT_SUPPORTED, Handle, Registry, Use, read_host
from software_cuda.problem import Matrix, Problem, validate
from software_cuda.recorder import Refusal, function
from support.oracles import round_to

#: Modes, and the flag that may be or-ed to them.
_MODES = frozenset({0, 1, 2, 3, 4, 8})
_FLAG = 16
_TF32 = 3


class Cublas(Registry):
    error_kind = "cuBLASError"
    handle_kind = "cuBLAS handle"

    def __init__(self, recorder, runtime):
        super().__init__("cublas", real, recorder, runtime)

    def live(self):
        return {"cublas_handles": self.count(self.handle_kind)}

    def _get(self, number):
        return self.get(number, self.handle_kind)

    @function
    def create(self):
        made = Handle(self.handle_kind, self.runtime)
        made.math_mode = made.stream = 0
        made.workspace = (0, 0)
        return self.add(made)

    @function
    def destroy(self, handle):
        self.destroy_handle(handle)

    @function
    def get_math_mode(self, handle):
        return self._get(handle).math_mode

    @function
    def set_math_mode(self, handle, mode):
        found = self._get(handle)
        if int(mode) & ~_FLAG not in _MODES:
            raise Refusal(INVALID_VALUE, f"there is no math mode {mode}")
        found.math_mode = int(mode)

    @function
    def set_stream(self, handle, stream):
        found = self._get(handle)
        found.stream, found.workspace = int(stream), (0, 0)

    @function
    def set_workspace(self, handle, address, nbytes):
        if address % 256:
            raise Refusal(INVALID_VALUE, f"the workspace at {address:#x} is not aligned to 256")
        self._get(handle).workspace = (int(address), int(nbytes))

    @function
    def gemm_strided_batched_ex_64(
        self, handle, op_a, op_b, m, n, k,
        alpha, a, a_type, lda, a_stride, b, b_type, ldb, b_stride,
        beta, c, c_type, ldc, c_stride, count, compute, algorithm,
    ):  # fmt: skip
        assert algorithm == -1, "others may round operands to 16 bits"
        found, memory = self.handle(handle), self.runtime.memory
        types = (a_type, b_type, c_type)
        scale = next((x.scale for x in tables.ROWS if (x.a, x.b, x.d) == types and compute in x.compute), -1)
        operand_a = Matrix("A", a_type, *((k, m) if op_a else (m, k)), lda, 0, count, a_stride)
        operand_b = Matrix("B", b_type, *((n, k) if op_b else (k, n)), ldb, 0, count, b_stride)
        result = Matrix("C", c_type, m, n, ldc, 0, count, c_stride)
        asked = Problem(operand_a, operand_b, result, result, compute, scale, op_a, op_b)
        validate(asked, self.runtime.devices[found.device].capability, self.recorder.switches)
        if a_type in tables.FLOAT8:
            raise Refusal(NOT_SUPPORTED, "FP8")
        if found.math_mode & _FLAG == 0:
            self.recorder.faults.append("sums may be rounded to 16 bits")
        (*_, chosen) = candidates(asked, "cuBLAS", tf32_forbidden=False)
        factors = [
            np.frombuffer(read_host(x, tables.DTYPES[scale].itemsize), tables.DTYPES[scale])[0] for x in (alpha, beta)
        ]
        call = Call(asked, chosen, *factors, a, b, c, c, found.device)
        address, nbytes = found.workspace

        def multiply():
            memory.at(address, nbytes, found.device, "cuBLAS, workspace")
            call.write(memory, call.multiply(memory))

        self._enqueue(found, "gemm", multiply)

    def _enqueue(self, found, label, work):
        with Use(found, self.recorder), self.runtime.lock:
            self.runtime.enqueue(self.runtime.stream(found.stream, current=True), label, work, 0.02)

    @function
    def sgemm(
        self, handle, op_a, op_b, m, n, k,
        alpha, a, lda, b, ldb, beta, c, ldc,
    ):  # fmt: skip
        assert (op_a, op_b) == (0, 0), "transposes are not modelled"
        found, memory = self.handle(handle), self.runtime.memory
        factors = [np.frombuffer(read_host(x, 4), np.float32)[0] for x in (alpha, beta)]
        rounded = found.math_mode & ~_FLAG == _TF32

        def at(pointer, rows, cols, ld):
            data = memory.at(pointer, 4 * (ld * (cols - 1) + rows), found.device, "cublasSgemm")
            return np.ndarray((rows, cols), np.float32, data, 0, (4, 4 * ld))

        def multiply():
            left, right, out = at(a, m, k, lda), at(b, k, n, ldb), at(c, m, n, ldc)
            if rounded:
                left, right = round_to(left, "tf32"), round_to(right, "tf32")
            value = factors[0] * (left.astype(np.float64) @ right.astype(np.float64)).astype(np.float32)
            out[...] = value if factors[1] == 0 else value + factors[1] * out

        self._enqueue(found, "sgemm", multiply)
