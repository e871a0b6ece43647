"""The command as a process: entry points, streams, signals, what a defect looks like."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import warnings
from pathlib import Path
from textwrap import dedent

import numpy as np
import pytest

import lowprec
from lowprec.cli import main, output
from lowprec.cli.commands import info, plan
from support.commands import in_child
from support.programs import run_python

MODULE = (sys.executable, "-m", "lowprec")
fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
full_disk = pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full on this system")


def _run(*words, **how):
    how = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **how}
    return subprocess.run([*MODULE, *map(str, words)], text=True, check=False, timeout=120, **how)


def test_the_installed_script_is_the_same_program():
    folder = sysconfig.get_path("scripts")
    script = shutil.which("lowprec", path=folder)
    assert script is not None, f"no script lowprec in {folder}; install the package"
    done = subprocess.run([script, "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"lowprec {lowprec.__version__}\n"


@pytest.mark.parametrize("name", ["", "info", "plan", "check", "autotune", "run"])
def test_help(name, command):
    code, out, err = command(*filter(None, [name]), "--help")
    assert (code, err) == (0, "")
    assert out.startswith("usage: lowprec")
    assert f"  lowprec {name}".rstrip() in out.partition("examples:")[2]


@pytest.mark.parametrize("name", ["", "run"])
def test_help_needs_no_docstrings(name):
    words = (*MODULE[1:], *filter(None, [name]), "--help")
    run = [
        subprocess.run([sys.executable, *o, *words], capture_output=True, check=True)
        for o in ((), ("-OO",))
    ]
    assert run[0].stdout == run[1].stdout


def test_info_imports_no_framework():
    code = (
        "import sys, lowprec.cli; lowprec.cli.main(['info', '--json'])\n"
        "heavy = {'torch', 'jax', 'numba', 'cupy', 'scipy'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    run_python(code)


@fork
def test_an_operand_from_standard_input(files):
    done = in_child("plan", "-", files[1], stdin=files[0].read_bytes())
    assert (done.code, done.out.decode()) == (0, f"{lowprec.plan(*map(np.load, files))}\n")


@fork
@pytest.mark.parametrize("path", ["-", "/dev/stdout"])
def test_a_table_on_standard_output_is_alone_there(path):
    done = in_child("check", "--sizes", 8, "--rounds", 1, "--modes", "tf32", "--csv", path)
    lines = done.out.decode().splitlines()
    assert (done.code, len(lines)) == (0, 1 + 2)
    assert lines[0].startswith("case,a,b,mode,")
    assert b"verdict" in done.err


#: Each writes to standard output.
WRITES = [
    ("info",),
    ("plan", "--shapes", "2x2", "2x2"),
    ("--help",),
    ("info", "-h"),
    ("--version",),
]
#: Buffered output fails at the end, unbuffered output at once.
writes = pytest.mark.parametrize(
    ("words", "unbuffered"),
    [(words, unbuffered) for words in WRITES for unbuffered in (False, True)],
)


def _pipe_without_reader():
    reader, writer = os.pipe()
    os.close(reader)
    return open(writer, "wb")


def _full_disk():
    return open("/dev/full", "wb")


@fork
@full_disk
@writes
@pytest.mark.parametrize(
    ("output", "code", "said"),
    [
        (_pipe_without_reader, 141, b""),
        (_full_disk, 2, b"lowprec: cannot write to standard output: No space left on device\n"),
        (contextlib.nullcontext, 2, b"lowprec: cannot write to standard output: it is closed\n"),
    ],
)
def test_standard_output_that_cannot_be_written(words, unbuffered, output, code, said):
    with output() as stream:
        done = in_child(*words, out=stream, unbuffered=unbuffered)
    assert (done.code, done.err) == (code, said)


@full_disk
def test_the_end_of_the_interpreter_adds_nothing():
    """Its own last flush of a stream that has failed."""
    with _pipe_without_reader() as pipe, _full_disk() as full:
        gone, disk = _run("info", stdout=pipe), _run("info", stdout=full)
        mistake = _run("check", "missing.npy", "B.npy", stderr=full)
    assert (gone.returncode, gone.stderr) == (141, "")
    assert (disk.returncode, disk.stderr.count("\n")) == (2, 1)
    assert (mistake.returncode, mistake.stdout) == (2, "")


@fork
@full_disk
@pytest.mark.parametrize("stream", ["closed", "full", "closed with standard input"])
def test_a_closed_standard_error_changes_no_exit_code(stream):
    with _full_disk() as full:
        how = {
            "err": full if stream == "full" else None,
            "stdin": None if "input" in stream else b"",
        }
        mistake = in_child("check", "missing.npy", "B.npy", **how)
        # It has a remark for standard error.
        done = in_child("check", "--sizes", 8, "--rounds", 1, "--dtype", "int8", **how)
    assert mistake == (2, b"", b"")
    assert done.code == 0
    assert b"verdict" in done.out
    assert b"has no effect" not in done.out


@fork
@pytest.mark.skipif(os.name != "posix", reason="file names are text on Windows")
@pytest.mark.parametrize("encoding", ["utf-8", "ascii", "latin-1"])
@pytest.mark.parametrize("name", [b"\xff.npy", "\u2200.npy".encode()])
def test_a_name_that_cannot_be_printed(tmp_path, files, encoding, name, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text = os.fsdecode(name)
    try:
        os.rename(files[0], text)
    except OSError:
        pytest.skip("this file system has no such names")
    for words in (
        ("check", text, "B.npy", "--rounds", 1, "--modes", "bf16"),
        ("plan", text, "B.npy"),
    ):
        done = in_child(*words, encoding=encoding)
        assert done.code == 0
        assert b"Traceback" not in done.err
    done = in_child("plan", f"no{text}", "B.npy", encoding=encoding)
    assert done.code == 2
    assert done.err.startswith(b"lowprec: cannot read no")
    assert done.err.count(b"\n") == 1


def test_a_warning_is_one_line(command, monkeypatch):
    warning = lowprec.LowprecWarning("of two\nlines")

    def warn(_):
        output.note(warnings.formatwarning(warning, type(warning), "file.py", 1).rstrip())
        return 0

    monkeypatch.setattr(info, "run", warn)
    assert command("info").err == "lowprec: warning: of two lines\n"


def test_ctrl_c(command, files, monkeypatch):
    monkeypatch.setattr(plan, "read_array", lambda *_, **__: signal.raise_signal(signal.SIGINT))
    done = command("plan", *files)
    assert (done.code, done.err) == (128 + signal.SIGINT, "lowprec: interrupted\n")


def test_a_defect_keeps_its_traceback(monkeypatch):
    monkeypatch.setattr(info, "info", lambda: {}["missing"])
    with pytest.raises(KeyError, match="missing"):
        main(["info"])


@pytest.mark.parametrize("module", ["numpy", "lowprec.arrays", "lowprec.cli.output"])
def test_ctrl_c_during_the_imports(module):
    code = f"""
        import os, signal, sys

        class Finder:
            @staticmethod
            def find_spec(name, *_):
                if name == {module!r}:
                    os.kill(os.getpid(), signal.SIGINT)

        sys.meta_path.insert(0, Finder)
        from lowprec_command import main
        sys.exit(main())
    """
    command = [sys.executable, "-c", dedent(code), "--version"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (-signal.SIGINT, "", "")
