"""A contest of cuBLASLt's algorithms for one product, by the time that the device needs.

Two things would be measured instead. A short product waits for the host, which queues one in some microseconds: each
measurement is queued behind a kernel that spins for twice the time that the host took before, and made again where that
was too short. And a product whose operands were just used finds them in the L2 cache: each has other copies of them,
together larger than the cache.
"""

from __future__ import annotations

import contextlib
import itertools
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from time import perf_counter
from typing import NamedTuple, TypeAlias

from lowprec.backends.cuda import memory, runtime
from lowprec.backends.cuda.bindings import Algorithm
from lowprec.backends.cuda.compiling import Launch
from lowprec.backends.cuda.invocation import ALIGNMENT_BYTES, Invocation, Operands
from lowprec.backends.cuda.timing import EventStopwatch
from lowprec.errors import DeviceMemoryError, LowprecError

#: Rounds of the contest of all candidates, and of the contest of the best with the first choice.
_ROUNDS, _FINAL_ROUNDS = 5, 15
#: One measurement lasts at least this long, so that the resolution of events (half a microsecond) does not matter.
_MEASUREMENT_MS = 0.2
_MAX_REPEATS = 200
#: What must be gained to give the first choice up.
_MARGIN = 0.01

#: Milliseconds of the host for one product, as long as none is measured; times by which spinning is longer than the
#: host needs, one per attempt; and the longest spin of a measurement.
_HOST_MS = 0.01
_LONGER = (2, 4, 8)
_MOST_SPIN_MS = 20.0
#: Where the driver does not report the clock.
_CLOCK_KHZ = 2_000_000
#: Copies of the operands are together so many times as large as the L2 cache.
_CACHES = 2


#: Gets the number of measurements done, and that of all.
Progress: TypeAlias = Callable[[int, int], None]


@dataclass(slots=True)
class Measured:
    """One algorithm in the contest; ``rank`` is its place in the heuristics' order, from 0."""

    rank: int
    algorithm: Algorithm
    #: How often it runs per measurement.
    repeats: int = 1
    times_ms: list[float] = field(default_factory=list)

    @property
    def median_ms(self) -> float:
        """Of the milliseconds of one product."""
        return statistics.median(self.times_ms)


class Contest:
    """Measures algorithms of one product by turns; ``turns`` has the operands of each run."""

    def __init__(
        self, invocation: Invocation, handle: int, stream: int, turns: Iterator[Operands]
    ) -> None:
        self._invocation, self._handle, self._stream = invocation, handle, stream
        self._turns = turns
        self._device = runtime.current_device()
        self._spin = Launch("spin", "spin.cu", {}, self._device, 1, (1,), 1, ())
        self._clock_khz = runtime.properties(self._device).clock_khz or _CLOCK_KHZ
        self._host_ms = _HOST_MS

    def results(
        self, found: tuple[Algorithm, ...], progress: Progress | None
    ) -> tuple[Measured, ...]:
        """Return the algorithms that run, the chosen one first and the others by their time.

        Where none runs, the first one's error is raised.
        """
        self._spin(self._stream, 0)  # which compiles it: what cannot be is no candidate's failure
        candidates: list[Measured] = []
        errors: list[LowprecError] = []
        for rank, algorithm in enumerate(found):
            candidate = Measured(rank, algorithm)
            try:
                self._attempt(candidate, 0)  # loads the kernel, and waits for it
                self._host_ms = _HOST_MS
                once = self._measure(candidate)
            except LowprecError as error:
                errors.append(error)
                continue
            candidate.repeats = max(1, min(_MAX_REPEATS, round(_MEASUREMENT_MS / max(once, 1e-3))))
            candidates.append(candidate)
        if not candidates:
            raise errors[0]
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
        """Whether the best also wins a contest of two."""
        times = [(self._measure(first), self._measure(best)) for _ in range(_FINAL_ROUNDS)]
        old, new = (statistics.median(x) for x in zip(*times, strict=True))
        return bool(new < old * (1 - _MARGIN))

    def _measure(self, candidate: Measured) -> float:
        """Return the milliseconds of one product."""
        for longer in _LONGER:
            spin_ms = min(longer * self._host_ms * candidate.repeats, _MOST_SPIN_MS)
            elapsed_ms, waited_for_the_host = self._attempt(candidate, spin_ms)
            if not waited_for_the_host or spin_ms == _MOST_SPIN_MS:
                break
        return elapsed_ms / candidate.repeats

    def _attempt(self, candidate: Measured, spin_ms: float) -> tuple[float, bool]:
        """Return the milliseconds of all repeats, and whether the device waited for the host; the work is done then."""
        self._invocation.use(candidate.algorithm)
        begin = perf_counter()
        self._spin(self._stream, int(spin_ms * self._clock_khz))
        watch = EventStopwatch(self._device, self._stream)
        for operands in itertools.islice(self._turns, candidate.repeats):
            self._invocation.run(self._handle, self._stream, operands)
        watch.stop()
        waited_for_the_host = watch.has_begun
        self._host_ms = (perf_counter() - begin) * 1e3 / candidate.repeats
        return watch.elapsed_ms() or 0.0, waited_for_the_host


