"""A progress bar on standard error, in a terminal with rich installed."""

from __future__ import annotations

import contextlib
import itertools
import sys
from collections.abc import Callable, Iterator
from typing import Any, TextIO


@contextlib.contextmanager
def progress(description: str, total: int) -> Iterator[Callable[..., None]]:
    """Show a progress bar in a terminal with rich installed; yield the function to call before each step."""
    console = None if sys.stderr is None else console_of(sys.stderr)
    if console is None:
        yield lambda *_: None
        return
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task, finished = bar.add_task(description, total=total), itertools.count()

        def step(*words: str) -> None:
            text = f"{description}: {', '.join(words)}"
            bar.update(task, description=text, completed=next(finished))

        yield step


def console_of(stream: TextIO) -> Any | None:
    """Return rich's console of a terminal; None for other streams or without rich."""
    if not stream.isatty():
        return None
    try:
        from rich.console import Console
    except ImportError:
        return None
    return Console(file=stream, highlight=False)
