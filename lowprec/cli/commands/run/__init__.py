"""The command ``lowprec run``."""

# The interpreter replaces this process, so `__main__`, arguments, exit code and signals of the program are as without
# lowprec. Only the environment differs, with a start-up hook in `PYTHONPATH` (`startup/sitecustomize.py`) that all
# Python processes of the run execute.

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import stat
import struct
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lowprec.cli.options import mode, rules
from lowprec.cli.output import flush, note
from lowprec.core import blas
from lowprec.core.rules import ALL, Rules, first_match, shown
from lowprec.errors import LowprecError, UnsupportedError
from lowprec.modes import MathMode, Mode, mode_names
from lowprec.policy import environment

HELP = """\
Run a script or module, unchanged, under a mode or under the guard.

--mode sets lowprec's default mode and the switches of PyTorch, JAX, TensorFlow, CuPy and Paddle, each when the program
has imported the library; later settings by the program take precedence. With --guard, lowprec and these libraries
compute in full FP32. With --intercept, lowprec computes the products of PyTorch, JAX and NumPy (float64 ones too, which
are rounded to the mode's type and back), and with --profile lowprec's products are recorded; either shows a table at
the end, on standard error. Processes that the program starts inherit these settings.

A command after -- need not be Python: on Linux, --intercept takes its calls of the BLAS.
"""

EXAMPLES = """\
examples:
  lowprec run --mode tf32 train.py --epochs 3
  lowprec run --guard train.py
  lowprec run --mode bf16 --intercept train.py
  lowprec run --mode "lm_head=fp32,*.mlp.*=bf16,*=tf32" --intercept train.py
  lowprec run --mode rules.toml --intercept train.py
  lowprec run --mode nvfp4 --against fp32 train.py
  lowprec run --profile train.py
  lowprec run --mode bf16 --force -m package.module argument
  lowprec run --mode bf16 --intercept -- octave solve.m

Options of lowprec come first; all words after the script or the module are the program's own.
"""

#: The folder of the start-up hook.
STARTUP = str(Path(__file__).resolve().parent / "startup")

#: An option word of Python: letters, of which the last may have a value, in this word or the next.
_OPTION = re.compile(r"-(?=.)([^-cmWX]*)(?:([cmWX])(.*))?", re.DOTALL)
_PROGRAM = ("c", "m")
_LONG = "--check-hash-based-pycs"

#: The class of an ELF file, and the type of the program header with the path of the loader.
_64_BITS = 2
_INTERPRETER = 3

#: On Windows `exec` starts a second process, and the caller loses its exit code.
_REPLACES = os.name != "nt"


def configure(parser: argparse.ArgumentParser) -> None:
    how = (
        "[--mode MODE [--force] [--intercept [--against MODE [--save FILE]]] | --guard] [--profile]"
    )
    parser.usage = f"lowprec run [-h] {how} (SCRIPT | -m MODULE | -- COMMAND) ..."
    chosen = parser.add_mutually_exclusive_group()
    chosen.add_argument(
        "--mode",
        type=rules,
        help=f"math mode of the program ({mode_names()}); with --intercept also rules, PATTERN=MODE,..., or a TOML "
        "file with a table [rules]: patterns of layers, classes, functions or routines",
    )
    chosen.add_argument(
        "--guard",
        action="store_true",
        help="full FP32: a floor for lowprec, and set in the libraries",
    )
    switches = {
        "--force": "with --mode: lowprec keeps the mode and ignores the program's choices",
        "--intercept": "with --mode: the products of PyTorch, JAX and NumPy are lowprec's",
        "--profile": "show at the end which products lowprec ran, and how fast",
    }
    for name, words in switches.items():
        parser.add_argument(name, action="store_true", help=words)
    _add_comparison(parser)
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
        help="script to run (- is standard input), a folder or archive with a __main__.py, or after -- any command; "
        "and its arguments",
    )


def _add_comparison(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--against",
        type=mode,
        metavar="MODE",
        help="with --mode: run the program also in this mode, such as fp32, and show the change of the numbers that it "
        "prints and the errors of its layers; includes --intercept",
    )
    parser.add_argument(
        "--save", metavar="FILE", help="with --against: write the report to an HTML file, too"
    )


