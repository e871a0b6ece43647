"""Names on the time line of NVIDIA's profilers, where the ``nvtx`` package is installed."""

from __future__ import annotations

import functools
import importlib
from typing import Any

__all__ = ["is_installed", "pop", "push"]

_DOMAIN = "lowprec"


@functools.cache
def _package() -> Any | None:
    try:
        return importlib.import_module("nvtx")
    except ImportError:
        return None


def is_installed() -> bool:
    """Whether the package can be imported; it is with the first question."""
    return _package() is not None


def push(name: str) -> None:
    """Open a range of this thread."""
    package = _package()
    if package is not None:
        package.push_range(name, domain=_DOMAIN)


def pop() -> None:
    """Close the innermost range of this thread."""
    package = _package()
    if package is not None:
        package.pop_range(domain=_DOMAIN)
