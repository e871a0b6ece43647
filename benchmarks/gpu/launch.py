"""Whether `cuLaunchKernel` takes a `CUkernel` as a `CUfunction`, as lowprec passes it."""

from __future__ import annotations

import numpy as np

from gpu import raw
from gpu.parts import Options, Part
from lowprec.backends.cuda import compiling, runtime
from lowprec.backends.cuda.libraries import libraries

_NAMES = ("the CUkernel itself", "the result of cuKernelGetFunction")


def _launched(name: str) -> bool:
    """Round the numbers of one run by the kernel `pack_elements`, and return whether they are right."""
    macros = dict.fromkeys(("PAIRS", "ROTATED", "SCALED", "SUMMED", "TF32"), 0) | {
        "SOURCE": "float", "TARGET": "Half", "PARTS": 1, "PART_FACTOR": 1, "KERNEL_pack_elements": 1,
    }  # fmt: skip
    numbers = np.arange(64, dtype=np.float32)
    constants = (1, 64, 64, 1, 1, 64, 64, 64, 64, 1, 1, 1, 0, 0, 0)
    launch = compiling.Launch("pack_elements", "pack.cu", macros, 0, 1, (64,), 2, constants)
    launch._load()
    if name != _NAMES[0]:
        driver = libraries().driver
        status, launch._function = driver.cuKernelGetFunction(driver.CUkernel(int(launch._kernel.handle)))
        if status != 0:
            raise RuntimeError(status.name)
    target = raw.upload(np.zeros(64, np.float16))
    launch(raw.STREAM, raw.upload(numbers), target)
    runtime.call("cudaStreamSynchronize", raw.STREAM)
    return bool(np.array_equal(raw.download(target, (64,), np.float16), numbers))


def run(part: Part, options: Options) -> None:
    """Launch a kernel both ways; the second is what remains if the first fails."""
    for name in _NAMES:
        with part.attempt(ok=False if name == _NAMES[0] else None, handle=name):
            part.row(ok=_launched(name), handle=name)
