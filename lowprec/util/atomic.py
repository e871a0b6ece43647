"""Atomic writes: a file appears complete or not at all."""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import os
import secrets
from pathlib import Path
from typing import Any

from lowprec.util.plain import plain


def write_file(path: str | os.PathLike[str], content: bytes, mode: int = 0o666) -> None:
    """Write a temporary file in the same folder, then replace the target by it in one step.

    After an error the old file is unchanged. The target of a symbolic link is replaced, not the link; a device, pipe or
    folder is an OSError.
    """
    target = Path(path).resolve()
    if target.exists() and not target.is_file():
        raise FileExistsError(errno.EEXIST, "not a regular file", os.fspath(path))
    temporary = target.with_name(f".{secrets.token_hex(8)}.tmp")
    opener = functools.partial(os.open, mode=mode)
    # One frame, so that an exception of a signal handler cannot leave the temporary file.
    try:
        with open(temporary, "xb", opener=opener) as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)


def write_json(path: str | os.PathLike[str], value: Any, indent: int | None = None) -> None:
    """Write a value to a JSON file, None for Inf and NaN."""
    text = json.dumps(plain(value), indent=indent, allow_nan=False)
    write_file(path, text.encode())
