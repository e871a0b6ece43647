"""Arithmetic of strides."""

from __future__ import annotations


def contiguous_strides(shape: tuple[int, ...], step: int = 1) -> tuple[int, ...]:
    """Return the strides of a row-major array without gaps, the last one ``step``; an extent of 0 counts as 1."""
    if len(shape) == 2:
        return (step * (shape[1] or 1), step)
    strides = []
    for extent in reversed(shape):
        strides.append(step)
        step *= extent or 1
    return tuple(reversed(strides))


def reach(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, int]:
    """Return the offsets of the first and the last element in memory from the element with all indices zero."""
    first = last = 0
    for extent, stride in zip(shape, strides, strict=True):
        if stride < 0:
            first += stride * (extent - 1)
        else:
            last += stride * (extent - 1)
    return first, last


def overlaps_itself(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Whether two indices of a view may refer to the same element.

    True for every view with such indices, and also for interleaved strides without them (3 and 2 over shape
    ``(2, 2)``), which no slice, transpose or reshape creates.
    """
    if 0 in shape:
        return False
    reach = 0
    for stride, extent in sorted((abs(s), n) for s, n in zip(strides, shape, strict=True) if n > 1):
        if stride <= reach:
            return True
        reach += stride * (extent - 1)
    return False
