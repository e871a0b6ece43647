"""Algorithms of the software cuBLASLt: what the heuristics offer for a product, and the 64 bytes that name one.

The list is unfavourable. Unless the preference forbids it, the first choice sums split parts in the type of the result,
or it needs aligned pointers and a workspace; the fastest is not the first.
"""

import hashlib
import struct
from dataclasses import astuple, dataclass, replace
from typing import NamedTuple

from nvmath.bindings import cublasLt as real

from software_cuda import tables
from software_cuda.objects import INVALID_VALUE, NOT_SUPPORTED
from software_cuda.recorder import Refusal

NONE, INPLACE, COMPUTE_TYPE, OUTPUT_TYPE = 0, 1, 2, 4
#: The configuration has the real libraries' layout, so that they read it, too; the rest is our own.
_FORMAT = struct.Struct("<IIIII14xHQQ8s4s")
_MAGIC = b"soft"


@dataclass(frozen=True)
class Algorithm:
    """An algorithm, in the order of its 64 bytes.

    ``alignment`` in bytes is that of pointers, leading dimensions and batch strides; ``flags`` are
    ``cublasLtNumericalImplFlags_t``; ``made_for`` is a digest of the types, the orders and the device.
    """

    id: int
    tile: int
    stages: int
    split_k: int
    reduction: int
    alignment: int
    flags: int
    workspace: int
    made_for: bytes

    def pack(self):
        return _FORMAT.pack(*astuple(self), _MAGIC)

    @classmethod
    def unpack(cls, data):
        """Return the algorithm that 64 bytes name."""
        *fields, magic = _FORMAT.unpack(data)
        if magic != _MAGIC:
            raise Refusal(INVALID_VALUE, "these 64 bytes are no algorithm of this library")
        return cls(*fields)


class Template(NamedTuple):
    """What an algorithm is made from.

    ``tile`` and ``stages`` are names of ``MatmulTile`` and ``MatmulStages`` without prefix; ``alignment`` 0 is
    that of an element; ``workspace`` is in bytes per element of D, at least 1 KiB if it is not 0; ``time`` is relative.
    """

    id: int
    tile: str
    stages: str
    split_k: int
    reduction: int
    alignment: int
    workspace: int
    time: float


#: In the heuristics' order.
TEMPLATES = (
    Template(66, "128x128", "64x4", 4, OUTPUT_TYPE, 16, 16, 1.0),
    Template(66, "128x256", "64x3", 1, NONE, 16, 1, 0.9),
    Template(31, "128x64", "32x4", 2, INPLACE, 16, 1, 0.8),
    Template(31, "128x128", "32x5", 1, NONE, 16, 0, 0.7),
    Template(24, "64x64", "32x3", 3, COMPUTE_TYPE, 8, 16, 1.1),
    Template(24, "64x128", "32x3", 1, NONE, 8, 0, 1.2),
    Template(21, "32x64", "16x3", 1, NONE, 4, 0, 1.5),
    Template(6, "64x32", "UNDEFINED", 1, NONE, 0, 0, 2.0),
    Template(0, "32x32", "UNDEFINED", 1, NONE, 0, 0, 4.0),
)

#: Relative times by the algorithm and its tile.
TIMES = {(x.id, x.tile): x.time for x in TEMPLATES}

_WIDEST_SPLIT = 8


def made_for(x, device):
    """Return the digest of what an algorithm depends on."""
    return hashlib.sha256(repr((x.signature, x.epilogue, device)).encode()).digest()[:8]


def candidates(x, device, *, tf32_forbidden):
    """Return all algorithms for a product, whatever the preference; the most promising first."""
    emulates = x.emulation is not None
    flags = tables.flags(
        x.compute, x.a.type, x.b.type, tf32_forbidden=tf32_forbidden, emulates=emulates
    )
    least = 16 if x.is_narrow else 4 if x.a.type == tables.R_8I else _smallest(x)
    elements = x.m * x.n * x.d.batch_count
    found = []
    for template in TEMPLATES:
        if template.split_k > 1 and (x.k < _WIDEST_SPLIT or x.activation or x.has_bias):
            continue
        if template.alignment and template.alignment < least:
            continue
        found.append(
            Algorithm(
                template.id,
                int(real.MatmulTile[f"TILE_{template.tile}"]),
                int(real.MatmulStages[f"STAGES_{template.stages}"]),
                template.split_k,
                template.reduction,
                template.alignment or least,
                flags,
                max(1024, template.workspace * elements) if template.workspace else 0,
                made_for(x, device),
            )
        )
    return found


def _smallest(x):
    """Return the alignment of the smallest element, or of its parts where it is complex."""
    return min(y.dtype.itemsize // (2 if y.dtype.kind == "c" else 1) for y in (x.a, x.b, x.d))


def fits_shape(algorithm, x):
    """Whether the leading dimensions and strides have the alignment that an algorithm needs."""
    return all(y.alignment() >= algorithm.alignment for y in (x.a, x.b, x.c, x.d))


def search(x, preference, device, switches, *, tf32_forbidden):
    wanted = preference.numbers(real.MatmulPreferenceAttribute)
    promised = min(wanted.get(f"MIN_ALIGNMENT_{name}_BYTES", 256) for name in "ABCD")
    if x.has_bias:
        promised = min(promised, x.bias_pointer & -x.bias_pointer)
    workspace, mask = wanted.get("MAX_WORKSPACE_BYTES", 0), wanted.get("REDUCTION_SCHEME_MASK", 7)
    allowed = wanted.get("IMPL_MASK", -1)
    if switches.int8_workspace and x.a.type == tables.R_8I and workspace:
        raise Refusal(NOT_SUPPORTED, "int8 with a workspace")
    if x.emulation and x.compute == tables.EMULATED_FIXEDPOINT:
        is_complex = x.a.type == tables.C_64F
        needed = x.emulation.workspace_bytes(x.m, x.n, x.k, x.d.batch_count, is_complex=is_complex)
        x = replace(x, emulation=x.emulation if workspace >= needed else None)
    found = [
        y
        for y in candidates(x, device, tf32_forbidden=tf32_forbidden)
        if y.alignment <= promised
        and y.workspace <= workspace
        and not (y.reduction & ~mask)
        and not (y.flags & ~allowed)
        and fits_shape(y, x)
    ]
    if not found:
        raise Refusal(NOT_SUPPORTED, f"no algorithm for pointers aligned to {promised}")
    return found
