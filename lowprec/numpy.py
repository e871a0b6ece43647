"""``intercept``: lowprec computes the products of an unmodified NumPy program.

The inner loops of ``matmul``, ``vecdot``, ``matvec`` and ``vecmat`` are replaced by NumPy's C function for that, so
``@``, batches and functions that are made of them are seen. ``dot``, ``inner`` and ``vdot`` call BLAS directly; they
are replaced as attributes of NumPy's modules, by which ``tensordot``, ``einsum`` and ``multi_dot`` find them.

Source: ``PyUFunc_ReplaceLoopBySignature``, entry 30 of NumPy's ``_UFUNC_API``.
"""

from __future__ import annotations

import copyreg
import ctypes
import functools
import sys
import threading
import time
import types
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy._core import _multiarray_umath, einsumfunc, numeric  # type: ignore[attr-defined]
from numpy.linalg import _linalg

from lowprec import policy
from lowprec.arrays.view import NUMPY_DTYPES
from lowprec.core import dispatch
from lowprec.core.interception import Interception
from lowprec.core.interception_report import PassedBy, Row, multiplications_of
from lowprec.errors import LowprecError
from lowprec.formats import FLOAT32, FLOAT64, DType
from lowprec.modes import MathMode, Mode, ModeName, Recipe, parse_mode, row


class intercept(Interception):
    """Compute the products of NumPy's own functions by lowprec, in a block.

    They are ``matmul`` and ``@``, ``vecdot``, ``matvec``, ``vecmat``, ``dot``, ``inner``, ``vdot``, and those made of
    them: ``tensordot``, ``einsum``, ``linalg.multi_dot``, ``matrix_power``, ``pinv``. Out of reach are
    ``ndarray.dot``, products inside LAPACK and other libraries' C code, and functions that a module has imported by
    name; :meth:`report` names these.

    The block applies to this thread and task.

    Parameters
    ----------
    math_mode : str, MathMode or Recipe
        Mode of the products; an ``fp32_guard`` overrides it. It acts on float32 and complex64.
    cast : bool
        Whether it also acts on float64 and complex128: these are rounded once, to the numbers of the mode, and the
        result is float64 or complex128 again.

    Raises
    ------
    ModeError
        The mode is unknown.

    Examples
    --------
    >>> import numpy as np
    >>> x = np.full((4, 4), 1 + 2.0**-12)
    >>> with intercept("bf16", cast=True) as seen:
    ...     float((x @ x)[0, 0])
    4.0
    >>> [(p.operator, p.dtype, p.count) for p in seen.report().taken]
    [('matmul', 'float64', 1)]
    """

    def __init__(self, math_mode: ModeName | MathMode | Recipe, cast: bool = False) -> None:
        super().__init__(parse_mode(math_mode))
        self.cast = cast
        self._text += ", cast=True" if cast else ""

    def _install(self) -> None:
        for name in (name for name in _CORES if hasattr(np, name)):  # two of them since NumPy 2.2
            for code in _CODES:
                own, loop = _loops.get((name, code)) or _loops.setdefault((name, code), _made(name, code))
                _exchange(name, code, loop, ctypes.c_void_p() if own.value else own)
        for module, name in _PLACES:
            setattr(module, name, _REPLACED[name])
        for kind in _KINDS:
            copyreg.pickle(kind, _reduced)

    def _uninstall(self) -> None:
        for module, name in _PLACES:
            setattr(module, name, _originals[name])
        for kind in _KINDS:
            copyreg.dispatch_table.pop(kind, None)
        for (name, code), (own, _) in _loops.items():
            if own.value:
                _exchange(name, code, own, ctypes.c_void_p())

    def _remarks(self) -> list[str]:
        names = ", ".join(_imported_by_name())
        found = f", and these functions, which were imported by name: {names}" if names else ""
        cast = ["float64 operands were rounded once, to the numbers of the mode (cast=True)."] if self.cast else []
        return [*cast, f"Not seen: ndarray.dot, products inside LAPACK and in other libraries' C code{found}."]


