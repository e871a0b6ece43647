"""The steps of an einsum, cached by shapes: each is one product, with axes arranged before and after it."""

from __future__ import annotations

import functools
import importlib
import itertools
import string
from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from lowprec.arrays.namespaces import dtype_label, namespace_of
from lowprec.core.arguments import parse_out_dtype
from lowprec.errors import DTypeError, ShapeError, UnsupportedError, quoted
from lowprec.formats import OPERAND_DTYPES, dtype_from_name, operand_names, promote
from lowprec.util.strides import Shape, Shapes

_Pairs: TypeAlias = tuple[tuple[int, int], ...]


class _Side(NamedTuple):
    """The arrangement of an operand's axes for a product."""

    diagonals: _Pairs
    order: tuple[int, ...]
    rows: int  # elements left when the last axes are summed
    terms: int | None  # elements of each sum; None without a sum
    shape: Shape

    def arranged(self, x: Any, multiply: Any, dtype: str) -> Any:
        """Return the operand with its axes arranged, and summed in this element type over those that go."""
        xp = namespace_of(x)
        for first, second in self.diagonals:
            x = xp.diagonal(x, first, second)
        if self.terms is None:
            return xp.arranged(x, self.order, self.shape)
        matrix = xp.arranged(x, self.order, (self.rows, self.terms))
        sums = multiply(matrix, xp.ones(self.terms, like=x), dtype)
        return xp.reshaped(sums, self.shape)


class EinsumStep(NamedTuple):
    """One product: its operands by number, in order of appearance, and their arrangement."""

    takes: tuple[int, ...]
    sides: tuple[_Side, ...]  # of two operands, or of one that is only summed and arranged
    elementwise: bool  # no axis is summed, and both operands have every axis
    shape: Shape
    order: tuple[int, ...]

    @property
    def sums_an_operand(self) -> bool:
        """Whether one operand alone is summed over an axis, before a product or instead of one."""
        return any(side.terms is not None for side in self.sides)

    def run(self, values: dict[int, Any], multiply: Any, dtype: str, wide: str) -> Any:
        """Remove the operands from ``values`` and return their product; ``wide`` is the type of sums of one operand."""
        of_sums = dtype
        if len(self.takes) > 1:
            of_sums = wide
        pairs = zip(self.takes, self.sides, strict=True)
        x, *others = [side.arranged(values.pop(i), multiply, of_sums) for i, side in pairs]
        for y in others:
            alike = type(x) is type(y) and dtype_label(x.dtype) == dtype_label(y.dtype) == dtype
            if self.elementwise and alike:
                x = x * y
            else:
                x = multiply(x, y, dtype)
        xp = namespace_of(x)
        x = xp.reshaped(x, self.shape)
        return xp.permuted(x, self.order)


class _Term(NamedTuple):
    number: int
    names: tuple[str, ...]
    lengths: Shape


@functools.lru_cache(maxsize=1024)
def einsum_steps(subscripts: str, shapes: Shapes, order: Any) -> tuple[EinsumStep, ...]:
    """Return the steps for operands of these shapes, in an efficient order. Cached."""
    terms, output, path = _parse(subscripts, shapes, order)
    steps: list[EinsumStep] = []
    count = len(terms)
    for contraction in path:
        picked = [terms[i] for i in sorted(contraction)]
        terms = [term for term in terms if term not in picked]
        while picked:
            pair = picked[:2]
            picked = picked[2:]
            others = [*terms, *picked]
            step, term = _step(pair, _kept_names(pair, others, output), count)
            steps.append(step)
            count += 1
            if not picked:
                terms.append(term)
            else:
                picked.insert(0, term)
    return tuple(steps)


def _kept_names(pair: list[_Term], others: list[_Term], output: tuple[str, ...]) -> tuple[str, ...]:
    """Return the axes of the product of a pair that the result or other terms have."""
    if not others:
        return output
    wanted = set(output).union(*(term.names for term in others))
    names = dict.fromkeys(itertools.chain.from_iterable(term.names for term in pair))
    return tuple(name for name in names if name in wanted)


