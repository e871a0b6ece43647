"""Names on the time line of NVIDIA's profilers, where the ``nvtx`` package is installed."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any


@functools.cache
def _package() -> Any | None:
    try:
        return importlib.import_module("nvtx")
    except ImportError:
        return None


def annotate(name: Callable[[], str]) -> AbstractContextManager[Any]:
    """Return a range of this thread; its name is made only where there is somebody to read it."""
    package = _package()
    if package is None:
        return nullcontext()
    annotation: AbstractContextManager[Any] = package.annotate(name(), domain="lowprec")
    return annotation
