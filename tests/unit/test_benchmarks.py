"""The benchmarks' own arithmetic, their files, and that each script runs to its end."""

import ast
import doctest
import json
import os
import re
import shutil
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import numpy as np
import pytest

from support.benchmark_modules import BENCHMARKS

ROOT = Path(__file__).resolve().parents[2]

DOCUMENT_KEYS = {"benchmark", "claims", "machine", "results", "settings"}
MACHINE_KEYS = {
    "cores", "cpu", "date", "flags", "generation", "load_before", "name", "threads", "versions",
}  # fmt: skip


EXAMPLES = "bench_accuracy common generated timing gpu.device gpu.speed gpu.verdicts"


@pytest.mark.parametrize("name", EXAMPLES.split())
def test_examples(load, name):
    found = doctest.testmod(load(name))
    assert (found.failed, found.attempted > 0) == (0, True)


def test_variants_take_turns_and_sets_rotate(load):
    calls = []
    variants = {name: lambda i, name=name: calls.append((name, i)) for name in "abc"}
    samples = load("timing").interleave(variants, rounds=4, sets=3, seed=1)
    assert {name: len(taken) for name, taken in samples.items()} == dict.fromkeys("abc", 4)
    assert all(seconds >= 0 for taken in samples.values() for seconds in taken)
    measured = calls[len(variants) :]
    rounds = [measured[i : i + 6] for i in range(0, 24, 6)]
    for number, taken in enumerate(rounds):
        untimed, timed = taken[::2], taken[1::2]
        # An untimed call of the same variant on the set before comes right before each timed one.
        assert [name for name, _ in untimed] == [name for name, _ in timed]
        assert sorted(name for name, _ in timed) == ["a", "b", "c"]
        assert {i for _, i in untimed} == {(number - 1) % 3}
        assert {i for _, i in timed} == {number % 3}
    orders = {tuple(name for name, _ in taken[1::2]) for taken in rounds}
    assert len(orders) > 1, "the order never changed"


def test_no_circle_of_files():
    graph = {}
    for path in BENCHMARKS.glob("*.py"):
        nodes = list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))
        names = {
            alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names
        }
        graph[path.stem] = names | {
            node.module for node in nodes if isinstance(node, ast.ImportFrom)
        }
    assert "claims" in TopologicalSorter(graph).static_order()


def test_parts_run_in_their_order(load, monkeypatch):
    done = []
    monkeypatch.setattr(sys, "argv", ["script", "--parts", "b", "a"])
    load("common").run_parts(
        "Measure.", {name: lambda _, name=name: done.append(name) for name in "abc"}
    )
    assert done == ["a", "b"]


# -- claims and files -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "at_most", "met"),
    [
        (2.0, False, True),
        (0.5, False, False),
        (0.5, True, True),
        (2.0, True, False),
        (None, False, None),
    ],
)
def test_claim(load, value, at_most, met):
    claim = load("common").claim("something", value, 1.0, at_most=at_most, more="kept")
    assert (claim["met"], claim["more"]) == (met, "kept")
    assert load("claims").claim_rows([claim])[0][-1] == {True: "met", False: "MISSED"}.get(
        met, "not measured"
    )


def test_a_wrong_product_is_not_timed(load, rng):
    pytest.importorskip("torch", reason="PyTorch is not installed")
    bench = load("bench_gemm")
    operands = bench.operand_sets((1, 8, 8, 8), ["float32"], 1, 0)
    wrong = bench.Variant("wrong", "numpy", "float32", lambda a, b: (a @ b) * np.float32(1.1))
    with pytest.raises(RuntimeError, match="wrong is wrong"):
        bench.relative_error(wrong, operands, rng)


def test_quick_results_are_refused(load, tmp_path):
    result = {"benchmark": "stress", "settings": {"quick": True}}
    (tmp_path / "stress-x.json").write_text(json.dumps(result))
    with pytest.raises(ValueError, match="quick run"):
        load("render").snippets(tmp_path)


