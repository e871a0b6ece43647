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


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The figures that a command would write."""
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    from matplotlib.figure import Figure

    figures: list[Any] = []
    monkeypatch.setattr(Figure, "savefig", lambda self, *a, **k: figures.append(self))
    return figures


def test_the_plot_of_check_has_every_error_and_bound(command: Command, drawn: list[Any], tmp_path: Path) -> None:
    cases = json.loads(command(*CHECK, "--plot", tmp_path / "out.svg", "--json").out)["cases"]
    (figure,) = drawn
    assert [panel.get_title() for panel in figure.axes] == [case["name"] for case in cases]
    for panel, case in zip(figure.axes, cases, strict=True):
        bounds, *named = panel.lines
        expected = [[row["speedup"], row["bound"]] for row in case["rows"]]
        assert bounds.get_xydata().tolist() == expected
        points = {line.get_label(): line.get_xydata().tolist() for line in named}
        assert points == {row["mode"]: [[row["speedup"], row["scaled_error"]]] for row in case["rows"]}
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["guaranteed bound", "fp32", "tf32", "fp16"]


def test_no_two_modes_look_alike(command: Command, drawn: list[Any], tmp_path: Path) -> None:
    words = ("--sizes", "16,8", "--rounds", "1", "--distribution", "normal")
    assert command("check", *words, "--plot", tmp_path / "out.svg").code == 0
    above, below = drawn[0].axes
    looks = {(line.get_color(), line.get_marker()) for line in above.lines}
    assert len(looks) == len(above.lines) == len(below.lines) == len(available_modes()) - 1, "all but fp64_emulated"


@pytest.mark.parametrize(
    ("option", "path", "says"),
    [
        ("--plot", "out.txt", "chosen by the suffix of the path, got 'out.txt'"),
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
    monkeypatch.setitem(sys.modules, "matplotlib.backend_bases", None)
    assert 'pip install "lowprec[plot]"' in refused("check", "--plot", tmp_path / "out.svg")


def test_matplotlib_is_not_loaded_without_a_plot(
    command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert command(*CHECK, "--csv", tmp_path / "out.csv").code == 0
