"""All variants of the kernels, compiled by several processes into the cache that the other parts and the tests read."""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from types import ModuleType, SimpleNamespace
from typing import Any

from gpu.parts import Options, Part, short

#: NVRTC takes 0.2 to 0.4 s of a core for a variant.
_MOST_PROCESSES = 16
#: Variants in one task of a process.
_BATCH = 8


def fill(arch: str, variants: Sequence[Any]) -> list[str]:
    """Compile variants that are not in the cache; return the errors. No device is used."""
    from lowprec.backends.cuda import compiling, libraries

    real = importlib.import_module("cuda.core")
    core = ModuleType(real.__name__)
    vars(core).update(
        __version__=real.__version__, Program=real.Program, ProgramOptions=real.ProgramOptions
    )
    # Loading needs a context, and the parts that use a kernel load it.
    loaded = SimpleNamespace(get_kernel=lambda _: None)
    vars(core)["ObjectCode"] = SimpleNamespace(from_cubin=lambda _: loaded)
    before = libraries.use(SimpleNamespace(core=core))
    errors = []
    try:
        for variant in variants:
            try:
                compiling._load.__wrapped__(arch, variant.name, variant.source)
            except Exception as error:  # noqa: BLE001 - the others are compiled all the same
                errors.append(f"{variant}: {short(error)}")
    finally:
        libraries.use(before)
    return errors


def fill_in_processes(
    part: Part, arch: str, variants: Sequence[Any], processes: int, deadline: float
) -> None:
    """Share the variants among processes; a variant that is not compiled is a row."""
    part.fact("processes", processes)
    part.fact("variants", len(variants))
    begin, done = time.monotonic(), 0
    batches = [variants[i : i + _BATCH] for i in range(0, len(variants), _BATCH)]
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        pending = {pool.submit(fill, arch, batch): len(batch) for batch in batches}
        for future in as_completed(pending):
            errors = future.result()
            done += pending[future] - len(errors)
            for error in errors:
                part.row(ok=False, error=error)
            if time.monotonic() > deadline:
                part.fact("stopped_at", done)
                pool.shutdown(wait=False, cancel_futures=True)
                break
    part.row(ok=done > 0, compiled=done, seconds=round(time.monotonic() - begin, 2))


def compiling(part: Part, options: Options) -> None:
    from lowprec.backends.cuda import runtime
    from support.kernel_variants import every_variant

    major, minor = runtime.properties(0).capability
    variants = every_variant()
    chosen = variants[::64] if options.quick else variants
    processes = min(_MOST_PROCESSES, os.cpu_count() or 1)
    fill_in_processes(part, f"sm_{major}{minor}", chosen, processes, options.deadline)
