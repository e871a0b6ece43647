"""``quantize``: arrays of 8-bit and 4-bit codes with scales."""

from __future__ import annotations

import numbers
import operator
from dataclasses import dataclass, field, replace
from math import inf, isnan, nan, prod
from typing import Any, Literal

import numpy as np
from numpy.lib.array_utils import normalize_axis_index

from lowprec.arrays import block_codes
from lowprec.arrays.dlpack import device_of
from lowprec.arrays.libraries import library_of
from lowprec.arrays.namespaces import array_module, cast, dtype_name
from lowprec.arrays.numpy_library import host_view
from lowprec.arrays.prepared_view import Prepared, QuantizedView
from lowprec.arrays.view import ArrayView
from lowprec.errors import DTypeError, ShapeError, did_you_mean, quoted
from lowprec.formats import BLOCK_FORMATS, BlockFormat, Blocks, DType, FormatName
from lowprec.util.strides import contiguous_strides
from lowprec.util.tracing import uncompiled

_ACCEPTED = ("float32", "float64", "float16", "bfloat16")
#: Numbers that are converted at once in host memory, so that temporary arrays stay in the cache.
_AT_ONCE = 1 << 16


@dataclass(frozen=True, eq=False, repr=False)
class QuantizedArray(Prepared):
    """An array as codes of 8 or 4 bits with scales; see :func:`quantize`.

    :func:`lowprec.matmul` accepts it as either operand. A product with it as ``b`` may store a second copy of the
    codes, in the order in which its kernel reads them. Codes and scales are arrays of one library, and NumPy's are
    read-only. A pickle contains them.

    Parameters
    ----------
    codes, scales : array of uint8, shape (..., bytes) and (..., blocks)
        Codes of the numbers and of the blocks' scales (E8M0 or E4M3; None for ``"fp8"``). The last axis is ``axis`` of
        the original array, padded with zeros to whole blocks. Two codes of 4 bits share a byte, the first in the low
        half.
    format : str
        Name of the format.
    shape, axis : tuple of int, and int
        Shape of the original array, and the axis of the blocks.
    scale : float
        Scale of the whole array, a positive float32 number. Required for ``"nvfp4"`` and ``"fp8"``; 1 for the others.

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
    scale: float = nan
    #: The transpose, and the view of the numbers without the array's scale; made when they are first read.
    _transposed: QuantizedArray | None = field(init=False, default=None)
    _viewed: QuantizedView | None = field(init=False, default=None)

    _description = "a quantised array, which is accepted only as an operand of matmul"
    _remedy = "its dequantize()"

    def __post_init__(self) -> None:
        row, scale = parse_format(self.format), self.scale
        try:
            whole = tuple(map(operator.index, self.shape))
        except TypeError:
            raise ShapeError(f"shape is a tuple of integers, got {quoted(self.shape)}") from None
        fields = {"format": row.name, "shape": whole, "axis": _checked_axis(self.axis, len(whole))}
        if not isinstance(scale, numbers.Real) or not (0 < scale < inf or (isnan(scale) and not row.has_scale)):
            raise DTypeError(f"scale of {row.name} is a positive number, got {quoted(scale)}")
        fields["scale"] = 1.0 if isnan(scale) else float(scale)
        for name, shape in zip(("codes", "scales"), _part_shapes(whole, fields["axis"], row), strict=True):
            array = getattr(self, name)
            fields[name] = array if array is None else _as_bytes(name, array)
            actual = None if array is None else tuple(array.shape)
            if actual != shape:
                raise ShapeError(f"{name} of {row.name} for shape {whole} have shape {shape}, not {actual}")
        for name, value in fields.items():
            object.__setattr__(self, name, value)

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return len(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of codes and scales."""
        return int(self.codes.nbytes) + (0 if self.scales is None else int(self.scales.nbytes))

    @property
    def T(self) -> QuantizedArray:
        """The array with its last two axes exchanged, on the same codes."""
        if self._transposed is not None:
            return self._transposed
        if self.ndim < 2:
            raise ShapeError(f"a quantised array of shape {self.shape} has no transpose; it needs two axes")
        codes, scales, axis, last = self.codes, self.scales, self.axis, self.ndim - 1
        if axis >= last - 1:
            axis = 2 * last - 1 - axis
        else:
            codes, scales = (None if x is None else x.swapaxes(-3, -2) for x in (codes, scales))
        shape = (*self.shape[:-2], self.shape[-1], self.shape[-2])
        object.__setattr__(self, "_transposed", QuantizedArray(codes, scales, self.format, shape, axis, self.scale))
        return self.T

    @uncompiled
    def dequantize(self) -> Any:
        """Return the numbers in float32, as an array of the library of the codes."""
        values = self._values(self.scale)[..., : self.shape[self.axis]]
        xp = np if type(values) is np.ndarray else array_module(values)
        return _adopted(xp.moveaxis(values, -1, self.axis), self.codes)

    @property
    def _like(self) -> Any:
        return self.codes

    @property
    def _view(self) -> QuantizedView:  # type: ignore[override]  # made when it is read
        """The view of the numbers without the array's scale."""
        if self._viewed is not None:
            return self._viewed
        row, last = parse_format(self.format), self.ndim - 1
        codes = codes_view(self.codes)
        others, _, padded = _layout(self.shape, self.axis, row)
        strides = list(contiguous_strides((*others, padded)) if row.block else codes.strides)
        strides.insert(self.axis, strides.pop())
        blocks = Blocks(row.name, self.axis - last - 1)
        dtype = DType.BFLOAT16 if row.block else DType.FLOAT8_E4M3FN
        view = ArrayView(dtype, self.shape, tuple(strides), codes.device, codes.owner, True, codes.address)
        if not row.block and view.device.is_host:
            view = host_view(view.ndarray())
        quantized_view = QuantizedView(view, blocks, replace(self))  # not this object, which refers to the view
        object.__setattr__(self, "_viewed", quantized_view)
        return quantized_view

    def _widened(self) -> ArrayView:
        """Return the view of new memory with the numbers in bfloat16, without the array's scale; blocks are whole."""
        values = cast(self._values(1.0), "bfloat16")
        return library_of(values).view(values)

    def _stored(self) -> tuple[ArrayView, ...]:
        """Return the views of codes and scales."""
        return tuple(codes_view(x) for x in (self.codes, self.scales) if x is not None)

    def _values(self, scale: float) -> Any:
        """Return the numbers in float32 times a scale, padded, with the axis of the blocks last, contiguous.

        The array is NumPy's in host memory.
        """
        row = parse_format(self.format)
        on_host = device_of(self.codes).is_host
        xp = np if on_host else array_module(self.codes)
        codes, scales = (np.asarray(x) if on_host and x is not None else x for x in (self.codes, self.scales))
        count = prod(codes.shape if scales is None else scales.shape)
        codes = codes.reshape((count, (row.block or 1) * row.bits // 8))
        scales = scales if scales is None else scales.reshape((count,))
        with np.errstate(all="ignore"):
            parts = [
                block_codes.decode(codes[i], None if scales is None else scales[i], row, scale, xp)
                for i in _parts(count, row, xp)
            ]
        others, _, padded = _layout(self.shape, self.axis, row)
        return _joined(parts, (*others, padded), xp)

    def __repr__(self) -> str:
        return f"QuantizedArray({self.format} {self.shape}, axis {self.axis}, {self.nbytes:,} bytes)"

    def __reduce__(self) -> Any:
        return QuantizedArray, (self.codes, self.scales, self.format, self.shape, self.axis, self.scale)


@uncompiled
def quantize(
    x: Any,
    /,
    format: FormatName,  # noqa: A002 - the usual term
    axis: int = -1,
    *,
    scale_rule: Literal["floor", "rceil"] = "floor",
) -> QuantizedArray:
    """Return an array in a format of 8 or 4 bits a number, with scales.

    Conversion follows the OCP Microscaling Formats (MX) Specification 1.0, section 6.3, and NVIDIA's description of
    NVFP4. Numbers are rounded to nearest, ties to even, and clipped to the format's largest number; subnormal numbers
    are kept. A block with a NaN or an infinity becomes NaN as a whole, in ``"fp8"`` only that element. float64 is
    rounded once, but infinite beyond float32's range. No gradient is defined.

    Parameters
    ----------
    x : array of float32, float64, float16 or bfloat16, shape (..., n, ...)
        Numbers to quantise.
    format : str
        - ``"mxfp8"``, ``"mxfp4"``: E4M3 or E2M1 in blocks of 32 with a power of two (E8M0) as scale;
        - ``"nvfp4"``: E2M1 in blocks of 16 with an E4M3 scale, and a float32 scale of the array;
        - ``"fp8"``: E4M3 with a float32 scale of the array.
    axis : int
        Axis that is divided into blocks; of an operand, the axis that is summed over.
    scale_rule : {"floor", "rceil"}
        Scale of a block of ``"mxfp8"`` and ``"mxfp4"``: the power of two by which the largest magnitude gets the
        exponent of the format's largest number, as in the specification, which clips up to 1/8 (mxfp8) or 1/4 (mxfp4)
        of it; or the least power of two that clips nothing, as in cuBLAS's conversion and TransformerEngine.

    Returns
    -------
    QuantizedArray
        With arrays of the library of ``x`` on its device; of NumPy if the library is known only by DLPack.

    Raises
    ------
    ArrayError, DTypeError, ShapeError
        ``x`` cannot be read in place (a tracer, a tensor that requires grad), has another element type or not this
        axis; or the format or the rule is unknown (DTypeError).

    Examples
    --------
    >>> import numpy as np
    >>> import lowprec
    >>> x = lowprec.quantize(np.array([0.3, -1.0, 2.6, 6.1], np.float32), "mxfp4")
    >>> x.dequantize()
    array([ 0.5, -1. ,  3. ,  6. ], dtype=float32)
    >>> x.codes.shape, x.scales.tolist()  # a block is padded to 32 codes; 127 is 2^0
    ((16,), [127])
    """
    row = parse_format(format)
    if scale_rule not in ("floor", "rceil"):
        raise DTypeError(f"scale_rule is 'floor' or 'rceil', got {quoted(scale_rule)}")
    library = library_of(x)
    if (label := dtype_name(x)) not in _ACCEPTED:
        raise DTypeError(f"quantize takes arrays of {', '.join(_ACCEPTED)}, not {label}; convert it to one of these")
    view = library.view(x)
    axis = _checked_axis(axis, view.ndim)
    xp, source = (np, view.ndarray()) if view.device.is_host else (array_module(x), x)
    source = _blocks(xp.moveaxis(source, axis, -1), row, xp)
    with np.errstate(all="ignore"):
        parts = [source[i] for i in _parts(len(source), row, xp)]
        scale = block_codes.array_scale(parts, row, xp)
        encoded = zip(*(block_codes.encode(part, row, scale, xp, scale_rule) for part in parts), strict=True)
    shapes = _part_shapes(view.shape, axis, row)
    stored = [_adopted(_joined(parts, shape or (), xp), x) for parts, shape in zip(encoded, shapes, strict=False)]
    return QuantizedArray(stored[0], stored[1] if row.scales else None, row.name, view.shape, axis, scale)


def parse_format(name: str) -> BlockFormat:
    """Return the format of this name, in any case; raise DTypeError if there is none."""
    row = BLOCK_FORMATS.get(name.strip().lower()) if isinstance(name, str) else None
    if row is None:
        raise DTypeError(
            f"format {quoted(name)} is not a narrow format; choose one of: {', '.join(BLOCK_FORMATS)}"
            f"{did_you_mean(name, BLOCK_FORMATS)}"
        )
    return row


def _checked_axis(axis: int, ndim: int) -> int:
    try:
        return int(normalize_axis_index(axis, ndim))
    except (TypeError, ValueError) as error:
        raise ShapeError(f"axis: {error}") from None


def _as_bytes(name: str, array: Any) -> Any:
    """Return codes as uint8, read-only if they are NumPy's; raise DTypeError for other numbers than codes."""
    label = dtype_name(array)
    if not label.startswith(("uint8", "int8", "float8", "float4")):
        raise DTypeError(f"{name} are uint8, or another type of 8 bits with these bits, not {label}")
    if not isinstance(array, np.ndarray):
        return array if label == "uint8" else array.view(array_module(array).uint8)
    array = array.view(np.uint8)
    array.flags.writeable = False
    return array


def _joined(parts: Any, shape: tuple[int, ...], xp: Any) -> Any:
    """Return the parts as one array in row-major order, which elementwise functions of NumPy need not keep."""
    joined = xp.concatenate(parts).reshape(shape)
    return np.ascontiguousarray(joined) if xp is np else joined


def _layout(shape: tuple[int, ...], axis: int, row: BlockFormat) -> tuple[tuple[int, ...], int, int]:
    """Return the lengths of the other axes, the number of blocks along the axis, and its length when padded."""
    blocks = -(-shape[axis] // row.block) if row.block else 0
    return (*shape[:axis], *shape[axis + 1 :]), blocks, blocks * row.block or shape[axis]


def _part_shapes(shape: tuple[int, ...], axis: int, row: BlockFormat) -> tuple[tuple[int, ...], tuple[int, ...] | None]:
    others, blocks, padded = _layout(shape, axis, row)
    return (*others, padded * row.bits // 8), ((*others, blocks) if row.scales else None)


def _blocks(x: Any, row: BlockFormat, xp: Any) -> Any:
    """Return ``x`` in shape (blocks, elements), its last axis padded with zeros; blocks of 1 without blocks."""
    block = row.block or 1
    if missing := -x.shape[-1] % block:
        zeros = xp.broadcast_to(xp.zeros_like(x[..., :1]), (*x.shape[:-1], missing))
        x = xp.concatenate((x, zeros), -1)
    return x.reshape((prod(x.shape) // block, block))


def _parts(count: int, row: BlockFormat, xp: Any) -> list[slice]:
    """Return the ranges of blocks that are converted at once; one if there are no blocks."""
    step = _AT_ONCE // (row.block or 1) if xp is np else max(count, 1)
    return [slice(i, i + step) for i in range(0, max(count, 1), step)]


def codes_view(codes: Any) -> ArrayView:
    """Return the view of codes or scales as int8, a type of which there are views."""
    on_host = device_of(codes).is_host
    bits = (np.asarray(codes) if on_host else codes).view(np.int8 if on_host else array_module(codes).int8)
    return library_of(bits).view(bits)


def _adopted(array: Any, like: Any) -> Any:
    """Return a NumPy array on the same memory as an array of the library of ``like``; others are returned unchanged."""
    if not isinstance(array, np.ndarray) or library_of(like).name in ("numpy", "dlpack"):
        return array
    device = like.device if getattr(like, "committed", True) else None  # committed: JAX only
    return array_module(like).asarray(array, device=device)
