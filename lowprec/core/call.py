"""A product as a value: ``bind`` checks its arguments, ``run`` executes it.

Everything that multiplies uses these two: ``matmul``, ``plan``, ``autotune``, and the products inside PyTorch, JAX and
Dask, to which ``run`` delegates.
"""

from __future__ import annotations

import functools
import importlib
from typing import Any, NamedTuple

from lowprec.arrays import CPU, ArrayView, Library, is_array, library_of
from lowprec.arrays.base import Delegate
from lowprec.arrays.libraries import promoted, refuse_subclasses
from lowprec.arrays.prepared_view import Prepared, refuse_prepared
from lowprec.backends import Arguments, is_out_of_memory, release_memory
from lowprec.core import streams
from lowprec.core.arguments import parse_length, parse_number, parse_out_dtype
from lowprec.core.executors import CachedExecutor, look_up
from lowprec.core.options import PLAIN, Options, with_scales
from lowprec.errors import ArrayError, DTypeError, LowprecError, ShapeError, UnsupportedError
from lowprec.formats import DType
from lowprec.modes import MathMode, ResolvedMode
from lowprec.planning import parse_activation


class Product(NamedTuple):
    """The product of a library: the module whose ``product`` computes it, and the arguments that it lacks."""

    module: str
    lacks: tuple[str, ...]


_IN_PLACE = ("out", "k_chunk", "scale_a", "scale_b")

#: By ``Delegate.product``. The only place where a lower layer names the modules of layer 7.
PRODUCTS = {
    "torch": Product("lowprec.torch.functions", _IN_PLACE),
    "jax": Product("lowprec.jax.product", _IN_PLACE),
    "dask": Product("lowprec.dask", ("out", "c", "alpha", "beta", "bias", "activation", "scale_a", "scale_b")),
}


@functools.cache
def _product_function(name: str) -> Any:
    """Return the function of a library from a call, its mode, executor and backward mode to the result."""
    return importlib.import_module(PRODUCTS[name].module).product


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
#: ``Call`` of a tuple, without a Python function.
_call = functools.partial(tuple.__new__, Call)


def bind(
    a: Any,
    b: Any,
    /,
    out: Any = None,
    c: Any = None,
    alpha: Any = 1.0,
    beta: Any = 0.0,
    bias: Any = None,
    activation: Any = None,
    out_dtype: Any = None,
    k_chunk: Any = None,
    scale_a: Any = None,
    scale_b: Any = None,
) -> Call:
    """Return a product as a value; raise for an array or argument that no product supports.

    Shapes, element types and devices are checked together by :func:`look_up`.
    """
    options, delegate, name = PLAIN, None, "a"
    plain = out is c is bias is activation is out_dtype is scale_a is scale_b is k_chunk is None
    plain = plain and type(alpha) is type(beta) is float and alpha == 1.0 and beta == 0.0
    try:
        like = a if not isinstance(a, Prepared) or a._like is None else a._like
        library = library_of(like)
        alike = type(b) is type(a)
        if library.has_weak_types or not alike:
            a, b, c, bias = promoted((a, b), c, bias)
        if library.delegates:
            delegate = library.delegate(like, b) if alike and like is a else library.delegate(like)
        x = library.describe(a) if like is a else a._view
        name = "b"
        if isinstance(b, Prepared):
            y: ArrayView = b._view
        elif alike:
            y = library.describe(b)
        else:
            y = library_of(b).describe(b)
            delegate = delegate or library_of(b).delegate(b)
    except (ArrayError, DTypeError) as error:
        error.argument = error.argument or name
        raise
    if not plain:
        options, delegate = _options(
            (out, c, bias, scale_a, scale_b), alpha, beta, activation, out_dtype, k_chunk, delegate
        )
    if x.blocks or y.blocks or not (scale_a is scale_b is None):
        options = with_scales(options, x, y)
    others = _NOTHING if plain else (out, c, bias, scale_a, scale_b)
    return _call((a, b, library, x, y, options, others, _ONE_ZERO if plain else (alpha, beta), delegate))


