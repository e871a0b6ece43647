"""Contractions on top of :func:`lowprec.matmul`: einsum, tensordot, vecdot and linear, in the caller's library.

Axes are arranged by the library's own functions (permute, reshape, diagonal), which the library traces and
differentiates. Every sum is a matrix product. The sum over an axis of one operand alone is a product with ones, because
that adds 16-bit numbers in FP32.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod
from operator import index
from typing import TYPE_CHECKING, Any

from lowprec.arrays import library_of
from lowprec.arrays.dask_library import check_known_shape
from lowprec.arrays.libraries import promoted
from lowprec.arrays.namespaces import Namespace, cast, dtype_label, namespace_of
from lowprec.arrays.prepared_view import Prepared
from lowprec.arrays.signatures import of_first, of_second
from lowprec.contractions.steps import EIGHT_BITS, EinsumStep, einsum_types, sizes_of, steps_of
from lowprec.core.arguments import rename
from lowprec.core.dispatch import matmul
from lowprec.core.keywords import (
    OF_LAYERS,
    OF_MODES,
    LayerOptions,
    ModeOptions,
    refuse_unknown,
    shows,
)
from lowprec.errors import ArrayError, DeviceError, DTypeError, ShapeError, quoted
from lowprec.util.strides import Shape

if TYPE_CHECKING:
    from typing_extensions import Unpack


def _namespace(name: str, x: Any) -> Namespace:
    try:
        namespace = namespace_of(x)
        if getattr(x, "is_sparse_csr", False):
            library_of(x).view(x)  # raises; PyTorch permutes no axes of these
        check_known_shape(x)
    except (ArrayError, ShapeError) as error:
        error.argument = name
        raise
    return namespace


@of_first
@shows(ModeOptions)
def tensordot(
    a: Any, b: Any, /, axes: int | tuple[Any, Any] = 2, **options: Unpack[ModeOptions]
) -> Any:
    """Return the sum of products over pairs of axes, as ``numpy.tensordot``.

    Parameters
    ----------
    a : array, shape (...)
        Of any library that :func:`~lowprec.matmul` supports.
    b : array, shape (...)
    axes : int or pair of sequences of int
        Number of last axes of ``a`` and first axes of ``b`` to sum over; or the axes of ``a`` and the axes of ``b``,
        paired in order.
    out_dtype, math_mode, rtol, bound, k_chunk
        As for :func:`~lowprec.matmul`.

    Returns
    -------
    array
        The other axes of ``a``, then those of ``b``.

    Raises
    ------
    ShapeError
        An axis does not exist, is listed twice, or differs in length from its counterpart.

    Examples
    --------
    >>> import numpy as np
    >>> tensordot(np.ones((2, 3, 4)), np.ones((4, 3, 5)), axes=((1, 2), (1, 0))).shape
    (2, 5)
    """
    refuse_unknown("tensordot", options, OF_MODES)
    xp = _namespace("a", a)
    yp = _namespace("b", b)
    summed_a, summed_b = _paired_axes(axes, tuple(a.shape), tuple(b.shape))
    free_a = [i for i in range(len(a.shape)) if i not in summed_a]
    free_b = [i for i in range(len(b.shape)) if i not in summed_b]
    rows = [a.shape[i] for i in free_a]  # lists, which PyTorch's compiler can read
    columns = [b.shape[i] for i in free_b]
    k = prod([a.shape[i] for i in summed_a])
    left = xp.arranged(a, (*free_a, *summed_a), (prod(rows), k))
    right = yp.arranged(b, (*summed_b, *free_b), (k, prod(columns)))
    product = matmul(left, right, **options)
    return xp.reshaped(product, (*rows, *columns))


def _paired_axes(axes: Any, a: Shape, b: Shape) -> tuple[list[int], list[int]]:
    if hasattr(axes, "__index__"):
        count = index(axes)
        most = min(len(a), len(b))
        if not 0 <= count <= most:
            raise ShapeError(
                f"tensordot: axes={count} for operands of shapes {a} and {b}; it is from 0 to {most}"
            )
        summed_a = [*range(len(a) - count, len(a))]
        summed_b = [*range(count)]
    else:
        try:
            of_a, of_b = axes
        except (TypeError, ValueError):
            raise ShapeError(
                f"tensordot: axes is a number or a pair of sequences, got {quoted(axes)}"
            ) from None
        summed_a = _axes(of_a, a, "a")
        summed_b = _axes(of_b, b, "b")
    lengths_a = [a[i] for i in summed_a]
    lengths_b = [b[i] for i in summed_b]
    if lengths_a != lengths_b:
        raise ShapeError(
            f"tensordot: axes {summed_a} of a, shape {a}, have lengths {lengths_a}, and axes {summed_b} of b, shape "
            f"{b}, have {lengths_b}; they are summed in pairs"
        )
    return summed_a, summed_b


def _axes(axes: Any, shape: Shape, name: str) -> list[int]:
    given = axes
    if not isinstance(axes, Iterable):
        given = [axes]
    numbers = [_axis(axis, "tensordot") for axis in given]
    if any(not -len(shape) <= axis < len(shape) for axis in numbers):
        raise ShapeError(f"tensordot: {name} of shape {shape} has no axes {numbers}")
    numbers = [axis % len(shape) for axis in numbers]
    if len(set(numbers)) < len(numbers):
        raise ShapeError(f"tensordot: axes {numbers} of {name} contain an axis twice")
    return numbers


def _axis(axis: Any, function: str) -> int:
    try:
        return index(axis)
    except TypeError:
        raise ShapeError(f"{function}: axes are integers, got {quoted(axis)}") from None


@of_first
@shows(ModeOptions)
def vecdot(a: Any, b: Any, /, *, axis: int = -1, **options: Unpack[ModeOptions]) -> Any:
    """Return dot products along an axis, the first factor conjugated (Array API).

    Parameters
    ----------
    a : array, shape (..., k)
    b : array, shape (..., k)
        The other axes broadcast.
    axis : int
        The axis of the vectors, counted from the end: -N to -1, where N is the smaller number of axes.
    out_dtype, math_mode, rtol, bound, k_chunk
        As for :func:`~lowprec.matmul`.

    Returns
    -------
    array, shape (...)

    Raises
    ------
    ShapeError
        The axis does not exist, or the shapes do not match.

    Examples
    --------
    >>> import numpy as np
    >>> vecdot(np.array([[1.0, 2.0], [3.0, 4.0]]), np.array([1.0, 10.0]))
    array([21., 43.])
    """
    refuse_unknown("vecdot", options, OF_MODES)
    xp = _namespace("a", a)
    yp = _namespace("b", b)
    axis = _axis(axis, "vecdot")
    least = min(len(a.shape), len(b.shape))
    counts_alike = len(a.shape) == len(b.shape)
    if not -least <= axis <= -1 and not (counts_alike and 0 <= axis < least):
        raise ShapeError(
            f"vecdot: no axis {axis} in shapes {tuple(a.shape)} and {tuple(b.shape)}; it is counted from the end, "
            f"from -{least} to -1"
        )
    left = xp.last(a, axis)
    right = yp.last(b, axis)
    *batch, length = left.shape
    row = xp.reshaped(xp.conjugated(left), (*batch, 1, length))
    column = yp.reshaped(right, (*right.shape, 1))
    try:
        product = matmul(row, column, **options)
    except ShapeError:
        shapes = f"shapes {tuple(a.shape)} and {tuple(b.shape)}"
        if length != right.shape[-1]:
            lengths = f"{length} and {right.shape[-1]} numbers"
            raise ShapeError(f"vecdot: axis {axis} of {shapes} has {lengths}") from None
        pairs = zip(left.shape[-2::-1], right.shape[-2::-1], strict=False)
        if any(1 not in pair and pair[0] != pair[1] for pair in pairs):
            raise ShapeError(f"vecdot: {shapes} do not broadcast apart from axis {axis}") from None
        raise
    return product[..., 0, 0]


@of_first
@shows(LayerOptions)
def linear(x: Any, weight: Any, /, bias: Any = None, **options: Unpack[LayerOptions]) -> Any:
    """Return ``activation(x @ weight^T + bias)``, the product of PyTorch's layers.

    Parameters
    ----------
    x : array, shape (..., k)
    weight : array or PreparedOperand, shape (n, k)
    bias : array, shape (n,), optional
    activation, out_dtype, math_mode, rtol, bound, k_chunk, backward_mode
        As for :func:`~lowprec.matmul`.

    Returns
    -------
    array, shape (..., n)

    Raises
    ------
    ShapeError
        ``weight`` does not have two axes, or the shapes do not match.

    Examples
    --------
    >>> import numpy as np
    >>> linear(np.array([1.0, 2.0]), np.array([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]]))
    array([1., 2., 3.])
    """
    refuse_unknown("linear", options, OF_LAYERS)
    return _linear(x, weight, bias, {**options})


def _linear(x: Any, weight: Any, bias: Any, options: Any) -> Any:
    xp = None
    if not isinstance(weight, Prepared):
        xp = _namespace("weight", weight)
    if len(weight.shape) != 2:
        raise ShapeError(f"linear: the weight has shape (n, k), got {tuple(weight.shape)}")
    if xp is None:
        transposed = weight.T
    else:
        transposed = xp.permuted(weight, (1, 0))
    try:
        return matmul(x, transposed, bias=bias, **options)
    except ShapeError:
        n, k = weight.shape
        if not x.shape or x.shape[-1] != k:
            subject = f"x has shape {tuple(x.shape)}"
            raise ShapeError(f"linear: {subject}, but the weight takes (..., {k})") from None
        if bias is not None and tuple(bias.shape) != (n,):
            subject = f"bias has shape {tuple(bias.shape)}"
            raise ShapeError(f"linear: {subject}, but the weight gives ({n},)") from None
        raise
    except (ArrayError, DTypeError, DeviceError) as error:
        rename(error, {"a": "x", "b": "weight"})
        raise


@of_second
@shows(ModeOptions)
def einsum(
    subscripts: str,
    /,
    *operands: Any,
    optimize: str | bool | Sequence[Sequence[int]] = "auto",
    **options: Unpack[ModeOptions],
) -> Any:
    """Return a sum of products in Einstein's notation, as ``numpy.einsum``.

    With three or more operands, opt_einsum finds the order of the products where it is installed, and
    ``numpy.einsum_path`` where it is not. Each step is one matrix product, batched over the axes that both operands
    have and the result keeps. The steps are cached by shapes.

    Parameters
    ----------
    subscripts : str
        For example ``"bij,bjk->bik"``; "..." denotes axes that broadcast.
    *operands : array
        Of libraries that :func:`~lowprec.matmul` accepts together.
    optimize : str, bool or sequence of sequences of int
        Search for the order of the products: ``"auto"``, ``"greedy"``, ``"optimal"``, another name of
        ``opt_einsum.contract_path``, True (``"auto"``), False (from left to right), or the positions of the operands of
        each step, as ``numpy.einsum_path`` returns them.
    out_dtype
        As for :func:`~lowprec.matmul`. Operands are promoted to their common type. Intermediate results have the same
        type, or float32 if that is the ``out_dtype`` of 16-bit operands.
    math_mode, rtol, bound, k_chunk
        As for :func:`~lowprec.matmul`; ``rtol`` bounds the error of each product separately.

    Returns
    -------
    array
        Of the library of the first operand.

    Raises
    ------
    ShapeError
        The subscripts do not match the shapes.
    DTypeError
        The operands have no common type, or are int8 and need more than one product.
    UnsupportedError
        ``optimize`` is a name that only opt_einsum knows, which is not installed.

    Examples
    --------
    >>> import numpy as np
    >>> a, b, c = (np.ones(shape, np.float32) for shape in ((2, 3), (3, 4), (4, 5)))
    >>> einsum("ij,jk,kl->il", a, b, c, math_mode="bf16").shape
    (2, 5)
    """
    refuse_unknown("einsum", options, OF_MODES)
    out_dtype = options.pop("out_dtype", None)
    if not operands or not isinstance(subscripts, str):
        raise ShapeError(
            'einsum takes subscripts and then the operands, as einsum("ij,jk->ik", a, b)'
        )
    for i, operand in enumerate(operands):
        _namespace(f"operands[{i}]", operand)
    shapes = tuple([sizes_of(operand) for operand in operands])
    try:
        order = optimize
        if not isinstance(optimize, str | bool):
            order = tuple(map(tuple, optimize))
    except TypeError:
        raise ShapeError(
            f"einsum: optimize is a name, a bool or a sequence of pairs, got {quoted(optimize)}"
        ) from None
    steps = steps_of(subscripts, shapes, order)
    if len(operands) == 1 and out_dtype is None and not steps[0].sums_an_operand:
        return steps[0].run({0: operands[0]}, matmul, "", "")  # a view, of any element type
    operands = promoted(operands)
    several = len(steps) > 1 or (len(operands) > 1 and any(step.sums_an_operand for step in steps))
    types = _types(subscripts, operands, out_dtype, several)
    return _run(steps, operands, types, options)


def _run(
    steps: tuple[EinsumStep, ...], operands: tuple[Any, ...], types: tuple[str, ...], options: Any
) -> Any:
    """Return the result of the steps; ``types`` are those of :func:`einsum_types`."""
    common, default, between, out, wide = types

    def multiply(x: Any, y: Any, dtype: str) -> Any:
        plain = dtype_label(x.dtype) == dtype_label(y.dtype) == common
        given: Any = {**options}
        if not plain and options.get("rtol") is None:
            # no mode acts on 16-bit operands, so none acts on float32 results between them
            given["math_mode"] = "fp32"
        if not plain or dtype != default:
            given["out_dtype"] = dtype
        return matmul(x, y, **given)

    values: dict[int, Any] = {}
    for i, x in enumerate(operands):
        values[i] = x if common in EIGHT_BITS else cast(x, common)
    last = len(operands) + len(steps) - 1
    result: Any = None
    # of intermediate results too: their first operand
    names = [f"operands[{i}]" for i in range(len(operands))]
    for number, step in enumerate(steps, len(operands)):
        dtype = between
        if number == last:
            dtype = out
        first = names[step.takes[0]]
        second = names[step.takes[-1]]
        names.append(first)
        try:
            result = values[number] = step.run(values, multiply, dtype, wide)
        except (ArrayError, DTypeError, DeviceError) as error:
            rename(error, {"a": first, "b": second})
            raise
    if dtype_label(result.dtype) == out:
        return result
    return cast(result, out)


def _types(
    subscripts: str, operands: tuple[Any, ...], out_dtype: Any, several: bool
) -> tuple[str, ...]:
    """Return the types of :func:`einsum_types` for one product or several."""
    labels = tuple([dtype_label(operand.dtype) for operand in operands])
    if several and all(label.startswith("float8") for label in labels):
        # which represents these numbers, and the result of the first product
        labels = ("bfloat16",) * len(labels)
    types = einsum_types(labels, out_dtype)
    if several and types[0] in EIGHT_BITS:
        raise DTypeError(
            f"einsum: subscripts {quoted(subscripts)} of {types[0]} operands need more than one product, and the "
            f"{types[1]} result of the first is not multiplied by {types[0]}; convert the operands to float32 or "
            "float64"
        )
    return types
