"""Array libraries as fixtures: a test that takes ``xp`` runs once for each."""

import pytest

import lowprec
from frameworks.backends import Backend
from frameworks.torch_switches import Switches


def load_or_skip(backend):
    reason = backend.skip_reason()
    if reason:
        pytest.skip(reason)
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


@pytest.fixture
def switches(torch):
    """PyTorch's switches, in their start state."""
    found = Switches(torch)
    found.reset()
    yield found
    found.reset()
