"""Opaque objects of the libraries: handles, descriptors, layouts, preferences, with their attributes as bytes."""

import ctypes
import itertools
import threading
from typing import Any

from software_cuda.recorder import Part, Refusal

# ``cublasStatus_t``.
ALLOC_FAILED, INVALID_VALUE, EXECUTION_FAILED, INTERNAL_ERROR, NOT_SUPPORTED = 3, 7, 13, 14, 15
STATUS_NAMES = {
    0: "SUCCESS", 1: "NOT_INITIALIZED", 3: "ALLOC_FAILED", 7: "INVALID_VALUE", 8: "ARCH_MISMATCH",
    11: "MAPPING_ERROR", 13: "EXECUTION_FAILED", 14: "INTERNAL_ERROR", 15: "NOT_SUPPORTED", 16: "LICENSE_ERROR",
}  # fmt: skip

#: Bytes of a handle on its device.
_HANDLE_BYTES = 4096

_numbers = itertools.count(0x6000_0000, 0x40)


def error_of(kind, status, text):
    """Return an error of the bindings with its own text; their constructor asks the library for one."""
    made = kind.__new__(kind, text)
    made.status = int(status)
    return made


def cublas_error(kind, status, reason=""):
    return error_of(
        kind,
        status,
        f"CUBLAS_STATUS_{STATUS_NAMES.get(int(status), '?')} ({int(status)}): {reason}",
    )


class Object:
    """An object that a library created and knows by a number."""

    def __init__(self, kind):
        self.kind = kind
        self.number = next(_numbers)
        self.user: int | None = None
        self.readers: set[int] = set()
        self.attributes: dict[int, bytes] = {}

    def numbers(self, enumeration):
        """Return the attributes that were set, by name."""
        return {
            enumeration(x).name: int.from_bytes(y, "little", signed=True)
            for x, y in self.attributes.items()
        }


class Handle(Object):
    """A library's handle: of one device, with memory there, and used by one thread at a time."""

    def __init__(self, kind, runtime):
        super().__init__(kind)
        self.device = runtime.device
        status, self.memory = runtime.cudaMalloc(_HANDLE_BYTES)
        if not self.memory:
            raise Refusal(ALLOC_FAILED, f"no memory for a handle: {status!r}")


class Registry(Part):
    """The objects of one library that exist, and its handles; ``error_kind`` names the error of its bindings."""

    error_kind: str
    handle_kind = "handle"

    def __init__(self, name, real, recorder, runtime):
        super().__init__(name, real, recorder)
        self.runtime = runtime
        self._alive: dict[int, Any] = {}

    def error(self, status, reason):
        return cublas_error(getattr(self.real, self.error_kind), status or INTERNAL_ERROR, reason)

    def add(self, made):
        self._alive[made.number] = made
        return made.number

    def get(self, number, kind):
        found = self._alive.get(int(number))
        if found is None or found.kind != kind:
            problem = f"{number:#x} is {'destroyed' if found is None else f'a {found.kind}'}, not a {kind}"
            self.recorder.faults.append(problem)
            raise Refusal(INVALID_VALUE, problem)
        return found

    def remove(self, number, kind):
        found = self.get(number, kind)
        if found.user is not None or found.readers:
            self.recorder.faults.append(f"a {kind} was destroyed while it was in use")
        return self._alive.pop(found.number)

    def count(self, kind):
        return sum(x.kind == kind for x in self._alive.values())

    def handle(self, number):
        """Return a handle, which must be of the current device."""
        found = self.get(number, self.handle_kind)
        if found.device != self.runtime.device:
            self.recorder.faults.append(
                f"a handle of device {found.device} is used on {self.runtime.device}"
            )
            raise Refusal(INVALID_VALUE, "the handle is another device's")
        return found

    def destroy_handle(self, number):
        self.handle(number)
        self.runtime.cudaFree(self.remove(number, self.handle_kind).memory)


class Use:
    """An object in use by this thread during a block.

    Several threads may read an object at a time. A thread that changes it, or uses a handle, must be the only one.
    """

    def __init__(self, used, recorder, *, reads=False):
        self._used = used
        self._recorder = recorder
        self._reads = reads
        self._own = False

    def __enter__(self):
        me, used = threading.get_ident(), self._used
        others = used.user not in (None, me) or (not self._reads and used.readers - {me})
        if others:
            self._recorder.faults.append(f"two threads use one {used.kind} at the same time")
        if self._reads:
            self._own = me not in used.readers
            used.readers.add(me)
        else:
            self._own = used.user is None
            used.user = me

    def __exit__(self, *_):
        if not self._own:
            return
        if self._reads:
            self._used.readers.discard(threading.get_ident())
        else:
            self._used.user = None


def read_host(address, nbytes):
    if not address:
        raise Refusal(INVALID_VALUE, "a null pointer")
    return ctypes.string_at(address, nbytes)


def known_attribute(known, attribute):
    """Return the row of an attribute; refuse one that the library does not know."""
    found = known.get(int(attribute))
    if found is None:
        raise Refusal(INVALID_VALUE, f"there is no attribute {int(attribute)}")
    return found


def set_attribute(target, known, attribute, address, nbytes):
    """Read the value of an attribute, which must be known and have this size."""
    row = known_attribute(known, attribute)
    if nbytes != row.nbytes:
        raise Refusal(INVALID_VALUE, f"attribute {attribute} has {row.nbytes} bytes, not {nbytes}")
    data = read_host(address, nbytes)
    if row.most is not None and int.from_bytes(data, "little") > row.most:
        raise Refusal(INVALID_VALUE, f"attribute {attribute} is {row.most} at most")
    target.attributes[int(attribute)] = data


def write_attribute(data, address, nbytes, written):
    """Write the value of an attribute to a buffer of exactly its size; size 0 asks for the size alone."""
    if nbytes not in (0, len(data)):
        raise Refusal(INVALID_VALUE, f"the attribute has {len(data)} bytes, not {nbytes}")
    if not (address if nbytes else written):
        raise Refusal(INVALID_VALUE, "a null pointer")
    if written:
        ctypes.c_size_t.from_address(written).value = len(data)
    if nbytes:
        ctypes.memmove(address, data, len(data))
