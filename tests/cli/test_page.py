"""The commands that ``docs/cli.md`` shows run, and the keys that it lists are those of the documents."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "cli.md").read_text(encoding="utf-8")
WORDS = [
    shlex.split(line)[2:]
    for block in re.findall(r"^```console\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    for line in block.splitlines()
    if line.startswith("$ lowprec ")
]
#: These become another program, so they run in a process of their own.
LAUNCHES = [words for words in WORDS if words[0] == "run"]
COMMANDS = [words for words in WORDS if words[0] != "run"]
#: Timed less often than on the page, and smaller.
QUICK = {"check": ["--rounds", "1"]}


@pytest.fixture
def _operands(tmp_path, monkeypatch, rng):
    monkeypatch.chdir(tmp_path)
    np.save("A.npy", rng.standard_normal((1024, 512), dtype=np.float32))
    np.save("B.npy", rng.standard_normal((512, 2048), dtype=np.float32))


def test_the_programs_print_the_output_of_the_page(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (program,) = re.findall(r"^```python\n(# train.py\n.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    Path("train.py").write_text(program)
    assert len(LAUNCHES) == 3
    for words in LAUNCHES:
        done = subprocess.run(
            [sys.executable, "-m", "lowprec", *words], capture_output=True, text=True, check=False
        )
        assert (done.returncode, done.stderr) == (0, "")
        assert f"$ lowprec {shlex.join(words)}\n{done.stdout}" in PAGE


def _listed(heading):
    """The names in backquotes under a heading."""
    section = PAGE.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    return set(re.findall(r"`([a-z_]+)`", section))


@pytest.mark.usefixtures("_operands")
def test_the_commands_run(command):
    assert {words[0] for words in COMMANDS} == {"info", "plan", "check", "autotune"}
    codes = [command(*words, *QUICK.get(words[0], [])).code for words in COMMANDS]
    # The page begins with two mistakes.
    assert codes == [2, 2] + [0] * (len(COMMANDS) - 2)


@pytest.mark.usefixtures("_operands")
def test_the_mistakes_give_the_errors_of_the_page(command):
    for words in COMMANDS[:2]:
        assert command(*words).err in PAGE


@pytest.mark.usefixtures("_operands")
@pytest.mark.parametrize(
    ("heading", "words", "inner"),
    [
        ("info", ["info"], None),
        ("check", ["check", "--sizes", "8", "--rounds", "1"], "cases"),
        ("autotune", ["autotune", "--shapes", "8x8", "8x8"], "results"),
    ],
)
def test_the_keys_are_listed(command, heading, words, inner):
    found = json.loads(command(*words, "--json").out)
    keys = set(found)
    for item in found[inner] if inner else []:
        keys |= set(item)
        for row in item.get("rows", []):
            keys |= set(row)
    assert keys <= _listed(heading)
