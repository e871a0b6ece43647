"""The objects of the software cuBLASLt: handles, descriptors of operations, layouts, preferences.

Source: the cuBLAS documentation, *Using the cuBLASLt API*, and ``cublasLt.h``.
"""

from __future__ import annotations

import os
import threading
import time
from typing import Any

import numpy as np
from nvmath.bindings import cublasLt as real

from software_cuda.attributes import attributes
from software_cuda.objects import (
    ALLOC_FAILED,
    INTERNAL_ERROR,
    INVALID_VALUE,
    Handle,
    LtRefusal,
    Object,
    Registry,
    Use,
    known_attribute,
    set_attribute,
    write_attribute,
)
from software_cuda.recorder import Part, Recorder, function
from software_cuda.runtime import Runtime

_STATUS_NAMES = {
    0: "SUCCESS", 1: "NOT_INITIALIZED", 3: "ALLOC_FAILED", 7: "INVALID_VALUE", 8: "ARCH_MISMATCH",
    11: "MAPPING_ERROR", 13: "EXECUTION_FAILED", 14: "INTERNAL_ERROR", 15: "NOT_SUPPORTED", 16: "LICENSE_ERROR",
}  # fmt: skip

#: Bytes that a handle keeps on its device.
_HANDLE_BYTES = 4096
DESCRIPTOR, LAYOUT, PREFERENCE = "matmul descriptor", "matrix layout", "preference"
_ATTRIBUTES_OF = {DESCRIPTOR: "matmul_desc", LAYOUT: "matrix_layout", PREFERENCE: "matmul_preference"}


class SoftwareLtError(real.cuBLASLtError):
    """The bindings' error, which asks a library for its words; this one brings its own."""

    def __init__(self, status: int, why: str = "") -> None:
        self.status = status
        name = f"CUBLAS_STATUS_{_STATUS_NAMES.get(int(status), '?')}"
        Exception.__init__(self, f"{name} ({int(status)})" + (f": {why}" if why else ""))


