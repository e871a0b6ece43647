"""Jobs of the macro-kernel without addresses and factors: packing, micro-kernel, blocking.

A job depends on types, shapes and strides only, so it is created with the plan; a product copies its words.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from lowprec.backends.cpu import team
from lowprec.backends.cpu.casting import name_of
from lowprec.backends.cpu.packed import job as J
from lowprec.backends.cpu.packed.micro_kernels import MicroKernel, Pairs
from lowprec.backends.execution import imported
from lowprec.formats import TF32, dtype_from_name
from lowprec.modes import TABLE, MathMode, row
from lowprec.planning import MatrixStack
from lowprec.planning.bounds import CHUNK_STEPS

if TYPE_CHECKING:
    from lowprec.backends.cpu.packed.tile_rows import Scheme

#: Size from which a result is written with non-temporal stores.
STREAM_BYTES = 1 << 20

# Padding that avoids power-of-two strides between strips, which would map to the same cache sets.
_STRIP_PAD = 192


class Operand(NamedTuple):
    """Element type and strides of a matrix."""

    #: ``"float32"``, ``"bfloat16"``, ``"float16"``, ``"int8"`` or, for a result, ``"int32"``.
    dtype: str
    #: In elements, also negative; 0 broadcasts a row or column.
    row_stride: int
    col_stride: int

    @property
    def transposed(self) -> Operand:
        """The transpose, on the same memory."""
        return Operand(self.dtype, self.col_stride, self.row_stride)

    def words(self, at: int) -> dict[int, int]:
        """Return the strides as words of a job, after the word of the address at ``at``."""
        item = dtype_from_name(self.dtype).itemsize
        return {at + 1: self.row_stride * item, at + 2: self.col_stride * item}


def operand_of(x: Any) -> Operand:
    """Return a NumPy array of two dimensions as an operand."""
    (row_stride, col_stride), item = x.strides, x.itemsize
    return Operand(name_of(x.dtype), row_stride // item, col_stride // item)


def matrix_of(stack: MatrixStack) -> Operand:
    """Return a matrix of a stack as an operand."""
    return Operand(stack.dtype.label, stack.row_stride, stack.col_stride)


#: Element type, and stride in elements.
Vector = tuple[str, int]


class Kernels(NamedTuple):
    """The compiled functions for operands of some types and one rounding."""

    step: int  # elements of k in a step
    parts_a: int
    parts_b: int
    is_split: bool  # whether operands are split into parts
    sums_chunks: bool  # whether each call of the micro-kernel sums separately, so that bits depend on the chunks of k
    words: dict[int, int]  # words of a job for packing and micro-kernel
    macro_kernel: int  # its address
    run: Callable[[int, int], int]  # the macro-kernel, for one thread


#: Palette 1, eight tiles of 64 bytes by 16 rows, as ``LDTILECFG`` reads it; never freed, because jobs contain only its
#: address.
_TILE_CONFIG = (ctypes.c_char * 64).from_buffer_copy(struct.pack("<B15x8H16x8B8x", 1, *[64] * 8, *[16] * 8))


def _scheme(dtype: str, rounding: str, storage: str, offset: int) -> Scheme:
    every: dict[tuple[str, str], Scheme] = imported("lowprec.backends.cpu.packed.tile_rows:SCHEMES")
    if offset:
        return every[dtype, "offset"]
    of_fp32 = imported("lowprec.backends.cpu.packed.tile_rows:FP32_SCHEMES")
    table = of_fp32 if storage == "float32" else every
    # Modes may share their parts; 16-bit storage is packed unchanged in any mode.
    made = {r.mode.value: (r.operand_format, r.parts) for r in TABLE}
    alike = [mode for mode, parts in made.items() if parts == made.get(rounding)]
    for name in (rounding, *alike, "exact"):
        if (dtype, name) in table:
            return table[dtype, name]
    raise ValueError(f"no way to pack {dtype} with rounding {rounding!r}")


def _products(a: Scheme, b: Scheme, rounding: str) -> Pairs:
    if not (a.is_split or b.is_split):
        pairs = [(i, j) for i in range(a.parts) for j in range(b.parts)]
        return tuple(sorted(pairs, key=sum, reverse=True))
    found = row(MathMode(rounding))
    # A TF32 part is packed as the exact sum of two bfloat16 parts.
    each = (1, 0) if found.operand_format is TF32 else (0,)
    count = len(each)
    return tuple(
        (count * i + x, count * j + y)
        for i, j in found.pairs
        for x in each
        for y in each
        if count * i + x < a.parts and count * j + y < b.parts
    )


@lru_cache(maxsize=256)
def kernels_of(micro_kernel: MicroKernel, a_dtype: str, b_dtype: str, rounding: str, rows: int = 32) -> Kernels:
    """Return the compiled kernels for these types, for a last strip of A with ``rows`` rows."""
    from lowprec.backends.cpu.packed import macro_kernel, packing

    if (a_dtype == "int8") != (micro_kernel.storage == "int8"):
        raise ValueError(f"the micro-kernel {micro_kernel.name} multiplies {micro_kernel.storage}")
    a = _scheme(a_dtype, rounding, micro_kernel.storage, micro_kernel.offset_a)
    b = _scheme(b_dtype, rounding, micro_kernel.storage, 0)
    emit = imported(f"{__package__}.micro_kernels.{micro_kernel.module}:emit")
    products = _products(a, b, rounding)
    kernel = emit(micro_kernel.name, products)
    words = {
        J.TILE_CONFIG: ctypes.addressof(_TILE_CONFIG) if micro_kernel.has_tiles else 0,
        J.PACK_A: packing.pack_kernel(a),
        J.PACK_B: packing.pack_kernel(b),
        J.KERNEL: kernel,
        J.LAST_KERNEL: kernel if rows == 32 else emit(micro_kernel.name, products, rows),
    }
    run = macro_kernel.macro_kernel()
    is_split, sums_chunks = a.is_split or b.is_split, a.is_wide
    return Kernels(a.step, a.parts, b.parts, is_split, sums_chunks, words, team.address_of(run), run)


class Blocking(NamedTuple):
    """The words of a job for a number of threads, and its memory."""

    words: bytes
    packed_bytes: int  # of packed B; 0 if tasks pack it
    workspace_bytes: int  # per thread
    tasks: int
    is_short: bool  # each thread packs all of A, and each task its strips of B


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)


#: Strips up to which A may be short; bytes of B that each task then packs at a time, and strips, by whether B is
#: contiguous along k: two such strips are read in long runs, 15 % faster at 16 x 4096 x 4096 on a Zen 5.
_SHORT_STRIPS, _GROUP_BYTES, _GROUP_STRIPS = 8, 256 << 10, {False: 8, True: 2}


#: Largest number of strips of A in a task: larger tasks took 7 % longer at 2048 x 2048 x 2048 on a Zen 4.
_MOST_STRIPS = 8


def _task_shape(strips_m: int, strips_n: int, fitting: int, workers: int) -> tuple[int, int]:
    """Return the strips of A and of B per task that minimise the work of the busiest thread.

    The cost of a task is 1 per block and per packed strip of A, and a quarter per strip of B.
    """
    wanted = 1 if workers == 1 else 2 * workers

    def cost(shape: tuple[int, int]) -> tuple[float, int]:
        task_m, task_n = shape
        tasks = _ceil_div(strips_m, task_m) * _ceil_div(strips_n, task_n)
        return _ceil_div(tasks, workers) * (task_m * (task_n + 1) + task_n / 4), -task_m

    shapes = []
    for task_m in range(1, min(strips_m, fitting, _MOST_STRIPS) + 1):
        least = max(_ceil_div(wanted, _ceil_div(strips_m, task_m)), _ceil_div(strips_n, 256))
        shapes += [
            (task_m, _ceil_div(strips_n, ranges))
            for ranges in range(min(least, strips_n), min(least + workers, strips_n) + 1)
        ]
    return min(shapes, key=cost)


def _blocking(
    micro_kernel: MicroKernel,
    kernels: Kernels,
    shape: tuple[int, int, int],
    workers: int = 1,
    *,
    is_short: bool = False,
    b_along_k: bool = False,
) -> tuple[dict[int, int], int, int]:
    """Return the words of the block sizes, and the bytes of the packed operand and of a thread's workspace."""
    m, n, k = shape
    parts_a, parts_b, longest = kernels.parts_a, kernels.parts_b, micro_kernel.chunk_steps
    parts = max(parts_a, parts_b)
    steps, strips_m, strips_n = _ceil_div(k, kernels.step), _ceil_div(m, 32), _ceil_div(n, 32)
    chunk = steps
    if steps > CHUNK_STEPS // parts:
        chunk = _ceil_div(steps, _ceil_div(steps, longest // parts))
    pack_steps = max(1, 1024 // kernels.step)
    strip_bytes_b = steps * 2048 * parts_b + _STRIP_PAD
    words: dict[int, int] = {}
    if is_short:
        task_m, task_n = strips_m, max(1, min(_GROUP_STRIPS[b_along_k], strips_n // (2 * workers)))
        if not kernels.sums_chunks:
            fitting = max(1, _GROUP_BYTES // (2048 * task_n))
            chunk = _ceil_div(steps, _ceil_div(steps, fitting))
        strip_bytes_a = steps * 2048 + _STRIP_PAD
        own_b = chunk * 2048 + _STRIP_PAD
        own_a = strips_m * strip_bytes_a
        own_bytes, packed_bytes = own_a + task_n * own_b, 0
        words = {J.A_OWN_BYTES: own_a, J.B_TASK_STRIP_BYTES: own_b}
    else:
        strip_bytes_a = chunk * 2048 * parts_a + _STRIP_PAD
        fitting = max(1, micro_kernel.block_bytes // (chunk * 2048 * parts_a))
        task_m, task_n = _task_shape(strips_m, strips_n, fitting, workers)
        own_bytes, packed_bytes = task_m * strip_bytes_a, strips_n * strip_bytes_b
    acc_offset = _ceil_div(own_bytes, 4096) * 4096
    chunk_offset = acc_offset + 4096 * task_m * (1 if chunk >= steps else task_n)
    scratch_offset = chunk_offset + (4096 if kernels.is_split else 0)
    kept_offset = scratch_offset + int(imported(f"{__package__}.packing:SCRATCH_BYTES"))
    kept_bytes = int(imported(f"{__package__}.result_rows:KEPT_BYTES"))
    pack_tasks_b = 0 if is_short else _ceil_div(strips_n, 8) * _ceil_div(steps, pack_steps)
    tasks_n = _ceil_div(strips_n, task_n)
    words |= {
        J.M: m, J.N: n, J.K: k, J.STEPS: steps,
        J.A_PARTS: parts_a, J.B_PARTS: parts_b,
        J.A_STRIP_BYTES: strip_bytes_a, J.B_STRIP_BYTES: strip_bytes_b,
        J.STRIPS_M: strips_m, J.STRIPS_N: strips_n,
        J.PACK_B_STRIPS: 8, J.PACK_B_STEPS: pack_steps, J.PACK_B_TASKS: pack_tasks_b,
        J.PACK_TASKS: pack_tasks_b,
        J.TASK_STRIPS_M: task_m, J.TASK_STRIPS_N: task_n,
        J.TASKS_N: tasks_n, J.TASKS: _ceil_div(strips_m, task_m) * tasks_n,
        J.CHUNK_STEPS: chunk,
        # With several products per load the L2 cache is fast enough.
        J.INNER_STEPS: micro_kernel.inner_bytes // 2048 if parts_a * parts_b == 1 else chunk,
        J.ACC_OFFSET: acc_offset, J.SCRATCH_OFFSET: scratch_offset, J.KEPT_OFFSET: kept_offset,
        J.CHUNK_OFFSET: chunk_offset if kernels.is_split else 0,
    }  # fmt: skip
    return words, packed_bytes, kept_offset + task_m * kept_bytes


Words = ctypes.c_int64 * J.WORDS


def words_of(fields: dict[int, int]) -> bytes:
    """Return the words of a job with these fields, all others 0."""
    words = Words()
    for index, value in fields.items():
        words[index] = value
    return bytes(words)


def float_bits(value: float) -> int:
    """Return the bits of a float64 as a word of a job."""
    return int(struct.unpack("<q", struct.pack("<d", value))[0])


def epilogue_words(
    c: Operand | None, bias: Vector | None, activation: str | None, *, transposed: bool = False
) -> dict[int, int]:
    """Return the words of an epilogue without addresses, with alpha = 1 and beta = 0."""
    words = {J.ALPHA: float_bits(1.0), J.ACTIVATION: J.ACTIVATIONS[activation]}
    if c is not None:
        words |= {**c.words(J.C), J.C_KIND: J.KINDS[c.dtype]}
    if bias is not None:
        dtype, stride = bias
        along = J.BIAS_ROW_STRIDE if transposed else J.BIAS_COL_STRIDE
        words |= {along: stride * dtype_from_name(dtype).itemsize, J.BIAS_KIND: J.KINDS[dtype]}
    return words


@dataclass(slots=True, eq=False)
class Job:
    """A product of two matrices without addresses and factors."""

    micro_kernel: MicroKernel
    kernels: Kernels
    shape: tuple[int, int, int]  # m, n, k
    words: dict[int, int]  # kernels, strides and epilogue
    checks_a: bool  # A is checked for Inf and NaN before the result, which may be c, is written
    #: This is the transposed product, with exchanged operands.
    transposed: bool
    is_shared: bool  # several threads share the product
    may_be_short: bool  # each thread may pack all of A
    #: Alignment of the result in bytes that permits non-temporal stores; 0 for never.
    stream_bytes: int
    #: Columns of the result computed at a time, so that packed B does not exceed `_MOST_PACKED`; 0 for all.
    block_columns: int
    blockings: dict[int, Blocking]  # by number of threads

    def blocking(self, workers: int) -> Blocking:
        """Return the cached job for a number of threads."""
        m, n, k = self.shape
        own_bytes = 2048 * _ceil_div(m, 32) * _ceil_div(k, self.kernels.step)
        # The threads together pack no more of A than twice B; copies of their own save exchanging it between cores.
        is_short = self.may_be_short and workers * m <= 2 * n and workers * own_bytes <= _MOST_PACKED
        b_along_k = abs(self.words[J.B_ROW_STRIDE]) < abs(self.words[J.B_COL_STRIDE])
        words, packed_bytes, workspace_bytes = _blocking(
            self.micro_kernel, self.kernels, self.shape, workers, is_short=is_short, b_along_k=b_along_k
        )
        if self.checks_a:
            words[J.PACK_TASKS] += words[J.TASKS] // words[J.TASKS_N]
        made = words_of(self.words | words)
        found = Blocking(made, packed_bytes, workspace_bytes, words[J.TASKS], is_short)
        return self.blockings.setdefault(workers, found)


#: Bytes of B packed at a time, at least one strip of 32 columns, or of the threads' copies of a short A.
_MOST_PACKED = 32 << 20

#: Number of columns of B up to which the transposed product is computed.
_NARROW = 16

#: Modes whose operands are split.
_SPLIT = frozenset(r.mode.value for r in TABLE if r.parts > 1)


def _last_rows(micro_kernel: MicroKernel, m: int, rounding: str) -> int:
    """Return the rows of the last strip that are multiplied; all for split operands, whose blocks are checked whole."""
    rows = m % 32
    if micro_kernel.has_tiles or rounding in _SPLIT or not 0 < rows <= 16:
        return 32
    return 8 if rows <= 8 else 16


@lru_cache(maxsize=512)
def job_of(
    micro_kernel: MicroKernel,
    m: int,
    n: int,
    k: int,
    a: Operand,
    b: Operand,
    out: Operand,
    rounding: str,
    c: Operand | None = None,
    bias: Vector | None = None,
    activation: str | None = None,
    has_alpha: bool = False,
) -> Job:
    """Return the job of a product; see `run.gemm`."""
    transposed = out.row_stride == 1 and out.col_stride != 1
    # The transpose of a product with a narrow B, which is not prepared, has a short A.
    is_narrow = n <= _NARROW < m and bool(b.row_stride or b.col_stride)
    if not transposed and is_narrow and not micro_kernel.has_tiles and rounding not in _SPLIT:
        transposed = True
    if transposed:  # the rows of the transposed result are contiguous
        a, b, m, n, out = b.transposed, a.transposed, n, m, out.transposed
        c = c and c.transposed
    if len({a.dtype == "int8", b.dtype == "int8", out.dtype == "int32"}) > 1:
        raise ValueError(f"int8 goes with int8 into int32: {a.dtype} @ {b.dtype} -> {out.dtype}")
    kernels = kernels_of(micro_kernel, a.dtype, b.dtype, rounding, _last_rows(micro_kernel, m, rounding))
    computes = has_alpha or any(x is not None for x in (c, bias, activation))
    if out.dtype == "int32" and computes:
        raise ValueError("int8 products take no alpha, beta, bias or activation")
    epilogue_kernel = imported(f"{__package__}.epilogue:epilogue_kernel")
    words = {
        **kernels.words, **a.words(J.A), **b.words(J.B), **out.words(J.OUT),
        **epilogue_words(c, bias, activation, transposed=transposed),
        J.EPILOGUE: epilogue_kernel(out.dtype, computes),
    }  # fmt: skip
    item = dtype_from_name(out.dtype).itemsize
    strip_bytes = 2048 * kernels.parts_b * _ceil_div(k, kernels.step)
    block = 32 * max(1, _MOST_PACKED // strip_bytes)
    # Non-finite numbers in B must be found before the result, which may be c, is written.
    is_divisible = c is None or kernels.parts_b == 1 or kernels.is_split
    return Job(
        micro_kernel, kernels, (m, n, k), words,
        checks_a=c is not None and kernels.parts_a > 1 and not kernels.is_split,
        transposed=transposed,
        may_be_short=not micro_kernel.has_tiles and kernels.parts_a == kernels.parts_b == 1 and m <= 32 * _SHORT_STRIPS,
        is_shared=m * n * k * kernels.parts_a * kernels.parts_b >= micro_kernel.shared_from,
        stream_bytes=item if m * n * item > STREAM_BYTES and out.col_stride == 1 else 0,
        block_columns=block if block < n and is_divisible else 0,
        blockings={},
    )  # fmt: skip


@lru_cache(maxsize=64)
def block_of(job: Job, columns: int) -> Job:
    """Return the job of so many columns of a product."""
    m, _, k = job.shape
    return replace(job, shape=(m, columns, k), block_columns=0, blockings={})


def packing_job(kernels: Kernels, micro_kernel: MicroKernel, n: int, k: int, b: Operand) -> Blocking:
    """Return a job that only packs ``b``."""
    words, packed_bytes, workspace_bytes = _blocking(micro_kernel, kernels, (1, n, k))
    made = words_of(kernels.words | words | b.words(J.B) | {J.TASKS: 0})
    return Blocking(made, packed_bytes, workspace_bytes, 0, is_short=False)
