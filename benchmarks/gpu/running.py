"""Running sections in processes of their own, and merging what they leave behind."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from gpu import parts

#: Lines of a failing section's output that the report keeps; the log has all.
KEPT_LINES = 15


def execute(
    command: Sequence[str], path: Path, log: Path, limit_s: float, environment: Mapping[str, str]
) -> dict[str, Any]:
    """Run a section and return its result, whatever becomes of it.

    Parameters
    ----------
    command : sequence of str
        Writes a part to `path`.
    path, log : Path
        Files of the part and of all that the process prints.
    limit_s : float
        Then the process is killed, with all that it started.
    environment : mapping

    Returns
    -------
    dict
        The part, `elapsed_s`, the exit status (`exit`, None if it had to be stopped) and `error`, empty if all is
        well.
    """
    begin = time.monotonic()
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=dict(environment),
            start_new_session=True,
        )
        try:
            status: int | None = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            status = None
        finally:
            _kill(process)
    elapsed = time.monotonic() - begin
    return {**_result(path, log, status, limit_s), "elapsed_s": round(elapsed, 2)}


def _kill(process: subprocess.Popen[bytes]) -> None:
    """End a process and all of its group: what it started may outlive it."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        process.kill()
    process.wait()


def _result(path: Path, log: Path, status: int | None, limit_s: float) -> dict[str, Any]:
    errors = []
    if status is None:
        errors.append(f"stopped after {limit_s:.0f} s")
    elif status:
        errors.append(f"exit status {status}")
    try:
        found = parts.read(path)
    except ValueError as problem:
        errors.append(str(problem))
        found = empty("")
    if not errors and found["available"] and not found["complete"]:
        errors.append("the section ended before it was done")
    return {
        **found,
        "exit": status,
        "error": "; ".join(errors),
        "output": tail(log) if errors else [],
    }


def empty(why: str) -> dict[str, Any]:
    """Return the result of a section that did not run."""
    return {"available": not why, "why": why, "complete": False, "facts": {}, "rows": []}


def skipped(why: str) -> dict[str, Any]:
    """Return the whole result of a section that was not started."""
    return {**empty(why), "exit": None, "error": "", "output": [], "elapsed_s": 0.0}


def tail(log: Path) -> list[str]:
    """Return the last lines of a log."""
    text = log.read_text(encoding="utf-8", errors="replace")
    return [line[:300] for line in text.splitlines()[-KEPT_LINES:]]


def state(result: Mapping[str, Any]) -> str:
    """Return in a few words what became of a section."""
    if result["error"]:
        return result["error"]
    if not result["available"]:
        return f"not run: {result['why']}"
    judged = [row["ok"] for row in result["rows"] if row["ok"] is not None]
    failed = judged.count(False)
    words = f"{len(result['rows'])} rows"
    return f"{words}, {failed} of {len(judged)} FAILED" if failed else f"{words}, all well"
