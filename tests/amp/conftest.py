"""Array libraries with functions of the Array API, NumPy's arrays among them."""

import pytest

from frameworks.backends import Backend
from frameworks.conftest import load_or_skip


@pytest.fixture(params=[Backend.NUMPY, Backend.TORCH, Backend.JAX], ids=lambda b: b.value)
def xp(request):
    return load_or_skip(request.param)
