"""How a product is cut: into strips, steps and chunks for the caches, and tasks for the threads."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from lowprec.backends.cpu.packed import job as J
from lowprec.backends.execution import resolve
from lowprec.formats import dtype_from_name
from lowprec.planning.bounds import CHUNK_STEPS

if TYPE_CHECKING:
    from lowprec.backends.cpu.packed.templates import Operand

# Strides that are a power of two put the same line of every strip into one set of the caches.
_STRIP_PAD = 192
#: Bytes that kernels use, constants of modules that import numba.
_SCRATCH = "lowprec.backends.cpu.packed.packing:SCRATCH_BYTES"
_KEPT = "lowprec.backends.cpu.packed.result_rows:KEPT_BYTES"
STREAM_BYTES = 1 << 20  # a larger result is written past the caches


def _ceil_div(a: int, b: int) -> int:
    return -(-a // b)


@dataclass(frozen=True, slots=True)
class Cut:
    """Sizes of the loops, and of the memory that they need."""

    fields: tuple[tuple[int, int], ...]
    packed_b_bytes: int
    scratch_bytes: int
    tasks: int
    check_tasks: int


def _chunk_steps(steps: int, parts: int, longest: int) -> int:
    """Steps of k for which A is packed at a time: all, or where they are too many, equal chunks."""
    if steps <= CHUNK_STEPS // parts:
        return steps
    return _ceil_div(steps, _ceil_div(steps, longest // parts))


def _task_shape(strips_m: int, strips_n: int, fitting: int, workers: int) -> tuple[int, int]:
    """Strips of A and of B in a task: as many of A as fit, but enough tasks for every thread, as many for each."""
    wanted = 1 if workers == 1 else 4 * workers
    task_m = min(strips_m, fitting, max(4, strips_m // wanted))
    ranges = min(_ceil_div(wanted, _ceil_div(strips_m, task_m)), _ceil_div(strips_n, 8))
    ranges = max(ranges, _ceil_div(strips_n, 256))

    def longest(strips: int) -> tuple[int, int]:
        """Strips of the thread that has the most tasks; of equals, larger tasks are the better."""
        return _ceil_div(_ceil_div(strips_m, strips) * ranges, workers) * strips, -strips

    if workers > 1:
        task_m = min(range(_ceil_div(task_m, 2), task_m + 1), key=longest)
    return task_m, _ceil_div(strips_n, ranges)


def is_streamed(m: int, n: int, out: Operand, address: int) -> bool:
    """Whether a result is written past the caches.

    One that fits into the second-level cache beside the operands is left there for whoever reads it.
    """
    item = dtype_from_name(out.dtype).itemsize
    return m * n * item > STREAM_BYTES and out.col_stride == 1 and address % item == 0


@lru_cache(maxsize=1024)
def cut_of(
    m: int,
    n: int,
    k: int,
    step: int,
    parts_a: int,
    parts_b: int,
    block_bytes: int,
    inner_bytes: int,
    chunk_steps: int,
    workers: int,
    sums_chunks: bool = False,
) -> Cut:
    """Return the sizes for a product of an (m, k) and a (k, n) matrix; packed B depends on k and n alone.

    With ``sums_chunks`` each chunk of k is summed anew.
    """
    steps, strips_m, strips_n = _ceil_div(k, step), _ceil_div(m, 32), _ceil_div(n, 32)
    chunk = _chunk_steps(steps, max(parts_a, parts_b), chunk_steps)
    strip_bytes_a = chunk * 2048 * parts_a + _STRIP_PAD
    strip_bytes_b = steps * 2048 * parts_b + _STRIP_PAD
    fitting = max(1, block_bytes // (chunk * 2048 * parts_a))
    task_m, task_n = _task_shape(strips_m, strips_n, fitting, workers)
    # With several products to a load the second-level cache is fast enough.
    inner = inner_bytes // 2048 if parts_a * parts_b == 1 else chunk
    acc_bytes = 4096 * task_m * (1 if chunk >= steps else task_n)
    acc_offset = _ceil_div(task_m * strip_bytes_a, 4096) * 4096
    pack_steps = max(1, 1024 // step)
    pack_b_tasks = _ceil_div(strips_n, 8) * _ceil_div(steps, pack_steps)
    tasks_m, tasks_n = _ceil_div(strips_m, task_m), _ceil_div(strips_n, task_n)
    fields = {
        J.M: m, J.K: k, J.STEPS: steps,
        J.A_PARTS: parts_a, J.B_PARTS: parts_b,
        J.A_STRIP_BYTES: strip_bytes_a, J.B_STRIP_BYTES: strip_bytes_b,
        J.STRIPS_M: strips_m, J.STRIPS_N: strips_n,
        J.PACK_B_STRIPS: 8, J.PACK_B_STEPS: pack_steps,
        J.PACK_B_TASKS: pack_b_tasks,
        J.TASK_STRIPS_M: task_m, J.TASK_STRIPS_N: task_n,
        J.TASKS_N: tasks_n, J.TASKS: tasks_m * tasks_n,
        J.CHUNK_STEPS: chunk, J.INNER_STEPS: inner,
        J.ACC_OFFSET: acc_offset, J.SCRATCH_OFFSET: acc_offset + acc_bytes,
    }  # fmt: skip
    if sums_chunks:
        fields[J.CHUNK_OFFSET] = acc_offset + acc_bytes
        fields[J.SCRATCH_OFFSET] += 4096
    fields[J.KEPT_OFFSET] = fields[J.SCRATCH_OFFSET] + resolve(_SCRATCH)
    return Cut(
        fields=tuple(fields.items()),
        packed_b_bytes=strips_n * strip_bytes_b,
        scratch_bytes=fields[J.KEPT_OFFSET] + task_m * resolve(_KEPT),
        tasks=tasks_m * tasks_n,
        check_tasks=tasks_m,
    )
