"""The words of the command line."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import NoReturn, Protocol

from lowprec._version import __version__
from lowprec.cli.commands import autotune, bench, check, info, matmul, plan, run
from lowprec.cli.errors import CommandError

__all__ = ["COMMANDS", "Command", "Parser", "parse"]

_DESCRIPTION = """\
Matrix products in the precision you choose, and the truth about which one was used.
"""

_EPILOG = """\
examples:
  lowprec info
  lowprec check
  lowprec plan --shapes 1024x512 512x2048 --mode tf32
  lowprec matmul A.npy B.npy -o C.npy --mode bf16
  lowprec run --mode tf32 train.py

"lowprec COMMAND --help" has the options of a command. Exit codes: 0; 1 if check found an error above its bound;
2 after a mistake in the command line, in a file or in an environment variable; 130 after Ctrl-C. After run: those
of the program.
"""


class Command(Protocol):
    """What the parser expects of a module in this folder."""

    EXAMPLES: str
    __doc__: str | None

    def configure(self, parser: argparse.ArgumentParser) -> None:
        """Add the command's options."""

    def run(self, options: argparse.Namespace) -> int:
        """Run the command and return its exit code."""


#: In the order of the help.
COMMANDS: dict[str, Command] = {
    "info": info,
    "plan": plan,
    "matmul": matmul,
    "check": check,
    "bench": bench,
    "autotune": autotune,
    "run": run,
}


class Parser(argparse.ArgumentParser):
    """An ``ArgumentParser`` whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        """Raise what the command line reports as a mistake of the user."""
        words = self.prog.partition(" ")[2]
        where = f"{words}: " if words else ""
        raise CommandError(f"{where}{message} ({self.prog} --help tells more)")


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Return the parsed words; ``run`` is the command's function.

    Raises
    ------
    CommandError
        If the words are not a command.
    SystemExit
        After ``--help`` and ``--version``.
    """
    return _parser().parse_args(argv)


def _parser() -> Parser:
    parser = Parser(
        prog="lowprec",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"lowprec {__version__}")
    commands = parser.add_subparsers(
        title="commands", metavar="COMMAND", dest="command", required=True, parser_class=Parser
    )
    for name, command in COMMANDS.items():
        summary, _, text = (command.__doc__ or "").partition("\n\n")
        sub = commands.add_parser(
            name,
            help=summary.rstrip("."),
            description=f"{summary}\n\n{text.strip()}",
            epilog=command.EXAMPLES,
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        command.configure(sub)
        sub.set_defaults(run=command.run)
    return parser
