"""Array libraries as fixtures: a test that takes ``xp`` runs once for each."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from frameworks.backends import ArrayNamespace, Backend
from frameworks.torch_switches import Switches


def load_or_skip(backend: Backend) -> ArrayNamespace:
    reason = backend.skip_reason()
    if reason:
        pytest.skip(reason)
    return backend.load()


@pytest.fixture(params=list(Backend), ids=lambda b: b.value)
def xp(request: pytest.FixtureRequest) -> ArrayNamespace:
    return load_or_skip(request.param)


@pytest.fixture(params=list(Backend), ids=lambda b: f"with_{b.value}")
def other_xp(request: pytest.FixtureRequest) -> ArrayNamespace:
    """A second library, for operands of two libraries."""
    return load_or_skip(request.param)


@pytest.fixture
def torch() -> Any:
    return load_or_skip(Backend.TORCH).torch


@pytest.fixture
def quick_inductor(torch: Any) -> Iterator[None]:
    """Inductor without precompiled headers and trials of vector units, which take longer than the kernels."""
    from torch._inductor import config

    with config.patch({"cpp_cache_precompile_headers": False, "cpp.vec_isa_ok": False}):
        yield


@pytest.fixture
def jax() -> Any:
    return load_or_skip(Backend.JAX).jax


@pytest.fixture
def switches(torch: Any) -> Iterator[Switches]:
    """PyTorch's switches, in their start state."""
    found = Switches(torch)
    found.reset()
    yield found
    found.reset()
