"""The scope in which the CPU emulates a GPU's tensor cores."""

from __future__ import annotations

from lowprec.architectures import Architecture, parse_architecture
from lowprec.policy.entries import NO_LIBRARY, innermost
from lowprec.policy.scopes import PolicyScope


class emulate(PolicyScope):
    """Let the CPU sum as a GPU's tensor cores do, bit by bit, inside a ``with`` block or a decorated function.

    It acts on products of float16, bfloat16 and TF32 numbers in host memory: 16-bit operands, and float32 and
    complex64 ones in a mode that rounds to these formats (``tf32``, ``bf16``, ``fp16`` and their splittings). The mode
    in force does not change, only the summation does, and :func:`lowprec.plan` shows it. float32 in mode ``fp32``,
    float64, int8, numbers that the architecture's tensor cores do not multiply (bfloat16 on Volta), and arrays on a GPU
    are multiplied as without it.

    An element is one chain of instructions along the inner dimension, from its beginning to its end: the tiles, the
    order of instructions and the split-K of cuBLAS are not emulated.

    The block holds in this thread and task, and in tasks that are started inside; :meth:`wrap` carries it into other
    threads. The innermost one counts.

    Parameters
    ----------
    architecture : {"volta", "ampere", "ada", "hopper", "blackwell"}
        The architecture, in upper or lower case.

    Raises
    ------
    UnsupportedError
        If it is none of these.

    References
    ----------
    F. A. Khattak and M. Mikaitis, "Accurate models of NVIDIA tensor cores", arXiv 2512.07004.

    Examples
    --------
    Hopper cuts to 25 fraction bits below the largest of 17 terms; Volta, to 23 below the largest of 5:

    >>> import numpy as np
    >>> import lowprec
    >>> a = np.array([[1.0, 2.0**-12, 2.0**-12]], np.float16)
    >>> b = np.array([[1.0], [2.0**-12], [2.0**-12]], np.float16)
    >>> for architecture in ("volta", "hopper"):
    ...     with lowprec.emulate(architecture):
    ...         print(float(lowprec.matmul(a, b, out_dtype="float32")[0, 0] - 1) / 2**-23)
    0.0
    1.0
    """

    __slots__ = ("_emulates",)

    def __init__(self, architecture: str | Architecture) -> None:
        self._mode = None
        self._libraries = NO_LIBRARY
        self._emulates = parse_architecture(architecture)

    def __repr__(self) -> str:
        return f"emulate({str(self._emulates)!r})"


def emulated() -> Architecture | None:
    """Return the architecture that the CPU emulates in this thread and task."""
    return innermost.get().emulates
