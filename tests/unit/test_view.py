"""Views of NumPy memory: address arithmetic, overlap, and what cannot be expressed in elements."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from lowprec.arrays import CPU, NUMPY_DTYPES, ArrayView, Device, library_of, may_overlap
from lowprec.arrays.view import data_pointer
from lowprec.errors import ArrayError, DTypeError
from lowprec.formats import DType

ALL_DTYPES = pytest.mark.parametrize("dtype", list(DType), ids=str)


def view_of(array: np.ndarray) -> ArrayView:
    return library_of(array).view(array)


def by_address(view: ArrayView) -> ArrayView:
    """The same view without its NumPy owner's help: everything by address, shape and strides."""
    return ArrayView(view.dtype, view.shape, view.strides, view.device, view.owner, view.read_only, view.address)


def layouts(dtype: DType) -> dict[str, np.ndarray]:
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


LAYOUTS = pytest.mark.parametrize("layout", list(layouts(DType.INT8)))


def element_address(array: np.ndarray, index: tuple[int, ...]) -> int:
    """Where NumPy itself puts one element."""
    return array[(*index, ...)].ctypes.data


@ALL_DTYPES
@LAYOUTS
def test_addresses_are_numpys_own(dtype: DType, layout: str) -> None:
    array = layouts(dtype)[layout]
    view = view_of(array)
    assert (view.dtype, view.shape, view.device, view.copied) == (dtype, array.shape, CPU, None)
    assert view.read_only is not array.flags.writeable
    first, last = view.extent()
    touched = set()
    for index in itertools.product(*map(range, array.shape)):
        offset = sum(i * s for i, s in zip(index, view.strides, strict=True))
        address = view.address + offset * dtype.itemsize
        assert address == element_address(array, index)
        touched.add(address)
    # Exact at both ends: the lowest byte touched, and one after the highest.
    expected = (min(touched), max(touched) + dtype.itemsize) if touched else (first, first)
    assert (first, last) == expected


@ALL_DTYPES
@LAYOUTS
def test_ndarray_by_address_is_the_same_memory(dtype: DType, layout: str) -> None:
    array = layouts(dtype)[layout]
    view = view_of(array)
    again = by_address(view).ndarray()
    assert again.dtype == array.dtype
    assert again.shape == array.shape
    assert again.tobytes() == array.tobytes()
    if array.size:
        assert again.ctypes.data == array.ctypes.data
        assert again.strides == array.strides
        assert again.flags.writeable == array.flags.writeable
        assert np.shares_memory(again, array)
        holder = again
        while isinstance(holder, np.ndarray):
            holder = holder.base
        assert holder.owner is view.owner, "it keeps the memory alive"


def test_sizes_and_repr() -> None:
    view = view_of(np.zeros((3, 4, 5), np.complex64))
    assert (view.ndim, view.size, view.nbytes) == (3, 60, 480)
    assert view_of(np.zeros((3, 0))).nbytes == 0
    array = np.broadcast_to(np.float32(1), (2, 3))
    assert repr(view_of(array)) == "HostView(float32, shape=(2, 3), strides=(0, 0), device=cpu, read-only)"


def test_data_pointer_is_the_interface_pointer(rng: np.random.Generator) -> None:
    for _ in range(50):
        array = np.zeros(tuple(rng.integers(1, 7, 3)), np.float32)
        part = array[rng.integers(array.shape[0]) :, ::-1]
        assert data_pointer(part) == part.ctypes.data


def test_device_names() -> None:
    assert [str(d) for d in (CPU, Device(2, 3), Device(99, 0))] == ["cpu", "cuda:3", "dlpack_device_99:0"]


def misaligned(array: np.ndarray) -> np.ndarray:
    raw = np.zeros(array.nbytes + 1, np.uint8)
    raw[1:] = array.view(np.uint8).ravel()
    return raw[1:].view(array.dtype).reshape(array.shape)


def odd_strides(array: np.ndarray) -> np.ndarray:
    record = np.zeros(array.shape, [("value", array.dtype), ("tag", "i2")])
    record["value"] = array
    return record["value"]


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda a: a.astype(a.dtype.newbyteorder("S")), "byte order"),
        (misaligned, "not aligned"),
        (odd_strides, "not aligned|no multiples"),
    ],
    ids=["byte order", "misaligned", "odd strides"],
)
def test_strides_within_elements_are_copied_and_reported(make, reason: str) -> None:
    array = np.arange(12, dtype=np.float32).reshape(3, 4)
    odd = make(array)
    view = view_of(odd)
    assert view.copied is not None
    assert any(part in view.copied for part in reason.split("|"))
    assert f", copied: {view.copied}" in repr(view)
    np.testing.assert_array_equal(view.ndarray(), array)
    assert view.ndarray().dtype == array.dtype
    with pytest.raises(ArrayError, match=r"out cannot be written in place: its .*omit out="):
        library_of(odd).writable_view(odd)


@pytest.mark.parametrize("dtype", ["int64", "uint8", "bool", "object", "longdouble", ">i8", "U3"])
def test_unsupported_dtypes_list_the_supported(dtype: str) -> None:
    array = np.zeros(3, dtype)
    with pytest.raises(DTypeError, match=r"is not supported; supported: float64, float32"):
        view_of(array)


def test_read_only_and_broadcast_out_are_refused() -> None:
    array = np.zeros((3, 4), np.float32)
    array.flags.writeable = False
    with pytest.raises(ArrayError, match="out is read-only; pass a writable array"):
        library_of(array).writable_view(array)
    repeated = np.lib.stride_tricks.as_strided(np.zeros(4, np.float32), (3, 4), (0, 4))
    with pytest.raises(ArrayError, match=r"out of shape \(3, 4\) repeats elements"):
        library_of(repeated).writable_view(repeated)


def test_may_overlap_agrees_with_numpy(rng: np.random.Generator) -> None:
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


def test_interleaved_columns_do_not_overlap() -> None:
    base = np.zeros((4, 6), np.float32)
    even, odd, first, none = (view_of(base[:, s]) for s in (np.s_[::2], np.s_[1::2], np.s_[:1], np.s_[:0]))
    assert [may_overlap(even, x) for x in (odd, first)] == [False, True]
    assert not may_overlap(none, view_of(base))


def test_overlap_outside_the_host_is_by_extent() -> None:
    def on(device: Device, address: int) -> ArrayView:
        return ArrayView(DType.FLOAT32, (4, 2), (4, 1), device, "its owner", False, address)

    gpu = Device(2, 0)
    assert may_overlap(on(gpu, 4096), on(gpu, 4096 + 8))
    assert not may_overlap(on(gpu, 4096), on(gpu, 4096 + 56))
    assert not may_overlap(on(gpu, 4096), on(Device(2, 1), 4096))
