"""Matrix products on the AMX units of x86-64 CPUs: bfloat16 and int8 tiles, any strides, any epilogue.

`gemm` computes ``out = activation(alpha * A @ B + beta * C + bias)``. What the operands become is
the caller's choice (`rounding`); products of the rounded values are exact, sums are in float32
(int32 for int8), and the result is rounded once to the type of `out`.

A float16 or TF32 value has 11 significant bits and is the exact sum of two bfloat16 values, so
`fp16`, `tf32` and float16 storage run as four bfloat16 products that share one accumulator. So do all products of the
parts into which a mode such as `bf16x6` splits the operands: three, six or nine, and four for each of TF32 parts.

Numerics
--------
With u = 2**-24 and P products summed for each element (P = k in one part, 4 k in two),

    |computed - exact| <= gamma(P + 1) * (|A| @ |B|) + 2 * P * 2**-126 * (1 + max|A| + max|B|)

where A and B are the rounded operands and the parts of a pair, having one sign, sum to no more than
the value. gamma(p) = p * u / (1 - p * u). The second term is absolute: ``TDPBF16PS`` takes
subnormal inputs as zero and writes subnormal sums as zero, and so does the conversion of float32 to
bfloat16; a low part below 2**-126 is lost in the same way. It matters only to operands or results
near the lower end of the range of float32. Rounding of sums is to nearest even, whatever the
processor's rounding mode says.

The result does not depend on the number of threads, bit for bit.

Infinities and NaN: in one part they behave as in any product. In two parts Inf * 0 would appear
between the parts, so `gemm` finds them while packing and declines. Of operands that are split, every element that such
a value enters comes out NaN or infinite, and `gemm` tells that there is one.

Split operands: each chunk of k, of 2048 / parts at most, is summed anew and added to those before; `planning.bounds`
has the bound.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from lowprec.backends.cpu import buffers, threads
from lowprec.backends.cpu.packed import job as J
from lowprec.backends.cpu.packed.cutting import STREAM_BYTES, Cut, cut_of, shift_of
from lowprec.backends.cpu.packed.micro_kernels import MicroKernel, Pairs
from lowprec.backends.execution import resolve
from lowprec.errors import BackendError
from lowprec.formats import TF32, dtype_from_name
from lowprec.modes import TABLE, MathMode, row

if TYPE_CHECKING:
    from lowprec.backends.cpu.packed.prepared_panels import Panels
    from lowprec.backends.cpu.packed.tile_rows import Scheme


@dataclass(frozen=True, slots=True)
class Operand:
    """A matrix in memory."""

    address: int  # of element (0, 0)
    #: ``"float32"``, ``"bfloat16"``, ``"float16"``, ``"int8"`` or, for `out`, ``"int32"``.
    dtype: str
    #: In elements, of either sign; 0 repeats a row or column.
    row_stride: int
    col_stride: int


def operand_of(x: Any) -> Operand:
    """Return a NumPy array of two dimensions as an operand."""
    row_stride, col_stride = x.strides
    return Operand(x.ctypes.data, x.dtype.name, row_stride // x.itemsize, col_stride // x.itemsize)


@dataclass(frozen=True, slots=True)
class _Kernels:
    """Addresses of the compiled functions that one kind of product needs."""

    step: int
    parts_a: int
    parts_b: int
    fields: tuple[tuple[int, int], ...]
    drive: Callable[[int, int], int]
    is_split: bool = False


# --- the product ------------------------------------------------------------------------------


def _tile_config() -> Any:
    """Palette 1, eight tiles of 16 rows of 64 bytes, as ``LDTILECFG`` reads it."""
    config = bytearray(64)
    config[0] = 1
    for tile in range(8):
        struct.pack_into("<H", config, 16 + 2 * tile, 64)
        config[48 + tile] = 16
    return (ctypes.c_char * 64).from_buffer_copy(config)


#: Kernels know its address alone, so it is made once and stays.
_TILE_CONFIG = _tile_config()


def _alike(rounding: str) -> list[str]:
    """Return a rounding and, where it is a mode's name, the modes that make the same parts of an operand."""
    made = {r.mode.value: (r.operand_format, r.parts) for r in TABLE}
    return [rounding, *(mode for mode, parts in made.items() if parts == made.get(rounding))]


