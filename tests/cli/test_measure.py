"""The timing of ``check``, on a simulated clock."""

import os
import time

import pytest

from lowprec.checking import measure


class _Clock:
    """A clock that only the measured calls move."""

    def __init__(self):
        self.now = 0.0
        self.calls: list[tuple[str, int]] = []

    def variant(self, name, cost):
        def call(number):
            self.calls.append((name, number))
            self.now += cost(len(self.calls))

        return call


@pytest.fixture
def clock(monkeypatch):
    wound = _Clock()
    monkeypatch.setattr(time, "perf_counter", lambda: wound.now)
    return wound


def test_variants_take_turns_after_an_untimed_call(clock):
    # Every other call is slow: the untimed ones.
    variants = {
        n: clock.variant(n, lambda count: 5.0 if count % 2 else 0.25) for n in ("a", "b", "c")
    }
    timings = measure.take_turns(variants, 3, budget=100)
    assert [name for name, _ in clock.calls] == [*"aabbcc", *"bbccaa", *"ccaabb"]
    for name, timing in timings.items():
        assert timing.samples == (0.25, 0.25, 0.25)
        assert [number for called, number in clock.calls if called == name] == [0, 1, 1, 2, 2, 3], (
            "operands rotate"
        )


def test_threads_that_spin_do_not_slow_down_the_next_variant(clock, monkeypatch):
    monkeypatch.setattr(time, "sleep", lambda seconds: clock.calls.append(("pause", seconds)))
    variants = {n: clock.variant(n, lambda _: 1.0) for n in "ab"}
    measure.take_turns(variants, 2, budget=100, spinning=["a"])
    assert "".join(name[0] for name, _ in clock.calls) == "aapbb" + "bbaa"


def test_short_calls_are_repeated(clock):
    timing = measure.take_turns({"a": clock.variant("a", lambda _: 1e-4)}, 1, budget=100)["a"]
    # One untimed call and 1 ms of timed ones.
    assert 1 + 9 <= len(clock.calls) <= 1 + 10
    assert timing.median == pytest.approx(1e-4)


def test_the_budget_ends_it_after_three_rounds(clock):
    timings = measure.take_turns({"a": clock.variant("a", lambda _: 1.0)}, 50, budget=9)
    # A round takes 2 s: the one that begins at 8 s is the last.
    assert len(timings["a"].samples) == 5
    timings = measure.take_turns({"a": clock.variant("a", lambda _: 1.0)}, 50, budget=0)
    assert len(timings["a"].samples) == measure.MIN_ROUNDS


@pytest.mark.parametrize(("slow", "budget", "rounds"), [(0, 99, 7), (8, 99, 33), (1000, 9, 15)])
def test_rounds_are_repeated_while_times_spread(clock, slow, budget, rounds):
    # Each round has an untimed call and a timed one, of 0.25 s; every other of the first 2 * slow samples takes 0.5 s.
    # The upper quartile of 33 samples is the ninth from above, the first that 8 slow ones leave at 0.25 s. In 9 s begin
    # 15 rounds, of 0.5 s and 0.75 s in turn.
    call = clock.variant("a", lambda count: 0.5 if count % 4 == 0 and count <= 4 * slow else 0.25)
    found = measure.take_turns({"a": call}, None, budget=budget)["a"]
    assert (len(found.samples), found.is_noisy) == (rounds, slow > 99)


def test_the_speedup_is_the_median_of_ratios():
    base, other = measure.Timing((4.0, 1.0, 9.0)), measure.Timing((2.0, 1.0, 3.0))
    assert other.speedup_over(base) == 2.0
    assert base.median == 4.0


def test_the_spread_is_half_the_interquartile_range():
    # Quartiles of 1..5 are 2 and 4, around a median of 3.
    assert measure.Timing((5.0, 1.0, 3.0, 2.0, 4.0)).spread == pytest.approx(1 / 3)
    assert measure.Timing((7.0,)).spread is None
    assert measure.Timing((0.0, 0.0)).spread is None


@pytest.mark.parametrize(
    ("average", "cpus", "busy"), [(0.5, 2, False), (0.6, 2, True), (3.9, 16, False), (5, 16, True)]
)
def test_a_busy_machine_is_reported_of(average, cpus, busy):
    remark = measure.Load(average, cpus).remark
    assert bool(remark) is busy
    assert not busy or f"load average {average:.1f} on {cpus} CPUs" in remark


def test_where_the_system_has_no_load_average(monkeypatch):
    monkeypatch.delattr(os, "getloadavg", raising=False)
    assert measure.load().average is None
    assert measure.load().remark == ""
