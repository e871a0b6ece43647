"""Arrays of PyTorch's on the GPU, from NumPy's and back; libraries that may be missing."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import ml_dtypes
import numpy as np

#: NumPy's types of the same width, for what torch does not take from NumPy.
_CARRIERS = {1: np.uint8, 2: np.int16}


def optional(name: str) -> Any:
    """Return a module, None where it cannot be imported."""
    try:
        return importlib.import_module(name)
    except Exception:  # noqa: BLE001 - a broken library raises what it likes
        return None


def numpy_dtype(name: str) -> np.dtype[Any]:
    """Return NumPy's dtype of an element type by lowprec's name."""
    return np.dtype(getattr(ml_dtypes, name, name))


class TorchArrays:
    """Tensors on the current GPU, or on another device of torch's."""

    def __init__(self, device: str = "cuda") -> None:
        self.torch = importlib.import_module("torch")
        self.device = device

    def put(self, array: Any) -> Any:
        """Return a tensor with the elements of a NumPy array, those of ml_dtypes included."""
        array = np.ascontiguousarray(array)
        kind = array.dtype.name
        if hasattr(np, kind):
            return self.torch.from_numpy(array).to(self.device)
        carried = self.torch.from_numpy(array.view(_CARRIERS[array.dtype.itemsize]))
        return carried.view(getattr(self.torch, kind)).to(self.device)

    def get(self, tensor: Any) -> Any:
        """Return the elements in host memory; types that NumPy lacks become float32."""
        if not hasattr(np, str(tensor.dtype).removeprefix("torch.")):
            tensor = tensor.float()
        return tensor.cpu().numpy()


def normal(torch: Any, generator: Any, shape: Sequence[int], dtype: str) -> Any:
    """Return a tensor of normal numbers, drawn in float32 unless the element type is wider."""
    kind = getattr(torch, dtype)
    drawn = kind if kind.is_complex or kind == torch.float64 else torch.float32
    return torch.randn(shape, generator=generator, device=generator.device, dtype=drawn).to(kind)
