"""A software cuBLAS: handles with their state, and a product that depends on a handle's math mode.

Source: the cuBLAS documentation, ``cublasSetMathMode()``, ``cublasSetStream()``, ``cublasSetWorkspace()`` and
``cublasSgemm()``.
"""

import os

import numpy as np
from nvmath.bindings import cublas as real

from software_cuda.objects import INVALID_VALUE, Handle, Registry, Use, read_host
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
        made.math_mode = made.stream = made.pointer_mode = made.atomics_mode = (
            made.sm_count_target
        ) = 0
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
    def get_stream(self, handle):
        return self._get(handle).stream

    @function
    def get_pointer_mode(self, handle):
        return self._get(handle).pointer_mode

    @function
    def set_pointer_mode(self, handle, mode):
        self._get(handle).pointer_mode = int(real.PointerMode(mode))

    @function
    def get_atomics_mode(self, handle):
        return self._get(handle).atomics_mode

    @function
    def set_atomics_mode(self, handle, mode):
        self._get(handle).atomics_mode = int(real.AtomicsMode(mode))

    @function
    def get_sm_count_target(self, handle):
        return self._get(handle).sm_count_target

    @function
    def set_sm_count_target(self, handle, count):
        self._get(handle).sm_count_target = int(count)

    @function
    def set_stream(self, handle, stream):
        found = self._get(handle)
        found.stream, found.workspace = int(stream), (0, 0)

    @function
    def set_workspace(self, handle, address, nbytes):
        if address % 256:
            raise Refusal(INVALID_VALUE, f"the workspace at {address:#x} is not aligned to 256")
        self._get(handle).workspace = (int(address), int(nbytes))

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
        rounded = (
            found.math_mode & ~_FLAG == _TF32 and os.environ.get("NVIDIA_TF32_OVERRIDE") != "0"
        )

        def at(pointer, rows, cols, ld):
            data = memory.at(pointer, 4 * (ld * (cols - 1) + rows), found.device, "cublasSgemm")
            return np.ndarray((rows, cols), np.float32, data, 0, (4, 4 * ld))

        def multiply():
            left, right, out = at(a, m, k, lda), at(b, k, n, ldb), at(c, m, n, ldc)
            if rounded:
                left, right = round_to(left, "tf32"), round_to(right, "tf32")
            value = factors[0] * (left.astype(np.float64) @ right.astype(np.float64)).astype(
                np.float32
            )
            out[...] = value if factors[1] == 0 else value + factors[1] * out

        self._enqueue(found, "sgemm", multiply)
