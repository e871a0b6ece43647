"""The cache on disk: what is not the user's own alone is left alone, and none of it stops a product."""

import errno
import os
import stat

import pytest

import lowprec
from lowprec import errors
from lowprec.backends import disk
from lowprec.errors import LowprecWarning
from lowprec.util import atomic
from support import interrupts
from support.programs import posix


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """A folder for the cache, which does not exist yet."""
    monkeypatch.setenv("LOWPREC_CACHE_DIR", str(tmp_path / "cache"))
    errors._given.clear()
    yield tmp_path / "cache"
    errors._given.clear()


@pytest.fixture
def kept(cache):
    """The file that ``kernels/x`` is kept in."""
    disk.write("kernels/x", b"good")
    return cache / "kernels" / "x"


@posix
@pytest.mark.parametrize("mode", [0o620, 0o602, 0o666])
def test_a_file_that_others_can_write_is_not_read(kept, mode):
    kept.chmod(mode)
    with pytest.warns(LowprecWarning, match=r"does not use .*x: other users can write to it"):
        assert disk.read("kernels/x") is None
    # A new one replaces it, in a folder of the user's own.
    disk.write("kernels/x", b"new")
    assert disk.read("kernels/x") == b"new"
    assert stat.S_IMODE(kept.stat().st_mode) == 0o600


@posix
@pytest.mark.parametrize("name", ["cache", "cache/kernels"])
@pytest.mark.parametrize("mode", [0o770, 0o707, 0o777])
def test_a_folder_that_others_can_write_is_not_used(kept, tmp_path, name, mode):
    (tmp_path / name).chmod(mode)
    with pytest.warns(LowprecWarning, match=rf"{name}: other users can write to it"):
        assert disk.read("kernels/x") is None
    # Once: a second warning would be an error here.
    disk.write("kernels/x", b"new")
    assert disk.read("kernels/x") is None
    assert kept.read_bytes() == b"good"


@posix
def test_a_sticky_folder_is_used_as_far_as_its_files_are_ours(kept, cache):
    # As /tmp is: no user can remove or replace another user's files.
    cache.chmod(0o1777)
    (cache / "kernels").chmod(0o1777)
    assert disk.read("kernels/x") == b"good"
    kept.chmod(0o666)
    with pytest.warns(LowprecWarning, match="other users can write to it"):
        assert disk.read("kernels/x") is None


@posix
def test_another_user_s_file_or_folder_is_not_used(kept, cache, monkeypatch):
    # This process is neither the user who created them nor root.
    monkeypatch.setattr(disk, "_trusted_users", lambda: (4321,))
    with pytest.warns(LowprecWarning, match="it belongs to another user"):
        assert disk.read("kernels/x") is None
    kept.unlink()
    kept.parent.rmdir()
    errors._given.clear()
    with pytest.warns(LowprecWarning, match="cache: it belongs to another user"):
        disk.write("kernels/x", b"new")
    assert list(cache.iterdir()) == []


@posix
def test_a_link_to_a_folder_is_judged_by_the_folder(kept, cache, tmp_path):
    cache.rename(tmp_path / "scratch")
    cache.symlink_to(tmp_path / "scratch")
    assert disk.read("kernels/x") == b"good"
    (tmp_path / "scratch").chmod(0o777)
    with pytest.warns(LowprecWarning, match="other users can write"):
        assert disk.read("kernels/x") is None


@posix
def test_created_files_are_the_user_s_alone(cache, monkeypatch):
    monkeypatch.setenv("LOWPREC_CACHE_DIR", str(cache / "deep"))
    before = os.umask(0)
    try:
        disk.write("kernels/x", b"good")
    finally:
        os.umask(before)
    assert disk.read("kernels/x") == b"good"
    modes = {stat.S_IMODE(p.stat().st_mode) for p in cache.rglob("*")}
    assert modes == {0o700, 0o600}


def _no_user(monkeypatch):
    monkeypatch.setenv("LOWPREC_CACHE_DIR", "~nosuchuser/cache")


def _no_home(monkeypatch):
    pwd = pytest.importorskip("pwd", reason="homes of users are those of POSIX")

    def unknown(user):
        raise KeyError(f"getpwuid(): uid not found: {user}")

    for name in ("LOWPREC_CACHE_DIR", "HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", unknown)


