"""mypy and pyright accept each line of ``right.py``, and refuse each of ``wrong.py``."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

HERE = Path(__file__).parent
#: Without this project's settings, as in a user's.
CHECKERS = {
    "mypy": ["--strict", "--config-file=", "--output=json", f"--python-executable={sys.executable}"],
    "pyright": ["--outputjson", f"--pythonpath={sys.executable}"],
}


@pytest.fixture(scope="module", params=CHECKERS)
def refused(request: pytest.FixtureRequest) -> dict[str, set[int]]:
    """Lines with an error, by file."""
    for name in (request.param, "torch", "jax"):
        if find_spec(name) is None:
            pytest.skip(f"{name} is not installed")
    command = [sys.executable, "-m", request.param, *CHECKERS[request.param], "right.py", "wrong.py"]
    done = subprocess.run(command, cwd=HERE, capture_output=True, text=True)
    assert done.returncode == 1, done.stdout + done.stderr
    if request.param == "mypy":
        found = [(x["file"], x["line"]) for x in map(json.loads, done.stdout.splitlines()) if x["severity"] == "error"]
    else:
        errors = [x for x in json.loads(done.stdout)["generalDiagnostics"] if x["severity"] == "error"]
        found = [(x["file"], x["range"]["start"]["line"] + 1) for x in errors]
    return {name: {line for file, line in found if Path(file).name == name} for name in ("right.py", "wrong.py")}


def test_right_uses_are_accepted(refused: dict[str, set[int]]) -> None:
    assert refused["right.py"] == set()


def test_each_wrong_use_is_refused(refused: dict[str, set[int]]) -> None:
    lines = (HERE / "wrong.py").read_text().splitlines()
    first = lines.index("# refused") + 1
    assert refused["wrong.py"] == set(range(first + 1, len(lines) + 1))
