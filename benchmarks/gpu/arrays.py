"""PyTorch's tensors on the GPU, or arrays of the software CUDA, from NumPy's arrays and back."""

from __future__ import annotations

import importlib
from typing import Any

import ml_dtypes
import numpy as np

#: The GPU of the tests' software CUDA, if it is in use.
software: Any = None


def use_software() -> None:
    """Replace CUDA by the software of the tests."""
    global software
    from cuda_backend.device_fixture import SoftwareGpu, install

    software = SoftwareGpu(install(1))


def numpy_dtype(name: str) -> np.dtype[Any]:
    """Return NumPy's dtype of an element type by lowprec's name."""
    return np.dtype(getattr(ml_dtypes, name, name))


def put(array: Any) -> Any:
    """Return a tensor on the current GPU with the elements of a NumPy array, those of ml_dtypes included."""
    if software is not None:
        return software.put(array)
    torch, name = importlib.import_module("torch"), array.dtype.name
    # PyTorch does not read ml_dtypes' types. They fit in float32.
    readable = array if hasattr(np, name) else array.astype(np.float32)
    return torch.from_numpy(readable).to(getattr(torch, name)).cuda()


def get(tensor: Any) -> Any:
    """Return the elements in host memory; types that NumPy lacks become float32."""
    if software is not None:
        return software.get(tensor)
    if not hasattr(np, str(tensor.dtype).removeprefix("torch.")):
        tensor = tensor.float()
    return tensor.cpu().numpy()
