"""Selection of cuBLASLt's algorithms: the fastest measured one, or the heuristics' choices in their order.

Measured choices are cached on disk by GPU model, versions of driver and cuBLAS, and product. An algorithm replaces the
first choice only if it wins two measurements: among all candidates, and then against the first choice alone.

The host takes microseconds to queue a product, during which a short product would leave the device idle. So each
measurement is queued behind a kernel that spins for twice the host's time, and repeated if that was too short. To keep
operands out of the L2 cache, the runs rotate over copies that are together larger than the cache.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, TypeAlias

from lowprec.backends import disk
from lowprec.backends.cuda import bindings, memory, runtime
from lowprec.backends.cuda.bindings import Algorithm
from lowprec.backends.cuda.compiling import Launch
from lowprec.backends.cuda.invocation import ALIGNMENT_BYTES, Invocation, LtOperands, byte_offsets
from lowprec.backends.cuda.libraries import libraries
from lowprec.backends.cuda.runtime import call
from lowprec.errors import BackendError, DeviceMemoryError, LowprecError
from lowprec.util.lock import locked

#: Number of algorithms that are tried until one runs.
_CHOICES = 8

_FILE = "autotune.json"


def choose(invocation: Invocation, handle: int) -> list[Algorithm]:
    """Return the algorithms to try for a product, a measured one first; empty if there is none."""
    choices = (_known(invocation, handle), *invocation.search(handle, _CHOICES))
    return [x for x in choices if x is not None]


def tune(
    invocation: Invocation,
    handle: int,
    stream: int,
    operands: LtOperands,
    candidates: int,
    progress: Progress | None,
) -> tuple[Measured, ...]:
    """Measure the algorithms of a product, store the choice on disk, and return all, the chosen one first.

    The stream is synchronised; ``operands`` are not written.
    """
    algorithms = invocation.search(handle, candidates)
    with rotated(invocation, operands, runtime.current_device(), stream) as turns:
        results = Contest(invocation, handle, stream, turns).results(algorithms, progress)
    locked(_remember, invocation, results[0].algorithm)
    return results


def product_key(invocation: Invocation) -> str:
    """Return the properties that determine the speed of a product on a device, as one line."""
    call = invocation.call
    matrices = filter(None, (call.first, call.second, call.c, call.d))
    words = [
        str(call.compute_type),
        call.op_first + call.op_second,
        *(
            f"{x.elements} {x.rows}x{x.cols} ld {x.leading_dimension} stride {x.batch_stride}"
            for x in matrices
        ),
        f"batch {call.batch_count}",
        call.epilogue,
        f"alignment {invocation.alignment_bytes}",
        f"workspace {invocation.workspace_bytes}",
    ]
    if invocation.has_scales:
        words += ["scales", *filter(None, call.scale_modes)]
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
    try:
        choice = _stored()[device_key()][product_key(invocation)]
        data = bytes.fromhex(choice["algorithm"])
    except (KeyError, TypeError, ValueError):  # missing or damaged
        return None
    algorithm = bindings.check_algorithm(handle, invocation.pointers, data)
    if algorithm is None or algorithm.workspace_bytes > invocation.workspace_bytes:
        return None
    return algorithm


def _remember(invocation: Invocation, algorithm: Algorithm) -> None:
    """Store a choice in this process and on disk, keeping those of other processes."""
    ours = _stored()
    of_device = ours.setdefault(device_key(), {})
    of_device[product_key(invocation)] = {"algorithm": algorithm.data.hex()}
    _stored.cache_clear()
    stored = _stored()
    for device, choices in ours.items():
        stored.setdefault(device, {}).update(choices)
    text = json.dumps({"devices": stored}, indent=1, sort_keys=True)
    disk.write(_FILE, text.encode())


#: Unused events by runtime module, which tests replace, and device.
_idle: dict[tuple[Any, int], list[Any]] = {}


class EventStopwatch:
    """Two events around a product, the first recorded now; a product captured into a CUDA graph has no time."""

    def __init__(self, device: int, stream: int) -> None:
        self._idle = _idle.setdefault((libraries().runtime, device), [])
        self._events: list[Any] = []
        self._device = device
        self.stream = stream
        if not runtime.is_capturing(stream):
            self._record()

    def _record(self) -> None:
        # The current device may not be the array's, and stream 1 is the default stream of the current device.
        with runtime.on_device(self._device):
            try:
                event = self._idle.pop()
            except IndexError:
                event = runtime.create_event(timing=True)
            self._events.append(event)
            call("cudaEventRecord", event, self.stream)

    def stop(self) -> None:
        if self._events:
            self._record()

    def abandon(self) -> None:
        events = self._events
        self._events = []
        self._idle.extend(events)

    def has_begun(self) -> bool:
        with runtime.relaxed_capture():
            return runtime.event_is_done(self._events[0])

    def elapsed_ms(self) -> float | None:
        """Wait for the product and return its time; None if there is none."""
        if len(self._events) < 2:
            return None
        start, end = self._events
        runtime.wait_for_event(end)
        return float(call("cudaEventElapsedTime", start, end))

    __del__ = abandon


#: Rounds with all candidates, and with the fastest and the first choice.
_ROUNDS = 5
_FINAL_ROUNDS = 15
#: Shortest measurement, long enough for the resolution of events (half a microsecond).
_MEASUREMENT_MS = 0.2
_MAX_REPEATS = 200
#: Least relative gain over the first choice.
_MARGIN = 0.01

#: Initial estimate of the host's time per product; factors of the spinning time in each attempt; longest spin.
_HOST_MS = 0.01
_LONGER = (2, 4, 8)
_MOST_SPIN_MS = 20.0
#: Total size of the copies of the operands, in sizes of the L2 cache.
_CACHES = 2

#: Called with the number of finished measurements and their total number.
Progress: TypeAlias = Callable[[int, int], None]


@dataclass
class Measured:
    """One measured algorithm; ``rank`` is its index in the heuristics' order."""

    rank: int
    algorithm: Algorithm
    repeats: int = 1  # products per measurement
    times_ms: list[float] = field(default_factory=list)

    @property
    def median_ms(self) -> float:
        return statistics.median(self.times_ms)