@pytest.mark.parametrize(
    ("absent", "words"),
    [
        (_no_user, "LOWPREC_CACHE_DIR=~nosuchuser/cache: "),
        (_no_home, "no cache on disk: .*home directory.*; set LOWPREC_CACHE_DIR to a folder"),
    ],
)
def test_without_a_folder_there_is_one_warning_and_no_cache(
    cache, monkeypatch, tmp_path, absent, words
):
    absent(monkeypatch)
    monkeypatch.chdir(tmp_path)
    with pytest.warns(LowprecWarning, match=words):
        assert disk.read("kernels/x") is None
    disk.write("kernels/x", b"new")
    assert list(tmp_path.iterdir()) == []
    found = lowprec.info()
    assert found["cache"] is None
    assert not any("cache" in text for text in found["warnings"])  # no GPU needs it
    (effect,) = (x["effect"] for x in found["environment"] if x["name"] == "LOWPREC_CACHE_DIR")
    assert effect == "no cache"


@posix
def test_the_folder_of_the_system(monkeypatch, tmp_path):
    monkeypatch.delenv("LOWPREC_CACHE_DIR", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    for base, folder in (
        ("", ".cache/lowprec"),
        ("relative", ".cache/lowprec"),
        (str(tmp_path / "x"), "x/lowprec"),
    ):
        monkeypatch.setenv("XDG_CACHE_HOME", base)
        assert disk.cache_directory() == tmp_path / folder
    monkeypatch.setenv("LOWPREC_CACHE_DIR", "~/here")
    assert disk.cache_directory() == tmp_path / "here"


def _full(cache, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", refuse)


def _no_folder(cache, monkeypatch):
    cache.write_text("a file where the folder should be")


@posix
@pytest.mark.parametrize("hindrance", [_full, _no_folder])
def test_unwritable_files_cost_only_warnings(cache, monkeypatch, hindrance):
    hindrance(cache, monkeypatch)
    with pytest.warns(LowprecWarning, match="cannot write to its cache .*lost with this process"):
        disk.write("kernels/x", b"new")
    # Once: a second warning would be an error here.
    disk.write("kernels/x", b"new")
    assert disk.read("kernels/x") is None
    assert not [p for p in cache.rglob("*") if p.is_file()]


# Between the end of a block and its `__exit__`, where a handler may raise, only the collector closes the file.
@pytest.mark.filterwarnings("ignore:.*unclosed file", "ignore:Exception ignored in:")
def test_an_interrupt_anywhere_leaves_one_whole_file(tmp_path):
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


def test_a_failure_is_the_caller_s(tmp_path, monkeypatch):
    with pytest.raises(FileNotFoundError, match="missing"):
        atomic.write_file(tmp_path / "missing" / "out", b"half")

    def full(number):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        atomic.write_file(tmp_path / "out", b"half")
    assert list(tmp_path.iterdir()) == []


@posix
def test_special_files_are_not_replaced(tmp_path):
    """A pipe represents devices: nothing is lost if it is replaced by mistake."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to("pipe")
    (tmp_path / "folder").mkdir()
    before = {p.name: p.lstat() for p in tmp_path.iterdir()}
    for name in before:
        with pytest.raises(FileExistsError, match=f"not a regular file: .*{name}"):
            atomic.write_file(tmp_path / name, b"half")
    after = {p.name: p.lstat() for p in tmp_path.iterdir()}
    assert {n: (s.st_ino, s.st_mode) for n, s in after.items()} == {
        n: (s.st_ino, s.st_mode) for n, s in before.items()
    }


def test_a_long_name_has_room_for_the_temporary_one(tmp_path):
    # 255 bytes in file systems, 3 to a sign here.
    path = tmp_path / ("\u2200" * 85)
    atomic.write_file(path, b"half")
    assert path.read_bytes() == b"half"


@posix
def test_permissions_follow_the_umask(tmp_path):
    before = os.umask(0o027)
    try:
        atomic.write_file(tmp_path / "new", b"half")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "new").stat().st_mode) == 0o640
