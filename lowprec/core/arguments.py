"""Arguments of a product: arrays by descriptions, element types, numbers, and ``Options``, the keyword arguments."""

from __future__ import annotations

import numbers
import sys
from cmath import isinf
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from math import inf, prod
from typing import Any, NamedTuple

import numpy as np

from lowprec.arrays import ArrayView, is_array, library_of, may_overlap
from lowprec.arrays.libraries import BY_TYPE, dense_method
from lowprec.arrays.prepared_view import Prepared
from lowprec.backends import Arguments
from lowprec.errors import (
    ArrayError,
    DeviceError,
    DTypeError,
    LowprecError,
    SettingError,
    ShapeError,
    UnsupportedError,
    quoted,
)
from lowprec.formats import Blocks, DType, dtype_from_name
from lowprec.modes import ActivationName
from lowprec.planning import GemmProblem, OperandSpec
from lowprec.util.strides import Shape


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
        if isinstance(self.shape, Iterable):
            shape = tuple(self.shape)
        else:
            shape = (None,)
        are_integers = all(isinstance(n, numbers.Integral) for n in shape)
        if not are_integers or not all(0 <= n < 2**63 for n in shape):
            raise ShapeError(
                f"shape must hold non-negative integers of 64 bits, got {quoted(self.shape)}"
            )
        object.__setattr__(self, "shape", tuple(int(n) for n in shape))


def parse_dtype(dtype: Any) -> DType:
    """Return the element type of a name, a NumPy or ml_dtypes dtype or scalar type, or an Array API dtype."""
    if isinstance(dtype, DType):
        return dtype
    if isinstance(dtype, str):
        return dtype_from_name(dtype)
    name = getattr(dtype, "name", None) or getattr(dtype, "__name__", None) or quoted(dtype)
    return dtype_from_name(str(name).rpartition(".")[2])


def described(x: Any) -> Any:
    """Return the view of a shape and dtype, as a contiguous array in host memory; other objects unchanged."""
    if type(x) in BY_TYPE:
        return x
    if isinstance(x, tuple | list) and all(isinstance(n, numbers.Integral) for n in x):
        raise ArrayError(
            f"{quoted(x)} is a shape without an element type; pass an array, or describe one by "
            f"lowprec.ShapeDtype({quoted(tuple(x))}, 'float32')"
        )
    if not _is_description(x):
        return x
    if not isinstance(x, ShapeDtype):
        if isinstance(x, tuple):
            x = ShapeDtype(*x)
        else:
            x = ShapeDtype(x.shape, x.dtype)
    return ArrayView.description(parse_dtype(x.dtype), x.shape)


def _is_description(x: Any) -> bool:
    if isinstance(x, tuple):
        return len(x) == 2
    if isinstance(x, type | np.generic) or dense_method(x):
        return False
    if isinstance(x, ArrayView | Prepared) or is_array(x):
        return False
    return hasattr(x, "shape") and hasattr(x, "dtype")


def parse_out_dtype(dtype: Any) -> DType:
    try:
        return parse_dtype(dtype)
    except DTypeError as error:
        error.argument = "out_dtype"
        raise


def parse_number(name: str, value: Any) -> complex:
    """Return a factor as a float or complex number; JAX's functions return arrays without axes as numbers."""
    if type(value) is float:
        return value
    if getattr(value, "ndim", None) == 0 and is_array(value) and library_of(value).name == "jax":
        if library_of(value).delegate(value):
            return 2j if "complex" in str(value.dtype) else 2.0  # a number other than 1 for checks
        with suppress(NotImplementedError):  # raised for a random key
            value = value.item()
    if not isinstance(value, numbers.Complex):
        raise DTypeError(f"{name} must be a number, got {type(value).__name__}")
    number: complex = inf
    with suppress(OverflowError):
        if isinstance(value, numbers.Real):
            number = float(value)
        else:
            number = complex(value)
    if isinf(number) and number != value:
        raise SettingError(
            f"{name} is {quoted(value)}, which exceeds float64; scale the operands instead"
        )
    return number


