"""What the backend keeps from one process to the next: compiled kernels, measured choices of algorithms.

A cache makes things faster and nothing else: a file that is damaged, or a folder that cannot be written, costs a
warning and never a product. Files appear whole or not at all, so that processes may share the folder.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
import os
import tempfile
import warnings
from pathlib import Path
from typing import Any

from lowprec.errors import BackendError, LowprecWarning
from lowprec.policy import environment

__all__ = ["cache_directory", "read_bytes", "read_json", "set_aside", "write_bytes", "write_json"]


def cache_directory() -> Path:
    """Return the folder of the cache, which need not exist.

    Raises
    ------
    BackendError
        If ``LOWPREC_CACHE_DIR`` is not set and platformdirs, which knows the system's folder, is missing.
    """
    chosen = environment.cache_directory()
    if chosen is not None:
        return Path(chosen).expanduser()
    try:
        platformdirs = importlib.import_module("platformdirs")
    except ImportError:
        raise BackendError(
            "the folder of the cache is not known without platformdirs; install it with: pip install platformdirs, "
            "or set LOWPREC_CACHE_DIR to a folder"
        ) from None
    return Path(platformdirs.user_cache_dir("lowprec", appauthor=False))


def read_bytes(name: str) -> bytes | None:
    """Return what a file holds, None if there is none or it cannot be read."""
    try:
        return (cache_directory() / name).read_bytes()
    except OSError:
        return None


def read_json(name: str) -> dict[str, Any]:
    """Return the object that a file holds, an empty one if there is no file; a damaged file is set aside."""
    data = read_bytes(name)
    if data is None:
        return {}
    try:
        value = json.loads(data)
    except ValueError as error:
        set_aside(name, f"it is not JSON: {error}")
        return {}
    if not isinstance(value, dict):
        set_aside(name, "it does not hold a JSON object")
        return {}
    return value


def set_aside(name: str, reason: str) -> None:
    """Rename a damaged file to ``name + ".damaged"``, and warn."""
    path = cache_directory() / name
    kept = path.with_name(path.name + ".damaged")
    # Another process may have been faster, and the folder may be read-only: then the warning is all there is.
    with contextlib.suppress(OSError):
        os.replace(path, kept)
    warnings.warn(
        f"lowprec does not use {path}: {reason}; it is kept as {kept.name} and made anew",
        LowprecWarning,
        stacklevel=2,
    )


def write_json(name: str, value: dict[str, Any]) -> None:
    """Write an object to a file, readable for people."""
    write_bytes(name, json.dumps(value, indent=1, sort_keys=True).encode() + b"\n")


def write_bytes(name: str, data: bytes) -> None:
    """Write a file as a whole; warn once for each folder that cannot be written."""
    folder = cache_directory()
    try:
        target = folder / name
        target.parent.mkdir(parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(prefix=target.name, dir=target.parent)
        try:
            with open(descriptor, "wb") as file:
                file.write(data)
            os.replace(temporary, target)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
            raise
    except OSError as error:
        _warn_unwritable(folder, error.strerror or str(error))


@functools.cache
def _warn_unwritable(folder: Path, reason: str) -> None:
    warnings.warn(
        f"lowprec cannot write to its cache {folder} ({reason}), so what it holds lasts for this process only; "
        "set LOWPREC_CACHE_DIR to a folder that it may write",
        LowprecWarning,
        stacklevel=3,
    )
