"""Argument checks of ``matmul`` and ``plan``: arrays become views, keywords become :class:`Options`."""

from __future__ import annotations

import numbers
import sys
from cmath import isinf
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from math import inf, prod
from typing import Any, NamedTuple

from lowprec.arrays import CPU, ArrayView, is_array, library_of, may_overlap
from lowprec.arrays.libraries import dense_method
from lowprec.arrays.prepared_view import QuantizedView
from lowprec.backends import Arguments
from lowprec.errors import ArrayError, DeviceError, DTypeError, LowprecError, ShapeError, UnsupportedError, quoted
from lowprec.formats import Blocks, DType, dtype_from_name
from lowprec.planning import Activation, GemmProblem, OperandSpec, parse_activation
from lowprec.util.strides import contiguous_strides


@dataclass(frozen=True, slots=True)
class ShapeDtype:
    """Shape and element type of an array, for :func:`lowprec.plan` without data.

    Parameters
    ----------
    shape : tuple of int
    dtype : str or dtype
        A name, or the dtype object of any library.

    Examples
    --------
    >>> import lowprec
    >>> a = lowprec.ShapeDtype((4096, 1024), "bfloat16")
    >>> b = lowprec.ShapeDtype((1024, 512), "bfloat16")
    >>> lowprec.plan(a, b).flops
    4294967296
    """

    shape: tuple[int, ...]
    dtype: Any

    def __post_init__(self) -> None:
        parse_dtype(self.dtype)
        shape = tuple(self.shape) if isinstance(self.shape, Iterable) else (None,)
        if not all(isinstance(n, numbers.Integral) and 0 <= n < 2**63 for n in shape):
            raise ShapeError(f"shape must hold non-negative integers of 64 bits, got {quoted(self.shape)}")
        object.__setattr__(self, "shape", tuple(int(n) for n in shape))


def parse_dtype(dtype: Any) -> DType:
    """Return the element type of a name, a NumPy or ml_dtypes dtype or scalar type, or an Array API dtype."""
    if isinstance(dtype, DType):
        return dtype
    if isinstance(dtype, str):
        return dtype_from_name(dtype)
    name = getattr(dtype, "name", None) or getattr(dtype, "__name__", None) or quoted(dtype)
    return dtype_from_name(str(name).rpartition(".")[2])


def view_of(x: Any, *, writable: bool = False, describing: bool = False) -> ArrayView:
    """Return the view of an array; with ``describing`` also of a shape and dtype, as a contiguous array."""
    if describing and isinstance(x, tuple | list) and all(isinstance(n, numbers.Integral) for n in x):
        raise ArrayError(
            f"{quoted(x)} is a shape without an element type; pass an array, or describe one by "
            f"lowprec.ShapeDtype({quoted(tuple(x))}, 'float32')"
        )
    if describing and _is_description(x):
        if not isinstance(x, ShapeDtype):
            x = ShapeDtype(*x) if isinstance(x, tuple) else ShapeDtype(x.shape, x.dtype)
        strides = contiguous_strides(x.shape)
        return ArrayView(parse_dtype(x.dtype), x.shape, strides, CPU, None, False, None)
    library = library_of(x)
    return library.writable_view(x) if writable else library.view(x)


def _is_description(x: Any) -> bool:
    if isinstance(x, tuple):
        return len(x) == 2
    if isinstance(x, type) or dense_method(x):
        return False
    return not is_array(x) and hasattr(x, "shape") and hasattr(x, "dtype")


def spec_of(x: ArrayView) -> OperandSpec:
    """Return the shape, strides and element type of a view, for planning."""
    return OperandSpec(x.dtype, x.shape, x.strides, _blocks(x))


def _blocks(x: ArrayView) -> Blocks | None:
    return x.blocks if isinstance(x, QuantizedView) else None


