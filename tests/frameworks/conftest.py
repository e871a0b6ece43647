"""Array libraries as fixtures: a test that takes ``xp`` runs once for each."""

import pytest

import lowprec
from frameworks.backends import Backend


def load_or_skip(backend):
    if backend in (Backend.TORCH, Backend.JAX):
        pytest.importorskip(backend.value, reason=f"{backend.value} is not installed")
    return backend.load()


@pytest.fixture(params=list(Backend), ids=lambda b: b.value)
def xp(request):
    return load_or_skip(request.param)


@pytest.fixture(params=list(Backend), ids=lambda b: f"with_{b.value}")
def other_xp(request):
    """A second library, for operands of two libraries."""
    return load_or_skip(request.param)


@pytest.fixture
def lt(torch):
    return lowprec.torch


@pytest.fixture
def quick_inductor(torch):
    """Inductor without precompiled headers and trials of vector units, which take longer than the kernels."""
    from torch._inductor import config

    with config.patch({"cpp_cache_precompile_headers": False, "cpp.vec_isa_ok": False}):
        yield
