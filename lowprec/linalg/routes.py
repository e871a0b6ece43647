"""The library of a call, its arrays and its result; one table has the function of each library.

The caller's library is in ``sys.modules``, since its array exists. Only its submodules (``jax.scipy.linalg``) are
imported here, and SciPy for functions that NumPy lacks.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from functools import partial, reduce
from typing import Any, NamedTuple

import numpy as np

from lowprec.arrays import DLPackArray, library_name, library_of
from lowprec.arrays.dlpack import device_of
from lowprec.arrays.namespaces import cast, dtype_name
from lowprec.errors import ArrayError, DTypeError, UnsupportedError
from lowprec.formats import DType, promote
from lowprec.policy import fp32_guard

#: Element types that LAPACK has.
REAL_DTYPES = (DType.FLOAT32, DType.FLOAT64)
_DTYPES = (*REAL_DTYPES, DType.COMPLEX64, DType.COMPLEX128)

#: Names of a function's array arguments, in order.
_NAMES = ("a", "b")

_CUDA = 2  # ``DLDeviceType`` of dlpack.h

_Function = Callable[..., Any]


class Route(NamedTuple):
    """A function of one library."""

    #: The module and the name of the function.
    module: str
    name: str
    #: Adapter for a function whose signature differs; called with the function and the operands.
    adapt: _Function | None = None
    stacks: bool = True  # whether it accepts stacks of matrices

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


def find(function: str, library: str) -> _Function:
    """Return the library's function with lowprec's keywords; raise if there is none."""
    route = ROUTES[function].get(library)
    if route is None:
        raise UnsupportedError(f"{library} has no {function}; {LACKING[function, library]}")
    try:
        found: _Function = getattr(importlib.import_module(route.module), route.name)
    except ModuleNotFoundError as error:
        package = (error.name or route.module).partition(".")[0]
        raise UnsupportedError(
            f"{function} of {library} arrays is {route}, and {package} is not installed; install it "
            f"(pip install {package}), or pass an array of another library"
        ) from error
    except AttributeError:
        version = getattr(sys.modules.get(library), "__version__", "")
        raise UnsupportedError(
            f"{library} {version} has no {route}; install a later version, or pass an array of another library"
        ) from None
    return found if route.adapt is None else partial(route.adapt, found)


def check_stacks(function: str, library: str, arrays: tuple[Any, ...]) -> None:
    """Raise if an operand is a stack of matrices and the library's function accepts one matrix only."""
    for array in arrays:
        if array.ndim > 2 and not ROUTES[function][library].stacks:
            raise UnsupportedError(
                f"{library} has no {function} of stacks of matrices, and an operand has shape {tuple(array.shape)}; "
                + ("put jax.vmap around it" if library == "jax" else "call it for each matrix")
            )


class Operands(NamedTuple):
    """The arrays of a call, of one library and one element type."""

    library: str
    arrays: tuple[Any, ...]
    dtype: DType
    by_dlpack: bool  # whether they support only DLPack

    def handed_back(self, result: Any) -> Any:
        """Convert a result of the library to the caller's kind of array."""
        if not self.by_dlpack or self.library != "numpy":  # CuPy's arrays support DLPack
            return result
        return tuple(map(_handed_back, result)) if isinstance(result, tuple) else _handed_back(result)


def operands(function: str, arrays: tuple[Any, ...], dtypes: tuple[DType, ...] = _DTYPES) -> Operands:
    """Return the arrays in the form that the library accepts; raise ArrayError or DTypeError."""
    library = _common_library(function, arrays)
    by_dlpack = library == "dlpack"
    if by_dlpack:
        library, arrays = _adopted(function, arrays)
    dtype, arrays = _promoted(function, arrays, dtypes)
    return Operands(library, arrays, dtype, by_dlpack)


def call(function: str, *arrays: Any, dtypes: tuple[DType, ...] = _DTYPES, **keywords: Any) -> Any:
    """Call the function of the operands' library inside the guard and return its result.

    Arguments are checked first. ``rtol=None`` is the default of the Array API.
    """
    found = operands(function, arrays, dtypes)
    work = find(function, found.library)
    check_stacks(function, found.library, found.arrays)
    if keywords.get("rtol", 0) is None:
        keywords["rtol"] = float(np.finfo(found.dtype.label).eps) * max(found.arrays[0].shape[-2:], default=0)
    with fp32_guard():
        return found.handed_back(work(*found.arrays, **keywords))


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


