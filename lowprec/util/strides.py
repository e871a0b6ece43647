"""Strides of arrays as plain numbers, for views and plans."""

from __future__ import annotations


def contiguous_strides(shape: tuple[int, ...], step: int = 1) -> tuple[int, ...]:
    """Return the strides, in elements, of a row-major array without gaps.

    An empty dimension counts as one of extent 1, as in PyTorch. ``step`` is the stride of the last dimension.

    Examples
    --------
    >>> contiguous_strides((2, 3, 4)), contiguous_strides((2, 0, 3)), contiguous_strides((2, 3), 10)
    ((12, 4, 1), (3, 3, 1), (30, 10))
    """
    if len(shape) == 2:
        return (step * (shape[1] or 1), step)
    strides = []
    for extent in reversed(shape):
        strides.append(step)
        step *= extent or 1
    return tuple(reversed(strides))


def reach(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, int]:
    """Return the steps from the element with all indices zero to the first and to the last in memory.

    Examples
    --------
    >>> reach((4, 3), (-3, 1))
    (-9, 2)
    """
    first = last = 0
    for extent, stride in zip(shape, strides, strict=True):
        if stride < 0:
            first += stride * (extent - 1)
        else:
            last += stride * (extent - 1)
    return first, last


def overlaps_itself(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Whether two indices of a view may name one element, so that the view cannot be written.

    True for every view that repeats an element. Strides that interleave without repeating (3 and 2 over a shape
    of ``(2, 2)``) are also reported: no slice, transpose or reshape makes them.

    Examples
    --------
    >>> overlaps_itself((4, 3), (0, 1)), overlaps_itself((4, 3), (-3, 1))
    (True, False)
    """
    if 0 in shape:
        return False
    reach = 0
    for stride, extent in sorted((abs(s), n) for s, n in zip(strides, shape, strict=True) if n > 1):
        if stride <= reach:
            return True
        reach += stride * (extent - 1)
    return False
