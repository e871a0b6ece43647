"""The report of a GPU: parts that hang, crash or print garbage; merging; what it says about the claims."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import lowprec
from lowprec.backends import disk
from support.benchmark_modules import BENCHMARKS
from support.programs import run_python

SPLIT = ("fp16x3", "bf16x6", "bf16x3", "tf32x3")


@pytest.fixture
def execute(load, tmp_path):
    """Run some Python as a part; it finds the path of its file in ``sys.argv[1]``."""
    parts = load("gpu.parts")

    def run(code, limit_s=20.0):
        path = tmp_path / "part.json"
        command = [sys.executable, "-c", code, str(path)]
        return parts.execute(
            command, tmp_path / "log", limit_s, dict(os.environ), lambda: parts.read(path)
        )

    return run


def _part(**values):
    """Code that writes a part."""
    part = {"complete": True, "facts": {}, "rows": [], **values}
    return f"import json, sys; open(sys.argv[1], 'w').write({json.dumps(part)!r})\n"


GOOD = {"ok": True}


@pytest.mark.parametrize(
    ("code", "status", "error", "rows", "state"),
    [
        (_part(rows=[GOOD, {"ok": False}, {"ok": None}]), 0, "", 3, "3 rows, 1 of 2 FAILED"),
        (_part(rows=[{"ok": None, "error": "refused"}] * 2), 0, "", 2,
         "2 rows, 2 with an ERROR"),
        (_part(rows=[GOOD, {"ok": None, "error": "refused"}]), 0, "", 2, "2 rows, 1 with an ERROR"),
        # A crash keeps the rows before it.
        (_part(rows=[GOOD], complete=False) + "raise RuntimeError('the driver is gone')", 1,
         "exit status 1; it ended before it was done", 1, "before it was done; 1 rows, all well"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", -11, "exit status -11; it wrote nothing", 0, ""),
        ("import sys; open(sys.argv[1], 'w').write('{\"rows\": [')", 0, "its file is no JSON", 0, ""),
        ("import sys; open(sys.argv[1], 'w').write('{\"rows\": 3}')", 0, "its file is no part of a report", 0, ""),
        ("import sys; sys.stdout.buffer.write(bytes(range(256))); raise SystemExit(3)", 3, "exit status 3", 0, ""),
    ],
)  # fmt: skip
def test_the_end_of_a_part(load, execute, code, status, error, rows, state):
    found = execute(code)
    assert (found["exit"], len(found["rows"]), bool(found["error"])) == (status, rows, bool(error))
    assert error in found["error"]
    assert ("the driver is gone" in "".join(found["output"][-1:])) is ("driver" in code)
    assert state in load("gpu.parts").state(found)
    json.dumps(found, allow_nan=False)


def test_a_part_that_hangs_is_stopped_with_its_children(execute, tmp_path):
    alive = tmp_path / "alive"
    child = f"import time\nwhile True: open({str(alive)!r}, 'a').write('x'); time.sleep(0.02)"
    code = _part(rows=[{"ok": None}], complete=False) + (
        f"import subprocess, time; subprocess.Popen([sys.executable, '-c', {child!r}])\ntime.sleep(600)"
    )
    begin = time.monotonic()
    found = execute(code, 0.8)
    assert time.monotonic() - begin < 30
    assert found["exit"] is None
    assert found["error"] == "stopped after 1 s"
    assert found["rows"] == [{"ok": None}]
    size = alive.stat().st_size
    assert size > 0
    time.sleep(0.1)
    assert alive.stat().st_size == size, "what the part had started lives on"


def test_a_signal_ends_the_report_with_the_finished_parts(load, tmp_path):
    """The machine's own limit sends SIGTERM; parts that had no turn say so."""
    code = (
        "import os, signal, sys\n"
        "sys.argv = ['gpu_report.py', '--out', sys.argv[1], '--parts', 'rounding,speed']\n"
        "import gpu_report as report\n"
        "def part(*_):\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "    return {**report.parts.not_run(''), 'facts': {'name': 'here', 'nvidia_smi': {'name': 'x'}}}\n"
        "report.run_all.__kwdefaults__['execute'] = part\n"
        "sys.exit(report.main())"
    )
    run_python(code, str(tmp_path), PYTHONPATH=str(BENCHMARKS))
    results = json.loads((tmp_path / "gpu-here.json").read_text())["results"]
    assert results["device"]["facts"]["name"] == "here"
    assert {results[x]["not_run"] for x in ("rounding", "speed")} == {"the report was interrupted"}


