"""One small product per element type and mode, through lowprec: its kernel, and its error beside the bound."""

from __future__ import annotations

from collections.abc import Iterator

import lowprec
from gpu import accuracy, libraries, raw
from gpu.parts import Options, Part

_SIDE, _INNER = 64, 128


def cases() -> Iterator[accuracy.Case]:
    """Yield the cases of the part `accuracy` with normal numbers, and the emulation of 64 bits."""
    yield from (case for case in accuracy.cases((_INNER,)) if case.distribution == "normal")
    for dtype in ("float64", "complex128"):
        yield accuracy.Case((dtype, dtype), "normal", _INNER, "fp64_emulated")


def run(part: Part, options: Options) -> None:
    """Check all of them."""
    arrays = libraries.TorchArrays()
    for case in part.one_by_one(cases(), options, raw.is_broken):
        part.row(**accuracy.check(lowprec, arrays, case, _SIDE, options.seed))
