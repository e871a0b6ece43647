"""Kernels as NVRTC compiles them: parameters and stack from the cubin, loads and stores from its machine code.

A cubin is an ELF file. The attributes of ``.nv.info`` are those of *CUDA Binary Utilities*; the values here are what
NVRTC 13 writes.
"""

import bisect
import re
import struct
import subprocess
from collections import Counter
from importlib import metadata
from pathlib import Path
from typing import NamedTuple

#: Attributes: the size of the stack frame, the least stack size, and a parameter.
_FRAME_SIZE, _MIN_STACK_SIZE, _PARAMETER = 0x11, 0x12, 0x17
#: Format of an attribute that is followed by its value.
_SIZED = 4
_NOBITS = 8

_ACCESS = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(?:@!?\w+\s+)?(LDG|STG|LDL|STL)\b([.\w]*)")
_BITS = re.compile(r"\.(?:[US])?(8|16|64|128|256)\b")


class Cubin(NamedTuple):
    """One kernel: its code, offset and size in bytes of each parameter, and bytes of stack per thread."""

    text: bytes
    parameters: list[tuple[int, int]]
    stack: int


def read_cubin(data, name):
    """Read a cubin with a single kernel."""
    sections = dict(_sections(data))
    common = list(_attributes(sections[".nv.info"]))
    stack = max(
        struct.unpack_from("<I", x, 4)[0]
        for kind, x in common
        if kind in (_FRAME_SIZE, _MIN_STACK_SIZE)
    )
    own = (x for kind, x in _attributes(sections[f".nv.info.{name}"]) if kind == _PARAMETER)
    rows = sorted(struct.unpack_from("<HHI", x, 4) for x in own)
    assert [number for number, _, _ in rows] == list(range(len(rows)))
    return Cubin(
        sections[f".text.{name}"], [(offset, flags >> 18) for _, offset, flags in rows], stack
    )


def _sections(data):
    assert data.startswith(b"\x7fELF\x02\x01"), (
        "no ELF file of 64 bits, least significant byte first"
    )
    (table,) = struct.unpack_from("<Q", data, 0x28)
    size, count, names_at = struct.unpack_from("<HHH", data, 0x3A)
    # Name, type, flags, address, offset, size.
    rows = [struct.unpack_from("<IIQQQQ", data, table + i * size) for i in range(count)]
    names = data[rows[names_at][4] :][: rows[names_at][5]]
    for name, kind, _, _, offset, nbytes in rows:
        text = names[name : names.index(0, name)].decode()
        yield text, b"" if kind == _NOBITS else data[offset : offset + nbytes]


def _attributes(data):
    at = 0
    while at < len(data):
        layout, kind, nbytes = struct.unpack_from("<BBH", data, at)
        at += 4
        if layout == _SIZED:
            yield kind, data[at : at + nbytes]
            at += nbytes


def nvdisasm():
    """Return the path of NVIDIA's disassembler from its wheel, None if that is not installed."""
    try:
        files = metadata.files("nvidia-cuda-nvdisasm") or []
    except metadata.PackageNotFoundError:
        return None
    return next((Path(str(x.locate())) for x in files if x.name == "nvdisasm"), None)


def accesses(texts, architecture, folder):
    """Count the loads and stores of each kernel, by instruction and bits.

    The instructions are ``LDG`` and ``STG`` for global memory, ``LDL`` and ``STL`` for local memory, where registers
    are spilled. One process disassembles all kernels: starting it takes longer than a kernel does.
    """
    path, starts = folder / "kernels.bin", [0]
    for text in texts:
        starts.append(starts[-1] + len(text))
    path.write_bytes(b"".join(texts))
    command = [str(nvdisasm()), "--binary", architecture.replace("sm_", "SM"), str(path)]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = [Counter() for _ in texts]
    for address, instruction, suffix in _ACCESS.findall(shown):
        bits = _BITS.search(suffix)
        number = bisect.bisect_right(starts, int(address, 16)) - 1
        found[number][instruction, int(bits[1]) if bits else 32] += 1
    return found


_INSTRUCTION = re.compile(r"/\*([0-9a-f]{4,})\*/\s+(.+?)\s*;")
_BRANCH = re.compile(r"\bBRA\b.* (0x[0-9a-f]+)$")


def instructions_of_loop(text, architecture, folder):
    """Count the instructions from the outermost loop on, subroutines included."""
    path = folder / "kernel.bin"
    path.write_bytes(text)
    command = [str(nvdisasm()), "--binary", architecture.replace("sm_", "SM"), str(path)]
    shown = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    code = [(int(at, 16), words) for at, words in _INSTRUCTION.findall(shown) if "NOP" not in words]
    branches = ((at, int(found[1], 16)) for at, words in code if (found := _BRANCH.search(words)))
    start = min(to for at, to in branches if to < at)
    return sum(at >= start for at, _ in code)
