"""The environment as C libraries see it, changed for as long as one of them is loaded."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

#: What the variables hold that C libraries see in another way now.
_put_aside: dict[str, str | None] = {}


@contextmanager
def seen_by_c(values: Mapping[str, str]) -> Iterator[None]:
    """Give variables other values for the length of a ``with`` block, for libraries that are loaded in it.

    ``os.environ`` does not change. One thread at a time, and none that a signal handler may interrupt.
    """
    try:
        for name, value in values.items():
            _put_aside[name] = os.environ.get(name)
            os.putenv(name, value)
        yield
    finally:
        put_back()


def put_back() -> None:
    """End :func:`seen_by_c`, in a child that was forked in its block."""
    for name, value in tuple(_put_aside.items()):
        if value is None:
            os.unsetenv(name)
        else:
            os.putenv(name, value)
        del _put_aside[name]