class Contest:
    """Measures algorithms of one product in turns; ``turns`` yields the operands of each run."""

    def __init__(
        self, invocation: Invocation, handle: int, stream: int, turns: Iterator[LtOperands]
    ) -> None:
        self._invocation = invocation
        self._handle = handle
        self._stream = stream
        self._turns = turns
        self._device = runtime.current_device()
        self._spin = Launch("spin", "spin.cu", {}, self._device, 1, (1,), "Q", ())

    def results(
        self, algorithms: tuple[Algorithm, ...], progress: Progress | None
    ) -> tuple[Measured, ...]:
        """Return the algorithms that run, the chosen one first; raise BackendError if none runs."""
        # compile the kernel here, so that an error is not attributed to a candidate
        self._spin(self._stream, 0)
        candidates: list[Measured] = []
        failure: LowprecError | None = None
        for rank, algorithm in enumerate(algorithms):
            candidate = Measured(rank, algorithm)
            try:
                self._attempt(candidate, 0)  # load the kernel
                self._host_ms = _HOST_MS
                once = self._measure(candidate)
            except LowprecError as error:
                # raises the error of a lost device, on which no other one runs
                runtime.is_capturing(self._stream)
                failure = failure or error
                continue
            repeats = round(_MEASUREMENT_MS / max(once, 1e-3))
            candidate.repeats = max(1, min(_MAX_REPEATS, repeats))
            candidates.append(candidate)
        if not candidates:
            raise BackendError(f"none of the measured algorithms runs: {failure}") from failure
        total = len(candidates) * _ROUNDS + 2 * _FINAL_ROUNDS
        for done, candidate in enumerate(candidates * _ROUNDS, 1):
            candidate.times_ms.append(self._measure(candidate))
            if progress:
                progress(done, total)
        first = candidates[0]
        candidates.sort(key=lambda x: x.median_ms)
        if candidates[0] is not first and not self._wins(candidates[0], first):
            candidates.sort(key=lambda x: x is not first)
        if progress:
            progress(total, total)
        return tuple(candidates)

    def _wins(self, best: Measured, first: Measured) -> bool:
        """Whether the best algorithm also wins a second comparison with the first choice."""
        old = []
        new = []
        for _ in range(_FINAL_ROUNDS):
            old.append(self._measure(first))
            new.append(self._measure(best))
        limit = statistics.median(old) * (1 - _MARGIN)
        return bool(statistics.median(new) < limit)

    def _measure(self, candidate: Measured) -> float:
        for longer in _LONGER:
            spin_ms = min(longer * self._host_ms * candidate.repeats, _MOST_SPIN_MS)
            elapsed_ms, waited_for_the_host = self._attempt(candidate, spin_ms)
            if not waited_for_the_host or spin_ms == _MOST_SPIN_MS:
                break
        return elapsed_ms / candidate.repeats

    def _attempt(self, candidate: Measured, spin_ms: float) -> tuple[float, bool]:
        """Wait for one measurement; return its milliseconds, and whether the device waited for the host."""
        self._invocation.use(candidate.algorithm)
        begin = perf_counter()
        clock_khz = runtime.properties(self._device).clock_khz
        self._spin(self._stream, int(spin_ms * clock_khz))
        watch = EventStopwatch(self._device, self._stream)
        for operands in itertools.islice(self._turns, candidate.repeats):
            self._invocation.run(self._handle, self._stream, operands)
        watch.stop()
        waited_for_the_host = watch.has_begun()
        self._host_ms = (perf_counter() - begin) * 1e3 / candidate.repeats
        return watch.elapsed_ms() or 0.0, waited_for_the_host


