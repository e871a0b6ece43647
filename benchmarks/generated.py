"""Generated files: Markdown tables, sections between markers, atomic writes, a check that files are current."""

from __future__ import annotations

import argparse
import difflib
import os
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def write_text(path: Path, text: str) -> None:
    """Write a text file atomically, by a temporary name in the same folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        temporary.write_text(text, encoding="utf-8", newline="\n")
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def table(header: Sequence[str], rows: Iterable[Sequence[str]], *, words: int | None = None) -> str:
    r"""Return a Markdown table: the first columns are words (None: all), the others right-aligned numbers.

    Examples
    --------
    >>> print(table(["a", "n"], [["x |\n y", "1"]], words=1), end="")
    | a | n |
    | --- | ---: |
    | x \| y | 1 |
    """
    count = len(header) if words is None else words
    rule = ["---"] * count + ["---:"] * (len(header) - count)
    lines = [[re.sub(r"[ \n]+", " ", c).replace("|", "\\|") for c in line] for line in rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in (header, rule, *lines))


def filled(path: Path, name: str, section: str, text: str | None = None) -> str:
    """Return a file's text, or this one for it, with the generated text between the markers of this name.

    Raises
    ------
    ValueError
        If the file does not have the markers once.
    """
    begin, end = f"<!-- generated: {name} -->\n", "<!-- end of generated -->\n"
    if path.suffix == ".py":
        begin, end = f"# generated: {name}\n", "# end of generated\n"
    text = path.read_text(encoding="utf-8") if text is None else text
    text, count = re.subn(
        f"{begin}.*?{end}", lambda _: f"{begin}{section}{end}", text, flags=re.DOTALL
    )
    if count != 1:
        raise ValueError(f"{path.name} has {count} places for the table of {name}, not 1")
    return text


def write(files: Mapping[Path, str]) -> None:
    for path, text in files.items():
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            write_text(path, text)


def check(files: Mapping[Path, str]) -> int:
    """Report the files that are not current; return their number."""
    stale = 0
    for path, text in files.items():
        current = path.read_text(encoding="utf-8") if path.exists() else ""
        if current != text:
            stale += 1
            name = path.relative_to(ROOT).as_posix()
            old, new = current.splitlines(keepends=True), text.splitlines(keepends=True)
            sys.stderr.writelines(difflib.unified_diff(old, new, name, f"{name} (generated)"))
    return stale


def main(doc: str, write: Callable[[], None], check: Callable[[], int]) -> int:
    """Write or check the generated files, by the command line."""
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    parser.add_argument(
        "--check", action="store_true", help="write nothing, fail if something is not current"
    )
    if parser.parse_args().check:
        return 1 if check() else 0
    write()
    return 0
