"""The epilogue of a staged product: ``out = activation(alpha * product + beta * c + bias)``.

The kernel, ``kernels/epilogue.cu``, computes in the product's type, undoes the scaling of operands, and rounds once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

from lowprec.backends.cuda.batching import LaunchBatch, are_multiples, batch_dimensions, in_sequence, launch_batches
from lowprec.backends.cuda.compiling import ELEMENT, EXPONENT_BYTES, THREADS, VECTOR_BYTES, Launch, pick_blocks
from lowprec.backends.cuda.libraries import cached
from lowprec.formats import DType
from lowprec.planning import ACTIVATIONS, Activation, MatrixStack, OperandSpec
from lowprec.util.strides import Dimension, coalesce

#: Real and imaginary parts of alpha and beta.
_FACTORS = 4

#: Queues the work: addresses of product, out, c, bias, row and column exponents or factors (0 for none), alpha, beta,
#: a stream.
EpilogueLauncher: TypeAlias = Callable[[int, int, int, int, int, int, complex, complex, int], None]


@dataclass(frozen=True, slots=True)
class Epilogue:
    """Parameters of an epilogue, checked by planning; int32 has no factors, ``c`` is not read if ``beta`` is 0."""

    product_dtype: DType  # also the type of the arithmetic, which is float32 with factors
    leading_dimension: int  # of the product, which is row-major with contiguous matrices
    out: MatrixStack  # with the product's extents
    c: MatrixStack | None = None  # with the shape of ``out``; zero strides broadcast
    bias: OperandSpec | None = None  # one addend per column
    activation: Activation | None = None
    #: Whether the product is divided by 2^e, with e the sum of an int32 exponent per row and one per column.
    scaled: bool = False
    #: Or multiplied by float32 factors of rows and columns: 0 for none, 1 if matrices share them, 2 if each has some.
    factors: tuple[int, int] = (0, 0)
    product_rows: int = 0  # of each matrix, including padding; 0: those of ``out``

    @property
    def is_scaled(self) -> bool:
        return self.scaled or any(self.factors)


#: Index of each array in the launcher's arguments; for the first three also in the strides of a dimension.
_PRODUCT, _OUT, _C, _BIAS, _ROW_EXPONENTS, _COL_EXPONENTS = range(6)


@cached
def prepare_epilogue(spec: Epilogue, device: int) -> EpilogueLauncher:
    """Return the function that queues the epilogue on a stream of ``device``, which must be current."""
    if not spec.out.rows * spec.out.cols:
        return in_sequence(())
    batch, rows, cols = _dimensions(spec)
    parts = launch_batches(batch, 4)
    return in_sequence([_EpilogueLaunch(spec, rows, cols, part, device) for part in parts])


def _dimensions(spec: Epilogue) -> tuple[list[Dimension], Dimension, Dimension]:
    out, c = spec.out, spec.c
    per_column = int(spec.bias is not None or spec.is_scaled)
    step = (spec.product_rows or out.rows) * spec.leading_dimension
    none = (0,) * len(out.batch_shape)
    c_strides = c.batch_strides if c else none
    batch = batch_dimensions(out.batch_shape, step, out.batch_strides, c_strides, none)
    c_row = c.row_stride if c else 0
    rows: Dimension = (out.rows, (spec.leading_dimension, out.row_stride, c_row, 0))
    cols: Dimension = (out.cols, (1, out.col_stride, c.col_stride if c else 0, per_column))
    if spec.is_scaled:  # exponents and factors are indexed by matrix, row and column
        return coalesce(batch), rows, cols
    every = coalesce([*batch, rows, cols])
    # A last dimension with the strides of the columns is that of the columns; otherwise there is a single column.
    cols = every.pop() if every and every[-1][1] == cols[1] else (1, cols[1])
    rows = every.pop() if every else (1, rows[1])
    return every, rows, cols


class _EpilogueLaunch:
    """The kernel for the batch of one launch, compiled for each alignment of the pointers."""

    def __init__(self, spec: Epilogue, rows: Dimension, cols: Dimension, batch: LaunchBatch, device: int) -> None:
        self._spec, self._rows, self._cols, self._batch = spec, rows, cols, batch
        self._device = device
        sizes = [spec.product_dtype.itemsize, spec.out.dtype.itemsize]
        c_size = spec.c.dtype.itemsize if spec.c else 0
        #: Index in the launcher's arguments, and offset in bytes, of each array.
        self._offsets = [(_PRODUCT, batch.offsets[0] * sizes[0]), (_OUT, batch.offsets[1] * sizes[1])]
        if spec.c:
            self._offsets.append((_C, batch.offsets[_C] * c_size))
        if spec.bias:
            self._offsets.append((_BIAS, 0))
        if spec.is_scaled:
            each = [batch.before * EXPONENT_BYTES * (spec.scaled or x == 2) for x in spec.factors]
            self._offsets += [(_ROW_EXPONENTS, each[0] * rows[0]), (_COL_EXPONENTS, each[1] * cols[0])]
        vector = max(1, VECTOR_BYTES // min(sizes))

        def rows_aligned(array: int, nbytes: int, itemsize: int) -> bool:
            """Whether rows are contiguous and all as aligned as the first."""
            strides = [rows[1][array] if rows[0] > 1 else 0, *batch.strides[array]]
            return cols[1][array] == 1 and are_multiples(nbytes, itemsize, strides)

        regular = all(
            rows_aligned(array, VECTOR_BYTES, size) for array, size in zip((_PRODUCT, _OUT), sizes, strict=True)
        )
        c_bytes = min(VECTOR_BYTES, vector * c_size)
        self._c_mask = c_bytes - 1
        c_regular = bool(c_size) and rows_aligned(_C, c_bytes, c_size)
        self._any = self._launch(1, 0)
        self._fast = self._launch(vector, 0) if regular else None
        self._fast_with_c = self._launch(vector, 1) if regular and c_regular else None

    def __call__(self, *arguments: Any) -> None:
        *given, alpha, beta, stream = arguments
        addresses = [given[index] + offset for index, offset in self._offsets]
        launch = self._any
        if self._fast is not None and not (addresses[0] | addresses[1]) & (VECTOR_BYTES - 1):
            launch = self._fast
            if self._fast_with_c is not None and not addresses[2] & self._c_mask:
                launch = self._fast_with_c
        launch(stream, *addresses, alpha.real, alpha.imag, beta.real, beta.imag)

    def _launch(self, vector: int, c_aligned: int) -> Launch:
        """Return the kernel with ``vector`` elements per thread."""
        spec, rows, cols, batch = self._spec, self._rows, self._cols, self._batch
        definitions: dict[str, str | int] = {
            "PRODUCT": ELEMENT[spec.product_dtype],
            "RESULT": ELEMENT[spec.out.dtype],
            "SCALED": 2 if any(spec.factors) else int(spec.scaled),
            "VECTOR": int(vector > 1),
        }
        if any(spec.factors):
            definitions |= {"ROW_FACTORS": spec.factors[0], "COL_FACTORS": spec.factors[1]}
        if spec.activation:
            definitions["ACTIVATED"] = ACTIVATIONS[spec.activation].cuda
        constants = [rows[0], cols[0], rows[1][_PRODUCT], batch.strides[_PRODUCT][2]]
        constants += [rows[1][_OUT], cols[1][_OUT], batch.count]
        constants += [*batch.extents, *batch.strides[_OUT]]
        if spec.c:
            definitions["ADDEND"] = ELEMENT[spec.c.dtype]
            constants += [rows[1][_C], cols[1][_C], *batch.strides[_C], c_aligned]
        if spec.bias:
            definitions["BIAS"] = ELEMENT[spec.bias.dtype]
            constants += spec.bias.strides
        groups = batch.count * rows[0] * -(-cols[0] // vector)
        blocks = pick_blocks(-(-groups // THREADS), self._device)
        addresses = 2 + bool(spec.c) + bool(spec.bias) + 2 * spec.is_scaled
        return Launch(
            "epilogue", "epilogue.cu", definitions, self._device, blocks, (THREADS,),
            addresses, constants, _FACTORS,
        )  # fmt: skip


#: Queues the work: addresses of the product, ``a`` and ``b``, and a stream.
Recomputer: TypeAlias = Callable[[int, int, int, int], None]


@cached
def prepare_recomputing(
    dtype: DType, leading_dimension: int, a: MatrixStack, b: MatrixStack, device: int
) -> Recomputer:
    """Return the function that recomputes non-finite elements of a product of parts from ``a`` and ``b``.

    Infinities, NaN, and numbers that overflow in the parts' format give NaN in every element of the result that depends
    on them. The kernel, ``kernels/recompute.cu``, always runs and reads the product once, so that the host does not
    wait. The product, float32 or complex64, is row-major with contiguous matrices; the operands have the same batch
    shape.
    """
    step = a.rows * leading_dimension
    batch = batch_dimensions(a.batch_shape, step, a.batch_strides, b.batch_strides)
    parts = launch_batches(batch, 3)
    return in_sequence([_recomputer(dtype, leading_dimension, a, b, part, device) for part in parts])


def _recomputer(
    dtype: DType, leading: int, a: MatrixStack, b: MatrixStack, batch: LaunchBatch, device: int
) -> Recomputer:
    definitions = {"PRODUCT": ELEMENT[dtype], "A": ELEMENT[a.dtype], "B": ELEMENT[b.dtype]}
    constants = [a.rows, b.cols, a.cols, leading]
    constants += [a.row_stride, a.col_stride, b.row_stride, b.col_stride]
    constants += [batch.count, *batch.extents, *(x for array in batch.strides for x in array)]
    blocks = pick_blocks(-(-batch.count * a.rows * b.cols // THREADS), device)
    launch = Launch("recompute", "recompute.cu", definitions, device, blocks, (THREADS,), 3, constants)
    dtypes = (dtype, a.dtype, b.dtype)
    offsets = [at * x.itemsize for at, x in zip(batch.offsets, dtypes, strict=True)]

    def queue(product: int, first: int, second: int, stream: int) -> None:
        launch(stream, product + offsets[0], first + offsets[1], second + offsets[2])

    return queue