def run(options: argparse.Namespace) -> int:
    rules = options.mode
    guard = options.guard
    if rules is None and not guard and not options.profile:
        raise LowprecError(
            "run: give --mode MODE, --guard or --profile, before the script or the module"
        )
    _check(options)
    foreign = _command(options)
    command = foreign or python_command(_program(options))
    force = options.force
    mode = None
    if rules is not None:
        asked = _single(rules, options.intercept)
        mode, force = _in_force(asked, force)
        guard = mode is None
        if mode != asked:
            rules = ((ALL, mode or MathMode.FP32),)
    if options.against is not None:
        if foreign or mode is None:
            raise LowprecError("run: --against compares Python programs, outside of a guard")
        return _run_twice(command, mode, rules, options)
    hooks: dict[str, Any] = {"profile": options.profile}
    if options.intercept:
        hooks["intercept"] = _json(rules)
        if foreign:
            hooks["preloaded"] = _preloaded(rules, foreign[0])
        elif _REPLACES:
            hooks["folder"] = tempfile.mkdtemp(prefix="lowprec-run-")
    variables = environment.child_environment(STARTUP, mode, guard=guard, force=force, **hooks)
    return start(command, variables)


def _check(options: argparse.Namespace) -> None:
    """Raise for options that do not go together; ``--against`` includes ``--intercept``."""
    options.intercept |= options.against is not None
    for name in ("force", "against", "intercept"):
        if getattr(options, name) and options.mode is None:
            raise LowprecError(f"run: --{name} goes with --mode")
    if options.save is not None:
        if options.against is None:
            raise LowprecError("run: --save goes with --against")
        from lowprec.cli.exports import check_output

        check_output(options.save)


def _single(rules: Rules, intercepts: bool) -> Mode:
    """Return the mode of all products that no other rule matches, which the libraries' switches are set for."""
    if not intercepts and [pattern for pattern, _ in rules] != [ALL]:
        raise LowprecError("run: rules in --mode go with --intercept")
    return first_match(rules, ()) or MathMode.FP32


def _run_twice(
    command: Sequence[str], mode: Mode, rules: Rules, options: argparse.Namespace
) -> int:
    from lowprec.cli.commands.run.against import run_twice
    from lowprec.core.recording import require

    require()

    def variables(record: str, is_reference: bool) -> dict[str, str]:
        hooks: dict[str, Any] = {"record": record, "force": options.force}
        if is_reference:
            return environment.child_environment(
                STARTUP, options.against, intercept=_json(against), **hooks
            )
        hooks |= {"against": str(options.against), "profile": options.profile}
        return environment.child_environment(STARTUP, mode, intercept=_json(rules), **hooks)

    against = ((ALL, options.against),)
    modes = (shown(rules).strip("'"), str(options.against))
    return run_twice(command, variables, modes, options.save)


def _json(rules: Rules) -> str:
    return json.dumps([(pattern, mode.value) for pattern, mode in rules])


def _command(options: argparse.Namespace) -> list[str]:
    """Return the words after ``--`` if they are a command that is no Python file; else none."""
    first, *words = options.program or [""]
    if first != "--" or not words or options.module:
        return []
    path = shutil.which(words[0])
    if path is None or path.endswith((".py", ".pyz", ".pyw")):
        return []
    return words


def _preloaded(rules: Rules, program: str) -> tuple[str, str] | None:
    try:
        preloaded = blas.preloaded(rules)
        _check_loader(program)
        return preloaded
    except UnsupportedError as error:
        note(f"lowprec run --intercept: {error}")
        return None


def _check_loader(program: str) -> None:
    """Raise for a program whose loader cannot preload the library of this Python."""
    try:
        own = _loader("/proc/self/exe")
        other = _loader(shutil.which(program) or program)
    except (OSError, struct.error):
        return  # a file that may be executed alone, or is damaged
    if other in (None, own):
        return
    reason = (
        f"its loader is {other}, that of this Python {own}" if other else "it is linked statically"
    )
    raise UnsupportedError(f"the BLAS calls of {program} are not taken: {reason}")


