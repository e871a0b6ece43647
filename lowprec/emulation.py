"""Emulate the products of tensor cores, bit by bit.

:func:`mma` is the instruction; :class:`lowprec.emulate` uses the same arithmetic in ``matmul``.

Examples
--------
>>> import numpy as np
>>> from lowprec.emulation import mma
>>> a = np.eye(2, dtype=np.float32)
>>> mma(a, a, a, arch="hopper", format="bf16")
array([[2., 0.],
       [0., 2.]], dtype=float32)
"""

from __future__ import annotations

from typing import Any

import numpy as np

from lowprec.architectures import Emulated, TensorCore, parse_architecture
from lowprec.arrays import CPU, ArrayView, library_of
from lowprec.backends.cpu.emulation import matrix_cores
from lowprec.backends.cpu.emulation.arithmetic import FORMATS, arithmetic
from lowprec.backends.cpu.emulation.products import multiply
from lowprec.backends.cpu.numpy_rounding import rounded
from lowprec.errors import ArrayError, DeviceError, DTypeError, SettingError, ShapeError, quoted
from lowprec.formats import DType
from lowprec.util.strides import Shape
from lowprec.util.tracing import uncompiled

__all__ = ["BLACKWELL_MMA_SYNC", "TensorCore", "mma"]


def __dir__() -> list[str]:
    return __all__


#: Names of the formats: those of the modes, and those of the element types.
_FORMATS = {
    "fp16": "float16",
    "bf16": "bfloat16",
    "e4m3": "float8_e4m3fn",
    "e5m2": "float8_e5m2",
    **{name: name for name in FORMATS},
}


#: FP8 by ``mma.sync`` of a B200, compiled to instructions of FP16 units; products of cuBLASLt are by ``tcgen05.mma``.
BLACKWELL_MMA_SYNC = TensorCore(group=32, fraction_bits=25, adds_after=True)


@uncompiled
def mma(
    a: Any,
    b: Any,
    c: Any,
    *,
    arch: str | Emulated,
    format: str,  # noqa: A002 - the usual term
) -> Any:
    """Return the bits of ``c + a @ b`` on an architecture's tensor cores.

    Each element is summed along k in ascending order, in groups of products; :doc:`emulation` has the size of a group.
    The sum of a group, rounded toward zero to float32, is the ``c`` of the next one. The last group is padded with
    zeros, which do not change the sum.

    Parameters
    ----------
    a : array, shape (..., m, k)
        float32, with values of the format; in host memory, of any library that supports DLPack.
    b : array, shape (..., k, n)
        float32, with values of the format.
    c : array, shape (..., m, n)
        float32. Batches broadcast.
    arch : {"volta", "ampere", "ada", "hopper", "blackwell", "cdna1", "cdna2", "cdna3"} or TensorCore
        The architecture; those of AMD have published models without recorded results of the hardware.
    format : {"fp16", "bf16", "tf32", "e4m3", "e5m2"}
        Format of the values of ``a`` and ``b``.

    Returns
    -------
    array, shape (..., m, n)
        float32, of the library of ``a``.

    Raises
    ------
    ArrayError
        A value of ``a`` or ``b`` is not in the format, or an argument is not an array.
    DTypeError, ShapeError, DeviceError
        An array is not float32, its shape does not match, or it is not in host memory.
    SettingError
        ``arch`` or ``format`` is unknown.
    UnsupportedError
        The architecture's tensor cores do not support the format.

    References
    ----------
    F. A. Khattak and M. Mikaitis, "Accurate models of NVIDIA tensor cores", arXiv 2512.07004.

    Examples
    --------
    Volta drops terms of 2^-24 times the largest one; Ampere keeps them:

    >>> import numpy as np
    >>> from lowprec.emulation import mma
    >>> a = np.full((1, 2), 2.0**-12, np.float32)
    >>> c = np.ones((1, 1), np.float32)
    >>> [float(mma(a, a.T, c, arch=arch, format="fp16")[0, 0]) - 1 for arch in ("volta", "ampere")]
    [0.0, 1.1920928955078125e-07]
    """
    name_of_format = None
    if isinstance(format, str):
        name_of_format = _FORMATS.get(format.strip().lower())
    if name_of_format is None:
        raise SettingError(
            f"format {quoted(format)} is not emulated; choose one of: {', '.join(_FORMATS)}"
        )
    core = None
    if isinstance(arch, str):
        core = matrix_cores.matrix_core(arch, name_of_format)
    if core is None:
        model = arithmetic(parse_architecture(arch), name_of_format)
    x = _view("a", a)
    y = _view("b", b)
    z = _view("c", c)
    batch = _batch_shape(x.shape, y.shape, z.shape)
    library = library_of(a)
    _check_values("a", x.ndarray(), name_of_format)
    _check_values("b", y.ndarray(), name_of_format)
    shape = (*batch, x.shape[-2], y.shape[-1])
    target = library.allocate(shape, DType.FLOAT32, CPU, a)
    operands = x.ndarray(), y.ndarray(), z.ndarray()
    if core is None:
        target.ndarray()[...] = multiply(*operands, model)
    else:
        emin = FORMATS[name_of_format].emin
        target.ndarray()[...] = matrix_cores.multiply(*operands, emin, core)
    return library.wrap(target.owner, a, b, c)


def _view(name: str, x: Any) -> ArrayView:
    view = library_of(x).view(x)
    if view.device is not CPU:
        raise DeviceError(f"{name} is on {view.device}; mma computes in host memory, copy it there")
    if view.dtype is not DType.FLOAT32:
        raise DTypeError(
            f"{name} has dtype {view.dtype}; mma takes float32 arrays with values of the format"
        )
    return view


def _batch_shape(a: Shape, b: Shape, c: Shape) -> Shape:
    described = f"a {a}, b {b}, c {c}"
    are_matrices = min(len(a), len(b), len(c)) > 1
    if not are_matrices or a[-1] != b[-2] or c[-2:] != (a[-2], b[-1]):
        raise ShapeError(
            f"mma takes a (..., m, k), b (..., k, n) and c (..., m, n); these have shapes {described}"
        )
    try:
        return np.broadcast_shapes(a[:-2], b[:-2], c[:-2])
    except ValueError:
        raise ShapeError(f"the batches do not broadcast: the shapes are {described}") from None


def _check_values(name: str, x: Any, fmt: str) -> None:
    with np.errstate(all="ignore"):
        nearest = rounded(x, np.dtype(np.float32), FORMATS[fmt])
    is_changed = (nearest != x) & ~np.isnan(x)
    wrong = np.argwhere(is_changed)
    if len(wrong):
        first = tuple(wrong[0].tolist())
        raise ArrayError(
            f"{name}{list(first)} is {x[first]!r}, which is not a {fmt} number; round the operands first"
        )
