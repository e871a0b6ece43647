"""A software CUDA, cuBLASLt and cuBLAS for tests of the CUDA backend without a GPU.

``install()`` stands it in for NVIDIA's libraries, ``uninstall()`` takes it away again. Work that is queued on a stream
runs only when somebody waits for it, memory is poisoned, and what the real libraries refuse is refused.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from lowprec.backends.cuda import libraries as installed
from lowprec.backends.cuda.libraries import Libraries
from software_cuda.arrays import DeviceArray, read
from software_cuda.core import Core, Driver, compiler
from software_cuda.cublas import Cublas
from software_cuda.cublaslt import CublasLt
from software_cuda.cupy import Cupy
from software_cuda.memory import POISON
from software_cuda.recorder import Fault, Recorder
from software_cuda.runtime import DeviceModel, Graph, Refusal, Runtime
from software_cuda.streams import Policy

__all__ = [
    "POISON",
    "Cupy",
    "DeviceArray",
    "DeviceModel",
    "Fault",
    "Graph",
    "Refusal",
    "Software",
    "compiler",
    "install",
    "uninstall",
]


class Software:
    """All parts together.

    Parameters
    ----------
    devices : sequence of DeviceModel
    order : "lazy", "all" or int
        Who runs when; see :data:`software_cuda.streams.Policy`.
    version : int
        Of cuBLAS, as ``cublasLtGetVersion`` tells it.

    Attributes
    ----------
    runtime, cublas_lt, cublas, core, driver
        The parts, which stand for the modules.
    libraries : Libraries
        The parts, as lowprec takes them.
    calls, faults : list of str
        All calls in order, and everything that was done wrong.
    """

    def __init__(self, devices: Sequence[DeviceModel], order: Policy, version: int) -> None:
        self.recorder = Recorder()
        self.runtime = Runtime(self.recorder, devices, order)
        self.cublas_lt = CublasLt(self.recorder, self.runtime, version)
        self.cublas = Cublas(self.recorder, self.runtime, version)
        self.core = Core(self.recorder, self.runtime, version // 10000)
        self.driver = Driver(self.recorder, self.core)
        self.libraries = Libraries(self.cublas_lt, self.cublas, self.runtime, self.core, self.driver)

    @property
    def calls(self) -> list[str]:
        return self.recorder.calls

    @property
    def faults(self) -> list[str]:
        return self.recorder.faults

    def count(self, function: str) -> int:
        """Return how often a function was called, with or without the part before the dot."""
        counted = Counter(self.calls)
        return sum(n for name, n in counted.items() if function in (name, name.partition(".")[2]))

    def fail(self, function: str, *, at: int = 1, status: Any = None) -> AbstractContextManager[Any]:
        """Have the ``at``-th call of a function from now on report an error instead of acting."""
        return self.recorder.fail(function, at=at, status=status)

    def live(self) -> dict[str, int]:
        """Return how many objects of each kind there are, and the bytes that are allocated."""
        return self.runtime.live() | self.cublas_lt.live() | self.cublas.live()

    def drain(self) -> None:
        """Run everything that is queued."""
        self.runtime.drain()

    def forgive(self) -> None:
        """Forget what was done wrong, so that devices that were lost work again."""
        self.faults.clear()
        self.runtime.sticky.clear()
        self.runtime.last_error = self.runtime.cudaError_t.cudaSuccess

    def array(self, values: Any, **keywords: Any) -> DeviceArray:
        """Return an array on a device that is known only by DLPack; see :class:`DeviceArray`."""
        return DeviceArray(self.runtime, values, **keywords)

    def read(self, array: Any) -> np.ndarray[Any, Any]:
        """Return the elements of an array with DLPack as one sees them who waits for no more than DLPack makes him."""
        return read(self.runtime, array)

    def cupy(self) -> Cupy:
        """Return a module that does what lowprec needs of CuPy, on these devices."""
        return Cupy(self.runtime)


_replaced: list[Libraries | None] = []


def install(
    devices: int | Sequence[DeviceModel] = 2, *, order: Policy = "lazy", version: int = 130100, **model: Any
) -> Software:
    """Stand software in for NVIDIA's libraries.

    Parameters
    ----------
    devices : int or sequence of DeviceModel
        Their number, all alike, or each of them.
    order : "lazy", "all" or int
        Who runs when; see :data:`software_cuda.streams.Policy`.
    version : int
        Of cuBLAS.
    **model
        Fields of :class:`DeviceModel`, for example ``capability=(8, 0)`` or ``memory_bytes=1 << 20``.
    """
    models = [DeviceModel(**model)] * devices if isinstance(devices, int) else list(devices)
    software = Software(models, order, version)
    _replaced.append(installed.use(software.libraries))
    return software


def uninstall() -> None:
    """Put back what was there before the last :func:`install`."""
    installed.use(_replaced.pop())
