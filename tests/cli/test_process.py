"""The command as a process: entry points, streams, signals, what a defect looks like."""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

import lowprec
from lowprec.cli import main

MODULE = (sys.executable, "-m", "lowprec")


def _run(
    *words: object, variables: Mapping[str, str] | None = None, cwd: Path | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*MODULE, *map(str, words)],
        capture_output=True,
        text=True,
        check=False,
        cwd=cwd,
        env={**os.environ, **(variables or {})},
        timeout=120,
    )


def test_from_files_to_file(tmp_path: Path, files: tuple[Path, Path]) -> None:
    done = _run("matmul", *files, "-o", "C.npy", "--mode", "tf32", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert "tf32" in done.stdout
    a, b = map(np.load, files)
    np.testing.assert_array_equal(np.load(tmp_path / "C.npy"), lowprec.matmul(a, b, math_mode="tf32"))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["A.npy", "B.npy", "C.npy"]


def test_a_result_on_standard_output_is_alone_there(files: tuple[Path, Path]) -> None:
    words = ["matmul", *map(str, files), "-o", "/dev/stdout"]
    done = subprocess.run([*MODULE, *words], capture_output=True, check=True, timeout=120)
    a, b = map(np.load, files)
    stream = io.BytesIO(done.stdout)
    np.testing.assert_array_equal(np.load(stream), lowprec.matmul(a, b))
    assert stream.read() == b""
    assert b"kernel" in done.stderr


def test_from_standard_input_to_standard_output(files: tuple[Path, Path]) -> None:
    words = ["matmul", "-", str(files[1]), "-o", "-"]
    done = subprocess.run([*MODULE, *words], input=files[0].read_bytes(), capture_output=True, check=True)
    a, b = map(np.load, files)
    np.testing.assert_array_equal(np.load(io.BytesIO(done.stdout)), lowprec.matmul(a, b))


def test_standard_output_in_a_file_is_added_to(tmp_path: Path, files: tuple[Path, Path]) -> None:
    words = ["matmul", *map(str, files), "-o", "/dev/stdout"]
    with (tmp_path / "log").open("wb") as log:
        log.write(b"before")
        log.flush()
        subprocess.run([*MODULE, *words], stdout=log, stderr=subprocess.DEVNULL, check=True)
    assert (tmp_path / "log").read_bytes().startswith(b"before\x93NUMPY")


def test_a_reader_of_the_result_that_went_away(files: tuple[Path, Path]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    words = ["matmul", *map(str, files), "-o", "/dev/stdout"]
    done = subprocess.run([*MODULE, *words], stdout=writer, stderr=subprocess.PIPE, text=True, check=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")


def test_a_warning_is_one_line() -> None:
    program = (
        "import warnings, lowprec; from lowprec.cli import main; from lowprec.cli.commands import info\n"
        "info.run = lambda options: warnings.warn('of two\\nlines', lowprec.LowprecWarning) or 0\n"
        "main(['info'])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stderr == "lowprec: warning: of two lines\n"


def test_the_installed_script_is_the_same_program() -> None:
    folder = sysconfig.get_path("scripts")
    script = shutil.which("lowprec", path=folder)
    assert script is not None, f"no script lowprec in {folder}; install the package"
    done = subprocess.run([script, "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"lowprec {lowprec.__version__}\n"


@pytest.mark.parametrize("name", ["", "info", "plan", "matmul", "check", "autotune", "run", "completion"])
def test_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*filter(None, [name]), "--help"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert out.startswith("usage: lowprec")
    assert f"  lowprec {name}".rstrip() in out.partition("examples:")[2]


def test_a_mistake_has_no_traceback(tmp_path: Path) -> None:
    done = _run("check", "missing.npy", "B.npy", cwd=tmp_path)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "lowprec: cannot read missing.npy: No such file or directory\n"


def test_info_survives_a_bad_environment() -> None:
    done = _run("info", "--json", variables={"LOWPREC_MATH_MODE": "fp17"})
    assert (done.returncode, done.stderr) == (0, "")
    found = json.loads(done.stdout)
    assert found["mode"]["name"] is None
    assert any("LOWPREC_MATH_MODE" in w and "fp17" in w for w in found["warnings"])


def test_info_imports_no_framework() -> None:
    code = (
        "import sys, lowprec.cli; lowprec.cli.main(['info', '--json'])\n"
        "heavy = {'torch', 'jax', 'numba', 'cupy', 'scipy'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


#: Buffered output fails at the end, unbuffered output at once.
BUFFERING = pytest.mark.parametrize("variables", [{"PYTHONUNBUFFERED": x} for x in ("", "1")], ids=str)


#: Each says something on standard output.
TALKING = pytest.mark.parametrize(
    "words", [("info",), ("plan", "--shapes", "2x2", "2x2"), ("--help",), ("info", "-h"), ("--version",)]
)  # fmt: skip


@TALKING
@BUFFERING
@pytest.mark.sampled(2)
def test_a_reader_that_goes_away_is_no_defect(words: tuple[str, ...], variables: Mapping[str, str]) -> None:
    with subprocess.Popen(
        [*MODULE, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={**os.environ, **variables}
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 141


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full on this system")
@TALKING
@BUFFERING
@pytest.mark.sampled(2)
def test_a_full_disk_behind_standard_output_is_reported(words: tuple[str, ...], variables: Mapping[str, str]) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [*MODULE, *words],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
            env={**os.environ, **variables},
        )
    assert done.returncode == 2
    assert done.stderr == "lowprec: cannot write to standard output: No space left on device\n"


def _in_shell(text: str, cwd: Path, **variables: str) -> subprocess.CompletedProcess[bytes]:
    """Run a line of shell in which $LOWPREC is the command."""
    command = f"{sys.executable} -m lowprec"
    return subprocess.run(
        ["sh", "-c", text.replace("$LOWPREC", command)],
        capture_output=True,
        check=False,
        cwd=cwd,
        env={**os.environ, **variables},
        timeout=120,
    )


@pytest.mark.skipif(os.name != "posix", reason="no POSIX shell")
@TALKING
def test_a_closed_standard_output_is_reported(words: tuple[str, ...], tmp_path: Path) -> None:
    done = _in_shell(f"$LOWPREC {' '.join(words)} >&-", tmp_path)
    assert done.returncode == 2
    assert done.stderr == b"lowprec: cannot write to standard output: it is closed\n"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full on this system")
@pytest.mark.parametrize("stream", ["2>&-", "2>/dev/full", "<&- 2>&-"])
def test_a_closed_standard_error_changes_no_exit_code(stream: str, tmp_path: Path) -> None:
    mistake = _in_shell(f"$LOWPREC check missing.npy B.npy {stream}", tmp_path)
    assert (mistake.returncode, mistake.stdout, mistake.stderr) == (2, b"", b"")
    words = "check --sizes 8 --rounds 1 --dtype int8"  # has a remark for standard error
    done = _in_shell(f"$LOWPREC {words} {stream}", tmp_path)
    assert done.returncode == 0
    assert b"verdict" in done.stdout
    assert b"has no effect" not in done.stdout


@pytest.mark.skipif(os.name != "posix", reason="no POSIX shell")
def test_a_result_on_standard_output_is_alone_there_without_messages(tmp_path: Path, files: tuple[Path, Path]) -> None:
    done = _in_shell("$LOWPREC matmul A.npy B.npy -o - 2>&-", tmp_path)
    assert (done.returncode, done.stderr) == (0, b"")
    stream = io.BytesIO(done.stdout)
    np.testing.assert_array_equal(np.load(stream), lowprec.matmul(*map(np.load, files)))
    assert stream.read() == b""


@pytest.mark.skipif(os.name != "posix", reason="file names are text on Windows")
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8:strict", "ascii", "latin-1"])
@pytest.mark.parametrize("name", [b"\xff.npy", "\u2200.npy".encode()])
@pytest.mark.sampled(3)
def test_a_name_that_cannot_be_printed(tmp_path: Path, files: tuple[Path, Path], encoding: str, name: bytes) -> None:
    try:
        os.rename(os.fsencode(files[0]), os.fsencode(tmp_path) + b"/" + name)
    except OSError:
        pytest.skip("this file system has no such names")
    quoted = "".join(f"\\{byte:o}" for byte in name)
    script = f"name=$(printf '{quoted}'); "
    for words in (
        '$LOWPREC matmul "$name" B.npy -o "C$name"',
        '$LOWPREC check "$name" B.npy --rounds 1 --modes bf16',
        '$LOWPREC plan "$name" B.npy',
    ):
        done = _in_shell(script + words, tmp_path, PYTHONIOENCODING=encoding)
        assert done.returncode == 0
        assert b"Traceback" not in done.stderr
    done = _in_shell(script + '$LOWPREC plan "no$name" B.npy', tmp_path, PYTHONIOENCODING=encoding)
    assert done.returncode == 2
    assert done.stderr.startswith(b"lowprec: cannot read no")
    assert done.stderr.count(b"\n") == 1


def test_ctrl_c(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # From within, where the moment is known: a signal sent from outside may come while Python starts.
    code = (
        "import os, signal, sys\n"
        "from lowprec.cli import main\n"
        "from lowprec.cli.commands import plan\n"
        "plan.read_array = lambda *a, **k: os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.exit(main(['plan', 'A.npy', 'B.npy']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 128 + signal.SIGINT
    assert done.stderr == "lowprec: interrupted\n"


def test_a_defect_keeps_its_traceback() -> None:
    code = (
        "import sys\n"
        "from lowprec.cli import main\n"
        "from lowprec.cli.commands import info\n"
        "info.info = lambda: {}['missing']\n"
        "sys.exit(main(['info']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "Traceback" in done.stderr
    assert "KeyError: 'missing'" in done.stderr
