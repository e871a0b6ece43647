"""Small products of parts, and batches of them, in one call of native code: split, multiplied, summed and written.

They are products as :mod:`lowprec.backends.cpu.direct` runs them, but for what is done between reading operands and
applying the epilogue: what the plan's schedule says.
"""

from __future__ import annotations

import contextlib
import itertools
import struct
from collections.abc import Iterator
from typing import Any

import numpy as np

from lowprec.arrays.prepared_view import Form, PreparedView
from lowprec.arrays.view import data_pointer
from lowprec.backends.cpu import direct, splitting
from lowprec.backends.cpu.cpuinfo import has_fma
from lowprec.backends.cpu.direct import Kept, Kind, add_in_order, found_in, matrix_of
from lowprec.backends.cpu.direct_job import (
    A_K_STEP,
    AT_EXPONENTS,
    AT_PARTS,
    HAS_SUM,
    IS_SCALED,
    MENDS,
    PAD,
    PART_COUNT,
    PART_EXPONENT,
    PART_STEP,
    PARTS_A,
    PARTS_B,
    PRODUCT_WORDS,
    PRODUCTS,
    SPLIT,
    WORDS,
    job_of,
)
from lowprec.backends.cpu.fp32_units import split_operand
from lowprec.backends.cpu.splitting import Split
from lowprec.backends.cpu.stacks import Stacks
from lowprec.backends.execution import Arguments, Executor
from lowprec.formats import DType
from lowprec.modes import row
from lowprec.planning import GemmLayout, GemmPlan, MatrixStack, Product

_FLOAT32 = np.dtype(np.float32)

#: Elements that NumPy sums at once, each of some products of parts.
_AT_ONCE = 1 << 15

#: Bytes of a vector: parts begin with whole ones.
_VECTOR = 64


def prepare(plan: GemmPlan) -> Executor:
    """Return the executor of a plan for small products of parts."""
    return direct.executor(plan, Kind(_kernel, _job, _kept_parts, False, _sum_by_numpy))