#: Offset of an address from the start of a set of copies, that of the first byte from the address, and bytes.
_Copy: TypeAlias = tuple[int, int, int]


@contextlib.contextmanager
def rotated(
    invocation: Invocation, operands: LtOperands, device: int, stream: int
) -> Iterator[Iterator[LtOperands]]:
    """Yield an iterator over copies of ``operands`` with the same alignment; only D if they exceed cache or memory."""
    read = ["first", "second"]
    if operands.beta:
        read.append("c")
    layout, nbytes = _set_layout(invocation, operands, [*read, "d"])
    count = -(-_CACHES * runtime.attribute("cudaDevAttrL2CacheSize", device) // nbytes)
    block = None
    if count > 1:
        with contextlib.suppress(DeviceMemoryError):
            block = memory.temporary(count * nbytes, device, stream)
    if block is None:
        count = 1
        read = []
        layout, nbytes = _set_layout(invocation, operands, ["d"])
        block = memory.temporary(nbytes, device, stream)
    with block as first:
        starts = [first + i * nbytes for i in range(count)]
        for start, name in itertools.product(starts, read):
            pointer, lowest, size = layout[name]
            source = getattr(operands, name) + lowest
            runtime.copy_async(start + pointer + lowest, source, size, stream)

        def moved(start: int) -> LtOperands:
            pointers = {name: start + pointer for name, (pointer, _, _) in layout.items()}
            if not operands.beta:
                pointers["c"] = pointers["d"]
            return operands._replace(**pointers)

        yield map(moved, itertools.cycle(starts))


def _set_layout(
    invocation: Invocation, operands: LtOperands, names: list[str]
) -> tuple[dict[str, _Copy], int]:
    """Return the layout of a set of copies of these operands, and its size."""
    call = invocation.call
    layout = {}
    nbytes = 0
    matrices = (call.first, call.second, call.c or call.d, call.d)
    columns = zip(*byte_offsets(call), strict=True)
    for name, x, offsets in zip(LtOperands._fields, matrices, columns, strict=False):
        if name in names:
            last = (x.cols - 1) * x.leading_dimension + x.rows
            last += (call.batch_count - 1) * x.batch_stride
            lowest = min(offsets)  # may be negative
            end = max(offsets) + x.nbytes(last)
            pointer = nbytes - lowest + (getattr(operands, name) + lowest) % ALIGNMENT_BYTES
            layout[name] = (pointer, lowest, end - lowest)
            nbytes = -(-(pointer + end) // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    return layout, nbytes
