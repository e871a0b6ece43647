"""The command ``lowprec info``."""

from __future__ import annotations

import argparse

from lowprec.cli.options import add_shared
from lowprec.cli.output import print_json, print_tables
from lowprec.inspection import info

HELP = """\
Show the settings of products: devices, libraries, the current mode, variables, warnings.

Frameworks are not imported; the versions of installed ones are read from their metadata.
"""

EXAMPLES = """\
examples:
  lowprec info
  lowprec info --all
  lowprec info --json
  LOWPREC_MATH_MODE=tf32 lowprec info
"""


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--all", action="store_true", help="list the variables that are not set, too"
    )
    add_shared(parser, "--json")


def run(options: argparse.Namespace) -> int:
    facts = info()
    if options.json:
        print_json(facts)
    else:
        print_tables(facts.tables(options.all))
    return 0