# -- replacement ----------------------------------------------------------------------------------

_LOOP = ctypes.CFUNCTYPE(
    None, ctypes.POINTER(ctypes.c_void_p), ctypes.POINTER(ctypes.c_ssize_t), ctypes.POINTER(ctypes.c_ssize_t),
    ctypes.c_void_p,
)  # fmt: skip
#: Axes of the first operand, the second one and the result: indices into the extents of a loop.
_CORES = {
    "matmul": ((0, 1), (1, 2), (0, 2)),
    "vecdot": ((0,), (0,), ()),
    "matvec": ((0, 1), (1,), (0,)),
    "vecmat": ((0,), (0, 1), (1,)),
}
_TYPES = {numpy_dtype: d for d, numpy_dtype in NUMPY_DTYPES.items()}
_CODES = {"f": np.float32, "d": np.float64, "F": np.complex64, "D": np.complex128}
#: C functions by module and name.
_PLACES = [(m, name) for m in (np, numeric, _linalg) for name in ("dot", "inner", "vdot") if hasattr(m, name)]
_PLACES += [(np, "einsum"), (einsumfunc, "einsum"), (einsumfunc, "c_einsum")]
_originals = {name: getattr(module, name) for module, name in reversed(_PLACES)}
_KINDS = {type(function) for function in _originals.values()}

#: By function and type: the address of NumPy's loop, and our loop. Another thread may run ours after it was replaced,
#: so none is freed.
_loops: dict[tuple[str, str], tuple[Any, Any]] = {}


@functools.cache
def _replace_loop() -> Any:
    """Return NumPy's function, whose type ctypes would create in each call."""
    get_pointer = ctypes.pythonapi.PyCapsule_GetPointer
    get_pointer.restype, get_pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    table = ctypes.cast(get_pointer(_multiarray_umath._UFUNC_API, None), ctypes.POINTER(ctypes.c_void_p))
    return ctypes.PYFUNCTYPE(
        ctypes.c_int, ctypes.py_object, ctypes.c_void_p, ctypes.POINTER(ctypes.c_int), ctypes.POINTER(ctypes.c_void_p)
    )(table[30])


def _exchange(name: str, code: str, loop: Any, before: Any) -> None:
    """Set the inner loop of a function for a type, and ``before`` to the address of the one that was there."""
    number = np.dtype(code).num
    address = ctypes.cast(loop, ctypes.c_void_p)
    if _replace_loop()(getattr(np, name), address, (ctypes.c_int * 3)(number, number, number), ctypes.byref(before)):
        raise LookupError(f"numpy.{name} has no loop for {code}")


def _made(name: str, code: str) -> tuple[Any, Any]:
    """Return a loop that calls NumPy's outside of scopes, and a place for the address of that."""
    address = ctypes.c_void_p()  # set by the call that replaces the loop, so that no thread finds it empty

    def own(*arguments: Any) -> None:
        _LOOP(address.value or 0)(*arguments)

    def run(*arguments: Any) -> None:
        try:
            if not _taken(name, code, *arguments[:3]):
                own(*arguments)
        except BaseException as error:  # noqa: BLE001 - it cannot leave a loop of C
            own(*arguments)
            _raise_after(sys._getframe(), type(error))

    return address, _LOOP(run)


def _raise_after(frame: Any, error: type[BaseException]) -> None:
    """Raise an exception in this thread as soon as a frame has ended."""
    thread = threading.get_ident()

    def wait() -> None:
        while True:
            try:
                frame.clear()  # raises while the frame runs
                break
            except RuntimeError:
                time.sleep(1e-4)
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), ctypes.py_object(error))

    threading.Thread(target=wait, daemon=True).start()


def _reduced(function: Any) -> Any:
    """Pickle a replaced function by its name, as NumPy does."""
    name = getattr(function, "__name__", "")
    return (_original, (name,)) if _originals.get(name) is function else function.__reduce__()


def _original(name: str) -> Any:
    return _originals[name]


