"""A line on standard error that shows the current step, in a terminal."""

from __future__ import annotations

import contextlib
import itertools
import shutil
import sys
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def progress(description: str, total: int) -> Iterator[Callable[..., None]]:
    """Show the current step in a terminal; yield the function to call before each step."""
    if sys.stderr is None or not sys.stderr.isatty():
        yield lambda *_: None
        return
    width, numbers = shutil.get_terminal_size().columns - 1, itertools.count(1)

    def show(text: str) -> None:
        sys.stderr.write(f"\r{text[:width]:<{width}}\r")
        sys.stderr.flush()

    try:
        yield lambda *words: show(f"{description} {next(numbers)}/{total}: {', '.join(words)}")
    finally:
        show("")
