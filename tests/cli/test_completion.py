"""Completion by real shells: what Tab makes of the beginning of a line."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("shtab", reason="shtab is not installed")
pytestmark = pytest.mark.skipif(shutil.which("bash") is None or os.name != "posix", reason="bash is not installed")


@pytest.fixture
def script(command: Callable[..., Any], tmp_path: Path) -> Callable[[str], Path]:
    def write(shell: str) -> Path:
        done = command("completion", shell)
        assert (done.code, done.err) == (0, "")
        path = tmp_path / f"lowprec.{shell}"
        path.write_text(done.out)
        return path

    return write


LINES = [
    ("ch", ["check"]),
    ("", ["info", "plan", "matmul", "check", "audit", "autotune", "run", "completion"]),
    ("plan --mo", ["--mode"]),
    ("plan --mode tf", ["tf32", "tf32x3"]),
    ("check --modes fp3", ["fp32", "fp32_pedantic", "fp32_emulated"]),
    ("check --dtype bf", ["bfloat16"]),
    ("matmul --out-dtype c", ["complex64", "complex128"]),
    ("matmul tr", ["train.npy"]),
    ("matmul train.npy train.npy -o tr", ["train.npy"]),
    ("check --csv tr", ["train.npy"]),
    ("run --mode bf16 tr", ["train.npy"]),
    ("completion ", ["bash", "zsh", "fish"]),
    ("check --distribution w", ["wide"]),
]


@pytest.mark.parametrize(("line", "found"), LINES)
def test_bash(script: Callable[[str], Path], tmp_path: Path, line: str, found: list[str]) -> None:
    folder = tmp_path / "work"
    folder.mkdir()
    (folder / "train.npy").touch()
    words = ["lowprec", *line.split(" ")]
    # As bash itself does it: the function that `complete` names gets the words and leaves COMPREPLY.
    code = (
        f"source {shlex.quote(str(script('bash')))}\n"
        "function=$(complete -p lowprec | sed 's/.*-F \\([^ ]*\\).*/\\1/')\n"
        f"COMP_WORDS=({' '.join(map(shlex.quote, words))}); COMP_CWORD={len(words) - 1}\n"
        f"COMP_LINE={shlex.quote(' '.join(words))}; COMP_POINT=${{#COMP_LINE}}\n"
        f"$function lowprec {shlex.quote(words[-1])} {shlex.quote(words[-2])}\n"
        'printf "%s\\n" "${COMPREPLY[@]}"'
    )
    done = subprocess.run(["bash", "--norc", "-c", code], capture_output=True, text=True, check=True, cwd=folder)
    assert done.stderr == ""
    assert done.stdout.split() == found


def test_every_shell_that_is_there_takes_its_script(script: Callable[[str], Path]) -> None:
    checks = {"bash": ["bash", "-n"], "zsh": ["zsh", "-n"], "fish": ["fish", "--no-execute"]}
    for shell, words in checks.items():
        path = script(shell)
        if shutil.which(shell):
            done = subprocess.run([*words, path], capture_output=True, text=True, check=False)
            assert (done.returncode, done.stderr) == (0, "")
    if shutil.which("fish"):
        asked = f"source {script('fish')}; complete -C 'lowprec plan --mode tf'"
        done = subprocess.run(["fish", "-c", asked], capture_output=True, text=True, check=True)
        assert done.stdout.split()[0] == "tf32"


def test_a_missing_shtab_is_named(refused: Callable[..., str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "shtab", None)
    assert 'pip install "lowprec[cli]"' in refused("completion", "bash")


def test_a_misspelt_shell(refused: Callable[..., str]) -> None:
    assert "did you mean 'bash'?" in refused("completion", "bas")
