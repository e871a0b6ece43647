"""Looking at a software CUDA, for its own tests."""

from __future__ import annotations

from typing import Any

import numpy as np

from software_cuda import Software

NON_BLOCKING, LEGACY = 1, 1


def value(found: tuple[Any, ...]) -> Any:
    """Return the value of a call that succeeded."""
    assert found[0] == 0, found[0]
    return found[1] if len(found) > 1 else None


def refused(found: tuple[Any, ...], name: str) -> None:
    """Expect a call that returned this error and no value."""
    assert found[0].name == name
    assert all(x is None for x in found[1:])


def stream(cuda: Software, flags: int = NON_BLOCKING) -> int:
    """Return a new stream."""
    return int(value(cuda.runtime.cudaStreamCreateWithFlags(flags)))


def event(cuda: Software, flags: int = 2) -> Any:
    """Return a new event, by default one without time."""
    return value(cuda.runtime.cudaEventCreateWithFlags(flags))


def peek(cuda: Software, address: int, count: int = 4) -> list[float]:
    """Return numbers of a device as they are now, whatever is still queued."""
    return cuda.runtime.memory.at(address, 4 * count, None, "peek").view(np.float32).tolist()


def write(cuda: Software, address: int, number: float, on: int, count: int = 4) -> None:
    """Queue the writing of numbers."""
    values = np.full(count, number, np.float32)
    value(cuda.runtime.cudaMemcpyAsync(address, values.ctypes.data, values.nbytes, 4, on))


def copy(cuda: Software, target: int, source: int, on: int) -> None:
    """Queue a copy of four numbers."""
    value(cuda.runtime.cudaMemcpyAsync(target, source, 16, 4, on))
