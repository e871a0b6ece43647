"""Contractions on top of :func:`lowprec.matmul`: einsum, tensordot, vecdot and linear, in the caller's library.

Each function arranges axes by the library's own functions (permute, reshape, diagonal), and every sum is a matrix
product: a sum over an axis of one operand alone is a product with ones, so that 16-bit numbers are added in FP32 as
everywhere in lowprec. What is traced or differentiated by the library stays so.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from math import prod
from operator import index
from typing import Any, NamedTuple

from lowprec.arrays.namespaces import namespace_of
from lowprec.dispatch import matmul
from lowprec.errors import ShapeError, UnsupportedError, quoted
from lowprec.modes import MathMode
from lowprec.prepared import PreparedOperand

#: Recipes of contractions that are kept.
_RECIPES = 1024


# -- two operands ---------------------------------------------------------------------------------


def tensordot(
    a: Any,
    b: Any,
    /,
    *,
    axes: int | tuple[Any, Any] = 2,
    out_dtype: Any = None,
    math_mode: str | MathMode | None = None,
    rtol: float | None = None,
    bound: str | None = None,
    k_chunk: int | None = None,
) -> Any:
    """Return the sum of products over pairs of axes, as ``numpy.tensordot``.

    Parameters
    ----------
    a : array, shape (...)
        Of any library that :func:`~lowprec.matmul` takes.
    b : array, shape (...)
    axes : int or pair of sequences of int
        How many of the last axes of ``a`` are summed against the first of ``b``, in order; or the axes of ``a`` and
        those of ``b``, paired in order.
    out_dtype, math_mode, rtol, bound, k_chunk
        As :func:`~lowprec.matmul` takes them.

    Returns
    -------
    array
        The other axes of ``a``, then those of ``b``.

    Raises
    ------
    ShapeError
        If an axis does not exist, is named twice, or differs in length from its partner.

    Examples
    --------
    >>> import numpy as np
    >>> tensordot(np.ones((2, 3, 4)), np.ones((4, 3, 5)), axes=((1, 2), (1, 0))).shape
    (2, 5)
    """
    xp, yp = namespace_of(a), namespace_of(b)
    summed_a, summed_b = _paired_axes(axes, tuple(a.shape), tuple(b.shape))
    free_a = [i for i in range(len(a.shape)) if i not in summed_a]
    free_b = [i for i in range(len(b.shape)) if i not in summed_b]
    shape = tuple(a.shape[i] for i in free_a) + tuple(b.shape[i] for i in free_b)
    k = prod(a.shape[i] for i in summed_a)
    left = xp.arranged(a, (*free_a, *summed_a), (prod(a.shape[i] for i in free_a), k))
    right = yp.arranged(b, (*summed_b, *free_b), (k, prod(b.shape[i] for i in free_b)))
    product = matmul(
        left,
        right,
        out_dtype=out_dtype,
        math_mode=math_mode,
        rtol=rtol,
        bound=bound,
        k_chunk=k_chunk,
    )
    return xp.reshaped(product, shape)


def _paired_axes(axes: Any, a: tuple[int, ...], b: tuple[int, ...]) -> tuple[list[int], list[int]]:
    if hasattr(axes, "__index__"):
        count = index(axes)
        if not 0 <= count <= min(len(a), len(b)):
            raise ShapeError(
                f"tensordot: axes={count} for operands of shapes {a} and {b}; it is from 0 to "
                f"{min(len(a), len(b))}"
            )
        pairs = [*range(len(a) - count, len(a))], [*range(count)]
    else:
        try:
            of_a, of_b = axes
        except (TypeError, ValueError):
            raise ShapeError(
                f"tensordot: axes is a number or a pair of sequences, got {quoted(axes)}"
            ) from None
        pairs = _axes(of_a, a, "a"), _axes(of_b, b, "b")
    lengths = [a[i] for i in pairs[0]], [b[i] for i in pairs[1]]
    if lengths[0] != lengths[1]:
        raise ShapeError(
            f"tensordot: axes {pairs[0]} of a, shape {a}, have lengths {lengths[0]}, and axes {pairs[1]} of b, shape "
            f"{b}, have {lengths[1]}; they are summed in pairs"
        )
    return pairs


def _axes(axes: Any, shape: tuple[int, ...], name: str) -> list[int]:
    found = [index(axes)] if hasattr(axes, "__index__") else [index(axis) for axis in axes]
    if any(not -len(shape) <= axis < len(shape) for axis in found):
        raise ShapeError(f"tensordot: {name} of shape {shape} has no axes {found}")
    found = [axis % len(shape) for axis in found]
    if len(set(found)) < len(found):
        raise ShapeError(f"tensordot: axes {found} of {name} name an axis twice")
    return found


def vecdot(
    a: Any,
    b: Any,
    /,
    *,
    axis: int = -1,
    out_dtype: Any = None,
    math_mode: str | MathMode | None = None,
    rtol: float | None = None,
    bound: str | None = None,
    k_chunk: int | None = None,
) -> Any:
    """Return the dot products of vectors along an axis, the first conjugated, as the Array API's ``vecdot``.

    Parameters
    ----------
    a : array, shape (..., k)
    b : array, shape (..., k)
        The other axes broadcast.
    axis : int
        Where the vectors lie, counted from the end: -1 to -N, N being the smaller number of axes.
    out_dtype, math_mode, rtol, bound, k_chunk
        As :func:`~lowprec.matmul` takes them.

    Returns
    -------
    array, shape (...)

    Raises
    ------
    ShapeError
        If there is no such axis, or the shapes do not fit together.

    Examples
    --------
    >>> import numpy as np
    >>> vecdot(np.array([[1.0, 2.0], [3.0, 4.0]]), np.array([1.0, 10.0]))
    array([21., 43.])
    """
    xp, yp = namespace_of(a), namespace_of(b)
    axis = index(axis)
    least = min(len(a.shape), len(b.shape))
    if not -least <= axis <= -1 and not (axis >= 0 and axis < len(a.shape) == len(b.shape)):
        raise ShapeError(
            f"vecdot: no axis {axis} in shapes {tuple(a.shape)} and {tuple(b.shape)}; it is counted from the end, "
            f"from -{least} to -1"
        )
    left, right = xp.last(a, axis), yp.last(b, axis)
    row = xp.reshaped(xp.conjugated(left), (*left.shape[:-1], 1, left.shape[-1]))
    column = yp.reshaped(right, (*right.shape, 1))
    product = matmul(
        row,
        column,
        out_dtype=out_dtype,
        math_mode=math_mode,
        rtol=rtol,
        bound=bound,
        k_chunk=k_chunk,
    )
    return product[..., 0, 0]


def linear(
    x: Any,
    weight: Any,
    bias: Any = None,
    /,
    *,
    activation: str | None = None,
    out_dtype: Any = None,
    math_mode: str | MathMode | None = None,
    rtol: float | None = None,
    bound: str | None = None,
    k_chunk: int | None = None,
) -> Any:
    """Return ``activation(x @ weight^T + bias)``, with the weight as PyTorch's layers keep it.

    Parameters
    ----------
    x : array, shape (..., k)
    weight : array or PreparedOperand, shape (n, k)
    bias : array, shape (n,), optional
    activation, out_dtype, math_mode, rtol, bound, k_chunk
        As :func:`~lowprec.matmul` takes them.

    Returns
    -------
    array, shape (..., n)

    Raises
    ------
    ShapeError
        If the weight has not two axes, or the shapes do not fit together.

    Examples
    --------
    >>> import numpy as np
    >>> linear(np.array([1.0, 2.0]), np.array([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]]))
    array([1., 2., 3.])
    """
    xp = None if isinstance(weight, PreparedOperand) else namespace_of(weight)
    if len(weight.shape) != 2:
        raise ShapeError(f"linear: the weight has shape (n, k), got {tuple(weight.shape)}")
    transposed = weight.T if xp is None else xp.permuted(weight, (1, 0))
    return matmul(
        x, transposed, bias=bias, activation=activation,
        out_dtype=out_dtype, math_mode=math_mode, rtol=rtol, bound=bound, k_chunk=k_chunk,
    )  # fmt: skip


# -- einsum ---------------------------------------------------------------------------------------


def einsum(
    subscripts: str,
    /,
    *operands: Any,
    optimize: str | bool | Sequence[Sequence[int]] = "auto",
    math_mode: str | MathMode | None = None,
    rtol: float | None = None,
    bound: str | None = None,
    k_chunk: int | None = None,
) -> Any:
    """Return the sum of products that Einstein's notation describes, as ``numpy.einsum``.

    opt_einsum finds the order of the products (``pip install "lowprec[einsum]"``); each step is one matrix product, a
    batched one where operands share an axis that is kept. The order and the steps of a call are kept for the next one
    with the same shapes.

    Parameters
    ----------
    subscripts : str
        For example ``"bij,bjk->bik"``; "..." stands for axes that broadcast.
    *operands : array
        Of any libraries that :func:`~lowprec.matmul` takes together.
    optimize : str, bool or sequence of sequences of int
        How the order is found, as ``opt_einsum.contract_path`` takes it.
    math_mode, rtol, bound, k_chunk
        As :func:`~lowprec.matmul` takes them, for each product; ``rtol`` bounds each product by itself.

    Returns
    -------
    array
        Of the library of the first operand.

    Raises
    ------
    ShapeError
        If the subscripts do not fit the shapes.
    UnsupportedError
        If opt_einsum is not installed.

    Examples
    --------
    >>> import numpy as np
    >>> einsum("ij,jk,kl->il", np.ones((2, 3)), np.ones((3, 4)), np.ones((4, 5)), math_mode="bf16").shape
    (2, 5)
    """
    if not operands or not isinstance(subscripts, str):
        raise ShapeError(
            'einsum takes subscripts and then the operands, as einsum("ij,jk->ik", a, b)'
        )
    for operand in operands:
        namespace_of(operand)  # refuses what is no array
    shapes = tuple(tuple(operand.shape) for operand in operands)
    order = optimize if isinstance(optimize, str | bool) else tuple(map(tuple, optimize))
    multiply = functools.partial(
        matmul, math_mode=math_mode, rtol=rtol, bound=bound, k_chunk=k_chunk
    )
    values = dict(enumerate(operands))
    result = None
    for number, step in enumerate(_recipe(subscripts, shapes, order), len(operands)):
        result = values[number] = step.run(values, multiply)
    return result


class _Side(NamedTuple):
    """How an operand of a step is made ready: its diagonals, the order of its axes, the sums over the last of them."""

    diagonals: tuple[tuple[int, int], ...]
    order: tuple[int, ...]
    rows: int  # elements per sum's factor: what is left when the last axes are summed
    terms: int | None  # how many elements each sum has; None where nothing is summed
    shape: tuple[int, ...]

    def made_ready(self, x: Any, multiply: Any) -> Any:
        xp = namespace_of(x)
        for first, second in self.diagonals:
            x = xp.diagonal(x, first, second)
        if self.terms is None:
            return xp.arranged(x, self.order, self.shape)
        matrix = xp.arranged(x, self.order, (self.rows, self.terms))
        return xp.reshaped(multiply(matrix, xp.ones(self.terms, like=x)), self.shape)


class _Step(NamedTuple):
    """One product: the values that it takes, and what becomes of them. Values are numbered in order of appearance."""

    takes: tuple[int, ...]
    sides: tuple[_Side, ...]  # two, or one operand that is summed and arranged alone
    elementwise: bool  # no axis is summed, and none is the one operand's alone
    shape: tuple[int, ...]
    order: tuple[int, ...]

    def run(self, values: dict[int, Any], multiply: Any) -> Any:
        x, *others = [
            side.made_ready(values.pop(i), multiply)
            for i, side in zip(self.takes, self.sides, strict=True)
        ]
        for y in others:
            x = x * y if self.elementwise and _multiply_alike(x, y) else multiply(x, y)
        xp = namespace_of(x)
        return xp.permuted(xp.reshaped(x, self.shape), self.order)


def _multiply_alike(x: Any, y: Any) -> bool:
    """Whether the library's own product of elements is what a matrix product of one term would be."""
    return type(x) is type(y) and x.dtype == y.dtype and "int" not in str(x.dtype)


