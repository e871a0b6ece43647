"""Opaque objects of the libraries: handles, descriptors, layouts, preferences, with their attributes as bytes."""

from __future__ import annotations

import ctypes
import itertools
import threading
from collections.abc import Mapping
from typing import Any

import numpy as np

from software_cuda.attributes import Attribute
from software_cuda.recorder import Recorder

# ``cublasStatus_t``.
NOT_INITIALIZED, ALLOC_FAILED, INVALID_VALUE, ARCH_MISMATCH = 1, 3, 7, 8
EXECUTION_FAILED, INTERNAL_ERROR, NOT_SUPPORTED = 13, 14, 15

_numbers = itertools.count(0x6000_0000, 0x40)


class LtRefusal(Exception):
    """A library refuses a call.

    Parameters
    ----------
    status : int
    why : str
        What real libraries do not tell.
    """

    def __init__(self, status: int, why: str) -> None:
        super().__init__(why)
        self.status = status
        self.why = why


class Object:
    """Something that a library created and knows by a number."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.number = next(_numbers)
        self.user: int | None = None
        self.readers: set[int] = set()
        self.attributes: dict[int, bytes] = {}

    def get(self, member: Any, dtype: Any, default: int) -> int:
        """Return an integer attribute."""
        data = self.attributes.get(int(member))
        return default if data is None else int(np.frombuffer(data, dtype)[0])


class Handle(Object):
    """A library's handle: of one device, and used by one thread at a time."""

    def __init__(self, kind: str, device: int) -> None:
        super().__init__(kind)
        self.device = device


class Registry:
    """The objects of one library that are alive."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._alive: dict[int, Object] = {}

    def add(self, made: Object) -> int:
        """Keep an object and return its number."""
        self._alive[made.number] = made
        return made.number

    def get(self, number: int, kind: str) -> Any:
        """Return an object; refuse what was destroyed, or is of another kind."""
        found = self._alive.get(int(number))
        if found is None or found.kind != kind:
            what = "nothing alive" if found is None else f"a {found.kind}"
            self._recorder.faults.append(f"{number:#x} is {what}, not a {kind}")
            raise LtRefusal(INVALID_VALUE, f"{number:#x} is {what}, not a {kind}")
        return found

    def remove(self, number: int, kind: str) -> None:
        """Destroy an object."""
        found = self.get(number, kind)
        if found.user is not None or found.readers:
            self._recorder.faults.append(f"a {kind} was destroyed while it was in use")
        del self._alive[found.number]

    def count(self, kind: str) -> int:
        """Return how many of a kind are alive."""
        return sum(x.kind == kind for x in self._alive.values())


class Use:
    """An object in use by this thread for the length of a block.

    Several threads may read one at a time. One that changes it, or uses a handle, must be alone.
    """

    def __init__(self, used: Object, recorder: Recorder, *, reads: bool = False) -> None:
        self._used = used
        self._recorder = recorder
        self._reads = reads
        self._own = False

    def __enter__(self) -> None:
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

    def __exit__(self, *_: object) -> None:
        if not self._own:
            return
        if self._reads:
            self._used.readers.discard(threading.get_ident())
        else:
            self._used.user = None


def read_host(address: int, nbytes: int) -> bytes:
    """Return bytes of the host."""
    if not address:
        raise LtRefusal(INVALID_VALUE, "a null pointer")
    return ctypes.string_at(address, nbytes)


def set_attribute(target: Object, known: Mapping[int, Attribute], attribute: int, address: int, nbytes: int) -> None:
    """Read the value of an attribute, which must be known and have this size."""
    row = known_attribute(known, attribute)
    if nbytes != row.nbytes:
        raise LtRefusal(INVALID_VALUE, f"attribute {attribute} has {row.nbytes} bytes, not {nbytes}")
    data = read_host(address, nbytes)
    if row.most is not None and int.from_bytes(data, "little") > row.most:
        raise LtRefusal(INVALID_VALUE, f"attribute {attribute} is {row.most} at most")
    target.attributes[int(attribute)] = data


def known_attribute(known: Mapping[int, Attribute], attribute: int) -> Attribute:
    """Return the row of an attribute; refuse one that the library does not know."""
    found = known.get(int(attribute))
    if found is None:
        raise LtRefusal(INVALID_VALUE, f"there is no attribute {int(attribute)}")
    return found


def write_attribute(data: bytes, address: int, nbytes: int, written: int) -> None:
    """Write the value of an attribute for the caller, who must know its size; size 0 asks for the size alone."""
    if nbytes not in (0, len(data)):
        raise LtRefusal(INVALID_VALUE, f"the attribute has {len(data)} bytes, not {nbytes}")
    if not (address if nbytes else written):
        raise LtRefusal(INVALID_VALUE, "a null pointer")
    if written:
        ctypes.c_size_t.from_address(written).value = len(data)
    if nbytes:
        ctypes.memmove(address, data, len(data))
