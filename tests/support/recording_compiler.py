"""A replacement of cuda.core whose code is the text of the source, and which records compilations and launches."""

import itertools
from contextlib import contextmanager
from ctypes import c_int64
from types import SimpleNamespace
from typing import Any, NamedTuple

from lowprec.backends.cuda import libraries
from software_cuda.machine import DeviceModel
from software_cuda.recorder import Recorder
from software_cuda.runtime import Runtime


class Loaded(NamedTuple):
    name: str
    code: bytes
    handle: int


class RecordingCompiler:
    __name__ = "replacement of cuda.core"
    __version__ = "1"

    def __init__(self):
        self.compiled: list[tuple[str, dict[str, Any]]] = []
        self.loaded: list[bytes] = []
        #: Stream, grid and block, name of the kernel, and arguments, each as 8 bytes.
        self.launched: list[tuple[Any, ...]] = []
        #: Number of arguments of each launched kernel, by its code.
        self.arguments: dict[bytes, int] = {}
        self.refuses: tuple[bytes, ...] = ()
        self.error: str | None = None
        self.ProgramOptions = dict
        self.ObjectCode = SimpleNamespace(from_cubin=self._from_cubin)
        self.driver = SimpleNamespace(CUfunction=self._kernel, cuLaunchKernel=self._launch)
        self._kernels: list[Loaded] = []

    def Program(self, source, kind, options):
        assert kind == "c++"

        def compile_to(target):
            assert target == "cubin"
            if self.error:
                raise RuntimeError(self.error)
            self.compiled.append((source, options))
            return SimpleNamespace(code=f"cubin of {options['arch']}\n{source}".encode())

        return SimpleNamespace(compile=compile_to)

    def _from_cubin(self, code):
        if code in self.refuses:
            raise RuntimeError("CUDA_ERROR_INVALID_IMAGE")
        self.loaded.append(code)
        return SimpleNamespace(get_kernel=lambda name: self._named(name, code))

    def _named(self, name, code):
        self._kernels.append(Loaded(name, code, len(self._kernels)))
        return self._kernels[-1]

    def _kernel(self, handle):
        return self._kernels[handle]

    def _launch(self, kernel, *rest):
        *extents, _, stream, parameters, _ = rest
        addresses = itertools.takewhile(bool, (c_int64 * 99).from_address(parameters))
        arguments = [c_int64.from_address(x).value for x in addresses]
        self.launched.append((stream, tuple(extents), kernel.name, *arguments))
        self.arguments[kernel.code] = len(arguments)
        return (0,)


def runtime(capability=(9, 0)):
    """Return CUDA's runtime on a machine with one device."""
    return Runtime(Recorder(), [DeviceModel(capability=capability)])


@contextmanager
def recording():
    """Replace the backend's libraries by a compiler that records, and a runtime."""
    found = RecordingCompiler()
    before = libraries.use(SimpleNamespace(runtime=runtime(), core=found, driver=found.driver))
    try:
        yield found
    finally:
        libraries.use(before)
