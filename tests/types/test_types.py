"""mypy and pyright accept each line of ``right.py`` and of the README's blocks, and refuse each of ``wrong.py``."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

HERE = Path(__file__).parent
FILES = "right.py", "wrong.py", "readme.py"
#: Without this project's settings, as in a user's.
CHECKERS = {
    "mypy": [
        "--strict",
        "--config-file=",
        "--output=json",
        f"--python-executable={sys.executable}",
    ],
    "pyright": ["--outputjson", f"--pythonpath={sys.executable}"],
}


@pytest.fixture(scope="module", params=CHECKERS)
def refused(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, set[int]]:
    """Lines with an error, by file."""
    # Outside the checkout, where the package's names would count as the user's own.
    folder = tmp_path_factory.mktemp("types")
    for name in FILES[:2]:
        shutil.copy(HERE / name, folder)
    blocks = re.findall(
        r"^```python\n(.*?)^```$",
        (HERE.parents[1] / "README.md").read_text(),
        re.MULTILINE | re.DOTALL,
    )
    assert len(blocks) > 1
    (folder / FILES[2]).write_text(
        "# mypy: allow-untyped-defs, allow-untyped-calls\n" + "\n".join(blocks)
    )
    for name in (request.param, "torch", "jax"):
        if find_spec(name) is None:
            pytest.skip(f"{name} is not installed")
    command = [sys.executable, "-m", request.param, *CHECKERS[request.param], *FILES]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 1, done.stdout + done.stderr
    if request.param == "mypy":
        found = [
            (x["file"], x["line"])
            for x in map(json.loads, done.stdout.splitlines())
            if x["severity"] == "error"
        ]
    else:
        errors = [
            x for x in json.loads(done.stdout)["generalDiagnostics"] if x["severity"] == "error"
        ]
        found = [(x["file"], x["range"]["start"]["line"] + 1) for x in errors]
    return {name: {line for file, line in found if Path(file).name == name} for name in FILES}


@pytest.mark.parametrize("name", ["right.py", "readme.py"])
def test_right_uses_are_accepted(refused: dict[str, set[int]], name: str) -> None:
    assert refused[name] == set()


def test_each_wrong_use_is_refused(refused: dict[str, set[int]]) -> None:
    lines = (HERE / "wrong.py").read_text().splitlines()
    first = lines.index("# refused") + 1
    assert refused["wrong.py"] == set(range(first + 1, len(lines) + 1))
