"""Sections of pages that show other files: generated tables, scripts and sources, so that every site shows them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

import generated

DOCS = Path(__file__).resolve().parent
README = DOCS.parent / "README.md"
TABLES = DOCS / "_generated"

_TABLE = re.compile(r"^<!-- generated: (\w+\.md) -->$", re.MULTILINE)

#: Sections that show a whole file: the page, the name of the section, the file, its language.
SOURCES = (
    ("quickstart.md", "first model", "docs/examples/first_model.sh", "bash"),
    ("extending.md", "a unit of CPUs", "lowprec/backends/cpu/native/x86_avx512bf16.cpp", "cpp"),
)

#: Products that an interception leaves to the library: the only list of them on the first pages.
NOT_TAKEN = """\
- On GPUs: recurrent layers, convolutions, and attention in one kernel.
- PyTorch's products of two activations are in `bf16` where a mode quantises, unless a rule names them. Products of two
  vectors, and those inside solvers and factorisations, keep their precision unless a rule names them.
- Sparse tensors, weights that are already quantised, and C++ programs of Inductor (`max_autotune`, AOTInductor).
- Sums, norms, softmax, activation functions, optimizers: everything that is not a matrix product.
- NumPy outside of Linux, and sparse matrices of SciPy.
- JAX functions that were exported or compiled ahead of time outside of the block.
"""


def pages(made: Mapping[Path, str]) -> dict[Path, str]:
    """Return the text of every page with such a section; `made` has files that are not written yet."""
    files = {README: generated.filled(README, "not taken", NOT_TAKEN, made[README])}
    for page in sorted(DOCS.glob("*.md")):
        text = page.read_text(encoding="utf-8")
        for name in _TABLE.findall(text):
            table = made.get(TABLES / name) or (TABLES / name).read_text(encoding="utf-8")
            text = generated.filled(page, name, table.replace("](../../", "](../"), text)
        files[page] = text
    for name, section, source, language in SOURCES:
        page = DOCS / name
        shown = (DOCS.parent / source).read_text(encoding="utf-8")
        files[page] = generated.filled(page, section, f"```{language}\n{shown}```\n", files[page])
    report = re.search(r"^```text\n.*?^```\n", files[README], re.MULTILINE | re.DOTALL)
    assert report is not None
    index = DOCS / "index.md"
    files[index] = generated.filled(index, "not taken", NOT_TAKEN, files[index])
    for page in (index, DOCS / "quickstart.md"):
        files[page] = generated.filled(page, "first report", report[0], files[page])
    return files
