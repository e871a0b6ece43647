"""``matmul``: view the arrays, resolve the mode, plan the product, execute it, return the result.

A repeated call (same device, dtypes, shapes, strides, mode and epilogue) gets its executor from a cache.
"""

from __future__ import annotations

import functools
import inspect
from itertools import compress
from operator import is_not
from typing import Any

from lowprec import policy
from lowprec.arrays import CPU, ArrayView, Device, Library, library_of, library_of_operand, view_of_b
from lowprec.arrays.libraries import promoted, refuse_subclasses
from lowprec.arrays.prepared_view import QuantizedView, refuse_prepared
from lowprec.arrays.signatures import of_first
from lowprec.arrays.view import with_k_zero
from lowprec.backends import Arguments, Executor, backend_of, is_out_of_memory, release_memory
from lowprec.backends.execution import imported
from lowprec.core import streams
from lowprec.core.arguments import PLAIN, Options, bind, check_devices, name_argument, spec_of
from lowprec.core.executors import CachedExecutor, capabilities, look_up
from lowprec.errors import ArrayError, DelegateError, DTypeError, LowprecError, UnsupportedError
from lowprec.modes import ActivationName, BoundName, MathMode, ModeName, ResolvedMode
from lowprec.util.tracing import is_traced

_ARRAYS = ("a", "b", "out", "c", "bias", "scale_a", "scale_b")
_MODE_WITHIN = "lowprec.core.plan_call:mode_within"


@of_first
def matmul(
    a: Any,
    b: Any,
    /,
    *,
    out: Any = None,
    c: Any = None,
    alpha: complex = 1.0,
    beta: complex = 0.0,
    bias: Any = None,
    activation: ActivationName | None = None,
    out_dtype: Any = None,
    math_mode: ModeName | MathMode | None = None,
    rtol: float | None = None,
    bound: BoundName | None = None,
    k_chunk: int | None = None,
    scale_a: Any = None,
    scale_b: Any = None,
) -> Any:
    """Multiply two arrays: ``out = activation(alpha * a @ b + beta * c + bias)``.

    Parameters
    ----------
    a : array or QuantizedArray, shape (..., m, k) or (k,)
        Any library that supports DLPack. dtypes: float64, float32, float16, bfloat16, complex64, complex128, int8,
        float8_e4m3fn, float8_e5m2. FP8 tensor cores multiply float8 operands; other units widen them to bfloat16.
    b : array, QuantizedArray or PreparedOperand, shape (..., k, n) or (k,)
        On the device of ``a``; batches broadcast. Mixed floating-point dtypes are promoted to the wider one, bfloat16
        with float16 to float32; float8 with any other to the other.
    out : array, shape (..., m, n), optional
        Output array, which is also returned. It may share memory with the operands.
    c : array, broadcasts to (..., m, n), optional
        Addend; not read if ``beta`` is 0.
    alpha, beta : number
        Factors of the product and of ``c``. If ``alpha`` is 0, the operands are not read.
    bias : array, shape (n,), optional
        Added to each row. int8 or int32 for int8 operands; the sum saturates at the int32 range.
    activation : {"relu", "gelu"}, optional
        ``"gelu"`` is the tanh form.
    out_dtype : dtype or str, optional
        dtype of the result; by default the operands' common dtype, int32 for int8 and bfloat16 for float8. 16-bit
        operands may give float32, float32 operands a 16-bit type, float8 operands any of these and float8: rounded to
        nearest even, NaN (E4M3) or Inf (E5M2) beyond the range.
    math_mode : str or MathMode, optional
        Precision of float32 and complex64 products; see the mode table. Overrides ``with math_mode(...)``. Only
        ``fp64_emulated`` acts on float64 and complex128 operands: another mode below FP32 gives one
        :class:`LowprecWarning` per process. A mode from a scope or a default gives no warning, because it may apply to
        code with several element types.
    rtol : float, optional
        Choose the cheapest mode that bounds ``|C - AB| / (|A| |B|)``, in Frobenius norms, by this value. The error is
        relative to the norms of the operands, not to elements of the result.
    bound : {"guaranteed", "probable"}, optional
        The bound that ``rtol`` is compared with. The probable bound assumes rounding errors of mean zero; it holds with
        probability 0.999 and grows with the square root of the inner dimension, the guaranteed one in proportion to it.
    k_chunk : int, optional
        For experts: length of the chunks of the inner dimension in which the (leading) product is summed. The default
        chunks keep the truncation error of tensor cores near the error of an FP32 sum.
    scale_a, scale_b : number or array of one float32, optional
        Scales of float8 operands, by which their values were divided before rounding; factors of the product.

    Returns
    -------
    array
        An array of the library of ``a``, on its device; ``out`` if it is given.

    Raises
    ------
    ArrayError, DTypeError
        An argument is not an array that can be read (or written) in place, or its dtype is not supported.
    ShapeError
        The shapes do not match.
    DeviceError
        The arrays are on different devices, or on an unsupported device.
    ModeError
        The mode or bound is unknown, or no mode meets ``rtol``.
    UnsupportedError
        The arguments are legal, but this device does not support the combination.

    Examples
    --------
    >>> import numpy as np
    >>> import lowprec
    >>> a = np.array([[1.0, 2.0], [3.0, 4.0]], np.float32)
    >>> lowprec.matmul(a, a, math_mode="tf32")
    array([[ 7., 10.],
           [15., 22.]], dtype=float32)
    """
    keywords = out, c, alpha, beta, bias, activation, out_dtype, math_mode, rtol, bound, k_chunk, scale_a, scale_b
    if is_traced():  # after a graph break in the caller
        return _traced_matmul(a, b, **_given(keywords))
    options = PLAIN
    plain = out is c is bias is activation is out_dtype is scale_a is scale_b is k_chunk is None
    try:
        library = library_of_operand(a)
        if library.has_weak_types or type(b) is not type(a):
            a, b, c, bias = promoted((a, b), c, bias)
        x = library.view(a)
        y = library.view_same_type(b) if type(b) is type(a) else view_of_b(b)
        plain = plain and type(alpha) is type(beta) is float and alpha == 1.0 and beta == 0.0
        if not plain or type(x) is QuantizedView or type(y) is QuantizedView:
            options = bind(x, y, out, c, alpha, beta, bias, activation, out_dtype, scale_a, scale_b, k_chunk)
            x, y = (x, y) if options.alpha else with_k_zero(x, y)
    except DelegateError as error:
        return _delegated(error, a, b, _given(keywords))
    except (ArrayError, DTypeError) as error:
        name_argument(error, dict(zip(_ARRAYS, (a, b, out, c, bias, scale_a, scale_b), strict=True)))
        raise
    if rtol is None and bound is None:
        resolved = policy.resolve(math_mode)
    else:
        check_devices(options.views(x, y))
        problem = options.problem(spec_of(x), spec_of(y))
        resolved, _ = imported(_MODE_WITHIN)(rtol, math_mode, problem, capabilities(x.device), bound)
    found = look_up(resolved, x, y, options)
    execute, target = found.execute, options.out
    if target is None:
        target = _allocate(library, found, x.device, a)
    else:
        if options.needs_staging(x, y):
            execute = _out_of_place(resolved, x, y, options, target)
        library_of(out).mark_written(out)
    if x.device is CPU:
        execute(Arguments(x, y, target) if options is PLAIN else options.arguments(x, y, target))
    else:
        arguments = options.arguments(x, y, target, library.current_stream(x.device) or 0)
        streams.run(execute, arguments, library, (a, b, out, c, bias, scale_a, scale_b))
    return library.wrap(target.owner, a, b, c, bias) if out is None else out


