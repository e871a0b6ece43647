"""``quantize``: arrays as 8-bit and 4-bit codes, by the compiled library in host memory, otherwise by their library."""

from __future__ import annotations

from typing import Any, get_args

from lowprec.arrays.encoding import encoded, encoded_by_rule
from lowprec.arrays.libraries import library_of
from lowprec.arrays.namespaces import dtype_name
from lowprec.arrays.quantized import (
    QuantizedArray,
    checked_axis,
    int4,
    parse_format,
    part_shapes,
    quantized_array,
)
from lowprec.backends.cpu import quantizing
from lowprec.errors import DTypeError, SettingError, quoted
from lowprec.formats import FLOAT8_E8M0FNU, FormatName
from lowprec.recipes import ScaleRule
from lowprec.rounding_rules import Format
from lowprec.util.tracing import uncompiled

_ACCEPTED = ("float32", "float64", "float16", "bfloat16")


@uncompiled
def quantize(
    x: Any,
    /,
    format: FormatName | Format,  # noqa: A002 - the usual term
    axis: int = -1,
    *,
    scale_rule: ScaleRule = "floor",
    group: int | None = None,
    symmetric: bool = True,
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
    format : str or Format
        - ``"mxfp8"``, ``"mxfp4"``: E4M3 or E2M1 in blocks of 32 with a power of two (E8M0) as scale;
        - ``"nvfp4"``: E2M1 in blocks of 16 with an E4M3 scale, and a float32 scale of the array;
        - ``"fp8"``: E4M3 with a float32 scale of the array;
        - ``"fp8_rows"``, ``"int8"``: E4M3, or integers from -127 to 127, with a float32 scale for each vector along the
          axis;
        - ``"int4"``: integers from -8 to 7, or from 0 to 15, with a float32 scale for each group;
        - a :class:`lowprec.Format`, its text or its name, such as ``"mxfp6"``: products read the numbers in float32 or
          bfloat16. float64 is rounded to float32 first, and elements without NaN and with float32 scales refuse numbers
          that are not finite.
    axis : int
        Axis that is divided into blocks; of an operand, the axis that is summed over.
    scale_rule : {"floor", "rceil", "even"}
        Scale of a block with a power of two: the power of two by which the largest magnitude gets the
        exponent of the format's largest number, as in the specification, which clips up to 1/8 (mxfp8) or 1/4 (mxfp4)
        of it; the least power of two that clips nothing, as in cuBLAS's conversion and TransformerEngine; or the first
        of the largest magnitude as it is rounded to the bits of an element, as in compressed-tensors and torchao.
    group : {32, 64, 128}, optional
        Numbers of ``"int4"`` with a common scale, 64 by default.
    symmetric : bool
        False for affine ``"int4"``: ``(code - zero) * scale``, where each group has its code of zero.

    Returns
    -------
    QuantizedArray
        With arrays of the library of ``x`` on its device; of NumPy if the library is known only by DLPack.

    Raises
    ------
    ArrayError, DTypeError, ShapeError
        ``x`` cannot be read in place (a tracer, a tensor that requires grad), has another element type or not this
        axis, or a NaN that the format lacks; or the format is unknown (DTypeError).
    SettingError
        The rule is unknown or has no effect, or the text is not a format.

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
    if row.name == "int4":
        row = int4(row.block if group is None else group, symmetric=symmetric)
    elif group is not None or not symmetric:
        raise SettingError(
            f"group and symmetric are arguments of the format int4; omit them for {row.name}"
        )
    if scale_rule not in get_args(ScaleRule):
        raise SettingError(f"scale_rule is 'floor', 'rceil' or 'even', got {quoted(scale_rule)}")
    if scale_rule != "floor" and row.scales is not FLOAT8_E8M0FNU:
        raise SettingError(
            f"scale_rule={scale_rule!r} has no effect on {row.name}, whose scales are not powers of two; omit it"
        )
    library = library_of(x)
    if (label := dtype_name(x)) not in _ACCEPTED:
        raise DTypeError(
            f"quantize takes arrays of {', '.join(_ACCEPTED)}, not {label}; convert it to one of these"
        )
    view = library.view(x)
    axis = checked_axis(axis, view.ndim)
    if quantizing.encodes(view, row):
        of_codes, of_scales, _ = part_shapes(view.shape, axis, row)
        stored, scale = quantizing.encode(view, axis, row, scale_rule, (of_codes, of_scales))
        return quantized_array(x, view.shape, row, axis, stored, scale)
    if row.looked_up:
        return encoded_by_rule(x, view, row, axis, scale_rule)
    return encoded(x, view, row, axis, scale_rule)
