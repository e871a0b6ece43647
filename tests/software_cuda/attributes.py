"""The attributes of cuBLASLt's objects: their sizes, defaults, and the versions that have them.

Source: the libraries of 12.9, 13.0, 13.1 and 13.10 themselves, which report this without a driver. A version in between
counts as the older neighbour. ``nvmath.bindings`` names most of them, and has other sizes for some.
"""

from typing import NamedTuple

#: The versions that were queried.
VERSIONS = (120903, 130000, 130100, 131000)
_NEVER = 1 << 30


class Attribute(NamedTuple):
    """An attribute of the versions from ``since`` on and before ``until``.

    ``default``, and ``most`` where larger values are refused, are unsigned numbers.
    """

    number: int
    nbytes: int
    default: int = 0
    since: int = 0
    until: int = _NEVER
    most: int | None = None

    @property
    def first(self):
        """Its value before it is set."""
        return self.default.to_bytes(self.nbytes, "little")


_NO_TYPE = 0xFFFFFFFF
DESCRIPTOR, LAYOUT, PREFERENCE, EMULATION, CONFIG = (
    "matmul_desc", "matrix_layout", "matmul_preference", "emulation_desc", "matmul_algo_config",
)  # fmt: skip

_ROWS = {
    DESCRIPTOR: (
        *(Attribute(x, 4) for x in (0, 1, 2, 3, 4, 5, 15, 16, 31, 32, 33, 34, 35, 37)),
        *(Attribute(x, 8) for x in (8, 10, 11, 12, 13, 14, 17, 18, 19, 20, 21, 23, 24, 36)),
        Attribute(6, 4, 2),  # FILL_MODE: full
        Attribute(7, 4, 1),  # EPILOGUE: none
        Attribute(22, 4, _NO_TYPE),
        Attribute(25, 1),
        Attribute(26, 4, _NO_TYPE),
        *(Attribute(x, 4, until=130000) for x in (27, 28)),
        *(Attribute(x, 8, until=130000) for x in (29, 30)),
        Attribute(38, 4, until=130100),  # EMULATION_DESCRIPTOR, a handle
        Attribute(38, 8, since=130100),
        *(Attribute(x, 8, since=131000) for x in (39, 40)),
        Attribute(41, 4, 0x8000, since=131000),
    ),
    LAYOUT: (
        *(Attribute(x, 4) for x in (0, 1)),
        *(Attribute(x, 8) for x in (2, 3, 4, 6, 7)),
        Attribute(5, 4, 1),  # BATCH_COUNT
        Attribute(8, 4, until=131000),  # BATCH_MODE, the only one whose value is checked
        Attribute(8, 4, since=131000, most=0xFFFF),
        *(Attribute(x, 8, since=131000) for x in (9, 10, 11)),
        *(Attribute(x, 4, since=131000) for x in (12, 13)),
    ),
    PREFERENCE: (
        *(Attribute(x, 4) for x in (0, 9)),
        Attribute(1, 8),
        Attribute(3, 4, 7),  # REDUCTION_SCHEME_MASK: all
        *(Attribute(x, 4, 256) for x in (5, 6, 7, 8)),  # MIN_ALIGNMENT_x_BYTES
        Attribute(12, 8, (1 << 64) - 1),
        *(Attribute(x, 8, since=131000) for x in (13, 14, 15)),
    ),
    EMULATION: (
        *(Attribute(x, 4, since=130100) for x in (0, 2, 3, 4)),
        Attribute(1, 4, 0xFFFF, since=130100),  # SPECIAL_VALUES_SUPPORT: all
        Attribute(5, 8, since=130100),
    ),
    CONFIG: (
        *(Attribute(x, 4) for x in range(7)),
        *(Attribute(x, 2) for x in (7, 8, 10)),
    ),
}  # fmt: skip

#: The offset of each configuration in the 64 bytes of an algorithm.
CONFIG_OFFSETS = {0: 0, 1: 4, 6: 8, 2: 12, 3: 16, 4: 20, 5: 24, 7: 28, 8: 30, 10: 32}


def attributes(kind, version):
    """Return the attributes of a kind of object in a version, by number."""
    return {x.number: x for x in _ROWS[kind] if x.since <= version < x.until}
