"""The command line: ``lowprec info``, ``plan``, ``matmul``, ``check``, ``bench``, ``autotune``, ``run``.

Results go to standard output. A mistake of the user (a missing file, shapes that do not fit, an unknown mode, a bad
environment variable) is one line on standard error and exit code 2, without a traceback. An exception that is no such
mistake is a defect of the program and keeps its traceback.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from lowprec.cli.output import flush
from lowprec.cli.parser import parse
from lowprec.errors import LowprecError

__all__ = ["main"]

_USAGE, _INTERRUPTED, _BROKEN_PIPE = 2, 130, 141


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code.

    Parameters
    ----------
    argv : sequence of str, optional
        The words after ``lowprec``; by default those of this process.

    Returns
    -------
    int
        0; 1 if ``lowprec check`` found an error above its bound; 2 after a mistake of the user; 130 after Ctrl-C;
        141 if the reader of the output went away. ``lowprec run`` ends with the exit code of the program, and does not
        return where this process can become the program.

    Examples
    --------
    >>> main(["plan", "--shapes", "8x8", "8x8", "--mode", "nonsense"])
    2
    """
    try:
        arguments = parse(argv)
        code = arguments.run(arguments)
        flush()
    except SystemExit as stop:  # argparse, after --help and --version
        return int(stop.code or 0)
    except KeyboardInterrupt:
        print("lowprec: interrupted", file=sys.stderr)
        return _INTERRUPTED
    except BrokenPipeError:
        return _BROKEN_PIPE
    except MemoryError as error:
        return _refuse(f"not enough memory: {error}" if str(error) else "not enough memory")
    except LowprecError as error:
        return _refuse(str(error))
    return int(code)


def _refuse(message: str) -> int:
    """Print the message as one line."""
    print(f"lowprec: {' '.join(message.split())}", file=sys.stderr)
    return _USAGE