def _scheme(dtype: str, rounding: str, offset: int) -> Scheme:
    from lowprec.backends.cpu.packed.tile_rows import SCHEMES

    # 16-bit storage stays what it is, beside float32 in whatever mode.
    found = [SCHEMES.get((dtype, name)) for name in (*_alike(rounding), "exact")]
    schemes = [scheme for scheme in found if scheme is not None]
    if not schemes:
        raise ValueError(f"no way to pack {dtype} with rounding {rounding!r}")
    return SCHEMES[dtype, "offset"] if offset else schemes[0]


def _products(a: Scheme, b: Scheme, rounding: str) -> Pairs:
    """Return which parts as they are packed are multiplied, the smallest products first."""
    if not (a.is_split or b.is_split):
        pairs = [(i, j) for i in range(a.parts) for j in range(b.parts)]
        return tuple(sorted(pairs, key=sum, reverse=True))
    found = row(MathMode(rounding))
    # A part in TF32 is packed as the exact sum of two.
    each = (1, 0) if found.operand_format is TF32 else (0,)
    count = len(each)
    return tuple(
        (count * i + x, count * j + y)
        for i, j in found.pairs
        for x in each
        for y in each
        if count * i + x < a.parts and count * j + y < b.parts
    )


def _cut(
    micro_kernel: MicroKernel, kernels: _Kernels, m: int, n: int, k: int, workers: int = 1
) -> Cut:
    return cut_of(
        m, n, k, kernels.step, kernels.parts_a, kernels.parts_b,
        micro_kernel.block_bytes, micro_kernel.inner_bytes, workers, kernels.is_split,
    )  # fmt: skip


@lru_cache(maxsize=256)
def _kernels(
    micro_kernel: MicroKernel, a_dtype: str, b_dtype: str, out_dtype: str, rounding: str
) -> _Kernels:
    try:
        from lowprec.backends.cpu.packed import epilogue, macro_kernel, native, packing
    except ImportError as error:
        raise BackendError(
            f"numba is installed but does not work ({error}); repair or uninstall it"
        ) from error

    integer = a_dtype == "int8"
    if integer != (b_dtype == "int8") or integer != (out_dtype == "int32"):
        raise ValueError(f"int8 goes with int8 into int32: {a_dtype} @ {b_dtype} -> {out_dtype}")
    if integer != (micro_kernel.storage == "int8"):
        raise ValueError(f"the micro-kernel {micro_kernel.name} multiplies {micro_kernel.storage}")
    a = _scheme(a_dtype, rounding, micro_kernel.offset_a)
    b = _scheme(b_dtype, rounding, 0)
    emit = resolve(
        micro_kernel.emit
    )  # imported before the first is compiled: a fork waits for compilers alone
    fields = {
        J.TILE_CONFIG: ctypes.addressof(_TILE_CONFIG) if micro_kernel.has_tiles else 0,
        J.PACK_A: packing.pack_kernel(a),
        J.PACK_B: packing.pack_kernel(b),
        J.KERNEL: emit(_products(a, b, rounding)),
        J.EPILOGUE: epilogue.epilogue_kernel(out_dtype),
    }
    drive = native.callable_at(macro_kernel.macro_kernel(), macro_kernel.MACRO_ARITY)
    is_split = a.is_split or b.is_split
    return _Kernels(a.step, a.parts, b.parts, tuple(fields.items()), drive, is_split)


def float_bits(value: float) -> int:
    """Return a float64 as the word that a job holds."""
    return int(struct.unpack("<q", struct.pack("<d", value))[0])


def _operand_fields(
    operand: Operand, address: int, row_stride: int, col_stride: int
) -> dict[int, int]:
    item = dtype_from_name(operand.dtype).itemsize
    return {
        address: operand.address,
        row_stride: operand.row_stride * item,
        col_stride: operand.col_stride * item,
    }


def _array_fields(a: Operand, b: Operand, out: Operand) -> dict[int, int]:
    return {
        **_operand_fields(a, J.A, J.A_ROW_STRIDE, J.A_COL_STRIDE),
        **_operand_fields(b, J.B, J.B_ROW_STRIDE, J.B_COL_STRIDE),
        **_operand_fields(out, J.OUT, J.OUT_ROW_STRIDE, J.OUT_COL_STRIDE),
    }


