"""What follows a product that went to temporary memory: ``out = activation(alpha * product + beta * c + bias)``.

One kernel, ``kernels/finish.cu``, in the product's type and with one rounding to the result's. Powers of two that
scaled the operands are taken back in the same pass.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from lowprec.backends.cuda.compiling import ELEMENT, Launch, pick_blocks
from lowprec.backends.cuda.libraries import libraries
from lowprec.backends.cuda.stacks import Dimension, Walk, are_multiples, merged, walks
from lowprec.errors import DTypeError
from lowprec.formats import DType
from lowprec.planning import MatrixStack

__all__ = ["Finish", "Finisher", "finish"]

_REAL = (DType.FLOAT16, DType.BFLOAT16, DType.FLOAT32)

#: Element types of the result, of ``c`` and of the bias, per type of the product.
_RESULTS: dict[DType, tuple[DType, ...]] = {
    DType.FLOAT32: (*_REAL, DType.FLOAT64),
    DType.FLOAT64: (DType.FLOAT64,),
    DType.COMPLEX64: (DType.COMPLEX64, DType.COMPLEX128),
    DType.COMPLEX128: (DType.COMPLEX128,),
    DType.INT32: (DType.INT32,),
}
_ADDENDS: dict[DType, tuple[DType, ...]] = {
    DType.FLOAT32: _REAL,
    DType.FLOAT64: (*_REAL, DType.FLOAT64),
    DType.COMPLEX64: (*_REAL, DType.COMPLEX64),
    DType.COMPLEX128: (*_REAL, DType.FLOAT64, DType.COMPLEX64, DType.COMPLEX128),
    DType.INT32: (DType.INT8, DType.INT32),
}
_SCALED = (DType.FLOAT32, DType.COMPLEX64)
_ACTIVATED: dict[DType, tuple[str | None, ...]] = {
    DType.FLOAT32: (None, "relu", "gelu"),
    DType.FLOAT64: (None, "relu", "gelu"),
    DType.INT32: (None, "relu"),
}

_THREADS = 256
_VECTOR_BYTES = 16
_EXPONENT_BYTES = 4


#: Queues the work: addresses of product, out, c, bias, row and column exponents (0 for what there is not), alpha, beta,
#: and a stream.
Finisher: TypeAlias = Callable[[int, int, int, int, int, int, complex, complex, int], None]


@dataclass(frozen=True, slots=True)
class Finish:
    """What becomes of a product; int32 has no factors, and ``c`` is not read where ``beta`` is 0.

    Parameters
    ----------
    product_dtype : DType
        In which the arithmetic is done.
    rows, cols : int
    leading_dimension, padded_rows : int
        The product lies batch after batch, each of ``padded_rows`` rows of ``leading_dimension`` elements.
    out : MatrixStack
        Where the result goes, ``rows`` x ``cols`` and the batch.
    c : MatrixStack or None
        The addend, with the shape of ``out``; where it is broadcast its strides are zero.
    bias_dtype : DType or None
        Of one addend per column, ``bias_stride`` elements apart.
    bias_stride : int
    activation : str or None
        "relu", "gelu" (the tanh form).
    scaled : bool
        Whether the product is divided by 2^e, e the sum of two exponents (int32), one per row, one per column of each
        matrix.
    """

    product_dtype: DType
    rows: int
    cols: int
    leading_dimension: int
    padded_rows: int
    out: MatrixStack
    c: MatrixStack | None = None
    bias_dtype: DType | None = None
    bias_stride: int = 0
    activation: str | None = None
    scaled: bool = False

    def __post_init__(self) -> None:
        product, c = self.product_dtype, self.c.dtype if self.c else None
        legal = (
            self.out.dtype in _RESULTS.get(product, ())
            and all(x is None or x in _ADDENDS[product] for x in (c, self.bias_dtype))
            and self.activation in _ACTIVATED.get(product, (None,))
            and (not self.scaled or product in _SCALED)
        )
        if not legal:
            raise DTypeError(
                f"no kernel makes {self.out.dtype} of a product of {product} (c {c}, bias {self.bias_dtype}, "
                f"activation {self.activation}, scaled {self.scaled})"
            )


#: Which number of a dimension's steps is whose: the product's, out's, c's, and the bias's or exponents'.
_PRODUCT, _OUT, _C, _COLUMN = range(4)


def finish(spec: Finish, device: int) -> Finisher:
    """Return the function that queues it on a stream of a device, which is the current one then.

    The kernel is compiled at its first call.
    """
    return _finisher(libraries().core, spec, device)


@functools.lru_cache(maxsize=1024)
def _finisher(core: Any, spec: Finish, device: int) -> Finisher:
    """Look up or make a finisher; the library is a part of the key, so that tests may exchange it."""
    if not spec.rows * spec.cols:
        return _nothing
    batch, rows, cols = _dimensions(spec)
    queues = [_Queue(spec, rows, cols, walk, i, device) for i, walk in enumerate(walks(batch, 4))]
    if len(queues) == 1:
        return queues[0]

    def queue_all(*arguments: Any) -> None:
        for queue in queues:
            queue(*arguments)

    return queue_all if queues else _nothing


def _nothing(*arguments: Any) -> None:
    """Write nothing."""


def _dimensions(spec: Finish) -> tuple[list[Dimension], Dimension, Dimension]:
    """Return the batch, the rows and the columns, with what can be walked as one dimension made one."""
    out, c = spec.out, spec.c
    per_column = int(spec.bias_dtype is not None or spec.scaled)
    product_stride = spec.padded_rows * spec.leading_dimension
    batch: list[Dimension] = []
    c_strides = c.batch_strides if c else (0,) * len(out.batch_shape)
    for extent, out_step, c_step in reversed(
        list(zip(out.batch_shape, out.batch_strides, c_strides, strict=True))
    ):
        batch.append((extent, (product_stride, out_step, c_step, 0)))
        product_stride *= extent
    rows: Dimension = (
        spec.rows,
        (spec.leading_dimension, out.row_stride, c.row_stride if c else 0, 0),
    )
    cols: Dimension = (spec.cols, (1, out.col_stride, c.col_stride if c else 0, per_column))
    batch.reverse()
    if spec.scaled:  # the exponents know matrices, rows and columns
        return merged(batch), rows, cols
    every = merged([*batch, rows, cols])
    # A last dimension that steps as the columns do begins with them: all columns, or the only one.
    if every and every[-1][1] == cols[1]:
        cols = every.pop()
    else:
        cols = (1, cols[1])
    rows = every.pop() if every else (1, rows[1])
    return every, rows, cols


class _Queue:
    """The kernel of one walk through a batch.

    Parameters
    ----------
    spec : Finish
    rows, cols : Dimension
    walk : Walk
    index : int
        How many walks of as many matrices come before.
    device : int
    """

    def __init__(
        self, spec: Finish, rows: Dimension, cols: Dimension, walk: Walk, index: int, device: int
    ) -> None:
        sizes = [spec.product_dtype.itemsize, spec.out.dtype.itemsize]
        c_size = spec.c.dtype.itemsize if spec.c else 0
        before = index * walk.count * _EXPONENT_BYTES
        self._offsets = [
            walk.offsets[_PRODUCT] * sizes[0],
            walk.offsets[_OUT] * sizes[1],
            *([walk.offsets[_C] * c_size] if spec.c else []),
            *([0] if spec.bias_dtype else []),
            *([before * rows[0], before * cols[0]] if spec.scaled else []),
        ]
        self._has_c, self._has_bias, self._scaled = bool(spec.c), bool(spec.bias_dtype), spec.scaled
        vector = max(1, _VECTOR_BYTES // min(sizes))
        steps = [_steps(array, rows, walk) for array in (_PRODUCT, _OUT, _C)]
        regular = cols[1][_OUT] == 1 and all(
            are_multiples(_VECTOR_BYTES, size, step)
            for size, step in zip(sizes, steps, strict=False)
        )
        c_bytes = min(_VECTOR_BYTES, vector * c_size)
        self._c_mask = c_bytes - 1
        c_regular = bool(c_size) and cols[1][_C] == 1 and are_multiples(c_bytes, c_size, steps[_C])
        make = functools.partial(_launch, spec, rows, cols, walk, device)
        self._any = make(1, 0)
        self._fast = make(vector, 0) if regular else None
        self._fast_with_c = make(vector, 1) if regular and c_regular else None

    def __call__(
        self,
        product: int,
        out: int,
        c: int,
        bias: int,
        row_exponents: int,
        col_exponents: int,
        alpha: complex,
        beta: complex,
        stream: int,
    ) -> None:
        """Queue it."""
        given = (
            *((product, out, c) if self._has_c else (product, out)),
            *((bias,) if self._has_bias else ()),
            *((row_exponents, col_exponents) if self._scaled else ()),
        )
        addresses = [x + offset for x, offset in zip(given, self._offsets, strict=True)]
        launch = self._any
        if self._fast is not None and not (addresses[0] | addresses[1]) & (_VECTOR_BYTES - 1):
            launch = self._fast
            if self._fast_with_c is not None and not addresses[2] & self._c_mask:
                launch = self._fast_with_c
        launch(
            stream,
            addresses,
            np.float64(alpha.real),
            np.float64(alpha.imag),
            np.float64(beta.real),
            np.float64(beta.imag),
        )


def _steps(array: int, rows: Dimension, walk: Walk) -> list[int]:
    """Return all distances between rows of an array."""
    return [rows[1][array] if rows[0] > 1 else 0, *walk.steps[array]]


def _launch(
    spec: Finish,
    rows: Dimension,
    cols: Dimension,
    walk: Walk,
    device: int,
    vector: int,
    c_aligned: int,
) -> Launch:
    """Return the kernel with ``vector`` elements per thread."""
    definitions: dict[str, str | int] = {
        "PRODUCT": ELEMENT[spec.product_dtype],
        "RESULT": ELEMENT[spec.out.dtype],
        "SCALED": int(spec.scaled),
        "RELU": int(spec.activation == "relu"),
        "GELU": int(spec.activation == "gelu"),
        "VECTOR": int(vector > 1),
    }
    constants = [rows[0], cols[0], rows[1][_PRODUCT], walk.steps[_PRODUCT][2]]
    constants += [rows[1][_OUT], cols[1][_OUT], walk.count, *walk.extents, *walk.steps[_OUT]]
    if spec.c:
        definitions["ADDEND"] = ELEMENT[spec.c.dtype]
        constants += [rows[1][_C], cols[1][_C], *walk.steps[_C], c_aligned]
    if spec.bias_dtype:
        definitions["BIAS"] = ELEMENT[spec.bias_dtype]
        constants += [spec.bias_stride]
    blocks = pick_blocks(-(-walk.count * rows[0] * -(-cols[0] // vector) // _THREADS), device)
    return Launch("finish", "finish.cu", definitions, device, blocks, (_THREADS,), constants)