class _Term(NamedTuple):
    """A value while the recipe is made: its number, the names of its axes and their lengths."""

    number: int
    names: tuple[str, ...]
    lengths: tuple[int, ...]


@functools.lru_cache(maxsize=_RECIPES)
def _recipe(subscripts: str, shapes: tuple[tuple[int, ...], ...], order: Any) -> tuple[_Step, ...]:
    terms, output, path = _parse(subscripts, shapes, order)
    steps: list[_Step] = []
    count = len(terms)
    for contraction in path:
        picked = [terms.pop(i) for i in sorted(contraction, reverse=True)][::-1]
        while picked:
            taken, picked = picked[:2], picked[2:]
            others = [*terms, *picked]
            wanted = set(output).union(*(term.names for term in others))
            names = dict.fromkeys(name for term in taken for name in term.names if name in wanted)
            step, term = _step(taken, tuple(names) if others else output, count)
            steps.append(step)
            count += 1
            if not picked:
                terms.append(term)
            else:
                picked.insert(0, term)
    return tuple(steps)


def _parse(
    subscripts: str, shapes: tuple[tuple[int, ...], ...], order: Any
) -> tuple[list[_Term], tuple[str, ...], Sequence[Sequence[int]]]:
    try:
        import opt_einsum
    except ModuleNotFoundError:
        raise UnsupportedError(
            'einsum needs opt_einsum, which is not installed: pip install "lowprec[einsum]"'
        ) from None
    try:
        inputs, output, _ = opt_einsum.parser.parse_einsum_input((subscripts, *shapes), shapes=True)
        path, _ = opt_einsum.contract_path(subscripts, *shapes, shapes=True, optimize=order)
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise ShapeError(
            f"einsum: subscripts {quoted(subscripts)} for shapes {shapes}: {error}"
        ) from None
    texts = enumerate(zip(inputs.split(","), shapes, strict=True))
    return [_Term(i, tuple(text), shape) for i, (text, shape) in texts], tuple(output), path


