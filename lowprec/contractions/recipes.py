"""The steps of an einsum, cached by shapes: each is one product, with axes arranged before and after it."""

from __future__ import annotations

import functools
import importlib
import string
from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

import numpy as np

from lowprec.arrays.namespaces import dtype_label, namespace_of
from lowprec.errors import ShapeError, UnsupportedError, quoted


class _Side(NamedTuple):
    diagonals: tuple[tuple[int, int], ...]
    order: tuple[int, ...]
    rows: int  # elements left when the last axes are summed
    terms: int | None  # elements of each sum; None without a sum
    shape: tuple[int, ...]

    def arranged(self, x: Any, multiply: Any, dtype: str) -> Any:
        """Return the operand with its axes arranged, and summed in this element type over those that go."""
        xp = namespace_of(x)
        for first, second in self.diagonals:
            x = xp.diagonal(x, first, second)
        if self.terms is None:
            return xp.arranged(x, self.order, self.shape)
        matrix = xp.arranged(x, self.order, (self.rows, self.terms))
        return xp.reshaped(multiply(matrix, xp.ones(self.terms, like=x), dtype), self.shape)


class Step(NamedTuple):
    """One product: its operands by number, in order of appearance, and their arrangement."""

    takes: tuple[int, ...]
    sides: tuple[_Side, ...]  # of two operands, or of one that is only summed and arranged
    elementwise: bool  # no axis is summed, and both operands have every axis
    shape: tuple[int, ...]
    order: tuple[int, ...]

    @property
    def sums_an_operand(self) -> bool:
        """Whether one operand alone is summed over an axis, before a product or instead of one."""
        return any(side.terms is not None for side in self.sides)

    def run(self, values: dict[int, Any], multiply: Any, dtype: str, wide: str) -> Any:
        """Remove the operands from ``values`` and return their product; ``wide`` is the type of sums of one operand."""
        x, *others = [
            side.arranged(values.pop(i), multiply, wide if len(self.takes) > 1 else dtype)
            for i, side in zip(self.takes, self.sides, strict=True)
        ]
        for y in others:
            alike = type(x) is type(y) and dtype_label(x.dtype) == dtype_label(y.dtype) == dtype
            x = x * y if self.elementwise and alike else multiply(x, y, dtype)
        xp = namespace_of(x)
        return xp.permuted(xp.reshaped(x, self.shape), self.order)


class _Term(NamedTuple):
    number: int
    names: tuple[str, ...]
    lengths: tuple[int, ...]


@functools.lru_cache(maxsize=1024)
def recipe(subscripts: str, shapes: tuple[tuple[int, ...], ...], order: Any) -> tuple[Step, ...]:
    """Return the steps for operands of these shapes, in an efficient order. Cached."""
    terms, output, path = _parse(subscripts, shapes, order)
    steps: list[Step] = []
    count = len(terms)
    for contraction in path:
        picked = [terms.pop(i) for i in sorted(contraction, reverse=True)][::-1]
        while picked:
            pair, picked = picked[:2], picked[2:]
            others = [*terms, *picked]
            wanted = set(output).union(*(term.names for term in others))
            names = dict.fromkeys(name for term in pair for name in term.names if name in wanted)
            step, term = _step(pair, tuple(names) if others else output, count)
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
        inputs, output = _labels(subscripts, shapes)
        path = _path(f"{','.join(inputs)}->{output}", shapes, order)
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise ShapeError(f"einsum: subscripts {quoted(subscripts)} for shapes {shapes}: {error}") from None
    texts = enumerate(zip(inputs, shapes, strict=True))
    return [_Term(i, tuple(text), shape) for i, (text, shape) in texts], tuple(output), path


