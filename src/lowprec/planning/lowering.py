"""A plan in cuBLASLt's words: element types, column-major layouts, transposes, epilogue, and what is rewritten first.

cuBLASLt thinks in column-major matrices. A row-major result is the column-major product of the transposes,
``D^T = B^T A^T``: then ``b`` is its first operand, and a bias per column of the result is one per row, as its
epilogues want it. Source: the cuBLAS documentation, ``cublasLtMatmul()`` (tables of element types, epilogues, and the
requirements of the int8 and FP8 kernels).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from lowprec.formats import DType
from lowprec.modes import MathMode
from lowprec.planning.batches import split_batches
from lowprec.planning.bounds import SINGLE_PRECISION, holds, operand_format
from lowprec.planning.calls import ComplexAs, CublasLtCall, LtMatrix, Op, Pack
from lowprec.planning.layout import GemmLayout, OperandLayout, addend_layout
from lowprec.planning.problem import EPILOGUE_DTYPE, GemmProblem
from lowprec.strides import contiguous_strides

__all__ = ["K_CONTIGUOUS", "lower", "multiplied_dtype"]

#: Modes that multiply other element types than the operands': the type of float32 and complex64 data.
_MODE_DATA = {MathMode.BF16: DType.BFLOAT16, MathMode.FP16: DType.FLOAT16}

#: Element types of D that cuBLASLt writes, per element type of A and B.
_WRITES: dict[DType, tuple[DType, ...]] = {
    DType.FLOAT64: (DType.FLOAT64,),
    DType.COMPLEX128: (DType.COMPLEX128,),
    DType.FLOAT32: (DType.FLOAT32,),
    DType.COMPLEX64: (DType.COMPLEX64,),
    DType.FLOAT16: (DType.FLOAT16, DType.FLOAT32),
    DType.BFLOAT16: (DType.BFLOAT16, DType.FLOAT32),
    DType.INT8: (DType.INT32,),
    DType.FLOAT8_E4M3FN: (DType.FLOAT32, DType.BFLOAT16, DType.FLOAT16),
    DType.FLOAT8_E5M2: (DType.FLOAT32, DType.BFLOAT16, DType.FLOAT16),
}

#: Compute types; single precision data goes by the mode.
_COMPUTE: dict[DType, str] = {
    DType.FLOAT64: "COMPUTE_64F",
    DType.COMPLEX128: "COMPUTE_64F",
    DType.INT8: "COMPUTE_32I",
}
_COMPUTE_OF_MODE: dict[MathMode, str] = {
    MathMode.FP32_PEDANTIC: "COMPUTE_32F_PEDANTIC",
    MathMode.TF32: "COMPUTE_32F_FAST_TF32",
}

#: Types whose kernels read both operands with the inner dimension contiguous, in steps of 16 bytes.
K_CONTIGUOUS = frozenset({DType.INT8, DType.FLOAT8_E4M3FN, DType.FLOAT8_E5M2})

#: Types of D on which bias and activation are fused.
_FUSES = frozenset({DType.FLOAT32, DType.FLOAT16, DType.BFLOAT16})

_ALIGNMENT_BYTES = 16


def multiplied_dtype(mode: MathMode, compute_dtype: DType) -> DType:
    """Return the element type of what is multiplied, complex64 where it stays complex."""
    if compute_dtype in SINGLE_PRECISION:
        return _MODE_DATA.get(mode, compute_dtype)
    return compute_dtype


def _padded(extent: int, dtype: DType) -> int:
    step = max(_ALIGNMENT_BYTES // dtype.itemsize, 1)
    return -(-extent // step) * step


@dataclass(frozen=True, slots=True)
class _Stack:
    """Matrices as cuBLASLt reads or writes them: where they lie, and their element type there."""

    layout: OperandLayout
    batch_strides: tuple[int, ...]
    dtype: DType
    pack: Pack | None = None

    @property
    def stored(self) -> tuple[int, int]:
        """Rows and columns of the column-major matrix that is the memory."""
        x = self.layout
        return (x.cols, x.rows) if x.order == "row" else (x.rows, x.cols)

    def matrix(self, batch_stride: int) -> LtMatrix:
        assert self.layout.leading_dimension is not None
        return LtMatrix(self.dtype, *self.stored, self.layout.leading_dimension, batch_stride)


@dataclass(frozen=True, slots=True)
class _Terms:
    """What the rules below look at."""

    problem: GemmProblem
    mode: MathMode
    compute_dtype: DType
    out_dtype: DType
    layout: GemmLayout
    data: DType
    aligned: bool
    fuse: bool

    @property
    def as_real(self) -> bool:
        """Whether complex operands are multiplied as real matrices of twice the extents."""
        return self.compute_dtype.is_complex and not self.data.is_complex

    @property
    def k_contiguous(self) -> bool:
        return self.data in K_CONTIGUOUS


def lower(
    problem: GemmProblem,
    mode: MathMode,
    compute_dtype: DType,
    out_dtype: DType,
    layout: GemmLayout,
    *,
    aligned: bool = True,
    fuse: bool = True,
) -> CublasLtCall:
    """Return what cuBLASLt is asked for.

    Parameters
    ----------
    problem : GemmProblem
    mode : MathMode
    compute_dtype, out_dtype : DType
    layout : GemmLayout
        Of :func:`gemm_layout`; the result has elements, and ``k`` is not 0.
    aligned : bool
        Whether the pointers that must be (see :data:`K_CONTIGUOUS`, and that of a bias) are multiples of 16 bytes.
    fuse : bool
        Whether the call itself may add and activate.

    Examples
    --------
    >>> from lowprec.planning.layout import OperandSpec, gemm_layout
    >>> a = OperandSpec.contiguous(DType.FLOAT32, (64, 32))
    >>> b = OperandSpec.contiguous(DType.FLOAT32, (32, 16))
    >>> layout = gemm_layout(a, b)
    >>> call = lower(GemmProblem(a, b), MathMode.TF32, DType.FLOAT32, DType.FLOAT32, layout)
    >>> call.compute_type, call.swapped, call.first.rows, call.first.cols
    ('COMPUTE_32F_FAST_TF32', True, 16, 32)
    """
    data = multiplied_dtype(mode, compute_dtype)
    terms = _Terms(problem, mode, compute_dtype, out_dtype, layout, data, aligned, fuse)
    a, b = _operand(terms, "a"), _operand(terms, "b")
    c = _addend(terms)
    aside = "; ".join(_reasons_to_go_aside(terms, a, b, c))
    d = _temporary(terms, b) if aside else _result(terms)
    if aside:
        c = None
    swapped = d.layout.order == "row"
    first, second = (b, a) if swapped else (a, b)
    stacks = [first, second, *([c] if c else []), d]
    batches = split_batches(layout.batch_shape, [x.batch_strides for x in stacks])
    strides = batches.strides if c else (*batches.strides[:2], 0, batches.strides[2])
    offsets = tuple(o if c else (*o[:2], 0, o[2]) for o in batches.offsets)
    single = compute_dtype in SINGLE_PRECISION
    return CublasLtCall(
        compute_type=_COMPUTE_OF_MODE.get(mode, "COMPUTE_32F") if single else _COMPUTE.get(data, "COMPUTE_32F"),
        scale_dtype=_scale_dtype(terms),
        swapped=swapped,
        op_first=_op(first, swapped),
        op_second=_op(second, swapped),
        first=first.matrix(strides[0]),
        second=second.matrix(strides[1]),
        d=d.matrix(strides[3]),
        c=c.matrix(strides[2]) if c else None,
        batch_count=batches.count,
        offsets=offsets,  # type: ignore[arg-type]  # four each, by construction
        epilogue=_epilogue(problem) if not aside else "DEFAULT",
        pack_a=a.pack,
        pack_b=b.pack,
        aside=aside,
    )  # fmt: skip


def _op(operand: _Stack, swapped: bool) -> Op:
    """A matrix enters transposed where its order is not the one of the result."""
    return "N" if (operand.layout.order == "row") is swapped else "T"


def _scale_dtype(terms: _Terms) -> DType:
    if terms.as_real:
        return DType.FLOAT32
    return EPILOGUE_DTYPE[terms.compute_dtype]


def _epilogue(problem: GemmProblem) -> str:
    words = [problem.activation.value.upper()] if problem.activation else []
    if problem.bias:
        words.append("BIAS")
    return "_".join(words) or "DEFAULT"


# -- operands -------------------------------------------------------------------------------------


def _operand(terms: _Terms, name: Literal["a", "b"]) -> _Stack:
    spec = terms.problem.a if name == "a" else terms.problem.b
    layout = terms.layout.a if name == "a" else terms.layout.b
    reason = _reason_to_pack(terms, spec.dtype, layout, name)
    data = spec.dtype if terms.k_contiguous else terms.data
    if not reason:
        return _Stack(layout, layout.batch_strides, data)
    pack = _pack(terms, spec.dtype, layout, name, reason)
    # What is written lies row-major as it is written; transposed, it is a column-major operand.
    rows, cols, leading = pack.padded_rows, pack.cols, pack.leading_dimension
    if terms.k_contiguous:
        cols = leading
    order: Literal["row", "col"] = "col" if pack.transposed else "row"
    extents = (cols, rows) if pack.transposed else (rows, cols)
    steps = (1, leading) if pack.transposed else (leading, 1)
    written = contiguous_strides(pack.batch_shape, pack.padded_rows * leading)
    strides = written or (0,) * len(terms.layout.batch_shape)
    packed = OperandLayout(*extents, *steps, strides, None, order, leading)
    return _Stack(packed, strides, data, pack)


def _reason_to_pack(
    terms: _Terms, dtype: DType, layout: OperandLayout, name: Literal["a", "b"]
) -> str:
    """Return why an operand cannot be read where it lies, empty if it can."""
    if dtype is not terms.data and not (terms.k_contiguous and dtype in K_CONTIGUOUS):
        return f"{dtype} becomes {terms.data}"
    if not layout.blas_expressible:
        return "BLAS cannot express its strides"
    if not terms.k_contiguous:
        return ""
    kernels = f"{terms.data} kernels"
    if layout.order != ("row" if name == "a" else "col"):
        return f"{kernels} read it with the inner dimension contiguous"
    step = _ALIGNMENT_BYTES
    extents = [terms.layout.k, layout.leading_dimension or 0, *layout.batch_strides]
    if name == "b":
        extents.append(terms.layout.n)
    if not terms.aligned or any(x % step for x in extents):
        return f"{kernels} read it in steps of {step} bytes"
    return ""


def _pack(
    terms: _Terms, dtype: DType, layout: OperandLayout, name: Literal["a", "b"], reason: str
) -> Pack:
    fmt = operand_format(terms.mode, terms.compute_dtype)
    exact = fmt is None or (dtype.format is not None and holds(fmt, dtype.format))
    scaled = terms.data is DType.FLOAT16 and terms.compute_dtype in SINGLE_PRECISION and not exact
    complex_as: ComplexAs = "no"
    if terms.as_real:
        complex_as = "pairs" if name == "a" else "rotated"
    inner_last = terms.k_contiguous or scaled or terms.as_real
    transposed = name == "b" if inner_last else layout.order == "col"
    rows, cols = (layout.cols, layout.rows) if transposed else (layout.rows, layout.cols)
    if terms.as_real:
        rows, cols = rows * (2 if name == "b" else 1), cols * 2
    dtype_written = dtype if terms.k_contiguous else terms.data
    padded_rows = _padded(rows, dtype_written) if terms.k_contiguous and name == "b" else rows
    # Powers of two are kept per product, so that scaled matrices are not shared.
    shared = not any(layout.batch_strides) and not scaled
    batch = () if shared else terms.layout.batch_shape
    leading = _padded(cols, dtype_written)
    return Pack(
        dtype_written, transposed, rows, cols, leading, padded_rows, batch, scaled, complex_as, reason
    )  # fmt: skip


# -- result and addend ----------------------------------------------------------------------------


def _addend(terms: _Terms) -> _Stack | None:
    """Return the addend as the call itself could read it, None where there is none or its strides have no words."""
    problem, layout = terms.problem, terms.layout
    if not problem.has_beta or problem.c is None:
        return None
    c = addend_layout(problem.c, problem.a, problem.b, layout)
    if c is None or not c.blas_expressible:
        return None
    return _Stack(c, c.batch_strides, problem.c.dtype)


def _result(terms: _Terms) -> _Stack:
    """Return the caller's array as what the product is written to."""
    out = terms.layout.out
    if not terms.as_real:
        return _Stack(out, out.batch_strides, terms.out_dtype)
    # A complex number is two real ones side by side.
    leading = 2 * (out.leading_dimension or 1)
    strides = tuple(2 * s for s in out.batch_strides)
    real = OperandLayout(out.rows, 2 * out.cols, leading, 1, strides, None, "row", leading)
    return _Stack(real, strides, DType.FLOAT32)


