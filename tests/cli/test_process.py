"""The command as a process: entry points, streams, signals, what a defect looks like."""

from __future__ import annotations

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
    np.testing.assert_array_equal(
        np.load(tmp_path / "C.npy"), lowprec.matmul(a, b, math_mode="tf32")
    )
    assert sorted(p.name for p in tmp_path.iterdir()) == ["A.npy", "B.npy", "C.npy"]


def test_the_installed_script_is_the_same_program() -> None:
    folder = sysconfig.get_path("scripts")
    script = shutil.which("lowprec", path=folder)
    assert script is not None, f"no script lowprec in {folder}; install the package"
    done = subprocess.run([script, "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"lowprec {lowprec.__version__}\n"


@pytest.mark.parametrize(
    "name", ["", "info", "plan", "matmul", "check", "bench", "autotune", "run"]
)
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
BUFFERING = pytest.mark.parametrize(
    "variables", [{"PYTHONUNBUFFERED": x} for x in ("", "1")], ids=str
)


@BUFFERING
def test_a_reader_that_goes_away_is_no_defect(variables: Mapping[str, str]) -> None:
    with subprocess.Popen(
        [*MODULE, "info"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**os.environ, **variables},
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        assert process.stderr.read() == b""
    assert process.returncode == 141


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full on this system")
@BUFFERING
def test_a_full_disk_behind_standard_output_is_told(variables: Mapping[str, str]) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [*MODULE, "info"],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
            env={**os.environ, **variables},
        )
    assert done.returncode == 2
    assert done.stderr == "lowprec: cannot write to standard output: No space left on device\n"


def test_ctrl_c(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # From within, where the moment is known: a signal sent from outside may come while Python starts.
    code = (
        "import os, signal, sys\n"
        "from lowprec.cli import files, main\n"
        "files.read_array = lambda *a, **k: os.kill(os.getpid(), signal.SIGINT)\n"
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
