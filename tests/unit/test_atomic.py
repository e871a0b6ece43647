"""A file appears whole or not at all, whatever happens while it is written."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from lowprec.util import atomic
from support import interrupts


# Between the end of a block and its `__exit__`, where a handler may raise, only the collector closes the file.
@pytest.mark.filterwarnings("ignore:.*unclosed file", "ignore:Exception ignored in:")
def test_an_interrupt_anywhere_leaves_one_whole_file(tmp_path: Path) -> None:
    target, contents = tmp_path / "out", list[bytes]()
    target.write_bytes(b"old")
    for _ in interrupts.interrupted(lambda: atomic.write_file(target, b"half")):
        assert [p.name for p in tmp_path.iterdir()] == ["out"]
        contents.append(target.read_bytes())
        target.write_bytes(b"old")
    # The old file until the new one is complete, and the new one from then on.
    assert contents == sorted(contents, reverse=True)
    assert set(contents) == {b"old", b"half"}
    assert len(contents) > 5


def test_a_failure_is_the_caller_s(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(FileNotFoundError, match="missing"):
        atomic.write_file(tmp_path / "missing" / "out", b"half")

    def full(number: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        atomic.write_file(tmp_path / "out", b"half")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes on this system")
def test_special_files_are_not_replaced(tmp_path: Path) -> None:
    """A pipe represents devices: nothing is lost if it is replaced by mistake."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("pipe")
    (tmp_path / "folder").mkdir()
    before = {p.name: p.lstat() for p in tmp_path.iterdir()}
    for name in before:
        with pytest.raises(FileExistsError, match=f"not a regular file: .*{name}"):
            atomic.write_file(tmp_path / name, b"half")
    after = {p.name: p.lstat() for p in tmp_path.iterdir()}
    assert {n: (s.st_ino, s.st_mode) for n, s in after.items()} == {n: (s.st_ino, s.st_mode) for n, s in before.items()}


def test_a_long_name_has_room_for_the_temporary_one(tmp_path: Path) -> None:
    # 255 bytes in file systems, 3 to a sign here.
    path = tmp_path / ("\u2200" * 85)
    atomic.write_file(path, b"half")
    assert path.read_bytes() == b"half"


@pytest.mark.skipif(os.name != "posix", reason="modes are those of POSIX")
def test_permissions(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        for name, mode in (("new", 0o666), ("own", 0o600)):
            atomic.write_file(tmp_path / name, b"half", mode=mode)
    finally:
        os.umask(before)
    found = {p.name: stat.S_IMODE(p.stat().st_mode) for p in tmp_path.iterdir()}
    assert found == {"new": 0o640, "own": 0o600}
