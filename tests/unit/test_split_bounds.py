"""Errors of rounded and of split operands against their bounds: never exceeded, and nearly reached by data made for it.

The products are formed here, without lowprec's code, with every sum in the worst order: one term after another.
"""

import ml_dtypes
import numpy as np
import pytest

from lowprec.formats import FLOAT32, DType
from lowprec.modes import TABLE, MathMode, row
from lowprec.planning import GemmProblem, OperandSpec, plan_gemm, planner
from lowprec.planning.bounds import error_bound
from lowprec.planning.schedule import make_schedule
from lowprec.planning.split_bounds import Depth, chunk_for, confidence
from support import machines
from support.oracles import round_to

#: Modes that round or split the operands, and full FP32.
SCHEMES = [
    MathMode.FP32,
    *(r.mode for r in TABLE if r.operand_format.name in ("bfloat16", "float16", "tf32")),
]
FLOAT16 = [m for m in SCHEMES if "fp16" in m]


ROUND = {
    "float32": lambda x: x,
    "bfloat16": lambda x: x.astype(ml_dtypes.bfloat16).astype(np.float32),
    "float16": lambda x: x.astype(np.float16).astype(np.float32),
    "tf32": lambda x: round_to(x, "tf32"),
}


def split(mode, x, axis):
    """Return the parts of an operand and the exponents by which its lines along ``axis`` were scaled."""
    found, to = row(mode), ROUND[row(mode).operand_format.name]
    exponents = np.zeros(1, int)
    if mode in FLOAT16:
        _, top = np.frexp(np.abs(x).max(axis=axis, keepdims=True))
        exponents = 15 - top
        x = np.ldexp(x, exponents)
    parts = [to(x)]
    for _ in range(found.parts - 1):
        x = ((x - parts[-1]) * np.float32(2**found.part_exponent)).astype(np.float32)
        parts.append(to(x))
    if found.sums_parts:
        parts.append(to(parts[0] + parts[1]))
    return parts, exponents


def product(mode, a, b, chunk=None):
    (x, scale_a), (y, scale_b) = split(mode, a, 1), split(mode, b, 0)
    total = np.zeros((len(a), b.shape[1]), np.float32)
    for p in make_schedule(row(mode), (True, True), a.shape[1], chunk):
        left, right = x[p.a_part][:, p.k_start : p.k_stop], y[p.b_part][p.k_start : p.k_stop]
        terms = left[:, None, :] * right.T[None, :, :]
        total += np.float32(p.factor) * np.cumsum(terms, axis=-1, dtype=np.float32)[..., -1]
    return np.ldexp(total, -(scale_a + scale_b))


def cases(k, rng):
    """Yield pairs of operands by what they do to a sum."""
    m, n = 5, 4
    yield "normal", rng.standard_normal((m, k)), rng.standard_normal((k, n))
    yield "positive", rng.random((m, k)), rng.random((k, n))
    yield (
        "wide",
        *(rng.standard_normal(s) * 2.0 ** rng.uniform(-30, 30, s) for s in ((m, k), (k, n))),
    )
    # Every term is just above half a unit of the sum, or its parts are as large as they can be.
    yield (
        "one sign",
        np.full((m, k), 1 + 2.0**-8 - 2.0**-23),
        np.full((k, n), 1 + 2.0**-8 - 2.0**-23),
    )
    yield (
        "halves",
        np.full((m, k), 1 + 2.0**-9 + 2.0**-17 - 2.0**-22),
        np.full((k, n), 1 - 2.0**-12),
    )
    yield "fall", *(np.abs(rng.standard_normal(s)) + 2.0**-10 for s in ((m, k), (k, n)))
    signs = np.resize([1.0, -1.0], k)
    x = rng.random((m, k)) + 1
    yield "cancellation", x * signs, np.repeat(rng.random((1, n)) + 1, k, 0)
    yield "extreme", rng.standard_normal((m, k)) * 2.0**-60, rng.standard_normal((k, n)) * 2.0**60


def excess(bound, computed, a, b):
    """Return the largest error over its bound: element by element where that holds, and in the norms."""
    a, b = a.astype(np.float64), b.astype(np.float64)
    error = np.abs(computed - a @ b)
    norms = np.linalg.norm(a), np.linalg.norm(b)
    found = np.linalg.norm(error) / bound.frobenius(*norms, *computed.shape)
    if not bound.by_norms:
        lost = bound.operand_absolute * (np.abs(a).sum(1)[:, None] + np.abs(b).sum(0) + 1)
        limit = bound.relative * (np.abs(a) @ np.abs(b)) + lost + bound.result_absolute
        found = max(found, np.max(error / limit))
    return float(found)


@pytest.mark.parametrize("mode", SCHEMES)
@pytest.mark.parametrize("chunk", [None, 40])
def test_errors_stay_within_the_bound(mode, chunk, rng):
    for k in (1, 2, 33, 300):
        schedule = make_schedule(row(mode), (True, True), k, chunk)
        kernel = machines.ROWS["numpy"]
        bound = error_bound(mode, DType.FLOAT32, DType.FLOAT32, k, kernel, schedule=schedule)
        for name, x, y in cases(k, rng):
            a, b = x.astype(np.float32), y.astype(np.float32)
            assert excess(bound, product(mode, a, b, chunk), a, b) <= 1, (name, k)


@pytest.mark.parametrize("mode", SCHEMES)
def test_the_bound_of_single_products_is_nearly_reached(mode, rng):
    """Numbers just above a power of two, of which the parts leave most: without its share of any loss it would fail."""
    bound = error_bound(mode, DType.FLOAT32, DType.FLOAT32, 1, machines.ROWS["numpy"])
    seen = 0.0
    for width in (2.0**-11, 2.0**-8, 2.0**-5, 1.0):
        a, b = ((1 + width * rng.random(s)).astype(np.float32) for s in ((400, 1), (1, 400)))
        exact = a.astype(np.float64) * b
        seen = max(seen, np.max(np.abs(product(mode, a, b) - exact) / exact))
    assert 0.45 < seen / bound.relative <= 1


