"""Single arguments of a product: descriptions of arrays, element types, numbers, devices."""

from __future__ import annotations

import numbers
from cmath import isinf
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from math import inf
from typing import Any

from lowprec.arrays import ArrayView, is_array, library_of
from lowprec.arrays.libraries import dense_method
from lowprec.arrays.prepared_view import Prepared
from lowprec.errors import ArrayError, DeviceError, DTypeError, LowprecError, ShapeError, UnsupportedError, quoted
from lowprec.formats import DType, dtype_from_name


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


def described(x: Any) -> Any:
    """Return the view of a shape and dtype, as a contiguous array in host memory; other objects unchanged."""
    if isinstance(x, tuple | list) and all(isinstance(n, numbers.Integral) for n in x):
        raise ArrayError(
            f"{quoted(x)} is a shape without an element type; pass an array, or describe one by "
            f"lowprec.ShapeDtype({quoted(tuple(x))}, 'float32')"
        )
    if not _is_description(x):
        return x
    if not isinstance(x, ShapeDtype):
        x = ShapeDtype(*x) if isinstance(x, tuple) else ShapeDtype(x.shape, x.dtype)
    return ArrayView.description(parse_dtype(x.dtype), x.shape)


def _is_description(x: Any) -> bool:
    if isinstance(x, tuple):
        return len(x) == 2
    if isinstance(x, type) or dense_method(x):
        return False
    return not isinstance(x, ArrayView | Prepared) and not is_array(x) and hasattr(x, "shape") and hasattr(x, "dtype")


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
        number = float(value) if isinstance(value, numbers.Real) else complex(value)
    if isinf(number) and number != value:
        raise UnsupportedError(f"{name} is {quoted(value)}, which exceeds float64; scale the operands instead")
    return number


def parse_length(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < 1:
        raise ShapeError(f"{name} must be an integer of at least 1, got {quoted(value)}")
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
    error = DeviceError(f"{first} is on {device} and {second} on {other}; move one of them to the other's device")
    error.places = places
    return error


def rename(error: LowprecError, names: dict[str, str]) -> None:
    """Replace the names of ``matmul``'s arguments in an error by those of the function that was called."""
    if error.argument in ("a", "b"):
        error.argument = names.get(error.argument)
    if isinstance(error, DeviceError) and error.places:
        error.args = _device_error({names.get(name, name): place for name, place in error.places.items()}).args