def _epilogue_fields(
    alpha: float,
    beta: float,
    c: Operand | None,
    bias: tuple[int, str, int] | None,
    bias_along_rows: bool,
    activation: str | None,
) -> dict[int, int]:
    fields = {
        J.ALPHA: float_bits(alpha),
        J.ACTIVATION: J.ACTIVATIONS[activation],
        J.PLAIN: int(alpha == 1 and c is None and bias is None and activation is None),
    }
    if c is not None:
        fields |= _operand_fields(c, J.C, J.C_ROW_STRIDE, J.C_COL_STRIDE)
        fields |= {J.BETA: float_bits(beta), J.C_KIND: J.KINDS[c.dtype]}
    if bias is not None:
        address, dtype, stride = bias
        stride_field = J.BIAS_ROW_STRIDE if bias_along_rows else J.BIAS_COL_STRIDE
        fields |= {J.BIAS: address, J.BIAS_KIND: J.KINDS[dtype]}
        fields[stride_field] = stride * dtype_from_name(dtype).itemsize
    return fields


def _transposed(operand: Operand) -> Operand:
    return Operand(operand.address, operand.dtype, operand.col_stride, operand.row_stride)


def writes_columns(out: Operand) -> bool:
    """Whether the columns of the result are contiguous; then the transposed product writes whole rows."""
    return out.row_stride == 1 and out.col_stride != 1


def _job(fields: dict[int, int]) -> Any:
    job = (ctypes.c_int64 * J.WORDS)()
    for index, value in fields.items():
        job[index] = value
    return job


def _run(
    kernels: _Kernels, cut: Cut, fields: dict[int, int], workers: int, panels: Panels | None = None
) -> bool:
    """Pack B into borrowed memory, if there are no panels, and let `workers` threads drive the job."""
    drive, scratch_bytes = kernels.drive, cut.scratch_bytes
    with (
        buffers.borrow(cut.packed_b_bytes)
        if panels is None
        else nullcontext(panels.address) as packed_b
    ):
        fields[J.B_PACKED] = packed_b
        job = _job(fields)
        address = ctypes.addressof(job)

        def work() -> None:
            with buffers.borrow(scratch_bytes) as scratch:
                drive(address, scratch)

        threads.run(work, workers)
        return not (job[J.NOT_FINITE] or job[J.SUM_NOT_FINITE])


class SingleThreadJob(NamedTuple):
    """A product for one thread, made once, and run at other addresses with each call."""

    job: Any
    transposed: bool
    drive: Callable[[int, int], int]
    packed_b_bytes: int
    scratch_bytes: int


def single_thread_job(
    micro_kernel: MicroKernel,
    m: int,
    n: int,
    k: int,
    a: Operand,
    b: Operand,
    out: Operand,
    *,
    rounding: str,
    c: Operand | None = None,
    bias: tuple[int, str, int] | None = None,
    activation: str | None = None,
) -> SingleThreadJob | None:
    """Return the job of a product as `gemm` would run it in one thread; None if it would use several.

    The addresses of the operands count for nothing, and alpha and beta are left to whoever runs it. `transposed`: the
    addresses of a and b go into the fields of one another.
    """
    if m * n * k >= micro_kernel.shared_from:
        return None
    transposed = writes_columns(out)
    if transposed:
        a, b, m, n, out = _transposed(b), _transposed(a), n, m, _transposed(out)
        c = c and _transposed(c)
    if m * n * dtype_from_name(out.dtype).itemsize > STREAM_BYTES:
        return None
    kernels = _kernels(micro_kernel, a.dtype, b.dtype, out.dtype, rounding)
    cut = _cut(micro_kernel, kernels, m, n, k)
    fields = dict(kernels.fields + cut.fields)
    fields |= {J.N: n, J.PACK_TASKS: fields[J.PACK_B_TASKS]}
    fields |= _array_fields(a, b, out)
    fields |= _epilogue_fields(1.0, 0.0, c, bias, transposed, activation)
    return SingleThreadJob(
        _job(fields), transposed, kernels.drive, cut.packed_b_bytes, cut.scratch_bytes
    )


class PackingJob(NamedTuple):
    """A job that packs B and multiplies nothing."""

    job: Any
    drive: Callable[[int, int], int]
    packed_b_bytes: int
    scratch_bytes: int