def _temporary(terms: _Terms, b: _Stack) -> _Stack:
    """Return the temporary matrices of a product that goes aside, one after another and row-major."""
    dtype = DType.FLOAT32 if terms.as_real else EPILOGUE_DTYPE[terms.compute_dtype]
    columns = terms.layout.n * (2 if terms.as_real else 1)
    if b.pack and terms.k_contiguous:
        columns = b.pack.padded_rows
    leading = _padded(columns, dtype)
    m = terms.layout.m
    strides = contiguous_strides(terms.layout.batch_shape, m * leading)
    return _Stack(
        OperandLayout(m, columns, leading, 1, strides, None, "row", leading), strides, dtype
    )


def _reasons_to_go_aside(terms: _Terms, a: _Stack, b: _Stack, c: _Stack | None) -> list[str]:
    """Return why cuBLASLt cannot write the result itself."""
    problem, out = terms.problem, terms.layout.out
    reasons = []
    if terms.out_dtype not in _WRITES[terms.data] and not terms.as_real:
        reasons.append(f"products of {terms.data} are not written as {terms.out_dtype}")
    if not out.blas_expressible:
        reasons.append("BLAS cannot express the result's strides")
    if terms.k_contiguous and not (terms.aligned and _in_steps(out, terms.out_dtype)):
        reasons.append(f"{terms.data} kernels write in steps of {_ALIGNMENT_BYTES} bytes")
    if any(x.pack is not None and x.pack.scaled for x in (a, b)):
        reasons.append("the powers of two that scaled the operands are taken back")
    if b.pack and terms.k_contiguous and b.pack.padded_rows != b.pack.rows:
        reasons.append(f"columns are padded to multiples of {_ALIGNMENT_BYTES}")
    if terms.k_contiguous and out.order == "col":
        reasons.append(f"{terms.data} kernels write rows")
    if terms.as_real and (
        out.order != "row" or problem.has_alpha or problem.has_beta or problem.bias
    ):
        reasons.append("the product is made of real numbers")
    return reasons + _reasons_of_epilogue(terms, c)


