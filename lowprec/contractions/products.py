"""Contractions on top of :func:`lowprec.matmul`: einsum, tensordot, vecdot and linear, in the caller's library.

Axes are arranged by the library's own functions (permute, reshape, diagonal), which the library traces and
differentiates. Every sum is a matrix product. The sum over an axis of one operand alone is a product with ones, because
that adds 16-bit numbers in FP32.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from math import prod
from operator import index
from typing import Any

from lowprec.arrays import library_of
from lowprec.arrays.dask_library import check_known_shape
from lowprec.arrays.libraries import promoted
from lowprec.arrays.namespaces import Namespace, cast, dtype_label, namespace_of
from lowprec.arrays.prepared_view import Prepared
from lowprec.arrays.signatures import of_first, of_second
from lowprec.contractions.recipes import Step, recipe
from lowprec.core.arguments import parse_out_dtype, rename
from lowprec.core.dispatch import matmul
from lowprec.errors import ArrayError, DeviceError, DTypeError, ShapeError, quoted
from lowprec.formats import OPERAND_DTYPES, dtype_from_name, operand_names, promote
from lowprec.modes import ActivationName, BoundName, MathMode, ModeName, Recipe


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
def tensordot(
    a: Any,
    b: Any,
    /,
    axes: int | tuple[Any, Any] = 2,
    *,
    out_dtype: Any = None,
    math_mode: ModeName | MathMode | Recipe | None = None,
    rtol: float | None = None,
    bound: BoundName | None = None,
    k_chunk: int | None = None,
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
    xp, yp = _namespace("a", a), _namespace("b", b)
    summed_a, summed_b = _paired_axes(axes, tuple(a.shape), tuple(b.shape))
    free_a = [i for i in range(len(a.shape)) if i not in summed_a]
    free_b = [i for i in range(len(b.shape)) if i not in summed_b]
    shape = tuple(a.shape[i] for i in free_a) + tuple(b.shape[i] for i in free_b)
    k = prod([a.shape[i] for i in summed_a])  # of lists, which PyTorch's compiler can read
    left = xp.arranged(a, (*free_a, *summed_a), (prod([a.shape[i] for i in free_a]), k))
    right = yp.arranged(b, (*summed_b, *free_b), (k, prod([b.shape[i] for i in free_b])))
    product = matmul(
        left, right,
        out_dtype=out_dtype, math_mode=math_mode, rtol=rtol, bound=bound, k_chunk=k_chunk,
    )  # fmt: skip
    return xp.reshaped(product, shape)


def _paired_axes(axes: Any, a: tuple[int, ...], b: tuple[int, ...]) -> tuple[list[int], list[int]]:
    if hasattr(axes, "__index__"):
        count = index(axes)
        if not 0 <= count <= min(len(a), len(b)):
            raise ShapeError(
                f"tensordot: axes={count} for operands of shapes {a} and {b}; it is from 0 to {min(len(a), len(b))}"
            )
        pairs = [*range(len(a) - count, len(a))], [*range(count)]
    else:
        try:
            of_a, of_b = axes
        except (TypeError, ValueError):
            raise ShapeError(f"tensordot: axes is a number or a pair of sequences, got {quoted(axes)}") from None
        pairs = _axes(of_a, a, "a"), _axes(of_b, b, "b")
    lengths = [a[i] for i in pairs[0]], [b[i] for i in pairs[1]]
    if lengths[0] != lengths[1]:
        raise ShapeError(
            f"tensordot: axes {pairs[0]} of a, shape {a}, have lengths {lengths[0]}, and axes {pairs[1]} of b, shape "
            f"{b}, have {lengths[1]}; they are summed in pairs"
        )
    return pairs


def _axes(axes: Any, shape: tuple[int, ...], name: str) -> list[int]:
    given = [axes] if not isinstance(axes, Iterable) else axes
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
def vecdot(
    a: Any,
    b: Any,
    /,
    *,
    axis: int = -1,
    out_dtype: Any = None,
    math_mode: ModeName | MathMode | Recipe | None = None,
    rtol: float | None = None,
    bound: BoundName | None = None,
    k_chunk: int | None = None,
) -> Any:
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
    xp, yp = _namespace("a", a), _namespace("b", b)
    axis = _axis(axis, "vecdot")
    least = min(len(a.shape), len(b.shape))
    if not -least <= axis <= -1 and not (axis >= 0 and axis < len(a.shape) == len(b.shape)):
        raise ShapeError(
            f"vecdot: no axis {axis} in shapes {tuple(a.shape)} and {tuple(b.shape)}; it is counted from the end, "
            f"from -{least} to -1"
        )
    left, right = xp.last(a, axis), yp.last(b, axis)
    row = xp.reshaped(xp.conjugated(left), (*left.shape[:-1], 1, left.shape[-1]))
    column = yp.reshaped(right, (*right.shape, 1))
    try:
        product = matmul(
            row, column,
            out_dtype=out_dtype, math_mode=math_mode, rtol=rtol, bound=bound, k_chunk=k_chunk,
        )  # fmt: skip
    except ShapeError:
        shapes = f"shapes {tuple(a.shape)} and {tuple(b.shape)}"
        if left.shape[-1] != right.shape[-1]:
            lengths = f"{left.shape[-1]} and {right.shape[-1]} numbers"
            raise ShapeError(f"vecdot: axis {axis} of {shapes} has {lengths}") from None
        pairs = zip(left.shape[-2::-1], right.shape[-2::-1], strict=False)
        if any(1 not in pair and pair[0] != pair[1] for pair in pairs):
            raise ShapeError(f"vecdot: {shapes} do not broadcast apart from axis {axis}") from None
        raise
    return product[..., 0, 0]


@of_first
def linear(
    x: Any,
    weight: Any,
    /,
    bias: Any = None,
    *,
    activation: ActivationName | None = None,
    out_dtype: Any = None,
    math_mode: ModeName | MathMode | Recipe | None = None,
    rtol: float | None = None,
    bound: BoundName | None = None,
    k_chunk: int | None = None,
) -> Any:
    """Return ``activation(x @ weight^T + bias)``, the product of PyTorch's layers.

    Parameters
    ----------
    x : array, shape (..., k)
    weight : array or PreparedOperand, shape (n, k)
    bias : array, shape (n,), optional
    activation, out_dtype, math_mode, rtol, bound, k_chunk
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
    modes = {"math_mode": math_mode, "rtol": rtol, "bound": bound, "k_chunk": k_chunk}
    return multiply_transposed(matmul, x, weight, bias, {"activation": activation, "out_dtype": out_dtype, **modes})


