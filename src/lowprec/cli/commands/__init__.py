"""One module per command.

Each has a docstring (the help's text), ``EXAMPLES`` (its end), ``configure`` (adds the options to a parser) and
``run`` (takes the parsed options, returns the exit code).
"""

from __future__ import annotations

import argparse
from typing import Protocol

from lowprec.cli.commands import bench, check, info, matmul, plan

__all__ = ["COMMANDS", "Command"]


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
}
