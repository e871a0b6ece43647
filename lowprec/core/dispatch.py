"""``matmul``: bind the arguments, resolve the mode, run the product.

A repeated call (same device, dtypes, shapes, strides, mode and epilogue) gets its executor from a cache.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

from lowprec import policy
from lowprec.arrays.signatures import of_first
from lowprec.core.call import bind, run
from lowprec.core.tolerance import mode_within
from lowprec.modes import ActivationName, BoundName, MathMode, ModeName, Recipe
from lowprec.util.tracing import is_traced

F = TypeVar("F", bound=Callable[..., Any])


def _without_defaults(function: F) -> F:
    """Return ``matmul`` with a path for calls with a mode alone, which saves 0.2 us of defaults and checks of them."""

    @functools.wraps(function)
    def matmul(a: Any, b: Any, /, **keywords: Any) -> Any:
        if is_traced():  # after a graph break in the caller
            return _traced_matmul(a, b, **keywords)
        mode = keywords.pop("math_mode", None) if keywords else None
        return function(a, b, math_mode=mode, **keywords) if keywords else run(bind(a, b), policy.resolve(mode))

    return cast(F, matmul)


@of_first
@_without_defaults
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
    math_mode: ModeName | MathMode | Recipe | None = None,
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
        Addend. Pass its factor ``beta`` too, which is 0 by default.
    alpha : number
        Factor of the product. If it is 0, the operands are not read.
    beta : number
        Factor of ``c``. If it is 0, ``c`` is not read.
    bias : array, shape (n,), optional
        Added to each row. int8 or int32 for int8 operands; the sum saturates at the int32 range.
    activation : {"relu", "gelu"}, optional
        ``"gelu"`` is the tanh form.
    out_dtype : dtype or str, optional
        dtype of the result; by default the operands' common dtype, int32 for int8 and bfloat16 for float8. 16-bit
        operands may give float32, float32 operands a 16-bit type, float8 operands any of these and float8: rounded to
        nearest even, NaN (E4M3) or Inf (E5M2) beyond the range.
    math_mode : str, MathMode or Recipe, optional
        Precision of float32 and complex64 products, in modes that quantise of float32, float16 and bfloat16 products;
        see the mode table. Overrides ``with math_mode(...)``. Only
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
    plain = out is c is bias is activation is out_dtype is scale_a is scale_b is k_chunk is None
    if plain and type(alpha) is type(beta) is float and alpha == 1.0 and beta == 0.0:
        call = bind(a, b)
    else:
        call = bind(
            a, b, out=out, c=c, alpha=alpha, beta=beta, bias=bias, activation=activation, out_dtype=out_dtype,
            k_chunk=k_chunk, scale_a=scale_a, scale_b=scale_b,
        )  # fmt: skip
    if rtol is None and bound is None:
        return run(call, policy.resolve(math_mode))
    return run(call, mode_within(call, rtol, math_mode, bound)[0])


def _traced_matmul(a: Any, b: Any, /, **keywords: Any) -> Any:
    """Replace :func:`matmul` where PyTorch's compiler traces the caller."""
    from lowprec.torch.functions import traced_matmul

    return traced_matmul(a, b, **keywords)


matmul._torchdynamo_inline = _traced_matmul  # type: ignore[attr-defined]
