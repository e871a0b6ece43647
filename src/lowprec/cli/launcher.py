"""Starting Python on a user's program, so that lowprec's policy holds in it from the first line.

The program gets a fresh interpreter and is not run in this one by ``runpy``. That makes everything about it Python's
own, without imitation: ``__main__``, ``sys.argv``, ``sys.path``, ``__spec__``, tracebacks, exit codes, signals, threads
that outlive the main one, what is imported already. And it leaves one mechanism instead of two: what the program
cannot inherit but by its environment, the processes that it starts inherit in the same way.

Two things travel in the environment. lowprec reads its mode from its own variables. The switches of other libraries
are set by ``startup/sitecustomize.py``, which Python imports before the program because its folder is on
``PYTHONPATH``.
"""

from __future__ import annotations

import getopt
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from lowprec.cli.errors import CommandError
from lowprec.policy.environment import Variable

__all__ = ["STARTUP", "launch"]

#: The folder whose ``sitecustomize`` Python imports.
STARTUP = str(Path(__file__).resolve().parent / "startup")

_PYTHONPATH = Variable(
    "PYTHONPATH", "Where Python looks for modules first.", "folders", "nowhere", str
)

#: Python's own options, as its documentation lists them.
_SHORT_OPTIONS = "bBc:dEhiIm:OPqRsStuvVW:xX:?"
_LONG_OPTIONS = ["check-hash-based-pycs=", "help", "help-all", "help-env", "help-xoptions"]


def launch(program: Sequence[str], variables: Mapping[str, str]) -> int:
    """Become ``python PROGRAM``.

    Parameters
    ----------
    program : sequence of str
        What would follow ``python`` on the command line.
    variables : mapping of str to str
        What to set in its environment.

    Returns
    -------
    int
        On Windows, the exit code of the program. Elsewhere the program takes the place of this process.

    Raises
    ------
    CommandError
        If Python cannot be started, or would not import the ``sitecustomize``.
    """
    if sys.flags.ignore_environment or sys.flags.no_site:
        raise CommandError(
            "run: with Python's options -E, -I or -S nothing reaches the program; leave them out"
        )
    if not sys.executable:
        raise CommandError("run: this process does not know its Python (sys.executable is empty)")
    command = [sys.executable, *_interpreter_options(sys.orig_argv[1:]), *program]
    # Handed on, and not looked at: decisions that come from the environment are made in policy.environment.
    inherited = {**os.environ, **variables, _PYTHONPATH.name: _with_startup(_PYTHONPATH.text())}
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        return _become(command, inherited)
    except OSError as error:
        raise CommandError(f"run: cannot start {sys.executable}: {error.strerror}") from None


def _become(command: list[str], inherited: dict[str, str]) -> int:
    if sys.platform != "win32":
        os.execve(command[0], command, inherited)
    # Windows has no exec: the shell would take this process's end for the program's, without its exit code.
    with subprocess.Popen(command, env=inherited) as process:
        while True:
            try:
                return process.wait()
            except KeyboardInterrupt:
                continue  # The program got it, too, and decides.


def _with_startup(path: str | None) -> str:
    """Return the search path with the startup folder in front, once."""
    rest = [] if path is None else path.split(os.pathsep)
    return os.pathsep.join([STARTUP, *(folder for folder in rest if folder != STARTUP)])


def _interpreter_options(words: Sequence[str]) -> list[str]:
    """Return what Python was told about itself, of the words behind ``python``.

    Examples
    --------
    >>> _interpreter_options(["-OX", "dev", "-m", "lowprec", "run", "train.py", "-v"])
    ['-O', '-X', 'dev']
    """
    try:
        # getopt stops at the first word that is no option, which is at the latest the one behind "lowprec".
        options, _ = getopt.getopt(list(words), _SHORT_OPTIONS, _LONG_OPTIONS)
    except getopt.GetoptError:
        return []  # An application with Python inside has options of its own.
    return [
        word
        for name, value in options
        if name not in ("-c", "-m")
        for word in (name, *([value] if value else []))
    ]
