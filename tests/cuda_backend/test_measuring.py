"""Measuring algorithms: the time of the device alone, with operands that are in no cache."""

import itertools
from types import SimpleNamespace

import numpy as np
import pytest

import lowprec
from cuda_backend.device_fixture import SoftwareArray, span
from lowprec.backends.cuda import autotune, runtime
from software_cuda import machine

A = np.random.default_rng(0).integers(-3, 4, (64, 64)).astype(np.float16)


pytestmark = pytest.mark.usefixtures("cache")


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


def test_spinning_that_is_over_too_early_is_repeated_for_longer(
    software, simulated_time, monkeypatch
):
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


@pytest.fixture
def products(software, monkeypatch):
    """The addresses of a, b, c and d of each product, and a function that is called with them before it runs."""
    cublas_lt, seen = (
        software.software.cublas_lt,
        SimpleNamespace(addresses=[], check=lambda *_: None),
    )
    multiply = cublas_lt.matmul
    software.software.switches.first_algorithm = False

    def noted(*arguments):
        second, first, c, d = (arguments[i] for i in (3, 5, 8, 10))  # D^T = B^T A^T
        seen.addresses.append((first, second, c, d))
        software.software.drain()
        seen.check()
        multiply(*arguments)

    monkeypatch.setattr(cublas_lt, "matmul", noted, raising=False)
    return seen


ARRAYS = {
    "square": (A, A, None),
    "odd addresses": (A[1:, 3:35], A[3:35, 5:], None),
    "backwards": (np.stack([A] * 3)[::-1], np.stack([A] * 3), None),
    "an addend": (A, A, A),
    "the same for every batch": (np.stack([A] * 3), np.broadcast_to(A, (3, 64, 64)), None),
}


@pytest.mark.parametrize("name", ARRAYS)
def test_no_product_reads_cached_operands(software, name, products):
    a, b, c = ARRAYS[name]
    host = np.zeros((*a.shape[:-1], b.shape[-1]), a.dtype)
    x, y, out = (software.put(z) for z in (a, b, host[::-1] if a.ndim > 2 else host))
    addend = {} if c is None else {"c": software.put(c), "beta": 2.0}
    arrays = [x, y, addend.get("c", out), out]
    lowprec.matmul(x, y, out=out, **addend)
    places, calls = products.addresses[0], len(products.addresses)  # a batch may need several calls

    def check():
        if len(products.addresses) % calls == 1 % calls:
            read = zip(arrays[: 2 + (c is not None)], places, products.addresses[-1], strict=False)
            for source, place, address in read:
                copy = SoftwareArray(source.address + address - place, source.like, 0, None)
                np.testing.assert_array_equal(copy.view(), source.view())

    products.check = check
    lowprec.autotune(x, y, out=out, candidates=1, **addend)
    first, *others = products.addresses[calls::calls]
    turns = [first, *itertools.takewhile(lambda turn: turn != first, others)]
    used = set()
    for turn in turns:
        for source, place, address in zip(arrays, places, turn, strict=True):
            assert (address - place) % 256 == 0
            below, above = span(source.like)
            start = source.address + address - place
            used.add((start - below, start + above))
    assert len(used) == len(turns) * (3 if c is None else 4)
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(sorted(used)))
    # A set is rounded up to the alignment of each array.
    assert (
        sum(end - start for start, end in used)
        > 2 * runtime.attribute("cudaDevAttrL2CacheSize", 0) * 0.9
    )


@pytest.mark.parametrize("reason", ["large", "too little memory"])
def test_operands_that_are_not_copied(software, reason, products, monkeypatch):
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
    lowprec.autotune(x, x, candidates=1)
    ((first, second, _, d),) = set(products.addresses)
    assert first == second == x.address != d
