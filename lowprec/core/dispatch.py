"""``matmul``: bind the arguments, resolve the mode, run the product.

A repeated call (same device, dtypes, shapes, strides, mode and epilogue) gets its executor from a cache.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lowprec import policy
from lowprec.arrays.signatures import of_first
from lowprec.core.call import bind, run
from lowprec.core.keywords import OF_PRODUCTS, ProductOptions, refuse_unknown, shows
from lowprec.core.tolerance import mode_of
from lowprec.modes import parse_mode
from lowprec.util.tracing import is_traced

if TYPE_CHECKING:
    from typing_extensions import Unpack


@of_first
@shows(ProductOptions)
def matmul(a: Any, b: Any, /, **options: Unpack[ProductOptions]) -> Any:
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
        Acts on float32 and complex64; quantising modes also on float16 and bfloat16. See the mode table. Overrides
        ``with math_mode(...)``. Only ``fp64_emulated`` acts on float64 and complex128 operands: another mode below FP32
        gives one :class:`LowprecWarning` per process. A mode from a scope or a default gives no warning, because it may
        apply to code with several element types.
    rtol : float, optional
        Choose the cheapest mode that bounds ``|C - AB| / (|A| |B|)``, in Frobenius norms, by this value. The error is
        relative to the norms of the operands, not to elements of the result.
    bound : {"guaranteed", "probable"}, optional
        The bound that ``rtol`` is compared with. The probable bound assumes rounding errors of mean zero; it holds with
        probability 0.999 and grows with the square root of the inner dimension, the guaranteed one in proportion to it.
    k_chunk : int, optional
        For experts: length of the chunks of the inner dimension in which the (leading) product is summed. The default
        chunks keep the truncation error of tensor cores near the error of an FP32 sum.
    backward_mode : str, MathMode or Recipe, optional
        Mode of the two products of the backward pass of PyTorch and JAX; by default the forward product's. A guard that
        is open during the backward pass, in JAX while it is traced, overrides it.
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
    SettingError
        A factor or another argument has an illegal value.
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
    if is_traced():  # after a graph break in the caller
        return _traced_matmul(a, b, **options)
    mode = None
    if options:
        mode = options.pop("math_mode", None)
    if options:
        return _multiply(a, b, mode, options)
    return run(bind(a, b), policy.resolve(mode))


def _multiply(a: Any, b: Any, math_mode: Any, options: Any) -> Any:
    """Return a product with arguments other than the mode."""
    if not OF_PRODUCTS.issuperset(options):
        refuse_unknown("matmul", options, OF_PRODUCTS)
    rtol = options.pop("rtol", None)
    bound = options.pop("bound", None)
    backward = options.pop("backward_mode", None)
    if backward is not None:
        backward = parse_mode(backward, "backward_mode")
    call = bind(a, b, **options)
    if rtol is None and bound is None:
        return run(call, policy.resolve(math_mode), backward)
    resolved, _ = mode_of(call, math_mode, rtol, bound)
    return run(call, resolved, backward)


def _traced_matmul(a: Any, b: Any, /, **keywords: Any) -> Any:
    """Replace :func:`matmul` where PyTorch's compiler traces the caller."""
    from lowprec.torch.functions import traced_matmul

    return traced_matmul(a, b, **keywords)


matmul._torchdynamo_inline = _traced_matmul  # type: ignore[attr-defined]
