"""The macro-kernel: the loops around a micro-kernel, the same for all units.

A micro-kernel multiplies a strip of 32 rows by a strip of 32 columns over some steps of k. It takes six
integers: packed A, packed B, accumulators (four 16 x 16 tiles of float32 or int32), number of steps (at least 1),
whether to add to the accumulators, and the address from which to prefetch `PREFETCH_LINES` cache lines of the next
piece of B per step and part of B.

The loops, from inside to outside:

- `INNER_STEPS` steps of one strip of B stay in the L1 cache, for all strips of A of the task.
- `CHUNK_STEPS` steps of `TASK_STRIPS_M` strips of A stay in the L2 cache, for all strips of B of the task.
- Chunks of k: accumulators are stored as float32 in scratch memory, so chunks do not change the bits. A micro-kernel
  that sums each call separately (FP32) sums pieces that depend on k only. Chunks of split operands are summed
  separately, with a length that keeps the roundings of all products of parts below those of one product in FP32.
- Tasks: rectangles of the result, which threads take from a shared counter. All threads pack B before the first task,
  and each task packs its strips of A. If A is short, each thread packs all of A, and each task its strips of B.

The result does not depend on the number of threads or their schedule.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from llvmlite import ir
from numba import types

from lowprec.backends.cpu.packed import job as J
from lowprec.backends.cpu.packed.compilation import compile_kernel, inlined
from lowprec.backends.cpu.packed.native import (
    F32,
    I16,
    I64,
    atomic_add,
    atomic_load,
    atomic_store,
    call,
    compiled,
    emitted,
    field,
    inline_asm,
    instruction,
    lesser,
    load,
    pause,
    pointer,
    prefetch_line,
    store,
    yield_cpu,
)
from lowprec.backends.cpu.packed.result_rows import FIRST, KEPT_BYTES, LAST
from lowprec.backends.cpu.packed.vector_arithmetic import INFINITY, bits_of, magnitude_of, splat


@emitted()
def _configure_tiles(builder, config):
    inline_asm(builder, "ldtilecfg ($0)", "r,~{memory}", ir.VoidType(), [config])


_release_tiles = instruction("tilerelease")
#: Orders non-temporal stores before later ones.
_fence = instruction("sfence")

_BLOCK = ir.VectorType(F32, 16)


def _vectors(builder: Any, address: Any) -> Any:
    for offset in range(0, 4096, 64):
        at = builder.add(address, ir.Constant(I64, offset))
        yield pointer(builder, at, _BLOCK)


@emitted()
def _add_block(builder, total, block):
    for to, from_ in zip(_vectors(builder, total), _vectors(builder, block), strict=True):
        term = builder.load(from_, align=64)
        builder.store(builder.fadd(builder.load(to, align=64), term), to, align=64)


@emitted(types.intp)
def _holds_nonfinite(builder, block):
    largest = splat(0)
    for at in _vectors(builder, block):
        size = magnitude_of(builder, bits_of(builder, builder.load(at, align=64)))
        largest = builder.select(builder.icmp_unsigned(">", size, largest), size, largest)
    found = builder.icmp_unsigned(">=", largest, splat(INFINITY))
    return builder.zext(builder.bitcast(found, I16), I64)


def _packs(kernel: int, operand: int, lane_stride: int, k_stride: int, lanes: int, is_b: int) -> Any:
    """Return the function that packs an operand, given the words of a job for `packing.pack_kernel`."""

    @inlined(types.intp)
    def pack(job, first_strip, end_strip, first_step, end_step, target, strip_bytes, scratch):
        return call(
            field(job, kernel),
            (
                field(job, operand), field(job, lane_stride), field(job, k_stride), field(job, lanes), field(job, J.K),
                first_strip, end_strip, first_step, end_step,
                target, strip_bytes, is_b, scratch + field(job, J.SCRATCH_OFFSET),
            ),
        )  # fmt: skip

    return pack


_pack_a = _packs(J.PACK_A, J.A, J.A_ROW_STRIDE, J.A_COL_STRIDE, J.M, 0)
_pack_b = _packs(J.PACK_B, J.B, J.B_COL_STRIDE, J.B_ROW_STRIDE, J.N, 1)


@inlined(types.intp)
def _pack_shared_b(job, index, scratch):
    """Run one task of the packing phase: some strips of B over some steps."""
    strips, steps = field(job, J.PACK_B_STRIPS), field(job, J.PACK_B_STEPS)
    groups = -(-field(job, J.STRIPS_N) // strips)
    strip, step = (index % groups) * strips, (index // groups) * steps
    end_strip = lesser(strip + strips, field(job, J.STRIPS_N))
    end_step = lesser(step + steps, field(job, J.STEPS))
    strip_bytes = field(job, J.B_STRIP_BYTES)
    target = field(job, J.B_PACKED) + strip * strip_bytes + step * 2048 * field(job, J.B_PARTS)
    return _pack_b(job, strip, end_strip, step, end_step, target, strip_bytes, scratch)


@inlined(types.intp)
def _check_a(job, index, scratch):
    strips, steps = field(job, J.TASK_STRIPS_M), field(job, J.STEPS)
    chunk = field(job, J.CHUNK_STEPS)
    end_strip = lesser((index + 1) * strips, field(job, J.STRIPS_M))
    flags = 0
    for step in range(0, steps, chunk):
        end_step = lesser(step + chunk, steps)
        strip_bytes = field(job, J.A_STRIP_BYTES)
        flags |= _pack_a(job, index * strips, end_strip, step, end_step, scratch, strip_bytes, scratch)
    return flags


@inlined(types.intp)
def _pack_task(job, index, scratch):
    """Run one task of the packing phase; return nonzero if the operand is not finite there."""
    tasks_b = field(job, J.PACK_B_TASKS)
    if index < tasks_b:
        return _pack_shared_b(job, index, scratch)
    return _check_a(job, index - tasks_b, scratch)


@inlined(types.void)
def _packing_phase(job, scratch):
    tasks = field(job, J.PACK_TASKS)
    while True:
        index = atomic_add(job + 8 * J.PACK_NEXT, 1)
        if index >= tasks:
            break
        flags = _pack_task(job, index, scratch)
        if flags != 0:
            atomic_store(job + 8 * J.NOT_FINITE, 1)
        atomic_add(job + 8 * J.PACK_DONE, 1)
    # Wait for the last tasks of other threads: microseconds, unless a thread was descheduled.
    spins = 0
    while atomic_load(job + 8 * J.PACK_DONE) < tasks:
        spins += 1
        if spins < 2000:
            pause()
        else:
            yield_cpu()


@inlined(types.void)
def _apply_epilogue(job, acc, strip_m, strip_n, scratch, kept, place):
    if field(job, J.CHUNK_OFFSET) != 0 and _holds_nonfinite(acc) != 0:
        atomic_store(job + 8 * J.SUM_NOT_FINITE, 1)
    to = scratch + field(job, J.SCRATCH_OFFSET)
    call(field(job, J.EPILOGUE), (acc, job, strip_m * 32, strip_n * 32, to, kept, place))


# fmt: off
@inlined(types.void)
def _multiply_chunk(
    job, strip_m, end_m, strip_n, end_n, step, end_step, packed_a, packed_b, strip_bytes_b, scratch,
):
    """Multiply all blocks of a task over one chunk of k, and apply the epilogue after the last chunk.

    ``packed_a`` and ``packed_b`` are the addresses of the task's first strips at the chunk's first step.
    """
    # fmt: on
    last_strip = field(job, J.STRIPS_M) - 1 - strip_m
    step_a, step_b = 2048 * field(job, J.A_PARTS), 2048 * field(job, J.B_PARTS)
    strip_bytes_a = field(job, J.A_STRIP_BYTES)
    steps, inner = field(job, J.STEPS), field(job, J.INNER_STEPS)
    accumulators = scratch + field(job, J.ACC_OFFSET)
    # One column of accumulators suffices for a single chunk.
    acc_column = 0 if field(job, J.CHUNK_STEPS) >= steps else (end_m - strip_m) * 4096
    # The epilogue of a block runs after the next block has been multiplied: its accumulators are then in memory, and
    # its instructions overlap with the last sums of the next block.
    pending, pending_m, pending_n, kept, place = 0, 0, 0, 0, 0
    # A chunk that is summed separately is one call.
    separate = 0 if step == 0 else field(job, J.CHUNK_OFFSET)
    for n in range(strip_n, end_n):
        b = packed_b + (n - strip_n) * strip_bytes_b - step * step_b
        acc0 = accumulators + (n - strip_n) * acc_column
        for s in range(step, end_step, inner):
            count = lesser(inner, end_step - s)
            following = b + (s + count) * step_b
            if s + count == end_step:
                following = b + strip_bytes_b + step * step_b
            share = count * 64 * J.PREFETCH_LINES * field(job, J.B_PARTS)
            for m in range(end_m - strip_m):
                acc = acc0 + m * 4096
                a = packed_a + m * strip_bytes_a + (s - step) * step_a
                micro = field(job, J.LAST_KERNEL) if m == last_strip else field(job, J.KERNEL)
                if acc == pending:
                    _apply_epilogue(job, pending, pending_m, pending_n, scratch, kept, place)
                    pending = 0
                if separate != 0:
                    chunk = scratch + separate
                    call(micro, (a, b + s * step_b, chunk, count, 0, following + m * share))
                    _add_block(acc, chunk)
                else:
                    call(micro, (a, b + s * step_b, acc, count, s, following + m * share))
                if s + count == steps:
                    if pending != 0:
                        _apply_epilogue(job, pending, pending_m, pending_n, scratch, kept, place)
                    pending, pending_m, pending_n = acc, strip_m + m, n
                    kept = scratch + field(job, J.KEPT_OFFSET) + m * KEPT_BYTES
                    place = FIRST * (n == strip_n) + LAST * (n == end_n - 1)
    if pending != 0:
        _apply_epilogue(job, pending, pending_m, pending_n, scratch, kept, place)


@inlined(types.intp)
def _task(job, index, scratch):
    """Compute one rectangle of the result; return nonzero if A is not finite there."""
    tasks_n = field(job, J.TASKS_N)
    strip_m = (index // tasks_n) * field(job, J.TASK_STRIPS_M)
    strip_n = (index % tasks_n) * field(job, J.TASK_STRIPS_N)
    end_m = lesser(strip_m + field(job, J.TASK_STRIPS_M), field(job, J.STRIPS_M))
    end_n = lesser(strip_n + field(job, J.TASK_STRIPS_N), field(job, J.STRIPS_N))
    steps, chunk = field(job, J.STEPS), field(job, J.CHUNK_STEPS)
    strip_bytes_a, own_a = field(job, J.A_STRIP_BYTES), field(job, J.A_OWN_BYTES)
    strip_bytes_b, own_b = field(job, J.B_STRIP_BYTES), field(job, J.B_TASK_STRIP_BYTES)
    for step in range(0, steps, chunk):
        end_step = lesser(step + chunk, steps)
        a, b = scratch, scratch + own_a
        if own_a != 0:
            a = scratch + step * 2048
        elif _pack_a(job, strip_m, end_m, step, end_step, a, strip_bytes_a, scratch) != 0:
            return 1
        if own_b != 0:
            _pack_b(job, strip_n, end_n, step, end_step, b, own_b, scratch)
            strip_bytes_b = own_b
        else:
            b = field(job, J.B_PACKED) + strip_n * strip_bytes_b + step * 2048 * field(job, J.B_PARTS)
        _multiply_chunk(
            job, strip_m, end_m, strip_n, end_n, step, end_step, a, b, strip_bytes_b, scratch
        )
    return 0


@inlined(types.void)
def _prefetch(address, size):
    for offset in range(0, size, 64):
        prefetch_line(address + offset)


@inlined(types.intp)
def _extrema(kernel, source, lane_stride, k_stride, lanes, k, scratch):
    """Return the extrema of a float32 matrix, read along its contiguous dimension."""
    if k_stride == 4:
        return call(kernel, (source, lane_stride, k_stride, lanes, k, 0, scratch))
    return call(kernel, (source, k_stride, lane_stride, k, lanes, 0, scratch))


@inlined(types.void)
def _store_extrema(kernel, job, target, scratch):
    a, b, k = field(job, J.A), field(job, J.B), field(job, J.K)
    stride, k_stride = field(job, J.A_ROW_STRIDE), field(job, J.A_COL_STRIDE)
    store(target, _extrema(kernel, a, stride, k_stride, field(job, J.M), k, scratch), "i64")
    stride, k_stride = field(job, J.B_COL_STRIDE), field(job, J.B_ROW_STRIDE)
    store(target + 8, _extrema(kernel, b, stride, k_stride, field(job, J.N), k, scratch), "i64")


@inlined(types.void)
def _copy_job(source, target):
    for i in range(J.WORDS):
        store(target + 8 * i, load(source + 8 * i, "i64"), "i64")


@cache
def batch_kernel() -> int:
    """Return the address of the kernel that runs the macro-kernel for each product of a batch.

    It takes the addresses of the batch and of the thread's memory, for a copy of the job (4096 bytes), packed B, and
    scratch.
    """

    def share_batch(batch, memory):
        # A locked instruction waits for all stores before it, so a product executes none but that for the next index,
        # after packing, when the stores of the previous result have completed.
        count, packed_b = field(batch, J.BATCH_COUNT), memory + 4096
        scratch = memory + field(batch, J.BATCH_SCRATCH)
        field_a = 8 * field(batch, J.BATCH_FIELD_A)
        field_b = 8 * field(batch, J.BATCH_FIELD_B)
        before = 0  # B of the previous product, which is packed already
        index = atomic_add(batch + 8 * J.BATCH_NEXT, 1)
        while index < count:
            addresses = field(batch, J.BATCH_TABLE) + 32 * index
            _copy_job(field(batch, J.BATCH_JOB), memory)
            store(memory + 8 * J.B_PACKED, packed_b, "i64")
            store(memory + field_a, field(addresses, 0), "i64")
            store(memory + field_b, field(addresses, 1), "i64")
            store(memory + 8 * J.OUT, field(addresses, 2), "i64")
            store(memory + 8 * J.C, field(addresses, 3), "i64")
            extrema, flags = field(batch, J.BATCH_EXTREMA), 0
            if extrema != 0:
                _store_extrema(extrema, memory, addresses, scratch + field(memory, J.SCRATCH_OFFSET))
            if field(memory, J.B) != before:
                for task in range(field(memory, J.PACK_TASKS)):
                    flags |= _pack_task(memory, task, scratch)
            before = field(memory, J.B)
            index = atomic_add(batch + 8 * J.BATCH_NEXT, 1)
            if index < count:
                following = field(batch, J.BATCH_TABLE) + 32 * index
                _prefetch(field(following, 0), field(batch, J.BATCH_BYTES_A))
                _prefetch(field(following, 1), field(batch, J.BATCH_BYTES_B))
            config = field(memory, J.TILE_CONFIG)
            if config != 0:
                _configure_tiles(config)
            for task in range(field(memory, J.TASKS)):
                if flags == 0:
                    flags |= _task(memory, task, scratch)
            if config != 0:
                _release_tiles()
            if (flags | field(memory, J.SUM_NOT_FINITE)) != 0:
                atomic_store(batch + 8 * J.BATCH_NOT_FINITE, 1)
        _fence()
        return 0

    return compile_kernel(share_batch)


@cache
def macro_kernel() -> Callable[[int, int], int]:
    """Return the macro-kernel, which each thread calls once with the addresses of the job and of its scratch."""

    def share_product(job, scratch):
        _packing_phase(job, scratch)
        tasks = field(job, J.TASKS)
        config = field(job, J.TILE_CONFIG)
        if config != 0:
            _configure_tiles(config)
        packs_a = field(job, J.A_OWN_BYTES) != 0
        while atomic_load(job + 8 * J.NOT_FINITE) == 0:
            index = atomic_add(job + 8 * J.TASK_NEXT, 1)
            if index >= tasks:
                break
            if packs_a:
                strips, steps, strip_bytes = field(job, J.STRIPS_M), field(job, J.STEPS), field(job, J.A_STRIP_BYTES)
                _pack_a(job, 0, strips, 0, steps, scratch, strip_bytes, scratch)
                packs_a = False
            if _task(job, index, scratch) != 0:
                atomic_store(job + 8 * J.NOT_FINITE, 1)
        if config != 0:
            _release_tiles()
        _fence()
        return 0

    return compiled(share_product)