@pytest.fixture
def run_all(load, tmp_path):
    """Run the report with parts that only record their calls; return these, and the report."""
    report, out = load("gpu_report"), tmp_path / "out"

    def run(*names, gone_s=0.0, gpu=False, begun=True, smoke=None, **given):
        asked = []

        def execute(_, log, limit, variables, reader):
            # The report is rewritten after each part.
            assert not begun or (out / "gpu-here.json").exists() is bool(asked)
            asked.append((log.stem, limit, variables.get("LOWPREC_TEST_DEVICE")))
            assert variables.get("NVIDIA_TF32_OVERRIDE") == {"override-0": "0"}.get(log.stem)
            log.write_text(f"output of {log.stem}")
            facts = {
                "name": "here",
                "gpu": {"cublas": "13.1"} if gpu else None,
                "why_no_gpu": "no driver",
            }
            facts |= {"versions": {}, "commit": None, **given}
            if log.stem == "smoke":
                return {**report.parts.not_run(""), **smoke}
            if log.stem == given.get("broken"):
                raise OSError("no more processes")
            return {
                **report.parts.not_run(""), "complete": True, "facts": facts if log.stem == "device" else {},
            }  # fmt: skip

        parts = ",".join(name for name in names if name.isidentifier() or "-0" in name)
        others = names[names.index("--part-limit") :] if "--part-limit" in names else []
        options = report._parser().parse_args(
            ["--quick", "--out", str(out), "--limit", "100", "--parts", parts, *others]
        )
        path, content = report.run_all(
            options, tmp_path, begin=time.monotonic() - gone_s, execute=execute
        )
        assert json.loads(path.read_text()) == content
        assert not begun or path.with_suffix(".log").read_text().count("output of") == len(asked)
        return asked, content

    return run


def test_parts_run_in_order_in_the_remaining_time(run_all, monkeypatch):
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "1")
    asked, content = run_all("override-0", "override", "test_products", gone_s=90, gpu=True)
    assert [n for n, _, _ in asked] == ["device", "override-0", "override", "test_products"]
    assert [limit for _, limit, _ in asked] == pytest.approx([10] * 4, abs=2)
    assert asked[-1][2] == "gpu"
    assert set(content) == {"benchmark", "claims", "machine", "results", "settings"}
    assert content["machine"]["name"] == "here"
    assert content["settings"]["quick"] is True


def test_without_a_gpu_measurements_say_why_and_tests_run_in_software(load, run_all):
    asked, content = run_all("test_products", "speed", "host")
    given = [(name, device) for name, _, device in asked]
    assert given == [("device", None), ("test_products", "software")]
    assert content["results"]["speed"]["not_run"] == "no driver"
    assert load("gpu.parts").state(content["results"]["speed"]) == "not run: no driver"
    assert {c["met"] for c in content["claims"]} == {None}


@pytest.mark.parametrize("fact", ["gpu", "nvidia_smi", "nvidia_files"])
def test_measurements_run_with_any_sign_of_a_gpu_and_one_that_cannot_start_is_reported(
    run_all, fact
):
    given = {"gpu": None, fact: 1} if fact != "gpu" else {"gpu": True}
    asked, content = run_all("test_products", "rounding", "speed", broken="rounding", **given)
    assert [name for name, _, _ in asked] == ["device", "test_products", "rounding", "speed"]
    results = content["results"]
    assert results["rounding"]["not_run"] == "OSError: no more processes"
    assert results["speed"]["complete"] is True
    assert results["rounding"]["question"] == "How does FAST_TF32 round its operands?"


