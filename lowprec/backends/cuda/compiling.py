"""Kernels compiled by NVRTC at first use, for each combination of macros and architecture.

Compiled kernels are cached in memory and on disk, by a digest of source, options and compiler. cuda.core's program
cache is not used, because it checks neither the owner nor the integrity of a file.
"""

from __future__ import annotations

import hashlib
import importlib
import struct
from array import array
from collections.abc import Mapping, Sequence
from importlib import resources
from typing import Any, TypeAlias

from lowprec.backends import disk
from lowprec.backends.cuda import runtime
from lowprec.backends.cuda.libraries import cached, libraries
from lowprec.errors import BackendError, warn
from lowprec.formats import DType
from lowprec.util.lock import locked

#: Definitions of the preprocessor.
Macros: TypeAlias = dict[str, str | int]

#: Names of the element types in kernels.
ELEMENT = {
    DType.FLOAT64: "double",
    DType.FLOAT32: "float",
    DType.FLOAT16: "Half",
    DType.BFLOAT16: "Brain",
    DType.COMPLEX64: "Complex<float>",
    DType.COMPLEX128: "Complex<double>",
    DType.INT32: "int",
    DType.INT8: "Byte",
    DType.FLOAT8_E4M3FN: "E4M3",
    DType.FLOAT8_E5M2: "E5M2",
}

#: Threads of a block, and bytes of an exponent of a scaled row or column.
THREADS = 256
EXPONENT_BYTES = 4

#: Without FMA contraction, so that results equal those of the CPU backend; the kernels are memory-bound.
_OPTIONS: Mapping[str, Any] = {"std": "c++17", "fma": False}

_NEEDS_NVRTC = (
    "NVRTC, CUDA's run-time compiler, must be installed and support this device: install lowprec with its extra cuda13 "
    "(cuda12 for CUDA 12)"
)

#: Lines of the compiler's log in a message.
_LOG_LINES = 8

#: Length of the digest at the start of a file, which detects damage.
_DIGEST_BYTES = 32

#: Largest grid; the threads of larger problems loop.
_BLOCKS_PER_MULTIPROCESSOR = 32


class Launch:
    """A kernel, compiled at the first call, with its grid and arguments; a call sets only the first arguments.

    These have the ``struct`` format ``varying``. Addresses have none of the bits of ``masks``, of which the last may be
    omitted. The grid has ``wanted`` blocks, or as many as the device needs to be busy.
    """

    def __init__(
        self,
        name: str,
        file: str,
        definitions: Macros,
        device: int,
        wanted: int,
        block: tuple[int, ...],
        varying: str,
        constants: Sequence[int],
        masks: Sequence[int] = (),
    ) -> None:
        self.masks = masks
        self._key = (name, file, definitions, device)
        most = runtime.properties(device).multiprocessors * _BLOCKS_PER_MULTIPROCESSOR
        grid = max(1, min(wanted, most))
        ones = (1,) * (3 - len(block))
        self._extents = (grid, 1, 1, *block, *ones, 0)
        self._constants = tuple(constants)
        self._varying = struct.Struct(varying)
        #: Arguments that are not in use by a thread, 8 bytes each, and the pointers to them.
        self._idle: list[tuple[array[int], array[int]]] = []
        self._kernel: Any = None
        self._function: Any = None

    def __call__(self, stream: int, *varying: float) -> None:
        """Queue the kernel with these first arguments."""
        if self._kernel is None:
            self._load()
        try:
            arguments = self._idle.pop()
        except IndexError:
            arguments = self._new_arguments()
        memory, pointers = arguments
        self._varying.pack_into(memory, 0, *varying)
        # The driver copies the arguments before it returns.
        address, _ = pointers.buffer_info()
        launch = libraries().driver.cuLaunchKernel
        (status,) = launch(self._function, *self._extents, stream, address, 0)
        self._idle.append(arguments)
        if status:
            raise BackendError(f"kernel {self._key[0]} cannot be launched: {status.name}")

    def _load(self) -> None:
        with runtime.relaxed_capture():  # loading is not part of a captured graph
            loaded = kernel(*self._key)
        self._function = libraries().driver.CUfunction(int(loaded.handle))
        self._kernel = loaded

    def _new_arguments(self) -> tuple[array[int], array[int]]:
        memory = array("q", bytes(self._varying.size))
        memory.extend(self._constants)
        first, count = memory.buffer_info()
        end = first + count * memory.itemsize
        # The driver knows the number of arguments; the zero lets tests detect a wrong one.
        return memory, array("Q", [*range(first, end, memory.itemsize), 0])


def kernel(name: str, file: str, definitions: Macros, device: int) -> Any:
    """Return a kernel of a file in ``kernels/``, compiled with these macros for the architecture of a device."""
    major, minor = runtime.properties(device).capability
    return locked(_load, f"sm_{major}{minor}", name, source_text(file, definitions))


def source_text(file: str, definitions: Macros) -> str:
    """Return the source of a kernel: macros, element types, and the text of the file."""
    lines = [f"#define {macro} {value}\n" for macro, value in definitions.items()]
    folder = resources.files("lowprec.backends.cuda") / "kernels"
    lines += [(folder / name).read_text("utf-8") for name in ("elements.cuh", file)]
    return "".join(lines)


@cached
def _load(arch: str, name: str, source: str) -> Any:
    core = libraries().core
    # The digest is of everything that determines the code. In tests cuda.core is an object that is not a module.
    maker = f"{type(core).__name__} {core.__name__} {core.__version__}, NVRTC {_nvrtc_version()}"
    words = "\0".join([maker, arch, repr(sorted(_OPTIONS.items())), source])
    path = f"kernels/{name}_{arch}_{hashlib.sha256(words.encode()).hexdigest()[:32]}.cubin"
    data = disk.read(path)
    if data is not None:
        digest = data[:_DIGEST_BYTES]
        code = data[_DIGEST_BYTES:]
        reason = "it is damaged"
        try:
            if hashlib.sha256(code).digest() == digest:
                return core.ObjectCode.from_cubin(code).get_kernel(name)
        except Exception as error:  # noqa: BLE001 - the driver raises several classes
            reason = f"the driver does not load it: {error}"
        warn(f"lowprec does not use {path} of its cache: {reason}; it is written again")
    code = _compiled(core, arch, name, source)
    try:
        loaded = core.ObjectCode.from_cubin(code).get_kernel(name)
    except Exception as error:
        raise BackendError(
            f"the driver cannot load kernel {name} for {arch}: {error}; NVRTC, CUDA's run-time compiler, must not be "
            "of a later version of CUDA than the driver supports"
        ) from error
    disk.write(path, hashlib.sha256(code).digest() + code)
    return loaded


def _nvrtc_version() -> str:
    try:
        nvrtc = importlib.import_module("cuda.bindings.nvrtc")
        status, major, minor = nvrtc.nvrtcVersion()
    except Exception:  # noqa: BLE001 - missing, broken or too old; compilation then raises the error
        return ""
    return "" if status else f"{major}.{minor}"


def _compiled(core: Any, arch: str, name: str, source: str) -> bytes:
    try:
        options = core.ProgramOptions(arch=arch, **_OPTIONS)
        code = core.Program(source, "c++", options).compile("cubin").code
    except Exception as error:
        log = "\n".join(str(error).splitlines()[:_LOG_LINES])
        raise BackendError(
            f"kernel {name} was not compiled for {arch}: {log}\n{_NEEDS_NVRTC}"
        ) from error
    return bytes(code)
