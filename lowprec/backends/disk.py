"""The cache on disk: compiled kernels and measured choices.

A folder that cannot be used causes one warning and never an error. Files are written atomically, so processes may share
the folder. Cached code is executed, so files and folders that belong to other users (except root), or that others may
write to, are not used.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from lowprec.errors import warn
from lowprec.policy.environment import CACHE_DIR, Variable
from lowprec.util.atomic import write_file

_CACHES = Variable(
    "LOCALAPPDATA" if os.name == "nt" else "XDG_CACHE_HOME",
    "The user's caches.",
    "a folder",
    "~/.cache",
    str,
)
_OWN_FOLDER = "set LOWPREC_CACHE_DIR to a folder of your own"


def cache_directory() -> Path | str:
    """Return the folder of the cache, existing or not, or the reason why there is none."""
    chosen = CACHE_DIR.current()
    try:
        if chosen is not None:
            return Path(chosen).expanduser()
        base = Path(_CACHES.text() or "")
        return (base if base.is_absolute() else Path.home() / ".cache") / "lowprec"
    except RuntimeError as error:  # no home, or one unknown to the system
        reason = f"LOWPREC_CACHE_DIR={chosen}: {error}" if chosen else error
        return f"lowprec has no cache on disk: {reason}; {_OWN_FOLDER}"


def read(name: str) -> bytes | None:
    """Return the contents of a file, None if it is missing, unreadable or not trusted."""
    path = _path(name)
    if path is None:
        return None
    try:
        with path.open("rb") as file:
            reason = _distrust(os.fstat(file.fileno()))
            if not reason:
                return file.read()
    except OSError:
        return None
    _warn_once(f"lowprec does not use {path}: {reason}; remove it, or {_OWN_FOLDER}")
    return None


def write(name: str, data: bytes) -> None:
    """Write a file; warn once for each folder that cannot be written."""
    path = _path(name)
    if path is None:
        return
    try:
        cache_folder = path.parents[name.count("/")]
        cache_folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        path.parent.mkdir(mode=0o700, exist_ok=True)
        write_file(path, data, mode=0o600)
    except (OSError, RuntimeError) as error:  # RuntimeError: circular links
        reason = getattr(error, "strerror", None) or error
        _warn_once(
            f"lowprec cannot write to its cache {cache_folder} ({reason}), so cached values are lost with this "
            "process; set LOWPREC_CACHE_DIR to a writable folder"
        )


def _path(name: str) -> Path | None:
    """Return the path of a file in the cache; None, after a warning, if the folder is unknown or not trusted."""
    folder = cache_directory()
    if isinstance(folder, str):
        _warn_once(folder)
        return None
    path = folder / name
    for used in (folder, path.parent):
        reason = _distrust(used.stat()) if used.is_dir() else ""
        if reason:
            _warn_once(
                f"lowprec does not use its cache {used}: {reason}; make it yours (chmod go-w), or {_OWN_FOLDER}"
            )
            return None
    return path


def _distrust(status: os.stat_result) -> str:
    """Return the reason not to trust a file or folder, an empty string if there is none."""
    if os.name != "posix":
        return ""
    if status.st_uid not in _trusted_users():
        return "it belongs to another user"
    is_sticky = stat.S_ISDIR(status.st_mode) and status.st_mode & stat.S_ISVTX
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not is_sticky:
        return "other users can write to it"
    return ""


def _trusted_users() -> tuple[int, int]:
    return 0, os.geteuid()


def _warn_once(text: str) -> None:
    warn(text, once=text)