def test_two_runs_have_all_parts_in_the_order_of_their_value(load):
    report, parts = load("gpu_report"), load("gpu.parts")
    limits, modules = report.limits(), set(report.tests.modules())
    runs = {run: parts.run_order(run, sorted(modules)) for run in parts.RUNS}
    assert (
        set(limits)
        == {name for names in runs.values() for name in names}
        == {*parts.MEASUREMENTS, *modules}
    )
    assert runs["first"][:5] == ["device", "smoke", "compiling", "accuracy", "test_programs"]
    first = [
        n
        for n in runs["first"]
        if n in ("rounding", "test_cublas_handle", "test_products", "quantizing", "host")
    ]
    assert first == ["rounding", "test_cublas_handle", "test_products", "quantizing", "host"]
    assert runs["second"][2:] == [
        "speed",
        "splits",
        "formats",
        "ordering",
        "limits",
        "test_kernels",
    ]
    # Even if all of them take as long as they may, each run ends before the ten minutes.
    tests = [n for n in runs["first"] if n in modules]
    assert (
        sum(limits[n] for n in runs["first"] if n not in tests) + parts.ALL_TESTS_S
        <= parts.TOTAL_S
        < 600
    )
    assert sum(limits[n] for n in runs["second"]) <= parts.TOTAL_S
    assert report._names("second") == runs["second"]
    assert all(parts.question(name).endswith("?") for name in limits)
    for name in parts.MEASUREMENTS:
        assert callable(parts.runner(name))


def test_the_limit_of_a_part_can_be_set(run_all):
    asked, _ = run_all("host", "--part-limit", "7", gpu=True)
    assert [limit for _, limit, _ in asked] == [7, 7]


@pytest.mark.parametrize(
    ("smoke", "reason"),
    [
        (
            {
                "rows": [
                    {"step": f"mode {mode}", "ok": True, "seconds": 1.0, "note": ""}
                    for mode in ("fp32", "bf16")
                ]
            },
            "",
        ),
        (
            {"rows": [{"step": "mode fp32", "ok": False, "seconds": 1.0, "note": "NaN"}]},
            "mode fp32 failed: NaN",
        ),
        ({"error": "exit status -11"}, "mode fp32 has not run: exit status -11"),
    ],
)
def test_a_failed_first_contact_ends_the_report_with_advice(run_all, capsys, smoke, reason):
    asked, content = run_all("smoke", "rounding", gpu=True, smoke=smoke)
    assert [name for name, *_ in asked] == ["device", "smoke", *([] if reason else ["rounding"])]
    assert content["results"]["rounding"]["not_run"] == reason
    printed = capsys.readouterr().out
    assert all(row["step"] in printed for row in smoke.get("rows", ()))
    assert (f"{reason}. Look at" in printed) is bool(reason)


@pytest.mark.parametrize("commit", ["a", "b"])
def test_a_second_run_keeps_the_other_parts_of_the_first(run_all, commit):
    run_all("host", "rounding", gpu=True, commit="a")
    _, content = run_all("rounding", gpu=True, commit=commit, begun=False)
    kept = ["device", "host", "rounding"] if commit == "a" else ["device", "rounding"]
    assert sorted(content["results"]) == kept


def test_runs_share_compiled_kernels_and_nothing_else(load, tmp_path, monkeypatch):
    report, kept = load("gpu_report"), tmp_path / "kept"
    caches = []
    for name in ("one", "two"):
        monkeypatch.setenv("LOWPREC_CACHE_DIR", str(kept))
        (tmp_path / name).mkdir()
        caches.append(report._cache(tmp_path / name))
        monkeypatch.setenv("LOWPREC_CACHE_DIR", str(caches[-1]))
        assert disk.read("kernels/x.cubin") == (b"code" if name == "two" else None)
        assert disk.read("autotune.json") is None
        disk.write("kernels/x.cubin", b"code")
        disk.write("autotune.json", b"{}")
    assert (kept / "kernels" / "x.cubin").read_bytes() == b"code"
    assert os.listdir(kept) == ["kernels"]


