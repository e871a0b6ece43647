"""Reading and writing ``.npy``: nothing unpickled, nothing half-written, nothing guessed."""

import io
import os
import pickle
import stat
from pathlib import Path

import numpy as np
import pytest

from lowprec.arrays.view import NUMPY_DTYPES
from lowprec.cli import exports, operands
from lowprec.errors import LowprecError
from lowprec.formats import DType


@pytest.mark.parametrize("dtype", ["f4", "f8", "f2", "c8", "c16", "i1", ">f4", ">c16"])
@pytest.mark.parametrize("shape", [(3, 4), (5,), (), (0, 4), (2, 3, 4)])
@pytest.mark.parametrize("mapped", [False, True])
def test_read_gives_the_saved_values(tmp_path, rng, dtype, shape, mapped):
    saved = rng.integers(-100, 100, shape).astype(dtype)
    np.save(tmp_path / "a.npy", saved)
    read = operands.read_array(str(tmp_path / "a.npy"), mapped=mapped)
    assert read.dtype.isnative
    assert read.dtype == saved.dtype.newbyteorder("=")
    np.testing.assert_array_equal(read, saved)


@pytest.mark.parametrize("dtype", [DType.BFLOAT16, DType.FLOAT8_E4M3FN])
def test_raw_elements_need_a_dtype(tmp_path, dtype):
    saved = np.array([[1.0, -2.0], [0.5, 3.0]]).astype(NUMPY_DTYPES[dtype])
    path = str(tmp_path / "a.npy")
    np.save(path, saved)
    read = operands.read_array(path, dtype)
    assert read.dtype == saved.dtype
    np.testing.assert_array_equal(read, saved)
    with pytest.raises(LowprecError, match=rf"raw {saved.itemsize}-byte elements.*{dtype}"):
        operands.read_array(path)
    with pytest.raises(LowprecError, match="--dtype float32 does not fit"):
        operands.read_array(path, DType.FLOAT32)


def test_other_elements_are_converted(tmp_path):
    path = str(tmp_path / "a.npy")
    np.save(path, np.array([1.0, 1 + 2**-9, 1e300]))
    np.testing.assert_array_equal(
        operands.read_array(path, DType.BFLOAT16).astype(np.float64), [1.0, 1.0, np.inf]
    )
    np.save(path, np.array([-128, 0, 127]))
    assert operands.read_array(path, DType.INT8).tolist() == [-128, 0, 127]


@pytest.mark.parametrize(
    ("array", "dtype", "words"),
    [
        (np.array([1 + 1j]), DType.FLOAT32, "imaginary part"),
        (np.array([128]), DType.INT8, "int8 cannot hold"),
        (np.array([0.5]), DType.INT8, "int8 cannot hold"),
        (np.array([np.nan]), DType.INT8, "int8 cannot hold"),
        (np.array([1]), None, "holds int64, .* by --dtype float32"),
        (np.array(["text"]), DType.FLOAT32, "not a number"),
        (np.array([b"12345"], "V5"), DType.FLOAT32, "raw 5-byte elements, which fit no dtype"),
        (np.zeros(2, [("x", "f4")]), None, "holds records"),
        (np.zeros(2, [("größe", "f4")]), None, "holds records"),
    ],
)
def test_unusable_operands_are_refused(tmp_path, array, dtype, words):
    path = str(tmp_path / "a.npy")
    with open(path, "wb") as file:
        # The version that names beyond Latin-1 need; save would warn about it.
        np.lib.format.write_array(
            file, array, version=(3, 0) if "größe" in str(array.dtype) else None
        )
    with pytest.raises(LowprecError, match=words):
        operands.read_array(path, dtype)


class _Bomb:
    def __reduce__(self):
        return os.mkdir, ("unpickled",)


