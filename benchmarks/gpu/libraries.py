"""Arrays on the device at hand: torch tensors on a GPU, NumPy arrays without one."""

from __future__ import annotations

import importlib
from typing import Any

import ml_dtypes
import numpy as np

#: NumPy's types of the same width, for what torch does not take from NumPy.
_CARRIERS = {1: np.uint8, 2: np.int16}


def why_no_gpu() -> str:
    """Return why lowprec can use no GPU here, empty if it can."""
    try:
        module = importlib.import_module("lowprec.backends.cuda.libraries")
        module.libraries()
    except Exception as error:  # noqa: BLE001 - the report says what it was
        return " ".join(str(error).split()) or type(error).__name__
    return ""


def optional(name: str) -> Any:
    """Return a module, None where it cannot be imported."""
    try:
        return importlib.import_module(name)
    except Exception:  # noqa: BLE001 - a broken library raises what it likes
        return None


def numpy_dtype(name: str) -> np.dtype[Any]:
    """Return NumPy's dtype of an element type by lowprec's name."""
    return np.dtype(getattr(ml_dtypes, name, name))


class NumpyArrays:
    """Arrays in host memory."""

    device = "cpu"

    def put(self, array: Any) -> Any:
        """Return an array for lowprec with these elements."""
        return array

    def get(self, array: Any) -> Any:
        """Return the elements as NumPy holds them."""
        return np.asarray(array)

    def scalar(self, value: float) -> Any:
        """Return a float32 array of one element."""
        return np.array([value], np.float32)

    def wait(self) -> None:
        """Wait for the device."""


class TorchArrays:
    """Tensors on the current GPU, or on another device of torch's.

    Parameters
    ----------
    device : str
    """

    def __init__(self, device: str = "cuda") -> None:
        self.torch = importlib.import_module("torch")
        self.device = device

    def dtype(self, name: str) -> Any:
        """Return torch's dtype by lowprec's name."""
        return getattr(self.torch, name)

    def put(self, array: Any) -> Any:
        """Return a tensor with the elements of a NumPy array, those of ml_dtypes included."""
        array = np.ascontiguousarray(array)
        kind = array.dtype.name
        if not hasattr(np, kind):
            carried = self.torch.from_numpy(array.view(_CARRIERS[array.dtype.itemsize]))
            return carried.view(self.dtype(kind)).to(self.device)
        return self.torch.from_numpy(array).to(self.device)

    def get(self, tensor: Any) -> Any:
        """Return the elements in host memory; types that NumPy lacks become float32."""
        if not hasattr(np, str(tensor.dtype).removeprefix("torch.")):
            tensor = tensor.float()
        return tensor.cpu().numpy()

    def scalar(self, value: float) -> Any:
        """Return a float32 tensor of one element."""
        return self.torch.full((1,), value, dtype=self.torch.float32, device=self.device)

    def wait(self) -> None:
        """Wait for the device."""
        if self.device != "cpu":
            self.torch.cuda.synchronize()


def arrays(device: str) -> NumpyArrays | TorchArrays:
    """Return the kind of arrays for "cpu" or "gpu"."""
    return TorchArrays() if device == "gpu" else NumpyArrays()


def short(error: BaseException) -> str:
    """Return an error in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:400]
