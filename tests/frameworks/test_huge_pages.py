"""Large results in host memory: the system is asked for huge pages, for them and for nothing else."""

import mmap
import re
from pathlib import Path

import numpy as np
import pytest

import lowprec
from frameworks.backends import Backend
from frameworks.conftest import load_or_skip
from lowprec.arrays import torch_library

SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")
NEEDS_HUGE_PAGES = pytest.mark.skipif(not SETTING.exists(), reason="the system has no huge pages")
PAGE = mmap.PAGESIZE


def _flags(address):
    """Return what the system notes of the memory at an address."""
    for area in re.split(
        r"^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text(), flags=re.MULTILINE
    ):
        if found := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", area):
            first, end = (int(x, 16) for x in found.groups())
            if first <= address < end:
                return re.search(r"^VmFlags:(.*)$", area, re.MULTILINE).group(1)
    raise AssertionError("no such memory")


@NEEDS_HUGE_PAGES
@pytest.mark.parametrize("backend", [Backend.TORCH, Backend.NUMPY, Backend.JAX], ids=str)
def test_large_results_are_in_huge_pages(backend):
    xp = load_or_skip(backend)
    a = xp.asarray(np.ones((4096, 2), np.float32))
    b = xp.asarray(np.ones((2, 4096), np.float32))
    c = lowprec.matmul(a, b, math_mode="bf16")
    address = lowprec.arrays.library_of(c).view(c).address
    assert " hg" in _flags(address + (32 << 20))


@pytest.fixture
def calls(monkeypatch):
    """The arguments of calls of the system, which refuses."""
    seen = []
    monkeypatch.setattr(
        torch_library, "_madvise", lambda: lambda *arguments: seen.append(arguments) or -1
    )
    monkeypatch.setattr(mmap, "MADV_HUGEPAGE", 14, raising=False)
    return seen


@pytest.mark.parametrize(
    ("address", "nbytes", "first", "last"),
    [
        (5 * PAGE, 2 * PAGE, 5 * PAGE, 7 * PAGE),
        (5 * PAGE + 64, 3 * PAGE, 6 * PAGE, 8 * PAGE),
        (5 * PAGE - 64, 3 * PAGE, 5 * PAGE, 7 * PAGE),
    ],
)
def test_neighbours_of_a_result_are_left_alone(calls, address, nbytes, first, last):
    torch_library.request_huge_pages(address, nbytes)
    assert calls == [(first, last - first, 14)]


def test_a_refusal_and_small_results_go_unnoticed(torch, calls):
    a = torch.ones(1024, 4)
    assert (lowprec.matmul(a, a.T) == torch.full((1024, 1024), 4.0)).all()  # 4 MiB
    assert len(calls) == 1
    assert (lowprec.matmul(a, a[1:].T) == torch.full((1024, 1023), 4.0)).all()
    assert len(calls) == 1


def test_a_system_without_huge_pages_is_not_asked(monkeypatch):
    monkeypatch.delattr(mmap, "MADV_HUGEPAGE", raising=False)
    torch_library._madvise.cache_clear()
    try:
        torch_library.request_huge_pages(0, 64 * PAGE)
        assert torch_library._madvise() is None
    finally:
        torch_library._madvise.cache_clear()
