"""What a profile records, how it counts, and that nothing of it stays behind."""

import dataclasses
import json
import re
import threading

import ml_dtypes
import numpy as np
import pytest

import lowprec
from lowprec import policy
from lowprec.arrays import library_of
from lowprec.backends.cpu import backend as cpu
from lowprec.core import executors
from lowprec.core.arguments import PLAIN, parse_dtype
from lowprec.planning import OperandSpec, plan_gemm
from lowprec.profiling import records
from support import machines
from support.cpu_units import needs

A = np.arange(6 * 4, dtype=np.float32).reshape(6, 4)
B = np.arange(4 * 5, dtype=np.float32).reshape(4, 5)


@pytest.fixture(autouse=True)
def no_observer_afterwards():
    yield
    assert executors._observer is None


def test_a_record_reports_the_product():
    with lowprec.profile("one") as prof:
        lowprec.matmul(A, B, math_mode="bf16")
    (record,) = prof.records
    plan = lowprec.plan(A, B, math_mode="bf16")
    assert (record.label, record.error, record.stream) == ("", None, None)
    assert (record.a_shape, record.b_shape, record.out_shape) == ((6, 4), (4, 5), (6, 5))
    assert {record.a_dtype, record.b_dtype, record.out_dtype} == {"float32"}
    assert (record.m, record.n, record.k, record.batch_count) == (6, 5, 4, 1)
    assert (record.mode, record.source) == ("bf16", "math_mode= argument")
    assert (record.kernel, record.algorithm, record.device) == (str(plan.kernel), None, "cpu")
    assert record.flops == 2 * 6 * 5 * 4
    assert (record.thread, record.number_format) == (threading.current_thread().name, "bfloat16")


def test_times_fit_together():
    big = np.ones((300, 300), np.float32)
    with lowprec.profile() as prof:
        lowprec.matmul(big, big)
        lowprec.matmul(big, big)
    first, second = prof.records
    assert first.elapsed_ms == first.host_ms > 0
    assert 0 <= first.start_ms <= first.start_ms + first.host_ms <= second.start_ms
    assert second.start_ms + second.host_ms <= prof.wall_ms
    assert first.tflops == pytest.approx(2 * 300**3 / (first.elapsed_ms / 1e3) / 1e12)
    assert first.peak_share is None


def test_nothing_is_recorded_outside():
    prof = lowprec.profile()
    lowprec.matmul(A, B)
    with prof:
        lowprec.matmul(A, B)
    lowprec.matmul(A, B)
    assert len(prof) == len(prof.records) == 1
    wall = prof.wall_ms
    assert prof.wall_ms == wall, "the clock runs on"


def test_a_profile_that_is_entered_again_goes_on():
    prof = lowprec.profile()
    for _ in range(2):
        with prof, prof:
            lowprec.matmul(A, B)
    assert len(prof.records) == 2
    assert 0 <= prof.records[0].start_ms < prof.records[1].start_ms


@pytest.mark.parametrize(
    ("dtype", "numbers", "has_effect"),
    [
        (np.float32, "tf32", True),
        (np.complex64, "tf32", True),
        (np.float64, "float64", False),
        (ml_dtypes.bfloat16, "bfloat16", False),
        (np.int8, "int8", False),
    ],
)
def test_element_types(dtype, numbers, has_effect):
    with lowprec.profile() as prof:
        lowprec.matmul(np.ones((3, 2), dtype), np.ones((2, 3), dtype), math_mode="tf32")
    (record,) = prof.records
    assert (record.number_format, record.mode_has_effect) == (numbers, has_effect)
    assert record.flops == (8 if numbers == "tf32" and dtype is np.complex64 else 2) * 18


def test_a_batch_and_an_overlapping_out_are_one_product_each():
    stack = np.ones((7, 4, 4), np.float32)
    square = np.eye(4, dtype=np.float32)
    with lowprec.profile() as prof:
        lowprec.matmul(stack, np.ones((7, 4, 4), np.float32))
        lowprec.matmul(square, square, out=square)
    batch, aside = prof.records
    assert (batch.batch_count, batch.m, batch.flops) == (7, 4, 7 * 2 * 64)
    assert (aside.batch_count, aside.out_shape) == (1, (4, 4))


@pytest.mark.usefixtures("fresh_executors")
def test_copies_are_reported(monkeypatch):
    plain = machines.BARE
    monkeypatch.setattr(cpu, "capabilities", lambda device: plain)
    with lowprec.profile() as prof:
        lowprec.matmul(np.ones((8, 8), np.float32)[::2, ::2], np.ones((4, 4), np.float32))
    assert prof.records[0].copies == ("a: BLAS cannot express its strides",)


