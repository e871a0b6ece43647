"""A software CUDA, cuBLASLt, cuBLAS and cuSPARSELt for tests of the CUDA backend without a GPU.

``install()`` replaces NVIDIA's libraries, ``uninstall()`` restores them. Work that is queued on a stream runs only when
it is waited for, memory is poisoned, and what the real libraries refuse is refused.
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
from software_cuda.core import Core, compiler
from software_cuda.cublas import Cublas
from software_cuda.cublaslt import CublasLt
from software_cuda.cupy import Cupy
from software_cuda.cusparselt import CusparseLt
from software_cuda.driver import Driver
from software_cuda.recorder import Recorder, Refusal
from software_cuda.runtime import DeviceModel, Runtime
from software_cuda.streams import Policy
from software_cuda.switches import Switches

__all__ = ["Cupy", "DeviceArray", "DeviceModel", "Refusal", "Software", "Switches", "compiler", "install", "uninstall"]


class Software:
    """All parts, each of which replaces a module; ``order`` is a :data:`Policy`, ``version`` that of cuBLASLt."""

    def __init__(
        self,
        devices: Sequence[DeviceModel] = (DeviceModel(),),
        order: Policy = "lazy",
        version: int = 130100,
        switches: Switches | None = None,
    ) -> None:
        self.recorder = Recorder(switches)
        self.runtime = Runtime(self.recorder, devices, order)
        self.cublas_lt = CublasLt(self.recorder, self.runtime, version)
        self.cublas = Cublas(self.recorder, self.runtime)
        self.core = Core(self.recorder, self.runtime, version // 10000)
        self.driver = Driver(self.recorder, self.runtime)
        self.cusparse_lt = CusparseLt(self.recorder, self.runtime)
        self.libraries = Libraries(self.cublas_lt, self.cublas, self.runtime, self.core, self.driver, self.cusparse_lt)

    @property
    def switches(self) -> Switches:
        """What is refused, or fails, in addition."""
        return self.recorder.switches

    @property
    def calls(self) -> list[str]:
        """All calls in order, as ``"part.function"``."""
        return self.recorder.calls

    @property
    def faults(self) -> list[str]:
        """All misuse, in words."""
        return self.recorder.faults

    def count(self, function: str) -> int:
        counted = Counter(self.calls)
        return sum(n for name, n in counted.items() if function in (name, name.partition(".")[2]))

    def fail(self, function: str, *, at: int = 1, status: Any = None) -> AbstractContextManager[Any]:
        """Make the ``at``-th call of a function from now on report an error instead of acting."""
        return self.recorder.fail(function, at=at, status=status)

    def live(self) -> dict[str, int]:
        return self.runtime.live() | self.cublas_lt.live() | self.cublas.live() | self.cusparse_lt.live()

    def drain(self) -> None:
        self.runtime.drain()

    def forgive(self) -> None:
        self.faults.clear()
        self.runtime.sticky.clear()

    def array(self, values: Any, **keywords: Any) -> DeviceArray:
        """Return an array on a device that is known only by DLPack; see :class:`DeviceArray`."""
        return DeviceArray(self.runtime, values, **keywords)

    def read(self, array: Any) -> np.ndarray[Any, Any]:
        """Return the elements of an array with DLPack, for a reader that waits for no more than DLPack requires."""
        return read(self.runtime, array)


_replaced: list[Libraries | None] = []


def install(
    devices: int | Sequence[DeviceModel] = 2, *, order: Policy = "lazy", version: int = 130100, **model: Any
) -> Software:
    """Replace NVIDIA's libraries by software for these devices, or for this number of one :class:`DeviceModel`.

    All :class:`Switches` are on.
    """
    models = [DeviceModel(**model)] * devices if isinstance(devices, int) else list(devices)
    software = Software(models, order, version, Switches.all())
    _replaced.append(installed.use(software.libraries))
    return software


def uninstall() -> None:
    installed.use(_replaced.pop())
