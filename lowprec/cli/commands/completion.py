"""Print a script that lets a shell complete the words of this command.

The script contains the commands, options, modes and element types of this version, and does not start Python when Tab
is pressed. Generate it again after an update.
"""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Iterator
from typing import Any

from lowprec.cli.output import CommandError, print_text
from lowprec.formats import OPERAND_DTYPES
from lowprec.modes import available_modes

EXAMPLES = """\
examples:
  lowprec completion bash > ~/.local/share/bash-completion/completions/lowprec
  lowprec completion zsh > ~/.zfunc/_lowprec
  lowprec completion fish > ~/.config/fish/completions/lowprec.fish

The folders must exist; zsh looks into ~/.zfunc if ~/.zshrc has these lines:
  fpath+=~/.zfunc
  autoload -Uz compinit && compinit
"""

#: Options and operands that name files, and the names that others take.
_FILES = frozenset({"a", "b", "output", "csv", "plot", "program"})
_NAMES = {
    **dict.fromkeys(("mode", "modes"), tuple(map(str, available_modes()))),
    **dict.fromkeys(("dtype", "out_dtype"), tuple(map(str, OPERAND_DTYPES))),
}


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    parser.add_argument("shell", choices=("bash", "zsh", "fish"), help="bash, zsh or fish")


def run(options: argparse.Namespace) -> int:
    """Print the script."""
    try:
        shtab: Any = importlib.import_module("shtab")
    except ImportError:
        raise CommandError('completion: needs shtab: pip install "lowprec[cli]"') from None
    for action in _actions(options.parser):
        if action.dest in _FILES:
            vars(action)["complete"] = shtab.FILE
        elif action.dest in _NAMES:
            action.choices = _NAMES[action.dest]
    print_text(shtab.complete(options.parser, shell=options.shell))
    return 0


def _actions(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield from _actions(command)
        else:
            yield action
