"""The real cuBLASLt, where it is installed, by ctypes: its functions that need no driver, compared with the software's.

It makes descriptors, layouts and preferences, sets and reads their attributes, and reads an algorithm's configuration.
"""

import contextlib
import ctypes
import importlib.util
from pathlib import Path

from nvmath.bindings.cublasLt import cuBLASLtError

_NAMES = tuple(f"libcublasLt.so.{major}" for major in (13, 12))


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
    """Functions return their status. Every argument is passed as 64 bits, of which the library reads what it needs."""

    def __init__(self, path):
        self._library = ctypes.CDLL(path)
        self.version = int(self._library["cublasLtGetVersion"]())

    def _call(self, kind, action, *arguments):
        words = "".join(word.capitalize() for word in kind.split("_"))
        return self._library[f"cublasLt{words}{action}"](*map(ctypes.c_int64, arguments))

    def status_name(self, status):
        function = self._library["cublasLtGetStatusName"]
        function.restype = ctypes.c_char_p
        return function(status).decode()

    def create(self, kind, *arguments):
        made = ctypes.c_void_p()
        return self._call(kind, "Create", ctypes.addressof(made), *arguments), made.value or 0

    def destroy(self, kind, made):
        return self._call(kind, "Destroy", made)

    def set(self, kind, *arguments):
        return self._call(kind, "SetAttribute", *arguments)

    def get(self, kind, *arguments):
        return self._call(kind, "GetAttribute", *arguments)


def software_status(function, *arguments):
    """Return the status with which a function of the software ends."""
    try:
        function(*arguments)
    except cuBLASLtError as error:
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
