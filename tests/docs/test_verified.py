"""The page of what was seen on a GPU says what the reports say, and nothing more."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

DOCS = Path(__file__).resolve().parents[2] / "docs"


@pytest.fixture
def verified(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(DOCS)
    yield importlib.import_module("_verified")
    sys.modules.pop("_verified", None)


def _report(*rows: dict[str, Any], section: str = "graphs", **settings: Any) -> dict[str, Any]:
    """A report of an H200 with some rows in one section."""
    device = {"name": "NVIDIA H200", "compute_capability": "9.0"}
    gpu = {"devices": [device], "cuda": "13.0", "cublas": "13.1.0"}
    machine = {"gpu": gpu, "date": "2030-01-02", "versions": {"torch": "2.11.0"}, "commit": "abc"}
    given = [{"device": "gpu", "ok": True, **row} for row in rows]
    return {
        "benchmark": "gpu",
        "machine": machine,
        "settings": {"quick": False, **settings},
        "claims": [],
        "results": {section: {"rows": given}},
    }


def _feature(verified: ModuleType, *sections: str, **where: Any) -> Any:
    evidence = tuple(verified.Evidence(s, tuple(where.items())) for s in sections)
    return verified.Feature("something", evidence)


def test_nothing_is_seen_without_a_report(verified: ModuleType) -> None:
    cells = [row[1] for row in verified.rows([]) if not row[0].startswith("**")]
    assert set(cells) == {"not yet seen on a GPU"}
    assert len(cells) > 40


def test_a_row_that_is_well_is_seen(verified: ModuleType) -> None:
    report = _report({"route": "direct"}, {"route": "packed", "ok": False})
    feature = _feature(verified, "graphs", route="direct")
    assert verified.seen(feature, [report]) == "NVIDIA H200, 2030-01-02"
    other = {**report, "machine": {**report["machine"], "date": "2030-02-03"}}
    assert verified.seen(feature, [report, other]).endswith("; NVIDIA H200, 2030-02-03")


@pytest.mark.parametrize(
    ("rows", "said"),
    [
        ([], "not yet seen on a GPU"),
        # On a CPU, not judged, something else.
        ([{"device": "cpu"}], "not yet seen on a GPU"),
        ([{"ok": None}], "not yet seen on a GPU"),
        ([{"route": "aside"}], "not yet seen on a GPU"),
        # One that fails spoils it, whatever else is well.
        ([{}, {"ok": False}], "**failed** on NVIDIA H200, 2030-01-02"),
    ],
)
def test_what_does_not_count(verified: ModuleType, rows: list[dict[str, Any]], said: str) -> None:
    report = _report(*({"route": "direct", **row} for row in rows))
    assert verified.seen(_feature(verified, "graphs", route="direct"), [report]) == said


def test_all_evidence_is_needed(verified: ModuleType) -> None:
    report = _report({})
    assert verified.seen(_feature(verified, "graphs", "streams"), [report]) == (
        "not yet seen on a GPU"
    )
    report["results"]["streams"] = {"rows": [{"device": "gpu", "ok": True}]}
    assert "H200" in verified.seen(_feature(verified, "graphs", "streams"), [report])


def test_a_quick_report_is_refused(verified: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "gpu-h200.json").write_text(json.dumps(_report({}, quick=True)))
    with pytest.raises(ValueError, match=r"gpu-h200\.json is from a quick run"):
        verified.reports(tmp_path)


def test_a_report_of_a_cpu_is_none(verified: ModuleType, tmp_path: Path) -> None:
    report = _report({})
    report["machine"]["gpu"] = None
    (tmp_path / "gpu-none.json").write_text(json.dumps(report))
    assert verified.reports(tmp_path) == []
    (tmp_path / "gpu-h200.json").write_text(json.dumps(_report({})))
    (found,) = verified.reports(tmp_path)
    assert verified.conditions(found) == (
        "NVIDIA H200, 2030-01-02: compute capability 9.0, driver unknown (CUDA 13.0), cuBLAS 13.1.0; "
        "torch 2.11.0; commit abc."
    )


def test_claims_are_shown_with_their_verdicts(verified: ModuleType) -> None:
    claims = [
        {"what": "a", "value": 0.5, "relation": ">=", "limit": 0.98, "met": False, "by_size": {"8": 0.5}},
        {"what": "b", "value": None, "relation": "<=", "limit": 1.5, "met": None},
    ]  # fmt: skip
    assert list(verified.claim_rows({"claims": claims})) == [
        ["a", "0.5", "8: 0.50", ">= 0.98", "**missed**"],
        ["b", "-", "-", "<= 1.5", "not measured"],
    ]


def test_a_test_that_is_named_must_exist(verified: ModuleType) -> None:
    for features in verified.FEATURES.values():
        for feature in features:
            assert verified.covered_by(feature)
    for wrong in ("test_products.py::test_nothing_at_all", "test_nowhere.py::test_products"):
        with pytest.raises(ValueError, match="there is no test"):
            verified.covered_by(verified.Feature("something", (), wrong))


def test_sections_of_the_evidence_are_those_of_the_report(
    verified: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(DOCS.parent / "benchmarks")
    sections = importlib.import_module("gpu.sections").SECTIONS
    named = {e.section for group in verified.FEATURES.values() for f in group for e in f.evidence}
    assert named <= set(sections)
    for name in [n for n in sys.modules if n == "gpu" or n.startswith("gpu.")]:
        del sys.modules[name]


def test_names_of_checks_are_those_of_the_report(
    verified: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A misspelt name would never be seen."""
    monkeypatch.syspath_prepend(DOCS.parent / "benchmarks")
    monkeypatch.setenv("OPENBLAS_THREAD_TIMEOUT", "4")
    before = set(sys.modules)
    names = {s: set(importlib.import_module(f"gpu.{s}").CHECKS) for s in ("features", "streams")}
    for features in verified.FEATURES.values():
        for feature in features:
            for evidence in feature.evidence:
                where = dict(evidence.where)
                if evidence.section in names:
                    assert where["name"] in names[evidence.section]
    for name in set(sys.modules) - before:
        if name.partition(".")[0] in ("gpu", "common", "machine", "timing"):
            del sys.modules[name]