@pytest.mark.parametrize(
    "tests", ["", pytest.param(",test_cublas_handle", marks=pytest.mark.sweep)]
)
def test_it_runs_to_its_end_here(tmp_path, tests):
    script, parts = str(BENCHMARKS / "gpu_report.py"), f"device,rounding{tests}"
    command = [sys.executable, script, "--quick", "--out", str(tmp_path), "--parts", parts]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": ""}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    (path,) = tmp_path.glob("gpu-*.json")
    content = json.loads(path.read_text())
    results = content["results"]
    assert results["rounding"]["not_run"] == results["device"]["facts"]["why_no_gpu"] != ""
    assert results["device"]["error"] == ""
    assert str(BENCHMARKS.parent) not in json.dumps(results["device"]), "the machine has no owner"
    if tests and importlib.util.find_spec("nvmath") is not None:
        assert results["test_cublas_handle"]["error"] == ""
        (row,) = results["test_cublas_handle"]["rows"]
        assert (row["feature"], row["ok"]) == ("`cublas_handle` and the guard", True)
        assert row["device"] == "software"
    # What was seen in software says nothing about a GPU.
    assert {c["met"] for c in content["claims"]} == {None}
    assert "not measured" in done.stdout


def _speed(kind, n, ratio, *, tuned=False, other="torch"):
    speed = {other: {"median": ratio, "q1": ratio, "q3": ratio}}
    return {"device": "gpu", "kind": kind, "n": n, "tuned": tuned, "speed": speed, "ok": True}


def _claims(load, **rows):
    results = {name: {"rows": found} for name, found in rows.items()}
    return {c["what"]: c for c in load("gpu.verdicts").claims(results)}


def _flags(mode, tensor_cores):
    return {"dtypes": ["float32"] * 2, "mode": mode, "tensor_cores": tensor_cores, "ok": True}


@pytest.mark.parametrize(
    ("part", "rows", "what", "value", "met"),
    [
        ("speed", [_speed("float32 bf16", 8192, 1.29, other="lowprec tf32")],
         "float32 in mode bf16, conversion included, over mode tf32 at 8192", 1.29, False),
        ("host", [{"name": n, "over_torch": t, "ok": None} for n, t in (("lowprec", 1.6), ("nvmath", 90.0))],
         "host time of a small product over torch.matmul's, worst type", 1.6, False),
        ("accuracy", [_flags("tf32", True), _flags("tf32", False), _flags("fp32", False), _flags("fp32", None)],
         "tf32: algorithms on tensor cores, share", 0.5, False),
        ("accuracy", [_flags("fp32", False), _flags("fp32", None)],
         "fp32: algorithms without tensor cores, share", 1.0, True),
        ("test_device", [{"feature": str(i), "device": "gpu", "ok": i < 1} for i in range(2)],
         "features that work on the GPU, share", 0.5, False),
        # Tests on the software CUDA show nothing about a GPU.
        ("test_device", [{"feature": "a", "device": "software", "ok": True}],
         "features that work on the GPU, share", None, None),
    ],
)  # fmt: skip
def test_claims_are_judged_at_their_worst(load, part, rows, what, value, met):
    found = _claims(load, **{part: rows})
    assert (found[what]["value"], found[what]["met"]) == (value, met)
    assert met is not None or {c["met"] for c in found.values()} == {None}


