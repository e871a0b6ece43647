"""Operands from ``.npy`` files, and results into them.

Reading never unpickles: a pickle in a file from elsewhere can run any code. Writing is all or nothing.

The ``.npy`` format has no bfloat16: NumPy writes such an array as raw elements of 2 bytes (``|V2``), so the reader
passes their dtype. float8_e4m3fn is the same with 1 byte; NumPy cannot read the float8_e5m2 it writes.
"""

from __future__ import annotations

import io
import os
import re
import stat
import textwrap
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, BinaryIO

import numpy as np
from numpy.lib.format import MAGIC_PREFIX

from lowprec.arrays.view import NUMPY_DTYPES
from lowprec.atomic import write_file
from lowprec.checking.accuracy import Array
from lowprec.cli.errors import CommandError
from lowprec.cli.output import flush
from lowprec.formats import OPERAND_DTYPES, DType

#: How an ``.npz`` file begins.
_ARCHIVE = b"PK\x03\x04"


def _named(path: str) -> str:
    """Return a file's name for a message, an empty one in quotes."""
    return path or repr(path)


def _reason(error: OSError) -> str:
    return error.strerror or str(error)


# -- reading --------------------------------------------------------------------------------------


def read_array(path: str, dtype: DType | None = None, *, mapped: bool = False) -> Array:
    """Return the array of an ``.npy`` file, in native byte order.

    Raw elements (bfloat16 and float8 as NumPy writes them) are taken as of type ``dtype``, others are converted to it,
    rounding to nearest. ``mapped`` maps the file instead of reading it, for a caller that needs shape, strides and
    dtype only.

    Raises CommandError if the file cannot be read, is not an ``.npy`` file of numbers, or does not fit ``dtype``.
    """
    source = "/dev/stdin" if path == "-" else path
    try:
        # NumPy warns of files that Python 2 wrote, and reads them.
        with warnings.catch_warnings(), Path(source).open("rb") as file:
            warnings.simplefilter("ignore")
            readable = file if file.seekable() else io.BytesIO(file.read())
            magic = readable.read(len(MAGIC_PREFIX))
            readable.seek(0)
            if magic.startswith(_ARCHIVE):
                raise CommandError(
                    f"{path} is an archive of arrays (.npz); save each array to an .npy file of its own"
                )
            if magic != MAGIC_PREFIX:
                raise CommandError(f"{path} is not an .npy file; numpy.save writes one")
            if mapped and readable is file:
                array: Array = np.load(source, mmap_mode="r", allow_pickle=False)
            else:
                array = np.load(readable, allow_pickle=False)
    except (CommandError, MemoryError):
        raise
    except OSError as error:
        raise CommandError(f"cannot read {_named(path)}: {_reason(error)}") from None
    except Exception as error:  # noqa: BLE001 - NumPy evaluates the header with Python's parser
        reason = textwrap.shorten(str(error) or type(error).__name__, 120)
        raise CommandError(f"cannot read {path}: {reason}") from None
    if array.dtype.fields is not None:
        raise CommandError(f"{path} holds records ({array.dtype}), not a matrix of numbers")
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    return _as_dtype(path, array, dtype)


def _as_dtype(path: str, array: Array, dtype: DType | None) -> Array:
    if array.dtype.kind == "V" and array.dtype.type is np.void:
        return _raw_as(path, array, dtype)
    if array.dtype in map(NUMPY_DTYPES.get, OPERAND_DTYPES if dtype is None else (dtype,)):
        return array
    if array.dtype.kind not in "biufc":
        raise CommandError(f"{path} holds {array.dtype}, which is not a number")
    if dtype is None:
        raise CommandError(
            f"{path} holds {array.dtype}, which is not multiplied; convert it, for example by --dtype float32"
        )
    return _converted(path, array, dtype)


def _raw_as(path: str, array: Array, dtype: DType | None) -> Array:
    size = array.dtype.itemsize
    # What ml_dtypes adds as a kind of void, NumPy writes as one.
    fitting = [
        d.label for d in OPERAND_DTYPES if d.itemsize == size and NUMPY_DTYPES[d].kind == "V"
    ]
    if not fitting:
        raise CommandError(f"{path} holds raw elements of {size} bytes, which no dtype explains")
    if dtype is None or dtype.label not in fitting:
        given = f"; --dtype {dtype} does not fit" if dtype is not None else ""
        raise CommandError(
            f"{path} holds raw elements of {size} byte{'s' * (size > 1)}, as NumPy stores "
            f"{' and '.join(fitting)}{given}; say which with --dtype {fitting[0]}"
        )
    return array.view(NUMPY_DTYPES[dtype])


