"""Division of gradients by a loss scale and detection of Inf and NaN in one pass, with a kernel per element type."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np

from lowprec.backends.cuda import runtime
from lowprec.backends.cuda.compiling import ELEMENT, THREADS, Launch, pick_blocks
from lowprec.backends.cuda.libraries import cached, libraries
from lowprec.errors import BackendError, DeviceError
from lowprec.formats import DType

#: Elements per chunk of a block.
_CHUNK = 1 << 14


class Run(NamedTuple):
    """Contiguous elements: their address, the address of the result (may be the same), and their number."""

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
    runs: Mapping[DType, Sequence[Run]], inverse: float, device: int, stream: int, upload: Callable[[Any], Any]
) -> Any:
    """Queue a kernel per element type; return a device array whose first number is 1 if Inf or NaN is found.

    Elements (float32, float64 or bfloat16) are multiplied by ``inverse``. ``upload`` copies int64 numbers to a CuPy
    array on the stream. The returned array must be kept alive until the kernels are done.
    """
    numbers = [0]
    begins, totals = [], []
    for members in runs.values():
        firsts = list(accumulate((-(-run.length // _CHUNK) for run in members), initial=0))
        begins.append(len(numbers))
        totals.append(firsts[-1])
        numbers += [len(members), totals[-1]]
        for run, first in zip(members, firsts, strict=False):
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
    return Launch("unscale", "unscale.cu", definitions, device, blocks, (THREADS,), 2, (), 1)