# -- operands -------------------------------------------------------------------------------------


class _Place(NamedTuple):
    """Where a copy of an array lies in a set of copies: its pointer, its lowest byte from there, and its bytes."""

    pointer: int
    lowest: int
    nbytes: int


@contextlib.contextmanager
def rotated(
    invocation: Invocation, operands: Operands, device: int, stream: int
) -> Iterator[Iterator[Operands]]:
    """Yield the operands of one product after another, as aligned as ``operands``, which nothing is written to.

    Where one product's arrays exceed the cache anyway, or memory is short, only D is another.
    """
    read = ("first", "second", *(("c",) if operands.beta else ()))
    places, nbytes = _places(invocation, operands, (*read, "d"))
    count = -(-_CACHES * runtime.attribute("cudaDevAttrL2CacheSize", device) // nbytes)
    block = None
    if count > 1:
        with contextlib.suppress(DeviceMemoryError):
            block = memory.temporary(count * nbytes, device, stream)
    if block is None:
        (places, nbytes), count, read = _places(invocation, operands, ("d",)), 1, ()
        block = memory.temporary(nbytes, device, stream)
    with block as first:
        for name in read:
            place, source = places[name], getattr(operands, name)
            start = first + place.pointer + place.lowest
            runtime.copy_async(start, source + place.lowest, place.nbytes, stream)
        done = 1
        while read and done < count:  # twice as many each time
            more = min(done, count - done)
            runtime.copy_async(first + done * nbytes, first, more * nbytes, stream)
            done += more
        starts = itertools.cycle([first + i * nbytes for i in range(count)])
        yield (_moved(operands, places, start) for start in starts)


def _moved(operands: Operands, places: dict[str, _Place], start: int) -> Operands:
    pointers = {name: start + place.pointer for name, place in places.items()}
    return operands._replace(**{"c": pointers["d"], **pointers} if not operands.beta else pointers)


def _places(
    invocation: Invocation, operands: Operands, names: tuple[str, ...]
) -> tuple[dict[str, _Place], int]:
    """Return the places of arrays in a set of copies, and the bytes of a set."""
    call = invocation.call
    matrices = {"first": call.first, "second": call.second, "c": call.c or call.d, "d": call.d}
    places, nbytes = {}, 0
    for name in names:
        x = matrices[name]
        # Calls may begin at negative offsets.
        starts = [offsets[list(matrices).index(name)] for offsets in call.offsets]
        end = max(starts) + (call.batch_count - 1) * x.batch_stride
        end += (x.cols - 1) * x.leading_dimension + x.rows
        lowest, end = min(starts) * x.dtype.itemsize, end * x.dtype.itemsize
        pointer = nbytes - lowest + (getattr(operands, name) + lowest) % ALIGNMENT_BYTES
        places[name] = _Place(pointer, lowest, end - lowest)
        nbytes = -(-(pointer + end) // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    return places, nbytes
