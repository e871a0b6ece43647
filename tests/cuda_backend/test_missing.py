"""The errors for arrays on a GPU where a package, the driver or a device is missing."""

import sys
from types import SimpleNamespace

import numpy as np
import pytest

import lowprec
from lowprec.arrays.dlpack import export
from lowprec.arrays.view import Device
from lowprec.backends.cuda import libraries as module
from lowprec.formats import DType


class OnDevice:
    """An array on cuda:0 that is known by DLPack alone."""

    def __dlpack_device__(self):
        return (2, 0)

    def __dlpack__(self, *, stream=None, max_version=None):
        host = np.ones((4, 4), np.float32)
        return export(host, DType.FLOAT32, max_version, device=Device(2, 0), copied=False)


@pytest.fixture(autouse=True)
def fresh():
    """The modules are loaded again, and restored at the end."""
    before = module.use(None)
    yield
    module.use(before)


class Runtime:
    """The part of ``cuda.bindings.runtime`` for devices; version 13000 is 13.0."""

    def __init__(self, status, count=None, driver=13000):
        from cuda.bindings import runtime

        self.cudaError_t = runtime.cudaError_t
        self.cudaGetErrorString = runtime.cudaGetErrorString
        self._found = getattr(runtime.cudaError_t, status), count
        self._driver = driver

    def cudaGetDeviceCount(self):
        return self._found

    def cudaDriverGetVersion(self):
        return self.cudaError_t.cudaSuccess, self._driver

    def cudaRuntimeGetVersion(self):
        return self.cudaError_t.cudaSuccess, 13050


def refuse(error, words):
    x = OnDevice()
    with pytest.raises(error, match=words):
        lowprec.matmul(x, x)
    # Arrays in host memory are multiplied all the same.
    host = np.eye(3, dtype=np.float32)
    np.testing.assert_array_equal(lowprec.matmul(host, host), host)


@pytest.mark.parametrize(
    "missing", ["nvmath.bindings.cublasLt", "cuda.bindings.runtime", "cuda.core"]
)
def test_python_packages(monkeypatch, missing):
    monkeypatch.setitem(sys.modules, missing, None)
    refuse(
        lowprec.BackendError,
        r'need nvmath-python.*extra cuda13 \(in a clone: pip install "\.\[cuda13\]"',
    )


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (Runtime("cudaErrorNoDevice"), "none is visible.*CUDA_VISIBLE_DEVICES, or keep the arrays"),
        (Runtime("cudaSuccess", 0), "none is visible.*CUDA_VISIBLE_DEVICES, or keep the arrays"),
        (
            Runtime("cudaErrorInsufficientDriver", driver=0),
            "^no NVIDIA driver was found; install one .*, or keep",
        ),
        (
            Runtime("cudaErrorInsufficientDriver", driver=12040),
            r"supports CUDA 12\.4, .* for CUDA 13\.5; .*cuda12",
        ),
        (
            Runtime("cudaErrorInitializationError"),
            r"\(cudaErrorInitializationError: initial.*\).*forked.*spawn",
        ),
        (
            Runtime("cudaErrorSystemNotReady"),
            r"cannot be used \(cudaErrorSystemNotReady: system not.*\); check nvi",
        ),
    ],
    ids=["no device", "0 devices", "no driver", "old driver", "forked", "not ready"],
)
def test_driver_and_devices(monkeypatch, found, words):
    monkeypatch.setitem(sys.modules, "cuda.bindings.runtime", found)
    refuse(lowprec.DeviceError, words)


def _absent():
    raise RuntimeError("libcublasLt.so.13: cannot open shared object file")


@pytest.mark.parametrize(
    ("get_version", "words"),
    [
        (_absent, "cuBLASLt cannot be loaded: libcublasLt.so.13"),
        (lambda: 111103, r"cuBLASLt 11\.11 is too old: lowprec needs 12\.0"),
    ],
)
def test_cublas(monkeypatch, get_version, words):
    monkeypatch.setitem(sys.modules, "cuda.bindings.runtime", Runtime("cudaSuccess", 1))
    monkeypatch.setitem(
        sys.modules, "nvmath.bindings.cublasLt", SimpleNamespace(get_version=get_version)
    )
    refuse(lowprec.BackendError, words)
