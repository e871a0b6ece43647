"""Run a script or module, unchanged, under a mode or under the guard.

With --mode, lowprec's default mode and the switches of PyTorch, JAX, TensorFlow, CuPy and Paddle are set, each as soon
as the program has imported it; later choices of the program take precedence. With --guard, lowprec and these libraries
compute in full FP32. With --intercept, lowprec computes the products of PyTorch's own operators, and with --profile
lowprec's products are recorded; either shows a table at the end, on standard error. Processes that the program starts
inherit these settings.
"""

from __future__ import annotations

import argparse
import os
import stat
from pathlib import Path

from lowprec.cli.commands.run import launcher
from lowprec.cli.errors import CommandError
from lowprec.cli.options import mode
from lowprec.cli.output import note
from lowprec.modes import MathMode, mode_names
from lowprec.policy import environment

EXAMPLES = """\
examples:
  lowprec run --mode tf32 train.py --epochs 3
  lowprec run --guard train.py
  lowprec run --mode bf16 --intercept train.py
  lowprec run --profile train.py
  lowprec run --mode bf16 --force -m package.module argument

Options of lowprec come first; all words after the script or the module are the program's own.
"""


def configure(parser: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    how = "[--mode MODE [--force] [--intercept] | --guard] [--profile]"
    parser.usage = f"lowprec run [-h] {how} (SCRIPT | -m MODULE) ..."
    chosen = parser.add_mutually_exclusive_group()
    chosen.add_argument("--mode", type=mode, help=f"math mode of the program ({mode_names()})")
    chosen.add_argument(
        "--guard",
        action="store_true",
        help="full FP32: a floor for lowprec, and set in the libraries",
    )
    switches = {
        "--force": "with --mode: lowprec keeps the mode and ignores the program's choices",
        "--intercept": "with --mode: PyTorch's products in the thread that imports it, and in backward passes, are "
        "lowprec's",
        "--profile": "show at the end which products lowprec ran, and how fast",
    }
    for name, words in switches.items():
        parser.add_argument(name, action="store_true", help=words)
    parser.add_argument(
        "-m",
        dest="module",
        nargs=argparse.REMAINDER,
        default=[],
        metavar="MODULE",
        help="module to run, as python -m does, and its arguments",
    )
    parser.add_argument(
        "program",
        nargs=argparse.REMAINDER,
        metavar="SCRIPT",
        help="script to run (- is standard input), a folder or archive with a __main__.py, and its arguments",
    )


def run(options: argparse.Namespace) -> int:
    """Replace this process by the program."""
    mode, guard = options.mode, options.guard
    if mode is None and not guard and not options.profile:
        raise CommandError(
            "run: give --mode MODE, --guard or --profile, before the script or the module"
        )
    if options.force and mode is None:
        why = "nothing overrules --guard" if guard else "give --mode MODE"
        raise CommandError(f"run: --force goes with --mode; {why}")
    if options.intercept and mode is None:
        raise CommandError("run: --intercept goes with --mode; give --mode MODE")
    command = launcher.python_command(_program(options))
    force = options.force
    if mode is not None:
        mode, force = _in_force(mode, force)
        guard = mode is None
    hooks = {"intercept": options.intercept, "profile": options.profile}
    variables = environment.child_environment(
        launcher.STARTUP, mode, guard=guard, force=force, **hooks
    )
    return launcher.start(command, variables)


def _program(options: argparse.Namespace) -> list[str]:
    """Return the arguments for Python."""
    words = ["-m", *options.module] if options.module else []
    words += options.program
    if words[:1] == ["--"]:
        del words[0]
    if words[:1] == ["-m"] and words[1:]:
        return words
    if not words:
        raise CommandError("run: give a script, or -m and a module (see lowprec run --help)")
    script = words[0]
    if script == "-":
        return words
    _check(script)
    # "--", since Python would parse the name as an option.
    return ["--", *words] if script.startswith("-") else words


def _check(script: str) -> None:
    """Raise if the script cannot be read."""
    try:
        kind = os.stat(script).st_mode
        if stat.S_ISREG(kind):
            # A pipe is not opened: that would consume its data.
            Path(script).open("rb").close()
    except OSError as error:
        raise CommandError(
            f"cannot read {script or repr(script)}: {error.strerror or error}"
        ) from None


def _in_force(asked: MathMode, force: bool) -> tuple[MathMode | None, bool]:
    """Return the mode (None: the guard) and whether to force it, after the environment of an outer ``lowprec run``."""
    taken = environment.snapshot()
    if taken.fp32_guard:
        note(f"lowprec run: LOWPREC_FP32_GUARD overrules --mode {asked}")
        return None, False
    forced = taken.force_math_mode
    if forced in (None, asked) or force:
        return asked, force
    note(f"lowprec run: LOWPREC_FORCE_MATH_MODE={forced} overrules --mode {asked}")
    return forced, True
