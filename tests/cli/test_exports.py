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
    assert [panel.get_title(loc="left") for panel in figure.axes] == [case["name"] for case in cases]
    for panel, case in zip(figure.axes, cases, strict=True):
        points = {(x, y) for line in panel.lines for x, y in line.get_xydata().tolist()}
        for row in case["rows"]:
            assert ((row["speedup"], row["scaled_error"]) in points) == (row["error"] is not None)
            assert ((row["speedup"], row["bound"]) in points) == (row["error"] is not None)
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()][:2] == ["guaranteed bound", "error"]


def test_every_mode_has_its_name_at_its_point(command: Command, drawn: list[Any], tmp_path: Path) -> None:
    from matplotlib.text import Text

    words = ("--sizes", "16", "--rounds", "1", "--distribution", "normal")
    assert command("check", *words, "--plot", tmp_path / "out.svg").code == 0
    (panel,) = drawn[0].axes
    drawn[0].draw_without_rendering()
    assert [text.get_text() for text in panel.texts] == [m for m in available_modes() if m != "fp64_emulated"]
    boxes = [Text.get_window_extent(text) for text in panel.texts]
    points = panel.transData.transform([text.xy for text in panel.texts])
    for box, name in zip(boxes, panel.texts, strict=True):
        assert box.count_overlaps(boxes) == 1, f"{name} covers another name"
        assert not any(box.contains(*point) for point in points), f"{name} covers a point"
        assert panel.bbox.contains(*box.min)
        assert panel.bbox.contains(*box.max)


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
