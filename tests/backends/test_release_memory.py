"""Memory that is kept for later products: given back on demand, and where there is too little."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import lowprec
from lowprec.arrays.numpy_library import NUMPY
from lowprec.backends.cpu import backend, buffers

MIB = 1 << 20
A = np.arange(6, dtype=np.float32).reshape(2, 3)


@pytest.fixture
def kept() -> Iterator[None]:
    """A buffer of this thread and one of another, which is alive, are kept."""
    assert backend  # only backends that are loaded give memory back
    lowprec.release_memory()
    borrowed, leave = threading.Event(), threading.Event()

    def work() -> None:
        with buffers.borrow(8 * MIB):
            pass
        borrowed.set()
        leave.wait()

    thread = threading.Thread(target=work)
    thread.start()
    borrowed.wait()
    with buffers.borrow(4 * MIB):
        pass
    assert buffers.retained_bytes() >= 12 * MIB
    yield
    leave.set()
    thread.join()


@pytest.mark.usefixtures("kept")
def test_buffers_of_all_threads_are_given_back() -> None:
    lowprec.release_memory()
    assert buffers.retained_bytes() == 0


def test_a_buffer_in_use_stays() -> None:
    with buffers.borrow(4 * MIB) as address:
        lowprec.release_memory()
        with buffers.borrow(4 * MIB) as other:
            assert abs(address - other) >= 4 * MIB


def test_nothing_is_left_where_a_thread_ended() -> None:
    before = len(buffers._all)
    thread = threading.Thread(target=lambda: buffers.borrow(1).__enter__())
    thread.start()
    thread.join()
    assert len(buffers._all) == before


class OutOfMemoryError(RuntimeError):
    """As PyTorch has it."""


@pytest.mark.usefixtures("kept")
@pytest.mark.parametrize("error", [MemoryError, OutOfMemoryError])
def test_a_result_is_allocated_at_the_second_try(monkeypatch: pytest.MonkeyPatch, error: type[Exception]) -> None:
    allocate = type(NUMPY).allocate

    def where_nothing_is_kept(self: Any, *arguments: Any) -> Any:
        if buffers.retained_bytes():
            raise error("full")
        return allocate(self, *arguments)

    monkeypatch.setattr(type(NUMPY), "allocate", where_nothing_is_kept)
    np.testing.assert_array_equal(lowprec.matmul(A, A.T), A @ A.T)


@pytest.mark.parametrize("error", [MemoryError, ValueError])
def test_other_errors_and_a_second_one_are_reported(monkeypatch: pytest.MonkeyPatch, error: type[Exception]) -> None:
    tries = []

    def refuse(self: Any, *_: Any) -> Any:
        tries.append(self)
        raise error("full")

    monkeypatch.setattr(type(NUMPY), "allocate", refuse)
    with pytest.raises(error, match="full"):
        lowprec.matmul(A, A.T)
    assert len(tries) == (2 if error is MemoryError else 1)


@pytest.mark.usefixtures("kept")
def test_a_buffer_is_allocated_at_the_second_try(monkeypatch: pytest.MonkeyPatch) -> None:
    empty = np.empty

    def where_nothing_is_kept(*arguments: Any) -> Any:
        if buffers.retained_bytes():
            raise MemoryError("full")
        return empty(*arguments)

    monkeypatch.setattr(buffers.np, "empty", where_nothing_is_kept)
    with buffers.borrow(64 * MIB) as address:
        assert address