def _in_steps(layout: OperandLayout, dtype: DType) -> bool:
    """Whether the distances between columns and between matrices are multiples of 16 bytes."""
    distances = [layout.leading_dimension or 0, *layout.batch_strides]
    return not any(x * dtype.itemsize % _ALIGNMENT_BYTES for x in distances)


def _reasons_of_epilogue(terms: _Terms, c: _Stack | None) -> list[str]:
    """Return why the epilogue cannot be fused."""
    problem, out = terms.problem, terms.layout.out
    reasons = []
    if not terms.fuse and (problem.has_beta or problem.bias or problem.activation):
        reasons.append("cuBLASLt has no algorithm that adds or activates here")
    if problem.has_beta:
        fits = c is not None and c.dtype is terms.out_dtype and c.layout.order == out.order
        if c is not None and terms.k_contiguous:
            fits = fits and _in_steps(c.layout, c.dtype)
        if not fits:
            reasons.append("c lies or is stored otherwise than the result")
    if problem.bias is not None:
        fits = (
            terms.out_dtype in _FUSES
            and not (terms.k_contiguous and terms.out_dtype is DType.FLOAT32)
            and problem.bias.dtype is terms.out_dtype
            and out.order == "row"
            and problem.bias.strides == (1,)
            and terms.aligned
        )
        if not fits:
            reasons.append(
                "bias is fused for real row-major results, packed, aligned and of their element type"
            )
    if problem.activation is not None and terms.out_dtype not in _FUSES:
        reasons.append(f"{problem.activation} is not fused for {terms.out_dtype}")
    return reasons
