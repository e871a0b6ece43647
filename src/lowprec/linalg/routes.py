"""Which function of which library does the work: one table, and what differs between the libraries.

The caller's library is in ``sys.modules``, because its array exists. What is imported here is a part of it that it
has not loaded by itself (``jax.scipy.linalg``), or SciPy, where NumPy keeps the functions that it has not.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

from lowprec.errors import UnsupportedError

__all__ = ["FUNCTIONS", "LACKING", "LIBRARIES", "ROUTES", "Route", "find"]

_Function = Callable[..., Any]

#: Where each library keeps its linear algebra.
LIBRARIES: Mapping[str, str] = MappingProxyType(
    {
        "numpy": "numpy.linalg",
        "torch": "torch.linalg",
        "jax": "jax.numpy.linalg",
        "cupy": "cupy.linalg",
    }
)

#: Everything that ``lowprec.linalg`` computes.
FUNCTIONS = (
    "cdist",
    "cholesky",
    "det",
    "eigh",
    "expm",
    "inv",
    "lstsq",
    "matrix_power",
    "matrix_rank",
    "pinv",
    "qr",
    "slogdet",
    "solve",
    "svd",
)


class Route(NamedTuple):
    """The way to one function of one library.

    Parameters
    ----------
    module : str
        Where it is.
    name : str
        What it is called there.
    adapt : callable or None
        Called with the function in front of the operands, where it cannot be called as the others are.
    """

    module: str
    name: str
    adapt: _Function | None = None


def find(function: str, library: str) -> _Function:
    """Return the library's own function, taking the keywords that lowprec's takes.

    Raises
    ------
    UnsupportedError
        If the library, or the version that is installed, has no such function; the message names the way out.

    Examples
    --------
    >>> import numpy
    >>> find("det", "numpy") is numpy.linalg.det
    True
    """
    route = ROUTES.get((function, library))
    if route is None:
        raise UnsupportedError(f"{library} has no {function}; {LACKING[function, library]}")
    try:
        module = sys.modules.get(route.module) or importlib.import_module(route.module)
        found: _Function = getattr(module, route.name)
    except ModuleNotFoundError as error:
        package = (error.name or route.module).partition(".")[0]
        raise UnsupportedError(
            f"{function} of {library} arrays is {route.module}.{route.name}, and {package} is not installed; install "
            f"it (pip install {package}), or pass an array of another library"
        ) from error
    except AttributeError:
        version = getattr(sys.modules.get(library), "__version__", "")
        raise UnsupportedError(
            f"{library} {version} has no {route.module}.{route.name}; install a later version, or pass an array of "
            "another library"
        ) from None
    return found if route.adapt is None else partial(route.adapt, found)


# -- what differs ---------------------------------------------------------------------------------


def _no_stacks(library: str, function: str, *arrays: Any) -> None:
    """Raise where an operand is a stack of matrices and the library's function takes one."""
    for array in arrays:
        if array.ndim > 2:
            raise UnsupportedError(
                f"{library} has no {function} of stacks of matrices, and an operand has shape {tuple(array.shape)}; "
                + ("put jax.vmap around it" if library == "jax" else "call it for each matrix")
            )


def _one_matrix(library: str, function: str) -> _Function:
    def adapted(found: _Function, *arrays: Any) -> Any:
        _no_stacks(library, function, *arrays)
        return found(*arrays)

    return adapted


def _one_lstsq(library: str) -> _Function:
    def adapted(found: _Function, a: Any, b: Any, *, rtol: float) -> Any:
        _no_stacks(library, "lstsq", a, b)
        return found(a, b, rcond=rtol)

    return adapted


def _as_matrices(a: Any, b: Any) -> Any:
    """Return a right-hand side that nobody takes for a stack of vectors.

    In the Array API only a 1-D ``b`` is a vector. PyTorch and CuPy also take a ``b`` with one axis less than ``a`` for
    vectors, and for a square ``b`` the shapes do not tell which was meant.
    """
    missing = a.ndim - b.ndim
    return b.reshape((1,) * missing + tuple(b.shape)) if 1 < b.ndim < a.ndim else b


