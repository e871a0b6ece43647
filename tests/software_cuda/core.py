"""A software ``cuda.core``: the same CUDA C++ sources, compiled for the host by g++ and run when their stream runs.

A "cubin" is the shared object with a line before it that tells for what it was made, so that what real drivers refuse
(another architecture, damaged bytes, an unknown name) is refused. ``host_cuda.h`` is the language.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import hashlib
import itertools
import json
import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any, ClassVar

import cuda.core as real
import numpy as np
from cuda.bindings import driver as real_driver
from cuda.core._utils.cuda_utils import CUDAError, NVRTCError
from numpy.typing import NDArray

from software_cuda.driver import Contexts
from software_cuda.machine import Status
from software_cuda.recorder import Fault, Part, Recorder, function
from software_cuda.runtime import Refusal, Runtime

_SHIM = Path(__file__).with_name("host_cuda.h")
_MAGIC = b"software cubin "
_KERNEL = re.compile(r"__attribute__\s*\(\(used\)\)\s*void\s+(\w+)\s*\(")
_COMPILE = (
    "-std=c++17", "-O0", "-fPIC", "-fno-gnu-unique", "-w", "-ffp-contract=off", "-fno-strict-aliasing",
    "-U_FORTIFY_SOURCE",
    "-fsanitize=alignment", "-fno-sanitize-recover=alignment", "-fsanitize=kernel-address",
    "--param=asan-stack=0", "--param=asan-globals=0", "--param=asan-instrumentation-with-call-threshold=0",
    "-shared", "-nostdlib", "-Wl,-Bsymbolic",
)  # fmt: skip
_MAX_GRID = (2**31 - 1, 65535, 65535)
_MAX_BLOCK = (1024, 1024, 64)


def compiler() -> str | None:
    """Return the path of g++, None if there is none."""
    return shutil.which("g++")


class Core(Part):
    """Stands for ``cuda.core``."""

    def __init__(self, recorder: Recorder, runtime: Runtime, cuda_major: int) -> None:
        super().__init__("core", real, recorder)
        self.cuda_major = cuda_major
        self.__version__ = real.__version__
        self.runtime = runtime
        self.ProgramOptions = real.ProgramOptions
        core = self

        class Program(_Program):
            _core = core

        class ObjectCode(_ObjectCode):
            _core = core

        self.Program = Program
        self.ObjectCode = ObjectCode
        self.LaunchConfig = LaunchConfig

    def failed(self, function: str, status: Any) -> Any:
        raise status if isinstance(status, Exception) else CUDAError(f"{function} was made to fail")

    def arch(self) -> str:
        """Return the architecture of the current device."""
        major, minor = self.runtime.devices[self.runtime.device].capability
        return f"sm_{major}{minor}"

    @function
    def launch(self, stream: Any, config: LaunchConfig, kernel: _Kernel, *arguments: Any) -> None:
        version, handle = stream.__cuda_stream__()
        assert version == 0, "version 0 of the stream protocol"
        values = kernel.check(arguments)
        config.check()
        try:
            self.queue(handle, config, kernel, values)
        except Refusal as refusal:
            raise CUDAError(f"launch of {kernel.name}: {refusal.status!r}") from None

    def queue(self, stream: int, config: LaunchConfig, kernel: _Kernel, values: list[Any]) -> None:
        """Queue a kernel whose arguments are in order.

        Raises
        ------
        Refusal
        """
        runtime = self.runtime
        with runtime.lock:
            if runtime.context is None:  # the driver makes none, other than the runtime
                raise Refusal(Status.cudaErrorDeviceUninitialized)
            runtime.check_sticky()
            found = runtime.stream(stream, current=True)
            device = found.device

            def run() -> None:
                kernel.run(config, values, runtime, device)

            cost_ms = 0.005
            if kernel.name == "spin":
                cost_ms = values[0].value / runtime.devices[device].clock_khz
            runtime.enqueue(found, f"kernel {kernel.name}", run, cost_ms)


class Driver(Contexts):
    """Stands for ``cuda.bindings.driver``."""

    def __init__(self, recorder: Recorder, core: Core) -> None:
        super().__init__(recorder, core.runtime)
        self._core = core

    def failed(self, function: str, status: Any) -> Any:
        return (status or real_driver.CUresult.CUDA_ERROR_UNKNOWN,)

    @function
    def cuLaunchKernel(self, kernel: Any, *rest: Any) -> tuple[Any]:
        *extents, shared, stream, parameters, extra = rest
        assert isinstance(kernel, real_driver.CUfunction)
        assert (len(extents), shared, extra) == (6, 0, 0), "shared memory is not modelled"
        found = _Kernel.by_handle[int(kernel)]
        values = found.read(parameters)
        try:
            config = LaunchConfig(grid=extents[:3], block=extents[3:])
            config.check()
            self._core.queue(int(stream), config, found, values)
        except CUDAError:
            return (real_driver.CUresult.CUDA_ERROR_INVALID_VALUE,)
        except Refusal as refusal:
            return (_result(refusal.status),)
        return (real_driver.CUresult.CUDA_SUCCESS,)


def _result(status: Any) -> Any:
    """Return the driver's name of an error of the runtime, which has the same number."""
    return real_driver.CUresult(int(status))