def test_results_are_the_same_and_the_cache_holds_no_observer():
    x, y = library_of(A).view(A), library_of(B).view(B)
    expected = lowprec.matmul(A, B)
    cached = executors.look_up(policy.resolve(), x, y, PLAIN)
    with lowprec.profile():
        observed = lowprec.matmul(A, B)
    assert np.array_equal(expected, observed)
    assert executors.look_up(policy.resolve(), x, y, PLAIN) is cached


class Broken(RuntimeError):
    """An arbitrary error in a product."""


@pytest.fixture
def broken(fresh_executors, monkeypatch):
    def prepare(plan):
        def execute(arguments):
            raise Broken("the library gave up")

        return execute

    monkeypatch.setattr(cpu, "prepare", prepare)


@pytest.mark.usefixtures("broken")
def test_a_product_that_fails_is_recorded_and_its_error_goes_on():
    with pytest.raises(Broken, match="gave up"), lowprec.profile() as prof:
        lowprec.matmul(A, B)
    (record,) = prof.records
    assert record.error == "Broken: the library gave up"
    assert (record.elapsed_ms, record.tflops, record.units_used) == (None, None, None)
    totals = prof.totals()
    assert (totals["products"], totals["failed"], totals["untimed"]) == (1, 1, 0)
    assert totals["units"]["unknown"] == 0
    assert "failed, 1: Broken: the library gave up" in str(prof)


def test_a_refused_call_is_no_product_and_its_error_ends_the_recording():
    prof = lowprec.profile()
    with pytest.raises(lowprec.ShapeError, match="4"), prof:
        lowprec.matmul(A, A)
    lowprec.matmul(A, B)
    assert len(prof) == 0


# -- several at once ------------------------------------------------------------------------------


def test_profiles_may_overlap():
    first, second = lowprec.profile(), lowprec.profile()
    first.__enter__()
    lowprec.matmul(A, B)
    second.__enter__()
    lowprec.matmul(A, B)
    first.__exit__(None, None, None)
    lowprec.matmul(A, B)
    second.__exit__(None, None, None)
    assert (len(first), len(second)) == (2, 2)


def test_products_of_all_threads_or_of_one():
    with lowprec.profile() as everything, lowprec.profile(threads="current") as here:
        thread = threading.Thread(target=lambda: lowprec.matmul(A, B), name="worker")
        thread.start()
        thread.join()
        lowprec.matmul(A, B)
    assert [r.thread for r in everything.records] == ["worker", threading.current_thread().name]
    assert [r.thread for r in here.records] == [threading.current_thread().name]


@pytest.mark.parametrize("threads", ["none", None, "All"])
def test_other_threads_are_refused(threads):
    with pytest.raises(lowprec.SettingError, match="'all', 'current'"):
        lowprec.profile(threads=threads)


@pytest.mark.parametrize("label", [len, 3, None], ids=str)
def test_a_label_is_text(label):
    with pytest.raises(lowprec.SettingError, match=r"a label, which is text, got .*its block"):
        lowprec.profile(label)


def test_ranges_name_products():
    with lowprec.profile() as prof, lowprec.profile() as other:
        with prof.range("step"), other.range("else"):
            lowprec.matmul(A, B)
            with prof.range("layer 1"):
                lowprec.matmul(A, B)
        lowprec.matmul(A, B)
    assert [r.label for r in prof.records] == ["step", "step/layer 1", ""]
    assert [r.label for r in other.records] == ["else", "else", ""]


def test_a_range_ends_with_an_error():
    with lowprec.profile() as prof:
        with pytest.raises(Broken, match="inside"), prof.range("step"):
            raise Broken("inside")
        lowprec.matmul(A, B)
    assert prof.records[0].label == ""


@pytest.mark.parametrize(
    ("dtype", "mode", "capability", "used", "eligible", "why"),
    [
        ("float32", "fp32", (9, 0), False, False, "do not multiply float32"),
        ("float32", "tf32", (9, 0), True, True, "tensor cores"),
        ("float32", "bf16", (7, 5), False, True, "capability 7.5 do not multiply bfloat16"),
        ("float64", "fp32", (8, 0), False, True, "without tensor cores"),
        ("float16", "fp32", (7, 0), None, True, "does not report it"),
    ],
)
def test_tensor_cores(dtype, mode, capability, used, eligible, why):
    operand = OperandSpec.contiguous(parse_dtype(dtype), (64, 64))
    plan = plan_gemm(
        PLAIN.problem(operand, operand), machines.gpu(capability), lowprec.MathMode(mode)
    )
    *found, reason = records.units_of(plan, used)
    assert found == [eligible, used]
    assert why in reason


