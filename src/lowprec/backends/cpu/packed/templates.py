"""Jobs without addresses: how operands are packed, which kernels run, how the product is cut.

All of a job but its addresses and factors follows from the types, shapes and strides, so it is made once for these, and
a product copies it.
"""

from __future__ import annotations

import ctypes
import functools
import struct
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from lowprec.arrays.view import data_pointer
from lowprec.backends.cpu.casting import name_of
from lowprec.backends.cpu.packed import job as J
from lowprec.backends.cpu.packed.cutting import STREAM_BYTES, Cut, cut_of
from lowprec.backends.cpu.packed.micro_kernels import MicroKernel, Pairs
from lowprec.backends.execution import resolve
from lowprec.errors import BackendError
from lowprec.formats import TF32, dtype_from_name
from lowprec.modes import TABLE, MathMode, row

if TYPE_CHECKING:
    from lowprec.backends.cpu.packed.tile_rows import Scheme


class Operand(NamedTuple):
    """A matrix in memory."""

    address: int  # of element (0, 0)
    #: ``"float32"``, ``"bfloat16"``, ``"float16"``, ``"int8"`` or, for `out`, ``"int32"``.
    dtype: str
    #: In elements, of either sign; 0 repeats a row or column.
    row_stride: int
    col_stride: int


def operand_of(x: Any) -> Operand:
    """Return a NumPy array of two dimensions as an operand."""
    (row_stride, col_stride), item = x.strides, x.itemsize
    return Operand(data_pointer(x), name_of(x.dtype), row_stride // item, col_stride // item)


@dataclass(frozen=True, slots=True)
class Kernels:
    """Addresses of the compiled functions that one kind of product needs."""

    step: int
    parts_a: int
    parts_b: int
    fields: tuple[tuple[int, int], ...]
    drive: Callable[[int, int], int]
    #: Address of the epilogue, compiled with the first product that needs it; called as `epilogue_kernel` of the type.
    epilogue: Callable[[bool], int]
    is_split: bool = False


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


def _scheme(dtype: str, rounding: str, storage: str, offset: int) -> Scheme:
    """Return how an operand is packed for units that multiply ``storage``."""
    every: dict[tuple[str, str], Scheme] = resolve("lowprec.backends.cpu.packed.tile_rows:SCHEMES")
    of_fp32 = resolve("lowprec.backends.cpu.packed.tile_rows:FP32_SCHEMES")
    table = of_fp32 if storage == "float32" else every
    # 16-bit storage stays what it is, beside float32 in whatever mode.
    found = [table.get((dtype, name)) for name in (*_alike(rounding), "exact")]
    schemes = [scheme for scheme in found if scheme is not None]
    if not schemes:
        raise ValueError(f"no way to pack {dtype} with rounding {rounding!r}")
    return every[dtype, "offset"] if offset else schemes[0]


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
    micro_kernel: MicroKernel, kernels: Kernels, m: int, n: int, k: int, workers: int = 1
) -> Cut:
    return cut_of(
        m, n, k, kernels.step, kernels.parts_a, kernels.parts_b,
        micro_kernel.block_bytes, micro_kernel.inner_bytes, micro_kernel.chunk_steps, workers, kernels.is_split,
    )  # fmt: skip


@lru_cache(maxsize=256)
def kernels_of(
    micro_kernel: MicroKernel, a_dtype: str, b_dtype: str, out_dtype: str, rounding: str
) -> Kernels:
    """Return the kernels of a kind of product, compiled; `gemm` says which types go together."""
    try:
        from lowprec.backends.cpu.packed import epilogue, lingering, macro_kernel, native, packing
    except ImportError as error:
        raise BackendError(
            f"numba is installed but does not work ({error}); repair or uninstall it"
        ) from error

    integer = a_dtype == "int8"
    if integer != (b_dtype == "int8") or integer != (out_dtype == "int32"):
        raise ValueError(f"int8 goes with int8 into int32: {a_dtype} @ {b_dtype} -> {out_dtype}")
    if integer != (micro_kernel.storage == "int8"):
        raise ValueError(f"the micro-kernel {micro_kernel.name} multiplies {micro_kernel.storage}")
    a = _scheme(a_dtype, rounding, micro_kernel.storage, micro_kernel.offset_a)
    b = _scheme(b_dtype, rounding, micro_kernel.storage, 0)
    emit = resolve(micro_kernel.emit)
    fields = {
        J.TILE_CONFIG: ctypes.addressof(_TILE_CONFIG) if micro_kernel.has_tiles else 0,
        J.PACK_A: packing.pack_kernel(a),
        J.PACK_B: packing.pack_kernel(b),
        J.KERNEL: emit(_products(a, b, rounding)),
    }
    drive = native.callable_at(macro_kernel.macro_kernel(), macro_kernel.MACRO_ARITY)
    lingering.use()
    is_split = a.is_split or b.is_split
    write = functools.partial(epilogue.epilogue_kernel, out_dtype)
    return Kernels(a.step, a.parts, b.parts, tuple(fields.items()), drive, write, is_split)


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


#: Address, element type, and stride in elements.
Vector = tuple[int, str, int]


def _epilogue_fields(
    c: Operand | None, bias: Vector | None, bias_along_rows: bool, activation: str | None
) -> dict[int, int]:
    """Return what is known of the epilogue before its factors are: those are 1 here."""
    fields = {
        J.ALPHA: float_bits(1.0),
        J.ACTIVATION: J.ACTIVATIONS[activation],
    }
    if c is not None:
        fields |= _operand_fields(c, J.C, J.C_ROW_STRIDE, J.C_COL_STRIDE)
        fields[J.C_KIND] = J.KINDS[c.dtype]
    if bias is not None:
        _, dtype, stride = bias
        stride_field = J.BIAS_ROW_STRIDE if bias_along_rows else J.BIAS_COL_STRIDE
        fields[J.BIAS_KIND] = J.KINDS[dtype]
        fields[stride_field] = stride * dtype_from_name(dtype).itemsize
    return fields


