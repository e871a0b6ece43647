"""Selection of cuBLASLt's algorithms: the fastest measured one, or the heuristics' choices in their order.

Measured choices are cached on disk by GPU model, versions of driver and cuBLAS, and product. An algorithm replaces the
first choice only if it wins two measurements: among all candidates, and then against the first choice alone.
"""

from __future__ import annotations

import contextlib
import functools
from typing import Any

from lowprec.backends import disk
from lowprec.backends.cuda import bindings, runtime
from lowprec.backends.cuda.bindings import Algorithm
from lowprec.backends.cuda.invocation import Invocation, Operands
from lowprec.backends.cuda.measuring import Contest, Measured, NoneRunsError, Progress, rotated
from lowprec.policy.variables import AUTOTUNE
from lowprec.util.lock import locked

#: Default number of algorithms that are measured, and of those that are tried until one runs.
CANDIDATES, _CHOICES = 32, 8

_FILE = "autotune.json"
_FORMAT = 1


def choose(invocation: Invocation, handle: int, stream: int, operands: Operands) -> list[Algorithm]:
    """Return the algorithms to try for a product, a measured one first; empty if there is none."""
    setting = AUTOTUNE.current()
    known = None if setting is False else _known(invocation, handle)
    found = list(invocation.search(handle, _CHOICES))
    if known is not None:
        return [known, *(x for x in found if x != known)]
    if found and setting and operands.d and not runtime.is_capturing(stream):
        with contextlib.suppress(NoneRunsError):
            return [x.algorithm for x in tune(invocation, handle, stream, operands)]
    return found


def tune(
    invocation: Invocation,
    handle: int,
    stream: int,
    operands: Operands,
    candidates: int = CANDIDATES,
    progress: Progress | None = None,
) -> tuple[Measured, ...]:
    """Measure the algorithms of a product, store the choice on disk, and return all, the chosen one first.

    The stream is synchronised; ``operands`` are not written. Raises NoneRunsError if none runs.
    """
    found = invocation.search(handle, candidates)
    with rotated(invocation, operands, runtime.current_device(), stream) as turns:
        results = Contest(invocation, handle, stream, turns).results(found, progress)
    locked(_remember, invocation, results)
    return results


def product_key(invocation: Invocation) -> str:
    """Return the properties that determine the speed of a product on a device, as one line."""
    call = invocation.call
    matrices = (call.first, call.second, *([call.c] if call.c else []), call.d)
    words = [
        str(call.compute_type),
        call.op_first + call.op_second,
        *(f"{x.elements} {x.rows}x{x.cols} ld {x.leading_dimension} stride {x.batch_stride}" for x in matrices),
        f"batch {call.batch_count}",
        call.epilogue,
        f"alignment {invocation.alignment_bytes}",
        f"workspace {invocation.workspace_bytes}",
        *(["scales"] if invocation.has_scales else []),
    ]  # fmt: skip
    return ", ".join(words)


def device_key() -> str:
    """Return the current device, the driver and cuBLAS, as one line."""
    found = runtime.properties(runtime.current_device())
    major, minor = found.capability
    return (
        f"{found.name}, compute capability {major}.{minor}, {found.multiprocessors} multiprocessors, "
        f"driver CUDA {runtime.driver_version()}, cuBLAS {bindings.cublas_version()}"
    )


@functools.cache
def _stored() -> dict[str, dict[str, Any]]:
    """Return the choices on disk by device and product, read once; invalid contents are ignored."""
    read = disk.read_json(_FILE)
    devices = read.get("devices") if read.get("format") == _FORMAT else None
    choices = devices if isinstance(devices, dict) else {}
    return {device: found for device, found in choices.items() if found and isinstance(found, dict)}


def _known(invocation: Invocation, handle: int) -> Algorithm | None:
    """Return the measured choice for a product, if cuBLASLt still supports it."""
    stored = _stored()
    if not stored:
        return None
    try:
        data = bytes.fromhex(stored[device_key()][product_key(invocation)]["algorithm"])
    except (KeyError, TypeError, ValueError):  # missing or damaged
        return None
    found = bindings.check_algorithm(handle, invocation.descriptors, data)
    return found if found and found.workspace_bytes <= invocation.workspace_bytes else None


def _remember(invocation: Invocation, results: tuple[Measured, ...]) -> None:
    """Store a choice in this process and on disk, keeping those of other processes."""
    best, first = results[0], min(results, key=lambda x: x.rank)
    entry = {
        "algorithm": best.algorithm.data.hex(),
        "rank": best.rank,
        "candidates": len(results),
        "time_over_first_choice": best.median_ms / first.median_ms,
    }
    stored = _stored()
    stored.setdefault(device_key(), {})[product_key(invocation)] = entry
    _stored.cache_clear()
    on_disk = _stored()
    for device, entries in stored.items():
        on_disk.setdefault(device, {}).update(entries)
    disk.write_json(_FILE, {"format": _FORMAT, "devices": on_disk})
