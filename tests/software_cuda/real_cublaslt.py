"""The real cuBLASLt, where it is installed, by ctypes: its functions that need no driver, compared with the software's.

It makes descriptors, layouts and preferences, sets and reads their attributes, and reads an algorithm's configuration.
"""

import contextlib
import ctypes
import importlib.util
from pathlib import Path

from software_cuda.descriptors import SoftwareLtError

_NAMES = tuple(f"libcublasLt.so.{major}" for major in (13, 12))
_C = {
    "matmul_desc": "cublasLtMatmulDesc",
    "matrix_layout": "cublasLtMatrixLayout",
    "matmul_preference": "cublasLtMatmulPreference",
    "emulation_desc": "cublasLtEmulationDesc",
    "matmul_algo_config": "cublasLtMatmulAlgoConfig",
    "matmul_algo_cap": "cublasLtMatmulAlgoCap",
}
_SIZES = {
    "matmul_desc": (ctypes.c_int, ctypes.c_int),
    "matrix_layout": (ctypes.c_int, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_int64),
    "matmul_preference": (),
    "emulation_desc": (),
}


def path():
    """Return the path of the library, in NVIDIA's wheels or the system's search path; None if it is missing."""
    found = importlib.util.find_spec("nvidia")
    for folder in (found.submodule_search_locations or ()) if found else ():
        for wheel in ("cu13", "cublas"):
            for name in _NAMES:
                if (there := Path(folder, wheel, "lib", name)).is_file():
                    return str(there)
    for name in _NAMES:
        with contextlib.suppress(OSError):
            ctypes.CDLL(name)
            return name
    return None


class Real:
    def __init__(self, path):
        self.path = path
        self._library = ctypes.CDLL(path)

    def _function(self, name, *types, returns=ctypes.c_int):
        # A new function object, as attributes of the library are shared.
        made = self._library[name]
        made.argtypes, made.restype = types, returns
        return made

    @property
    def version(self):
        return int(self._function("cublasLtGetVersion", returns=ctypes.c_size_t)())

    def status_name(self, status):
        function = self._function("cublasLtGetStatusName", ctypes.c_int, returns=ctypes.c_char_p)
        found = function(status)
        return found.decode()

    def create(self, kind, *arguments):
        made = ctypes.c_void_p()
        function = self._function(f"{_C[kind]}Create", ctypes.c_void_p, *_SIZES[kind])
        return function(ctypes.byref(made), *arguments), made.value or 0

    def destroy(self, kind, made):
        return int(self._function(f"{_C[kind]}Destroy", ctypes.c_void_p)(made))

    def set(self, kind, made, attribute, address, nbytes):
        types = (ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t)
        return int(self._function(f"{_C[kind]}SetAttribute", *types)(made, attribute, address, nbytes))

    def get(self, kind, made, attribute, address, nbytes, written):
        types = (ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
        function = self._function(f"{_C[kind]}GetAttribute", *types)
        return int(function(made, attribute, address, nbytes, written))


def software_status(function, *arguments):
    """Return the status with which a function of the software ends."""
    try:
        function(*arguments)
    except SoftwareLtError as error:
        return int(error.status)
    return 0


#: Fills the buffers, so that unwritten bytes are seen.
_UNTOUCHED = 0xAB


def answer(get, *arguments, nbytes):
    """Return status, bytes and written size of a getter with a buffer of this size."""
    data = (ctypes.c_uint8 * max(nbytes, 1))(*[_UNTOUCHED] * max(nbytes, 1))
    written = ctypes.c_size_t(_UNTOUCHED)
    status = get(*arguments, ctypes.addressof(data), nbytes, ctypes.addressof(written))
    return status, bytes(data), written.value