def _labels(subscripts: str, shapes: tuple[tuple[int, ...], ...]) -> tuple[list[str], str]:
    """Return the labels of each operand and of the result, with labels for the axes of "..."; raise ValueError."""
    left, arrow, output = subscripts.replace(" ", "").partition("->")
    inputs = left.split(",")
    if len(inputs) != len(shapes):
        raise ValueError(f"{len(inputs)} operands in the subscripts, {len(shapes)} given")
    names = "".join(inputs).replace("...", "")
    if not (names + output.replace("...", "")).isalpha() and names + output.replace("...", ""):
        raise ValueError("labels are letters, and the axes that broadcast are '...', once in an operand")
    unused = [c for c in (*string.ascii_letters, *map(chr, range(0x100, 0x200))) if c not in subscripts]
    dots = 0
    for i, (text, shape) in enumerate(zip(inputs, shapes, strict=True)):
        start, ellipsis, end = text.partition("...")
        count = len(shape) - len(start) - len(end)
        if count < 0 or (count and not ellipsis):
            raise ValueError(f"{quoted(text)} does not match {len(shape)} axes")
        dots = max(dots, count)
        inputs[i] = start + "".join(unused[:count][::-1]) + end
    broadcast = "".join(unused[:dots][::-1])
    if not arrow:
        output = "..." + "".join(c for c in sorted(set(names)) if names.count(c) == 1)
    output = output.replace("...", broadcast)
    if len(set(output)) < len(output) or not set(output) <= {*names, *broadcast}:
        raise ValueError(f"each of the result's labels {quoted(output)} is that of an operand, and occurs once")
    lengths: dict[str, int] = {}
    for text, shape in zip(inputs, shapes, strict=True):
        axes = list(zip(text, shape, strict=True))
        for name, length in axes:
            known = lengths.get(name, 1)
            if (length != known and 1 not in (length, known)) or dict(axes)[name] != length:
                raise ValueError(f"label {quoted(name)} has lengths that differ")
        lengths |= {name: length for name, length in axes if lengths.get(name, 1) == 1}
    return inputs, output


def _path(subscripts: str, shapes: tuple[tuple[int, ...], ...], order: Any) -> Sequence[Sequence[int]]:
    """Return the operands of each step, by opt_einsum where it is installed and by NumPy where it is not."""
    if isinstance(order, tuple):
        count = len(shapes)
        for step in order:
            if not step or len(set(step)) < len(step) or not set(step) <= set(range(count)):
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
        path: Sequence[Sequence[int]] = opt_einsum.contract_path(subscripts, *shapes, shapes=True, optimize=order)[0]
        return path
    order = {"auto": "greedy", True: "greedy"}.get(order, order)
    if isinstance(order, str) and order not in ("greedy", "optimal"):
        raise UnsupportedError(f"einsum: optimize={quoted(order)} needs opt_einsum: pip install opt_einsum")
    operands = [np.broadcast_to(np.float32(0), shape) for shape in shapes]
    return np.einsum_path(subscripts, *operands, optimize=order)[0][1:]


def _step(terms: list[_Term], output: tuple[str, ...], number: int) -> tuple[Step, _Term]:
    cleaned = [_without_repeats(term) for term in terms]
    axes = [dict(zip(names, lengths, strict=True)) for _, names, lengths in cleaned]
    lengths = {name: max(a.get(name, 0) for a in axes) for a in axes for name in a}
    for name in lengths:  # an axis of length 1 broadcasts
        if len({a[name] for a in axes if name in a}) > 1:
            axes = [{n: x for n, x in a.items() if n != name or x != 1} for a in axes]
    lengths = {name: length for a in axes for name, length in a.items()}
    left, right = axes[0], axes[-1]
    both = [name for name in left if name in right] if len(axes) > 1 else []
    batch, summed = [n for n in both if n in output], [n for n in both if n not in output]
    m = [n for n in left if n in output and n not in both]
    n = [name for name in right if name in output and name not in both] if len(axes) > 1 else []
    arrangements = [(m, summed), (summed, n)] if len(axes) > 1 else [(m,)]
    sides = tuple(
        _side(term, diagonals, axis, batch, groups)
        for (diagonals, *term), axis, groups in zip(cleaned, axes, arrangements, strict=True)
    )
    have = [*batch, *m, *n]
    step = Step(
        tuple(term.number for term in terms),
        sides,
        elementwise=not (summed or m or n),
        shape=tuple(lengths[name] for name in have),
        order=tuple(have.index(name) for name in output),
    )
    return step, _Term(number, output, tuple(lengths[name] for name in output))


def _without_repeats(term: _Term) -> tuple[tuple[tuple[int, int], ...], tuple[str, ...], tuple[int, ...]]:
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
    names, _ = term
    placed = [*batch, *(name for group in groups for name in group)]
    dropped = [name for name in names if name not in axes]
    summed = [name for name in axes if name not in placed]
    shape = [axes[name] for name in batch]
    shape += [prod(axes[name] for name in group) for group in groups]
    return _Side(
        diagonals,
        order=tuple(names.index(name) for name in (*dropped, *placed, *summed)),
        rows=prod(shape),
        terms=prod(axes[name] for name in summed) if summed else None,
        shape=tuple(shape),
    )
