"""GPUs for the tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

pytest.importorskip("nvmath", reason="nvmath-python is not installed")
pytest.importorskip("cuda.bindings", reason="cuda-bindings is not installed")

import device_fixture
from cuda import software as software_cuda
from lowprec import prepared


@pytest.fixture(scope="session", autouse=True)
def kept_kernels(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A cache of the tests' own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOWPREC_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture
def software() -> Iterator[device_fixture.SoftwareGpu]:
    """The software CUDA; at the end nothing may have been done wrong, and nothing may be left."""
    found = software_cuda.install()
    prepared._prepared.clear()
    from lowprec.backends import cuda

    try:
        yield device_fixture.SoftwareGpu(found)
        found.drain()
        assert found.faults == []
        prepared._prepared.clear()
        cuda.reset()
    finally:
        prepared._prepared.clear()
        software_cuda.uninstall()


@pytest.fixture
def gpu(request: pytest.FixtureRequest) -> device_fixture.Gpu:
    """A GPU: a real one if the caller says that there is one, else software."""
    if device_fixture.has_real_gpu():
        return device_fixture.TorchGpu()
    found: device_fixture.Gpu = request.getfixturevalue("software")
    return found
