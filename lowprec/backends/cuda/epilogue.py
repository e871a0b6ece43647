"""The epilogue of a staged product: ``out = activation(alpha * product + beta * c + bias)``.

The kernel, ``kernels/epilogue.cu``, computes in the product's type, undoes the scaling of operands, and rounds once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain

from lowprec.backends.cuda.compiling import ELEMENT, EXPONENT_BYTES, THREADS, Launch, Macros
from lowprec.backends.cuda.libraries import cached
from lowprec.backends.cuda.steps import (
    LaunchBatch,
    Step,
    Used,
    are_multiples,
    batch_dimensions,
    kernel_step,
    launch_batches,
)
from lowprec.formats import DType
from lowprec.modes import ActivationName
from lowprec.planning import ACTIVATIONS, MatrixStack, OperandSpec
from lowprec.planning.cublaslt.calls import STEP_BYTES
from lowprec.util.strides import Dimension, coalesce, contiguous_strides


@dataclass(frozen=True)
class Epilogue:
    """Parameters of an epilogue, checked by planning; int32 has no factors, ``c`` is not read if ``beta`` is 0."""

    product_dtype: DType  # also the type of the arithmetic, which is float32 with factors
    leading_dimension: int  # of the product, which is row-major with contiguous matrices
    out: MatrixStack  # with the product's extents
    c: MatrixStack | None = None  # with the shape of ``out``; zero strides broadcast
    bias: OperandSpec | None = None  # one addend per column
    activation: ActivationName | None = None
    #: Whether the product is divided by 2^e, with e the sum of an int32 exponent per row and one per column.
    scaled: bool = False
    #: Or multiplied by float32 factors of rows and columns: 0 for none, 1 if matrices share them, 2 if each has some.
    factors: tuple[int, int] = (0, 0)
    product_rows: int = 0  # of each matrix, including padding; 0: those of ``out``

    @property
    def is_scaled(self) -> bool:
        return self.scaled or any(self.factors)


#: Arrays in the strides of a dimension: the product, ``out``, ``c`` and the bias.
_ARRAYS = 4


@cached
def prepare_epilogue(spec: Epilogue, device: int) -> tuple[Step, ...]:
    """Return the steps of the epilogue on ``device``, which must be current."""
    batch, rows, cols = _dimensions(spec)
    parts = launch_batches(batch, _ARRAYS)
    return tuple(_kernel(spec, rows, cols, part, device) for part in parts)


def _dimensions(spec: Epilogue) -> tuple[list[Dimension], Dimension, Dimension]:
    out = spec.out
    none = (0,) * len(out.batch_shape)
    c = spec.c or replace(out, row_stride=0, col_stride=0, batch_strides=none)
    per_column = int(spec.bias is not None or spec.is_scaled)
    step = (spec.product_rows or out.rows) * spec.leading_dimension
    product_strides = contiguous_strides(out.batch_shape, step)
    batch = batch_dimensions(
        out.batch_shape, product_strides, out.batch_strides, c.batch_strides, none
    )
    rows: Dimension = (out.rows, (spec.leading_dimension, out.row_stride, c.row_stride, 0))
    cols: Dimension = (out.cols, (1, out.col_stride, c.col_stride, per_column))
    if spec.is_scaled:  # exponents and factors are indexed by matrix, row and column
        return coalesce(batch), rows, cols
    # The last dimension is that of the columns if it has their strides; otherwise there is a single column.
    batch = coalesce([*batch, rows, cols])
    strides = cols[1]
    cols = (1, strides)
    if batch and batch[-1][1] == strides:
        cols = batch.pop()
    rows = (1, rows[1])
    if batch:
        rows = batch.pop()
    return batch, rows, cols


def _kernel(
    spec: Epilogue, rows: Dimension, cols: Dimension, batch: LaunchBatch, device: int
) -> Step:
    """Return the kernel for the batch of one launch, by the alignment of the pointers."""
    itemsizes = [spec.product_dtype.itemsize, spec.out.dtype.itemsize]
    vector = max(1, STEP_BYTES // min(itemsizes))
    if spec.c:
        itemsizes.append(spec.c.dtype.itemsize)
    used = _used(spec, itemsizes, rows, cols, batch)

    def launch(vector: int, masks: Sequence[int]) -> Launch:
        """Return the kernel with ``vector`` elements per thread."""
        groups = batch.matrices * rows[0] * -(-cols[0] // vector)
        return Launch(
            "epilogue",
            "epilogue.cu",
            _definitions(spec, vector),
            device,
            -(-groups // THREADS),
            (THREADS,),
            f"{len(used)}Q4d",
            _constants(spec, rows, cols, batch, len(masks) == 3),
            masks,
        )

    masks: list[int] = []
    launches = [launch(1, [])]
    for array, nbytes in enumerate(itemsizes):
        step = min(STEP_BYTES, vector * nbytes)
        strides = batch.strides[array]
        if rows[0] > 1:
            strides = (rows[1][array], *strides)
        if cols[1][array] != 1 or not are_multiples(step, nbytes, strides):
            break
        masks.append(step - 1)
        if len(masks) > 1:
            launches.insert(0, launch(vector, masks.copy()))
    return kernel_step(used, launches, has_factors=True)


def _used(
    spec: Epilogue, itemsizes: list[int], rows: Dimension, cols: Dimension, batch: LaunchBatch
) -> Used:
    """Return the addresses that a kernel reads and writes, with the offsets of its first matrix in bytes."""
    arrays = zip(("product", "out", "c"), batch.offsets, itemsizes, strict=False)
    used = [(name, at * nbytes) for name, at, nbytes in arrays]
    if spec.bias:
        used.append(("bias", 0))
    if spec.is_scaled:
        of_rows, of_cols = spec.factors
        scales = (("scales_a", of_rows, rows), ("scales_b", of_cols, cols))
        for name, factors, (extent, _) in scales:
            first = 0
            if spec.scaled or factors == 2:
                first = batch.before * extent
            used.append((name, first * EXPONENT_BYTES))
    return used


def _definitions(spec: Epilogue, vector: int) -> Macros:
    definitions: Macros = {
        "PRODUCT": ELEMENT[spec.product_dtype],
        "RESULT": ELEMENT[spec.out.dtype],
        "SCALED": int(spec.scaled),
        "VECTOR": int(vector > 1),
    }
    if any(spec.factors):
        definitions["SCALED"] = 2
        definitions["ROW_FACTORS"] = spec.factors[0]
        definitions["COL_FACTORS"] = spec.factors[1]
    if spec.activation:
        definitions["ACTIVATED"] = ACTIVATIONS[spec.activation].cuda
    if spec.c:
        definitions["ADDEND"] = ELEMENT[spec.c.dtype]
    if spec.bias:
        definitions["BIAS"] = ELEMENT[spec.bias.dtype]
    return definitions


def _constants(
    spec: Epilogue, rows: Dimension, cols: Dimension, batch: LaunchBatch, c_aligned: int
) -> list[int]:
    row_count, (product_row, out_row, c_row, _) = rows
    col_count, (_, out_col, c_col, _) = cols
    product, out, c, _ = batch.strides
    constants = [row_count, col_count, product_row, product[2]]
    constants += [out_row, out_col]
    constants += [batch.matrices, *batch.extents, *out]
    if spec.c:
        constants += [c_row, c_col, *c, c_aligned]
    if spec.bias:
        constants += spec.bias.strides
    return constants


@cached
def prepare_recomputing(
    dtype: DType, leading_dimension: int, a: MatrixStack, b: MatrixStack, device: int
) -> tuple[Step, ...]:
    """Return the steps that recompute non-finite elements of a product of parts from ``a`` and ``b``.

    Infinities, NaN, and numbers that overflow in the parts' format give NaN in every element of the result that depends
    on them. The kernel, ``kernels/recompute.cu``, always runs and reads the product once, so that the host does not
    wait. The product, float32 or complex64, is row-major with contiguous matrices; the operands have the same batch
    shape.
    """
    dtypes = (dtype, a.dtype, b.dtype)
    definitions: Macros = dict(
        zip(("PRODUCT", "A", "B"), map(ELEMENT.__getitem__, dtypes), strict=True)
    )
    product_strides = contiguous_strides(a.batch_shape, a.rows * leading_dimension)
    dimensions = batch_dimensions(a.batch_shape, product_strides, a.batch_strides, b.batch_strides)
    steps: list[Step] = []
    for batch in launch_batches(dimensions, 3):
        constants = [a.rows, b.cols, a.cols, leading_dimension]
        constants += [a.row_stride, a.col_stride, b.row_stride, b.col_stride]
        constants += [batch.matrices, *batch.extents]
        constants += chain.from_iterable(batch.strides)
        blocks = -(-batch.matrices * a.rows * b.cols // THREADS)
        launch = Launch(
            "recompute", "recompute.cu", definitions, device, blocks, (THREADS,), "3Q", constants
        )
        arrays = zip(("product", "a", "b"), batch.offsets, dtypes, strict=True)
        used = [(name, at * x.itemsize) for name, at, x in arrays]
        steps.append(kernel_step(used, [launch]))
    return tuple(steps)