def test_tile_units_say_why_not():
    with machines.on("NumPy alone"), lowprec.profile() as prof:
        lowprec.matmul(A, B, math_mode="bf16")
        lowprec.matmul(A, B)
        lowprec.matmul(np.empty((0, 4), np.float32), B, math_mode="bf16")
        reason = lowprec.plan(A, B, math_mode="bf16").kernel_reason
    small, full, empty = prof.records
    assert (small.units_eligible, small.units_used) == (True, False)
    assert small.units_reason == reason
    assert (full.units_eligible, full.units_used) == (False, False)
    assert full.units_reason == "tile units do not multiply float32 numbers"
    assert (empty.units_used, empty.units_reason) == (False, "the product is empty")


@needs("bf16_avx512")
@pytest.mark.parametrize("n", [64, 300, 400])
def test_vector_units_are_seen(n):
    """In one call of native code, and where several threads share a product."""
    x = np.ones((n, n), np.float32)
    with lowprec.profile() as prof:
        lowprec.matmul(x, x, math_mode="bf16")
    kernel = lowprec.plan(x, x, math_mode="bf16").kernel_row
    assert (prof.records[0].units_used, prof.records[0].units_reason) == (True, kernel.units)


@pytest.mark.usefixtures("fresh_executors")
def test_the_share_of_the_peak_is_of_the_format(monkeypatch):
    peaks = (("float32", 2.0), ("bfloat16", 4.0))
    known = dataclasses.replace(machines.BARE, peak_tflops=peaks)
    monkeypatch.setattr(cpu, "capabilities", lambda device: known)
    with lowprec.profile() as prof:
        lowprec.matmul(A, B)
        lowprec.matmul(A, B, math_mode="bf16")
        lowprec.matmul(A, B, math_mode="tf32")
    full, half, unknown = prof.records
    assert full.peak_share == pytest.approx((full.tflops or 0) / 2)
    assert half.peak_share == pytest.approx((half.tflops or 0) / 4)
    assert unknown.peak_share is None
    assert "of peak" in str(prof).splitlines()[1]


# -- devices whose products go on after the call --------------------------------------------------


class Watch:
    """A stopwatch that knows what was asked of it."""

    stream = 7

    def __init__(self, elapsed_ms):
        self.asked: list[str] = []
        self._elapsed_ms = elapsed_ms

    def stop(self):
        self.asked.append("stop")

    def abandon(self):
        self.asked.append("abandon")

    def elapsed_ms(self):
        self.asked.append("elapsed_ms")
        return self._elapsed_ms


@pytest.fixture
def watches(monkeypatch):
    """Have the host behave as a device whose products take 20, 30, ... ms, every third one captured."""
    made = []

    def start(arguments):
        made.append(Watch(None if len(made) % 3 == 2 else 20.0 + 10 * len(made)))
        return made[-1]

    monkeypatch.setattr(cpu, "stopwatch", start)
    monkeypatch.setattr(cpu, "execution_info", lambda plan, execute: (None, "algorithm 13"))
    return made


def test_time_is_read_late_and_once(watches):
    with lowprec.profile() as prof, lowprec.profile() as other:
        lowprec.matmul(A, B)
        lowprec.matmul(A, B)
        lowprec.matmul(A, B)
        assert [w.asked for w in watches] == [["stop"]] * 3
    assert [r.elapsed_ms for r in prof.records] == [20.0, 30.0, None]
    assert [r.elapsed_ms for r in other.records] == [20.0, 30.0, None]
    assert [w.asked for w in watches] == [["stop", "elapsed_ms"]] * 3
    assert {(r.stream, r.algorithm, r.units_used) for r in prof.records} == {
        (7, "algorithm 13", None)
    }
    totals = prof.totals()
    assert (totals["untimed"], totals["elapsed_ms"]) == (1, 50.0)
    assert totals["flops"] == 2 * prof.records[0].flops, "of what has no time, no flops count"
    assert totals["units"]["unknown"] == 3
    assert "without a time, 1: captured into a CUDA graph" in str(prof)


@pytest.mark.usefixtures("broken")
def test_the_stopwatch_of_a_failed_product_is_given_up(watches):
    with pytest.raises(Broken, match="gave up"), lowprec.profile() as prof:
        lowprec.matmul(A, B)
    assert prof.records[0].elapsed_ms is None
    assert [w.asked for w in watches] == [["abandon"]]


# -- sums, tables, files --------------------------------------------------------------------------


@pytest.fixture(name="prof")
def mixed():
    x = np.ones((40, 30), np.float32)
    with lowprec.profile("mixed") as prof:
        for _ in range(3):
            with prof.range("step"):
                lowprec.matmul(x, x.T, math_mode="bf16")
        lowprec.matmul(x, x.T)
        lowprec.matmul(x.astype(np.float64), x.T)
        lowprec.matmul(np.ones((3, 4, 5), ml_dtypes.bfloat16), np.ones((3, 5, 6), np.float16))
    return prof


