"""A software CUDA, cuBLASLt, cuBLAS and cuSPARSELt for tests of the CUDA backend without a GPU.

``install()`` replaces NVIDIA's libraries, ``uninstall()`` restores them. Work that is queued on a stream runs only when
it is waited for, memory is poisoned, and what the real libraries refuse is refused.
"""

from collections import Counter

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
from software_cuda.switches import Switches

__all__ = ["Cupy", "DeviceArray", "DeviceModel", "Refusal", "Software", "Switches", "compiler", "install", "uninstall"]

_DEVICE = DeviceModel()


class Software:
    """All parts, each of which replaces a module; ``order`` is that of the streams, ``version`` that of cuBLASLt."""

    def __init__(self, devices=(_DEVICE,), order="lazy", version=130100, switches=None):
        self.recorder = Recorder(switches)
        self.runtime = Runtime(self.recorder, devices, order)
        self.cublas_lt = CublasLt(self.recorder, self.runtime, version)
        self.cublas = Cublas(self.recorder, self.runtime)
        self.core = Core(self.recorder, self.runtime, version // 10000)
        self.driver = Driver(self.recorder, self.runtime)
        self.cusparse_lt = CusparseLt(self.recorder, self.runtime)
        self.libraries = Libraries(self.cublas_lt, self.cublas, self.runtime, self.core, self.driver, self.cusparse_lt)

    @property
    def switches(self):
        """What is refused, or fails, in addition."""
        return self.recorder.switches

    @property
    def calls(self):
        """All calls in order, as ``"part.function"``."""
        return self.recorder.calls

    @property
    def faults(self):
        """All misuse, in words."""
        return self.recorder.faults

    def count(self, function):
        counted = Counter(self.calls)
        return sum(n for name, n in counted.items() if function in (name, name.partition(".")[2]))

    def fail(self, function, *, at=1, status=None):
        """Make the ``at``-th call of a function from now on report an error instead of acting."""
        return self.recorder.fail(function, at=at, status=status)

    def live(self):
        return self.runtime.live() | self.cublas_lt.live() | self.cublas.live() | self.cusparse_lt.live()

    def drain(self):
        self.runtime.drain()

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


def install(devices=2, *, order="lazy", version=130100, **model):
    """Replace NVIDIA's libraries by software for these devices, or for this number of one :class:`DeviceModel`.

    All :class:`Switches` are on.
    """
    models = [DeviceModel(**model)] * devices if isinstance(devices, int) else list(devices)
    software = Software(models, order, version, Switches.all())
    _replaced.append(installed.use(software.libraries))
    return software


def uninstall():
    installed.use(_replaced.pop())
