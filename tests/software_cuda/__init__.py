"""A software CUDA, cuBLASLt, cuBLAS and cuSPARSELt for tests of the CUDA backend without a GPU.

``install()`` replaces NVIDIA's libraries, ``uninstall()`` restores them. Work that is queued on a stream runs only when
it is waited for, memory is poisoned, and what the real libraries refuse is refused.
"""

from collections import Counter

from lowprec.backends.cuda import libraries as installed
from software_cuda.arrays import DeviceArray, read
from software_cuda.core import Core, compiler
from software_cuda.cublas import Cublas
from software_cuda.cublaslt import CublasLt
from software_cuda.cupy import Cupy
from software_cuda.cusparselt import CusparseLt
from software_cuda.driver import Driver
from software_cuda.machine import DeviceModel
from software_cuda.recorder import Recorder, Refusal
from software_cuda.runtime import Runtime
from software_cuda.switches import Switches

__all__ = [
    "Cupy",
    "DeviceArray",
    "DeviceModel",
    "Refusal",
    "Software",
    "Switches",
    "compiler",
    "install",
    "uninstall",
]

_DEVICE = DeviceModel()


class Software:
    """All parts, each of which replaces a module; ``version`` is that of cuBLASLt."""

    def __init__(self, devices=(_DEVICE,), version=130100, switches=None):
        self.recorder = Recorder(switches)
        self.calls, self.faults, self.fail = (
            self.recorder.calls,
            self.recorder.faults,
            self.recorder.fail,
        )
        self.runtime = Runtime(self.recorder, devices)
        self.drain = self.runtime.drain
        self.cublas_lt = CublasLt(self.recorder, self.runtime, version)
        self.cublas = Cublas(self.recorder, self.runtime)
        self.core = Core(self.recorder, self.runtime, version // 10000)
        self.driver = Driver(self.recorder, self.runtime)
        self.cusparse_lt = CusparseLt(self.recorder, self.runtime)

    @property
    def switches(self):
        """What is refused, or fails, in addition."""
        return self.recorder.switches

    def count(self, function):
        counted = Counter(self.calls)
        return sum(n for name, n in counted.items() if function in (name, name.partition(".")[2]))

    def live(self):
        return (
            self.runtime.live()
            | self.cublas_lt.live()
            | self.cublas.live()
            | self.cusparse_lt.live()
        )

    def forgive(self):
        self.faults.clear()
        self.runtime.sticky.clear()

    def array(self, values, **keywords):
        """Return an array on a device that is known only by DLPack; see :class:`DeviceArray`."""
        return DeviceArray(self.runtime, values, **keywords)

    def read(self, array):
        """Return the elements of an array with DLPack, for a reader that waits for no more than DLPack requires."""
        return read(self.runtime, array)


_replaced = []


def install(devices=2, *, version=130100, **model):
    """Replace NVIDIA's libraries by software with a number of equal devices; all :class:`Switches` are on."""
    software = Software([DeviceModel(**model)] * devices, version, Switches.all())
    _replaced.append(installed.use(software))
    return software


def uninstall():
    installed.use(_replaced.pop())
