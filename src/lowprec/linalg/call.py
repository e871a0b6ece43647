"""The way of every call: which library works, on which arrays, and what becomes of its result."""

from __future__ import annotations

import functools
import sys
from typing import Any

import numpy as np

from lowprec.arrays import DLPackArray, library_name, library_of
from lowprec.arrays.dlpack import device_of
from lowprec.arrays.namespaces import cast, dtype_name
from lowprec.errors import ArrayError, DTypeError, UnsupportedError
from lowprec.formats import DType, promote
from lowprec.linalg import routes
from lowprec.policy import fp32_guard

#: Element types that LAPACK has.
REAL_DTYPES = (DType.FLOAT32, DType.FLOAT64)
_DTYPES = (*REAL_DTYPES, DType.COMPLEX64, DType.COMPLEX128)

#: Of the arrays that a function takes, in order.
_NAMES = ("a", "b")

_CUDA = 2  # ``DLDeviceType`` of dlpack.h


def call(function: str, *arrays: Any, dtypes: tuple[DType, ...] = _DTYPES, **keywords: Any) -> Any:
    """Let the library of the operands do the work inside the guard; return what it returns.

    Whatever does not fit is refused before any work. A tolerance ``rtol=None`` becomes that of the Array API.
    """
    library = _common_library(function, arrays)
    by_dlpack = library == "dlpack"
    if by_dlpack:
        library, arrays = _adopted(function, arrays)
    dtype, arrays = _promoted(function, arrays, dtypes)
    work = routes.find(function, library)
    routes.check_stacks(function, library, arrays)
    if keywords.get("rtol", 0) is None:
        keywords["rtol"] = float(np.finfo(dtype.label).eps) * max(arrays[0].shape[-2:], default=0)
    with fp32_guard():
        result = work(*arrays, **keywords)
    if not by_dlpack or library != "numpy":  # CuPy's arrays speak DLPack themselves
        return result
    return tuple(map(_handed_back, result)) if isinstance(result, tuple) else _handed_back(result)


def _common_library(function: str, arrays: tuple[Any, ...]) -> str:
    names = []
    for name, x in zip(_NAMES, arrays, strict=False):
        try:
            names.append(library_name(x))
        except ArrayError as error:
            error.argument = name
            raise
    if len(set(names)) > 1:
        raise ArrayError(
            f"{function} takes arrays of one library, got {' and '.join(names)}; convert one of them, for example "
            "with the library's from_dlpack"
        )
    return names[0]


def _promoted(
    function: str, arrays: tuple[Any, ...], dtypes: tuple[DType, ...]
) -> tuple[DType, tuple[Any, ...]]:
    """Return the operands' common element type, and the operands in it."""
    by_label = {dtype.label: dtype for dtype in dtypes}
    given = [dtype_name(x) for x in arrays]
    for name, label in zip(_NAMES, given, strict=False):
        if label not in by_label:
            raise DTypeError(
                f"{function} takes {', '.join(by_label)}, and {name} is {label}; convert it first, for example to "
                "float32, and the result back where that is meant"
            )
    common = functools.reduce(promote, (by_label[label] for label in given))
    return common, tuple(cast(x, common.label) for x in arrays)


# -- arrays that are known only by DLPack ---------------------------------------------------------


def _adopted(function: str, arrays: tuple[Any, ...]) -> tuple[str, tuple[Any, ...]]:
    """Return the library that works for these arrays, and its arrays on their memory."""
    devices = [device_of(x) for x in arrays]
    if all(d.is_host for d in devices):
        return "numpy", tuple(library_of(x).view(x).ndarray() for x in arrays)
    cupy = sys.modules.get("cupy")
    if cupy is None or not all(d.type == _CUDA for d in devices):
        where = " and ".join(dict.fromkeys(map(str, devices)))
        raise UnsupportedError(
            f"{function} has no library for DLPack arrays on {where}: NumPy serves the CPU, and CuPy, once the "
            "program has imported it, CUDA; import cupy, or pass an array of a library that is known by name"
        )
    return "cupy", tuple(cupy.from_dlpack(x) for x in arrays)


def _handed_back(result: Any) -> DLPackArray:
    """Return NumPy's result as an array that speaks DLPack for the types of lowprec: ranks become int32."""
    array = np.asarray(result)
    return DLPackArray(array.astype(np.int32) if array.dtype.kind in "iu" else array)
