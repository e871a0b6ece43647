"""A software ``cuda.core``: the same CUDA C++ sources, compiled for the host by g++ and run when their stream runs.

A "cubin" is the shared object after a line with its architecture; one for another device is refused, as by drivers.
``host_cuda.h`` has the language.
"""

import ctypes
import functools
import hashlib
import itertools
import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import cuda.core as real
import numpy as np
from cuda.core._utils.cuda_utils import CUDAError, NVRTCError

from software_cuda.recorder import Fault, Part, function

_SHIM = Path(__file__).with_name("host_cuda.h")
_KERNEL = re.compile(r"__attribute__\s*\(\(used\)\)\s*void\s+(\w+)\s*\(")
_COMPILE = (
    "-std=c++17", "-O0", "-fPIC", "-fno-gnu-unique", "-w", "-ffp-contract=off", "-fno-strict-aliasing",
    "-U_FORTIFY_SOURCE",
    "-fsanitize=alignment", "-fno-sanitize-recover=alignment", "-fsanitize=kernel-address",
    "--param=asan-stack=0", "--param=asan-globals=0", "--param=asan-instrumentation-with-call-threshold=0",
    "-shared", "-nostdlib", "-Wl,-Bsymbolic",
)  # fmt: skip


def compiler():
    """Return the path of g++, None if there is none."""
    return shutil.which("g++")


class Core(Part):
    def __init__(self, recorder, runtime, cuda_major):
        super().__init__("core", real, recorder)
        self.__version__ = real.__version__
        self._cuda_major = cuda_major
        self._runtime = runtime
        self.ProgramOptions = real.ProgramOptions
        self.ObjectCode = SimpleNamespace(from_cubin=self._object_code)

    def error(self, status, reason):
        return NVRTCError(f"NVRTC_ERROR_COMPILATION: {reason}")

    def Program(self, code, code_type, options):
        assert code_type == "c++", "sources are CUDA C++"
        return SimpleNamespace(compile=functools.partial(self.compile, code, options.arch))

    @function
    def compile(self, source, arch, target):
        assert target == "cubin"
        if arch in ("sm_70", "sm_72") and self._cuda_major >= 13:
            raise NVRTCError(
                "NVRTC_ERROR_INVALID_OPTION: invalid value for --gpu-architecture (-arch)"
            )
        return self._object_code(arch.encode() + b"\n" + _compiled(source))

    def _object_code(self, code):
        return SimpleNamespace(code=code, get_kernel=lambda name: Kernel(name, self._loaded(code)))

    def _loaded(self, code):
        """Load compiled code, as the driver does: it must be for this device."""
        arch, _, library = code.partition(b"\n")
        major, minor = self._runtime.devices[self._runtime.device].capability
        if arch.decode() != f"sm_{major}{minor}":
            raise CUDAError(f"CUDA_ERROR_NO_BINARY_FOR_GPU: {arch.decode()} on sm_{major}{minor}")
        return _library(library)


def _compiled(source):
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


def _compile(gxx, source, path):
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "kernel.cpp")
        text = f'#include "{_SHIM}"\n{source}\n'
        file.write_text(text)
        expanded = _run(gxx, "-std=c++17", "-E", "-P", str(file))
        barriers = "true" if "host_cuda::barrier()" in expanded else "false"
        file.write_text(
            text + "".join(_entry(name, barriers) for name in _KERNEL.findall(expanded))
        )
        linked = path.with_suffix(f".{os.getpid()}")
        _run(gxx, *_COMPILE, "-o", str(linked), str(file), "-lm", "-lc")
        linked.replace(path)  # in one step, as several processes may compile the same


def _entry(name, barriers):
    return (
        f'extern "C" const char* launch_{name}(void** values, const unsigned int* extents)\n'
        f"{{ typedef host_cuda::Kernel<&{name}> Kernel;\n"
        f"  return host_cuda::launch(Kernel::call, Kernel::count, values, extents, {barriers}); }}\n"
        f'extern "C" const char* letters_{name}() {{ return host_cuda::Kernel<&{name}>::letters(); }}\n'
    )


def _run(*command):
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise NVRTCError(f"NVRTC_ERROR_COMPILATION: {done.stderr}")
    return done.stdout


@functools.cache
def _library(library):
    # The file stays as long as the process: the loader takes a new file for the old one if it has its inode.
    path = Path(_folder().name, f"{hashlib.sha256(library).hexdigest()}.so")
    path.write_bytes(library)
    return ctypes.CDLL(str(path))


@functools.cache
def _folder():
    return tempfile.TemporaryDirectory(ignore_cleanup_errors=True)


#: C types of parameters by the letters that the compiled kernel reports.
_TYPES = {"p": ctypes.c_uint64, "l": ctypes.c_int64, "i": ctypes.c_int64, "d": ctypes.c_double}


class Kernel:
    by_handle: ClassVar = {}
    _handles = itertools.count(0x7000_0000, 0x40)

    def __init__(self, name, library):
        self.name = name
        self.handle = next(self._handles)
        self.by_handle[self.handle] = self
        self._launch, letters = library[f"launch_{name}"], library[f"letters_{name}"]
        self._ranges = library["host_cuda_ranges"]
        self._launch.restype = letters.restype = ctypes.c_char_p
        self._letters = letters().decode()

    def read(self, parameters):
        """Return the arguments from a list of their addresses, which must end with 0."""
        count = len(self._letters)
        addresses = (ctypes.c_uint64 * (count + 1)).from_address(parameters)
        if 0 in addresses[:count] or addresses[count]:
            raise TypeError(f"kernel {self.name} takes {count} arguments")
        kinds = [_TYPES[x] for x in self._letters]
        return [
            kind.from_buffer_copy(ctypes.string_at(address, 8))
            for kind, address in zip(kinds, addresses[:count], strict=True)
        ]

    def run(self, extents, values, runtime, device):
        """Run all threads; raises Fault if one of them accesses memory that it must not."""
        pointers = (ctypes.c_void_p * len(values))(*[ctypes.addressof(x) for x in values])
        blocks = runtime.memory.blocks
        rows = [(x.address, x.address + x.nbytes, x.alive and x.device == device) for x in blocks]
        ranges = np.array(rows, np.uint64).reshape(-1, 3)
        self._ranges(ctypes.c_void_p(ranges.ctypes.data), ctypes.c_int64(len(ranges)))
        fault = self._launch(pointers, (ctypes.c_uint32 * 6)(*extents))
        if fault is not None:
            raise Fault(fault.decode())