def epilogue_fields(
    out: Operand, c: Operand | None, bias: Vector | None, activation: str | None
) -> dict[int, int]:
    """Return the fields of an epilogue alone, but for its factors."""
    strides = _operand_fields(out, J.OUT, J.OUT_ROW_STRIDE, J.OUT_COL_STRIDE)
    return strides | _epilogue_fields(c, bias, False, activation)


def transposed_of(operand: Operand) -> Operand:
    """Return the transpose of a matrix, in place."""
    address, dtype, row_stride, col_stride = operand
    return Operand(address, dtype, col_stride, row_stride)


def anywhere(operand: Operand) -> Operand:
    """Return an operand without its address."""
    return Operand(0, *operand[1:])


def _job(fields: dict[int, int]) -> Any:
    job = (ctypes.c_int64 * J.WORDS)()
    for index, value in fields.items():
        job[index] = value
    return job


class Template(NamedTuple):
    """A job without its addresses and factors, and what runs it."""

    job: bytes
    drive: Callable[[int, int], int]
    packed_b_bytes: int
    scratch_bytes: int
    tasks: int


class Product(NamedTuple):
    """All that is known of a product before its addresses and factors are."""

    micro_kernel: MicroKernel
    kernels: Kernels
    m: int
    n: int
    k: int
    a: Operand
    b: Operand
    out: Operand
    c: Operand | None
    bias: Vector | None
    activation: str | None
    #: Whether this is the transpose of the product that was asked for, whose operands change places.
    transposed: bool
    shared: bool  # whether waking a thread pays
    templates: dict[tuple[int, bool, bool], Template]

    def template(self, workers: int, streams: bool, has_panels: bool) -> Template:
        """Return the job for so many threads; ``streams`` is whether the result is written past the caches."""
        key = workers, streams, has_panels
        found = self.templates.get(key)
        if found is None:
            found = self.templates[key] = _template(self, *key)
        return found


@lru_cache(maxsize=512)
def product_of(
    micro_kernel: MicroKernel,
    m: int,
    n: int,
    k: int,
    a: Operand,
    b: Operand,
    out: Operand,
    rounding: str,
    c: Operand | None,
    bias: Vector | None,
    activation: str | None,
) -> Product:
    """Return a product of operands whose addresses count for nothing; `gemm` says which go together."""
    transposed = out.row_stride == 1 and out.col_stride != 1
    if transposed:  # its rows are contiguous in the transpose, which is written whole
        a, b, m, n, out = transposed_of(b), transposed_of(a), n, m, transposed_of(out)
        c = c and transposed_of(c)
    kernels = kernels_of(micro_kernel, a.dtype, b.dtype, out.dtype, rounding)
    if out.dtype == "int32" and _computes(c, bias, activation):
        raise ValueError(INT8_ALONE)
    multiplications = m * n * k * kernels.parts_a * kernels.parts_b
    shared = multiplications >= micro_kernel.shared_from
    return Product(
        micro_kernel, kernels, m, n, k, a, b, out, c, bias, activation, transposed, shared, {}
    )


def _computes(*of_epilogue: object) -> bool:
    return any(x is not None for x in of_epilogue)


INT8_ALONE = "int8 products take no alpha, beta, bias or activation"


def _template(product: Product, workers: int, streams: bool, has_panels: bool) -> Template:
    kernels = product.kernels
    cut = _cut(product.micro_kernel, kernels, product.m, product.n, product.k, workers)
    fields = dict(kernels.fields + cut.fields)
    computes = _computes(product.c, product.bias, product.activation)
    fields |= {J.N: product.n, J.STREAM: int(streams)}
    fields[J.EPILOGUE] = kernels.epilogue(computes)
    fields |= _array_fields(product.a, product.b, product.out)
    fields |= _epilogue_fields(product.c, product.bias, product.transposed, product.activation)
    # A is packed while the result is written; where that would destroy `c` it is looked at before.
    declines = kernels.parts_a > 1 and not kernels.is_split
    checks = cut.check_tasks if declines and product.c is not None else 0
    if has_panels:
        fields[J.PACK_B_TASKS] = 0
    fields[J.PACK_TASKS] = fields[J.PACK_B_TASKS] + checks
    sizes = cut.packed_b_bytes, cut.scratch_bytes, cut.tasks
    return Template(bytes(_job(fields)), kernels.drive, *sizes)


def single_thread_template(product: Product) -> Template | None:
    """Return the job of a product that `gemm` would run in one thread; None if it would use several.

    Alpha and beta are left to whoever runs it.
    """
    out_bytes = product.m * product.n * dtype_from_name(product.out.dtype).itemsize
    if product.shared or out_bytes > STREAM_BYTES:
        return None
    return product.template(1, False, False)


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
    kernels = kernels_of(micro_kernel, a_dtype, b_dtype, out_dtype, rounding)
    cut = _cut(micro_kernel, kernels, 1, n, k)
    fields = dict(kernels.fields + cut.fields)
    fields |= _operand_fields(b, J.B, J.B_ROW_STRIDE, J.B_COL_STRIDE)
    fields |= {J.N: n, J.PACK_TASKS: fields[J.PACK_B_TASKS], J.TASKS: 0}
    return PackingJob(_job(fields), kernels.drive, cut.packed_b_bytes, cut.scratch_bytes)