_DEFAULTS = {name: x.default for name, x in inspect.signature(matmul).parameters.items() if name not in "ab"}


def _given(keywords: tuple[Any, ...]) -> dict[str, Any]:
    others = compress(zip(_DEFAULTS, keywords, strict=True), map(is_not, keywords, _DEFAULTS.values()))
    return {name: x for name, x in others if not (type(x) is float and x == _DEFAULTS[name])}


def _traced_matmul(a: Any, b: Any, /, **keywords: Any) -> Any:
    """Replace :func:`matmul` where PyTorch's compiler traces the caller."""
    from lowprec.torch.functions import traced_matmul

    return traced_matmul(a, b, **keywords)


matmul._torchdynamo_inline = _traced_matmul  # type: ignore[attr-defined]


@functools.cache
def _delegate(name: str) -> tuple[Any, frozenset[str]]:
    delegate = imported(name)
    return delegate, frozenset(inspect.signature(delegate).parameters)


#: Arguments that cannot be applied to a finished product.
_NOT_AFTERWARDS = {"out", "rtol", "bound", "k_chunk"}


def _delegated(found: DelegateError, a: Any, b: Any, given: dict[str, Any]) -> Any:
    """Call the matmul function of an operand's library; raise if it lacks one of the given arguments."""
    refuse_prepared(str(found), a=a, **given, b=b)
    delegate, takes = _delegate(found.target)
    try:
        if given.keys() <= takes:
            return delegate(a, b, **given)
        raise found
    except (ArrayError, DTypeError) as error:
        name_argument(error, {"a": a, "b": b, **{name: given.get(name) for name in _ARRAYS[2:]}})
        if error is not found:
            raise
    except (NotImplementedError, TypeError) as error:
        if not isinstance(error, LowprecError):
            refuse_subclasses(error, a, b, *given.values())
        raise
    lacking = sorted(given.keys() - takes)
    way_out = "omit it" if _NOT_AFTERWARDS & set(lacking) else "apply it to the result"
    raise UnsupportedError(f"{', '.join(f'{name}=' for name in lacking)} cannot be used here: {found}; {way_out}")


def _allocate(library: Library, found: CachedExecutor, device: Device, like: Any) -> ArrayView:
    """Allocate a result; if memory is short, release lowprec's buffers and try again."""
    try:
        return library.allocate(found.out_shape, found.out_dtype, device, like)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
    release_memory()
    return library.allocate(found.out_shape, found.out_dtype, device, like)


def _out_of_place(resolved: ResolvedMode, x: ArrayView, y: ArrayView, options: Options, target: ArrayView) -> Executor:
    """Return an executor for an ``out`` that overlaps an operand: compute in temporary memory, then copy."""
    device, backend = x.device, backend_of(x.device)
    dtype = backend.staging_dtype(target.dtype)
    staged = look_up(resolved, x, y, options._replace(out=None, out_dtype=dtype))

    def execute(arguments: Arguments) -> None:
        shape, stream = staged.out_shape, arguments.stream
        with backend.temporary(shape, staged.out_dtype, device, stream) as result:
            staged.execute(arguments._replace(out=result))
            backend.copy(result, target, stream)

    return execute