def test_underflow_after_scaling_is_in_the_bound_of_the_norms(rng):
    """Small numbers are lost next to a large one of their row: elements may exceed the bound, norms may not."""
    a, b = ((rng.standard_normal(s)).astype(np.float32) for s in ((6, 30), (30, 5)))
    a[:, 0], b[0] = 2.0**40, 0
    bound = error_bound(MathMode.FP16, DType.FLOAT32, DType.FLOAT32, 30, machines.ROWS["numpy"])
    computed = product(MathMode.FP16, a, b)
    error = np.abs(computed - a.astype(np.float64) @ b)
    assert bound.by_norms
    assert (error > bound.relative * (np.abs(a[:, 1:]) @ np.abs(b[1:]))).any()
    assert np.linalg.norm(error) <= bound.frobenius(*map(np.linalg.norm, (a, b)), 6, 5)


@pytest.mark.parametrize("mode", SCHEMES)
def test_probable_bounds_hold_for_random_data(mode, rng):
    """They may fail once in 1000 times, and here they are tried far from that."""
    k = 2000
    kernel = machines.ROWS["numpy"]
    bound = error_bound(mode, DType.FLOAT32, DType.FLOAT32, k, kernel, elements=20)
    fp32 = error_bound(MathMode.FP32, DType.FLOAT32, DType.FLOAT32, k, kernel, elements=20)
    assert bound.probable < bound.relative
    assert fp32.probable < fp32.relative / 5
    assert bound.probability == 0.999
    for draw in (rng.standard_normal, rng.random):
        a, b = (draw(s).astype(np.float32) for s in ((5, k), (k, 4)))
        error = np.linalg.norm(product(mode, a, b) - a.astype(np.float64) @ b.astype(np.float64))
        assert error <= bound.probable * np.linalg.norm(a) * np.linalg.norm(b)


@pytest.mark.parametrize("fmt", ["bfloat16", "float16", "tf32"])
@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (9, 0), (10, 0)])
def test_the_chunk_keeps_a_tensor_core_within_fp32(fmt, capability):
    for k in (1, 100, 1000, 4096, 10**5, 10**6):
        chunk = chunk_for(k, fmt, capability)
        assert chunk is None or 256 <= chunk < k
    assert chunk_for(100, fmt, capability) is None
    assert chunk_for(8192, fmt, capability) == 256
    assert chunk_for(10**6, fmt, capability) >= 512
    assert chunk_for(10**6, "bfloat16", (7, 0)) is None, "no tensor cores for it"


def test_confidence_grows_slowly():
    # 2 N exp(-x^2 / 2) = 1e-3.
    assert confidence(1) == pytest.approx(np.sqrt(2 * np.log(2000)), rel=1e-6)
    assert confidence(10**12) < 10


def test_probable_is_at_most_worst():
    for depth in (Depth(0), Depth(1), Depth(10**8)):
        assert depth.probable(FLOAT32, 8.0) <= depth.worst(FLOAT32)
    assert Depth(0, 100).probable(FLOAT32, 8.0) == Depth(0, 100).worst(FLOAT32), (
        "truncations count in full"
    )


def square(n, dtype=DType.FLOAT32):
    return GemmProblem(*[OperandSpec.contiguous(dtype, (n, n))] * 2)


def test_fp64_rounds_once():
    found = error_bound(MathMode.FP64, DType.FLOAT32, DType.FLOAT32, 4096, machines.ROWS["numpy"])
    assert 2.0**-24 < found.relative < 2.0**-24 * (1 + 2.0**-16)
    plan = plan_gemm(square(64, DType.COMPLEX64), machines.BARE, MathMode.FP64)
    assert plan.accumulator is DType.COMPLEX128


@pytest.mark.parametrize("able", [machines.BARE, machines.AVX2])
def test_fp32_emulated_is_fp32_where_nothing_is_faster(able):
    plan = plan_gemm(square(2048), able, MathMode.FP32_EMULATED)
    assert (plan.mode, plan.runs_as) == (MathMode.FP32_EMULATED, MathMode.FP32)
    assert "scheme        fp32\n" in str(machines.report_on(plan))


@pytest.mark.parametrize("capability", [(8, 0), (9, 0)])
def test_fp32_emulated_is_as_exact_as_fp32(capability):
    able = machines.gpu(capability)
    plan = plan_gemm(square(4096), able, MathMode.FP32_EMULATED)
    assert plan.runs_as is MathMode.BF16X6
    assert plan.bound.relative <= plan_gemm(square(4096), able, MathMode.FP32).bound.relative
    assert not row(plan.runs_as).uses_tf32


def test_fp32_emulated_takes_no_scheme_with_a_larger_bound(monkeypatch):
    """However little it costs: what a split drops, and what is cut, are more than the roundings of a short sum."""
    monkeypatch.setattr(planner, "expected_cost", lambda plan: -plan.products)
    plan_gemm.cache_clear()
    try:
        able, short, long = machines.gpu((8, 0)), square(4), square(4096)
        fp32, six = (plan_gemm(short, able, mode) for mode in (MathMode.FP32, MathMode.BF16X6))
        assert six.bound.relative > fp32.bound.relative
        assert plan_gemm(short, able, MathMode.FP32_EMULATED).runs_as is MathMode.FP32
        assert plan_gemm(long, able, MathMode.FP32_EMULATED).runs_as is MathMode.BF16X9
    finally:
        plan_gemm.cache_clear()
