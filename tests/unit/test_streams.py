"""Streams of products, waits between them, and kept arrays; libraries, memory and backend are stand-ins."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import lowprec
from lowprec.arrays import ArrayView, Device, device_memory, libraries
from lowprec.arrays.base import Library
from lowprec.backends import Arguments
from lowprec.core import streams
from lowprec.core.options import PLAIN, Options
from lowprec.errors import BackendError, DeviceError
from lowprec.formats import DType

GPU = Device(2, 0)
F32 = DType.FLOAT32


class Array:
    """An array on the device; its memory is the host's."""

    def __init__(self, values: np.ndarray, name: str = "") -> None:
        self.values = values
        self.name = name

    def __dlpack__(self) -> object:
        raise AssertionError("the libraries here have their own views")

    def __repr__(self) -> str:
        return self.name


class Alpha(Array):
    pass


class Beta(Array):
    pass


class Keeper(Array):
    pass


class StandIn(Library):
    """A library that works on one stream."""

    def __init__(self, cls: type[Array], stream: int, keeps_owners: bool = False) -> None:
        self.name = cls.__name__
        self.cls = cls
        self.stream = stream
        self.keeps_owners = keeps_owners

    def describe(self, array: Any) -> ArrayView:
        values = array.values
        steps = tuple(s // values.itemsize for s in values.strides)
        return ArrayView(F32, values.shape, steps, GPU, array, False, values.ctypes.data)

    def allocate(self, shape: Any, dtype: DType, device: Device, like: Any) -> ArrayView:
        return self.view(self.cls(np.full(shape, np.nan, np.float32), "result"))

    def current_stream(self, device: Device) -> int:
        return self.stream


ALPHA, BETA, KEEPER = StandIn(Alpha, 11), StandIn(Beta, 22), StandIn(Keeper, 33, keeps_owners=True)


class Diary:
    """The device's memory, which records its calls, and can fail at one of them."""

    def __init__(self) -> None:
        self.entries: list[tuple[Any, ...]] = []
        self.fails: tuple[Any, ...] | None = None

    def note(self, *entry: Any) -> None:
        self.entries.append(entry)
        if entry == self.fails:
            raise BackendError(f"{entry[0]} failed")

    def order(self, before: int, after: int, device: Device) -> None:
        assert device == GPU
        self.note("order", before, after)

    def check_captures(self, streams: Any, device: Device) -> None:
        assert device == GPU

    def hold(self, owners: Any, device: Device) -> None:
        assert device == GPU
        assert "execute" not in {entry[0] for entry in self.entries}, "held too late"

    def keep(self, owners: Any, stream: int, device: Device) -> None:
        assert device == GPU
        self.note("keep", [repr(x) for x in owners], stream)

    def execute(self, arguments: Arguments) -> None:
        self.note("execute", arguments.stream)


@pytest.fixture
def diary(monkeypatch: pytest.MonkeyPatch) -> Diary:
    stand_in = Diary()
    for library in (ALPHA, BETA, KEEPER):
        monkeypatch.setitem(libraries.BY_TYPE, library.cls, library)
    monkeypatch.setitem(device_memory._loaders, GPU.type, lambda: stand_in)
    return stand_in


def array(cls: type[Array], name: str = "") -> Array:
    return cls(np.ones((2, 2), np.float32), name)


def run(diary: Diary, a: Array, b: Array, **others: Any) -> None:
    views = {name: libraries.library_of(x).view(x) if isinstance(x, Array) else x for name, x in others.items()}
    x, y = (libraries.library_of(operand).view(operand) for operand in (a, b))
    options = Options(**views)
    given = tuple(others.get(name) for name in ("out", "c", "bias", "scale_a", "scale_b"))
    library = libraries.library_of(a)
    arguments = options.arguments(x, y, options.out or x, library.current_stream(GPU) or 0)
    streams.run(diary.execute, arguments, library, (a, b, *given))


# -- run ------------------------------------------------------------------------------------------


def test_arrays_of_one_library_need_nothing_but_its_stream(diary: Diary) -> None:
    class Parameter(Alpha):
        """A second class of arrays of the same library."""

    libraries.BY_TYPE[Parameter] = ALPHA
    try:
        run(diary, array(Alpha), array(Parameter), bias=array(Alpha), scale_a=2.0, scale_b=0.5)
    finally:
        del libraries.BY_TYPE[Parameter]
    assert diary.entries == [("execute", 11)]


def test_the_stream_is_that_of_the_first_operand(diary: Diary) -> None:
    run(diary, array(Alpha), array(Beta))
    assert diary.entries == [("order", 22, 11), ("execute", 11), ("order", 11, 22)]
    diary.entries.clear()
    run(diary, array(Beta), array(Alpha))
    assert diary.entries == [("order", 11, 22), ("execute", 22), ("order", 22, 11)]


@pytest.mark.parametrize("names", [["out"], ["c"], ["bias"], ["scale_a"], ["scale_b"], ["c", "bias", "out"]])
def test_every_array_of_a_call_is_waited_for_and_each_stream_once(diary: Diary, names: list[str]) -> None:
    run(diary, array(Alpha), array(Alpha), **{name: array(Beta) for name in names})
    assert diary.entries == [("order", 22, 11), ("execute", 11), ("order", 11, 22)]


def test_libraries_on_one_stream_do_not_wait_for_each_other(diary: Diary, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(BETA, "stream", 11)
    run(diary, array(Alpha), array(Beta))
    a = array(Alpha)
    x = ALPHA.view(a)
    streams.run(diary.execute, PLAIN.arguments(x, x, x, 11), ALPHA, (a, a, None, None, None, None, None))
    assert diary.entries == [("execute", 11)] * 2


def test_owners_are_held_after_everything_is_queued(diary: Diary) -> None:
    run(diary, array(Keeper, "a"), array(Keeper, "b"), c=array(Keeper, "c"))
    assert diary.entries == [("execute", 33), ("keep", ["a", "b", "c"], 33)]
    diary.entries.clear()
    run(diary, array(Alpha, "a"), array(Keeper, "b"))
    assert diary.entries == [("order", 33, 11), ("execute", 11), ("order", 11, 33), ("keep", ["b"], 11)]


@pytest.mark.parametrize("fails", [("execute", 11), ("order", 11, 22)], ids=["product", "join"])
def test_a_failure_leaves_streams_joined_and_owners_held(diary: Diary, fails: tuple[Any, ...]) -> None:
    diary.fails = fails
    with pytest.raises(BackendError, match=f"{fails[0]} failed"):
        run(diary, array(Alpha, "a"), array(Beta, "b"), c=array(Keeper, "c"))
    assert diary.entries == [
        ("order", 22, 11),
        ("order", 33, 11),
        ("execute", 11),
        ("order", 11, 33),
        ("order", 11, 22),
        ("keep", ["c"], 11),
    ]


def test_nothing_runs_before_its_operands_are_ready(diary: Diary) -> None:
    diary.fails = ("order", 33, 11)
    with pytest.raises(BackendError, match="order failed"):
        run(diary, array(Alpha, "a"), array(Beta, "b"), c=array(Keeper, "c"))
    assert ("execute", 11) not in diary.entries
    assert diary.entries[-2:] == [("order", 11, 22), ("keep", ["c"], 11)]


def test_another_librarys_arrays_need_a_provider(diary: Diary, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(device_memory._loaders, GPU.type)
    with pytest.raises(DeviceError, match="lowprec cannot allocate the result on cuda:0"):
        run(diary, array(Alpha), array(Beta))
    assert diary.entries == []


def test_host_arrays_have_no_stream(diary: Diary, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "run", lambda *_: pytest.fail("a host array went by a stream"))
    a = np.eye(3, dtype=np.float32)
    np.testing.assert_array_equal(lowprec.matmul(a, a, out=a), np.eye(3))
