"""The way of every call: which library works, on which arrays, and what becomes of its result."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from lowprec.arrays import DLPackArray, library_name, library_of
from lowprec.arrays.dlpack import device_of
from lowprec.errors import ArrayError, DTypeError, UnsupportedError
from lowprec.formats import DType, promote
from lowprec.linalg import routes
from lowprec.policy import fp32_guard

__all__ = ["DTYPES", "REAL_DTYPES", "Call"]

#: Element types that LAPACK has.
REAL_DTYPES = (DType.FLOAT32, DType.FLOAT64)
DTYPES = (*REAL_DTYPES, DType.COMPLEX64, DType.COMPLEX128)
_BY_LABEL = {d.label: d for d in DTYPES}

_CUDA = 2  # ``DLDeviceType`` of dlpack.h


class Call:
    """One call: the library that does the work, the operands as it takes them, and the way back.

    Parameters
    ----------
    function : str
        One of :data:`lowprec.linalg.routes.FUNCTIONS`.
    *arrays : array
        The operands, as the caller passed them.
    dtypes : tuple of DType
        The element types that the function takes.

    Raises
    ------
    ArrayError, DTypeError, UnsupportedError
        Before any work, if the operands are not such arrays or their library lacks the function.
    """

    def __init__(self, function: str, *arrays: Any, dtypes: tuple[DType, ...] = DTYPES) -> None:
        library = _common_library(function, arrays)
        known = library != "dlpack"
        if not known:
            library, arrays = _adopted(function, arrays)
        # CuPy's arrays speak DLPack themselves and stay on their device.
        self._hand_back = not known and library == "numpy"
        self._dtype, self._operands = _promoted(function, library, arrays, dtypes)
        self._work = routes.find(function, library)

    def rtol(self, given: float | None) -> float:
        """Return the caller's tolerance, or that of the Array API."""
        if given is not None:
            return given
        rows_and_columns = self._operands[0].shape[-2:]
        return float(np.finfo(self._dtype.label).eps) * max(rows_and_columns, default=0)

    def run(self, **keywords: Any) -> Any:
        """Let the library do the work inside the guard; return what it returns."""
        with fp32_guard():
            result = self._work(*self._operands, **keywords)
        if not self._hand_back:
            return result
        return (
            tuple(map(_handed_back, result)) if isinstance(result, tuple) else _handed_back(result)
        )


def _common_library(function: str, arrays: tuple[Any, ...]) -> str:
    names = [library_name(x) for x in arrays]
    if len(set(names)) > 1:
        raise ArrayError(
            f"{function} takes arrays of one library, got {' and '.join(names)}; convert one of them, for example "
            "with the library's from_dlpack"
        )
    return names[0]


def _promoted(
    function: str, library: str, arrays: tuple[Any, ...], dtypes: tuple[DType, ...]
) -> tuple[DType, tuple[Any, ...]]:
    """Return the operands' common element type, and the operands in it."""
    given = [_dtype_of(x) for x in arrays]
    for label in given:
        if _BY_LABEL.get(label) not in dtypes:
            raise DTypeError(
                f"{function} takes {', '.join(map(str, dtypes))}, got {label}; convert the array first, for "
                "example to float32, and the result back where that is meant"
            )
    common = _BY_LABEL[given[0]]
    for label in given[1:]:
        common = promote(common, _BY_LABEL[label])
    return common, tuple(
        x if label == common.label else _converted(library, x, common)
        for x, label in zip(arrays, given, strict=True)
    )


def _dtype_of(array: Any) -> str:
    dtype = array.dtype
    return str(getattr(dtype, "name", dtype)).removeprefix("torch.")


def _converted(library: str, array: Any, dtype: DType) -> Any:
    if library == "torch":
        return array.to(getattr(sys.modules["torch"], dtype.label))
    return array.astype(dtype.label)


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