def multiply_transposed(multiply: Any, x: Any, weight: Any, bias: Any, options: dict[str, Any]) -> Any:
    """Return the product of :func:`linear` by a matmul function."""
    xp = None if isinstance(weight, Prepared) else _namespace("weight", weight)
    if len(weight.shape) != 2:
        raise ShapeError(f"linear: the weight has shape (n, k), got {tuple(weight.shape)}")
    transposed = weight.T if xp is None else xp.permuted(weight, (1, 0))
    try:
        return multiply(x, transposed, bias=bias, **options)
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
def einsum(
    subscripts: str,
    /,
    *operands: Any,
    optimize: str | bool | Sequence[Sequence[int]] = "auto",
    out_dtype: Any = None,
    math_mode: ModeName | MathMode | Recipe | None = None,
    rtol: float | None = None,
    bound: BoundName | None = None,
    k_chunk: int | None = None,
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
    if not operands or not isinstance(subscripts, str):
        raise ShapeError('einsum takes subscripts and then the operands, as einsum("ij,jk->ik", a, b)')
    for i, operand in enumerate(operands):
        _namespace(f"operands[{i}]", operand)
    shapes = tuple([_sizes(operand) for operand in operands])
    try:
        order = optimize if isinstance(optimize, str | bool) else tuple(map(tuple, optimize))
    except TypeError:
        raise ShapeError(f"einsum: optimize is a name, a bool or a sequence of pairs, got {quoted(optimize)}") from None
    steps = _steps(subscripts, shapes, order)
    if len(operands) == 1 and out_dtype is None and not steps[0].sums_an_operand:
        return steps[0].run({0: operands[0]}, matmul, "", "")  # a view, of any element type
    operands = promoted(operands)
    labels = tuple([dtype_label(operand.dtype) for operand in operands])
    sums = len(operands) > 1 and any(step.sums_an_operand for step in steps)
    if (len(steps) > 1 or sums) and all(label.startswith("float8") for label in labels):
        labels = ("bfloat16",) * len(labels)  # which represents these numbers, and the result of the first product
    common, default, between, out, wide = _types(labels, out_dtype)
    if common in _8_BITS and (len(steps) > 1 or sums):
        raise DTypeError(
            f"einsum: subscripts {quoted(subscripts)} of {common} operands need more than one product, and the "
            f"{default} result of the first is not multiplied by {common}; convert the operands to float32 or float64"
        )

    def multiply(x: Any, y: Any, dtype: str) -> Any:
        plain = dtype_label(x.dtype) == dtype_label(y.dtype) == common
        return matmul(
            x, y,
            out_dtype=None if plain and dtype == default else dtype,
            # No mode acts on 16-bit operands, so none acts on float32 results between them.
            math_mode=math_mode if plain or rtol is not None else "fp32",
            rtol=rtol, bound=bound, k_chunk=k_chunk,
        )  # fmt: skip

    values = {i: x if common in _8_BITS else cast(x, common) for i, x in enumerate(operands)}
    result: Any = None
    names = [f"operands[{i}]" for i in range(len(operands))]  # of intermediate results too: their first operand
    for number, step in enumerate(steps, len(operands)):
        last = number == len(operands) + len(steps) - 1
        names.append(names[step.takes[0]])
        try:
            result = values[number] = step.run(values, multiply, out if last else between, wide)
        except (ArrayError, DTypeError, DeviceError) as error:
            rename(error, {"a": names[step.takes[0]], "b": names[step.takes[-1]]})
            raise
    return result if dtype_label(result.dtype) == out else cast(result, out)


#: Two operands of these types are multiplied without promotion.
_8_BITS = frozenset(d.label for d in OPERAND_DTYPES if d.bits == 8)


def _types(labels: tuple[str, ...], out_dtype: Any) -> tuple[str, str, str, str, str]:
    """Return five types: of the promoted operands, default result, intermediate results, result, and accumulator."""
    dtypes = []
    for i, label in enumerate(labels):
        try:
            dtypes.append(dtype_from_name(label))
            if not dtypes[i].results:
                raise DTypeError(f"dtype {label} is not supported; supported: {operand_names()}")
        except DTypeError as error:
            error.argument = f"operands[{i}]"
            raise
    float8 = all(d.is_float8 for d in dtypes)
    common = dtypes[0] if float8 else functools.reduce(promote, dtypes)
    default = common.results[0]
    out = default if out_dtype is None else parse_out_dtype(out_dtype)
    if out not in common.results:
        choices = " or ".join(map(str, common.results))
        raise DTypeError(f"out_dtype {out} is not supported for operands of {common}; supported: {choices}")
    between = out if out.bits > default.bits else default
    return common.label, default.label, between.label, out.label, common.accumulator.label


_types._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _sizes(operand: Any) -> tuple[int, ...]:
    """Return a shape as integers, also in a PyTorch graph, where sizes may be symbols that int() keeps."""
    try:
        return tuple([len(range(n)) for n in operand.shape])
    except TypeError:
        raise ShapeError(
            f"einsum: its steps depend on the sizes, and some of shape {tuple(operand.shape)} are only symbols; use "
            "matmul or tensordot"
        ) from None


def _steps(subscripts: str, shapes: tuple[tuple[int, ...], ...], order: Any) -> tuple[Step, ...]:
    return recipe(subscripts, shapes, order)


_steps._dynamo_marked_constant = True  # type: ignore[attr-defined]  # PyTorch's compiler calls it, and reads the result
