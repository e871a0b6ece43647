"""Operands: seeded random arrays, and ``.npy`` files, which are never unpickled: a pickle can run any code.

The ``.npy`` format has no bfloat16: NumPy writes raw elements of 2 bytes (``|V2``), whose dtype the caller passes. The
same holds for float8_e4m3fn, with 1 byte; NumPy cannot read the float8_e5m2 files that it writes.
"""

from __future__ import annotations

import io
import math
import sys
import textwrap
import warnings
from collections.abc import Callable

import numpy as np
from numpy.lib import format as npy

from lowprec.arrays.view import NUMPY_DTYPES
from lowprec.checking.accuracy import Array
from lowprec.checking.measure import rotation
from lowprec.errors import LowprecError
from lowprec.formats import OPERAND_DTYPES, DType
from lowprec.util.strides import Shape

#: Exponents of the wide distribution are between -20 and 20; float16 ranges from 2^-24 to 2^16.
_WIDE = 20


def _wide(rng: np.random.Generator, shape: Shape) -> Array:
    exponents = rng.integers(-_WIDE, _WIDE, shape, endpoint=True)
    return np.ldexp(rng.standard_normal(shape), exponents)


#: By the names of the command line: descriptions of random elements, and the functions that draw them in float64.
DISTRIBUTIONS: dict[str, tuple[str, Callable[[np.random.Generator, Shape], Array]]] = {
    "normal": ("normal, mean 0, variance 1", np.random.Generator.standard_normal),
    "positive": ("uniform between 0 and 1", np.random.Generator.random),
    "wide": (f"normal times 2^e, e from -{_WIDE} to {_WIDE}", _wide),
}


def operand(
    rng: np.random.Generator, shape: Shape, dtype: DType, distribution: str = "normal"
) -> Array:
    """Return a random array, also for both parts of complex numbers; int8 is uniform over all its values."""
    if math.prod(shape) > sys.maxsize // 16:  # the bytes of a complex128
        raise MemoryError(f"an array of {'x'.join(map(str, shape))} elements")
    if dtype is DType.INT8:
        return rng.integers(-128, 127, shape, dtype=np.int8, endpoint=True)
    _, draw = DISTRIBUTIONS[distribution]
    values = draw(rng, shape)
    if dtype.is_complex:
        values = values + 1j * draw(rng, shape)
    with np.errstate(over="ignore"):
        converted: Array = values.astype(NUMPY_DTYPES[dtype])
    return converted


def pairs(
    rng: np.random.Generator, extents: Shape, dtype: DType, distribution: str = "normal"
) -> list[tuple[Array, Array]]:
    """Return pairs of operands to rotate, for a product of extents ``(n,)`` or ``(m, k, n)``."""
    if len(extents) == 1:
        extents *= 3
    m, k, n = extents
    found = []
    for _ in range(rotation((m * k + k * n) * dtype.itemsize)):
        a = operand(rng, (m, k), dtype, distribution)
        b = operand(rng, (k, n), dtype, distribution)
        found.append((a, b))
    return found


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
            if not file.seekable():
                array = npy.read_array(io.BytesIO(file.read()), allow_pickle=False)
            elif mapped:
                array = npy.open_memmap(source, mode="r")
            else:
                array = npy.read_array(file, allow_pickle=False)
    except MemoryError:
        raise
    except OSError as error:
        raise LowprecError(f"cannot read {path or repr(path)}: {error.strerror or error}") from None
    except Exception as error:  # noqa: BLE001 - NumPy evaluates the header with Python's parser
        reason = textwrap.shorten(str(error) or type(error).__name__, 120)
        raise LowprecError(f"cannot read {path} as an .npy file: {reason}") from None
    if array.dtype.fields is not None:
        raise LowprecError(f"{path} holds records ({array.dtype}), not a matrix of numbers")
    if not array.dtype.isnative:
        array = array.astype(array.dtype.newbyteorder("="))
    if array.dtype.kind == "V" and array.dtype.type is np.void:
        return _raw_as(path, array, dtype)
    accepted = OPERAND_DTYPES if dtype is None else (dtype,)
    if array.dtype in map(NUMPY_DTYPES.get, accepted):
        return array
    return _converted(path, array, dtype)


def _raw_as(path: str, array: Array, dtype: DType | None) -> Array:
    size = array.dtype.itemsize
    # NumPy writes the types of ml_dtypes whose kind is void as raw elements.
    fitting = [
        d.label for d in OPERAND_DTYPES if d.itemsize == size and NUMPY_DTYPES[d].kind == "V"
    ]
    if not fitting:
        raise LowprecError(f"{path} holds raw {size}-byte elements, which fit no dtype")
    if dtype is None or dtype.label not in fitting:
        given = ""
        if dtype is not None:
            given = f"; --dtype {dtype} does not fit"
        raise LowprecError(
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
        raise LowprecError(f"{path} holds {array.dtype}{reason}")
    with np.errstate(all="ignore"):
        converted: Array = array.astype(NUMPY_DTYPES[dtype])
    if dtype is DType.INT8 and not np.array_equal(converted, array):
        raise LowprecError(f"{path} holds {array.dtype} values that int8 cannot hold")
    return converted
