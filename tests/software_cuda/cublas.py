"""A software cuBLAS: handles, their math modes and workspaces, and one product that shows what a handle's mode does.

Source: the cuBLAS documentation, ``cublasSetMathMode()``, ``cublasSetStream()``, ``cublasSetWorkspace()`` and
``cublasSgemm()``.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from nvmath.bindings import cublas as real

from software_cuda.arithmetic import round_tf32
from software_cuda.objects import (
    ALLOC_FAILED,
    EXECUTION_FAILED,
    INTERNAL_ERROR,
    INVALID_VALUE,
    Handle,
    LtRefusal,
    Registry,
    Use,
    read_host,
)
from software_cuda.recorder import Part, Recorder, function
from software_cuda.runtime import Refusal, Runtime

#: Modes, and flags that may be or-ed to them.
_MODES = frozenset({0, 1, 2, 3, 4, 8})
_FLAGS = 16
_TF32 = 3
_HANDLE_BYTES = 4096


class SoftwareError(real.cuBLASError):
    """The bindings' error, with words of its own."""

    def __init__(self, status: int, why: str = "") -> None:
        self.status = status
        name = real.Status(int(status)).name
        Exception.__init__(self, f"CUBLAS_STATUS_{name} ({int(status)})" + (f": {why}" if why else ""))


class _CublasHandle(Handle):
    def __init__(self, device: int) -> None:
        super().__init__("cuBLAS handle", device)
        self.math_mode = 0
        self.stream = 0
        self.workspace: tuple[int, int] | None = None
        self.memory = 0


class Cublas(Part):
    """Stands for ``nvmath.bindings.cublas``."""

    cuBLASError = real.cuBLASError

    def __init__(self, recorder: Recorder, runtime: Runtime, version: int = 130100) -> None:
        super().__init__("cublas", real, recorder)
        self.runtime = runtime
        self.version = version
        self.objects = Registry(recorder)

    def failed(self, function: str, status: Any) -> Any:
        raise SoftwareError(int(status or INTERNAL_ERROR), f"{function} was made to fail")

    def live(self) -> dict[str, int]:
        """Return how many handles there are."""
        return {"cublas_handles": self.objects.count("cuBLAS handle")}

    def _get(self, number: int) -> _CublasHandle:
        try:
            found: _CublasHandle = self.objects.get(number, "cuBLAS handle")
        except LtRefusal as refusal:
            raise SoftwareError(refusal.status, refusal.why) from None
        return found

    @function
    def create(self) -> int:
        status, address = self.runtime.cudaMalloc(_HANDLE_BYTES)
        if not address:
            raise SoftwareError(ALLOC_FAILED, f"no memory for a handle: {status!r}")
        made = _CublasHandle(self.runtime.device)
        made.memory = address
        return self.objects.add(made)

    @function
    def destroy(self, handle: int) -> None:
        found = self._get(handle)
        self.objects.remove(handle, "cuBLAS handle")
        self.runtime.cudaFree(found.memory)

    @function
    def get_version(self, handle: int) -> int:
        self._get(handle)
        return self.version

    @function
    def get_property(self, kind: int) -> int:
        return (self.version // 10000, self.version // 100 % 100, self.version % 100)[kind]

    @function
    def get_math_mode(self, handle: int) -> int:
        return self._get(handle).math_mode

    @function
    def set_math_mode(self, handle: int, mode: int) -> None:
        found = self._get(handle)
        if int(mode) & ~_FLAGS not in _MODES:
            raise SoftwareError(INVALID_VALUE, f"there is no math mode {mode}")
        found.math_mode = int(mode)

    @function
    def set_stream(self, handle: int, stream: int) -> None:
        found = self._get(handle)
        found.stream = int(stream)
        found.workspace = None

    @function
    def get_stream(self, handle: int) -> int:
        return self._get(handle).stream

    @function
    def set_workspace(self, handle: int, workspace: int, nbytes: int) -> None:
        found = self._get(handle)
        if workspace % 256:
            raise SoftwareError(INVALID_VALUE, "the workspace is not aligned to 256 bytes")
        found.workspace = (workspace, nbytes)

    @function
    def sgemm(
        self,
        handle: int,
        op_a: int,
        op_b: int,
        m: int,
        n: int,
        k: int,
        alpha: int,
        a: int,
        lda: int,
        b: int,
        ldb: int,
        beta: int,
        c: int,
        ldc: int,
    ) -> None:
        found, memory = self._get(handle), self.runtime.memory
        if found.device != self.runtime.device:
            raise SoftwareError(INVALID_VALUE, "the handle is another device's")
        factors = [np.frombuffer(read_host(x, 4), np.float32)[0] for x in (alpha, beta)]
        rounded = found.math_mode & ~_FLAGS == _TF32

        def at(pointer: int, rows: int, cols: int, ld: int) -> Any:
            data = memory.at(pointer, 4 * (ld * (cols - 1) + rows), found.device, "cublasSgemm")
            return np.ndarray((rows, cols), np.float32, data, 0, (4, 4 * ld))

        def multiply() -> None:
            left = at(a, *((k, m) if op_a else (m, k)), lda)
            right = at(b, *((n, k) if op_b else (k, n)), ldb)
            if rounded:
                left, right = round_tf32(left), round_tf32(right)
            left, right = left.astype(np.float64), right.astype(np.float64)
            product = (left.T if op_a else left) @ (right.T if op_b else right)
            out = at(c, m, n, ldc)
            value = factors[0] * product.astype(np.float32)
            out[...] = value if factors[1] == 0 else value + factors[1] * out

        with Use(found, self.recorder), self.runtime.lock:
            try:
                stream = self.runtime.stream(found.stream, current=True)
                self.runtime.enqueue(stream, "sgemm", multiply, 0.02)
            except Refusal as refusal:
                raise SoftwareError(EXECUTION_FAILED, repr(refusal.status)) from None
