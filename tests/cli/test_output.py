"""Tables and progress, with and without a terminal."""

import contextlib
import io
import os
import re
import struct
import subprocess
import sys

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
    def isatty(self):
        return True


def _terminal(monkeypatch, stream):
    terminal = _Terminal()
    monkeypatch.setattr(sys, stream, terminal)
    return terminal


def test_no_terminal_no_drawing(capsys):
    output.print_tables([TABLE])
    assert capsys.readouterr().out == plain_text(TABLE) + "\n"


@pytest.mark.parametrize("term", ["xterm", "dumb"])
def test_a_terminal_gets_a_bold_title(monkeypatch, term):
    terminal = _terminal(monkeypatch, "stdout")
    monkeypatch.setenv("TERM", term)
    monkeypatch.setenv("COLUMNS", "80")
    output.print_tables([TABLE])
    # The same text with a bold title.
    assert re.sub(r"\x1b\[[0-9;]*m", "", terminal.getvalue()) == plain_text(TABLE) + "\n"
    assert terminal.getvalue().startswith(
        f"\x1b[1m{TABLE.title}\x1b[0m" if term == "xterm" else TABLE.title
    )


def test_a_terminal_shows_the_current_step(monkeypatch):
    terminal = _terminal(monkeypatch, "stderr")
    monkeypatch.setenv("COLUMNS", "30")
    with progress("check", 2) as step:
        step("normal, fp32")
        step("normal, a mode with a long name")
    first, second, last = re.findall(r"\r([^\r]{29})\r", terminal.getvalue())
    assert (first.rstrip(), second, last.strip()) == (
        "check 1/2: normal, fp32",
        "check 2/2: normal, a mode wit",
        "",
    )


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (0.0, "0.00 us"),
        (2.5e-6, "2.50 us"),
        (1e-3, "1.00 ms"),
        (0.1234, "123 ms"),
        (250.0, "250 s"),
    ],
)
def test_seconds(value, shown):
    assert seconds(value) == shown


def test_json_has_no_infinity(capsys):
    output.print_json({"a": [float("inf"), (float("nan"), 1.5)], "b": None})
    words = "".join(capsys.readouterr().out.split())
    assert words == '{"a":[null,[null,1.5]],"b":null}'


def test_optional_columns_give_way(monkeypatch):
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


@contextlib.contextmanager
def _pseudoterminal(width):
    """Yield a file descriptor of a terminal with lines of this many characters, and a function that reads its text."""
    fcntl, termios = pytest.importorskip("fcntl"), pytest.importorskip("termios")
    ours, theirs = os.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("4H", 24, width, 0, 0))
    with open(ours, "rb", 0) as reader, open(theirs, "wb", 0) as terminal:
        yield terminal, lambda: reader.read(1 << 16).decode()


LINE = ("plan", "--shapes", "1024x512", "512x2048", "--rtol", "1e-3")
PROGRAM = "import numpy as np\nnp.ones((64, 32), np.float32) @ np.ones((32, 8), np.float32)"


@pytest.mark.parametrize("stream", ["stdin", "stderr"])
def test_a_table_in_a_pipe_has_the_width_of_the_terminal(monkeypatch, stream):
    monkeypatch.delenv("COLUMNS", raising=False)
    with _pseudoterminal(70) as (terminal, _):
        streams = {"stdin": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, stream: terminal}
        done = subprocess.run(
            [sys.executable, "-m", "lowprec", *LINE], stdout=subprocess.PIPE, check=True, **streams
        )
    lines = done.stdout.decode().splitlines()
    assert 60 < max(map(len, lines)) <= 70


def test_the_report_of_a_run_has_the_width_of_its_terminal(monkeypatch, tmp_path):
    monkeypatch.delenv("COLUMNS", raising=False)
    (tmp_path / "program.py").write_text(PROGRAM)
    command = [
        sys.executable,
        "-m",
        "lowprec",
        "run",
        "--mode",
        "bf16",
        "--intercept",
        tmp_path / "program.py",
    ]
    with _pseudoterminal(70) as (terminal, read):
        quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL}
        subprocess.run(command, stderr=terminal, check=True, **quiet)
        lines = read().splitlines()
    assert len(lines) > 3
    assert max(map(len, lines)) <= 70


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
def test_no_word_is_broken(monkeypatch, tmp_path, rng, words):
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
        shown[width] = re.sub(
            r"\x1b\[[0-9;?]*[a-zA-Z]|.*[\r━]", "", out.getvalue() + err.getvalue()
        )
    for width in (40, 80, 120):
        # A narrow table has fewer columns, or headings next to its cells; help has the same words.
        assert set(shown[width].split()) <= set(shown[1000].split())
        assert words[-1] != "--help" or shown[width].split() == shown[1000].split()
        assert [x for x in shown[width].splitlines() if len(x) > width and len(x.split()) > 1] == []