def _parse(
    subscripts: str, shapes: Shapes, order: Any
) -> tuple[list[_Term], tuple[str, ...], Sequence[Sequence[int]]]:
    """Return the operands, the axes of the result, and the operands of each step by their positions."""
    try:
        inputs, output = _labels(subscripts, shapes)
        path = _path(f"{','.join(inputs)}->{output}", shapes, order)
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise ShapeError(
            f"einsum: subscripts {quoted(subscripts)} for shapes {shapes}: {error}"
        ) from None
    names = [tuple(text) for text in inputs]
    terms = list(map(_Term, itertools.count(), names, shapes))
    return terms, tuple(output), path


def _labels(subscripts: str, shapes: Shapes) -> tuple[list[str], str]:
    """Return the labels of each operand and of the result, with labels for the axes of "..."; raise ValueError."""
    left, arrow, output = subscripts.replace(" ", "").partition("->")
    inputs = left.split(",")
    if len(inputs) != len(shapes):
        raise ValueError(f"{len(inputs)} operands in the subscripts, {len(shapes)} given")
    names = "".join(inputs).replace("...", "")
    letters = names + output.replace("...", "")
    if letters and not letters.isalpha():
        raise ValueError(
            "labels are letters, and the axes that broadcast are '...', once in an operand"
        )
    letters_and_more = (*string.ascii_letters, *map(chr, range(0x100, 0x200)))
    unused = [c for c in letters_and_more if c not in subscripts]
    broadcast = ""
    for i, (text, shape) in enumerate(zip(inputs, shapes, strict=True)):
        start, ellipsis, end = text.partition("...")
        count = len(shape) - len(start) - len(end)
        if count < 0 or (count and not ellipsis):
            raise ValueError(f"{quoted(text)} does not match {len(shape)} axes")
        dots = "".join(reversed(unused[:count]))
        broadcast = max(broadcast, dots, key=len)
        inputs[i] = start + dots + end
    if not arrow:
        once = [c for c in sorted(set(names)) if names.count(c) == 1]
        output = "..." + "".join(once)
    output = output.replace("...", broadcast)
    if len(set(output)) < len(output) or not set(output) <= {*names, *broadcast}:
        raise ValueError(
            f"each of the result's labels {quoted(output)} is that of an operand, and occurs once"
        )
    _check_lengths(inputs, shapes)
    return inputs, output


def _check_lengths(inputs: list[str], shapes: Shapes) -> None:
    """Raise ValueError if axes of one label have lengths that differ and do not broadcast."""
    lengths: dict[str, int] = {}
    for text, shape in zip(inputs, shapes, strict=True):
        axes = list(zip(text, shape, strict=True))
        of_label = dict(axes)
        for name, length in axes:
            known = lengths.get(name, 1)
            broadcasts = length == known or 1 in (length, known)
            if not broadcasts or of_label[name] != length:
                raise ValueError(f"label {quoted(name)} has lengths that differ")
        for name, length in axes:
            if lengths.get(name, 1) == 1:
                lengths[name] = length


def _path(subscripts: str, shapes: Shapes, order: Any) -> Sequence[Sequence[int]]:
    """Return the operands of each step, by opt_einsum where it is installed and by NumPy where it is not."""
    if isinstance(order, tuple):
        count = len(shapes)
        for step in order:
            positions = set(step)
            if not step or len(positions) < len(step) or not positions <= set(range(count)):
                raise ValueError(f"optimize has a step {step} where there are {count} operands")
            count -= len(step) - 1
        if count > 1:
            raise ValueError(f"optimize leaves {count} operands")
        return order
    if order in ("auto", True, False) and len(shapes) < 3:
        return [range(len(shapes))]
    try:
        opt_einsum = importlib.import_module("opt_einsum")
    except ModuleNotFoundError:
        pass
    else:
        path: Sequence[Sequence[int]]
        path, _ = opt_einsum.contract_path(subscripts, *shapes, shapes=True, optimize=order)
        return path
    order = {"auto": "greedy", True: "greedy"}.get(order, order)
    if isinstance(order, str) and order not in ("greedy", "optimal"):
        raise UnsupportedError(
            f"einsum: optimize={quoted(order)} needs opt_einsum: pip install opt_einsum"
        )
    operands = [np.broadcast_to(np.float32(0), shape) for shape in shapes]
    (_, *steps), _ = np.einsum_path(subscripts, *operands, optimize=order)
    return steps


