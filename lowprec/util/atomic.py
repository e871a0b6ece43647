"""Files that appear whole or not at all: the one way in which lowprec writes any."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

#: Of a name in a folder, so that the name with its suffix fits the 255 bytes that file systems allow.
_LONGEST_PREFIX = 40


def write_file(path: str | os.PathLike[str], write: Callable[[BinaryIO], Any], *, mode: int | None = None) -> None:
    """Write a file by way of a temporary one next to it, which then replaces it in one step.

    An error before that leaves the old file as it was, and no temporary one. A link stays a link: the file that it
    points to is replaced. A device, a pipe or a folder is not replaced, but an OSError.

    ``write`` gets the temporary file, open for writing bytes. ``mode`` are the permissions; by default those of the
    file that is replaced, else the usual ones of a new file.
    """
    _refuse_special(path)
    target = Path(path).resolve()
    temporary = target.with_name(f".{target.name[:_LONGEST_PREFIX]}.{secrets.token_hex(8)}.tmp")
    # One frame, so that no signal handler's exception leaves the file behind.
    try:
        with open(temporary, "xb", opener=_opener(mode)) as file:
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


def _refuse_special(path: str | os.PathLike[str]) -> None:
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise FileExistsError(errno.EEXIST, "not a regular file", os.fspath(path))


def _opener(mode: int | None) -> Callable[[str, int], int]:
    return lambda path, flags: os.open(path, flags, 0o666 if mode is None else mode)