def parse_length(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < 1:
        raise SettingError(f"{name} must be an integer of at least 1, got {quoted(value)}")
    return int(value)


def check_devices(views: dict[str, ArrayView]) -> None:
    """Raise DeviceError unless all arrays are on one device; descriptions have no device."""
    devices = {name: view.device for name, view in views.items() if not view.is_description}
    first = next(iter(devices), "")
    for name, device in devices.items():
        if device != devices[first]:
            raise _device_error({first: devices[first], name: device})


def _device_error(places: dict[str, Any]) -> DeviceError:
    (first, device), (second, other) = places.items()
    error = DeviceError(
        f"{first} is on {device} and {second} on {other}; move one of them to the other's device"
    )
    error.places = places
    return error


def rename(error: LowprecError, names: dict[str, str]) -> None:
    """Replace the names of ``matmul``'s arguments in an error by those of the function that was called."""
    if error.argument in ("a", "b"):
        error.argument = names.get(error.argument)
    if isinstance(error, DeviceError) and error.places:
        places = {names.get(name, name): place for name, place in error.places.items()}
        error.args = _device_error(places).args


def spec_of(x: ArrayView) -> OperandSpec:
    """Return the shape, strides and element type of a view, for planning."""
    return OperandSpec(x.dtype, x.shape, x.strides, x.blocks, x.inner_offsets)


class Options(NamedTuple):
    """Keyword arguments of ``matmul``, with arrays as views."""

    out: ArrayView | None = None
    c: ArrayView | None = None
    bias: ArrayView | None = None
    alpha: complex = 1.0
    beta: complex = 0.0
    activation: ActivationName | None = None
    out_dtype: DType | None = None
    scale_a: ArrayView | float | None = None
    scale_b: ArrayView | float | None = None
    k_chunk: int | None = None
    blocks: tuple[Blocks | None, Blocks | None] = (None, None)  # of quantised a and b

    def views(self, a: ArrayView, b: ArrayView) -> dict[str, ArrayView]:
        named = {"a": a, "b": b, **self._asdict()}
        return {name: x for name, x in named.items() if isinstance(x, ArrayView)}

    @property
    def key(self) -> tuple[Any, ...]:
        out, c, bias, alpha, beta, activation, out_dtype, scale_a, scale_b, k_chunk, blocks = self
        return (
            getattr(out, "layout", None),
            getattr(c, "layout", None),
            getattr(bias, "layout", None),
            alpha != 1,
            alpha == 0,
            beta != 0,
            type(alpha) is complex or type(beta) is complex,
            _exceeds_float32(alpha),
            _exceeds_float32(beta),
            activation,
            out_dtype,
            type(scale_a),
            type(scale_b),
            k_chunk,
            blocks,
        )

    def problem(self, a: OperandSpec, b: OperandSpec) -> GemmProblem:
        return GemmProblem(
            a,
            b,
            self.out_dtype,
            out=None if self.out is None else spec_of(self.out),
            c=None if self.c is None else spec_of(self.c),
            bias=None if self.bias is None else spec_of(self.bias),
            has_alpha=self.alpha != 1,
            has_beta=self.beta != 0,
            activation=self.activation,
            k_chunk=self.k_chunk,
            ignores_product=self.alpha == 0,
        )

    def arguments(self, a: ArrayView, b: ArrayView, out: ArrayView, stream: int = 0) -> Arguments:
        scales = (self.scale_a, self.scale_b)
        return Arguments(a, b, out, self.c, self.bias, self.alpha, self.beta, *scales, stream)

    def needs_staging(self, a: ArrayView, b: ArrayView) -> bool:
        """Whether ``out`` overlaps an operand, so that the result is computed in temporary memory."""
        out = self.out
        c = self.c
        if out is None:
            return False
        operands = (*a.stored(), *b.stored())
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


def _exceeds_float32(value: complex) -> bool:
    real = abs(value.real)
    imaginary = abs(value.imag)
    return _LARGEST_FLOAT32 < real < inf or _LARGEST_FLOAT32 < imaginary < inf


def with_scales(options: Options, a: ArrayView, b: ArrayView) -> Options:
    """Return options with the scales of FP8 operands multiplied into alpha, except arrays in device memory."""
    for operand in (a, b):
        if operand.blocks:
            options = options._replace(alpha=options.alpha * operand.scale)
    options = options._replace(blocks=(a.blocks, b.blocks))
    for name, operand in (("scale_a", a), ("scale_b", b)):
        scale = getattr(options, name)
        if scale is None:
            continue
        if not operand.dtype.is_float8:
            raise UnsupportedError(
                f"{name} is for an FP8 operand, but the operand is {operand.dtype}; pass alpha="
            )
        if isinstance(scale, ArrayView):
            if not scale.device.is_host or scale.is_description:
                continue
            scale = float(scale.ndarray().item())
        applied: Any = {"alpha": options.alpha * scale, name: None}
        options = options._replace(**applied)
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
            raise SettingError(
                f"{name} is {value}, which float32 cannot represent; scale the operands instead, or make them float64"
            )


def check_sizes(views: dict[str, ArrayView], out_shape: Shape, out_dtype: DType) -> None:
    """Raise ShapeError if an array of a call, or its result, exceeds the address space."""
    specs = {name: (view.shape, view.dtype) for name, view in views.items()}
    specs["the result"] = (out_shape, out_dtype)
    for name, (shape, dtype) in specs.items():
        if prod(shape) * dtype.itemsize > sys.maxsize:
            raise ShapeError(f"{name} of shape {shape} and {dtype} exceeds the address space")