def _imported_by_name() -> list[str]:
    """Return the functions that modules refer to directly, as after ``from numpy import dot``."""
    numbers = {id(function): name for name, function in _originals.items() if name != "c_einsum"}
    found = []
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] not in ("numpy", "lowprec") and isinstance(module, types.ModuleType):
            found += [f"{name}.{key}" for key, value in list(vars(module).items()) if id(value) in numbers]
    return found


# -- products -------------------------------------------------------------------------------------


class _Thread(threading.local):
    is_busy = False  # in a product of lowprec's, which may use NumPy's


_thread = _Thread()


def _current() -> Any:
    """Return the scope that applies to a product; None for lowprec's, whose float64 products are NumPy's."""
    stack = intercept._stack.get()
    scope = stack[-1].scope if stack else intercept._of_process
    return None if scope is None or _thread.is_busy or _caller().startswith("lowprec.") else scope


class _Memory:
    """Memory of a loop, for ``numpy.asarray``."""

    def __init__(self, address: int, code: str, shape: tuple[int, ...], strides: tuple[int, ...]) -> None:
        dtype = np.dtype(_CODES[code]).str
        described = {"data": (address, False), "typestr": dtype, "shape": shape, "strides": strides}
        self.__array_interface__ = {**described, "version": 3}


def _taken(name: str, code: str, args: Any, dims: Any, steps: Any) -> bool:
    """Compute the products of a loop; False if NumPy is to compute them."""
    scope = _current()
    if scope is None:
        return False
    arrays, step = [], 3
    for number, axes in enumerate(_CORES[name]):
        shape: tuple[int, ...] = (dims[0],)
        strides: tuple[int, ...] = (steps[number],)
        for axis in axes:
            shape, strides, step = (*shape, dims[1 + axis]), (*strides, steps[step]), step + 1
        arrays.append(np.asarray(_Memory(args[number] or 0, code, shape, strides)))
    a, b, out = (x[0] for x in arrays) if dims[0] == 1 else arrays
    if name in ("vecdot", "vecmat"):
        a = a.conj()[..., None, :]
    if name in ("vecdot", "matvec"):
        b = b[..., None]
    found = _product(scope, name, a, b)
    if found is None:
        return False
    out[...] = found.reshape(out.shape)
    return True


def _product(scope: Any, name: str, a: Any, b: Any) -> Any:
    """Return a product by lowprec, and count it; None if NumPy is to compute it."""
    _thread.is_busy = True
    try:
        with np.errstate(all="ignore"):
            mode = policy.resolve(scope.mode_of(())).mode
            dtype, reason, detail, found = np.result_type(a, b), None, "", None
            x, y = _operands(mode, dtype, a, b) if a.dtype == b.dtype or scope.cast else (None, None)
            if x is None or not (row(mode).acts(_TYPES[dtype]) or scope.cast):
                reason = PassedBy.ELEMENT_TYPE
            else:
                try:
                    found = dispatch.matmul(x, y, math_mode=mode)
                except LowprecError as error:
                    reason, detail = PassedBy.REFUSED, str(error)
            shown = "" if reason else mode.value
            counted = Row(_caller(), name, dtype.name, mode=shown, passed_by=reason, detail=detail)
            shapes = a.shape, b.shape
            scope.ledger.add(counted, multiplications_of(shapes), lambda: shapes)
            return None if found is None else np.asarray(found, dtype)
    finally:
        _thread.is_busy = False


def _operands(mode: Mode, dtype: Any, a: Any, b: Any) -> tuple[Any, Any]:
    """Return the operands in the type on which the mode acts; None if it does not act on them."""
    known = _TYPES.get(dtype)
    acts = row(mode)
    if known is None or not (known.is_single_precision or known.format is FLOAT64):
        return None, None
    if acts.acts(known):
        return a, b
    if acts.widens or not acts.acts(DType.COMPLEX64 if dtype.kind == "c" else DType.FLOAT32):
        return None, None
    return _rounded(a, mode), _rounded(b, mode)


