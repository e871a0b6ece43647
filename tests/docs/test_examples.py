"""Run the code that the documentation shows.

Every ```` ```python ```` block of the README and of `docs/` runs, a page's blocks in order and in one
namespace, as a reader would type them. A block fenced ```` ```python no-run ```` is shown only. So do
the `>>>` examples in the docstrings of the package.
"""

import doctest
import importlib
import importlib.util
import pkgutil
import re
from dataclasses import dataclass
from pathlib import Path

import pytest

import lowprec
from lowprec.policy import controllers

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]

_FENCE = re.compile(r"^```python *(?P<flag>[^\n]*)\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL)
_FRAMEWORK = re.compile(
    r"^\s*(?:import|from)\s+(?:lowprec\.)?(torch|jax|cupy|matplotlib|rich)\b", re.MULTILINE
)


@dataclass(frozen=True)
class Block:
    """One fenced block: its place, its flag and its code."""

    page: Path
    line: int
    flag: str
    code: str

    @property
    def missing(self):
        """Libraries that the block needs, and that are not installed."""
        # A page about a library has imported it above.
        about = {self.page.stem}.intersection({"torch", "jax"})
        return absent(about.union(_FRAMEWORK.findall(self.code)))

    def run(self, namespace):
        # Blank lines in front make a traceback name the line of the page.
        code = compile("\n" * self.line + self.code, str(self.page), "exec")
        exec(code, namespace)


def absent(names):
    return {name for name in names if importlib.util.find_spec(name) is None}


def blocks_of(page):
    """Return the Python blocks of one page, in order."""
    text = page.read_text(encoding="utf-8")
    return [
        Block(page, text.count("\n", 0, m.start()) + 1, m["flag"].strip(), m["code"])
        for m in _FENCE.finditer(text)
    ]


BLOCKS = {page.relative_to(ROOT).as_posix(): blocks_of(page) for page in PAGES}
RUNNABLE = {
    name: run
    for name, blocks in BLOCKS.items()
    if (run := [b for b in blocks if b.flag != "no-run"])
}


@pytest.mark.parametrize("page", RUNNABLE)
def test_blocks_run(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    namespace, missing = {"__name__": "__main__"}, set()
    for block in RUNNABLE[page]:
        missing |= block.missing
        if not block.missing:
            block.run(namespace)
    skip_without(missing)


def skip_without(missing):
    if missing:
        pytest.skip(f"{', '.join(sorted(missing))} not installed, which some of the examples need")


def test_flags_are_known():
    assert {block.flag for blocks in BLOCKS.values() for block in blocks} <= {"", "no-run"}


def test_readme_and_docs_show_code():
    assert {
        "README.md",
        "docs/quickstart.md",
        "docs/modes.md",
        "docs/precedence.md",
    } <= RUNNABLE.keys()


def test_reference_names_everything_public():
    pages = [ROOT / "docs" / "api.md", ROOT / "docs" / "_generated" / "errors.md"]
    text = "".join(page.read_text(encoding="utf-8") for page in pages)
    named = set(re.findall(r":: (?:lowprec\.)?(\w+)(?:\(.*\))?$|^\| `(\w+)`", text, re.MULTILINE))
    assert {a or b for a, b in named} >= set(lowprec.__all__) - {"__version__"}


def _modules():
    found = pkgutil.walk_packages(lowprec.__path__, "lowprec.", onerror=lambda _: None)
    return ["lowprec", *(m.name for m in found if not m.name.endswith(("__main__", "._kernels")))]


@pytest.mark.parametrize("name", _modules())
def test_docstring_examples(name, monkeypatch, tmp_path):
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as missing:
        if (missing.name or "").startswith("lowprec"):
            raise
        pytest.skip(f"{missing.name} not installed")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(controllers, "_by_name", controllers._by_name.copy())
    flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    runner = doctest.DocTestRunner(optionflags=flags)
    report = []
    missing = set()
    for test in doctest.DocTestFinder(exclude_empty=True).find(module, name):
        needs = absent(_FRAMEWORK.findall("".join(example.source for example in test.examples)))
        missing |= needs
        if not needs:
            runner.run(test, out=report.append)
    assert not runner.failures, "".join(report)
    skip_without(missing)
