"""lowprec's own kernels inside programs of XLA's: a handler for its foreign function interface, on CPUs.

XLA calls the handler with the addresses of operands and result (``xla/ffi/api/c_api.h``, version 0.3, beside jaxlib).
It takes the interpreter's lock and runs the executor that any product of this shape has. JAX holds that lock nowhere
while it waits for a computation.

What XLA calls is compiled by numba, for two reasons. Where a signal handler raises before the first line of a Python
function, ctypes returns whatever is on the stack; so the outcome is written where nothing else writes. And a thread of
XLA's that asks for the interpreter's lock while the interpreter ends never returns; so no product begins after that.
"""

from __future__ import annotations

import atexit
import ctypes
import functools
import itertools
import json
import math
import operator
import os
import time
from typing import Any, NamedTuple

import jax
from jax.interpreters import mlir

from lowprec.arrays import CPU, ArrayView
from lowprec.backends import Arguments, Executor, backend_of
from lowprec.backends.cpu import numba_import
from lowprec.formats import DType, dtype_from_name
from lowprec.jax.lowering import Dimensions, kept
from lowprec.modes import MathMode
from lowprec.planning import GemmProblem, plan_gemm
from lowprec.policy import environment
from lowprec.request import spec_of
from lowprec.strides import contiguous_strides

_TARGET = "lowprec_matmul"

#: What an array of XLA's is to a view: something that has memory.
_OWNER = object()


class _Matrices(NamedTuple):
    """Stacks of matrices in memory, without an address."""

    dtype: DType
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    def at(self, address: int) -> ArrayView:
        return ArrayView(self.dtype, self.shape, self.strides, CPU, _OWNER, False, address)


class _Product(NamedTuple):
    """A product as the handler runs it."""

    a: _Matrices
    b: _Matrices
    out: _Matrices
    execute: Executor


# -- in the program -------------------------------------------------------------------------------


def lowered(
    context: mlir.LoweringRuleContext,
    a: Any,
    b: Any,
    *,
    dimensions: Dimensions,
    mode: str,
    out_dtype: str,
    **_: Any,
) -> Any:
    """Return the call of the handler as an operation, None where there is to be none.

    That is so in what is exported, since it would name a function of this process; where XLA divides the operands among
    devices, since it would gather them for the call; for axes that are no rows or columns in memory; without numba.
    """
    module = context.module_context
    if (
        module.lowering_parameters.for_export
        or not _is_whole(module.axis_context)
        or not _has_numba()
    ):
        return None
    x, y = context.avals_in
    text = _described(x.shape, y.shape, dimensions, mode, str(x.dtype), out_dtype)
    if text is None:
        return None
    _product(
        text.encode()
    )  # planned here, where subnormal numbers are none that XLA's threads take for zero
    _register()
    return jax.ffi.ffi_lowering(_TARGET)(context, a, b, product=text)


def _is_whole(axes: Any) -> bool:
    """Whether a program has its operands as they are, one device's or one device's share."""
    if hasattr(axes, "num_devices"):
        return bool(axes.num_devices == 1)
    return hasattr(axes, "manual_axes") and axes.manual_axes == frozenset(axes.mesh.axis_names)


def _has_numba() -> bool:
    return numba_import.is_installed() and not environment.numba_is_off()


def _described(
    a: tuple[int, ...], b: tuple[int, ...], dimensions: Dimensions, mode: str, dtype: str, out: str
) -> str | None:
    """Return the product in words that mean the same in every process, as compiled programs are kept on disk."""
    (summed_a, summed_b), (batch_a, batch_b) = dimensions
    rows, columns = kept(len(a), summed_a, batch_a), kept(len(b), summed_b, batch_b)
    if 0 in a or 0 in b:
        return None
    x = _stacked(a, batch_a, rows, summed_a)
    y = _stacked(b, batch_b, summed_b, columns)
    if x is None or y is None:
        return None
    batch = tuple(a[axis] for axis in batch_a)
    shape = (*batch, x[0][-2], y[0][-1])
    return json.dumps((mode, dtype, *x, *y, out, shape))


def _stacked(
    shape: tuple[int, ...], batch: tuple[int, ...], *matrix: tuple[int, ...]
) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """Return shape and strides as matrices whose rows and columns are these axes; None where a stride will not do."""
    strides = contiguous_strides(shape)
    sizes, steps = [shape[axis] for axis in batch], [strides[axis] for axis in batch]
    for axes in matrix:
        axes = tuple(axis for axis in axes if shape[axis] > 1)
        for outer, inner in itertools.pairwise(axes):
            if strides[outer] != shape[inner] * strides[inner]:
                return None
        sizes.append(math.prod(shape[axis] for axis in axes))
        steps.append(strides[axes[-1]] if axes else 1)
    return tuple(sizes), tuple(steps)