def test_a_pickle_is_never_loaded(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    np.save("a.npy", np.array([_Bomb()], dtype=object), allow_pickle=True)
    with pytest.raises(LowprecError, match="Object arrays cannot be loaded"):
        operands.read_array("a.npy")
    Path("b.npy").write_bytes(pickle.dumps(_Bomb()))
    with pytest.raises(LowprecError, match=r"as an \.npy file"):
        operands.read_array("b.npy")
    assert not Path("unpickled").exists()


def test_a_file_that_ends_too_early(tmp_path):
    """In its header, which has 128 bytes, or one byte before its end."""
    path = tmp_path / "a.npy"
    np.save(path, np.zeros((8, 8)))
    whole = path.read_bytes()
    for length in (*range(128), len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(LowprecError, match=r"cannot read .*a\.npy"):
            operands.read_array(str(path))


def _with_header(path, header, version=b"\x01\x00"):
    data = header.encode("latin-1")
    size = len(data).to_bytes(2 if version == b"\x01\x00" else 4, "little")
    path.write_bytes(b"\x93NUMPY" + version + size + data + bytes(64))
    return str(path)


_SHAPED = "{'descr': '<f4', 'fortran_order': False, 'shape': %s, }"


@pytest.mark.parametrize(
    "header",
    [
        "",
        "{'descr': '<f4', 'fortran_order': False, 'shape': (2, 2), ",
        "{'descr': '<f4",
        "((((((((",
        "(" * 4000,
        "{'a'\n   b: 1\n  c}\n d",
        "{1: 2, 'descr': '<f4', 'fortran_order': True, 'shape': (2, 2)}",
        "{'descr': [('a',)], 'fortran_order': False, 'shape': (2, 2), }",
        "{'descr': '<f4\0', 'fortran_order': False, 'shape': (2, 2), }",
        "{'descr': 5, 'fortran_order': False, 'shape': (2, 2), }",
        _SHAPED % "(True, True)",
        _SHAPED % "(2, True)",
        _SHAPED % "(2.0, 2.0)",
        _SHAPED % "(-2, -2)",
        _SHAPED % f"({10**20}, 0)",
        _SHAPED % f"({'9' * 6000}, 2)",
        _SHAPED % f"({', '.join('1' * 70)})",
        _SHAPED % f"({2**62}, {2**62}, 0)",
    ],
    ids=range(18),
)
@pytest.mark.parametrize("version", [b"\x01\x00", b"\x02\x00"])
@pytest.mark.parametrize("mapped", [False, True])
def test_a_damaged_header_is_reported_in_a_few_words(tmp_path, header, version, mapped):
    path = _with_header(tmp_path / "a.npy", header, version)
    with pytest.raises(LowprecError, match=r"cannot read .*a\.npy") as found:
        operands.read_array(path, mapped=mapped)
    assert len(str(found.value)) < len(path) + 150


def test_a_header_of_python_2_is_read(tmp_path):
    path = _with_header(tmp_path / "a.npy", _SHAPED % "(2L, 3L)")
    np.testing.assert_array_equal(
        operands.read_array(path), np.zeros((2, 3), np.float32), strict=True
    )


def test_a_pipe_is_written_into(tmp_path):
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    exports.check_output(str(pipe))
    exports.write_output(str(pipe), b"rows")
    assert os.read(reader, 4096) == b"rows"
    os.close(reader)
    assert stat.S_ISFIFO(pipe.stat().st_mode)


@pytest.mark.parametrize("mapped", [False, True])
def test_a_pipe_is_read(mapped):
    reader, writer = os.pipe()
    whole = io.BytesIO()
    np.save(whole, np.arange(6.0).reshape(2, 3))
    os.write(writer, whole.getvalue())
    os.close(writer)
    found = operands.read_array(f"/dev/fd/{reader}", mapped=mapped)
    os.close(reader)
    assert found.tolist() == [[0, 1, 2], [3, 4, 5]]


def test_an_open_file_is_written_at_its_end(tmp_path):
    path = tmp_path / "log"
    path.write_bytes(b"before ")
    with path.open("ab") as file:
        exports.write_output(f"/dev/fd/{file.fileno()}", b"rows")
        file.write(b" after")
    assert path.read_bytes() == b"before rows after"


def test_a_full_device_is_reported():
    with pytest.raises(LowprecError, match="cannot write /dev/full: No space left"):
        exports.write_output("/dev/full", b"rows")


def test_a_folder_without_write_permission_is_refused(tmp_path, monkeypatch):
    # Asked of the system, so that it holds for root as well.
    monkeypatch.setattr(os, "access", lambda path, mode: not mode & os.W_OK)
    with pytest.raises(LowprecError, match="not writable"):
        exports.check_output(str(tmp_path / "C.npy"))
