"""What is said of arrays on a GPU where something that they need is missing."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import lowprec
from lowprec.arrays import device_array
from lowprec.arrays.view import Device
from lowprec.backends.cuda import libraries as module
from lowprec.formats import DType

pytest.importorskip("nvmath", reason="nvmath-python is not installed")


class OnDevice:
    """An array of which nothing is known but that it is on cuda:0."""

    def __init__(self) -> None:
        self.host = np.ones((4, 4), np.float32)

    def __dlpack_device__(self) -> tuple[int, int]:
        return (2, 0)

    def __dlpack__(self, *, stream: int | None = None, max_version: Any = None) -> object:
        block = SimpleNamespace(address=self.host.ctypes.data, share=lambda: None)
        array = device_array.DeviceArray(block, (4, 4), DType.FLOAT32, Device(2, 0), 1)
        return array.__dlpack__(stream=-1, max_version=max_version)


@pytest.fixture
def fresh() -> Any:
    """Whatever is loaded is looked up anew, and put back at the end."""
    before = module.use(None)
    yield
    module.use(before)


class Runtime:
    """``cuda.bindings.runtime`` as far as it tells of devices."""

    def __init__(self, status: str, count: int = 0) -> None:
        from cuda.bindings import runtime

        self.cudaError_t = runtime.cudaError_t
        self._found = getattr(runtime.cudaError_t, status), count

    def cudaGetDeviceCount(self) -> tuple[Any, int]:
        return self._found


def refuse(error: type[Exception], words: str) -> None:
    x = OnDevice()
    with pytest.raises(error, match=words):
        lowprec.matmul(x, x)
    # Arrays in host memory are served all the same.
    host = np.eye(3, dtype=np.float32)
    np.testing.assert_array_equal(lowprec.matmul(host, host), host)


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize(
    "missing", ["nvmath.bindings.cublasLt", "cuda.bindings.runtime", "cuda.core"]
)
def test_python_packages(monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    refuse(lowprec.BackendError, r'need nvmath-python.*pip install "lowprec\[cuda13\]"')


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize(
    ("status", "words"),
    [
        ("cudaErrorInsufficientDriver", "no NVIDIA driver was found"),
        ("cudaErrorNoDevice", "none is visible.*CUDA_VISIBLE_DEVICES"),
        ("cudaErrorInitializationError", "none is visible"),
        ("cudaSuccess", "none is visible"),
    ],
)
def test_driver_and_devices(monkeypatch: pytest.MonkeyPatch, status: str, words: str) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings.runtime", Runtime(status))
    refuse(lowprec.DeviceError, words)


@pytest.mark.usefixtures("fresh")
def test_cublas_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings.runtime", Runtime("cudaSuccess", 1))

    class CublasLt:
        def get_version(self) -> int:
            raise RuntimeError("libcublasLt.so.13: cannot open shared object file")

    monkeypatch.setitem(sys.modules, "nvmath.bindings.cublasLt", CublasLt())
    refuse(lowprec.BackendError, "cuBLASLt cannot be loaded: libcublasLt.so.13")


@pytest.mark.usefixtures("fresh")
def test_an_old_cublas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings.runtime", Runtime("cudaSuccess", 1))
    old = SimpleNamespace(get_version=lambda: 111103)
    monkeypatch.setitem(sys.modules, "nvmath.bindings.cublasLt", old)
    refuse(lowprec.BackendError, r"cuBLASLt 11\.11 is too old: lowprec needs 12\.0")


@pytest.mark.usefixtures("fresh")
def test_a_handle_for_users(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings.runtime", Runtime("cudaErrorNoDevice"))
    with pytest.raises(lowprec.DeviceError, match="none is visible"):
        lowprec.cublas_handle()
