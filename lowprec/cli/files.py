"""Operands in ``.npy`` files, which are never unpickled: a pickle can run any code. Files of results.

The ``.npy`` format has no bfloat16: NumPy writes raw elements of 2 bytes (``|V2``), whose dtype the caller passes. The
same holds for float8_e4m3fn, with 1 byte; NumPy cannot read the float8_e5m2 files that it writes.
"""

from __future__ import annotations

import io
import os
import textwrap
import warnings
from pathlib import Path

import numpy as np
from numpy.lib import format as npy

from lowprec.arrays.view import NUMPY_DTYPES
from lowprec.checking.accuracy import Array
from lowprec.cli.output import CommandError, flush
from lowprec.formats import OPERAND_DTYPES, DType
from lowprec.util.atomic import write_file


def read_array(path: str, dtype: DType | None = None, *, mapped: bool = False) -> Array:
    """Return the array of an ``.npy`` file, in native byte order; ``mapped``: shape, strides and dtype are enough.

    Raw elements (bfloat16, float8) are viewed as ``dtype``, other elements are rounded to it.
    """
    source = "/dev/stdin" if path == "-" else path
    try:
        # NumPy reads files of Python 2, with a warning.
        with warnings.catch_warnings(), open(source, "rb") as file:
            warnings.simplefilter("ignore")
            array: Array
            if mapped and file.seekable():
                array = npy.open_memmap(source, mode="r")
            else:
                whole = file if file.seekable() else io.BytesIO(file.read())
                array = npy.read_array(whole, allow_pickle=False)
    except MemoryError:
        raise
    except OSError as error:
        raise CommandError(f"cannot read {path or repr(path)}: {error.strerror or error}") from None
    except Exception as error:  # noqa: BLE001 - NumPy evaluates the header with Python's parser
        reason = textwrap.shorten(str(error) or type(error).__name__, 120)
        raise CommandError(f"cannot read {path} as an .npy file: {reason}") from None
    if array.dtype.fields is not None:
        raise CommandError(f"{path} holds records ({array.dtype}), not a matrix of numbers")
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    if array.dtype.kind == "V" and array.dtype.type is np.void:
        return _raw_as(path, array, dtype)
    if array.dtype in map(NUMPY_DTYPES.get, OPERAND_DTYPES if dtype is None else (dtype,)):
        return array
    return _converted(path, array, dtype)


def _raw_as(path: str, array: Array, dtype: DType | None) -> Array:
    size = array.dtype.itemsize
    # NumPy writes the types of ml_dtypes whose kind is void as raw elements.
    fitting = [d.label for d in OPERAND_DTYPES if d.itemsize == size and NUMPY_DTYPES[d].kind == "V"]
    if not fitting:
        raise CommandError(f"{path} holds raw {size}-byte elements, which fit no dtype")
    if dtype is None or dtype.label not in fitting:
        given = f"; --dtype {dtype} does not fit" if dtype is not None else ""
        raise CommandError(
            f"{path} holds raw {size}-byte elements, as NumPy stores {' and '.join(fitting)}{given}; "
            f"choose the type with --dtype {fitting[0]}"
        )
    return array.view(NUMPY_DTYPES[dtype])


def _converted(path: str, array: Array, dtype: DType | None) -> Array:
    reason = ""
    if array.dtype.kind not in "biufc":
        reason = ", which is not a number"
    elif dtype is None:
        reason = ", which has no product; convert it, for example by --dtype float32"
    elif array.dtype.kind == "c" and not dtype.is_complex:
        reason = f"; --dtype {dtype} would drop the imaginary part"
    if reason or dtype is None:
        raise CommandError(f"{path} holds {array.dtype}{reason}")
    with np.errstate(all="ignore"):
        converted: Array = array.astype(NUMPY_DTYPES[dtype])
    if dtype is DType.INT8 and not np.array_equal(converted, array):
        raise CommandError(f"{path} holds {array.dtype} values that int8 cannot hold")
    return converted


def check_output(path: str) -> None:
    """Raise if a file cannot be written; called before the computation."""
    target, reason = Path(path), ""
    try:
        if not path:
            reason = "the name is empty"
        elif target.is_dir():
            reason = "it is a folder"
        elif target.exists() and not target.is_file():
            reason = "" if os.access(path, os.W_OK) else "it is not writable"
        elif not (folder := target.resolve().parent).is_dir():
            reason = f"the folder {folder} does not exist"
        elif not os.access(folder, os.W_OK | os.X_OK):
            reason = f"the folder {folder} is not writable"
    except OSError as error:
        reason = error.strerror or str(error)
    if reason:
        raise CommandError(f"cannot write {path or repr(path)}: {reason}")


def write_output(path: str, content: bytes) -> None:
    """Write a file of exactly this name, completely or not at all, or write into a pipe or a device."""
    try:
        if Path(path).exists() and not Path(path).is_file():
            flush()  # keeps the order of the output
            with open(path, "wb") as file:
                file.write(content)
        else:
            write_file(path, content)
    except BrokenPipeError:
        raise
    except OSError as error:
        raise CommandError(f"cannot write {path}: {error.strerror or error}") from None
