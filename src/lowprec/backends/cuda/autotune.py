"""Which of cuBLASLt's algorithms runs: the one that was measured to be fastest, else the heuristics' first choice.

A measured choice is kept on disk, for one model of GPU, version of the driver and of cuBLAS, and one product with all
that its speed depends on. It replaces the first choice only if it was faster twice: among all candidates, and in a
second contest of the two.
"""

from __future__ import annotations

import contextlib
import functools
import statistics
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

from lowprec.arrays import Device
from lowprec.backends.cuda import bindings, disk, memory, runtime
from lowprec.backends.cuda.bindings import Algorithm
from lowprec.backends.cuda.invocation import Invocation, Operands
from lowprec.errors import LowprecError
from lowprec.planning.calls import LtMatrix
from lowprec.policy import environment

#: How many algorithms are tried unless the caller says otherwise.
CANDIDATES = 32

_FILE = "autotune.json"
_FORMAT = 1

#: Rounds of the contest of all candidates, and of the contest of the best with the first choice.
_ROUNDS, _FINAL_ROUNDS = 5, 15
#: One measurement lasts at least this long, so that the resolution of events (half a microsecond) does not matter.
_MEASUREMENT_MS = 0.2
_MAX_REPEATS = 200
#: What must be gained to give the first choice up.
_MARGIN = 0.01


class Measured(NamedTuple):
    """One algorithm in the contest; ``rank`` is its place in the heuristics' order, from 0."""

    rank: int
    algorithm: Algorithm
    median_ms: float


def choose(
    invocation: Invocation, handle: int, stream: int, operands: Operands
) -> Algorithm | None:
    """Return the algorithm for a product: a measured one, else the heuristics' first choice; None if there is none."""
    wish = environment.autotune()
    if wish is not False:
        known = _known(invocation, handle)
        if known is not None:
            return known
    if wish and operands.d and not runtime.is_capturing(stream):
        results = tune(invocation, handle, stream, operands)
        if results:
            return results[0].algorithm
        # Where none of them runs, the first choice tells why.
    found = invocation.search(handle, 1)
    return found[0] if found else None


def tune(
    invocation: Invocation,
    handle: int,
    stream: int,
    operands: Operands,
    *,
    candidates: int = CANDIDATES,
    progress: Callable[[int, int], None] | None = None,
) -> tuple[Measured, ...]:
    """Measure the algorithms of a product, keep the choice on disk, and return all, the chosen one first.

    The operands are read, and the result goes to temporary memory, so nothing of the caller's is written. The stream is
    waited for. ``progress`` gets the number of measurements done and that of all.
    """
    found = invocation.search(handle, candidates)
    if not found:
        return ()
    device = Device(2, runtime.current_device())
    block = memory.allocate(_span_bytes(invocation), device, stream)
    d = block.address
    operands = operands._replace(d=d, c=operands.c if operands.beta else d)
    with _timing_event() as start, _timing_event() as end:
        contest = _Contest(invocation, handle, stream, operands, start, end)
        results = contest.results(found, progress or (lambda done, total: None))
    if results:
        _remember(invocation, results[0], results)
    return results


@contextlib.contextmanager
def _timing_event() -> Iterator[Any]:
    event = runtime.create_event(timing=True)
    try:
        yield event
    finally:
        runtime.destroy_event(event)


@dataclass(frozen=True, slots=True)
class _Contest:
    """Measures algorithms of one product by turns, by two events."""

    invocation: Invocation
    handle: int
    stream: int
    operands: Operands
    start: Any
    end: Any

    def results(
        self, found: tuple[Algorithm, ...], progress: Callable[[int, int], None]
    ) -> tuple[Measured, ...]:
        """Return the algorithms that run, the chosen one first and the others by their time."""
        total = len(found) * _ROUNDS + 2 * _FINAL_ROUNDS
        times: list[list[float]] = [[] for _ in found]
        repeats = [self._repeats(algorithm) for algorithm in found]
        for turn in range(_ROUNDS):
            for rank, algorithm in enumerate(found):
                if repeats[rank]:
                    times[rank].append(self._measure(algorithm, repeats[rank]))
                progress(turn * len(found) + rank + 1, total)
        measured = [
            Measured(rank, algorithm, statistics.median(times[rank]))
            for rank, algorithm in enumerate(found)
            if times[rank]
        ]
        if not measured:
            return ()
        first = measured[0]
        measured.sort(key=lambda x: x.median_ms)
        best = measured[0]
        if best is not first and not self._confirmed(best, first, repeats):
            best = first
        progress(total, total)
        return (best, *(x for x in measured if x is not best))

    def _confirmed(self, best: Measured, first: Measured, repeats: list[int]) -> bool:
        """Whether the best also wins a contest of two."""
        times: dict[int, list[float]] = {best.rank: [], first.rank: []}
        for _ in range(_FINAL_ROUNDS):
            for entry in (first, best):
                times[entry.rank].append(self._measure(entry.algorithm, repeats[entry.rank]))
        new, old = statistics.median(times[best.rank]), statistics.median(times[first.rank])
        return new < old * (1 - _MARGIN)

    def _repeats(self, algorithm: Algorithm) -> int:
        """Return how often to run an algorithm per measurement; 0 if it does not run after all."""
        try:
            self._measure(algorithm, 1)  # loads the kernel
            once = self._measure(algorithm, 1)
        except LowprecError:
            return 0
        return max(1, min(_MAX_REPEATS, round(_MEASUREMENT_MS / max(once, 1e-3))))

    def _measure(self, algorithm: Algorithm, repeats: int) -> float:
        """Return the milliseconds of one product."""
        self.invocation.use(algorithm)
        runtime.record_event(self.start, self.stream)
        for _ in range(repeats):
            self.invocation.run(self.handle, self.stream, self.operands)
        runtime.record_event(self.end, self.stream)
        runtime.synchronize_event(self.end)
        return runtime.elapsed_ms(self.start, self.end) / repeats


