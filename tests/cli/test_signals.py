"""A signal that ends a command leaves no partial file."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from lowprec.cli import main
from lowprec.cli.commands import info
from lowprec.util import atomic
from support.commands import forked

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
SIGNALS = [signal.SIGTERM, signal.SIGHUP]


def _exit_code(words: list[str], number: int, at: int) -> int:
    """Run a command in a child that signals itself at a line that writes files; 99 if there are fewer lines."""

    def act() -> int:
        left = at

        def trace(frame: Any, event: str, _: Any) -> Any:
            nonlocal left
            if frame.f_code.co_filename != atomic.__file__:
                return None
            if event == "line":
                left -= 1
                if not left:
                    signal.raise_signal(number)
            return trace

        signal.signal(number, signal.SIG_DFL)  # under nohup, SIGHUP is ignored from the start
        sys.settrace(trace)
        code = main(words)
        return code if left <= 0 else 99

    return forked(act)


@pytest.mark.parametrize(("number", "step"), [(signal.SIGTERM, 1), (signal.SIGHUP, 5)])
def test_a_signal_at_any_line_leaves_one_whole_file(
    tmp_path: Path, files: tuple[Path, Path], number: int, step: int
) -> None:
    written = tmp_path / "out" / "C.npy"
    written.parent.mkdir()
    words, at, seen = ["matmul", *map(str, files), "-o", str(written)], 1, []
    while not seen or seen[-1][0] != 99:
        written.touch()
        os.truncate(written, 0)
        code = _exit_code(words, number, at)
        seen.append((code, written.stat().st_size, [p.name for p in written.parent.iterdir()]))
        at += step
    # By the signal, so that the parent process sees it; the old file (empty) or the new one, and no other.
    whole = 24 * 16 * 4 + 128
    assert seen.pop() == (99, whole, ["C.npy"])
    assert {code for code, _, _ in seen} == {-number}
    assert {size for _, size, _ in seen} == {0, whole}
    assert all(names == ["C.npy"] for *_, names in seen)
    assert at > 8


@pytest.mark.parametrize("module", ["numpy", "lowprec.arrays", "lowprec.cli.output"])
def test_ctrl_c_during_the_imports(module: str) -> None:
    code = f"""
        import os, signal, sys

        class Finder:
            @staticmethod
            def find_spec(name, *_):
                if name == {module!r}:
                    os.kill(os.getpid(), signal.SIGINT)

        sys.meta_path.insert(0, Finder)
        from lowprec_command import main
        sys.exit(main())
    """
    command = [sys.executable, "-c", dedent(code), "--version"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "", "")


def test_nohup_is_respected(command: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    before, run = signal.signal(signal.SIGHUP, signal.SIG_IGN), info.run
    monkeypatch.setattr(info, "run", lambda options: signal.raise_signal(signal.SIGHUP) or run(options))
    try:
        assert command("info").out.startswith("lowprec ")
    finally:
        signal.signal(signal.SIGHUP, before)


def test_the_caller_s_handlers_are_as_before() -> None:
    handlers = [signal.getsignal(n) for n in SIGNALS]
    assert main(["--version"]) == 0
    assert [signal.getsignal(n) for n in SIGNALS] == handlers
