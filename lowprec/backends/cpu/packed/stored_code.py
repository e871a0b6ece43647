"""Machine code of kernels: stored on disk, linked into the process by LLVM in milliseconds.

An object file has no external references. Its name is a digest of processor, versions and source.
"""

from __future__ import annotations

import functools
import hashlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import llvmlite
import llvmlite.binding
import numba

from lowprec.backends import disk

#: The function of an object file.
SYMBOL = "lowprec_kernel"

#: Owner and address of the code of each kernel.
_loaded: dict[str, tuple[Any, int]] = {}


def made_of(function: Callable[..., Any]) -> str:
    """Return an identifier of a function: its name and the values in its closure."""
    names = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    values = [f"{name}={cell.cell_contents!r}" for name, cell in names]
    found = " ".join([function.__module__, function.__qualname__, *values])
    assert " at 0x" not in found, f"{found} would be compiled again in each process"
    return found


def address(name: str, compile_: Callable[[], bytes]) -> int:
    """Return the address of a kernel, compiled if it is not cached; ``name`` identifies its source. Not thread-safe."""
    if name not in _loaded:
        key = hashlib.sha256(f"{_maker()} {name}".encode())
        file = f"kernels/{key.hexdigest()[:32]}.o"
        data = disk.read_bytes(file)
        # A digest of code and name precedes the code, to detect damaged or exchanged files.
        code = b"" if data is None else data[32:]
        if data is None or data[:32] != hashlib.sha256(key.digest() + code).digest():
            if data is not None:
                disk.set_aside(file, "it is damaged")
            code = compile_()
            disk.write_bytes(file, hashlib.sha256(key.digest() + code).digest() + code)
        _loaded[name] = _link(code)
    return _loaded[name][1]


_PACKAGE = Path(__file__).parents[3]

#: Sources outside ``backends/cpu`` that determine kernels.
_OTHER_SOURCES = ("formats.py", "modes.py", "planning/bounds.py")


@functools.cache
def sources_digest(package: Path = _PACKAGE) -> str:
    """Return a digest of all sources that determine kernels, part of the key of each cached function."""
    files = sorted((package / "backends" / "cpu").rglob("*.py"))
    digest = hashlib.sha256()
    for file in (*files, *(package / name for name in _OTHER_SOURCES)):
        digest.update(b"%s %d\n" % (file.name.encode(), file.stat().st_size) + file.read_bytes())
    return digest.hexdigest()


@functools.cache
def _maker() -> str:
    """Return everything besides a function's source that determines its machine code."""
    config, binding = numba.config, llvmlite.binding
    cpu = config.CPU_NAME or binding.get_host_cpu_name()
    features = config.CPU_FEATURES
    if features is None:
        features = binding.get_host_cpu_features().flatten()
    versions = (numba.__version__, llvmlite.__version__, sys.version_info[:2], config.OPT)
    return f"{versions} {sys.platform} {cpu} {features} {sources_digest()}"


def _link(code: bytes) -> tuple[Any, int]:
    binding = llvmlite.binding
    binding.initialize_native_target()
    binding.initialize_native_asmprinter()
    machine = binding.Target.from_default_triple().create_target_machine(jit=True)
    module = binding.parse_assembly("")
    module.triple = machine.triple
    engine = binding.create_mcjit_compiler(module, machine)
    engine.add_object_file(binding.ObjectFileRef.from_data(code))
    engine.finalize_object()
    return engine, engine.get_function_address(SYMBOL)