def test_committed_tables_and_charts_are_current(load, capsys):
    assert load("render").check() == 0, capsys.readouterr().err


def test_every_table_and_chart_is_shown(load):
    render = load("render")
    pages = "".join(page.read_text(encoding="utf-8") for page in (ROOT / "docs").glob("*.md"))
    shown = set(re.findall(r"<!-- generated: (bench_\w+\.md) -->", pages))
    assert shown == {path.name for path in render.snippets() if path != render.README}
    tables = "".join(render.snippets().values())
    charts = [render.plot.chart_path(path) for path in render.charted()]
    assert charts
    assert all(f"](../../benchmarks/results/{chart.name})" in tables for chart in charts)


@pytest.fixture
def result_file(load, tmp_path):
    """A copy of a committed result of `bench_accuracy.py`."""
    (found, *_) = load("render").load(BENCHMARKS / "results", "tradeoff")
    return Path(shutil.copy(found, tmp_path))


def test_a_chart_of_other_figures_is_noticed(load, result_file):
    pytest.importorskip("matplotlib", reason="draws")
    plot = load("plot")
    assert not plot.is_current(result_file)
    plot.write(result_file)
    assert plot.is_current(result_file)
    drawn = plot.chart_path(result_file).read_text(encoding="utf-8")
    plot.write(result_file)
    assert plot.chart_path(result_file).read_text(encoding="utf-8") == drawn
    changed = json.loads(result_file.read_text(encoding="utf-8"))
    changed["results"][0]["normalised"] *= 2
    result_file.write_text(json.dumps(changed), encoding="utf-8")
    assert not plot.is_current(result_file)


#: By result: the command and the packages that it needs, a column of its results with its values, the limits of its
#: claims (None: those of the machine).
SCRIPTS = {
    "gemm": (
        "gemm --parts products",
        "torch",
        "variant",
        {"numpy float32", "lowprec float32 tf32", "lowprec bfloat16", "lowprec int8"},
        None,
    ),
    "gemm-schemes": (
        "gemm --parts schemes",
        "",
        "mode",
        {"bf16x3", "bf16x6", "bf16x9", "tf32x3", "fp32_emulated"},
        None,
    ),
    "overhead": (
        "overhead --parts calls",
        "torch jax threadpoolctl",
        "measured",
        {"call", "variant", "import"},
        [8, 10] + [12] * 3 + [15] * 3 + [14, 0.05],
    ),
    "torch": ("gemm --parts torch", "torch", "units", {"all", "AVX2"}, []),
    "guard": (
        "overhead --parts guard",
        "torch jax threadpoolctl",
        "block",
        {"fp32_guard", "math_mode"},
        [2.0, 15.0],
    ),
    "unscale": ("unscale", "torch", "variant", {"lowprec"}, [1.0]),
    "solve": ("solve", "torch scipy", "kind", {"family", "condition"}, [2.0, 0.95, 1.4, 1.6]),
    "transformer": ("transformer", "torch", "kind", {"product", "step"}, [0.95, 0.85, 1.1, 0.65]),
    "narrow": ("narrow", "", "kind", {"normal", "storage", "weight"}, [0.9, 0.9, 1.3, 1.6, 1.6]),
    "digits": ("digits --libraries numpy", "sklearn rich scipy", "library", {"numpy"}, [0.05] * 5),
    "dask": (
        "dask",
        "distributed",
        "variant",
        {"dask.array.matmul", "lowprec.matmul"},
        [1.0, 1.0, 1.0],
    ),
    "recovery": (
        "accuracy --parts schemes",
        "",
        "arithmetic",
        {"this CPU", "Volta", "Hopper"},
        [1.0],
    ),
    "real": ("accuracy --parts real", "", "input", {"Hilbert", "Vandermonde"}, [1.0]),
    "tradeoff": ("accuracy --parts speed", "", "mode", {"fp32", "bf16x3"}, [1.0]),
    "accuracy": (
        "accuracy --parts sizes",
        "",
        "distribution",
        {"normal", "positive", "wide"},
        [1.0] * 4,
    ),
}

