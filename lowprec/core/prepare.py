"""``prepare``: round, split and pack an operand once for many products."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Literal

from lowprec import policy
from lowprec.arrays import ArrayView, library_of
from lowprec.arrays.prepared_view import Prepared, PreparedView, copy_of
from lowprec.arrays.quantized import QuantizedArray
from lowprec.arrays.sparsity import check_sparsity, sparse_copy
from lowprec.backends import backend_of
from lowprec.core.arguments import spec_of
from lowprec.core.executors import warn_without_effect
from lowprec.errors import ShapeError, UnsupportedError
from lowprec.formats import DType
from lowprec.modes import Mode, ModeLike, parse_mode
from lowprec.planning import GemmProblem, OperandSpec, plan_gemm
from lowprec.planning.layout import Order, stacked_layout
from lowprec.util.tracing import uncompiled


@dataclass(frozen=True, eq=False, repr=False)
class PreparedOperand(Prepared):
    """A copy of an array for use as ``b`` or weight; see :func:`prepare`.

    The copy is immutable; products cache their packed operands in it. Threads and forked children may share it. A
    pickle contains the elements, the mode and the sparsity.

    Examples
    --------
    >>> import numpy as np
    >>> import lowprec
    >>> lowprec.prepare(np.ones((64, 32), np.float32), math_mode="bf16").T.shape
    (32, 64)
    """

    _view: PreparedView

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
        """Name of the element type of the array, or of the format of a quantised array."""
        view = self._view
        return view.blocks.format if view.blocks else view.dtype.label

    @property
    def device(self) -> str:
        """Device of the array: ``"cpu"``, ``"cuda:0"``."""
        return str(self._view.device)

    @property
    def math_mode(self) -> Mode:
        """The mode for which the packed operand is kept."""
        return parse_mode(self._view.mode)

    @property
    def sparsity(self) -> Literal["2:4"] | None:
        """``"2:4"`` if the array is prepared as sparse, otherwise None."""
        return "2:4" if self._view.is_sparse else None

    @property
    def order(self) -> Order | None:
        """``"row"`` or ``"col"`` for contiguous rows or columns, otherwise None."""
        return stacked_layout(*_operands(self._view)).b.order

    @property
    def nbytes(self) -> int:
        """Bytes used now by the copy and the packed operands."""
        stored: int = spec_of(self._view).stored_bytes
        if self._view.kept is not None:
            stored = self._view.kept.memory.nbytes
        return stored + self.packed_bytes

    @property
    def packed_bytes(self) -> int:
        """Bytes used now by the packed operands alone."""
        operands = list(self._view.packed.values())
        return sum(nbytes for _, nbytes in operands)

    @property
    def T(self) -> PreparedOperand:
        """The operand with its last two axes exchanged, on the same memory.

        A sparse operand then has its pattern along the wrong axis for a product, and is an ordinary one; its transpose
        is sparse again. ``linear(x, prepare(weight.T, sparsity="2:4").T)`` uses it.
        """
        if self.ndim < 2:
            raise ShapeError(
                f"a prepared operand of shape {self.shape} has no transpose; it needs two axes"
            )
        return PreparedOperand(self._view.transposed)

    def quantized(self) -> QuantizedArray | None:
        """Return the quantised array; None if the array was not quantised.

        Its codes and scales are new arrays if the operand stores them in the order of the kernels.
        """
        array: QuantizedArray | None = self._view.quantized
        return array

    def release(self) -> None:
        """Free the packed operands; the next product packs again."""
        self._view.packed.clear()

    def __repr__(self) -> str:
        sparse = ""
        if self.sparsity:
            sparse = f"{self.sparsity} sparse, "
        return (
            f"PreparedOperand({self.dtype} {self.shape}, {sparse}{self.order or 'strided'}, for {self.math_mode}, on "
            f"{self.device}, {self.packed_bytes:,} bytes packed in addition to {self.nbytes - self.packed_bytes:,})"
        )

    def __reduce__(self) -> Any:
        if not self._view.device.is_host:
            raise UnsupportedError(
                f"a prepared operand on {self.device} cannot be pickled; pickle the array and prepare it after loading"
            )
        if self._view.blocks:
            return prepare, (self.quantized(),)
        if self._view.sparse_axis == -1:
            return attrgetter("T"), (self.T,)
        again = functools.partial(prepare, math_mode=self.math_mode, sparsity=self.sparsity)
        return again, (self._view.ndarray(),)


@uncompiled
def prepare(
    b: Any,
    /,
    *,
    math_mode: ModeLike | None = None,
    sparsity: Literal["2:4"] | None = None,
    prune: bool = False,
) -> PreparedOperand:
    """Return an operand, such as a weight, that is rounded, split and packed once.

    ``matmul(a, prepare(b))`` equals ``matmul(a, b)`` bit for bit in every mode; preparing only saves time (sparse
    products on GPUs differ, see ``sparsity``). The first product in ``math_mode`` keeps its packed ``b``, and later
    ones reuse it. Products in another mode, kernels that do not pack ``b``, and those that decode a float8 ``b`` while
    they pack read the copy as an ordinary array. :func:`plan` shows whether the packed ``b`` is used.

    Parameters
    ----------
    b : array or QuantizedArray, shape (..., k, n) or (k,)
        Operand, as for :func:`matmul`. An array is copied: later writes to it have no effect. The codes of a quantised
        array in host memory are copied to the order in which the kernels read them.
    math_mode : str, MathMode or Recipe, optional
        The mode for which the packed ``b`` is kept, by default the current mode. It does not set the mode of a product.
    sparsity : {"2:4"}, optional
        Declare that ``b`` is 2:4 sparse: in each group of 4 consecutive elements along its second to last axis, at most
        2 are nonzero (NaN is nonzero). GPUs of compute capability 8.0 and later multiply such a ``b`` of float16,
        bfloat16 or column-major int8 by cuSPARSELt, in another order of summation and without most products with
        zeros, so that an Inf in ``a`` need not give NaN there. On CPUs, and where :func:`plan` shows a reason, the
        product is dense.
    prune : bool, optional
        Keep the 2 largest magnitudes of each group (NaN is the largest; of equal ones, the lower index), and replace
        the others by zero. ``b`` is unchanged. By default a ``b`` that violates the pattern is an error.

    Returns
    -------
    PreparedOperand
        On the device of ``b``, for use as ``b`` of :func:`matmul` and as the weight of :func:`linear`.

    Raises
    ------
    ArrayError, DTypeError
        ``b`` is not an array that can be read in place, or its dtype is not supported.
    SparsityError
        ``b`` violates the pattern, ``sparsity`` is unknown, or ``prune`` is True without it.
    ShapeError
        ``b`` has no axes, or one axis with ``sparsity``.
    DeviceError
        The device is not supported.
    ModeError
        The mode is unknown.

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
    if math_mode is None:
        mode = policy.resolve().mode
    else:
        mode = parse_mode(math_mode)
    # quantised: it is immutable, and keeps packed codes itself
    if isinstance(b, Prepared) and b._like is not None:
        if sparsity is not None or prune:
            raise UnsupportedError(
                "b is a quantised array, which has no sparsity; quantise a pruned array instead"
            )
        quantized: Any = b._view
        return PreparedOperand(
            quantized.prepared(backend_of(quantized.device).reordered(quantized))
        )
    library = library_of(b)
    view = library.view(b)
    if not view.ndim:
        raise ShapeError("b has no axes; prepare takes a vector, a matrix or a stack of matrices")
    if sparsity is not None or prune:
        check_sparsity(sparsity, prune, view.dtype, view.shape)
    capabilities = backend_of(view.device).capabilities(view.device)
    plan = plan_gemm(GemmProblem(*_operands(view)), capabilities, mode)
    if math_mode is not None:
        warn_without_effect(plan)
    stream = None
    if not view.device.is_host:
        stream = library.current_stream(view.device)
    if sparsity is None:
        prepared = PreparedView(copy_of(view, stream), mode, {})
    else:
        prepared = PreparedView(sparse_copy(view, prune, stream), mode, {})
        prepared.sparse_axis = -2
    return PreparedOperand(prepared)


def _operands(view: ArrayView) -> tuple[OperandSpec, OperandSpec]:
    spec = spec_of(view)
    dtype = DType.FLOAT8_E4M3FN if spec.dtype.is_float8 else spec.dtype
    k = spec.shape[-2:][0]
    return OperandSpec.contiguous(dtype, (k,)), spec
