"""Starting a Python program in an environment that sets a mode or the guard.

The interpreter replaces this process, so ``__main__``, arguments, exit code and signals of the program are as without
lowprec. Only the environment differs, with a start-up hook in ``PYTHONPATH`` (``startup/sitecustomize.py``) that all
Python processes of the run execute.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from lowprec.cli.errors import CommandError
from lowprec.cli.output import flush

#: The folder of the start-up hook.
STARTUP = str(Path(__file__).resolve().parent / "startup")

#: A word of Python's options: letters, the last of which may have a value, in this word or the next.
_OPTION = re.compile(r"-(?=.)([^-cmWX]*)(?:([cmWX])(.*))?", re.DOTALL)
_PROGRAM = ("c", "m")
_LONG = "--check-hash-based-pycs"

#: On Windows `exec` starts a second process, and the caller loses its exit code.
_REPLACES = os.name != "nt"


def interpreter_options(words: Sequence[str]) -> list[str]:
    """Return Python's own options among the words with which it was started, as ``sys.orig_argv`` has them.

    Examples
    --------
    >>> interpreter_options(["python", "-W", "error", "-um", "lowprec", "run", "-X"])
    ['-W', 'error', '-u']
    """
    found: list[str] = []
    rest = iter(words[1:])
    for word in rest:
        if word == _LONG:
            found += [word, next(rest, "")]
            continue
        option = _OPTION.fullmatch(word)
        if option is None:
            break
        flags, letter, value = option.groups()
        if flags:
            found.append(f"-{flags}")
        if letter in _PROGRAM:
            break
        if letter:
            found += [f"-{letter}{value}"] if value else [f"-{letter}", next(rest, "")]
    return found


def python_command(program: Sequence[str]) -> list[str]:
    """Return the command that runs a program (the words after ``python``) with this interpreter and its options.

    An interpreter that ignores the environment, and with it the start-up hook, is refused.
    """
    if not sys.executable:
        raise CommandError("run: this Python does not know its own executable")
    ignoring = {
        "-I": sys.flags.isolated,
        "-E": sys.flags.ignore_environment,
        "-S": sys.flags.no_site,
    }
    for option, is_set in ignoring.items():
        if is_set:
            raise CommandError(
                f"run: this Python was started with {option}, which ignores the settings for the program; "
                "start it without, as python -m lowprec run"
            )
    if os.pathsep in STARTUP:
        raise CommandError(f"run: {STARTUP} holds a {os.pathsep!r}, so PYTHONPATH cannot name it")
    return [sys.executable, *interpreter_options(sys.orig_argv), *program]


def start(command: Sequence[str], variables: Mapping[str, str]) -> int:
    """Replace this process by a command; where that is not possible, wait for it and return its exit code."""
    flush()
    try:
        if _REPLACES:
            os.execve(command[0], list(command), variables)
        return wait_for(command, variables)
    except OSError as error:
        raise CommandError(f"run: cannot start {command[0]}: {error.strerror or error}") from None


def wait_for(command: Sequence[str], variables: Mapping[str, str]) -> int:
    """Run a command and return its exit code."""
    with subprocess.Popen(command, env=dict(variables)) as process:
        while True:
            try:
                return process.wait()
            except KeyboardInterrupt:
                continue  # the program got it too, and handles it