def packing_job(
    micro_kernel: MicroKernel,
    a_dtype: str,
    b_dtype: str,
    out_dtype: str,
    rounding: str,
    n: int,
    k: int,
    b: Operand,
) -> PackingJob:
    """Return the job that packs ``b`` as `gemm` reads it, for an ``a`` and a result of these types."""
    kernels = _kernels(micro_kernel, a_dtype, b_dtype, out_dtype, rounding)
    cut = _cut(micro_kernel, kernels, 1, n, k)
    fields = dict(kernels.fields + cut.fields)
    fields |= _operand_fields(b, J.B, J.B_ROW_STRIDE, J.B_COL_STRIDE)
    fields |= {J.N: n, J.PACK_TASKS: fields[J.PACK_B_TASKS], J.TASKS: 0}
    return PackingJob(_job(fields), kernels.drive, cut.packed_b_bytes, cut.scratch_bytes)


def gemm(
    micro_kernel: MicroKernel,
    m: int,
    n: int,
    k: int,
    a: Operand,
    b: Operand,
    out: Operand,
    *,
    rounding: str,
    alpha: float = 1.0,
    beta: float = 0.0,
    c: Operand | None = None,
    bias: tuple[int, str, int] | None = None,
    activation: str | None = None,
    panels: Panels | None = None,
) -> bool:
    """Compute ``out = activation(alpha * a @ b + beta * c + bias)``.

    All extents are at least 1. `a` (m x k) and `b` (k x n) are float32, bfloat16 or float16 in any combination, or both
    int8; `out` (m x n) is one of the three, or int32 for int8 operands. It must not overlap `a` or `b`, and may be the
    same memory as `c`, element by element. `c` (m x n) is float32, bfloat16 or float16, and not read if `beta` is 0.
    `alpha` and `beta` are rounded to float32; int8 takes the defaults only. `bias` (address, dtype, stride in elements)
    is added to each row; `activation` is "relu" or "gelu", in its tanh form.

    `rounding` ("bf16", "tf32", "fp16", "bf16x3", "bf16x6", "bf16x9", "tf32x3") is what float32 operands become: the
    nearest, or parts of the mode of this name; ties go to even, in TF32 away from zero. "fp16" means float16's
    digits: whoever calls has looked at the range. Storage of 16 or 8 bits stays what it is; "exact" is for products
    that have no float32 operand. With `panels` of `b`, that is not looked at; the
    columns of `out` are not contiguous then, unless its rows are, too.

    Returned is True if done. False if float32 in mode tf32 or fp16, or float16, holds a value that is not finite after
    rounding: then `c` is as it was, also where `out` is the same memory; without `c` what `out` holds is undefined.
    False, too, if operands were split and a sum is NaN or infinite: then all is done, and such elements are NaN or
    infinite in what alpha, c, bias and activation were applied to. Raises ValueError if the types do not go together or
    are not the micro-kernel's, or int8 comes with an epilogue.
    """
    if panels is not None:
        b = Operand(0, panels.dtype, 0, 0)
    kernels = _kernels(micro_kernel, a.dtype, b.dtype, out.dtype, rounding)
    if beta == 0:
        c = None
    along_rows = writes_columns(out)
    if panels is not None:
        assert not along_rows, "panels of b are no panels of its transpose"
        if not panels.finite and kernels.parts_b > 1:
            return False
    if along_rows:
        a, b, m, n, out = _transposed(b), _transposed(a), n, m, _transposed(out)
        c = _transposed(c) if c is not None else None
        kernels = _kernels(micro_kernel, a.dtype, b.dtype, out.dtype, rounding)
    products = m * n * k * kernels.parts_a * kernels.parts_b
    workers = 1 if products < micro_kernel.shared_from else threads.num_threads()
    shift = shift_of(m, n, out)
    if panels is not None and shift:
        shift = None
    cut = _cut(micro_kernel, kernels, m, n + (shift or 0), k, workers)
    fields = dict(kernels.fields + cut.fields)
    fields |= {J.N: n, J.SHIFT: shift or 0, J.STREAM: int(shift is not None)}
    fields |= _array_fields(a, b, out)
    fields |= _epilogue_fields(alpha, beta, c, bias, along_rows, activation)
    if out.dtype == "int32" and not fields[J.PLAIN]:
        raise ValueError("int8 products take no alpha, beta, bias or activation")
    # A is packed while the result is written; where that would destroy `c` it is looked at before.
    declines = kernels.parts_a > 1 and not kernels.is_split
    checks = cut.check_tasks if declines and c is not None else 0
    if panels is not None:
        fields[J.PACK_B_TASKS] = 0
    fields[J.PACK_TASKS] = fields[J.PACK_B_TASKS] + checks
    return _run(kernels, cut, fields, min(workers, max(cut.tasks, 1)), panels)