def test_speed_completes_one_claim_after_another_by_size(load, torch, tmp_path, monkeypatch):
    speed, parts, verdicts = load("gpu.speed"), load("gpu.parts"), load("gpu.verdicts")
    asked: list[tuple[str, int, bool]] = []

    def measure(torch, name, shape, seed, ticks, *, tune):
        asked.append((name, shape[0], tune))
        return [
            _speed(name, shape[0], 2.0, tuned=tuned)
            for tuned in ((False, True) if tune else (False,))
        ]

    monkeypatch.setattr(speed, "measure", measure)
    monkeypatch.setattr(speed.clock, "EventClock", lambda torch: None)
    part = parts.Part(tmp_path / "part.json")
    speed.speed(part, parts.Options(quick=False, seed=0))
    first = [(name, n) for name, n, _ in asked[: 1 + len(verdicts.KINDS) * len(verdicts.SIZES)]]
    assert first == [
        ("float32 bf16", 8192),
        *((kind, n) for kind in verdicts.KINDS for n in verdicts.SIZES),
    ]
    assert list(verdicts.SIZES) == sorted(verdicts.SIZES)
    # The largest product in FP32 is not tuned, and its claim does not need it.
    assert ("float32 fp32", 16384, False) in asked
    claims = {c["what"]: c["met"] for c in verdicts.claims({"speed": {"rows": part.rows}})}
    assert [met for what, met in claims.items() if "worst size" in what] == [True] * 8


class HostClock:
    """The clock of calls that are done when they return."""

    device = "cpu"

    def wait(self):
        """Return at once."""

    def time(self, work, behind_s):
        begin = time.perf_counter()
        work()
        return time.perf_counter() - begin


@pytest.mark.filterwarnings("ignore:Some donated buffers were not usable")
def test_questions_about_pending_work(jax, load, tmp_path):
    """In host memory JAX and lowprec wait for each other as they must on a device."""
    ordering, part = load("gpu.ordering"), load("gpu.parts").Part(tmp_path / "part.json")
    work = ordering.Work(jax, 64, 32, 0)
    ordering.ask(part, work, ordering.QUESTIONS)
    assert [row["question"] for row in part.rows] == list(ordering.QUESTIONS)
    assert [row["ok"] for row in part.rows] == [True] * len(part.rows), part.rows
    # A result that came too early, or of memory that was overwritten, is noticed.
    a, b = work.draw(), work.draw()
    for wrong in (np.zeros((32, 32)), np.full((32, 32), np.nan), work.draw() @ b):
        assert ordering.judge(wrong, a, b)["ok"] is False


@pytest.mark.parametrize("number", range(3))
def test_sizes_at_the_limits(load, torch, number, monkeypatch):
    question, _ = load("gpu.correctness").QUESTIONS[number]
    size = 64 if question.__name__ == "leading_dimension" else 5
    assert question(torch, "cpu", size, 0) is True
    real = lowprec.matmul
    monkeypatch.setattr(lowprec, "matmul", lambda *given, **more: real(*given, **more) + 1)
    assert question(torch, "cpu", size, 0) is False


def test_rows_of_schemes(load, torch, monkeypatch):
    schemes, options = load("gpu.schemes"), load("gpu.parts").Options(quick=True, seed=0)

    def rows():
        return list(schemes.measure_splits(torch, 64, "normal", options, HostClock()))

    found = rows()
    own = [f"{m}, chunks: 256" for m in SPLIT]
    assert [row["name"] for row in found] == ["torch float32", "torch tf32", "torch float64", *own]
    assert all(row["seconds"] > 0 and row["relative_error"] < 1e-2 for row in found), found
    real = lowprec.matmul
    monkeypatch.setattr(lowprec, "matmul", lambda *given, **more: real(*given, **more) * 2)
    assert all(row["relative_error"] > 0.5 for row in rows() if row["name"] in own)


KINDS = (
    "bfloat16",
    "float32 bf16",
    "complex64 tf32",
    "float64",
    "bf16x9",
    "fp64_emulated",
    "nvfp4",
    "2:4 bfloat16",
)
BESIDE = {"float32 bf16": "lowprec tf32", "mode int8": "lowprec bf16", "mode nvfp4": "lowprec bf16"}


