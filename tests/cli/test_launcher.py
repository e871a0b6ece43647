"""The words of ``lowprec run``, and what it starts."""

import errno
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest

from lowprec.cli.commands import run as run_command
from support.programs import GUARD, TF32, posix, start, write

REPLACE = os.execvpe


@pytest.fixture(autouse=True)
def _somewhere(empty_folder, monkeypatch):
    def replace(*what):
        raise AssertionError("the process of the tests is not to become another program")

    monkeypatch.setattr(os, "execvpe", replace)


class Started(NamedTuple):
    program: list[str]
    variables: dict[str, str]
    err: str


@pytest.fixture
def started(command, monkeypatch):
    """What ``lowprec run`` with these words would start."""
    write("")
    write("", "-m.py")

    def run(*words):
        found = []
        monkeypatch.setattr(run_command, "start", lambda *what: found.append(what) or 0)
        code, out, err = command("run", *words)
        assert (code, out) == (0, "")
        ((program, variables),) = found
        own = [sys.executable, *run_command.interpreter_options(sys.orig_argv)]
        assert program[: len(own)] == own
        return Started(list(program[len(own) :]), dict(variables), err)

    return run


@pytest.mark.parametrize(
    ("words", "program"),
    [
        ("script.py", "script.py"),
        ("script.py --mode fp16 --help", "script.py --mode fp16 --help"),
        ("script.py -- a", "script.py -- a"),
        ("-- script.py -- a", "script.py -- a"),
        ("-m module", "-m module"),
        ("-m module --guard -m x -- y", "-m module --guard -m x -- y"),
        ("-- -m module -x", "-m module -x"),
        ("-mmodule x", "-m module x"),
        ("-", "-"),
        ("- -x", "- -x"),
        ("-- -m.py -x", "-- -m.py -x"),
    ],
)
def test_words(started, words, program):
    assert started(*TF32, *words.split()).program == program.split()


@pytest.mark.parametrize(
    ("words", "before", "after", "note"),
    [
        (TF32, {}, ("tf32", None, None, "tf32"), ""),
        (TF32, {"LOWPREC_MATH_MODE": "bf16"}, ("tf32", None, None, "tf32"), ""),
        ((*TF32, "--force"), {}, (None, "tf32", None, "tf32"), ""),
        ((*TF32, "--force"), {"LOWPREC_FORCE_MATH_MODE": "bf16"}, (None, "tf32", None, "tf32"), ""),
        (TF32, {"LOWPREC_FORCE_MATH_MODE": "tf32"}, ("tf32", "tf32", None, "tf32"), ""),
        (
            TF32,
            {"LOWPREC_FORCE_MATH_MODE": "bf16"},
            (None, "bf16", None, "bf16"),
            "LOWPREC_FORCE_MATH_MODE=bf16 overrules --mode tf32",
        ),
        (
            TF32,
            {"LOWPREC_FP32_GUARD": "1"},
            (None, None, "1", "fp32_guard"),
            "LOWPREC_FP32_GUARD overrules --mode tf32",
        ),
        (GUARD, {"LOWPREC_FORCE_MATH_MODE": "bf16"}, (None, "bf16", "1", "fp32_guard"), ""),
    ],
)
def test_settings_already_in_the_environment(started, monkeypatch, words, before, after, note):
    for name, value in before.items():
        monkeypatch.setenv(name, value)
    found = started(*words, "script.py")
    names = ("LOWPREC_MATH_MODE", "LOWPREC_FORCE_MATH_MODE", "LOWPREC_FP32_GUARD", "LOWPREC_RUN")
    assert tuple(map(found.variables.get, names)) == after
    assert found.err == (f"lowprec run: {note}\n" if note else "")


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("", "give --mode MODE, --guard or --profile, before the script"),
        ("script.py", "give --mode MODE, --guard or --profile, before the script"),
        ("--mode tf32 --guard script.py", "--guard: not allowed with argument --mode"),
        ("--mode tf23 script.py", "'tf23' is not a math mode; choose one of: fp32, "),
        ("--guard --force script.py", "--force goes with --mode"),
        ("--mode tf32", "give a script, -m and a module, or -- and a command"),
        ("--guard -m", "give a script, -m and a module, or -- and a command"),
        ("--guard --", "give a script, -m and a module, or -- and a command"),
        ("--intercept script.py", "give --mode MODE, --guard or --profile"),
        ("--intercept --guard script.py", "--intercept goes with --mode"),
        ("--intercept --profile script.py", "--intercept goes with --mode"),
        ("--mode a=fp32,*=tf32 script.py", "rules in --mode go with --intercept"),
        ("--mode a=fp32,tf32 --intercept script.py", "'tf32' is not PATTERN=MODE"),
        ("--mode a=fp23 --intercept script.py", "the mode of 'a', 'fp23' is not a math mode"),
        (
            "--mode a.toml --intercept script.py",
            "cannot read a.toml: No such file or directory (see"
            if sys.version_info >= (3, 11)
            else "need Python 3.11",
        ),
        ("--force --profile script.py", "--force goes with --mode"),
        ("--guard --verbose script.py", "unrecognized arguments: --verbose"),
        ("--guard missing.py", "lowprec: cannot read missing.py: No such file or directory"),
        ("--guard script.py/x", "lowprec: cannot read script.py/x: Not a directory"),
    ],
)
def test_mistakes(refused, monkeypatch, words, says):
    monkeypatch.setattr(run_command, "start", None)
    write("")
    assert says in refused("run", *words.split())