#: Claims that hold in quick runs, too.
HOLD = ("recovery", "real", "tradeoff", "accuracy")


@pytest.mark.sweep
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_script_writes_its_figures_and_claims(tmp_path, name):
    command, needs, column, values, limits = SCRIPTS[name]
    for module in needs.split():
        pytest.importorskip(module, reason=f"{module} is not installed")
    script, *options = command.split()
    command_line = [
        sys.executable,
        str(BENCHMARKS / f"bench_{script}.py"),
        *options,
        "--quick",
        "--output",
        str(tmp_path),
    ]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(
        command_line, capture_output=True, text=True, env=environment, check=False
    )
    assert done.returncode == 0, done.stderr
    (path,) = tmp_path.iterdir()  # no other file is left
    assert path.name.startswith(name)
    result = json.loads(path.read_text())
    assert set(result) == DOCUMENT_KEYS
    assert set(result["machine"]) >= MACHINE_KEYS
    assert (result["benchmark"], result["settings"]["quick"]) == (name, True)
    assert {row.get(column) for row in result["results"]} >= values
    assert limits is None or [claim["limit"] for claim in result["claims"]] == limits
    assert ("| claim |" in done.stdout) is bool(result["claims"])
    assert name not in HOLD or all(claim["met"] for claim in result["claims"])
    CHECKS.get(name, lambda rows: None)(result["results"])


def _gemm(rows):
    for row in rows:
        assert row["seconds"]["q1"] <= row["seconds"]["median"] <= row["seconds"]["q3"]
        assert row["speed"]["numpy float32"]["median"] > 0
        assert (row["kernel"] is None) is (row["library"] != "lowprec")
    # Half of the unit roundoff, root-mean-square, is what each mode must show and FP32 could not.
    errors = {r["variant"]: r["relative_error"] for r in rows if r["n"] == 64}
    assert errors["lowprec float32 fp32"] < 1e-6
    assert errors["lowprec float32 bf16"] > 2**-10 > errors["lowprec float32 tf32"] > 2**-13
    assert errors["lowprec int8"] == 0


def _schemes(rows):
    (prepared,) = [r for r in rows if r["operands"] == "float32 prepared"]
    assert (prepared["m"], prepared["k"], prepared["mode"]) == (32, 512, "bf16x3")
    # What two bfloat16 parts of each operand leave, root-mean-square, and what three do.
    errors = {r["mode"]: r["relative_error"] for r in rows if r["m"] == r["k"] == 512}
    assert (
        2.0**-15 > max(errors["bf16x3"], prepared["relative_error"]) > 2.0**-20 > errors["bf16x6"]
    )


def _overhead(rows):
    (imported,) = (r for r in rows if r["measured"] == "import")
    assert min(imported["lowprec"]["median"], imported["numpy"]["median"]) > 0


def _accuracy(rows):
    assert all(row["of_bound"] <= 1 for row in rows)
    errors = {(r["distribution"], r["n"], r["mode"]): r["normalised"] for r in rows}
    # A mode that ran as fp32 would have its error.
    assert all(error > 2**-18 for (*_, mode), error in errors.items() if mode != "fp32")
    assert all(error < 2**-20 for (*_, mode), error in errors.items() if mode == "fp32")


def _beside_torch(rows):
    counted = [r for r in rows if r["of"]]
    assert [(r["units"], r["of"]) for r in counted] == [
        (units, of) for units in ("all", "AVX2") for of in (1024, 64)
    ]
    assert {r["lowprec"] for r in counted} == {0}
    assert all(r["speed"]["median"] > 0 for r in rows if not r["of"])


#: Further checks of the rows of a result.
CHECKS = {
    "gemm": _gemm, "gemm-schemes": _schemes, "overhead": _overhead, "accuracy": _accuracy,
    "torch": _beside_torch,
}  # fmt: skip