def _converted(path: str, array: Array, dtype: DType) -> Array:
    """Return the array as another element type; refuse what would lose an imaginary part or wrap around."""
    if array.dtype.kind == "c" and not dtype.is_complex:
        raise CommandError(
            f"{path} holds {array.dtype}; --dtype {dtype} would drop the imaginary part"
        )
    with np.errstate(all="ignore"):
        converted: Array = array.astype(NUMPY_DTYPES[dtype])
    if dtype is DType.INT8 and not np.array_equal(converted, array):
        raise CommandError(f"{path} holds {array.dtype} values that int8 cannot hold")
    return converted


# -- writing --------------------------------------------------------------------------------------


#: Open descriptors of this process, by the names that systems have for them.
_DESCRIPTOR = re.compile(
    r"/dev/(?:std(?P<name>out|err)|fd/(?P<number>\d+))|/proc/self/fd/(?P<same>\d+)"
)

_LARGEST = 2**31 - 1


def _descriptor(path: str) -> int | None:
    """Return the open descriptor that a name stands for, ``-`` for standard output; None where it is that of a file."""
    found = _DESCRIPTOR.fullmatch(path)
    if found is None:
        return 1 if path == "-" else None
    name, *numbers = found.group("name", "number", "same")
    if name:
        return {"out": 1, "err": 2}[name]
    digits = next(filter(None, numbers))
    # What is beyond an int of C is no open descriptor, and neither is the largest.
    return int(digits) if len(digits) < 10 else _LARGEST


def _is_written_into(path: str) -> bool:
    """Whether what is written goes into what is there, a pipe, a terminal or an open file, and replaces nothing."""
    if _descriptor(path) is not None:
        return True
    try:
        mode = os.stat(path).st_mode
    except (OSError, ValueError):
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISCHR(mode)


def is_standard_output(path: str | None) -> bool:
    """Whether a file that is written is what standard output goes to."""
    if not path or not _is_written_into(path):
        return False
    try:
        known = _descriptor(path)
        there = os.stat(path) if known is None else os.fstat(known)
        return os.path.samestat(there, os.fstat(1))
    except OSError:
        return False


def check_output(path: str) -> None:
    """Refuse an output that could not be written, before the time for computing it is spent."""
    try:
        if _is_written_into(path):
            descriptor = _descriptor(path)
            if descriptor is not None:
                os.fstat(descriptor)
            elif not os.access(path, os.W_OK):
                raise CommandError(f"cannot write {path}: it is not writable")
            return
        target = Path(path).resolve()
        if target.exists() and not target.is_file():
            kind = "a folder" if target.is_dir() else "not a file, a pipe or a terminal"
            raise CommandError(f"cannot write {_named(path)}: it is {kind}")
        folder_exists = target.parent.is_dir()
    except OSError as error:
        raise CommandError(f"cannot write {path}: {_reason(error)}") from None
    if not folder_exists:
        raise CommandError(f"cannot write {path}: the folder {target.parent} does not exist")
    if not os.access(target.parent, os.W_OK | os.X_OK):
        raise CommandError(f"cannot write {path}: the folder {target.parent} is not writable")


def write_array(path: str, array: Array) -> None:
    """Write an ``.npy`` file, as :func:`write_output` does."""

    def save(file: BinaryIO) -> None:
        # Into a real file NumPy writes by itself, and tells of a full disk how many elements it has written.
        np.save(SimpleNamespace(write=file.write), array, allow_pickle=False)

    write_output(path, save)


def write_output(path: str, write: Callable[[BinaryIO], Any]) -> None:
    """Write a file under exactly this name, wholly or not at all; see :func:`lowprec.atomic.write_file`.

    A pipe, a terminal or another device is written into, and what ``-``, ``/dev/stdout`` and ``/dev/fd/N`` stand for.
    """
    check_output(path)
    try:
        if _is_written_into(path):
            flush()  # what was printed before comes before
            descriptor = _descriptor(path)
            with open(path if descriptor is None else os.dup(descriptor), "wb") as file:
                write(file)
        else:
            write_file(path, write)
    except BrokenPipeError:
        raise
    except OSError as error:
        raise CommandError(f"cannot write {path}: {_reason(error)}") from None
