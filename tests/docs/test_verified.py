"""The page of what was seen on a GPU says what the reports say, and nothing more."""

import ast
import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

from support import benchmark_modules

DOCS = Path(__file__).resolve().parents[2] / "docs"


@pytest.fixture
def verified():
    with benchmark_modules.imports(DOCS) as load:
        yield load("_verified")


def _report(*rows, part="test_device", **settings):
    """A report of an H200 with some rows in one part."""
    device = {"name": "NVIDIA H200", "compute_capability": "9.0"}
    gpu = {"devices": [device], "cuda": "13.0", "cublas": "13.1.0"}
    machine = {"gpu": gpu, "date": "2030-01-02", "versions": {"torch": "2.11.0"}, "commit": "abc"}
    given = [{"feature": "x", "device": "gpu", "ok": True, **row} for row in rows]
    return {
        "benchmark": "gpu",
        "machine": machine,
        "settings": {"quick": False, **settings},
        "claims": [],
        "results": {part: {"rows": given}},
    }


def test_nothing_is_seen_without_a_report(verified):
    cells = [row[1] for row in verified.rows([]) if not row[0].startswith("**")]
    assert set(cells) == {"not yet seen on a GPU"}
    assert len(cells) > 40
    assert verified.summary([]).startswith("Nothing was seen on a GPU yet: ")


def test_the_summary_counts_the_features_that_worked(verified):
    good, bad = (
        {"feature": "stored as float64"},
        {"feature": "batches, and one dimension", "ok": False},
    )
    total = sum(map(len, verified.FEATURES.values()))
    said = verified.summary([_report(good, bad)])
    assert said == f"1 of {total} features worked on a GPU (NVIDIA H200, 2030-01-02).\n"


def test_a_row_that_is_well_is_seen(verified):
    report = _report({}, {"feature": "y", "ok": False})
    assert verified.seen("x", [report]) == "NVIDIA H200, 2030-01-02"
    other = {**report, "machine": {**report["machine"], "date": "2030-02-03"}}
    assert verified.seen("x", [report, other]).endswith("; NVIDIA H200, 2030-02-03")


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([], "not yet seen on a GPU"),
        # In software, not judged, something else.
        ([{"device": "software"}], "not yet seen on a GPU"),
        ([{"ok": None}], "not yet seen on a GPU"),
        ([{"feature": "y"}], "not yet seen on a GPU"),
        # One that fails spoils it, whatever else is well.
        ([{}, {"ok": False}], "**failed** on NVIDIA H200, 2030-01-02"),
    ],
)
def test_reasons_that_do_not_count(verified, rows, said):
    assert verified.seen("x", [_report(*rows)]) == said


def test_a_quick_report_is_refused(verified, tmp_path):
    (tmp_path / "gpu-h200.json").write_text(json.dumps(_report({}, quick=True)))
    with pytest.raises(ValueError, match=r"gpu-h200\.json is from a quick run"):
        verified.reports(tmp_path)


def test_markers_are_read_from_the_sources(verified, tmp_path):
    (tmp_path / "test_a.py").write_text(
        '@pytest.mark.feature("a", "{b} c")\ndef test_marked(): ...'
    )
    marked = verified.markers(tmp_path)
    assert marked == {w: ["`test_a.py`, `test_marked`"] for w in ("a", "{b} c")}
    assert verified.covered_by("d e c", marked) == "`test_a.py`, `test_marked`"
    with pytest.raises(ValueError, match="no test bears the marker of the feature 'd c e'"):
        verified.covered_by("d c e", marked)


def test_features_are_those_that_pytest_collects(verified):
    """Each feature has a test, and each marker is listed; without a device CuPy alone is replaced."""
    pytest.importorskip("nvmath", reason="nvmath-python is not installed")
    code = (
        "import pytest, sys\n"
        "class P:\n"
        " def pytest_collection_finish(self, session):\n"
        "  print({v for i in session.items for n, v in i.user_properties if n == 'feature'})\n"
        "pytest.main(['-q', '--collect-only', '-m', 'feature', sys.argv[1]], plugins=[P()])"
    )
    command = [sys.executable, "-c", code, str(verified.tests.FOLDER)]
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=DOCS.parent)
    line = next(line for line in done.stdout.splitlines() if line.startswith("{"))
    listed = [f for group in verified.FEATURES.values() for f in group if isinstance(f, str)]
    assert len(listed) == len(set(listed))
    assert {f.replace("torch", "cupy") for f in listed} == ast.literal_eval(line)


def test_parts_of_measurements_are_those_of_the_report(verified):
    named = {f.part for g in verified.FEATURES.values() for f in g if not isinstance(f, str)}
    assert named <= set(importlib.import_module("gpu.parts").MEASUREMENTS)