def _solve_matrices(found: _Function, a: Any, b: Any) -> Any:
    return found(a, _as_matrices(a, b))


def _torch_lstsq(found: _Function, a: Any, b: Any, *, rtol: float) -> Any:
    # The default driver on the CPU, gelsy, gives no singular values; on a GPU torch has gels alone.
    driver = "gelsd" if a.device.type == "cpu" else "gels"
    return found(a, _as_matrices(a, b), rcond=rtol, driver=driver)


def _scipy_cdist(found: _Function, a: Any, b: Any) -> Any:
    # SciPy computes in float64, whatever it is given, and returns that.
    _no_stacks("numpy", "cdist", a, b)
    return found(a, b).astype(a.dtype)


def _cupy_pinv(found: _Function, a: Any, *, rtol: float) -> Any:
    return found(a, rcond=rtol)


def _rank_by_values(library: str) -> _Function:
    """Return a ``matrix_rank`` with a tolerance relative to the largest singular value.

    CuPy's tolerance is absolute, and so is JAX's, although it is called ``rtol``.
    """

    def adapted(found: _Function, a: Any, *, rtol: float | None = None) -> Any:
        if rtol is None:
            return found(a)
        values = find("svd", library)(a, compute_uv=False)
        return (values > rtol * values.max(axis=-1, keepdims=True)).sum(axis=-1)

    return adapted


# -- the table ------------------------------------------------------------------------------------

_ELSEWHERE = {"expm", "cdist"}

#: By function and library: where it is.
ROUTES: Mapping[tuple[str, str], Route] = MappingProxyType(
    {
        **{
            (function, library): Route(module, function)
            for function in FUNCTIONS
            if function not in _ELSEWHERE
            for library, module in LIBRARIES.items()
        },
        ("solve", "torch"): Route("torch.linalg", "solve", _solve_matrices),
        ("solve", "cupy"): Route("cupy.linalg", "solve", _solve_matrices),
        ("lstsq", "numpy"): Route("numpy.linalg", "lstsq", _one_lstsq("numpy")),
        ("lstsq", "torch"): Route("torch.linalg", "lstsq", _torch_lstsq),
        ("lstsq", "jax"): Route("jax.numpy.linalg", "lstsq", _one_lstsq("jax")),
        ("lstsq", "cupy"): Route("cupy.linalg", "lstsq", _one_lstsq("cupy")),
        ("pinv", "cupy"): Route("cupy.linalg", "pinv", _cupy_pinv),
        ("matrix_rank", "jax"): Route("jax.numpy.linalg", "matrix_rank", _rank_by_values("jax")),
        ("matrix_rank", "cupy"): Route("cupy.linalg", "matrix_rank", _rank_by_values("cupy")),
        ("expm", "numpy"): Route("scipy.linalg", "expm"),
        ("expm", "torch"): Route("torch.linalg", "matrix_exp"),
        ("expm", "jax"): Route("jax.scipy.linalg", "expm"),
        ("expm", "cupy"): Route("cupyx.scipy.linalg", "expm", _one_matrix("cupy", "expm")),
        ("cdist", "numpy"): Route("scipy.spatial.distance", "cdist", _scipy_cdist),
        ("cdist", "torch"): Route("torch", "cdist"),
        ("cdist", "cupy"): Route(
            "cupyx.scipy.spatial.distance", "cdist", _one_matrix("cupy", "cdist")
        ),
    }
)

#: What a library has not, and the way out.
LACKING: Mapping[tuple[str, str], str] = MappingProxyType(
    {
        ("cdist", "jax"): "take jax.numpy.linalg.norm(a[:, None] - b[None], axis=-1)",
    }
)
