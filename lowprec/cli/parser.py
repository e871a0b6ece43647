"""The argument parser of the command line."""

from __future__ import annotations

import argparse
from typing import Any, NoReturn

from lowprec._version import __version__
from lowprec.cli.commands import autotune, check, completion, info, matmul, plan, run
from lowprec.cli.options import did_you_mean
from lowprec.cli.output import USAGE, CommandError, note, print_text

_DESCRIPTION = "Matrix products in a precision you choose; the precision used is reported."

_EPILOG = """\
examples:
  lowprec info
  lowprec check
  lowprec plan --shapes 1024x512 512x2048 --mode tf32
  lowprec matmul A.npy B.npy -o C.npy --mode bf16
  lowprec run --mode tf32 train.py

"lowprec COMMAND --help" has the options of a command. Exit codes: 0; 1 if check found an error above its bound;
2 after a mistake in the command line, in a file or in an environment variable; 130 after Ctrl-C. SIGTERM and SIGHUP
end a command by the signal, with nothing half-written left. After run: those of the program.
"""


#: In the order of the help.
COMMANDS = (info, plan, matmul, check, autotune, run, completion)


class Parser(argparse.ArgumentParser):
    """An ``ArgumentParser`` whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        """Raise the error as a mistake of the user."""
        command = self.prog.partition(" ")[2]
        where = f"{command}: " if command else ""
        raise CommandError(f"{where}{message} (see {self.prog} --help)")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """Refuse a value that is not one of an action's choices, and suggest a similar one."""
        if action.choices is not None and value not in action.choices:
            choices = list(action.choices)
            similar = did_you_mean(value, choices) or f"; choose one of: {', '.join(choices)}"
            raise argparse.ArgumentError(action, f"invalid choice: {value!r}{similar}")

    def _print_message(self, message: str, file: Any = None) -> None:
        """Print help and version as results are, so that a failure is reported."""
        print_text(message.rstrip("\n"))


def build_parser() -> Parser:
    """Return the parser of the command line; the parsed options have a ``run``, which by default shows the help."""
    shared: dict[str, Any] = {"formatter_class": argparse.RawDescriptionHelpFormatter, "allow_abbrev": False}
    parser = Parser(prog="lowprec", description=_DESCRIPTION, epilog=_EPILOG, **shared)
    parser.add_argument("--version", action="version", version=f"lowprec {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", dest="command", parser_class=Parser)
    parser.set_defaults(run=lambda _: _help(parser), parser=parser)
    for command in COMMANDS:
        summary, _, text = (command.__doc__ or "").partition("\n\n")
        sub = commands.add_parser(
            command.__name__.rpartition(".")[2],
            help=summary.rstrip("."),
            description=f"{summary}\n\n{text.strip()}",
            epilog=command.EXAMPLES,
            **shared,
        )
        command.configure(sub)
        sub.set_defaults(run=command.run)
    return parser


def _help(parser: Parser) -> int:
    """Show the help where no command is given, which a script does by mistake."""
    note(parser.format_help().rstrip("\n"))
    return USAGE