def _whole_vectors(nbytes: int) -> int:
    return -(-nbytes // _VECTOR) * _VECTOR


# --- with the kernels -------------------------------------------------------------------------


def _kernel(plan: GemmPlan, dtype: DType) -> int:
    from lowprec.backends.cpu.direct_parts_kernels import product_kernel

    return product_kernel(dtype.label)


def _job(plan: GemmPlan, layout: GemmLayout, c: MatrixStack | None) -> Any:
    """Return the words of a product of parts."""
    from lowprec.backends.cpu.direct_parts_kernels import split_kernel

    m, n, k = layout.m, layout.n, layout.k
    steps = [_whole_vectors(4 * x) for x in (m * k, k * n)]
    sizes = [count * step for count, step in zip(plan.split, steps, strict=True)]
    places = {
        AT_EXPONENTS: 8 * m,
        PARTS_A + AT_PARTS: sizes[0],
        PARTS_B + AT_PARTS: _whole_vectors(8 * n) + sizes[1],
    }
    more = PRODUCT_WORDS * len(plan.schedule)
    job, scheme = job_of(plan, layout, c, None, places, more), row(plan.scheme)
    operands = zip((PARTS_A, PARTS_B), plan.split, steps, plan.scaled, strict=True)
    for first, count, step, is_scaled in operands:
        job[first + PART_COUNT] = min(count, scheme.parts)
        job[first + HAS_SUM] = count > scheme.parts
        job[first + PART_STEP], job[first + IS_SCALED] = step, is_scaled
    assert plan.operand_format is not None, "products of integers are not taken apart"
    job[PART_EXPONENT], job[SPLIT] = scheme.part_exponent, split_kernel(plan.operand_format.name)
    job[PRODUCTS], job[MENDS] = len(plan.schedule), max(plan.split) > 1
    job[WORDS:] = _schedule(plan, steps, job[A_K_STEP], 4 * n)
    return job


def _schedule(plan: GemmPlan, steps: list[int], a_k_step: int, b_k_step: int) -> list[int]:
    """Return the words of the products that are summed."""
    words: list[int] = []
    for product in plan.schedule:
        words += [
            product.a_part * steps[0] + product.k_start * a_k_step,
            product.b_part * steps[1] + product.k_start * b_k_step,
            product.length,
            *struct.unpack("q", struct.pack("d", product.factor)),
        ]
    return words


def _kept_parts(plan: GemmPlan) -> Kept:
    """Return what finds the parts of a prepared ``b``, with the exponents of its columns, as the kernels write them."""
    find = _finder(plan)

    def find_address(view: PreparedView) -> tuple[Any, int]:
        found = find(view)
        return (None, 0) if found is None else (found, data_pointer(found[0]))

    return find_address


def _finder(plan: GemmPlan) -> Any:
    """Return what finds the memory that a prepared ``b`` keeps, and the same as a split operand."""
    name = ("parts", plan.scheme, plan.split[1], plan.scaled[1])
    return found_in(plan, name, lambda view: _parts_of(plan, view))


def _parts_of(plan: GemmPlan, view: PreparedView) -> Form:
    x, count = matrix_of(view), plan.split[1]
    step, head = (_whole_vectors(size) for size in (4 * x.size, 8 * x.shape[1]))
    memory = np.zeros(head + count * step + PAD, np.uint8)
    exponents = memory[: 8 * x.shape[1]].view(np.int64)
    parts = []
    with contextlib.ExitStack() as stack:
        made = split_operand(plan, x, 1, _FLOAT32, stack)
        if made.exponents is not None:
            exponents[...] = made.exponents[0]
        for number, part in enumerate(made.parts):
            start = head + number * step
            parts.append(memory[start : start + 4 * x.size].view(np.float32).reshape(x.shape))
            parts[-1][...] = part
    return Form((memory, Split(parts, made.exponents)), memory.nbytes)


# --- without them -----------------------------------------------------------------------------


def _sum_by_numpy(plan: GemmPlan, arguments: Arguments, stacks: Stacks, product: Any) -> None:
    kept = _finder(plan)(arguments.b) if type(arguments.b) is PreparedView else None
    with contextlib.ExitStack() as stack:
        a = split_operand(plan, stacks.a, 0, _FLOAT32, stack)
        b = kept[1] if kept else split_operand(plan, stacks.b, 1, _FLOAT32, stack)
        for products in _at_once(plan, product.size):
            k = slice(products[0].k_start, products[0].k_stop)
            x = np.stack([_as_batch(a.parts[p.a_part], product)[..., k] for p in products])
            y = np.stack([_as_batch(b.parts[p.b_part], product)[..., k, :] for p in products])
            terms = np.zeros((len(products), *product.shape), _FLOAT32)
            add_in_order(x, y, terms)
            for term, p in zip(terms, products, strict=True):
                term *= np.float32(p.factor)
                product += term
        splitting.unscale(product, a, b)
        lost = ~np.isfinite(product)
        if max(plan.split) > 1 and lost.any():
            np.copyto(product, _as_blas(stacks, product.shape), where=lost)


def _at_once(plan: GemmPlan, elements: int) -> Iterator[tuple[Product, ...]]:
    """Yield the products of a schedule in groups over the same range of k, whose results stay in the cache."""
    most = max(1, _AT_ONCE // max(1, elements))
    for _, group in itertools.groupby(plan.schedule, key=lambda x: (x.k_start, x.k_stop)):
        while products := tuple(itertools.islice(group, most)):
            yield products


def _as_blas(stacks: Stacks, shape: tuple[int, ...]) -> Any:
    """Return the product of the operands as they are, with sums in float32.

    As in a BLAS with FMA, a product of two numbers is rounded with its sum only: in float64 it is exact.
    """
    wide = np.float64 if has_fma() else np.float32
    a, b = (x.astype(wide) for x in (stacks.a, stacks.b))
    sums = np.zeros(shape, _FLOAT32)
    for i in range(a.shape[-1]):
        sums = (sums + a[..., i, None] * b[..., i, None, :]).astype(_FLOAT32)
    return sums


def _as_batch(x: Any, product: Any) -> Any:
    """Return a stack of matrices with as many dimensions as their product has."""
    return x[(None,) * (product.ndim - x.ndim)]
