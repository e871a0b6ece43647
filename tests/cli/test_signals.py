"""A command that is told to end leaves nothing half-written behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(os.name != "posix", reason="Windows has no such signals")

#: Forks a child for each line of what writes files, which gets the signal there. Prints how each one ended.
EVERY_LINE = """
import os, signal, sys
from lowprec.util import atomic
from lowprec.cli import main

name, *words = sys.argv[1:]
number = getattr(signal, name)
signal.signal(number, signal.SIG_DFL)  # under nohup, SIGHUP is ignored from the start

class At:
    def __init__(self, line): self.left = line
    def __call__(self, frame, event, argument):
        if frame.f_code.co_filename != atomic.__file__: return None
        if event == "line":
            self.left -= 1
            if not self.left: signal.raise_signal(number)
        return self

for line in range(1, 1000):
    child = os.fork()
    if child == 0:
        trace = At(line)
        sys.settrace(trace)
        code = main(words)
        sys.settrace(None)
        os._exit(code if trace.left <= 0 else 99)
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    folder = os.path.dirname(words[-1])
    print(code, os.path.getsize(words[-1]), *sorted(os.listdir(folder)), file=sys.stderr)
    if code == 99: break
    open(words[-1], "wb").close()
"""


@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP"])
def test_a_signal_at_any_line_leaves_one_whole_file(tmp_path: Path, files: tuple[Path, Path], name: str) -> None:
    folder = tmp_path / "out"
    folder.mkdir()
    words = ("matmul", *map(str, files), "-o", str(folder / "C.npy"))
    (folder / "C.npy").touch()
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", EVERY_LINE, name, *words],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    *ended, last = (line.split() for line in done.stderr.splitlines())
    number = getattr(signal, name)
    whole = str(24 * 16 * 4 + 128)
    assert last == ["99", whole, "C.npy"]
    # By the signal, so that whoever started the command sees it; the old file (empty) or the new one, and no other.
    assert {(code, *names) for code, _, *names in ended} == {(str(-number), "C.npy")}
    assert {size for _, size, *_ in ended} == {"0", whole}
    assert len(ended) > 8


def test_nohup_is_respected(tmp_path: Path) -> None:
    code = (
        "import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN)\n"
        "from lowprec import cli\n"
        "from lowprec.cli.commands import info\n"
        "run = info.run\n"
        "info.run = lambda options: signal.raise_signal(signal.SIGHUP) or run(options)\n"
        "cli.main(['info'])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("lowprec ")


def test_the_caller_s_handlers_are_as_before() -> None:
    from lowprec.cli import main

    handlers = [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGHUP)]
    assert main(["--version"]) == 0
    assert [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGHUP)] == handlers
