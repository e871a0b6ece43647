"""Memory that is kept for later products: given back on demand, and where there is too little."""

import numpy as np
import pytest

import lowprec
from lowprec.arrays.numpy_library import NUMPY
from lowprec.backends.cpu import backend, library
from support.programs import in_threads

A = np.arange(6, dtype=np.float32).reshape(2, 3)

needs_library = pytest.mark.skipif(library.library() is None, reason="lowprec has no kernels")


def kept_bytes():
    return library.functions().kept_bytes()


@pytest.fixture
def kept():
    """Memory of products of this thread and of another is kept."""
    assert backend  # only backends that are loaded give memory back
    lowprec.release_memory()
    a = np.ones((500, 500), np.float32)
    in_threads(2, lambda _: lowprec.matmul(a, a))
    assert kept_bytes() >= 1 << 20


@needs_library
@pytest.mark.usefixtures("kept")
def test_memory_of_all_threads_is_given_back():
    lowprec.release_memory()
    assert kept_bytes() == 0


@needs_library
def test_kept_memory_is_bounded():
    a = np.ones((3000, 3000), np.float32)
    in_threads(4, lambda i: lowprec.matmul(a[: 500 * (i + 1)], a))
    assert kept_bytes() <= 512 << 20
    lowprec.release_memory()


@needs_library
@pytest.mark.parametrize(
    ("m", "k", "n", "mode", "most"),
    [
        pytest.param(1, 1 << 22, 1, "fp32", 8 << 20, id="dot"),
        pytest.param(1, 1 << 22, 1, "bf16", 8 << 20, id="dot-bf16"),
        pytest.param(4, 1 << 20, 4, "fp32", 8 << 20, id="few-rows-and-columns"),
        pytest.param(1, 1 << 20, 40, "fp32", 8 << 20, id="one-row"),
        pytest.param(300, 4096, 6144, "bf16x6", 128 << 20, id="columns-of-b"),
    ],
)
def test_packed_operands_are_bounded(m, k, n, mode, most):
    lowprec.release_memory()
    lowprec.matmul(np.ones((m, k), np.float32), np.ones((k, n), np.float32), math_mode=mode)
    assert 0 < kept_bytes() <= most


class OutOfMemoryError(RuntimeError):
    """As PyTorch has it."""


@needs_library
@pytest.mark.usefixtures("kept")
@pytest.mark.parametrize("error", [MemoryError, OutOfMemoryError])
def test_a_result_is_allocated_at_the_second_try(monkeypatch, error):
    allocate = type(NUMPY).allocate

    def where_nothing_is_kept(self, *arguments):
        if kept_bytes():
            raise error("full")
        return allocate(self, *arguments)

    monkeypatch.setattr(type(NUMPY), "allocate", where_nothing_is_kept)
    np.testing.assert_array_equal(lowprec.matmul(A, A.T), A @ A.T)


@pytest.mark.parametrize("error", [MemoryError, ValueError])
def test_other_errors_and_a_second_one_are_reported(monkeypatch, error):
    tries = []

    def refuse(self, *_):
        tries.append(self)
        raise error("full")

    monkeypatch.setattr(type(NUMPY), "allocate", refuse)
    with pytest.raises(error, match="full"):
        lowprec.matmul(A, A.T)
    assert len(tries) == (2 if error is MemoryError else 1)
