"""``QuantizedArray``: arrays of 8-bit and 4-bit codes with scales."""

from __future__ import annotations

import numbers
import operator
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import inf, isnan, nan, prod
from typing import Any

import numpy as np
from numpy.lib.array_utils import normalize_axis_index

from lowprec.arrays import block_codes
from lowprec.arrays.block_layout import axis_layout, joined, part_of, part_shapes, ranges
from lowprec.arrays.dlpack import device_of
from lowprec.arrays.libraries import library_of
from lowprec.arrays.namespaces import array_module, cast, dtype_name
from lowprec.arrays.numpy_library import host_view
from lowprec.arrays.prepared_view import Prepared, QuantizedView
from lowprec.arrays.view import ArrayView
from lowprec.errors import DTypeError, SettingError, ShapeError, did_you_mean, quoted
from lowprec.formats import (
    BLOCK_FORMATS,
    GROUPS,
    INT4_CODES,
    UINT4_CODES,
    WHOLE,
    BlockFormat,
    Blocks,
    DType,
    numbers_of_codes,
)
from lowprec.rounding_rules import NAMED, Format, stored_format
from lowprec.util.strides import Shape, contiguous_strides
from lowprec.util.tracing import uncompiled

_PARTS = "codes", "scales", "zeros"


@dataclass(frozen=True, eq=False, repr=False)
class QuantizedArray(Prepared):
    """An array as codes of 8 or 4 bits with scales; see :func:`lowprec.quantize`.

    :func:`lowprec.matmul` accepts it as either operand. A product with it as ``b`` may store a second copy of the
    codes, in the order in which its kernel reads them. Codes and scales are arrays of one library, and NumPy's are
    read-only. A pickle contains them.

    Parameters
    ----------
    codes, scales : array of uint8, shape (..., bytes) and (..., blocks)
        Codes of the numbers and of the blocks' scales (E8M0, E4M3 or E5M3; None for ``"fp8"``), or float32 scales
        (``"fp8_rows"``, ``"int8"``, ``"int4"``), to which float16 and bfloat16 are converted. The last axis is ``axis``
        of the original array, padded with zeros to whole blocks. Two codes of 4 bits share a byte, the first in the low
        half; those of 2 to 7 bits, and of 4 bits without blocks, have a byte each, with the sign in their highest bit.
    format : str or Format
        Name of the format, or the format.
    shape, axis : tuple of int, and int
        Shape of the original array, and the axis of the blocks.
    scale : float, or array
        Scale of the whole array, a positive float32 number, or those of the indices of its leading axes without
        ``axis``: of shape (experts,) one for each matrix of a stack, of shape (..., vectors) one for each vector.
        Required for formats with one, such as ``"nvfp4"`` and ``"fp8"``; 1 for the others.
    zeros : array of uint8, shape (..., blocks), optional
        The codes of zero in the blocks of affine ``"int4"``.

    Raises
    ------
    DTypeError, ShapeError
        The types or shapes of the arguments do not match the format.

    Examples
    --------
    >>> import numpy as np
    >>> import lowprec
    >>> x = lowprec.quantize(np.ones((64, 32), np.float32), "mxfp4")
    >>> x
    QuantizedArray(mxfp4 (64, 32), axis 1, 1,088 bytes)
    >>> x.T.shape, x.codes.shape, x.scales.shape
    ((32, 64), (64, 16), (64, 1))
    """

    codes: Any
    scales: Any
    format: str
    shape: tuple[int, ...]
    axis: int
    scale: Any = nan
    zeros: Any = None
    #: The transpose, and the view of the numbers without the array's scale; made when they are first read.
    _transposed: QuantizedArray | None = field(init=False, default=None)
    _viewed: QuantizedView | None = field(init=False, default=None)

    _description = "a quantised array, which is accepted only as an operand of matmul"
    _remedy = "its dequantize()"

    def __post_init__(self) -> None:
        row = self._row
        try:
            whole = tuple(map(operator.index, self.shape))
        except TypeError:
            raise ShapeError(f"shape is a tuple of integers, got {quoted(self.shape)}") from None
        axis = checked_axis(self.axis, len(whole))
        others, *_ = axis_layout(whole, axis, row)
        scale = _checked_scale(self.scale, row, others)
        fields: dict[str, Any] = {"format": row.name, "shape": whole, "axis": axis, "scale": scale}
        for name, shape in zip(_PARTS, part_shapes(whole, axis, row), strict=True):
            array = getattr(self, name)
            fields[name] = _checked_part(name, array, name == "scales" and row.has_float_scales)
            actual = None
            if array is not None:
                actual = tuple(array.shape)
            if actual != shape:
                raise ShapeError(
                    f"{name} of {row.name} for shape {whole} have shape {shape}, not {actual}"
                )
        for name, value in fields.items():
            object.__setattr__(self, name, value)

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.shape)

    @property
    def _parts(self) -> tuple[Any, Any, Any]:
        return self.codes, self.scales, self.zeros

    @property
    def nbytes(self) -> int:
        """Bytes of codes, scales and zeros."""
        parts = filter(lambda x: x is not None, self._parts)
        return sum(int(x.nbytes) for x in parts)

    @property
    def T(self) -> QuantizedArray:
        """The array with its last two axes exchanged, on the same codes."""
        if self._transposed is not None:
            return self._transposed
        if self.ndim < 2:
            raise ShapeError(
                f"a quantised array of shape {self.shape} has no transpose; it needs two axes"
            )
        codes, scales, zeros = self._parts
        scale = self.scale
        axis = self.axis
        last = self.ndim - 1
        if axis >= last - 1:
            axis = 2 * last - 1 - axis
        else:
            codes, scales, zeros = (None if x is None else x.swapaxes(-3, -2) for x in self._parts)
            if self._has_scales:
                scale = self._scale_of_vectors().swapaxes(-2, -1)
        *batch, rows, columns = self.shape
        shape = (*batch, columns, rows)
        transposed = QuantizedArray(codes, scales, self.format, shape, axis, scale, zeros)
        object.__setattr__(self, "_transposed", transposed)
        return self.T

    @uncompiled
    def dequantize(self) -> Any:
        """Return the numbers in float32, as an array of the library of the codes."""
        length = self.shape[self.axis]
        values = self._values(self.scale)[..., :length]
        xp = np
        if type(values) is not np.ndarray:
            xp = array_module(values)
        values = xp.moveaxis(values, -1, self.axis)
        return adopted(values, self.codes)

    @property
    def _row(self) -> BlockFormat:
        """The format, of int4 with the length of its groups, by the shapes of codes and scales."""
        row = parse_format(self.format)
        if row.elements is not INT4_CODES:
            return row
        group = row.block
        shape = getattr(self.codes, "shape", ())
        groups = getattr(self.scales, "shape", ())
        if shape and groups and shape[-1] and groups[-1]:
            group = shape[-1] * 2 // groups[-1]
        return int4(group, symmetric=self.zeros is None)

    @property
    def _has_scales(self) -> bool:
        """Whether the scale is an array."""
        return not isinstance(self.scale, float)

    def _scale_of_vectors(self) -> Any:
        """Return the scales of an array in the shape of its other axes than ``axis``."""
        others, *_ = axis_layout(self.shape, self.axis, self._row)
        scale = self.scale.reshape((*self.scale.shape, *[1] * (len(others) - self.scale.ndim)))
        return array_module(scale).broadcast_to(scale, others)

    @property
    def _like(self) -> Any:
        return self.codes

    @property
    def _view(self) -> QuantizedView:  # type: ignore[override]  # made when it is read
        """The view of the numbers without the array's scale."""
        if self._viewed is not None:
            return self._viewed
        row = self._row
        last = self.ndim - 1
        codes = codes_view(self.codes)
        others, _, padded = axis_layout(self.shape, self.axis, row)
        strides = [*codes.strides]
        if row.block:
            strides = [*contiguous_strides((*others, padded))]
        strides.insert(self.axis, strides.pop())
        dtype = row.widened
        name = row.name
        if self._has_scales:  # kernels do not read these
            dtype = DType.FLOAT32
            name += ", scaled"
            row = replace(row, block=row.block or WHOLE)
        blocks = Blocks(name, self.axis - last - 1, row)
        view = ArrayView(
            dtype, self.shape, tuple(strides), codes.device, codes.owner, True, codes.address
        )
        if not row.block and view.device.is_host:
            view = host_view(view.ndarray())
        # not this object, which refers to the view
        quantized_view = QuantizedView(view, blocks, replace(self))
        object.__setattr__(self, "_viewed", quantized_view)
        return quantized_view

    def _widened(self) -> ArrayView:
        """Return the view of new memory with the numbers, without the array's only scale; blocks are whole."""
        if self._has_scales:
            values = self._values(self.scale)
        else:
            values = cast(self._values(1.0), self._row.widened.label)
        return library_of(values).view(values)

    def _stored(self) -> tuple[ArrayView, ...]:
        """Return the views of codes and scales."""
        return tuple(codes_view(x) for x in self._parts if x is not None)

    def _values(self, scale: Any) -> Any:
        """Return the numbers in float32 times a scale, padded, with the axis of the blocks last, contiguous.

        The array is NumPy's in host memory.
        """
        row = self._row.of_length(self.shape[self.axis])
        on_host = device_of(self.codes).is_host
        xp = np
        if not on_host:
            xp = array_module(self.codes)
        codes, scales, zeros = self._parts
        if on_host:
            codes, scales, zeros = (None if x is None else np.asarray(x) for x in self._parts)
        codes_per_block = (row.block or 1) * row.bits // 8
        count = prod(codes.shape) // codes_per_block
        codes = codes.reshape((count, codes_per_block))
        numbers = None
        if row.looked_up:
            numbers = np.array(numbers_of_codes(row.looked_up), np.float32)
            numbers = numbers if on_host else adopted(numbers, self.codes)
        lengths, _, padded = axis_layout(self.shape, self.axis, row)
        of_blocks = None
        if not isinstance(scale, float):
            of_blocks = self._scale_of_vectors()
            of_blocks = np.asarray(of_blocks) if on_host else of_blocks
            of_blocks = xp.broadcast_to(
                of_blocks[..., None], (*lengths, count // max(prod(lengths), 1))
            )
        values = []
        with np.errstate(all="ignore"):
            for i in ranges(count, row, xp):
                of_scales = part_of(scales, i, count)
                of_zeros = part_of(zeros, i, count)
                if of_blocks is not None:
                    scale = part_of(of_blocks, i, count)
                values.append(
                    block_codes.decode(codes[i], of_scales, of_zeros, row, scale, xp, numbers)
                )
        return joined(values, (*lengths, padded), xp)

    def __repr__(self) -> str:
        return (
            f"QuantizedArray({self.format} {self.shape}, axis {self.axis}, {self.nbytes:,} bytes)"
        )

    def __reduce__(self) -> Any:
        codes, scales, zeros = self._parts
        return QuantizedArray, (
            codes,
            scales,
            self.format,
            self.shape,
            self.axis,
            self.scale,
            zeros,
        )


def quantized_array(
    x: Any, shape: Shape, row: BlockFormat, axis: int, stored: Sequence[Any], scale: Any
) -> QuantizedArray:
    """Return codes and scales, in host memory or of the library of ``x``, as arrays of this library."""
    parts = [None if part is None else adopted(part, x) for part in stored]
    codes, scales, zeros = (*parts, None, None)[:3]
    return QuantizedArray(codes, scales, row.name, shape, axis, scale, zeros)


def parse_format(name: str | Format) -> BlockFormat:
    """Return the format of this name or text, in any case, or value; raise DTypeError if there is none."""
    if isinstance(name, Format):
        return stored_format(name)
    known = (*BLOCK_FORMATS, *NAMED)
    if isinstance(name, str):
        text = name.strip().lower()
        if text in BLOCK_FORMATS:
            return BLOCK_FORMATS[text]
        if text in NAMED:
            return stored_format(NAMED[text])
        if ":" in text:
            return stored_format(Format.parse(text))
    raise DTypeError(
        f"format {quoted(name)} is not a narrow format; choose one of: {', '.join(known)}, or pass a lowprec.Format"
        f"{did_you_mean(name, known)}"
    )


def int4(group: int, *, symmetric: bool) -> BlockFormat:
    """Return the format of int4 with groups of this length; raise SettingError for a length that is not possible."""
    if group not in GROUPS:
        raise SettingError(
            f"group of int4 is {', '.join(map(str, GROUPS[:-1]))} or {GROUPS[-1]}, got {quoted(group)}"
        )
    elements = INT4_CODES if symmetric else UINT4_CODES
    return replace(BLOCK_FORMATS["int4"], block=int(group), elements=elements)


def checked_axis(axis: int, ndim: int) -> int:
    try:
        return int(normalize_axis_index(axis, ndim))
    except (TypeError, ValueError) as error:
        raise ShapeError(f"axis: {error}") from None


def _checked_scale(scale: Any, row: BlockFormat, others: Shape) -> Any:
    """Return the scale of an array, 1 for a missing one that the format does not need; raise SettingError.

    One with axes has the leading ones of the ``others``.
    """
    shape = tuple(getattr(scale, "shape", ()))
    if shape:
        if shape != others[: len(shape)]:
            raise ShapeError(
                f"scale of shape {shape} has not the leading axes of {others}, the axes of the array without that of "
                "the blocks"
            )
        scale = _checked_part("scale", scale, is_float=True)
        if not array_module(scale).all((scale > 0) & (scale < inf)):
            raise SettingError(f"scales of {row.name} are positive numbers, got others")
        return scale
    if not isinstance(scale, numbers.Real) and hasattr(scale, "item"):
        scale = float(scale.item())  # of a scalar array
    is_number = isinstance(scale, numbers.Real)
    if is_number and isnan(scale) and not row.has_scale:
        return 1.0
    if not is_number or not 0 < scale < inf:
        raise SettingError(f"scale of {row.name} is a positive number, got {quoted(scale)}")
    return float(scale)


def _checked_part(name: str, array: Any, is_float: bool) -> Any:
    """Return codes as uint8, or float32 scales, read-only if they are NumPy's; raise DTypeError for others."""
    if array is None:
        return None
    label = dtype_name(array)
    if is_float:
        if label not in ("float32", "float16", "bfloat16"):
            raise DTypeError(f"{name} are float32, float16 or bfloat16, not {label}")
        array = cast(array, "float32")
        if isinstance(array, np.ndarray):
            array = array.view()
            array.flags.writeable = False
        return array
    if not label.startswith(("uint8", "int8", "float8", "float4")):
        raise DTypeError(
            f"{name} are uint8, or another type of 8 bits with these bits, not {label}"
        )
    if not isinstance(array, np.ndarray):
        if label == "uint8":
            return array
        return array.view(array_module(array).uint8)
    array = array.view(np.uint8)
    array.flags.writeable = False
    return array


def codes_view(codes: Any) -> ArrayView:
    """Return the view of codes or scales, of uint8 as int8, a type of which there are views."""
    if dtype_name(codes) == "float32":
        return library_of(codes).view(codes)
    if device_of(codes).is_host:
        bits = np.asarray(codes).view(np.int8)
    else:
        bits = codes.view(array_module(codes).int8)
    return library_of(bits).view(bits)


def adopted(array: Any, like: Any) -> Any:
    """Return a NumPy array on the same memory as an array of the library of ``like``; others are returned unchanged."""
    if not isinstance(array, np.ndarray) or library_of(like).name in ("numpy", "dlpack"):
        return array
    device = like.device if getattr(like, "committed", True) else None  # committed: JAX only
    return array_module(like).asarray(array, device=device)
