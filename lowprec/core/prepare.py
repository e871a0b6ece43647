"""``prepare``: an operand that is rounded, split and packed once, and multiplied many times."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

from lowprec import policy
from lowprec.arrays import ArrayView, library_of
from lowprec.arrays.prepared_view import Prepared, PreparedView, copy_of
from lowprec.backends import backend_of
from lowprec.core.arguments import spec_of
from lowprec.errors import ShapeError, UnsupportedError
from lowprec.formats import DType
from lowprec.modes import MathMode, parse_mode
from lowprec.planning import GemmProblem, OperandSpec, plan_gemm
from lowprec.planning.layout import Order, stacked_layout


@dataclass(frozen=True, eq=False, repr=False)
class PreparedOperand(Prepared):
    """A copy of an array for use as ``b`` or weight; see :func:`prepare`.

    The copy is immutable; products add packed forms of it. Threads and forked children may share it. A pickle holds the
    elements and the mode.
    """

    @property
    def shape(self) -> tuple[int, ...]:
        """Extents of the array."""
        return self._view.shape

    @property
    def ndim(self) -> int:
        """Number of axes."""
        return self._view.ndim

    @property
    def dtype(self) -> str:
        """Name of the element type of the array."""
        return self._view.dtype.label

    @property
    def device(self) -> str:
        """Its device: ``"cpu"``, ``"cuda:0"``."""
        return str(self._view.device)

    @property
    def math_mode(self) -> MathMode:
        """The mode for which it was prepared."""
        return MathMode(self._view.mode)

    @property
    def order(self) -> Order | None:
        """``"row"`` or ``"col"``, whichever is contiguous; None if neither is."""
        return stacked_layout(*_operands(self._view)).b.order

    @property
    def nbytes(self) -> int:
        """Bytes held now: the copy, and its packed forms."""
        once = OperandSpec(self._view.dtype, self.shape, self._view.strides).stored_bytes
        return once + self.packed_bytes

    @property
    def packed_bytes(self) -> int:
        """Bytes of the copy's packed forms so far: rounded, split, packed."""
        return sum(form.nbytes for form in list(self._view.packed.values()))

    @property
    def T(self) -> PreparedOperand:
        """The transpose, on the same memory; for stacks of matrices that of each."""
        if self.ndim < 2:
            raise ShapeError(f"a prepared operand of shape {self.shape} has no transpose")
        return PreparedOperand(self._view.transposed)

    def release(self) -> None:
        """Free the packed forms of the copy; the next product makes them again."""
        self._view.packed.clear()

    def __repr__(self) -> str:
        return (
            f"PreparedOperand({self.dtype} {self.shape}, {self.order or 'strided'}, for {self.math_mode}, on "
            f"{self.device}, {self.packed_bytes:,} bytes packed in addition to {self.nbytes - self.packed_bytes:,})"
        )

    def __reduce__(self) -> Any:
        if not self._view.device.is_host:
            raise UnsupportedError(
                f"a prepared operand on {self.device} cannot be pickled; pickle the array, and prepare it where it is "
                "loaded"
            )
        again = functools.partial(prepare, math_mode=self.math_mode)
        return again, (self._view.ndarray(),)


def prepare(b: Any, /, *, math_mode: str | MathMode | None = None) -> PreparedOperand:
    """Return an operand, such as a weight, that is rounded, split and packed once.

    ``matmul(a, prepare(b))`` has the bits of ``matmul(a, b)``, in whatever mode is in force: preparing saves time and
    nothing else. A product in the mode of ``math_mode`` keeps its packed form of ``b`` for the next one. A product in
    another mode, because an argument, a scope, the guard or the environment says so, reads the copy as any array, and
    so does a kernel that multiplies ``b`` as it is (in full FP32, all but small ones); :func:`plan` shows which it is.

    Parameters
    ----------
    b : array, shape (..., k, n) or (k,)
        As :func:`matmul` takes it. It is copied: later writes to it have no effect.
    math_mode : str or MathMode, optional
        The mode whose packed form of ``b`` is kept, by default the current one. It does not decide how a product is
        multiplied.

    Returns
    -------
    PreparedOperand
        On the device of ``b``.

    Raises
    ------
    ArrayError, DTypeError
        ``b`` is no array that can be read in place, or has a dtype that is not supported.
    ShapeError
        ``b`` has no axes.
    DeviceError
        No backend serves the device.
    ModeError
        There is no such mode.

    Examples
    --------
    >>> import numpy as np
    >>> import lowprec
    >>> weight = np.ones((64, 32), np.float32)
    >>> prepared = lowprec.prepare(weight, math_mode="bf16x3")
    >>> product = lowprec.matmul(np.ones((8, 64), np.float32), prepared, math_mode="bf16x3")
    >>> product.shape, prepared.shape, prepared.math_mode.value, prepared.packed_bytes > 0
    ((8, 32), (64, 32), 'bf16x3', True)
    """
    mode = policy.resolve().mode if math_mode is None else parse_mode(math_mode)
    library = library_of(b)
    view = library.view(b)
    if not view.ndim:
        raise ShapeError("b has no axes; prepare takes a vector, a matrix or a stack of matrices")
    plan_gemm(GemmProblem(*_operands(view)), backend_of(view.device).capabilities(view.device), mode)
    stream = None if view.device.is_host else library.current_stream(view.device)
    return PreparedOperand(PreparedView(copy_of(view, stream), mode, {}))


def _operands(view: ArrayView) -> tuple[OperandSpec, OperandSpec]:
    spec = spec_of(view)
    dtype = DType.FLOAT8_E4M3FN if spec.dtype.is_float8 else spec.dtype
    return OperandSpec.contiguous(dtype, spec.shape[-2:][:1]), spec