def _promoted(function: str, arrays: tuple[Any, ...], dtypes: tuple[DType, ...]) -> tuple[DType, tuple[Any, ...]]:
    by_label = {dtype.label: dtype for dtype in dtypes}
    given = [dtype_name(x) for x in arrays]
    for name, label in zip(_NAMES, given, strict=False):
        if label not in by_label:
            raise DTypeError(
                f"{function} takes {', '.join(by_label)}, and {name} is {label}; convert it first, for example to "
                "float32, and the result back where that is meant"
            )
    common = reduce(promote, (by_label[label] for label in given))
    return common, tuple(cast(x, common.label) for x in arrays)


def _adopted(function: str, arrays: tuple[Any, ...]) -> tuple[str, tuple[Any, ...]]:
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
    """Return a NumPy result as a DLPack array of a type of lowprec; ranks become int32."""
    array = np.asarray(result)
    return DLPackArray(array.astype(np.int32) if array.dtype.kind in "iu" else array)


def _as_matrices(a: Any, b: Any) -> Any:
    """Return ``b`` so that only a 1-D one is a vector; PyTorch and CuPy accept vectors of one axis fewer than ``a``."""
    missing = a.ndim - b.ndim
    return b.reshape((1,) * missing + tuple(b.shape)) if 1 < b.ndim < a.ndim else b


def _solve(found: _Function, a: Any, b: Any) -> Any:
    return found(a, _as_matrices(a, b))


def _rcond(found: _Function, *arrays: Any, rtol: float) -> Any:
    return found(*arrays, rcond=rtol)


def _torch_lstsq(found: _Function, a: Any, b: Any, *, rtol: float) -> Any:
    # The default driver on the CPU, gelsy, returns no singular values; on a GPU PyTorch has only gels.
    driver = "gelsd" if a.device.type == "cpu" else "gels"
    return found(a, _as_matrices(a, b), rcond=rtol, driver=driver)


def _rank(found: _Function, a: Any, *, rtol: float | None = None) -> Any:
    """Apply ``rtol`` relative to the largest singular value; CuPy's tolerance and JAX's ``rtol`` are absolute."""
    if rtol is None:
        return found(a)
    values = find("svd", library_name(a))(a, compute_uv=False)
    return (values > rtol * values.max(axis=-1, keepdims=True)).sum(axis=-1)


def _scipy_cdist(found: _Function, a: Any, b: Any) -> Any:
    # SciPy computes and returns float64 for every type.
    return found(a, b).astype(a.dtype)


#: Each library's module of linear algebra.
LIBRARIES: Mapping[str, str] = {
    "numpy": "numpy.linalg",
    "torch": "torch.linalg",
    "jax": "jax.numpy.linalg",
    "cupy": "cupy.linalg",
}


def _row(name: str, **adapt: _Function) -> dict[str, Route]:
    """Return the row of a function with this name in every library, with an adapter for some."""
    return {library: Route(module, name, adapt.get(library)) for library, module in LIBRARIES.items()}


#: The route of each function in each library.
ROUTES: Mapping[str, Mapping[str, Route]] = {
    "solve": _row("solve", torch=_solve, cupy=_solve),
    "lstsq": {
        "numpy": Route("numpy.linalg", "lstsq", _rcond, stacks=False),
        "torch": Route("torch.linalg", "lstsq", _torch_lstsq),
        "jax": Route("jax.numpy.linalg", "lstsq", _rcond, stacks=False),
        "cupy": Route("cupy.linalg", "lstsq", _rcond, stacks=False),
    },
    "inv": _row("inv"),
    "pinv": _row("pinv", cupy=_rcond),
    "cholesky": _row("cholesky"),
    "qr": _row("qr"),
    "eigh": _row("eigh"),
    "svd": _row("svd"),
    "det": _row("det"),
    "slogdet": _row("slogdet"),
    "matrix_rank": _row("matrix_rank", jax=_rank, cupy=_rank),
    "matrix_power": _row("matrix_power"),
    "expm": {
        "numpy": Route("scipy.linalg", "expm"),
        "torch": Route("torch.linalg", "matrix_exp"),
        "jax": Route("jax.scipy.linalg", "expm"),
        "cupy": Route("cupyx.scipy.linalg", "expm", stacks=False),
    },
    "cdist": {
        "numpy": Route("scipy.spatial.distance", "cdist", _scipy_cdist, stacks=False),
        "torch": Route("torch", "cdist"),
        "cupy": Route("cupyx.scipy.spatial.distance", "cdist", stacks=False),
    },
}

#: Functions that a library lacks, with an alternative.
LACKING: Mapping[tuple[str, str], str] = {("cdist", "jax"): "take jax.numpy.linalg.norm(a[:, None] - b[None], axis=-1)"}
