"""A software cuBLAS: handles, their math modes, and one product that depends on a handle's mode.

Source: the cuBLAS documentation, ``cublasSetMathMode()``, ``cublasSetStream()`` and ``cublasSgemm()``.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from nvmath.bindings import cublas as real

from software_cuda.arithmetic import round_tf32
from software_cuda.objects import (
    EXECUTION_FAILED,
    INTERNAL_ERROR,
    INVALID_VALUE,
    Handle,
    Registry,
    Use,
    error_text,
    read_host,
)
from software_cuda.recorder import Recorder, Refusal, function
from software_cuda.runtime import Runtime

#: Modes, and the flag that may be or-ed to them.
_MODES = frozenset({0, 1, 2, 3, 4, 8})
_FLAG = 16
_TF32 = 3


class SoftwareError(real.cuBLASError):
    """The bindings' error, with a text of its own."""

    def __init__(self, status: int, reason: str) -> None:
        self.status = int(status)
        Exception.__init__(self, error_text(self.status, reason))


class Cublas(Registry):
    cuBLASError = real.cuBLASError
    handle_kind = "cuBLAS handle"

    def __init__(self, recorder: Recorder, runtime: Runtime) -> None:
        super().__init__("cublas", real, recorder, runtime)

    def error(self, status: Any, reason: str) -> Exception:
        return SoftwareError(status or INTERNAL_ERROR, reason)

    def live(self) -> dict[str, int]:
        return {"cublas_handles": self.count(self.handle_kind)}

    def _get(self, number: int) -> Any:
        return self.get(number, self.handle_kind)

    @function
    def create(self) -> int:
        made: Any = Handle(self.handle_kind, self.runtime)
        made.math_mode = made.stream = 0
        return self.add(made)

    @function
    def destroy(self, handle: int) -> None:
        self.destroy_handle(handle)

    @function
    def get_math_mode(self, handle: int) -> int:
        mode: int = self._get(handle).math_mode
        return mode

    @function
    def set_math_mode(self, handle: int, mode: int) -> None:
        found = self._get(handle)
        if int(mode) & ~_FLAG not in _MODES:
            raise Refusal(INVALID_VALUE, f"there is no math mode {mode}")
        found.math_mode = int(mode)

    @function
    def set_stream(self, handle: int, stream: int) -> None:
        self._get(handle).stream = int(stream)

    @function
    def sgemm(
        self, handle: int, op_a: int, op_b: int, m: int, n: int, k: int,
        alpha: int, a: int, lda: int, b: int, ldb: int, beta: int, c: int, ldc: int,
    ) -> None:  # fmt: skip
        assert (op_a, op_b) == (0, 0), "transposes are not modelled"
        found, memory = self.handle(handle), self.runtime.memory
        factors = [np.frombuffer(read_host(x, 4), np.float32)[0] for x in (alpha, beta)]
        rounded = found.math_mode & ~_FLAG == _TF32

        def at(pointer: int, rows: int, cols: int, ld: int) -> Any:
            data = memory.at(pointer, 4 * (ld * (cols - 1) + rows), found.device, "cublasSgemm")
            return np.ndarray((rows, cols), np.float32, data, 0, (4, 4 * ld))

        def multiply() -> None:
            left, right, out = at(a, m, k, lda), at(b, k, n, ldb), at(c, m, n, ldc)
            if rounded:
                left, right = round_tf32(left), round_tf32(right)
            value = factors[0] * (left.astype(np.float64) @ right.astype(np.float64)).astype(np.float32)
            out[...] = value if factors[1] == 0 else value + factors[1] * out

        with Use(found, self.recorder), self.runtime.lock:
            try:
                stream = self.runtime.stream(found.stream, current=True)
                self.runtime.enqueue(stream, "sgemm", multiply, 0.02)
            except Refusal as refusal:
                raise Refusal(EXECUTION_FAILED, repr(refusal.status)) from None
