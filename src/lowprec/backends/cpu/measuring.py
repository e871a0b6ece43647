"""A short self-measurement: what each of the CPU's kernels costs, next to a product in FP32.

Each kernel multiplies small and large matrices. The kernels take turns, and of each size the least time counts, because
whatever else the machine does only adds to it. Two sizes give the two figures of the planner's model: a product of
n x n matrices takes ``per_flop + per_element / n`` of the time that FP32 takes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from lowprec import modes
from lowprec.arrays import NUMPY_DTYPES
from lowprec.arrays.numpy_library import NUMPY as LIBRARY
from lowprec.backends.cpu import backend, costs, device
from lowprec.backends.cpu.costs import Cost
from lowprec.backends.cpu.kernel_rows import KERNELS
from lowprec.backends.execution import Arguments
from lowprec.formats import DType
from lowprec.modes import MathMode
from lowprec.planning import Capabilities, GemmProblem, KernelRow, OperandSpec, plan_gemm
from lowprec.planning.costs import roundings

#: Extents of the small and the large matrices, and of the matrix that meets vectors.
SMALL, LARGE, MATRIX_VECTOR = 256, 1536, 3072
_ROUNDS = 5
#: Small products are timed several at once: a single one is as short as a change of the clock.
_SMALL_REPEATS = 8

#: By what a kernel multiplies: the mode and the elements with which it is measured. The general kernel is measured in
#: TF32, and its figures serve for int8, too: there as well it makes float32 of the operands in one pass and multiplies
#: in FP32 (on one core of a Zen 5, with AVX2, 19.6 and 19.7 ms at n = 1024, and 66.9 ms both at 1536).
_CASES = {
    "tf32": (MathMode.TF32, DType.FLOAT32),
    "bfloat16": (MathMode.BF16, DType.FLOAT32),
    "float32": (MathMode.FP32, DType.FLOAT32),
    "int8": (MathMode.FP32, DType.INT8),
}
#: The same for kernels that sum products of parts.
_CASES_OF_PARTS = {
    "tf32": (MathMode.TF32X3, DType.FLOAT32),
    "bfloat16": (MathMode.BF16X6, DType.FLOAT32),
}

#: The least cost of a flop that is believed; what the model leaves may be nothing, or less.
_LEAST_PER_FLOP = 0.01

_Sizes = tuple[int, int, int]
_SMALL_SIZES, _LARGE_SIZES = (SMALL,) * 3, (LARGE,) * 3


class _Timed(NamedTuple):
    """A product to take the time of."""

    row: KernelRow
    in_fp32: bool
    sizes: _Sizes
    run: Callable[[], None]


def measure(progress: Callable[[str], None]) -> dict[str, Cost]:
    """Measure this machine's kernels, keep the costs on disk, and use them from now on.

    ``progress`` gets what is being measured, :func:`steps` times. It takes a few seconds.
    """
    cases = list(_cases())
    best: dict[tuple[str, bool, _Sizes], float] = {}
    for _ in range(_ROUNDS):
        for row, in_fp32, sizes, run in cases:
            key = (row.name, in_fp32, sizes)
            best[key] = min(best.get(key, np.inf), _seconds(run, sizes))
            progress(row.name)
    found = {row.name: _cost(row, best) for row in _measurable(_able())}
    costs.remember(found)
    device.forget()
    return found


def steps() -> int:
    """Return how often :func:`measure` tells of its progress."""
    rows = _measurable(_able())
    return _ROUNDS * (len(_all_sizes(rows)) + sum(len(_sizes(row)) for row in rows))


def _able() -> Capabilities:
    """Return what the CPU can do, with the built-in costs, so that no measurement depends on another."""
    return Capabilities("cpu", "", KERNELS, device.features())


def _general(able: Capabilities) -> KernelRow:
    return next(
        row for row in KERNELS if not row.formats and row.requires in (None, *able.features)
    )


def _measurable(able: Capabilities) -> list[KernelRow]:
    """Return the kernels that run large products here: those for some numbers, and the first of those for any."""
    special = [
        row
        for row in KERNELS
        if row.formats and row.requires in able.features and not row.maximum_elements
    ]
    return [*special, _general(able)]


def _sizes(row: KernelRow) -> tuple[_Sizes, ...]:
    """Return at which sizes (m, n, k) a kernel is measured."""
    if row.vectors:
        return ((MATRIX_VECTOR, row.vectors[0], MATRIX_VECTOR),)
    return _SMALL_SIZES, _LARGE_SIZES


def _all_sizes(rows: list[KernelRow]) -> list[_Sizes]:
    return list(dict.fromkeys(sizes for row in rows for sizes in _sizes(row)))


def _cases() -> Iterator[_Timed]:
    able = _able()
    general, rows = _general(able), _measurable(able)
    for sizes in _all_sizes(rows):
        yield _timed(able, general, MathMode.FP32, DType.FLOAT32, sizes)
    for row in rows:
        mode, dtype = _case(row)
        for sizes in _sizes(row):
            yield _timed(able, row, mode, dtype, sizes)


def _case(row: KernelRow) -> tuple[MathMode, DType]:
    cases = _CASES_OF_PARTS if row.sums_products else _CASES
    return next(case for name, case in cases.items() if not row.formats or name in row.formats)


def _timed(
    able: Capabilities, row: KernelRow, mode: MathMode, dtype: DType, sizes: _Sizes
) -> _Timed:
    m, n, k = sizes
    a_spec, b_spec = (OperandSpec.contiguous(dtype, shape) for shape in ((m, k), (k, n)))
    # What cannot run elsewhere falls back to the last row.
    anywhere = row._replace(minimum_elements=0, minimum_mn=0)
    chosen = replace(able, kernels=(anywhere, KERNELS[-1]))
    plan = plan_gemm(GemmProblem(a_spec, b_spec), chosen, mode)
    assert plan.kernel_row is anywhere
    rng = np.random.default_rng(0)
    arrays = (
        rng.integers(-99, 99, shape).astype(NUMPY_DTYPES[dtype]) for shape in ((m, k), (k, n))
    )
    a, b = (LIBRARY.view(x) for x in arrays)
    out = LIBRARY.view(np.empty(plan.out_shape, NUMPY_DTYPES[plan.out_dtype]))
    execute, arguments = backend.prepare(plan), Arguments(a, b, out)
    in_fp32 = row.formats is None and mode is MathMode.FP32 and dtype is DType.FLOAT32
    return _Timed(row, in_fp32, sizes, lambda: execute(arguments))


def _seconds(run: Callable[[], None], sizes: _Sizes) -> float:
    """Return the time of a product, after one that is not timed."""
    repeats = _SMALL_REPEATS if sizes == _SMALL_SIZES else 1
    run()
    start = time.perf_counter()
    for _ in range(repeats):
        run()
    return (time.perf_counter() - start) / repeats


def _cost(row: KernelRow, best: dict[tuple[str, bool, _Sizes], float]) -> Cost:
    general = next(name for name, in_fp32, _ in best if in_fp32)

    def ratio(sizes: _Sizes) -> float:
        return best[row.name, False, sizes] / best[general, True, sizes]

    if row.vectors:
        # Of float32 it reads what FP32 reads, so no more can be saved.
        (sizes,) = _sizes(row)
        least = 1.0 if row.holds_in else _LEAST_PER_FLOP
        return costs.limited(max(ratio(sizes), least), 0.0)
    small, large = ratio(_SMALL_SIZES), ratio(_LARGE_SIZES)
    if row.formats is None:
        # It multiplies in FP32, so all that it takes longer is the rounding; what fits the large size is kept.
        return costs.limited(1.0, max(large - 1, 0.0) * LARGE)
    per_element = max(small - large, 0.0) / (1 / SMALL - 1 / LARGE)
    per_flop = max(large - per_element / LARGE, _LEAST_PER_FLOP)
    mode = modes.row(_case(row)[0])
    return costs.limited(per_flop / mode.products, per_element / roundings(row, mode.parts))
