"""Division of gradients by the scale and detection of Inf and NaN, in one pass, for each library.

Flags stay on the device of the arrays, so nothing waits for a GPU. As in PyTorch, gradients are checked before the
division.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from lowprec.amp.casting import times
from lowprec.amp.containers import leaves, mapped
from lowprec.amp.rules import GradientTypeError
from lowprec.arrays import DLPackArray, library_name, library_of
from lowprec.arrays.namespaces import array_module, dtype_name, shape_of
from lowprec.arrays.view import data_pointer
from lowprec.backends.cpu import unscaling as host_unscaling
from lowprec.errors import ArrayError, DTypeError, ShapeError

Arrays = Sequence[Any]
#: Arrays, and whether any had Inf or NaN.
Unscaled = tuple[list[Any], Any]

#: Element types of gradients.
DTYPES = ("float32", "float64", "bfloat16")


def unscale(grads: Any, scale: float, out: Any = None) -> tuple[Any, list[Any]]:
    """Return gradients divided by the scale, and flags that are true where one was Inf or NaN.

    ``out`` receives the results and may be ``grads``. Flags are per library and device; ``bool(flag)`` waits for it.
    """
    arrays = leaves(grads)
    if not arrays:
        raise ArrayError("no gradients to unscale; pass a container with at least one array")
    targets: list[Any] = [None] * len(arrays)
    if out is not None:
        targets = []
        mapped(lambda _, target: targets.append(target), grads, out)
    for x, target in zip(arrays, targets, strict=True):
        _check(x, target)
    # As PyTorch: the reciprocal is rounded to float32 once, whatever the gradients' type.
    inverse = np.float32(1.0 / scale)
    results: dict[int, Any] = {}
    flags = []
    for (library, _), members in _groups(arrays, targets).items():
        work = _WORK.get(library, _by_namespace)
        gradients = [arrays[i] for i in members]
        outs = [targets[i] for i in members]
        quotients, flag = work(gradients, outs, inverse)
        flags.append(flag)
        results.update(zip(members, quotients, strict=True))
    if out is not None:
        return out, flags
    following = iter(range(len(arrays)))
    return mapped(lambda _: results[next(following)], grads), flags


def _groups(arrays: Arrays, targets: Arrays) -> dict[tuple[str, str], list[int]]:
    """Return the numbers of the gradients by library and device; of tied weights only the first."""
    groups: dict[tuple[str, str], list[int]] = {}
    names: dict[type, str] = {}
    first: dict[Any, int] = {}  # first gradient by target
    for i, x in enumerate(arrays):
        kind = type(x)
        if kind not in names:
            names[kind] = _library(x)
        name = names[kind]
        target = targets[i]
        same = i
        if target is not None:
            same = first.setdefault(_elements(target, name), i)
        if same != i:
            if _elements(x, name) != _elements(arrays[same], name):
                raise ArrayError(
                    "out contains one array for two gradients; pass one array for each"
                )
            continue
        device = ""
        if name in ("torch", "cupy"):
            device = str(getattr(x, "device", ""))
        groups.setdefault((name, device), []).append(i)
    return groups


def _elements(array: Any, library: str) -> Any:
    """Return a key that is equal for views of the same elements; by identity where the library hides addresses."""
    if library == "numpy" and array.size:
        return data_pointer(array), array.shape, array.strides
    if library == "torch" and (values := _values(array)).numel():
        return values.data_ptr(), values.shape, values.stride()
    return id(array)


def _values(tensor: Any) -> Any:
    if tensor.is_sparse:
        return tensor._values()
    return tensor


def _library(array: Any) -> str:
    library = library_name(array)
    if library == "dlpack" and hasattr(array, "__array_namespace__"):
        library = type(array).__module__.partition(".")[0]
    return library


def check_gradient(array: Any, *, coo: bool = False) -> str:
    """Return the element type of a gradient; raise for illegal types and layouts (``coo`` allows PyTorch's COO)."""
    name = dtype_name(array)
    if name == "float16":
        raise GradientTypeError(
            "float16 gradients cannot be unscaled, because small ones would be lost again. Keep master weights in "
            "float32 (lowprec.amp.MasterWeights) and cast their gradients to float32 first"
        )
    if name not in DTYPES:
        raise DTypeError(f"gradients must be of {', '.join(DTYPES)}, got {name}; cast them first")
    # PyTorch: `is_sparse` is true for COO only, not for CSR, CSC and blocks.
    is_sparse = hasattr(array, "is_sparse") and str(array.layout).startswith("torch.sparse")
    if is_sparse and not array.is_sparse:
        raise ArrayError("a sparse gradient: pass grad.values()")
    if is_sparse and not coo:
        raise ArrayError("a sparse gradient: pass grad.coalesce().values()")
    return name


def _check(array: Any, target: Any) -> None:
    name = check_gradient(array, coo=True)
    if target is None or target is array:
        return
    is_alike = type(target) is type(array) and dtype_name(target) == name
    if not is_alike:
        raise DTypeError(
            f"out holds {type(target).__name__} of {dtype_name(target)} for a gradient that is "
            f"{type(array).__name__} of {name}; make both alike"
        )
    if shape_of(target) != shape_of(array):
        raise ShapeError(
            f"out of shape {shape_of(target)} for a gradient of shape {shape_of(array)}"
        )
    if getattr(target, "is_sparse", False) != getattr(array, "is_sparse", False):
        raise ArrayError("out is a sparse tensor if and only if the gradient is; make both alike")


def _new(empty_like: Callable[[Any], Any], arrays: Arrays, targets: Arrays) -> list[Any]:
    pairs = zip(arrays, targets, strict=True)
    return [empty_like(x) if out is None else out for x, out in pairs]


def _by_numpy(arrays: Arrays, targets: Arrays, inverse: Any) -> Unscaled:
    plain = functools.partial(np.empty_like, subok=False)
    results = _new(plain, arrays, targets)
    for out in results:
        if not out.flags.writeable:
            raise ArrayError("out is read-only; pass an array that may be written")
    pairs = list(zip(arrays, results, strict=True))
    return results, host_unscaling.unscale(pairs, inverse)


def _by_dlpack(arrays: Arrays, targets: Arrays, inverse: Any) -> Unscaled:
    views = [library_of(x).view(x) for x in arrays]
    if not all(view.device.is_host for view in views):
        raise ArrayError(
            "gradients that are known only by DLPack are unscaled in host memory; pass arrays of PyTorch, JAX or "
            "CuPy, for example by their from_dlpack"
        )
    outs: list[Any] = []
    for out in targets:
        outs.append(None if out is None else library_of(out).view(out).ndarray())
    gradients = [view.ndarray() for view in views]
    results, flag = _by_numpy(gradients, outs, inverse)
    return [DLPackArray(x) for x in results], flag


def _by_torch(arrays: Arrays, targets: Arrays, inverse: Any) -> Unscaled:
    torch: Any = sys.modules["torch"]
    device = arrays[0].device
    number = {"dtype": torch.float32, "device": device}
    flag = torch.zeros((), **number)
    factor = torch.full((), float(inverse), **number)
    with torch.no_grad():
        results = _new(torch.empty_like, arrays, targets)
        by_dtype: dict[Any, list[tuple[Any, Any]]] = {}
        for x, out in zip(arrays, results, strict=True):
            by_dtype.setdefault(x.dtype, []).append((x, out))
        for pairs in by_dtype.values():
            # One kernel each for all tensors of an element type.
            copied = [(x, out) for x, out in pairs if out is not x]
            if copied:
                # A detached sparse tensor has its own indices.
                copies = [out if out.is_sparse else out.detach() for _, out in copied]
                torch._foreach_copy_(copies, [x.detach() for x, _ in copied])
            values = [_values(out.detach()) for _, out in pairs]
            torch._amp_foreach_non_finite_check_and_unscale_(values, flag, factor)
    return results, flag


def _by_cupy(arrays: Arrays, targets: Arrays, inverse: Any) -> Unscaled:
    cupy: Any = sys.modules["cupy"]
    with cupy.cuda.Device(arrays[0].device.id):
        return _by_namespace(arrays, targets, inverse)


def _by_jax(arrays: Arrays, targets: Arrays, inverse: Any) -> Unscaled:
    jax: Any = sys.modules["jax"]
    if any(isinstance(x, jax.core.Tracer) for x in arrays):
        raise ArrayError(
            "JAX traces these gradients, and LossScaler needs their values, which do not exist yet; use "
            "lowprec.amp.functional inside jit, or unscale the compiled function's results"
        )
    if any(out is not None for out in targets):
        raise ArrayError("JAX's arrays cannot be written: omit out= and use the result")
    return _jax_program(jax)(arrays, inverse)  # type: ignore[no-any-return]


@functools.cache
def _jax_program(jax: Any) -> Any:
    return jax.jit(functools.partial(divided, jax.numpy))


def _by_namespace(arrays: Arrays, targets: Arrays, inverse: Any) -> Unscaled:
    xp = array_module(arrays[0])
    results, flag = divided(xp, arrays, float(inverse))
    for i, (result, out) in enumerate(zip(results, targets, strict=True)):
        if out is not None:
            out[...] = result
            results[i] = out
    return results, flag


def divided(xp: Any, arrays: Arrays, inverse: Any) -> Unscaled:
    """Return arrays multiplied by the inverse of the scale, and whether any has Inf or NaN, without a branch."""
    flags = [xp.any(~xp.isfinite(x)) for x in arrays]
    flag = functools.reduce(xp.logical_or, flags)
    return [times(x, inverse) for x in arrays], flag


_WORK = {
    "numpy": _by_numpy,
    "dlpack": _by_dlpack,
    "torch": _by_torch,
    "cupy": _by_cupy,
    "jax": _by_jax,
}
