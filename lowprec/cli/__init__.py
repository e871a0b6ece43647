"""The command line: ``lowprec info``, ``plan``, ``check`` and the other modules of ``commands``.

Results go to standard output. A mistake of the user (a missing file, shapes that do not match, an unknown mode, an
illegal environment variable) is one line on standard error and exit code 2, without a traceback. Any other exception is
a defect of the program and keeps its traceback.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import re
import sys
import warnings
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

from lowprec._version import __version__
from lowprec.cli.commands import audit, autotune, check, info, plan, run
from lowprec.cli.output import USAGE, flush, in_terminal, note, print_text
from lowprec.errors import LowprecError, LowprecWarning, did_you_mean
from lowprec.util.tables import fill

_DESCRIPTION = "Matrix products in a precision you choose; the precision used is reported."

_EPILOG = """\
examples:
  lowprec info
  lowprec check
  lowprec plan --shapes 1024x512 512x2048 --mode tf32
  lowprec run --mode tf32 train.py

"lowprec COMMAND --help" has the options of a command. Exit codes: 0; 1 if check found an error above its bound, or
audit a precision below --require; 2 after a mistake in the command line, in a file or in an environment variable; 130
after Ctrl-C. After run: those of the program.
"""


#: Commands in the order of the help.
COMMANDS = (info, plan, check, audit, autotune, run)


class Help(argparse.HelpFormatter):
    """Help in lines of the terminal's width, broken between words; lists and examples keep their lines."""

    def _format_usage(self, *given: Any) -> str:
        # An option stays next to its value.
        usage = re.sub(
            r"\[[^][]*\]", lambda x: x[0].replace(" ", "\xa0"), super()._format_usage(*given)
        )
        return fill(re.sub(" *\n *", " ", usage), self._width, hang=2).replace("\xa0", " ") + "\n\n"

    def _split_lines(self, text: str, width: int) -> list[str]:
        return fill(text, width).splitlines()

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        lines = re.sub(r"(?<=\S)\n(?=\S)", " ", text).splitlines()
        # An item, of one column or two, is indented.
        return "\n".join(
            fill(x, width, hang=x.startswith(" ") and x.rfind("  ") + 4) for x in lines
        )


class Parser(argparse.ArgumentParser):
    """An ``ArgumentParser`` whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        command = self.prog.partition(" ")[2]
        where = f"{command}: " if command else ""
        raise LowprecError(f"{where}{message} (see {self.prog} --help)")

    def parse_known_args(self, *given: Any) -> Any:  # type: ignore[override]
        """Raise for unknown options, which argparse leaves to the parser without those of the command."""
        found, unknown = super().parse_known_args(*given)
        if unknown:
            similar = did_you_mean(unknown[0].partition("=")[0], self._option_string_actions)
            self.error(f"unrecognized arguments: {' '.join(unknown)}{similar}")
        return found, unknown

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            choices = list(action.choices)
            similar = did_you_mean(value, choices) or f"; choose one of: {', '.join(choices)}"
            raise argparse.ArgumentError(action, f"invalid choice: {value!r}{similar}")

    def _print_message(self, message: str, file: Any = None) -> None:
        print_text(message.rstrip("\n"))


def build_parser() -> Parser:
    """Return the parser of the command line; ``run`` of the parsed options is the command, by default the help."""
    shared: dict[str, Any] = {"formatter_class": Help, "allow_abbrev": False}
    parser = Parser(prog="lowprec", description=_DESCRIPTION, epilog=_EPILOG, **shared)
    parser.add_argument("--version", action="version", version=f"lowprec {__version__}")
    commands = parser.add_subparsers(
        title="commands", metavar="COMMAND", dest="command", parser_class=Parser
    )
    parser.set_defaults(run=lambda _: _help(parser))
    for command in COMMANDS:
        sub = commands.add_parser(
            command.__name__.rpartition(".")[2],
            help=command.HELP.partition(".\n")[0],
            description=command.HELP.rstrip(),
            epilog=command.EXAMPLES,
            **shared,
        )
        command.configure(sub)
        sub.set_defaults(run=command.run)
    return parser


def _help(parser: Parser) -> int:
    note(parser.format_help().rstrip("\n"))
    return USAGE


_INTERRUPTED, _BROKEN_PIPE = 130, 141


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command in ``argv`` (by default this process's arguments) and return its exit code.

    ``lowprec run`` does not return where the system can replace a process by a program.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # The stream's encoding may lack characters of a file's name.
            stream.reconfigure(errors="backslashreplace")
    with _warnings_in_a_line():
        return _run(argv)


def _run(argv: Sequence[str] | None) -> int:
    """Run one command and return its exit code; only defects are raised."""
    try:
        try:
            options = build_parser().parse_args(argv)
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
    usual = warnings.formatwarning

    def text(message: Warning | str, category: type[Warning], *place: Any, **line: Any) -> str:
        kind = "warning" if issubclass(category, LowprecWarning) else category.__name__
        return in_terminal(f"lowprec: {kind}: {' '.join(str(message).split())}") + "\n"

    warnings.formatwarning = text
    try:
        yield
    finally:
        warnings.formatwarning = usual


def _refuse(reason: str) -> int:
    note(f"lowprec: {' '.join(reason.split())}")
    return USAGE
