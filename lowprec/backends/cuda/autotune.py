"""Selection of cuBLASLt's algorithms: the fastest measured one, or the heuristics' choices in their order.

Measured choices are cached on disk by GPU model, versions of driver and cuBLAS, and product. An algorithm replaces the
first choice only if it wins two measurements: among all candidates, and then against the first choice alone.
"""

from __future__ import annotations

import functools
import json
from typing import Any

from lowprec.backends import disk
from lowprec.backends.cuda import bindings, runtime
from lowprec.backends.cuda.bindings import Algorithm
from lowprec.backends.cuda.invocation import Invocation, Operands
from lowprec.backends.cuda.measuring import Contest, Measured, Progress, rotated
from lowprec.util.lock import locked

#: Number of algorithms that are tried until one runs.
_CHOICES = 8

_FILE = "autotune.json"


def choose(invocation: Invocation, handle: int) -> list[Algorithm]:
    """Return the algorithms to try for a product, a measured one first; empty if there is none."""
    known = _known(invocation, handle)
    ranked = list(invocation.search(handle, _CHOICES))
    return ranked if known is None else [known, *(x for x in ranked if x != known)]


def tune(
    invocation: Invocation, handle: int, stream: int, operands: Operands, candidates: int, progress: Progress | None
) -> tuple[Measured, ...]:
    """Measure the algorithms of a product, store the choice on disk, and return all, the chosen one first.

    The stream is synchronised; ``operands`` are not written.
    """
    ranked = invocation.search(handle, candidates)
    with rotated(invocation, operands, runtime.current_device(), stream) as turns:
        results = Contest(invocation, handle, stream, turns).results(ranked, progress)
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
    device = runtime.properties(runtime.current_device())
    major, minor = device.capability
    return (
        f"{device.name}, compute capability {major}.{minor}, {device.multiprocessors} multiprocessors, "
        f"driver CUDA {runtime.driver_version()}, cuBLAS {bindings.cublas_version()}"
    )


@functools.cache
def _stored() -> dict[str, dict[str, Any]]:
    """Return the choices on disk by device and product, read once; a damaged file counts as none."""
    try:
        devices = json.loads(disk.read(_FILE) or b"{}")["devices"]
        return {device: dict(choices) for device, choices in devices.items()}
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError):
        return {}


def _known(invocation: Invocation, handle: int) -> Algorithm | None:
    """Return the measured choice for a product, if cuBLASLt still supports it."""
    stored = _stored()
    if not stored:
        return None
    try:
        data = bytes.fromhex(stored[device_key()][product_key(invocation)]["algorithm"])
    except (KeyError, TypeError, ValueError):  # missing or damaged
        return None
    algorithm = bindings.check_algorithm(handle, invocation.descriptors, data)
    return algorithm if algorithm and algorithm.workspace_bytes <= invocation.workspace_bytes else None


def _remember(invocation: Invocation, results: tuple[Measured, ...]) -> None:
    """Store a choice in this process and on disk, keeping those of other processes."""
    best, first = results[0], min(results, key=lambda x: x.rank)
    choice = {
        "algorithm": best.algorithm.data.hex(),
        "rank": best.rank,
        "candidates": len(results),
        "time_over_first_choice": best.median_ms / first.median_ms,
    }
    ours = _stored()
    ours.setdefault(device_key(), {})[product_key(invocation)] = choice
    _stored.cache_clear()
    stored = _stored()
    for device, choices in ours.items():
        stored.setdefault(device, {}).update(choices)
    disk.write(_FILE, json.dumps({"devices": stored}, indent=1, sort_keys=True).encode())