def _step(taken: list[_Term], kept: tuple[str, ...], number: int) -> tuple[_Step, _Term]:
    """Return the step that multiplies one or two values, and what it makes, which has that number."""
    cleaned = [_without_repeats(term) for term in taken]
    axes = [dict(zip(names, lengths, strict=True)) for _, names, lengths in cleaned]
    lengths = {name: max(a.get(name, 0) for a in axes) for a in axes for name in a}
    for name in lengths:  # an axis of length 1 broadcasts
        if len({a[name] for a in axes if name in a}) > 1:
            axes = [{n: x for n, x in a.items() if n != name or x != 1} for a in axes]
    lengths = {name: length for a in axes for name, length in a.items()}
    left, right = axes[0], axes[-1]
    both = [name for name in left if name in right] if len(axes) > 1 else []
    batch, summed = [n for n in both if n in kept], [n for n in both if n not in kept]
    m = [n for n in left if n in kept and n not in both]
    n = [name for name in right if name in kept and name not in both] if len(axes) > 1 else []
    arrangements = [(m, summed), (summed, n)] if len(axes) > 1 else [(m,)]
    sides = tuple(
        _side(term, diagonals, axis, batch, groups)
        for (diagonals, *term), axis, groups in zip(cleaned, axes, arrangements, strict=True)
    )
    have = [*batch, *m, *n]
    step = _Step(
        tuple(term.number for term in taken),
        sides,
        elementwise=not (summed or m or n),
        shape=tuple(lengths[name] for name in have),
        order=tuple(have.index(name) for name in kept),
    )
    return step, _Term(number, kept, tuple(lengths[name] for name in kept))