def _step(terms: list[_Term], output: tuple[str, ...], number: int) -> tuple[EinsumStep, _Term]:
    """Return the product of one or two terms, and its result as a term."""
    cleaned = [_without_repeats(term) for term in terms]
    axes = _without_broadcast([axes for _, axes in cleaned])
    lengths: dict[str, int] = {}
    for of_one in axes:
        lengths |= of_one
    shared = []
    if len(axes) > 1:
        shared = [name for name in axes[0] if name in axes[1]]
    batch = [name for name in shared if name in output]
    summed = [name for name in shared if name not in output]
    alone = set(output).difference(shared)
    free = [[name for name in of_one if name in alone] for of_one in axes]
    groups = [free]
    if len(terms) > 1:
        groups = [[free[0], summed], [summed, free[1]]]
    sides = []
    for (diagonals, before), of_one, of_side in zip(cleaned, axes, groups, strict=True):
        sides.append(_side(diagonals, list(before), of_one, batch, of_side))
    have = [*batch, *itertools.chain.from_iterable(free)]
    step = EinsumStep(
        tuple(term.number for term in terms),
        tuple(sides),
        elementwise=not (summed or any(free)),
        shape=tuple(lengths[name] for name in have),
        order=tuple(have.index(name) for name in output),
    )
    return step, _Term(number, output, tuple(lengths[name] for name in output))


def _without_broadcast(axes: list[dict[str, int]]) -> list[dict[str, int]]:
    """Return the axes of operands without those of length 1 that broadcast to another operand's."""
    longer = {name for of_one in axes for name, length in of_one.items() if length != 1}
    found = []
    for of_one in axes:
        kept = {name: n for name, n in of_one.items() if n != 1 or name not in longer}
        found.append(kept)
    return found


def _without_repeats(term: _Term) -> tuple[_Pairs, dict[str, int]]:
    """Return the diagonals to take for names that occur twice, and the lengths of the axes that are left."""
    names = list(term.names)
    lengths = list(term.lengths)
    diagonals = []
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
    return tuple(diagonals), dict(zip(names, lengths, strict=True))


def _side(
    diagonals: _Pairs,
    names: list[str],
    axes: dict[str, int],
    batch: list[str],
    groups: list[list[str]],
) -> _Side:
    """Return the arrangement of an operand with axes ``names``, of which those outside ``axes`` have length 1."""
    placed = [*batch, *itertools.chain.from_iterable(groups)]
    dropped = [name for name in names if name not in axes]
    summed = [name for name in axes if name not in placed]
    shape = [axes[name] for name in batch]
    shape += [prod(axes[name] for name in group) for group in groups]
    terms = None
    if summed:
        terms = prod(axes[name] for name in summed)
    order = tuple(names.index(name) for name in (*dropped, *placed, *summed))
    return _Side(diagonals, order, rows=prod(shape), terms=terms, shape=tuple(shape))


#: Two operands of these types are multiplied without promotion.
EIGHT_BITS = frozenset(d.label for d in OPERAND_DTYPES if d.bits == 8)


def einsum_types(labels: tuple[str, ...], out_dtype: Any) -> tuple[str, str, str, str, str]:
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
    if float8:
        common = dtypes[0]
    else:
        common = functools.reduce(promote, dtypes)
    default = common.results[0]
    out = default
    if out_dtype is not None:
        out = parse_out_dtype(out_dtype)
    if out not in common.results:
        choices = " or ".join(map(str, common.results))
        raise DTypeError(
            f"out_dtype {out} is not supported for operands of {common}; supported: {choices}"
        )
    between = out if out.bits > default.bits else default
    return common.label, default.label, between.label, out.label, common.accumulator.label


einsum_types._dynamo_marked_constant = True  # type: ignore[attr-defined]


def sizes_of(operand: Any) -> Shape:
    """Return a shape as integers, also in a PyTorch graph, where sizes may be symbols that int() keeps."""
    try:
        return tuple([len(range(n)) for n in operand.shape])
    except TypeError:
        raise ShapeError(
            f"einsum: its steps depend on the sizes, and some of shape {tuple(operand.shape)} are only symbols; use "
            "matmul or tensordot"
        ) from None


def steps_of(subscripts: str, shapes: Shapes, order: Any) -> tuple[EinsumStep, ...]:
    return einsum_steps(subscripts, shapes, order)


steps_of._dynamo_marked_constant = True  # type: ignore[attr-defined]  # PyTorch's compiler calls it, and reads the result