@functools.cache
def _product(text: bytes) -> _Product:
    """Return what a call's attribute describes, with its executor."""
    mode, dtype, *of_a_and_b, out_dtype, shape = json.loads(text)
    shape_a, strides_a, shape_b, strides_b, shape = map(tuple, (*of_a_and_b, shape))
    storage, result = dtype_from_name(dtype), dtype_from_name(out_dtype)
    a, b = _Matrices(storage, shape_a, strides_a), _Matrices(storage, shape_b, strides_b)
    out = _Matrices(result, shape, contiguous_strides(shape))
    problem = GemmProblem(spec_of(a.at(0)), spec_of(b.at(0)), result)
    backend = backend_of(CPU)
    plan = plan_gemm(problem, backend.capabilities(CPU), MathMode(mode))
    return _Product(a, b, out, backend.prepare(plan))


# -- the handler ----------------------------------------------------------------------------------

_DONE, _INTERRUPTED = 1, 2
_ERROR_INTERNAL = 13


class _ErrorArguments(ctypes.Structure):
    """``XLA_FFI_Error_Create_Args``."""

    _fields_ = (
        ("struct_size", ctypes.c_size_t),
        ("extension_start", ctypes.c_void_p),
        ("message", ctypes.c_char_p),
        ("errc", ctypes.c_int),
    )


def _error(message: str) -> _ErrorArguments:
    text = message.encode(errors="replace")
    return _ErrorArguments(ctypes.sizeof(_ErrorArguments), None, text, _ERROR_INTERNAL)


_create = ctypes.PYFUNCTYPE(ctypes.c_ssize_t, ctypes.c_void_p)


def _multiply(
    outcome: int, create_error: int, text: int, length: int, a: int, b: int, out: int
) -> None:
    """Compute a product, and write at an address whether it was done, or XLA's error."""
    try:
        found = _product(ctypes.string_at(text, length))
        found.execute(Arguments(found.a.at(a), found.b.at(b), found.out.at(out)))
        done = _DONE
    except KeyboardInterrupt:
        done = _INTERRUPTED
    except BaseException as error:  # noqa: BLE001 - handed to XLA, raised by JAX as another
        reason = _error(f"lowprec: {type(error).__name__}: {error}")
        done = _create(create_error)(ctypes.addressof(reason))
    ctypes.c_ssize_t.from_address(outcome).value = done


#: They must outlive every program.
_callback = ctypes.CFUNCTYPE(None, *[ctypes.c_ssize_t] * 7)(_multiply)
_interrupted = _error("lowprec: a signal handler raised an exception before the product was done")
_ended = _error("lowprec: the interpreter ends")

#: How many products are in the interpreter, and in the second word whether it ends.
_inside = (ctypes.c_int64 * 2)()


@atexit.register
def _end() -> None:
    """Let no product begin any more, and wait for those that have."""
    _inside[1] = 1
    while _inside[0]:
        time.sleep(1e-3)


if hasattr(os, "register_at_fork"):  # the threads that were inside are not in the child
    os.register_at_fork(after_in_child=functools.partial(operator.setitem, _inside, 0, 0))


#: The compiled handler, one for the process: XLA takes a second one for a mistake.
_handler: dict[None, Any] = {}
_registered: list[bool] = []


def _register() -> None:
    """Tell XLA of the handler."""
    if not _registered:
        # Threads that come here together agree on one; the same one XLA takes as often as it is told.
        handler = _handler.get(None) or _handler.setdefault(None, _compile())
        jax.ffi.register_ffi_target(_TARGET, jax.ffi.pycapsule(handler.address), platform="cpu")
        _registered.append(True)


def _compile() -> Any:
    """Compile the function from ``XLA_FFI_CallFrame`` to ``XLA_FFI_Error``, both by address."""
    import numba
    from numba import types

    from lowprec.backends.cpu.packed.native import atomic_add, atomic_load, call, load, slot, store

    multiply = ctypes.cast(_callback, ctypes.c_void_p).value
    interrupted, ended = ctypes.addressof(_interrupted), ctypes.addressof(_ended)
    inside = ctypes.addressof(_inside)
    interrupt = ctypes.cast(ctypes.pythonapi.PyErr_SetInterrupt, ctypes.c_void_p).value

    def handle(frame):  # type: ignore[no-untyped-def]
        extension = load(frame + 8, "i64")
        if extension != 0:  # XLA asks for the version of its interface
            version = load(extension + 24, "i64") + 8
            store(version + 16, 0, "i32")
            store(version + 20, 3, "i32")
            return 0
        create_error = load(load(frame + 16, "i64") + 48, "i64")
        atomic_add(inside, 1)
        if atomic_load(inside + 8) != 0:
            atomic_add(inside, -1)
            return call(create_error, (ended,))
        operands, results = load(frame + 72, "i64"), load(frame + 112, "i64")
        text = load(load(frame + 160, "i64"), "i64")
        outcome = slot()
        store(outcome, 0, "i64")
        call(
            multiply,
            (
                outcome,
                create_error,
                load(text, "i64"),
                load(text + 8, "i64"),
                load(load(operands, "i64") + 24, "i64"),
                load(load(operands + 8, "i64") + 24, "i64"),
                load(load(results, "i64") + 24, "i64"),
            ),
        )
        atomic_add(inside, -1)
        found = load(outcome, "i64")
        if found == _DONE:
            return 0
        if found == _INTERRUPTED:
            call(interrupt, (0,))  # again, for the caller of the program
        return found if found > _INTERRUPTED else call(create_error, (interrupted,))

    return numba.cfunc(types.intp(types.intp), nopython=True)(handle)