@pytest.mark.parametrize("variable", ["LOWPREC_FORCE_MATH_MODE", "LOWPREC_FP32_GUARD"])
def test_a_bad_variable_is_refused_before_anything_runs(refused, monkeypatch, variable):
    monkeypatch.setattr(run_command, "start", None)
    monkeypatch.setenv(variable, "fp17")
    assert f"variable {variable}" in refused("run", *TF32, write(""))


def test_a_script_that_must_not_be_read(refused, monkeypatch):
    def refuse(*how):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    # Not by the file's mode: root may read every file.
    script = write("")
    monkeypatch.setattr(Path, "open", refuse)
    assert "cannot read script.py: Permission denied" in refused("run", *TF32, script)


@posix
def test_a_pipe_is_left_to_the_program(monkeypatch):
    def refuse(*how):
        raise AssertionError("opened")

    os.mkfifo("pipe")
    monkeypatch.setattr(Path, "open", refuse)
    assert run_command._program(SimpleNamespace(module=[], program=["pipe"])) == ["pipe"]


@pytest.mark.parametrize(
    ("option", "flag"), [("-I", "isolated"), ("-E", "ignore_environment"), ("-S", "no_site")]
)
def test_a_python_that_ignores_the_environment_is_refused(refused, monkeypatch, option, flag):
    flags = SimpleNamespace(isolated=0, ignore_environment=0, no_site=0)
    setattr(flags, flag, 1)
    fake = SimpleNamespace(executable=sys.executable, flags=flags, orig_argv=sys.orig_argv)
    monkeypatch.setattr(run_command, "sys", fake)
    monkeypatch.setattr(run_command, "start", None)
    assert f"this Python was started with {option}, " in refused("run", *GUARD, write(""))


@pytest.mark.parametrize(
    ("where", "name", "value", "said"),
    [
        # As where Python is part of another program.
        (sys, "executable", "", "does not know its own executable"),
        (run_command, "STARTUP", os.pathsep.join("ab"), "PYTHONPATH cannot name it"),
    ],
)
def test_a_program_that_cannot_be_started_is_refused(
    refused, monkeypatch, where, name, value, said
):
    monkeypatch.setattr(where, name, value)
    assert said in refused("run", *GUARD, write(""))


@pytest.mark.parametrize(
    ("words", "options"),
    [
        ("python script.py -W error", ""),
        ("python -m lowprec -u", ""),
        ("python -mlowprec -u", ""),
        ("python - -u", ""),
        ("python -c code -u", ""),
        ("python -- script.py", ""),
        ("python", ""),
        ("python -W error -Xdev -X utf8 -m lowprec", "-W error -Xdev -X utf8"),
        ("python -Wd -OOum lowprec -X", "-Wd -OOu"),
        ("python -BW error -EX dev script.py", "-B -W error -E -X dev"),
        ("python -BWerror script.py", "-B -Werror"),
        ("python --check-hash-based-pycs never -B x.py", "--check-hash-based-pycs never -B"),
    ],
)
def test_interpreter_options(words, options):
    assert run_command.interpreter_options(words.split()) == options.split()


def test_an_interpreter_that_cannot_be_started(refused, monkeypatch):
    monkeypatch.setattr(os, "execvpe", REPLACE)
    monkeypatch.setattr(run_command, "python_command", lambda program: ["./missing", *program])
    message = refused("run", *TF32, write(""))
    assert message == "lowprec: run: cannot start ./missing: No such file or directory\n"


def test_where_a_process_cannot_be_replaced_the_exit_code_is_handed_on(command, monkeypatch):
    monkeypatch.setattr(run_command, "_REPLACES", False)
    assert command("run", *TF32, write("import sys; sys.exit(7)")).code == 7


@posix
def test_where_a_process_cannot_be_replaced_the_program_decides_about_ctrl_c():
    child = "import os, signal, time; time.sleep(0.2); os.kill(os.getppid(), signal.SIGINT); time.sleep(0.2)"
    code = (
        "import os, sys; from lowprec.cli.commands.run import wait_for\n"
        f"sys.exit(wait_for([sys.executable, '-c', {child + '; os._exit(9)'!r}], os.environ))"
    )
    assert start("-c", code) == (9, "", "")


@pytest.mark.skipif(sys.version_info < (3, 11), reason="tomllib is in Python 3.11")
def test_rules_are_read_from_a_file(started, refused):
    Path("modes.toml").write_text('[rules]\nlm_head = "fp32"\n"*" = "BF16"\n')
    write("")
    found = started("--mode", "modes.toml", "--intercept", "script.py")
    assert json.loads(found.variables["LOWPREC_RUN_INTERCEPT"]) == [
        ["lm_head", "fp32"],
        ["*", "bf16"],
    ]
    assert found.variables["LOWPREC_MATH_MODE"] == "bf16"
    Path(found.variables["LOWPREC_RUN_FOLDER"]).rmdir()
    Path("modes.toml").write_text("rules = 3")
    assert "no table [rules]" in refused("run", "--mode", "modes.toml", "--intercept", "script.py")
