"""PyTorch's tensors on the GPU, from NumPy's arrays and back."""

from __future__ import annotations

import importlib
from typing import Any

import ml_dtypes
import numpy as np


def numpy_dtype(name: str) -> np.dtype[Any]:
    """Return NumPy's dtype of an element type by lowprec's name."""
    return np.dtype(getattr(ml_dtypes, name, name))


class TorchArrays:
    """Tensors on the current GPU."""

    def __init__(self) -> None:
        self.torch = importlib.import_module("torch")

    def put(self, array: Any) -> Any:
        """Return a tensor with the elements of a NumPy array, those of ml_dtypes included."""
        array = np.ascontiguousarray(array)
        kind = array.dtype.name
        if hasattr(np, kind):
            return self.torch.from_numpy(array).cuda()
        # PyTorch has these types, and reads NumPy's integers of their width.
        carrier = {1: np.uint8, 2: np.int16}[array.dtype.itemsize]
        return self.torch.from_numpy(array.view(carrier)).view(getattr(self.torch, kind)).cuda()

    def get(self, tensor: Any) -> Any:
        """Return the elements in host memory; types that NumPy lacks become float32."""
        if not hasattr(np, str(tensor.dtype).removeprefix("torch.")):
            tensor = tensor.float()
        return tensor.cpu().numpy()