def _span_bytes(invocation: Invocation) -> int:
    """Return the bytes from the first element of D to the last."""
    d, call = invocation.call.d, invocation.call
    furthest = max(offset[3] for offset in call.offsets) + (call.batch_count - 1) * d.batch_stride
    return (furthest + (d.cols - 1) * d.leading_dimension + d.rows) * d.dtype.itemsize


# -- the cache ------------------------------------------------------------------------------------

#: A signal handler may tune a product while its own thread keeps the choice for another one.
_lock = threading.RLock()


def product_key(invocation: Invocation) -> str:
    """Return all that the speed of a product depends on, the device left out, as one line."""
    call = invocation.call
    matrices = [call.first, call.second, *([call.c] if call.c else []), call.d]
    words = [
        str(call.compute_type),
        call.op_first + call.op_second,
        *map(_matrix_key, matrices),
        f"batch {call.batch_count}",
        call.epilogue,
        f"alignment {invocation.alignment_bytes}",
        f"workspace {invocation.workspace_bytes}",
    ]
    return ", ".join(words)


def _matrix_key(x: LtMatrix) -> str:
    return f"{x.dtype} {x.rows}x{x.cols} ld {x.leading_dimension} stride {x.batch_stride}"


def device_key() -> str:
    """Return the current device, the driver and cuBLAS, as one line."""
    found = runtime.properties(runtime.current_device())
    major, minor = found.capability
    driver_major, driver_minor = runtime.driver_version()
    return (
        f"{found.name}, compute capability {major}.{minor}, {found.multiprocessors} multiprocessors, "
        f"driver CUDA {driver_major}.{driver_minor}, cuBLAS {bindings.cublas_version()}"
    )


@functools.cache
def _stored() -> dict[str, dict[str, Any]]:
    """Return the choices on disk by device and product, read once; what is of another form counts as nothing."""
    read = disk.read_json(_FILE)
    devices = read.get("devices") if read.get("format") == _FORMAT else None
    if not isinstance(devices, dict):
        return {}
    choices = {
        device: {product: entry for product, entry in products.items() if _is_choice(entry)}
        for device, products in devices.items()
        if isinstance(products, dict)
    }
    return {device: found for device, found in choices.items() if found}


def _is_choice(entry: Any) -> bool:
    """Whether an entry is plain values, and names an algorithm."""
    return (
        isinstance(entry, dict)
        and isinstance(entry.get("algorithm"), str)
        and not any(isinstance(value, (dict, list)) for value in entry.values())
    )


def _known(invocation: Invocation, handle: int) -> Algorithm | None:
    """Return the measured choice for a product, if cuBLASLt still takes it."""
    stored = _stored()
    if not stored:
        return None
    entry = stored.get(device_key(), {}).get(product_key(invocation))
    if entry is None:
        return None
    try:
        data = bytes.fromhex(entry["algorithm"])
    except ValueError:
        return None
    found = bindings.check_algorithm(handle, invocation.descriptors, data)
    if found is None or found.workspace_bytes > invocation.workspace_bytes:
        return None
    return found


def _remember(invocation: Invocation, best: Measured, results: tuple[Measured, ...]) -> None:
    """Keep a choice, in this process and on disk; other processes' choices are kept, too."""
    first = min(results, key=lambda x: x.rank)
    entry = {
        "algorithm": best.algorithm.data.hex(),
        "rank": best.rank,
        "candidates": len(results),
        "time_over_first_choice": best.median_ms / first.median_ms,
    }
    with _lock:
        stored = _stored()
        stored.setdefault(device_key(), {})[product_key(invocation)] = entry
        _stored.cache_clear()
        on_disk = _stored()
        for device, entries in stored.items():
            on_disk.setdefault(device, {}).update(entries)
        disk.write_json(_FILE, {"format": _FORMAT, "devices": on_disk})


def forget() -> None:
    """Read the disk anew at the next product."""
    _stored.cache_clear()
