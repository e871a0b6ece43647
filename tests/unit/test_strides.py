"""The strides that views and plans share, against an array whose extents are all at least one and against a count."""

from __future__ import annotations

import itertools

import numpy as np

from lowprec.util.strides import contiguous_strides, overlaps_itself, reach

SHAPES = [s for ndim in range(5) for s in itertools.product((0, 1, 2, 3), repeat=ndim)]


def test_contiguous_strides_are_those_of_an_array_without_empty_dimensions() -> None:
    for shape in SHAPES:
        filled = np.empty([max(n, 1) for n in shape], np.int8)
        # NumPy itself calls all strides of an array without elements 0.
        assert contiguous_strides(shape) == filled.strides, shape
        assert contiguous_strides(shape, 5) == tuple(5 * s for s in filled.strides), shape


def test_reach_is_that_of_numpys_views(rng: np.random.Generator) -> None:
    base = np.empty((4, 5, 6), np.int8)
    first = base.ctypes.data
    for _ in range(100):
        steps = [slice(None, None, int(s)) for s in rng.choice([-3, -2, -1, 1, 2, 3], 3)]
        view = base[tuple(steps)].transpose(rng.permutation(3))
        low, high = np.lib.array_utils.byte_bounds(view)
        origin = view.ctypes.data
        assert reach(view.shape, view.strides) == (low - origin, high - 1 - origin)
        assert first <= low < high <= first + base.nbytes


def test_overlaps_itself_against_a_count(rng: np.random.Generator) -> None:
    unsure = 0
    for _ in range(500):
        shape = tuple(int(n) for n in rng.integers(0, 4, 3))
        strides = tuple(int(s) for s in rng.integers(-12, 13, 3))
        offsets = [
            sum(i * s for i, s in zip(index, strides, strict=True)) for index in itertools.product(*map(range, shape))
        ]
        repeats = len(set(offsets)) < len(offsets)
        found = overlaps_itself(shape, strides)
        assert found or not repeats, (shape, strides)
        unsure += found and not repeats
    assert unsure < 100  # interleaved strides only; a test that always said True would count 300


def test_views_of_an_array_do_not_overlap_themselves(rng: np.random.Generator) -> None:
    steps = [slice(None), slice(None, None, 2), slice(None, None, -1), slice(1, None), slice(0, 0)]
    for _ in range(300):
        base = np.empty(tuple(rng.integers(0, 5, 3)), np.int8)
        view = base[tuple(steps[i] for i in rng.integers(0, len(steps), 3))]
        view = view.transpose(rng.permutation(3))
        assert not overlaps_itself(view.shape, view.strides), (view.shape, view.strides)