class Options(NamedTuple):
    """Keyword arguments of ``matmul``, with arrays as views."""

    out: ArrayView | None = None
    c: ArrayView | None = None
    bias: ArrayView | None = None
    alpha: complex = 1.0
    beta: complex = 0.0
    activation: Activation | None = None
    out_dtype: DType | None = None
    scale_a: ArrayView | float | None = None
    scale_b: ArrayView | float | None = None
    k_chunk: int | None = None
    blocks: tuple[Blocks | None, Blocks | None] = (None, None)  # of quantised a and b

    def views(self, a: ArrayView, b: ArrayView) -> dict[str, ArrayView]:
        """Return the array arguments by name."""
        named = {"a": a, "b": b, **self._asdict()}
        return {name: x for name, x in named.items() if isinstance(x, ArrayView)}

    @property
    def key(self) -> tuple[Any, ...]:
        """The part of the cache key that depends on these options."""
        out, c, bias, alpha, beta, activation, out_dtype, scale_a, scale_b, k_chunk, blocks = self
        return (
            None if out is None else (out.device, out.dtype, out.shape, out.strides),
            None if c is None else (c.device, c.dtype, c.shape, c.strides),
            None if bias is None else (bias.device, bias.dtype, bias.shape, bias.strides),
            alpha != 1, beta != 0, type(alpha) is complex or type(beta) is complex,
            _exceeds_float32(alpha), _exceeds_float32(beta),
            activation, out_dtype, type(scale_a), type(scale_b), k_chunk, blocks,
        )  # fmt: skip

    def problem(self, a: OperandSpec, b: OperandSpec) -> GemmProblem:
        """Return the GEMM problem with this epilogue."""
        out, c, bias = (None if v is None else spec_of(v) for v in (self.out, self.c, self.bias))
        has_alpha, has_beta = self.alpha != 1, self.beta != 0
        return GemmProblem(a, b, self.out_dtype, out, c, bias, has_alpha, has_beta, self.activation, self.k_chunk)

    def arguments(self, a: ArrayView, b: ArrayView, out: ArrayView, stream: int = 0) -> Arguments:
        """Return the arguments of an executor."""
        return Arguments(a, b, out, self.c, self.bias, self.alpha, self.beta, self.scale_a, self.scale_b, stream)

    def needs_staging(self, a: ArrayView, b: ArrayView) -> bool:
        """Whether ``out`` overlaps an operand, so that the result is computed in temporary memory."""
        out, c = self.out, self.c
        if out is None:
            return False
        operands = [part for x in (a, b) for part in (x.quantized._stored() if isinstance(x, QuantizedView) else (x,))]
        read = (*operands, self.bias, self.scale_a, self.scale_b)
        if any(isinstance(x, ArrayView) and may_overlap(out, x) for x in read):
            return True
        if c is None:
            return False
        # The epilogue reads and writes element by element, so ``c`` may be ``out`` itself.
        same = (c.address, c.dtype, c.shape, c.strides)
        if same == (out.address, out.dtype, out.shape, out.strides):
            return False
        return may_overlap(out, c)


_LARGEST_FLOAT32 = float.fromhex("0x1.fffffep+127")

#: The options of ``matmul(a, b)``.
PLAIN = Options()


def bind(
    a: ArrayView,
    b: ArrayView,
    out: Any,
    c: Any,
    alpha: Any,
    beta: Any,
    bias: Any,
    activation: Any,
    out_dtype: Any,
    scale_a: Any,
    scale_b: Any,
    k_chunk: Any = None,
    *,
    describing: bool = False,
) -> Options:
    """Check the keyword arguments of ``matmul``; with ``describing``, arrays may be a shape and dtype.

    Scales of the operands are multiplied into alpha.
    """
    options = Options(
        None if out is None else view_of(out, writable=True, describing=describing),
        None if c is None else view_of(c, describing=describing),
        None if bias is None else view_of(bias, describing=describing),
        alpha if type(alpha) is float else _scalar("alpha", alpha),
        beta if type(beta) is float else _scalar("beta", beta),
        None if activation is None else parse_activation(activation),
        None if out_dtype is None else parse_out_dtype(out_dtype),
        None if scale_a is None else _scale("scale_a", scale_a),
        None if scale_b is None else _scale("scale_b", scale_b),
        None if k_chunk is None else _length("k_chunk", k_chunk),
    )
    if options.beta != 0 and c is None:
        raise ShapeError(f"beta is {options.beta}, but c is missing; pass c=")
    plain = scale_a is scale_b is None and type(a) is not QuantizedView is not type(b)
    return options if plain else _with_scales(options, a, b)


def parse_out_dtype(dtype: Any) -> DType:
    """Return the element type of the ``out_dtype=`` argument."""
    try:
        return parse_dtype(dtype)
    except DTypeError as error:
        error.argument = "out_dtype"
        raise


def _scale(name: str, value: Any) -> ArrayView | float:
    """Return the scale of an FP8 operand: a number, or the view of one float32 in device memory."""
    if not is_array(value):
        number = _scalar(name, value)
        if isinstance(number, complex):
            raise DTypeError(f"{name} must be real, got {number}")
        return number
    view = view_of(value)
    if view.dtype is not DType.FLOAT32 or view.size != 1:
        raise DTypeError(f"{name} must be a number or one float32, got {view.dtype} of shape {view.shape}")
    return view


