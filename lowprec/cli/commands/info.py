"""Show the settings that products depend on: devices, libraries, the mode in force, variables, warnings.

Frameworks are not imported for it; of those that are installed the version is read.
"""

from __future__ import annotations

import argparse

from lowprec.cli.options import add_shared
from lowprec.cli.output import print_json, print_tables
from lowprec.report import info, tables

EXAMPLES = """\
examples:
  lowprec info
  lowprec info --all
  lowprec info --json
  LOWPREC_MATH_MODE=tf32 lowprec info
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("--all", action="store_true", help="list the variables that are not set, too")
    add_shared(parser, "--json")


def run(options: argparse.Namespace) -> int:
    """Print the facts."""
    facts = info()
    if options.json:
        print_json(facts)
    else:
        print_tables(tables(facts, options.all))
    return 0