def _loader(path: str) -> str | None:
    """Return the name of the loader of an ELF file, empty if it has none; None for other files, such as scripts."""
    with open(path, "rb") as file:
        header = file.read(64)
        if not header.startswith(b"\x7fELF"):
            return None
        if header[4] != _64_BITS:
            return "one of 32 bits"
        table, size, count = struct.unpack("<32xQ14xHH6x", header)
        for number in range(count):
            file.seek(table + number * size)
            kind, offset, length = struct.unpack("<I4xQ16xQ", file.read(40))
            if kind == _INTERPRETER:
                file.seek(offset)
                return os.path.basename(file.read(length).rstrip(b"\0").decode())
    return ""


def _program(options: argparse.Namespace) -> list[str]:
    words = list(options.program)
    if options.module:
        words = ["-m", *options.module, *words]
    if words[:1] == ["--"]:
        del words[0]
    if words[:1] == ["-m"] and words[1:]:
        return words
    if not words:
        raise LowprecError(
            "run: give a script, -m and a module, or -- and a command (see lowprec run --help)"
        )
    script = words[0]
    if script == "-":
        return words
    try:
        # a pipe is not opened: that would consume its data
        if stat.S_ISREG(os.stat(script).st_mode):
            Path(script).open("rb").close()
    except OSError as error:
        reason = error.strerror or str(error)
        if shutil.which(script):
            reason += "; put -- before a command that is no Python file"
        raise LowprecError(f"cannot read {script or repr(script)}: {reason}") from None
    if script.startswith("-"):  # Python would parse the name as an option
        return ["--", *words]
    return words


def _in_force(asked: Mode, force: bool) -> tuple[Mode | None, bool]:
    """Return the mode (None: the guard) and whether to force it, after the environment of an outer ``lowprec run``."""
    outer = environment.snapshot()
    if outer.fp32_guard:
        note(f"lowprec run: LOWPREC_FP32_GUARD overrules --mode {asked}")
        return None, False
    forced = outer.force_math_mode
    if forced in (None, asked) or force:
        return asked, force
    note(f"lowprec run: LOWPREC_FORCE_MATH_MODE={forced} overrules --mode {asked}")
    return forced, True


def interpreter_options(words: Sequence[str]) -> list[str]:
    """Return Python's own options from the words of ``sys.orig_argv``."""
    options: list[str] = []
    rest = iter(words[1:])
    for word in rest:
        if word == _LONG:
            options += [word, next(rest, "")]
            continue
        option = _OPTION.fullmatch(word)
        if option is None:
            break
        flags, letter, value = option.groups()
        if flags:
            options.append(f"-{flags}")
        if letter in _PROGRAM:
            break
        if value:
            options.append(f"-{letter}{value}")
        elif letter:
            options += [f"-{letter}", next(rest, "")]
    return options


def python_command(program: Sequence[str]) -> list[str]:
    """Return the command that runs a program with this interpreter; raise if it ignores the environment."""
    if not sys.executable:
        raise LowprecError("run: this Python does not know its own executable")
    ignoring = {
        "-I": sys.flags.isolated,
        "-E": sys.flags.ignore_environment,
        "-S": sys.flags.no_site,
    }
    for option, is_set in ignoring.items():
        if is_set:
            raise LowprecError(
                f"run: this Python was started with {option}, which ignores the settings for the program; "
                "start it without, as python -m lowprec run"
            )
    if os.pathsep in STARTUP:
        raise LowprecError(f"run: {STARTUP} holds a {os.pathsep!r}, so PYTHONPATH cannot name it")
    return [sys.executable, *interpreter_options(sys.orig_argv), *program]


def start(command: Sequence[str], variables: Mapping[str, str]) -> int:
    """Replace this process by a command; where that is not possible, wait for it and return its exit code."""
    flush()
    try:
        if _REPLACES:
            os.execvpe(command[0], list(command), variables)
        return wait_for(command, variables)
    except OSError as error:
        raise LowprecError(f"run: cannot start {command[0]}: {error.strerror or error}") from None


def wait_for(command: Sequence[str], variables: Mapping[str, str]) -> int:
    with subprocess.Popen(command, env=dict(variables)) as process:
        while True:
            try:
                return process.wait()
            except KeyboardInterrupt:
                continue  # the program got it too, and handles it
