"""``--csv`` and ``--plot``."""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lowprec.modes import available_modes

Command = Callable[..., Any]

CHECK = ("check", "--sizes", "16", "--rounds", "3", "--modes", "tf32,fp16")
SIZES = ("check", "--sizes", "8,16", "--rounds", "1", "--dtype", "int8")


@pytest.mark.parametrize("words", [CHECK, SIZES])
def test_csv_has_the_rows_of_json(command: Command, tmp_path: Path, words: tuple[str, ...]) -> None:
    done = command(*words, "--csv", tmp_path / "out.csv", "--json")
    found = json.loads(done.out)
    rows = [{"case": case["name"], **row} for case in found["cases"] for row in case["rows"]]
    with (tmp_path / "out.csv").open(newline="") as file:
        read = list(csv.DictReader(file))
    assert len(read) == len(rows)
    for line, row in zip(read, rows, strict=True):
        assert {key: line[key] for key in row} == {
            key: "" if value is None else str(value) for key, value in row.items()
        }


@pytest.mark.parametrize("words", [CHECK, SIZES])
@pytest.mark.parametrize(("suffix", "begins"), [("svg", b"<?xml"), ("PNG", b"\x89PNG")])
def test_plot(command: Command, tmp_path: Path, words: tuple[str, ...], suffix: str, begins: bytes) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    path = tmp_path / f"out.{suffix}"
    assert command(*words, "--plot", path).code == 0
    assert path.read_bytes().startswith(begins)
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


def test_the_plot_of_check_has_every_error_and_bound(
    command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    from matplotlib.figure import Figure

    drawn: list[Any] = []
    monkeypatch.setattr(Figure, "savefig", lambda self, *a, **k: drawn.append(self))
    done = command(*CHECK, "--plot", tmp_path / "out.svg", "--json")
    cases = json.loads(done.out)["cases"]
    (figure,) = drawn
    assert [panel.get_title() for panel in figure.axes] == [case["name"] for case in cases]
    for panel, case in zip(figure.axes, cases, strict=True):
        points = {(x, y) for line in panel.lines for x, y in line.get_xydata().tolist()}
        for row in case["rows"]:
            assert ((row["speedup"], row["scaled_error"]) in points) == (row["error"] is not None)
            assert ((row["speedup"], row["bound"]) in points) == (row["error"] is not None)
    legend = [text.get_text() for text in figure.axes[-1].get_legend().get_texts()]
    assert legend == ["fp32", "tf32", "fp16", "guaranteed bound"]


def test_every_mode_is_compared_and_drawn_apart(
    command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    from matplotlib.figure import Figure

    drawn: list[Any] = []
    monkeypatch.setattr(Figure, "savefig", lambda self, *a, **k: drawn.append(self))
    words = ("--sizes", "16", "--rounds", "1", "--distribution", "normal")
    done = command("check", *words, "--plot", tmp_path / "out.svg", "--json")
    (case,) = json.loads(done.out)["cases"]
    assert [row["mode"] for row in case["rows"]] == [*available_modes()]
    (panel,) = drawn[0].axes
    *handles, bound = panel.get_legend().legend_handles
    assert bound.get_label() == "guaranteed bound"
    assert [handle.get_label() for handle in handles] == [*available_modes()]
    assert len({(h.get_marker(), h.get_color()) for h in handles}) == len(handles)
    # Slow schemes do not lie upon each other at the left end.
    assert panel.get_xscale() == "log"


@pytest.mark.parametrize(
    ("option", "path", "says"),
    [
        ("--plot", "out.pdf", "its name must end in .png or .svg"),
        ("--plot", "missing/out.svg", "does not exist"),
        ("--csv", "missing/out.csv", "does not exist"),
        ("--csv", ".", "it is a folder"),
    ],
)
def test_refused_before_anything_is_measured(refused: Callable[..., str], option: str, path: str, says: str) -> None:
    assert says in refused("check", option, path)


def test_a_missing_matplotlib_is_named(
    refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert 'pip install "lowprec[plot]"' in refused("check", "--plot", tmp_path / "out.svg")


def test_matplotlib_is_not_loaded_without_a_plot(
    command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert command(*CHECK, "--csv", tmp_path / "out.csv").code == 0