def _rounded(x: Any, mode: Mode) -> Any:
    """Return float64 numbers as float32, so that the mode's rounding to fewer bits is the only one.

    They are rounded to odd: the last bit is set where the number is not exact (S. Boldo and G. Melquiond, "Emulation of
    a FMA and correctly rounded sums", 2008).
    """
    if x.dtype.kind == "c":
        return (_rounded(x.real, mode) + 1j * _rounded(x.imag, mode)).astype(np.complex64)
    y = np.asarray(x, np.float32)
    acts = row(mode)
    if x.dtype == np.float32 or acts.parts > 1 or acts.operand_format is FLOAT32:
        return y
    exact = (y == x) | ~np.isfinite(y)
    bits = y.view(np.int32) - np.where(np.abs(y) > np.abs(x), 1, 0).astype(np.int32)  # toward zero
    return np.where(exact, y, (bits | 1).view(np.float32))


def _caller() -> str:
    """Return the function outside of this module and NumPy that multiplies."""
    frame: Any = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__", "").startswith((__name__, "numpy.")):
        frame = frame.f_back
    return "" if frame is None else f"{frame.f_globals.get('__name__', '')}.{frame.f_code.co_name}"


# -- functions ------------------------------------------------------------------------------------

_PLAIN = frozenset((np.ndarray, list, tuple, int, float, complex))
#: The operands of a product over the last axis of the first one and the first axis of the second one.
_OPERANDS: dict[str, Callable[[Any, Any], tuple[Any, Any]]] = {
    "dot": lambda x, y: (x, np.moveaxis(y, -2, 0) if y.ndim > 1 else y),
    "inner": lambda x, y: (x, np.moveaxis(y, -1, 0)),
    "vdot": lambda x, y: (x.conj().reshape(-1), y.reshape(-1)),
}


def _replacement(name: str) -> Callable[..., Any]:
    original = _originals[name]

    def function(a: Any, b: Any, *rest: Any, **keywords: Any) -> Any:
        scope = _current()
        found = None if scope is None or not {type(a), type(b)} <= _PLAIN else _of_arrays(scope, name, a, b)
        if found is None:
            return original(a, b, *rest, **keywords)
        out = rest[0] if rest else keywords.get("out")
        if out is None:
            return found if found.ndim else found[()]
        out[...] = found
        return out

    function.__module__, function.__name__, function.__qualname__ = "numpy", name, name
    function.__doc__ = original.__doc__
    return function


def _of_arrays(scope: Any, name: str, a: Any, b: Any) -> Any:
    """Return a function's product; None if NumPy is to compute it."""
    x, y = np.asarray(a), np.asarray(b)
    if not (x.ndim and y.ndim and x.size and y.size):
        return None
    x, y = _OPERANDS[name](x, y)
    if x.shape[-1] != y.shape[0]:  # NumPy raises
        return None
    found = _product(scope, name, x.reshape(-1, x.shape[-1]), y.reshape(y.shape[0], -1))
    return None if found is None else found.reshape(x.shape[:-1] + y.shape[1:])


def _einsum(*operands: Any, out: Any = None, optimize: Any = False, **keywords: Any) -> Any:
    """Sum products in Einstein's notation, pair by pair, by functions that are replaced."""
    optimize = optimize or _current() is not None
    return _originals["einsum"](*operands, out=out, optimize=optimize, **keywords)


def _c_einsum(*operands: Any, **keywords: Any) -> Any:
    scope = _current()
    arrays = [x for x in operands if isinstance(x, np.ndarray)]
    if scope is not None and len(arrays) > 1:
        counted = Row(_caller(), "einsum", arrays[0].dtype.name, passed_by=PassedBy.UNREACHED)
        scope.ledger.add(counted, 0, lambda: (arrays[0].shape, arrays[1].shape))
    return _originals["c_einsum"](*operands, **keywords)


_einsum.__module__, _einsum.__name__, _einsum.__qualname__ = "numpy", "einsum", "einsum"
_REPLACED = {**{name: _replacement(name) for name in _OPERANDS}, "einsum": _einsum, "c_einsum": _c_einsum}
