"""Measuring algorithms: the time of the device alone, with operands that are in no cache."""

import itertools

import numpy as np
import pytest

import lowprec
from lowprec.backends.cuda import autotune, runtime
from software_cuda import machine

A = np.random.default_rng(0).integers(-3, 4, (64, 64)).astype(np.float16)


pytestmark = pytest.mark.usefixtures("cache")


# -- the host -------------------------------------------------------------------------------------


def test_a_slow_host_is_not_measured(software, monkeypatch):
    software.same_speed()
    monkeypatch.setattr(machine, "_HOST_CALL_MS", 0.007)  # and products take 0.02
    x = software.put(A)
    found = lowprec.autotune(x, x).timed
    assert len(found) > 4
    for timed in found:
        # The time between events is a float32.
        assert timed.median_ms == pytest.approx(0.02 + 64**3 / 1e10, abs=1e-3)


def spied(monkeypatch):
    """The cycles of each spinning kernel that is queued."""
    cycles = []

    class Spied(autotune.Launch):
        def __call__(self, stream, *varying):
            cycles.append(int(varying[0]))
            super().__call__(stream, *varying)

    monkeypatch.setattr(autotune, "Launch", Spied)
    return cycles


@pytest.fixture
def simulated_time(software, monkeypatch):
    """The device works while the host queues, and the host's clock is the device's."""
    scheduler = software.software.runtime.scheduler
    scheduler.use("eager")
    monkeypatch.setattr(autotune, "perf_counter", lambda: scheduler.clock_ms / 1e3, raising=False)
    return scheduler


def test_loading_a_kernel_does_not_lengthen_the_spinning(software, simulated_time, monkeypatch):
    software.same_speed()
    software.software.cublas_lt.first_launch_ms = 20.0
    cycles = spied(monkeypatch)
    x = software.put(A)
    found = lowprec.autotune(x, x).timed
    # A measurement makes four calls of the host besides 20 products or fewer, each with a block for its workspace.
    longest_ms = 8 * (4 + 3 * 20) * machine._HOST_CALL_MS
    assert max(cycles) <= longest_ms * 1_980_000
    for timed in found:
        assert timed.median_ms == pytest.approx(0.02 + 64**3 / 1e10, abs=1e-3)


def test_spinning_that_is_over_too_early_is_repeated_for_longer(software, simulated_time, monkeypatch):
    software.software.switches.first_algorithm = False
    cycles, done = spied(monkeypatch), iter([True, True, True, False])
    monkeypatch.setattr(runtime, "event_is_done", lambda event: next(done, False))
    x = software.put(A)
    assert lowprec.autotune(x, x, candidates=1).timed
    compiling, loading, first, second, third, *_ = cycles
    assert (compiling, loading) == (0, 0)
    assert 0 < first < second < third


def test_spinning_has_an_end(software, simulated_time, monkeypatch):
    software.software.switches.first_algorithm = False
    monkeypatch.setattr(machine, "_HOST_CALL_MS", 5.0)
    cycles = spied(monkeypatch)
    monkeypatch.setattr(runtime, "event_is_done", lambda event: True)
    x = software.put(A)
    assert lowprec.autotune(x, x, candidates=1).timed
    assert max(cycles) == autotune._MOST_SPIN_MS * 1_980_000
    assert len(cycles) < 100


# -- the cache ------------------------------------------------------------------------------------


def turns_of(monkeypatch, call, check):
    """Autotune, with a contest that only looks at the operands of its products."""

    class Looks:
        def __init__(self, invocation, handle, stream, turns, *_):
            self.invocation, self.turns = invocation, turns

        def results(self, found, progress):
            check(self.invocation, self.turns)
            return (autotune.Measured(0, found[0], times_ms=[1.0]),)

    monkeypatch.setattr(autotune, "Contest", Looks)
    call()


def bytes_of(software, address, nbytes):
    return software.software.runtime.memory.at(address, nbytes, 0, "test").tobytes()


ARRAYS = {
    "square": (A, A, None),
    "odd addresses": (A[1:, 3:35], A[3:35, 5:], None),
    "backwards": (np.stack([A] * 3)[::-1], np.stack([A] * 3), None),
    "an addend": (A, A, A),
    "the same for every batch": (np.stack([A] * 3), np.broadcast_to(A, (3, 64, 64)), None),
}


@pytest.mark.parametrize("name", ARRAYS)
def test_no_product_reads_cached_operands(software, name, monkeypatch):
    a, b, c = ARRAYS[name]
    x, y = software.put(a), software.put(b)
    out = np.zeros((*a.shape[:-1], b.shape[-1]), a.dtype)
    out = software.put(out[::-1] if a.ndim > 2 else out)
    addend = {} if c is None else {"c": software.put(c), "beta": 2.0}
    given = []
    seen = []

    def check(invocation, turns):
        (before,) = given
        names = [*before._fields[:2], *(["c"] if before.beta else []), "d"]
        places, _ = autotune._set_layout(invocation, before, tuple(names))
        used = set()
        first = next(turns)
        sets = [first, *itertools.takewhile(lambda x: x != first, turns)]
        software.software.drain()
        for operands in sets:
            for field, place in places.items():
                source, copy = getattr(before, field), getattr(operands, field)
                assert copy % 256 == source % 256
                spanned = range(copy + place.lowest, copy + place.lowest + place.nbytes)
                assert used.isdisjoint(spanned)
                used.update(spanned)
                copied = bytes_of(software, spanned.start, place.nbytes)
                if field != "d":
                    assert copied == bytes_of(software, source + place.lowest, place.nbytes)
            assert before.beta or operands.c == operands.d
        seen.append(len(used))

    rotated = autotune.rotated

    def noted(invocation, operands, *rest):
        given.append(operands)
        return rotated(invocation, operands, *rest)

    monkeypatch.setattr(autotune, "rotated", noted)
    turns_of(monkeypatch, lambda: lowprec.autotune(x, y, out=out, **addend), check)
    # A set is rounded up to the alignment of each array.
    assert seen[0] > 2 * runtime.attribute("cudaDevAttrL2CacheSize", 0) * 0.9


@pytest.mark.parametrize("reason", ["large", "too little memory"])
def test_operands_that_are_not_copied(software, reason, monkeypatch):
    if reason == "large":
        monkeypatch.setattr(runtime, "attribute", lambda name, index: 1000)
    else:
        allocate = autotune.memory.temporary

        def only_small(nbytes, *rest):
            if nbytes > 1 << 17:
                raise lowprec.DeviceMemoryError("there is no more")
            return allocate(nbytes, *rest)

        monkeypatch.setattr(autotune.memory, "temporary", only_small)
    x = software.put(A)
    seen = []

    def check(invocation, turns):
        seen.extend(itertools.islice(turns, 3))

    turns_of(monkeypatch, lambda: lowprec.autotune(x, x), check)
    assert {(o.first, o.second) for o in seen} == {(x.address, x.address)}
    assert len({o.d for o in seen}) == 1
    assert seen[0].d != x.address
