"""The cache on disk: compiled kernels and measured choices.

A damaged file, or a folder that cannot be written, causes a warning and never an error. Files are written atomically,
so processes may share the folder.

Cached code is executed. So files and folders that belong to other users, or that others may write to, are not used, as
ssh does with keys. Those of root are accepted; in a sticky folder only the owner of each file counts. On Windows the
folder is in the user's profile, and nothing is checked.
"""

from __future__ import annotations

import contextlib
import errno
import importlib
import json
import os
import stat
from pathlib import Path
from typing import Any

from lowprec.errors import warn
from lowprec.policy.variables import CACHE_DIR
from lowprec.util.atomic import write_file

#: Do not follow a link, or wait for the other end of a pipe.
_FLAGS = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)

_OWN_FOLDER = "set LOWPREC_CACHE_DIR to a folder of your own"


def cache_directory() -> Path | None:
    """Return the folder of the cache, existing or not; None, after a warning, if it is unknown."""
    found = _find_directory()
    if isinstance(found, Path):
        return found
    _warn_once(absence())
    return None


def absence() -> str:
    """Return the reason why there is no cache on disk, without a warning; empty if its folder is known."""
    found = _find_directory()
    return "" if isinstance(found, Path) else f"lowprec has no cache on disk: {found}"


def _find_directory() -> Path | str:
    """Return the folder of the cache, or the reason why it is unknown."""
    chosen = CACHE_DIR.current()
    try:
        if chosen is not None:
            return Path(chosen).expanduser()
        platformdirs = importlib.import_module("platformdirs")
        found = Path(platformdirs.user_cache_dir("lowprec", appauthor=False))
        if found.is_absolute():
            return found
        # Without a home directory "~" remains, and would be a folder of that name.
        why = f"the system's folder for caches, {found}, is relative to the current folder;"
    except ImportError:
        why = "the system's folder for caches is unknown without platformdirs; pip install platformdirs, or"
    except (RuntimeError, OSError, KeyError) as error:  # no home, or one unknown to the system
        why = f"LOWPREC_CACHE_DIR={chosen}: {error};" if chosen else f"{error};"
    return f"{why} {_OWN_FOLDER}"


def read_bytes(name: str) -> bytes | None:
    """Return the contents of a file, None if it is missing, unreadable or not trusted."""
    path = _path(name)
    if path is None:
        return None
    try:
        with open(path, "rb", opener=lambda p, flags: os.open(p, flags | _FLAGS)) as file:
            found = os.fstat(file.fileno())
            why = _distrust(found) if stat.S_ISREG(found.st_mode) else "it is not a regular file"
            if not why:
                return file.read()
    except OSError as error:
        if error.errno != errno.ELOOP:
            return None
        why = "it is a symbolic link"
    _warn_once(f"lowprec does not use {path}: {why}; remove it, or {_OWN_FOLDER}")
    return None


def read_json(name: str) -> dict[str, Any]:
    """Return the JSON object in a file, empty if there is no file; a damaged file is renamed."""
    data = read_bytes(name)
    try:
        value = json.loads(data) if data is not None else {}
    except (ValueError, RecursionError) as error:
        set_aside(name, f"it is not JSON: {error}")
        return {}
    if isinstance(value, dict):
        return value
    set_aside(name, "it does not hold a JSON object")
    return {}


def set_aside(name: str, reason: str) -> None:
    """Rename a damaged file to ``name + ".damaged"``, and warn."""
    path = _path(name)
    if path is None:
        return
    kept = path.with_name(path.name + ".damaged")
    # Fails if another process was faster or the folder is read-only.
    with contextlib.suppress(OSError):
        os.replace(path, kept)
    warn(f"lowprec does not use {path}: {reason}; it is kept as {kept.name} and written again")


def write_json(name: str, value: dict[str, Any]) -> None:
    """Write an object to a file as indented JSON."""
    write_bytes(name, json.dumps(value, indent=1, sort_keys=True).encode() + b"\n")


def write_bytes(name: str, data: bytes) -> None:
    """Write a file atomically; warn once for each folder that cannot be written."""
    path = _path(name)
    if path is None:
        return
    try:
        _make_folder(path.parent)
        write_file(path, lambda file: file.write(data), mode=0o600)
    except (OSError, RuntimeError) as error:  # RuntimeError: circular links
        words = getattr(error, "strerror", None) or error
        _warn_once(
            f"lowprec cannot write to its cache {cache_directory()} ({words}), so cached values are lost with this "
            "process; set LOWPREC_CACHE_DIR to a writable folder"
        )


def _path(name: str) -> Path | None:
    """Return the path of a file in the cache; None, after a warning, if the folder is unknown or not trusted."""
    folder = cache_directory()
    if folder is None:
        return None
    path = folder / name
    for used in (folder, path.parent):
        try:
            why = _distrust(os.stat(used))
        except OSError:  # missing or unreadable: open() reports it
            continue
        if why:
            _warn_once(f"lowprec does not use its cache {used}: {why}; make it yours (chmod go-w), or {_OWN_FOLDER}")
            return None
    return path


def _distrust(found: os.stat_result) -> str:
    """Return the reason not to trust a file or folder, an empty string if there is none."""
    if os.name != "posix":
        return ""
    if found.st_uid not in _trusted_users():
        return "it belongs to another user"
    sticky = stat.S_ISDIR(found.st_mode) and found.st_mode & stat.S_ISVTX
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not sticky:
        return "other users can write to it"
    return ""


def _trusted_users() -> tuple[int, int]:
    return 0, os.geteuid()


def _make_folder(folder: Path) -> None:
    """Create a folder and its parents, accessible to this user only."""
    if not folder.is_dir():
        _make_folder(folder.parent)
        folder.mkdir(mode=0o700, exist_ok=True)


def _warn_once(text: str) -> None:
    warn(text, once=text)
