"""Gradients divided by a loss scale, with the look for Inf and NaN in the same pass: one kernel for all of a type."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from lowprec.backends.cuda import runtime
from lowprec.backends.cuda.compiling import ELEMENT, Launch, pick_blocks
from lowprec.backends.cuda.libraries import cached, libraries
from lowprec.errors import BackendError, DeviceError
from lowprec.formats import DType

_THREADS = 256
#: Elements that a block takes at a time.
_CHUNK = 1 << 14


class Run(NamedTuple):
    """Elements without gaps: where they are read, where they are written (there, or elsewhere), how many."""

    source: int
    target: int
    length: int


def is_usable() -> bool:
    """Whether kernels can be compiled and launched."""
    try:
        libraries()
    except (BackendError, DeviceError):
        return False
    return True


def unscale(
    runs: Mapping[DType, Sequence[Run]],
    inverse: float,
    device: int,
    stream: int,
    upload: Callable[[Any], Any],
) -> Any:
    """Queue a kernel for each element type; return an array on the device, whose first number tells what was found.

    Elements, float32, float64 or bfloat16, are multiplied by ``inverse``. ``upload`` returns a CuPy array of these
    int64 in the device's memory, copied in the order of the stream. The first number of the array that is returned
    becomes 1 where an element was Inf or NaN; it must live until the kernels are done.
    """
    numbers = [0]
    begins, totals = [], []
    for members in runs.values():
        chunks = [-(-run.length // _CHUNK) for run in members]
        firsts = itertools.accumulate(chunks[:-1], initial=0)
        begins.append(len(numbers))
        totals.append(sum(chunks))
        numbers += [len(members), totals[-1]]
        for run, first in zip(members, firsts, strict=True):
            numbers += [*run, first]
    with runtime.on_device(device):
        table = upload(np.array(numbers, np.int64))
        found = table.data.ptr
        for dtype, begin, total in zip(runs, begins, totals, strict=True):
            launch = _launch(dtype, pick_blocks(total, device), device)
            launch(stream, found + 8 * begin, found, inverse)
    return table


@cached
def _launch(dtype: DType, blocks: int, device: int) -> Launch:
    definitions: dict[str, str | int] = {"ELEMENT": ELEMENT[dtype], "CHUNK": _CHUNK}
    return Launch("unscale", "unscale.cu", definitions, device, blocks, (_THREADS,), 2, (), 1)