def _length(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < 1:
        raise ShapeError(f"{name} must be an integer of at least 1, got {quoted(value)}")
    return int(value)


def _scalar(name: str, value: Any) -> complex:
    if type(value) is float:
        return value
    if getattr(value, "ndim", None) == 0 and is_array(value) and library_of(value).name == "jax":
        with suppress(NotImplementedError):  # raised for a random key
            value = value.item()  # functions of JAX return 0-d arrays, not numbers
    if not isinstance(value, numbers.Complex):
        raise DTypeError(f"{name} must be a number, got {type(value).__name__}")
    number: complex = inf
    with suppress(OverflowError):
        number = float(value) if isinstance(value, numbers.Real) else complex(value)
    if isinf(number) and number != value:
        raise UnsupportedError(f"{name} is {quoted(value)}, which exceeds float64; scale the operands instead")
    return number


def _exceeds_float32(value: complex) -> bool:
    return any(_LARGEST_FLOAT32 < abs(x) < inf for x in (value.real, value.imag))


def _with_scales(options: Options, a: ArrayView, b: ArrayView) -> Options:
    """Return options with the scales of FP8 operands multiplied into alpha, except arrays in device memory."""
    for operand in (a, b):
        if isinstance(operand, QuantizedView):
            options = options._replace(alpha=options.alpha * operand.quantized.scale)
    options = options._replace(blocks=(_blocks(a), _blocks(b)))
    for name, operand in (("scale_a", a), ("scale_b", b)):
        scale = getattr(options, name)
        if scale is None:
            continue
        if not operand.dtype.is_float8:
            raise UnsupportedError(f"{name} is for an FP8 operand, but the operand is {operand.dtype}; pass alpha=")
        if isinstance(scale, ArrayView):
            if not scale.device.is_host or scale.is_description:
                continue
            scale = float(scale.ndarray().item())
        options = options._replace(alpha=options.alpha * scale)
        options = options._replace(scale_a=None) if name == "scale_a" else options._replace(scale_b=None)
    return options


def check_scalars(options: Options, compute_dtype: DType) -> None:
    """Raise for complex ``alpha`` or ``beta`` with real operands, and for scales that the product cannot read."""
    for name, scale in (("scale_a", options.scale_a), ("scale_b", options.scale_b)):
        if isinstance(scale, ArrayView) and not compute_dtype.is_float8:
            raise UnsupportedError(
                f"{name} is in device memory, but the operands are multiplied as {compute_dtype}; pass a number"
            )
    for name, value in (("alpha", options.alpha), ("beta", options.beta)):
        if isinstance(value, complex) and not compute_dtype.is_complex:
            raise DTypeError(f"{name} is complex, but the operands are {compute_dtype}")
        if compute_dtype.itemsize <= compute_dtype.is_complex * 4 + 4 and _exceeds_float32(value):
            raise UnsupportedError(
                f"{name} is {value}, which float32 cannot represent; scale the operands instead, or make them float64"
            )


def check_devices(views: dict[str, ArrayView]) -> None:
    """Raise DeviceError unless all arrays are on one device; descriptions have no device."""
    devices = {name: view.device for name, view in views.items() if not view.is_description}
    first = next(iter(devices), "")
    for name, device in devices.items():
        if device != devices[first]:
            raise DeviceError(
                f"{first} is on {devices[first]} and {name} on {device}; move one of them to the other's device"
            )


def check_known_shape(name: str, x: Any) -> None:
    """Raise for a Dask array of unknown extents (NaN), or with PyTorch tensors as chunks."""
    if hasattr(x, "numblocks") and type(x._meta).__module__.partition(".")[0] == "torch":
        raise ArrayError(
            f"{name} is a Dask array of PyTorch tensors, which Dask cannot concatenate; convert its chunks with "
            f"{name}.map_blocks(numpy.asarray)"
        )
    if any(type(n) is float for n in x.shape):
        raise ShapeError(f"the shape of {name} is not known, {x.shape}; call {name}.compute_chunk_sizes() first")


#: Arguments that may be None.
_OPTIONAL = frozenset({"out", "c", "bias", "scale_a", "scale_b"})


def name_argument(error: LowprecError, arrays: dict[str, Any], look: Callable[[Any], Any] = view_of) -> None:
    """Set ``error.argument`` to the name of the first array for which ``look`` raises the same error."""
    if error.argument in ("a", "b") and error.argument not in arrays:  # matmul's names, unknown to the caller
        error.argument = None
    views: dict[str, ArrayView] = {}
    for name, x in arrays.items():
        try:
            if x is not None or name not in _OPTIONAL:
                views[name] = view_of(x, writable=True) if name == "out" else look(x)
        except Exception as found:  # noqa: BLE001 - another exception must not replace the error
            if type(found) is type(error) and found.args == error.args:
                names_itself = name == "out" and str(error).startswith("out ")
                error.argument = None if names_itself else name
                return
    if isinstance(error, DeviceError):
        try:
            check_devices(views)
        except DeviceError as found:
            error.args = found.args


def check_sizes(views: dict[str, ArrayView], out_shape: tuple[int, ...], out_dtype: DType) -> None:
    """Raise ShapeError if an array of a call, or its result, exceeds the address space."""
    specs = {name: (view.shape, view.dtype) for name, view in views.items()}
    for name, (shape, dtype) in {**specs, "the result": (out_shape, out_dtype)}.items():
        if prod(shape) * dtype.itemsize > sys.maxsize:
            raise ShapeError(f"{name} of shape {shape} and {dtype} exceeds the address space")
