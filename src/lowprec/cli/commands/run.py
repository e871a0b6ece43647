"""Run a Python program, unmodified, under a math mode or under the FP32 guard.

The program is a script, a folder or a zip file with a __main__.py, "-m MODULE", "-c CODE", or "-" for standard input.
What stands behind it belongs to the program, as on Python's own command line. It runs in a Python of its own, which
takes the place of this process: its arguments, streams, exit code and tracebacks are those of "python PROGRAM".

The mode is the default of lowprec and of the libraries that have switches of their own (PyTorch, JAX, ...), set when
they are imported, in all threads and in the Python processes that the program starts. What the program chooses by
itself stands above it, unless --force is given.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from lowprec.cli import launcher
from lowprec.cli.errors import CommandError
from lowprec.cli.options import mode
from lowprec.modes import MathMode, ModeSource, mode_names
from lowprec.policy import environment
from lowprec.policy.state import FULL_FP32

EXAMPLES = """\
examples:
  lowprec run --mode tf32 train.py --epochs 3
  lowprec run --guard solve.py
  lowprec run --guard -m pytest -x
  python -X dev -m lowprec run --mode bf16 --force train.py
"""

_MODE = "--mode"


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.usage = (
        "lowprec run [-h] (--mode MODE [--force] | --guard) (SCRIPT | -m MODULE) [ARGUMENT ...]"
    )
    how = parser.add_mutually_exclusive_group(required=True)
    how.add_argument(
        _MODE, type=mode, help=f"the default of lowprec and of the libraries ({mode_names()})"
    )
    how.add_argument(
        "--guard",
        action="store_true",
        help="full FP32, whatever the program asks of lowprec; TF32 is off in NVIDIA's libraries too",
    )
    parser.add_argument(
        "--force",
        action="store_true",
        help="the mode overrules what the program asks of lowprec, too (LOWPREC_FORCE_MATH_MODE)",
    )


def split(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split the words behind ``lowprec run`` into the command's own and those of the program.

    Not left to argparse, which would take a script's ``--help`` for its own.

    Examples
    --------
    >>> split(["--mode", "tf32", "train.py", "--help"])
    (['--mode', 'tf32'], ['train.py', '--help'])
    >>> split(["--guard", "-m", "pytest", "-x"])
    (['--guard'], ['-m', 'pytest', '-x'])
    """
    words, at = list(words), 0
    while at < len(words) and not _begins_program(words[at]):
        at += 2 if words[at] == _MODE else 1
    return words[:at], words[at:]


def _begins_program(word: str) -> bool:
    # Python reads "--" and "-" as we do: options end, and the program comes from standard input.
    return word in ("-", "--") or word.startswith(("-m", "-c")) or not word.startswith("-")


def run(options: argparse.Namespace) -> int:
    """Become the program; where that is not possible, run it and return its exit code."""
    if options.program in ([], ["--"], ["-m"], ["-c"]):
        raise CommandError(
            "run: which program? Give a script, or -m and a module (lowprec run --help tells more)"
        )
    if options.force and options.guard:
        raise CommandError(
            "run: --force goes with --mode; --guard overrules the program in any case"
        )
    variables = _guard() if options.guard else _mode(options.mode, options.force)
    return launcher.launch(options.program, variables)


def _mode(chosen: MathMode, force: bool) -> dict[str, str]:
    environment.snapshot()  # A bad variable is refused here, and not somewhere in the program.
    return {str(ModeSource.FORCED if force else ModeSource.ENVIRONMENT): str(chosen)}


def _guard() -> dict[str, str]:
    """Return the variables that keep a process and its children at full FP32.

    Not a ``with fp32_guard()`` around the program: that would not reach the threads and processes that it starts.
    """
    forced = environment.snapshot().force_math_mode
    kept = forced if forced in FULL_FP32 else MathMode.FP32
    return {str(ModeSource.FORCED): str(kept), "NVIDIA_TF32_OVERRIDE": "0"}
