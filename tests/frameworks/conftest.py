"""The ``xp`` fixture: a test that takes it runs once for every array library."""

from __future__ import annotations

import pytest

from frameworks.backends import ArrayNamespace, Backend


def load_or_skip(backend: Backend) -> ArrayNamespace:
    reason = backend.skip_reason()
    if reason:
        pytest.skip(reason)
    return backend.load()


@pytest.fixture(params=list(Backend), ids=lambda b: b.value)
def xp(request: pytest.FixtureRequest) -> ArrayNamespace:
    """Each array library under test."""
    return load_or_skip(request.param)


@pytest.fixture(params=list(Backend), ids=lambda b: f"with_{b.value}")
def other_xp(request: pytest.FixtureRequest) -> ArrayNamespace:
    """A second library, for operands of two libraries."""
    return load_or_skip(request.param)