def _without_repeats(
    term: _Term,
) -> tuple[tuple[tuple[int, int], ...], tuple[str, ...], tuple[int, ...]]:
    """Return the diagonals to take so that no axis has another one's name, and the names and lengths after that."""
    names, lengths, diagonals = list(term.names), list(term.lengths), []
    for name in dict.fromkeys(names):
        while names.count(name) > 1:
            first = names.index(name)
            second = names.index(name, first + 1)
            diagonals.append((first, second))
            length = lengths[first]
            for i in (second, first):
                del names[i], lengths[i]
            names.append(name)
            lengths.append(length)
    return tuple(diagonals), tuple(names), tuple(lengths)


def _side(
    term: Sequence[Any],
    diagonals: tuple[tuple[int, int], ...],
    axes: dict[str, int],
    batch: list[str],
    groups: tuple[list[str], ...],
) -> _Side:
    """Return how an operand becomes a stack of matrices: an axis for each of ``batch``, and one for each group."""
    names, _ = term
    placed = [*batch, *(name for group in groups for name in group)]
    gone = [name for name in names if name not in axes]
    summed = [name for name in axes if name not in placed]
    shape = [axes[name] for name in batch]
    shape += [prod(axes[name] for name in group) for group in groups]
    return _Side(
        diagonals,
        order=tuple(names.index(name) for name in (*gone, *placed, *summed)),
        rows=prod(shape),
        terms=prod(axes[name] for name in summed) if summed else None,
        shape=tuple(shape),
    )
