"""Atomic writes: a file appears complete or not at all."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import secrets
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

from lowprec.util.plain import finite

#: Characters of the target's name in the temporary name, which may have 255 bytes in all.
_LONGEST_PREFIX = 40


def write_file(path: str | os.PathLike[str], write: Callable[[BinaryIO], Any], *, mode: int | None = None) -> None:
    """Write a temporary file in the same folder by ``write``, then replace the target by it in one step.

    After an error the old file is unchanged. The target of a symbolic link is replaced, not the link; a device, pipe or
    folder is an OSError. ``mode`` are the permissions, by default those of the old file, or of a new one.
    """
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise FileExistsError(errno.EEXIST, "not a regular file", os.fspath(path))
    target = Path(path).resolve()
    temporary = target.with_name(f".{target.name[:_LONGEST_PREFIX]}.{secrets.token_hex(8)}.tmp")
    # One frame, so that an exception of a signal handler cannot leave the temporary file.
    try:
        permissions = 0o666 if mode is None else mode
        with open(temporary, "xb", opener=lambda name, flags: os.open(name, flags, permissions)) as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        if mode is None:
            with contextlib.suppress(FileNotFoundError):
                os.chmod(temporary, stat.S_IMODE(os.stat(target).st_mode))
        os.replace(temporary, target)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)


def write_json(path: str | os.PathLike[str], value: Any, indent: int | None = None) -> None:
    """Write a value to a JSON file, None for Inf and NaN."""
    text = json.dumps(finite(value), indent=indent, allow_nan=False)
    write_file(path, lambda file: file.write(text.encode()))
