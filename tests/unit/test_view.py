"""Views of NumPy memory: address arithmetic, strides, overlap, and memory that elements cannot express."""

import itertools

import numpy as np
import pytest

import lowprec
from lowprec.arrays import (
    CPU,
    NUMPY_DTYPES,
    ArrayView,
    Device,
    library_of,
    may_overlap,
    numpy_library,
)
from lowprec.errors import ArrayError
from lowprec.formats import DType
from lowprec.util.strides import overlaps_itself


def view_of(array):
    return library_of(array).view(array)


def by_address(view):
    """The same view without its NumPy owner's help: everything by address, shape and strides."""
    return ArrayView(
        view.dtype, view.shape, view.strides, view.device, view.owner, view.read_only, view.address
    )


def layouts(dtype):
    """Arrays of every kind of stride, all of whose elements differ if the type has enough values."""
    base = np.arange(2 * 6 * 8).reshape(2, 6, 8).astype(NUMPY_DTYPES[dtype])
    read_only = base[0].copy()
    read_only.flags.writeable = False
    return {
        "contiguous": base[0],
        "transposed": base[0].T,
        "strided": base[1, ::2, 1::3],
        "negative": base[0, ::-1, ::-2],
        "mixed signs": base[:, ::-1].transpose(2, 0, 1),
        "batch": base,
        "zero-size": base[:, :0],
        "0-d": base[1, 2, 3:4].reshape(()),
        "1-d": base[0, :, 3],
        "broadcast": np.broadcast_to(base[0, 0], (4, 3, 8)),
        "one row": base[:1, 2:3],
        "read-only": read_only,
    }


@pytest.mark.parametrize("dtype", list(DType), ids=str)
@pytest.mark.parametrize("layout", list(layouts(DType.INT8)))
def test_addresses_are_numpys_own(dtype, layout):
    array = layouts(dtype)[layout]
    view = view_of(array)
    assert (view.dtype, view.shape, view.device, view.copied) == (dtype, array.shape, CPU, None)
    assert view.read_only is not array.flags.writeable
    first, last = view.extent()
    touched = set()
    for index in itertools.product(*map(range, array.shape)):
        offset = sum(i * s for i, s in zip(index, view.strides, strict=True))
        address = view.address + offset * dtype.itemsize
        assert address == array[(*index, ...)].ctypes.data
        touched.add(address)
    # Exact at both ends: the lowest byte touched, and one after the highest.
    expected = (min(touched), max(touched) + dtype.itemsize) if touched else (first, first)
    assert (first, last) == expected


def misaligned(array):
    raw = np.zeros(array.nbytes + 1, np.uint8)
    raw[1:] = array.view(np.uint8).ravel()
    return raw[1:].view(array.dtype).reshape(array.shape)


def odd_strides(array, tag="i2"):
    record = np.zeros(array.shape, [("value", array.dtype), ("tag", tag)])
    record["value"] = array
    return record["value"]


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda a: a.astype(a.dtype.newbyteorder("S")), "its byte order"),
        (misaligned, "not aligned"),
        (odd_strides, "not aligned"),
        # complex64 is aligned to 4 bytes and has 8: a step of 12 bytes is aligned and no multiple.
        (
            lambda a: odd_strides(a * np.complex64(1 + 2j), "f4"),
            "its byte strides are not multiples",
        ),
    ],
    ids=["byte order", "misaligned", "odd strides", "aligned strides"],
)
def test_strides_within_elements_are_copied_and_reported(make, reason):
    odd = make(np.arange(12, dtype=np.float32).reshape(3, 4))
    view = view_of(odd)
    assert reason in view.copied
    assert f", copied: {view.copied}" in repr(view)
    np.testing.assert_array_equal(view.ndarray(), odd)
    assert view.ndarray().dtype == odd.dtype.newbyteorder("=")
    with pytest.raises(ArrayError, match=r"^the array cannot be written in place: its .*omit out="):
        library_of(odd).writable_view(odd)


def test_layouts_of_arrays_and_results_are_shared_and_bounded(monkeypatch):
    """The key of an executor is made of their identities."""
    monkeypatch.setattr(numpy_library, "_MOST_LAYOUTS", 3)
    for cache in ("_layouts", "_results"):
        monkeypatch.setattr(numpy_library, cache, {})
    x = np.ones((4, 4), np.float32)
    first = library_of(x).view(x).layout
    assert library_of(x).view(x.copy()).layout is first
    assert library_of(x).view(x.T).layout is not first
    for n in range(1, 9):
        np.testing.assert_array_equal(lowprec.matmul(x[:n], x), np.full((min(n, 4), 4), 4))
    assert len(numpy_library._layouts) <= 3
    assert len(numpy_library._results) <= 3


def test_read_only_and_broadcast_out_are_refused():
    array = np.zeros((3, 4), np.float32)
    array.flags.writeable = False
    with pytest.raises(ArrayError, match=r"^the array is read-only; pass a writable array"):
        library_of(array).writable_view(array)
    repeated = np.lib.stride_tricks.as_strided(np.zeros(4, np.float32), (3, 4), (0, 4))
    with pytest.raises(ArrayError, match=r"^the array of shape \(3, 4\) repeats elements"):
        library_of(repeated).writable_view(repeated)


def test_may_overlap_agrees_with_numpy(rng):
    base = np.zeros(200, np.float32)
    seen = set()
    for _ in range(400):
        parts = []
        for _ in range(2):
            start, length = rng.integers(0, 60), rng.integers(0, 60)
            part = base[start : start + length : rng.integers(1, 5)]
            parts.append(part[::-1] if rng.integers(2) else part)
        expected = np.shares_memory(*parts)
        a, b = (by_address(view_of(p)) for p in parts)
        assert may_overlap(a, b) == expected == may_overlap(b, a)
        seen.add(expected)
    assert seen == {True, False}


def test_overlap_outside_the_host_is_by_extent():
    def on(device, address):
        return ArrayView(DType.FLOAT32, (4, 2), (4, 1), device, "its owner", False, address)

    gpu = Device(2, 0)
    assert may_overlap(on(gpu, 4096), on(gpu, 4096 + 8))
    assert not may_overlap(on(gpu, 4096), on(gpu, 4096 + 56))
    assert not may_overlap(on(gpu, 4096), on(Device(2, 1), 4096))


def test_overlaps_itself_against_a_count(rng):
    unsure = 0
    for _ in range(500):
        shape = tuple(int(n) for n in rng.integers(0, 4, 3))
        strides = tuple(int(s) for s in rng.integers(-12, 13, 3))
        offsets = [
            sum(i * s for i, s in zip(index, strides, strict=True))
            for index in itertools.product(*map(range, shape))
        ]
        repeats = len(set(offsets)) < len(offsets)
        found = overlaps_itself(shape, strides)
        assert found or not repeats, (shape, strides)
        unsure += found and not repeats
    assert unsure < 100  # interleaved strides only; a test that always said True would count 300