@pytest.mark.parametrize("name", [*KINDS, "mode int8", "mode nvfp4", "float32 times a vector"])
def test_rows_of_speed(load, torch, name, monkeypatch):
    speed, shape = load("gpu.speed"), (16, 128, 1 if "vector" in name else 64)

    def row():
        found: list[dict[str, Any]]
        found = list(speed.measure(torch, name, shape, 0, HostClock(), tune=False))
        (only,) = found
        return only

    found = row()
    assert (found["ok"], found["errors"]) == (True, {})
    assert found["speed"]["torch"]["median"] > 0 < found["tflops"]
    assert set(found["speed"]) == {"torch"} | ({BESIDE[name]} if name in BESIDE else set())
    real = lowprec.matmul
    monkeypatch.setattr(lowprec, "matmul", lambda *given, **more: real(*given, **more) * 100)
    assert row()["ok"] is False


def test_a_tuned_product_is_checked(load, torch, monkeypatch):
    real = lowprec.matmul

    def autotune(*_, **__):
        monkeypatch.setattr(lowprec, "matmul", lambda *given, **more: real(*given, **more) * 100)
        return SimpleNamespace(speedup=1.0)

    monkeypatch.setattr(lowprec, "autotune", autotune)
    rows = load("gpu.speed").measure(torch, "bfloat16", (16, 128, 64), 0, HostClock(), tune=True)
    assert [(row["tuned"], row["ok"]) for row in rows] == [(False, True), (True, False)]


# -- tests ------------------------------------------------------------------------------------

_TESTS = """
import pytest
def test_holds(record_property): record_property("measured", [1.5])
def test_fails(): assert 1 == 2, "so it is"
@pytest.mark.skip(reason="no GPU")
def test_skipped(): pass
@pytest.fixture
def broken():
    yield
    raise OSError("the end is bad")
def test_teardown(broken): pass
"""


#: Every test shows a feature: the name of its module.
_MARKED = """
def pytest_itemcollected(item):
    item.user_properties += [("feature", item.path.stem), ("device", "gpu")]
"""


def test_tests_are_counted_by_feature(load, tmp_path):
    files = {
        "conftest": _MARKED,
        "test_a": _TESTS,
        "test_b": "def test_holds(): pass",
        "test_c": "import nothing_at_all",
        "test_d": "import pytest\n@pytest.mark.skip(reason='not here')\ndef test_skipped(): pass",
    }
    for name, text in files.items():
        (tmp_path / f"{name}.py").write_text(text)
    tests, path = load("gpu.tests"), tmp_path / "report.jsonl"
    variables = {
        tests.PATH: str(path),
        tests.DEADLINE: str(time.time() + 600),
        "PYTHONPATH": str(BENCHMARKS),
    }
    words = [
        "-q",
        "-p",
        "gpu.tests",
        "-p",
        "no:cacheprovider",
        "--rootdir",
        ".",
        "--continue-on-collection-errors",
    ]
    command = [sys.executable, "-m", "pytest", *words]
    subprocess.run(
        command, cwd=tmp_path, env={**os.environ, **variables}, capture_output=True, check=False
    )
    found = tests.read(path)
    assert found["complete"] is True
    assert found["facts"]["counts"] == {"passed": 2, "failed": 3, "skipped": 2}
    assert {r["feature"]: r["ok"] for r in found["rows"]} == {
        "test_a": False, "test_b": True, "test_d": None,
    }  # fmt: skip
    assert {r["device"] for r in found["rows"]} == {"gpu"}
    assert [r.get("measured") for r in found["rows"]] == [[[1.5]], None, None]
    said = {f["id"]: f["message"] for f in found["facts"]["failures"]}
    assert set(said) == {"test_a.py::test_fails", "test_a.py::test_teardown", "test_c.py"}
    assert "so it is" in said["test_a.py::test_fails"]
    assert "the end is bad" in said["test_a.py::test_teardown"]
    assert "nothing_at_all" in said["test_c.py"]
    assert {w.removeprefix("Skipped: ") for w in found["facts"]["skips"]} == {"no GPU", "not here"}
