"""Tables with and without rich, with and without a terminal."""

from __future__ import annotations

import io
import re
import sys
from pathlib import Path

import numpy as np
import pytest

import lowprec
from lowprec.checking.comparison import seconds
from lowprec.cli import main, output
from lowprec.cli.commands import check
from lowprec.util.progress import progress
from lowprec.util.tables import Table, plain_text

TABLE = Table("Sizes [of things]", ["name", ">n"], [["[bold]a", "8"], ["bc", "1024"]])


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def no_rich(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make ``import rich`` fail, as where it is not installed."""
    for name in [n for n in sys.modules if n.partition(".")[0] == "rich"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "rich", None)


def _terminal(monkeypatch: pytest.MonkeyPatch, stream: str) -> _Terminal:
    terminal = _Terminal()
    monkeypatch.setattr(sys, stream, terminal)
    return terminal


def test_no_terminal_no_drawing(capsys: pytest.CaptureFixture[str]) -> None:
    output.print_tables([TABLE])
    assert capsys.readouterr().out == plain_text(TABLE) + "\n"


def test_a_terminal_gets_a_bold_title(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("rich", reason="rich is not installed")
    terminal = _terminal(monkeypatch, "stdout")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    output.print_tables([TABLE])
    # The same text, none of it taken for markup, with a bold title.
    assert re.sub(r"\x1b\[[0-9;]*m", "", terminal.getvalue()) == plain_text(TABLE) + "\n"
    assert terminal.getvalue().startswith(f"\x1b[1m{TABLE.title}\x1b[0m")


@pytest.mark.usefixtures("no_rich")
def test_without_rich_a_terminal_gets_plain_text(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = _terminal(monkeypatch, "stdout")
    output.print_tables([TABLE])
    assert terminal.getvalue() == plain_text(TABLE) + "\n"


@pytest.mark.usefixtures("no_rich")
def test_without_rich_there_is_no_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = _terminal(monkeypatch, "stderr")
    with progress("check", 2) as step:
        step("first")
        step("second")
    assert terminal.getvalue() == ""


def test_the_bar_reports_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("rich", reason="rich is not installed")
    terminal = _terminal(monkeypatch, "stderr")
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    with progress("check", 2) as step:
        step("normal, fp32")
        step("normal, tf32")
    assert "check: normal, tf32" in terminal.getvalue()


@pytest.mark.parametrize(
    ("value", "shown"), [(0.0, "0.00 us"), (2.5e-6, "2.50 us"), (1e-3, "1.00 ms"), (0.1234, "123 ms"), (250.0, "250 s")]
)
def test_seconds(value: float, shown: str) -> None:
    assert seconds(value) == shown


def test_json_has_no_infinity(capsys: pytest.CaptureFixture[str]) -> None:
    output.print_json({"a": [float("inf"), (float("nan"), 1.5)], "b": None})
    words = "".join(capsys.readouterr().out.split())
    assert words == '{"a":[null,[null,1.5]],"b":null}'


@pytest.mark.parametrize("rich", [True, False])
def test_optional_columns_give_way(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest, rich: bool) -> None:
    if rich:
        pytest.importorskip("rich", reason="rich is not installed")
    else:
        request.getfixturevalue("no_rich")
    table = Table("T", ["name", "first", ">second"], [["n" * 40, "f" * 20, "s" * 20]], ["first"])
    for width, shown in ((120, True), (80, False)):
        terminal = _terminal(monkeypatch, "stdout")
        monkeypatch.setenv("TERM", "xterm")
        monkeypatch.setenv("COLUMNS", str(width))
        output.print_tables([table])
        text = re.sub(r"\x1b\[[0-9;]*m", "", terminal.getvalue())
        (line,) = (line for line in text.splitlines() if "nnn" in line)
        assert "n" * 40 in line
        assert "s" * 20 in line
        assert ("f" * 20 in line) is shown
        assert max(len(line.rstrip()) for line in text.splitlines()) <= width


COMMANDS = ("info", "plan", "check", "autotune", "run")
OUTPUTS = (
    *((*name, "--help") for name in ((), *zip(COMMANDS, strict=True))),
    ("info", "--all"),
    ("plan", "--shapes", "1024x512", "512x2048", "--rtol", "1e-3"),
    ("plan", "--shapes", "1024x512", "512x2048", "--mode", "fp16_karatsuba", "--device", "h200"),
    ("check", "A.npy", "B.npy", "--rounds", "1"),
    ("check", "--mode", "tf32"),
    ("autotune", "--shapes", "8x8", "8x8"),
    ("plan", "--shapes", "4x4", "4x4", "--mode", "tf23"),
    ("plan", "--shapes", "4x4", "4x4", "--device", "h20"),
    ("run", "--force", "missing.py"),
)


@pytest.mark.parametrize("words", OUTPUTS, ids=" ".join)
def test_no_word_is_broken(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, rng: np.random.Generator, words: tuple[str, ...]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LOWPREC_CACHE_DIR", "cache")
    np.save("A.npy", rng.standard_normal((24, 40), dtype=np.float32))
    np.save("B.npy", rng.standard_normal((40, 16), dtype=np.float32))
    found = lowprec.check(np.load("A.npy"), np.load("B.npy"), rounds=1)
    monkeypatch.setattr(check, "compare", lambda *_, **__: found)
    shown = {}
    for width in (40, 80, 120, 1000):
        out, err = (_terminal(monkeypatch, stream) for stream in ("stdout", "stderr"))
        monkeypatch.setenv("COLUMNS", str(width))
        main(list(words))
        shown[width] = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]|.*[\r━]", "", out.getvalue() + err.getvalue())
    for width in (40, 80, 120):
        # A narrow table has fewer columns, or headings next to its cells; help has the same words.
        assert set(shown[width].split()) <= set(shown[1000].split())
        assert words[-1] != "--help" or shown[width].split() == shown[1000].split()
        assert [x for x in shown[width].splitlines() if len(x) > width and len(x.split()) > 1] == []