class LaunchConfig:
    """Extents of a launch, up to three each."""

    def __init__(self, *, grid: Any, block: Any, shmem_size: int = 0) -> None:
        self.grid = _extents(grid)
        self.block = _extents(block)
        assert not shmem_size, "dynamic shared memory is not modelled"

    def check(self) -> None:
        """Refuse what no device can launch."""
        grid = zip(self.grid, _MAX_GRID, strict=True)
        block = zip(self.block, _MAX_BLOCK, strict=True)
        if not all(0 < x <= most for x, most in (*grid, *block)) or np.prod(self.block) > 1024:
            raise CUDAError(f"CUDA_ERROR_INVALID_VALUE: grid {self.grid}, block {self.block}")


def _extents(x: Any) -> tuple[int, int, int]:
    given = (x,) if isinstance(x, int) else tuple(x)
    found: tuple[int, int, int] = (*given, *(1,) * (3 - len(given)))  # type: ignore[assignment]
    return found


class _Program:
    """A source to compile."""

    _core: Core

    def __init__(self, code: str, code_type: str, options: Any = None) -> None:
        assert code_type == "c++", "sources are CUDA C++"
        self._code = code
        self._arch = getattr(options, "arch", None) or self._core.arch()

    def compile(self, target_type: str) -> Any:
        core = self._core
        plan = core.recorder.called(core.part, "compile")
        if plan is not None:
            raise NVRTCError("NVRTC_ERROR_COMPILATION: compile was made to fail")
        assert target_type == "cubin"
        if self._arch in ("sm_70", "sm_72") and core.cuda_major >= 13:
            raise NVRTCError("NVRTC_ERROR_INVALID_OPTION: invalid value for --gpu-architecture (-arch)")
        library = _compiled(self._code)
        digest = hashlib.sha256(library).hexdigest()
        header = json.dumps({"arch": self._arch, "digest": digest}).encode()
        return core.ObjectCode(_MAGIC + header + b"\n" + library)


def _compiled(source: str) -> bytes:
    """Return the shared object of a source; kept in the directory for temporary files."""
    found = compiler()
    if found is None:
        raise NVRTCError("g++ is missing, which compiles kernels for the software CUDA")
    words = "\0".join([source, _SHIM.read_text(), " ".join(_COMPILE)])
    name = hashlib.sha256(words.encode()).hexdigest()[:40]
    kept = Path(tempfile.gettempdir()) / f"lowprec-software-cuda-{os.getuid()}"
    kept.mkdir(mode=0o700, exist_ok=True)
    path = kept / f"{name}.so"
    if not path.exists():
        _compile(found, source, path)
    return path.read_bytes()


def _compile(gxx: str, source: str, path: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "kernel.cpp")
        text = f'#include "{_SHIM}"\n{source}\n'
        file.write_text(text)
        expanded = _run(gxx, "-std=c++17", "-E", "-P", str(file))
        barriers = "true" if "host_cuda::barrier()" in expanded else "false"
        names = _KERNEL.findall(expanded)
        file.write_text(text + "".join(_entry(name, barriers) for name in names))
        linked = Path(folder, "kernel.so")
        _run(gxx, *_COMPILE, "-o", str(linked), str(file), "-lm", "-lc")
        # In one step, as several processes may compile the same.
        moved = path.with_suffix(f".{os.getpid()}")
        shutil.copyfile(linked, moved)
        os.replace(moved, path)


def _entry(name: str, barriers: str) -> str:
    return (
        f'extern "C" const char* launch_{name}(void** values, const unsigned int* extents)\n'
        f"{{ typedef host_cuda::Kernel<&{name}> Kernel;\n"
        f"  return host_cuda::launch(Kernel::call, Kernel::count, values, extents, {barriers}); }}\n"
        f'extern "C" const char* letters_{name}() {{ return host_cuda::Kernel<&{name}>::letters(); }}\n'
    )


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise NVRTCError(f"NVRTC_ERROR_COMPILATION: {done.stderr}")
    return done.stdout


