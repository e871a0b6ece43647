"""A product as a value: ``bind`` checks its arguments, ``run`` executes it.

Everything that multiplies uses these two: ``matmul``, ``plan``, ``autotune``, and the products inside PyTorch, JAX and
Dask, to which ``run`` delegates.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

from lowprec.arrays import CPU, ArrayView, Library, is_array, library_of
from lowprec.arrays.base import Delegate
from lowprec.arrays.libraries import BY_TYPE, promoted, refuse_subclasses
from lowprec.arrays.prepared_view import Prepared, refuse_prepared
from lowprec.backends import Arguments, is_out_of_memory, release_memory
from lowprec.core import streams
from lowprec.core.arguments import (
    PLAIN,
    Options,
    parse_length,
    parse_number,
    parse_out_dtype,
    with_scales,
)
from lowprec.core.executors import CachedExecutor, look_up
from lowprec.errors import ArrayError, DTypeError, LowprecError, ShapeError, UnsupportedError
from lowprec.formats import DType
from lowprec.modes import Mode, ResolvedMode
from lowprec.planning import parse_activation

_IN_PLACE = ("out", "k_chunk", "scale_a", "scale_b")
#: By ``Delegate.product``: the module whose ``product`` computes a library's own product, and keywords that it does not
#: take. The only place where a lower layer names the modules of layer 7.
PRODUCTS = {
    "torch": ("lowprec.torch.functions", _IN_PLACE),
    "jax": ("lowprec.jax.product", _IN_PLACE),
    "dask": (
        "lowprec.dask",
        ("out", "c", "alpha", "beta", "bias", "activation", "scale_a", "scale_b"),
    ),
}


@functools.cache
def _product_function(name: str) -> Any:
    """Return the function of a library from a call, its mode, executor and backward mode to the result."""
    module, _ = PRODUCTS[name]
    return importlib.import_module(module).product


#: Arguments that cannot be applied to a finished product.
_NOT_AFTERWARDS = frozenset({"out", "k_chunk"})


class Call(NamedTuple):
    """A product with checked arguments."""

    a: Any  # the caller's arrays, weakly typed ones promoted
    b: Any
    library: Library  # of ``a``, and of the result
    x: ArrayView  # of ``a``
    y: ArrayView
    options: Options
    others: tuple[Any, ...]  # the caller's out, c, bias, scale_a and scale_b
    factors: tuple[Any, Any]  # the caller's alpha and beta
    delegate: Delegate | None  # the library's own product, if it is needed


_NOTHING = (None,) * 5
_ONE_ZERO = (1.0, 0.0)
#: Skips the class's ``__new__``.
_new = tuple.__new__


def bind(a: Any, b: Any, /, **arguments: Any) -> Call:
    """Return a product as a value; raise for an array or argument that no product supports.

    ``arguments`` are those of :func:`lowprec.matmul` but for the mode. Shapes, element types and devices are checked
    together by :func:`look_up`.
    """
    delegate = None
    name = "a"
    try:
        like = a
        library = BY_TYPE.get(type(a))
        # of a class that is looked up for the first time, or of a quantised array
        if library is None:
            like = a._like if isinstance(a, Prepared) and a._like is not None else a
            library = library_of(like)
        alike = type(b) is type(like)
        if library.has_weak_types or not alike:
            is_quantized = like is not a
            a, b, c, bias = promoted((a, b), arguments.get("c"), arguments.get("bias"))
            like = like if is_quantized else a
            arguments = arguments and {**arguments, "c": c, "bias": bias}
        if like is a:
            x = library.describe(a)
        else:
            x = a._view
        name = "b"
        if alike:
            y: ArrayView = library.describe(b)
            if library.delegates:
                delegate = library.delegate(like, b)
        else:
            y, delegate = _second(b, library.delegate(like))
    except (ArrayError, DTypeError) as error:
        error.argument = error.argument or name
        raise
    if arguments or x.blocks or y.blocks:
        call = Call(a, b, library, x, y, PLAIN, _NOTHING, _ONE_ZERO, delegate)
        return _with_arguments(call, arguments)
    return _new(Call, (a, b, library, x, y, PLAIN, _NOTHING, _ONE_ZERO, delegate))


def _second(b: Any, delegate: Delegate | None) -> tuple[ArrayView, Delegate | None]:
    """Return the view of a ``b`` of another class than ``a``, and the product that one of the two needs."""
    if isinstance(b, Prepared):
        return b._view, delegate
    library = library_of(b)
    view = library.describe(b)
    return view, delegate or library.delegate(b)


_ARRAYS = ("out", "c", "bias", "scale_a", "scale_b")
_PARSERS: dict[str, Callable[[Any], Any]] = {
    "activation": parse_activation,
    "out_dtype": parse_out_dtype,
    "k_chunk": functools.partial(parse_length, "k_chunk"),
}


def _with_arguments(call: Call, given: dict[str, Any]) -> Call:
    """Return a call with the other arguments, and the product that one of them needs if the operands need none."""
    delegate = call.delegate
    others = tuple(map(given.get, _ARRAYS))
    views: list[Any] = [None] * 5
    for i, array in enumerate(others):
        if array is not None:
            views[i], delegate = _view_of(_ARRAYS[i], array, delegate)
    out, c, bias, scale_a, scale_b = views
    alpha = given.get("alpha", 1.0)
    beta = given.get("beta", 0.0)
    factors = (alpha, beta)
    for factor in factors:  # JAX may trace it alone
        if delegate is None and type(factor) is not float and is_array(factor):
            delegate = library_of(factor).delegate(factor)
    if type(alpha) is not float:
        alpha = parse_number("alpha", alpha)
    if type(beta) is not float:
        beta = parse_number("beta", beta)
    parsed = {}
    for name, parse in _PARSERS.items():
        if given.get(name) is not None:
            parsed[name] = parse(given[name])
    options = Options(out, c, bias, alpha, beta, scale_a=scale_a, scale_b=scale_b, **parsed)
    if beta != 0 and c is None:
        raise ShapeError(f"beta is {beta}, but c is missing; pass c=")
    if options == PLAIN:
        options = PLAIN
    if call.x.blocks or call.y.blocks or scale_a is not None or scale_b is not None:
        options = with_scales(options, call.x, call.y)
    return _new(Call, (*call[:5], options, others, factors, delegate))


def _view_of(
    name: str, array: Any, delegate: Delegate | None
) -> tuple[ArrayView | float, Delegate | None]:
    """Return the view of an array argument, or the number of a scale, and the product that is needed."""
    is_scale = name.startswith("scale")
    if is_scale and not is_array(array):
        return _scale(name, array), delegate
    try:
        library = library_of(array)
        if library.delegates and delegate is None and (needed := library.delegate(array)):
            delegate = needed._replace(why=f"{name}: {needed.why}")
        if name == "out":
            view = library.writable_view(array)
        else:
            view = library.describe(array)
    except (ArrayError, DTypeError) as error:
        error.argument = name
        raise
    if is_scale:
        return _scale(name, view), delegate
    return view, delegate


def _scale(name: str, value: Any) -> ArrayView | float:
    """Return the scale of an FP8 operand: a number, or the view of one float32 in device memory."""
    if not isinstance(value, ArrayView):
        number = parse_number(name, value)
        if isinstance(number, complex):
            raise DTypeError(f"{name} must be real, got {number}")
        return number
    if value.dtype is not DType.FLOAT32 or value.size != 1:
        raise DTypeError(
            f"{name} must be a number or one float32, got {value.dtype} of shape {value.shape}"
        )
    return value


def run(call: Call, resolved: ResolvedMode, backward_mode: Mode | None = None) -> Any:
    """Check what depends on all arguments, and return the product.

    ``backward_mode`` is the mode of gradients, by default ``resolved``, if the call's library records them.
    """
    a, b, library, x, y, options, others, _, delegate = call
    entry = look_up(resolved, x, y, options)
    if delegate is not None:
        return _delegated(call, resolved, entry, backward_mode)
    out = others[0]
    target = options.out
    executor = entry.execute
    like = x.source(a) if x.blocks else a
    if target is None:
        try:
            target = library.allocate(entry.out_shape, entry.out_dtype, x.device, like)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
        if target is None:
            release_memory()
            target = library.allocate(entry.out_shape, entry.out_dtype, x.device, like)
    else:
        if entry.staged:
            executor = functools.partial(_execute_staged, entry, target)
        library_of(out).mark_written(out)
    if x.device is CPU:
        if options is PLAIN:
            arguments = _new(
                Arguments, (x, y, target, None, None, 1.0, 0.0, None, None, 0, None, None, 0)
            )
        else:
            arguments = options.arguments(x, y, target)
        executor(arguments)
    else:
        arguments = options.arguments(x, y, target, library.current_stream(x.device) or 0)
        streams.run(executor, arguments, library, (a, b, *others))
    if out is None:
        return library.wrap(target.owner, like, b, others[1], others[2])
    return out


def _execute_staged(entry: CachedExecutor, target: ArrayView, arguments: Arguments) -> None:
    """Compute a product in temporary memory, then copy it to an ``out`` that overlaps an operand."""
    backend = entry.backend
    stream = arguments.stream
    with backend.temporary(entry.out_shape, entry.out_dtype, target.device, stream) as result:
        entry.execute(arguments._replace(out=result))
        backend.copy(result, target, stream)


def _delegated(
    call: Call, resolved: ResolvedMode, entry: CachedExecutor, backward_mode: Mode | None
) -> Any:
    """Return the product of the call's library; raise if that lacks an argument of the call."""
    delegate = call.delegate
    assert delegate is not None
    if call.options is not PLAIN or call.y.mode or call.x.mode:
        _refuse_arguments(call, delegate)
    try:
        return _product_function(delegate.product)(call, resolved, entry, backward_mode)
    except (NotImplementedError, TypeError) as error:
        if not isinstance(error, LowprecError):
            refuse_subclasses(error, call.a, call.b, *call.others)
        raise


def _refuse_arguments(call: Call, delegate: Delegate) -> None:
    """Raise for arguments that the product of a library lacks."""
    names = ("a", "b", "out", "c", "bias", "scale_a", "scale_b")
    given = dict(zip(names, (call.a, call.b, *call.others), strict=True))
    refuse_prepared(delegate.why, **given)
    given |= {"k_chunk": call.options.k_chunk, "activation": call.options.activation}
    for name, factor, default in zip(("alpha", "beta"), call.factors, _ONE_ZERO, strict=True):
        given[name] = None if isinstance(factor, int | float) and factor == default else factor
    _, lacks = PRODUCTS[delegate.product]
    lacking = [name for name in lacks if given[name] is not None]
    if lacking:
        listed = ", ".join(f"{name}=" for name in lacking)
        way_out = (
            f", or omit {listed}"
            if _NOT_AFTERWARDS.intersection(lacking)
            else "; apply it to the result"
        )
        raise UnsupportedError(f"{listed} cannot be used here: {delegate.why}{way_out}")
