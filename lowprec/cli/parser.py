"""The words of the command line."""

from __future__ import annotations

import argparse
from typing import Any, NoReturn, Protocol

from lowprec._version import __version__
from lowprec.cli.commands import autotune, check, completion, info, matmul, plan, run
from lowprec.cli.errors import USAGE, CommandError
from lowprec.cli.options import did_you_mean
from lowprec.cli.output import note, print_text

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
2 after a mistake in the command line, in a file or in an environment variable; 130 after Ctrl-C. SIGTERM and SIGHUP
end a command by the signal, with nothing half-written left. After run: those of the program.
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
    "autotune": autotune,
    "run": run,
    "completion": completion,
}


class Parser(argparse.ArgumentParser):
    """An ``ArgumentParser`` whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        """Raise what the command line reports as a mistake of the user."""
        words = self.prog.partition(" ")[2]
        where = f"{words}: " if words else ""
        raise CommandError(f"{where}{message} ({self.prog} --help tells more)")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """Refuse what is not one of an action's choices, and name the one that was meant."""
        if action.choices is not None and value not in action.choices:
            choices = list(action.choices)
            similar = did_you_mean(value, choices) or f"; choose one of: {', '.join(choices)}"
            raise argparse.ArgumentError(action, f"invalid choice: {value!r}{similar}")

    def _print_message(self, message: str, file: Any = None) -> None:
        """Print help and version as results are, so that a failure to do so is told."""
        print_text(message.rstrip("\n"))


def build_parser() -> Parser:
    """Return the parser of the command line; what it parses has the command's ``run``, or one that shows the help."""
    parser = Parser(
        prog="lowprec",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"lowprec {__version__}")
    commands = parser.add_subparsers(
        title="commands", metavar="COMMAND", dest="command", parser_class=Parser
    )
    parser.set_defaults(run=lambda _: _help(parser), parser=parser)
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


def _help(parser: Parser) -> int:
    """Show the help to who has given no command, which a script does by mistake."""
    note(parser.format_help().rstrip("\n"))
    return USAGE