class _ObjectCode:
    """A compiled program."""

    _core: Core

    def __init__(self, code: bytes) -> None:
        self.code = code

    @classmethod
    def from_cubin(cls, code: bytes) -> Any:
        core = cls._core
        plan = core.recorder.called(core.part, "from_cubin")
        if plan is not None:
            core.failed("from_cubin", plan.status)
        return cls(code)

    def get_kernel(self, name: str) -> _Kernel:
        core = self._core
        plan = core.recorder.called(core.part, "get_kernel")
        if plan is not None:
            core.failed("get_kernel", plan.status)
        return _Kernel(name, _loaded(self.code, core.arch()))


_libraries: dict[bytes, ctypes.CDLL] = {}


def _loaded(code: bytes, arch: str) -> ctypes.CDLL:
    """Load what was compiled, as the driver does: the code must be whole, and for this device."""
    header, _, library = code.partition(b"\n")
    if not header.startswith(_MAGIC):
        raise CUDAError("CUDA_ERROR_INVALID_IMAGE: no cubin")
    told = json.loads(header[len(_MAGIC) :])
    if hashlib.sha256(library).hexdigest() != told["digest"]:
        raise CUDAError("CUDA_ERROR_INVALID_IMAGE: the cubin is damaged")
    if told["arch"] != arch:
        raise CUDAError(f"CUDA_ERROR_NO_BINARY_FOR_GPU: {told['arch']} on {arch}")
    key = hashlib.sha256(library).digest()
    found = _libraries.get(key)
    if found is None:
        # The file stays as long as the process: the loader takes a new file for the old one if it has its inode.
        path = Path(_folder(), f"{len(_libraries)}.so")
        path.write_bytes(library)
        found = _libraries[key] = ctypes.CDLL(str(path))
    return found


@functools.cache
def _folder() -> str:
    made = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, made, ignore_errors=True)
    return made


#: Python's types of arguments by the letters that the compiled kernel tells.
_TYPES: dict[str, tuple[type, Any]] = {
    "p": (int, ctypes.c_uint64),
    "l": (np.int64, ctypes.c_int64),
    "i": (np.int32, ctypes.c_int64),
    "d": (np.float64, ctypes.c_double),
}


class _Kernel:
    """A function that can be launched."""

    by_handle: ClassVar[dict[int, _Kernel]] = {}
    _handles = itertools.count(0x7000_0000, 0x40)

    def __init__(self, name: str, library: ctypes.CDLL) -> None:
        self.name = name
        self.handle = next(self._handles)
        self.by_handle[self.handle] = self
        try:
            self._launch = library[f"launch_{name}"]
            letters = library[f"letters_{name}"]
        except AttributeError:
            raise CUDAError(f"CUDA_ERROR_NOT_FOUND: there is no kernel {name}") from None
        self._ranges = library["host_cuda_ranges"]
        self._launch.restype = letters.restype = ctypes.c_char_p
        self._letters = letters().decode()

    def check(self, arguments: tuple[Any, ...]) -> list[Any]:
        """Return the arguments as C has them; they must be of the kernel's own types."""
        wanted = [_TYPES[x] for x in self._letters]
        kinds = [type(x) for x in arguments]
        if kinds != [kind for kind, _ in wanted]:
            raise TypeError(f"kernel {self.name} takes {self._letters!r}, not {kinds}")
        return [
            kind(x.item() if isinstance(x, np.generic) else x) for x, (_, kind) in zip(arguments, wanted, strict=True)
        ]

    def read(self, parameters: int) -> list[Any]:
        """Return the arguments that lie where a list of addresses tells; 0 must end the list."""
        count = len(self._letters)
        addresses = (ctypes.c_uint64 * (count + 1)).from_address(parameters)
        if 0 in addresses[:count] or addresses[count]:
            raise TypeError(f"kernel {self.name} takes {count} arguments")
        kinds = [_TYPES[x][1] for x in self._letters]
        return [
            kind.from_buffer_copy(ctypes.string_at(address, 8))
            for kind, address in zip(kinds, addresses[:count], strict=True)
        ]

    def run(self, config: LaunchConfig, values: list[Any], runtime: Runtime, device: int) -> None:
        """Run all threads.

        Raises
        ------
        Fault
            If one of them touches memory that it must not.
        """
        pointers = (ctypes.c_void_p * len(values))(*[ctypes.addressof(x) for x in values])
        extents = (ctypes.c_uint32 * 6)(*config.grid, *config.block)
        ranges = _ranges_of(runtime, device)
        self._ranges(ctypes.c_void_p(ranges.ctypes.data), ctypes.c_int64(len(ranges)))
        fault = self._launch(pointers, extents)
        if fault is not None:
            raise Fault(fault.decode())


def _ranges_of(runtime: Runtime, device: int) -> NDArray[np.uint64]:
    blocks = runtime.memory.blocks
    rows = [(x.address, x.address + x.nbytes, x.alive and x.device == device) for x in blocks]
    return np.array(rows, np.uint64).reshape(-1, 3)
