"""The environment as C libraries see it, changed for as long as one of them is loaded."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager


@contextmanager
def seen_by_c(values: Mapping[str, str]) -> Iterator[None]:
    """Give variables other values for the length of a ``with`` block, for libraries that are loaded in it.

    ``os.environ`` does not change.
    """
    before = {name: os.environ.get(name) for name in values}
    try:
        for name, value in values.items():
            os.putenv(name, value)
        yield
    finally:
        for name, old in before.items():
            if old is None:
                os.unsetenv(name)
            else:
                os.putenv(name, old)
