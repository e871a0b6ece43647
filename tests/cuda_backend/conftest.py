"""GPUs for the tests of this folder."""

import gc
import os
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

HAS_BINDINGS = all(find_spec(name) for name in ("nvmath", "cuda", "cuda.bindings", "cuda.core"))
if HAS_BINDINGS:
    import software_cuda
    from cuda_backend import device_fixture, device_libraries
    from cuda_backend.cuda_reset import reset
    from lowprec.arrays import libraries
    from lowprec.backends.cuda import memory
    from lowprec.core import executors
else:
    # The software replaces functions, and uses the real libraries' types.
    collect_ignore_glob = ["test_*.py"]


def pytest_itemcollected(item):
    """Put the features that a test covers, and the device, into the report."""
    marks = list(item.iter_markers("feature"))
    if not marks:
        return
    if "software" in getattr(item, "fixturenames", ()):
        raise pytest.UsageError(f"{item.nodeid}: on the software CUDA alone it shows no feature")
    parameters = item.callspec.params if hasattr(item, "callspec") else {}
    for words in (words for mark in marks for words in mark.args):
        item.user_properties.append(("feature", words.format(**parameters)))
    where = "gpu" if device_fixture.has_real_gpu() else "software"
    item.user_properties.append(("device", where))


@pytest.fixture(scope="session", autouse=True)
def kept_kernels(tmp_path_factory):
    """A cache of the tests' own, of which several runs share the compiled kernels in the folder of a variable."""
    cache = tmp_path_factory.mktemp("cache")
    if shared := os.environ.get("LOWPREC_TEST_KERNELS"):
        Path(shared).mkdir(mode=0o700, parents=True, exist_ok=True)
        (cache / "kernels").symlink_to(Path(shared).resolve())
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LOWPREC_CACHE_DIR", str(cache))
        yield


@pytest.fixture(scope="session", autouse=True)
def without_waiting_thread():
    """On software, tests count calls and decide when work runs, with which a polling thread would interfere."""
    if not device_fixture.has_real_gpu():
        memory._waiter.stop()


@pytest.fixture
def waiting_thread(software):
    """The thread that releases operands polls in this test."""
    memory._waiter._is_stopped = False
    yield
    memory._waiter.stop()


def _left(software):
    """Count leaked objects; lowprec's own stream of a device stays, and memory that pytest still holds."""
    stays = {"streams", "blocks", "bytes"}
    return {name: count for name, count in software.live().items() if count and name not in stays}


@pytest.fixture
def cuda():
    """A software CUDA that lowprec does not use, for tests of its own; at the end no misuse may be left."""
    made = software_cuda.Software([software_cuda.DeviceModel()] * 2)
    yield made
    made.drain()
    assert made.faults == []


@pytest.fixture
def install():
    """Simulate devices, in use by lowprec; at the end there may be no misuse, and no object may be left."""
    made = []

    def new(capability=(10, 0), devices=1, **words):
        made.append(
            device_fixture.SoftwareGpu(
                software_cuda.install(devices, capability=capability, **words)
            )
        )
        executors.clear_caches()
        return made[-1]

    yield new
    faults, left = [], {}
    for gpu in reversed(made):
        found = gpu.software
        try:
            gpu.drain()
            faults += found.faults
        finally:
            executors.clear_caches()
            reset()
            if _left(found):
                # There may be cycles; a collection takes too long to make one after each test.
                gc.collect()
                reset()
            left |= _left(found)
            software_cuda.uninstall()
    assert faults == []
    assert not left


@pytest.fixture
def software(install):
    """The software CUDA, with two devices, in use by lowprec."""
    return install((9, 0), devices=2)


@pytest.fixture
def few_blocks():
    """A GPU; where there is none, one in software with so few multiprocessors that blocks take turns."""
    with device_fixture.few_blocks():
        yield


@pytest.fixture
def cache(software, tmp_path, monkeypatch):
    """An empty cache on disk, and no plans or choices in memory."""
    monkeypatch.setenv("LOWPREC_CACHE_DIR", str(tmp_path))
    executors.clear_caches()
    reset()
    return tmp_path


@pytest.fixture
def gpu(request):
    """A GPU: a real one if the environment says that there is one, else software."""
    if device_fixture.has_real_gpu():
        return device_fixture.TorchGpu()
    return request.getfixturevalue("software")


@pytest.fixture
def cupy(software, monkeypatch):
    """A CuPy on the software devices."""
    made = software_cuda.Cupy(software.software.runtime)
    monkeypatch.setitem(sys.modules, "cupy", made)
    before = libraries._INSTANCES.pop("cupy", None)
    yield made
    libraries._INSTANCES.pop("cupy", None)
    libraries.BY_TYPE.pop(made.ndarray, None)
    if before is not None:
        libraries._INSTANCES["cupy"] = before


@pytest.fixture(params=device_libraries.STREAMED if HAS_BINDINGS else ())
def library(request):
    """A library with streams of its own: each real one if there is a real device, else software."""
    if not device_fixture.has_real_gpu():
        return device_libraries.SoftwareCupy(request.getfixturevalue("cupy"))
    made = {"cupy": device_libraries.Cupy, "torch": device_libraries.Torch}[request.param]
    return made(pytest.importorskip(request.param, reason=f"{request.param} is not installed"))
