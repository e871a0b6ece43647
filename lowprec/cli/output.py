"""Output of the commands: tables, text, JSON, a progress bar.

In a terminal, titles are bold and a line shows the current step. Lines are broken between words, tables to the width of
the terminal. Results go to standard output, messages to standard error.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
from collections.abc import Iterable, Iterator
from typing import Any, TextIO

from lowprec.errors import LowprecError
from lowprec.policy.environment import variables_set
from lowprec.util.plain import plain
from lowprec.util.tables import Table, fill, plain_text

#: Exit code after a mistake of the user.
USAGE = 2


#: The width without a terminal.
_PIPE_WIDTH = 120


def columns() -> int:
    """Return the width of the terminal, which may be that of standard error or input alone."""
    width = _PIPE_WIDTH
    for descriptor in (0, 2):
        with contextlib.suppress(OSError):
            width = os.get_terminal_size(descriptor).columns or width
    return shutil.get_terminal_size((width, 24)).columns


def print_tables(tables: Iterable[Table], most: int = sys.maxsize) -> None:
    """Print tables to standard output, an empty line between them, in lines of at most ``most`` characters."""
    width = min(columns(), most)
    with _standard_output():
        # Windows sets no TERM; its older terminals show the escapes.
        has_bold = sys.stdout.isatty() and variables_set(["TERM"]).get("TERM", "dumb") != "dumb"
        for number, table in enumerate(tables):
            text, title = plain_text(table, width), fill(table.title, width)
            bold = f"\x1b[1m{title}\x1b[0m" if has_bold else title
            print("\n" * bool(number) + bold + text.removeprefix(title))


def print_text(text: str) -> None:
    with _standard_output():
        print(text)


def flush() -> None:
    """Flush standard output before a command ends, so that a closed pipe or a full disk is reported."""
    with _standard_output():
        sys.stdout.flush()


@contextlib.contextmanager
def _standard_output() -> Iterator[None]:
    """Raise a failure to write as LowprecError, except that of a pipe closed by its reader."""
    if sys.stdout is None:  # closed
        raise LowprecError("cannot write to standard output: it is closed")
    try:
        yield
    except OSError as error:
        _discard(sys.stdout)
        if isinstance(error, BrokenPipeError):
            raise
        raise LowprecError(f"cannot write to standard output: {error.strerror}") from None


def _discard(stream: TextIO) -> None:
    """Redirect a stream to the null device, so that the interpreter's last flush does not fail again."""
    with contextlib.suppress(OSError, ValueError):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, stream.fileno())
        os.close(null)


def print_json(value: Any) -> None:
    """Print one JSON document; Inf and NaN become null."""
    print_text(json.dumps(plain(value), indent=2, allow_nan=False))


def in_terminal(text: str) -> str:
    """Return lines as standard error shows them: in a terminal they are broken between words."""
    if sys.stderr is None or not sys.stderr.isatty():
        return text
    return "\n".join(fill(line, columns(), hang=2) for line in text.splitlines())


def note(text: str) -> None:
    """Print a message to standard error, unless it is closed."""
    if sys.stderr is None:
        return
    try:
        print(in_terminal(text), file=sys.stderr, flush=True)
    except OSError:
        _discard(sys.stderr)
