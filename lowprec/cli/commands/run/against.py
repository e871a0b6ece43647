"""``lowprec run --against``: the program runs twice, in the mode and in a reference mode, and the runs are compared."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from lowprec.cli.output import columns, note
from lowprec.comparing import compare_programs, read_record
from lowprec.errors import LowprecError


def run_twice(
    command: Sequence[str],
    variables: Callable[[str, bool], Mapping[str, str]],
    modes: tuple[str, str],
    path: str | None,
) -> int:
    """Run a command in the reference and in the mode, and print the report; return the program's exit code.

    ``variables`` returns the environment, for the path of a record, of the run in the reference or of the other one.
    The report is also written to ``path``, unless it is None.
    """
    mode, against = modes
    with tempfile.TemporaryDirectory(prefix="lowprec-run-") as folder:
        records = [str(Path(folder) / name) for name in ("reference", "mode")]
        stdin, start = _input()
        code, expected = _run(command, variables(records[0], True), stdin, shows=False)
        if start is not None:
            os.lseek(0, start, os.SEEK_SET)
        if code:
            note(f"lowprec run --against: the program in {against} ended with exit code {code}")
            return code
        code, found = _run(command, variables(records[1], False), stdin, shows=True)
        if code:
            note(f"lowprec run --against: the program in {mode} ended with exit code {code}")
        runs = [read_record(path) for path in reversed(records)]
    if not any(runs):
        note(
            "lowprec run --against: the program multiplied nothing that lowprec sees, or ended without its last steps"
        )
    report = compare_programs(mode, against, runs, found, expected)
    note(report.text(columns()))
    if path is not None:
        report.save(path)
    return code


def _input() -> tuple[Any, int | None]:
    """Return standard input, if both runs can read it, and the position of a file; others read nothing."""
    with suppress(OSError):
        if os.isatty(0):
            return None, None
        if stat.S_ISREG(os.fstat(0).st_mode):
            return None, os.lseek(0, 0, os.SEEK_CUR)
    return subprocess.DEVNULL, None


def _run(
    command: Sequence[str], variables: Mapping[str, str], stdin: Any, shows: bool
) -> tuple[int, list[str]]:
    """Return the exit code of a program, and its lines of standard output."""
    lines: list[str] = []
    try:
        process = subprocess.Popen(
            list(command), env=dict(variables), stdin=stdin, stdout=subprocess.PIPE
        )
    except OSError as error:
        raise LowprecError(f"run: cannot start {command[0]}: {error.strerror or error}") from None
    with process:
        while True:
            try:
                _read(process.stdout, lines, shows)
                code = process.wait()
                break
            except KeyboardInterrupt:
                continue  # the program got it too, and handles it
    return code if code >= 0 else 128 - code, lines


def _read(stream: Any, lines: list[str], shows: bool) -> None:
    for line in stream:
        lines.append(line.decode(errors="replace"))
        if shows and sys.stdout is not None:
            sys.stdout.buffer.write(line)
            sys.stdout.buffer.flush()