class Objects(Part):
    """Makes them, changes them and destroys them.

    Parameters
    ----------
    recorder : Recorder
    runtime : Runtime
    version : int
    """

    cuBLASLtError = real.cuBLASLtError
    harmless = frozenset(
        f"get_{x}_attribute_dtype"
        for x in ("matmul_desc", "matrix_layout", "matmul_preference", "matmul_algo_config", "matmul_algo_cap")
    )

    def __init__(self, recorder: Recorder, runtime: Runtime, version: int = 130100) -> None:
        super().__init__("cublas_lt", real, recorder)
        self.runtime = runtime
        self.version = version
        self._known = {kind: attributes(name, version) for kind, name in _ATTRIBUTES_OF.items()}
        self.objects = Registry(recorder)
        self.tf32_forbidden: bool | None = None
        self._handle_memory: dict[int, int] = {}

    def failed(self, function: str, status: Any) -> Any:
        raise SoftwareLtError(int(status or INTERNAL_ERROR), f"{function} was made to fail")

    def live(self) -> dict[str, int]:
        """Return how many objects of each kind there are."""
        count = self.objects.count
        return {
            "handles": count("handle"),
            "descriptors": count(DESCRIPTOR),
            "layouts": count(LAYOUT),
            "preferences": count(PREFERENCE),
        }

    # -- handles ----------------------------------------------------------------------------------

    @function
    def get_version(self) -> int:
        return self.version

    @function
    def get_status_name(self, status: int) -> str:
        return f"CUBLAS_STATUS_{_STATUS_NAMES[int(status)]}"

    @function
    def create(self) -> int:
        if self.tf32_forbidden is None:  # once per process, at the first handle
            self.tf32_forbidden = os.environ.get("NVIDIA_TF32_OVERRIDE") == "0"
        status, address = self.runtime.cudaMalloc(_HANDLE_BYTES)
        if not address:
            raise SoftwareLtError(ALLOC_FAILED, f"no memory for a handle: {status!r}")
        made = Handle("handle", self.runtime.device)
        self._handle_memory[made.number] = address
        return self.objects.add(made)

    @function
    def destroy(self, handle: int) -> None:
        found = self.get(handle, "handle")
        if found.device != self.runtime.device:
            raise SoftwareLtError(INVALID_VALUE, "the handle is another device's")
        self.objects.remove(handle, "handle")
        self.runtime.cudaFree(self._handle_memory.pop(handle))

    def get(self, number: int, kind: str) -> Any:
        try:
            return self.objects.get(number, kind)
        except LtRefusal as refusal:
            raise SoftwareLtError(refusal.status, refusal.why) from None

    def handle(self, handle: int) -> Handle:
        found: Handle = self.get(handle, "handle")
        if found.device != self.runtime.device:
            self.recorder.faults.append(f"a handle of device {found.device} is used on {self.runtime.device}")
            raise SoftwareLtError(INVALID_VALUE, "the handle is another device's")
        return found

    # -- descriptors ------------------------------------------------------------------------------

    def _remove(self, number: int, kind: str) -> None:
        if not number:  # as with free(NULL)
            return
        self.get(number, kind)
        self.objects.remove(number, kind)

    def _set(self, kind: str, arguments: tuple[int, ...]) -> None:
        number, *rest = arguments
        found = self.get(number, kind)
        with Use(found, self.recorder):
            self.let_others_run()
            try:
                set_attribute(found, self._known[kind], *rest)
            except LtRefusal as refusal:
                raise SoftwareLtError(refusal.status, refusal.why) from None

    def _get(self, kind: str, arguments: tuple[int, ...]) -> None:
        number, attribute, *rest = arguments
        found = self.get(number, kind)
        try:
            row = known_attribute(self._known[kind], attribute)
            write_attribute(found.attributes.get(row.number, row.first), *rest)
        except LtRefusal as refusal:
            raise SoftwareLtError(refusal.status, refusal.why) from None

    @function
    def matmul_desc_create(self, compute_type: int, scale_type: int) -> int:
        made = Object(DESCRIPTOR)
        names = real.MatmulDescAttribute
        made.attributes[int(names.COMPUTE_TYPE)] = np.int32(compute_type).tobytes()
        made.attributes[int(names.SCALE_TYPE)] = np.int32(scale_type).tobytes()
        return self.objects.add(made)

    @function
    def matmul_desc_destroy(self, number: int) -> None:
        self._remove(number, DESCRIPTOR)

    @function
    def matmul_desc_set_attribute(self, *arguments: int) -> None:
        self._set(DESCRIPTOR, arguments)

    @function
    def matmul_desc_get_attribute(self, *arguments: int) -> None:
        self._get(DESCRIPTOR, arguments)

    @function
    def matrix_layout_create(self, data_type: int, rows: int, cols: int, ld: int) -> int:
        made = Object(LAYOUT)
        names = real.MatrixLayoutAttribute
        for name, value in (("TYPE", data_type), ("ROWS", rows), ("COLS", cols), ("LD", ld)):
            dtype = np.dtype(real.get_matrix_layout_attribute_dtype(names[name]))
            made.attributes[int(names[name])] = np.array(value, dtype).tobytes()
        return self.objects.add(made)

    @function
    def matrix_layout_destroy(self, number: int) -> None:
        self._remove(number, LAYOUT)

    @function
    def matrix_layout_set_attribute(self, *arguments: int) -> None:
        self._set(LAYOUT, arguments)

    @function
    def matrix_layout_get_attribute(self, *arguments: int) -> None:
        self._get(LAYOUT, arguments)

    @function
    def matmul_preference_create(self) -> int:
        return self.objects.add(Object(PREFERENCE))

    @function
    def matmul_preference_destroy(self, number: int) -> None:
        self._remove(number, PREFERENCE)

    @function
    def matmul_preference_set_attribute(self, *arguments: int) -> None:
        self._set(PREFERENCE, arguments)

    @function
    def matmul_preference_get_attribute(self, *arguments: int) -> None:
        self._get(PREFERENCE, arguments)

    def write(self, data: bytes, buffer: int, nbytes: int, written: int) -> None:
        try:
            write_attribute(data, buffer, nbytes, written)
        except LtRefusal as refusal:
            raise SoftwareLtError(refusal.status, refusal.why) from None

    def let_others_run(self) -> None:
        if threading.active_count() > 1:
            time.sleep(0)