def test_totals_are_sums(prof):
    totals, records = prof.totals(), prof.records
    assert (totals["products"], totals["failed"], totals["untimed"]) == (6, 0, 0)
    assert totals["flops"] == 5 * 2 * 40 * 40 * 30 + 3 * 2 * 4 * 5 * 6
    assert totals["elapsed_ms"] == pytest.approx(sum(r.elapsed_ms or 0 for r in records))
    assert totals["tflops"] == pytest.approx(totals["flops"] / totals["elapsed_ms"] / 1e9)
    assert {m: v["products"] for m, v in totals["by_mode"].items()} == {"fp32": 3, "bf16": 3}
    assert sum(v["elapsed_ms"] for v in totals["by_kernel"].values()) == pytest.approx(
        totals["elapsed_ms"]
    )
    assert (
        totals["units"]["share_of_flops"]
        == sum(r.flops for r in records if r.units_used) / totals["flops"]
    )
    assert totals["elapsed_ms"] <= totals["wall_ms"]


def test_table_layout(prof):
    title, heading, *rows = prof.table(width=140).splitlines()
    assert title == "lowprec.profile mixed (cpu)"
    assert heading.split()[:5] == ["m", "x", "n", "x", "k"]
    grid, below = rows[:4], rows[4:]
    assert all(len(line) <= 120 for line in str(prof).splitlines())
    calls = heading.index("calls") + len("calls")
    assert sorted(int(row[:calls].split()[-1]) for row in grid) == [1, 1, 1, 3]
    totals = [float(row[calls:].split()[0]) for row in grid]
    assert totals == sorted(totals, reverse=True)
    shares = [float(cell[:-1]) for row in grid for cell in row.split() if cell.endswith("%")]
    assert sum(shares) == pytest.approx(100, abs=0.3)
    assert "of peak" not in heading
    assert "device" not in heading
    text = str(prof)
    assert "3 * 4x6x5" in text
    assert "argument" in text
    assert below[0].startswith("6 products in ")
    assert below[1].startswith("tensor, tile or vector units: 3 eligible, ")


def test_table_by_range(prof):
    rows = prof.table(by="range").splitlines()[2:4]
    by_name = {row.split("  ")[1]: row.split() for row in rows}
    assert by_name["step"][1] == "3"
    assert by_name["(outside of ranges)"][3] == "3"
    with pytest.raises(lowprec.SettingError, match="'product', 'range'"):
        prof.table(by="mode")


def test_a_long_table_fits_the_width(monkeypatch):
    words = (
        "tile 128x128, stages 4, split-K 1, swizzle 1, custom option 3, workspace 33554432 bytes"
    )
    monkeypatch.setattr(cpu, "execution_info", lambda plan, execute: (True, words))
    with lowprec.profile() as prof:
        lowprec.matmul(np.ones((2, 3), np.float64), np.ones((3, 2), np.float32))
    assert max(map(len, str(prof).splitlines())) <= 120
    assert set(f"{words} calls".split()) <= set(str(prof).split())
    assert prof.records[0].algorithm == words


def test_an_empty_profile():
    prof = lowprec.profile("nothing")
    assert str(prof).splitlines() == [
        "lowprec.profile nothing",
        "0 products in 0.000 ms of 0.000 ms",
    ]
    assert prof.totals()["tflops"] is None
    assert prof.totals()["units"]["share_of_flops"] is None
    assert repr(prof) == "<lowprec.profile 'nothing': 0 products, closed>"


def test_json_holds_everything(prof, tmp_path):
    path = tmp_path / "profile.json"
    path.write_text("of an earlier run", "utf-8")
    prof.to_json(path)
    read = json.loads(path.read_text("utf-8"))
    assert read == json.loads(json.dumps(prof.to_dict()))
    assert (read["label"], read["lowprec"]) == ("mixed", lowprec.__version__)
    assert [p["m"] for p in read["products"]] == [r.m for r in prof.records]
    assert [f.name for f in tmp_path.iterdir()] == ["profile.json"]


def test_the_log_has_a_line_for_each_product(caplog):
    with caplog.at_level("INFO", "lowprec"), lowprec.profile() as prof:
        lowprec.matmul(A, B, math_mode="bf16")
        lowprec.matmul(A.astype(np.float64), B)
    lowprec.matmul(A, B)
    first, second = caplog.messages
    kernel = prof.records[0].kernel
    wanted = rf"float32 \(6, 4\) x float32 \(4, 5\), bf16 \(math_mode= argument\): kernel {kernel}, took "
    assert re.match(f"matmul {wanted}[0-9.e-]+ ms$", first)
    assert "matmul float64 (6, 4) x float32 (4, 5), no mode acts: kernel " in second