def _options(
    arrays: tuple[Any, ...], alpha: Any, beta: Any, activation: Any, out_dtype: Any, k_chunk: Any,
    delegate: Delegate | None,
) -> tuple[Options, Delegate | None]:  # fmt: skip
    """Return the options, and the product that one of these arrays needs if the operands need none."""
    views = []
    for name, array in zip(("out", "c", "bias", "scale_a", "scale_b"), arrays, strict=True):
        view = array
        if hasattr(array, "__dlpack__") or (array is not None and name in ("out", "c", "bias")):
            try:
                library = library_of(array)
                if library.delegates and delegate is None and (needed := library.delegate(array)):
                    delegate = needed._replace(why=f"{name}: {needed.why}")
                view = library.writable_view(array) if name == "out" else library.describe(array)
            except (ArrayError, DTypeError) as error:
                if not str(error).startswith("out "):
                    error.argument = name
                raise
        views.append(view)
    for factor in (alpha, beta):  # JAX may trace it alone
        if delegate is None and type(factor) is not float and is_array(factor):
            delegate = library_of(factor).delegate(factor)
    scale_a, scale_b = (None if x is None else _scale(f"scale_{n}", x) for n, x in zip("ab", views[3:], strict=True))
    alpha = alpha if type(alpha) is float else parse_number("alpha", alpha)
    beta = beta if type(beta) is float else parse_number("beta", beta)
    activation = None if activation is None else parse_activation(activation)
    out_dtype = None if out_dtype is None else parse_out_dtype(out_dtype)
    k_chunk = None if k_chunk is None else parse_length("k_chunk", k_chunk)
    out, c, bias, *_ = views
    options = Options(out, c, bias, alpha, beta, activation, out_dtype, scale_a, scale_b, k_chunk)
    if options.beta != 0 and options.c is None:
        raise ShapeError(f"beta is {options.beta}, but c is missing; pass c=")
    return options, delegate


def _scale(name: str, value: Any) -> ArrayView | float:
    """Return the scale of an FP8 operand: a number, or the view of one float32 in device memory."""
    if not isinstance(value, ArrayView):
        number = parse_number(name, value)
        if isinstance(number, complex):
            raise DTypeError(f"{name} must be real, got {number}")
        return number
    if value.dtype is not DType.FLOAT32 or value.size != 1:
        raise DTypeError(f"{name} must be a number or one float32, got {value.dtype} of shape {value.shape}")
    return value


def run(call: Call, resolved: ResolvedMode, backward_mode: MathMode | None = None) -> Any:
    """Check what depends on all arguments, and return the product.

    ``backward_mode`` is the mode of gradients, by default ``resolved``, if the call's library records them.
    """
    entry = look_up(resolved, call.x, call.y, call.options)
    return execute(call, entry) if call.delegate is None else _delegated(call, resolved, entry, backward_mode)


def execute(call: Call, entry: CachedExecutor) -> Any:
    a, b, library, x, y, options, others, *_ = call
    out, target, executor = others[0], options.out, entry.execute
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
        executor(Arguments(x, y, target) if options is PLAIN else options.arguments(x, y, target))
    else:
        arguments = options.arguments(x, y, target, library.current_stream(x.device) or 0)
        streams.run(executor, arguments, library, (a, b, *others))
    return library.wrap(target.owner, like, b, others[1], others[2]) if out is None else out


def _execute_staged(entry: CachedExecutor, target: ArrayView, arguments: Arguments) -> None:
    """Compute a product in temporary memory, then copy it to an ``out`` that overlaps an operand."""
    backend, stream = entry.backend, arguments.stream
    with backend.temporary(entry.out_shape, entry.out_dtype, target.device, stream) as result:
        entry.execute(arguments._replace(out=result))
        backend.copy(result, target, stream)


def _delegated(call: Call, resolved: ResolvedMode, entry: CachedExecutor, backward_mode: MathMode | None) -> Any:
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
    lacking = [name for name in PRODUCTS[delegate.product].lacks if given[name] is not None]
    if lacking:
        way_out = "omit it" if _NOT_AFTERWARDS.intersection(lacking) else "apply it to the result"
        raise UnsupportedError(
            f"{', '.join(f'{name}=' for name in lacking)} cannot be used here: {delegate.why}; {way_out}"
        )
