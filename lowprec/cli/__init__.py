"""The command line: ``lowprec info``, ``plan``, ``matmul``, ``check`` and the other modules of ``commands``.

Results go to standard output. A mistake of the user (a missing file, shapes that do not fit, an unknown mode, a bad
environment variable) is one line on standard error and exit code 2, without a traceback. An exception that is no such
mistake is a defect of the program and keeps its traceback.
"""

from __future__ import annotations

import contextlib
import io
import signal
import sys
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

from lowprec.cli import signals
from lowprec.cli.errors import USAGE
from lowprec.cli.files import is_standard_output
from lowprec.cli.output import flush, note
from lowprec.cli.parser import build_parser
from lowprec.errors import LowprecError, LowprecWarning

__all__ = ["main"]

_INTERRUPTED, _BROKEN_PIPE = 130, 141


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command, the words after ``lowprec`` (by default those of this process), and return its exit code.

    Returns
    -------
    int
        0; 1 if ``lowprec check`` found an error above its bound; 2 after a mistake of the user; 130 after Ctrl-C;
        141 if the reader of the output went away. SIGTERM and SIGHUP end the process by the signal, once what was
        being written is tidied away. ``lowprec run`` ends with the exit code of the program, and does not
        return where this process can become the program.

    Examples
    --------
    >>> main(["plan", "--shapes", "8x8", "8x8", "--mode", "nonsense"])
    2
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # A file's name may hold what the stream's encoding does not.
            stream.reconfigure(errors="backslashreplace")
    try:
        with signals.raised(), _warnings_in_a_line():
            return _run(argv)
    except signals.Terminated as stop:
        signal.raise_signal(stop.args[0])  # whoever started this process sees why it ended
        return 128 + int(stop.args[0])


def _run(argv: Sequence[str] | None) -> int:
    """Run one command; everything that it may end with is an exit code, but for a defect and a signal."""
    try:
        try:
            options = build_parser().parse_args(argv)
            written = (getattr(options, name, None) for name in ("output", "csv", "plot"))
            # Results go beside a file that is written to standard output. A closed standard error is None.
            other = io.StringIO() if sys.stderr is None else sys.stderr
            aside = any(map(is_standard_output, written))
            with contextlib.redirect_stdout(other) if aside else contextlib.nullcontext():
                code = int(options.run(options))
        except SystemExit as stop:  # argparse, after --help and --version
            code = int(stop.code or 0)
        flush()
        return code
    except KeyboardInterrupt:
        note("lowprec: interrupted")
        return _INTERRUPTED
    except BrokenPipeError:
        return _BROKEN_PIPE
    except MemoryError as error:
        return _refuse(f"not enough memory: {error}" if str(error) else "not enough memory")
    except LowprecError as error:
        return _refuse(str(error))


@contextlib.contextmanager
def _warnings_in_a_line() -> Iterator[None]:
    """Show a warning of the block as the command's own messages: without the line of code that it comes from."""
    usual = warnings.formatwarning

    def text(message: Warning | str, category: type[Warning], *place: Any, **line: Any) -> str:
        kind = "warning" if issubclass(category, LowprecWarning) else category.__name__
        return f"lowprec: {kind}: {' '.join(str(message).split())}\n"

    warnings.formatwarning = text
    try:
        yield
    finally:
        warnings.formatwarning = usual


def _refuse(message: str) -> int:
    """Print the message as one line."""
    note(f"lowprec: {' '.join(message.split())}")
    return USAGE
