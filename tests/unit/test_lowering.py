"""Lowered plans, interpreted literally on flat memory: what cuBLASLt would be asked for is the product."""

from __future__ import annotations

from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lowprec.formats import ComputeType, DType
from lowprec.modes import MathMode
from lowprec.planning import Activation, Capabilities, GemmProblem, OperandSpec, ReasonKind, plan_gemm
from lowprec.planning.cublaslt import batches
from lowprec.planning.cublaslt.batches import split_batches
from lowprec.planning.cublaslt.calls import CublasLtCall, LtMatrix, Pack
from lowprec.planning.cublaslt.lowering import lower
from lowprec.planning.tensor_cores import roundings
from lowprec.util.strides import contiguous_strides
from support.machines import gpu

GPU, VOLTA = gpu((9, 0)), gpu((7, 0), 4 << 20)


# -- an interpreter of calls ----------------------------------------------------------------------


class Memory:
    """A flat array of small integers, exact in every type, and a strided view of it with its spec."""

    def __init__(self, shape: tuple[int, ...], strides: tuple[int, ...], dtype: DType, seed: int):
        reach = 1 + sum(abs(s) * (n - 1) for s, n in zip(strides, shape, strict=True) if n)
        self.start = sum(-s * (n - 1) for s, n in zip(strides, shape, strict=True) if s < 0)
        rng = np.random.default_rng(seed)
        self.flat: np.ndarray[Any, Any] = rng.integers(-4, 5, reach).astype(complex)
        if dtype.is_complex:
            self.flat += 1j * rng.integers(-4, 5, reach)
        self.view = np.lib.stride_tricks.as_strided(self.flat[self.start :], shape, [16 * s for s in strides])
        self.spec = OperandSpec(dtype, shape, strides)


def contiguous(shape: tuple[int, ...], dtype: DType, seed: int) -> Memory:
    return Memory(shape, contiguous_strides(shape), dtype, seed)


def matrix(flat: np.ndarray[Any, Any], start: int, x: LtMatrix, op: str) -> np.ndarray[Any, Any]:
    """A column-major matrix of flat memory, transposed where the call says so."""
    rows, cols = np.arange(x.rows)[:, None], np.arange(x.cols)[None, :]
    assert x.leading_dimension >= x.rows
    found = flat[start + rows + cols * x.leading_dimension]
    return found.T if op == "T" else found


def packed(pack: Pack, source: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """What the kernel that rewrites an operand writes, from the operand as a stack of matrices."""
    stack = source.reshape(-1, *source.shape[-2:])
    if not pack.batch_shape:
        stack = stack[:1]
    if pack.transposed:
        stack = stack.transpose(0, 2, 1)
    if pack.complex_as == "pairs":
        stack = np.stack([stack.real, stack.imag], -1).reshape(*stack.shape[:2], -1)
    elif pack.complex_as == "rotated":
        upper = np.stack([stack.real, -stack.imag], -1).reshape(*stack.shape[:2], -1)
        lower = np.stack([stack.imag, stack.real], -1).reshape(*stack.shape[:2], -1)
        stack = np.stack([upper, lower], 2).reshape(stack.shape[0], -1, upper.shape[-1])
    assert stack.shape[1:] == (pack.rows, pack.cols)
    written = np.zeros((len(stack), pack.padded_rows, pack.leading_dimension), complex)
    written[:, : pack.rows, : pack.cols] = stack
    return written.reshape(-1)


def interpret(call: CublasLtCall, first: Any, second: Any, c: Any, d: Any, alpha: complex, beta: complex) -> None:
    """Run a call: each argument is flat memory and where the array begins in it."""
    calls = [(offsets, batch) for part in call.parts for offsets in part.offsets for batch in range(part.batch_count)]
    for offsets, batch in calls:
        at = [
            start + offset + batch * x.batch_stride
            for (_, start), offset, x in zip(
                (first, second, c, d), offsets, (call.first, call.second, call.c or call.d, call.d), strict=True
            )
        ]  # fmt: skip
        a = matrix(first[0], at[0], call.first, call.op_first)
        b = matrix(second[0], at[1], call.second, call.op_second)
        result = alpha * (a @ b)
        if call.c:
            result = result + beta * matrix(c[0], at[2], call.c, "N")
        rows, cols = np.arange(call.d.rows)[:, None], np.arange(call.d.cols)[None, :]
        d[0][at[3] + rows + cols * call.d.leading_dimension] = result


def run(
    a: Memory, b: Memory, mode: MathMode, *, out: Memory | None = None, c: Memory | None = None, aligned: bool = True
) -> tuple[CublasLtCall, np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Plan and interpret a product; return the call, its result and the true one."""
    problem = GemmProblem(
        a.spec, b.spec, out=out.spec if out else None, c=c.spec if c else None, has_beta=c is not None
    )  # fmt: skip
    plan = plan_gemm(problem, GPU, mode)
    call = plan.call
    assert call is not None
    x, y = np.atleast_2d(a.view), b.view if b.view.ndim > 1 else b.view[:, None]
    layout = plan.layout
    batch = np.broadcast_shapes(x.shape[:-2], y.shape[:-2])
    operands = []
    for memory, view, pack in ((a, x, call.pack_a), (b, y, call.pack_b)):
        if pack is None:
            operands.append((memory.flat, memory.start))
        else:
            stack = view if layout.collapsed else np.broadcast_to(view, batch + view.shape[-2:])
            if layout.collapsed and memory is a:
                stack = stack.reshape(1, -1, view.shape[-1])
            operands.append((packed(pack, stack), 0))
    first, second = operands[::-1] if call.swapped else operands
    true = x @ y
    if call.staged:
        size = call.product_bytes // call.d.dtype.itemsize
        temporary = np.full(size, np.nan, complex)
        interpret(call, first, second, (temporary, 0), (temporary, 0), 1, 0)
        rows = temporary.reshape(-1, layout.m, call.d.leading_dimension)
        found = rows[:, :, : call.d.rows]
        if a.spec.dtype.is_complex and not call.d.dtype.is_complex:
            found = found[..., ::2] + 1j * found[..., 1::2]
        return call, found[..., : layout.n].reshape(true.shape), true
    target = out or contiguous(plan.out_shape, plan.out_dtype, 9)
    if call.d.dtype is DType.FLOAT32 and plan.out_dtype.is_complex:
        real = np.zeros(2 * target.flat.size, complex)
        interpret(call, first, second, (real, 0), (real, 2 * target.start), 1, 0)
        target.flat[:] = real[::2] + 1j * real[1::2]
    else:
        added = (c.flat, c.start) if c else (target.flat, target.start)
        interpret(call, first, second, added, (target.flat, target.start), 1, 1)
    if c:
        true = true + np.broadcast_to(c.view, plan.out_shape).reshape(true.shape)
    return call, target.view.reshape(true.shape), true


def check(*arguments: Any, **keywords: Any) -> CublasLtCall:
    call, found, true = run(*arguments, **keywords)
    np.testing.assert_array_equal(found, true)
    return call


def untouched(call: CublasLtCall) -> bool:
    """Whether the arrays are read and written in place."""
    return call.pack_a is call.pack_b is None and not call.staged


# -- one property for all -------------------------------------------------------------------------

DATA = [
    (DType.FLOAT32, MathMode.FP32),
    (DType.FLOAT32, MathMode.BF16),
    (DType.FLOAT32, MathMode.FP16),
    (DType.FLOAT64, MathMode.FP32),
    (DType.BFLOAT16, MathMode.FP32),
    (DType.COMPLEX64, MathMode.TF32),
    (DType.COMPLEX64, MathMode.BF16),
    (DType.COMPLEX64, MathMode.FP16),
    (DType.INT8, MathMode.FP32),
    (DType.FLOAT8_E4M3FN, MathMode.FP32),
]


@st.composite
def strided(draw: Any, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Strides of an array of this shape: its axes in any order, with gaps, flipped or broadcast."""
    order = draw(st.permutations(range(len(shape))))
    strides = [0] * len(shape)
    step = draw(st.sampled_from([1, 1, 1, 2]))
    for axis in order:
        strides[axis] = step * draw(st.sampled_from([1, 1, 1, 1, -1]))
        step *= max(shape[axis], 1) + draw(st.sampled_from([0, 0, 0, 3]))
    if len(shape) > 2 and draw(st.booleans()):
        strides[0] = 0
    return tuple(strides)


@st.composite
def products(draw: Any) -> dict[str, Any]:
    dtype, mode = draw(st.sampled_from(DATA))
    m, n, k = (draw(st.sampled_from([1, 2, 3, 5, 16, 17, 32])) for _ in range(3))
    batch = draw(st.sampled_from([(), (), (2,), (2, 3), (1, 3), (3, 1)]))
    batch_b = draw(st.sampled_from([(), batch, batch[1:], (1,) * len(batch)]))
    a_shape, b_shape = (*batch, m, k), (*batch_b, k, n)
    seed = draw(st.integers(0, 9))
    a = Memory(a_shape, draw(strided(a_shape)), dtype, seed)
    b = Memory(b_shape, draw(strided(b_shape)), dtype, seed + 1)
    found: dict[str, Any] = {"a": a, "b": b, "mode": mode}
    result = (*np.broadcast_shapes(batch, batch_b), m, n)
    plain = plan_gemm(GemmProblem(a.spec, b.spec), GPU, mode).out_dtype
    if draw(st.booleans()):
        strides = [abs(s) or None for s in draw(strided(result))]
        if None not in strides:
            found["out"] = Memory(result, tuple(strides), plain, 5)
    if dtype not in (DType.INT8,) and draw(st.booleans()):
        shape = draw(st.sampled_from([result, result[-2:], (n,), (m, 1)]))
        found["c"] = Memory(shape, draw(strided(shape)), plain, 7)
    return found


@given(products())
def test_a_lowered_product_is_the_product(given_: dict[str, Any]) -> None:
    operands = given_.pop("a"), given_.pop("b"), given_.pop("mode")
    _, found, true = run(*operands, **given_)
    np.testing.assert_array_equal(found, true)


# -- what is decided ------------------------------------------------------------------------------


def test_plain_arrays_are_one_call_as_they_are() -> None:
    for batch in ((), (4,), (2, 3)):
        a, b = (contiguous((*batch, 8, 16), DType.FLOAT32, 0), contiguous((*batch, 16, 24), DType.FLOAT32, 1))
        call = check(a, b, MathMode.TF32)
        assert untouched(call)
        assert call.offsets == ((0, 0, 0, 0),)
        assert call.compute_type is ComputeType.COMPUTE_32F_FAST_TF32
        assert call.swapped


def test_transposed_operands_are_transposed_by_the_call() -> None:
    a = Memory((8, 16), (1, 8), DType.FLOAT32, 0)
    b = Memory((16, 24), (1, 16), DType.FLOAT32, 1)
    call = check(a, b, MathMode.FP32)
    assert (call.op_first, call.op_second) == ("T", "T")
    assert untouched(call)
    # A column-major result swaps nothing.
    call = check(a, b, MathMode.FP32, out=Memory((8, 24), (1, 8), DType.FLOAT32, 2))
    assert not call.swapped
    assert not call.staged


@pytest.mark.parametrize("k", [1, 64])
def test_one_column_is_a_column_of_the_call(k: int) -> None:
    """Row-major it would have a leading dimension of 1, and no pointer would count as aligned."""
    a, b = contiguous((32, k), DType.FLOAT16, 0).spec, contiguous((k, 1), DType.FLOAT16, 1).spec
    call = plan_gemm(GemmProblem(a, b), GPU, MathMode.FP32).call
    assert call is not None
    assert not call.swapped
    assert (call.d.rows, call.d.cols, call.d.leading_dimension) == (32, 1, 32)
    assert (call.second.rows, call.second.leading_dimension) == (k, k)


def test_a_batch_without_one_step_is_walked_by_several_calls() -> None:
    a = Memory((2, 3, 4, 5), (5, 40, 10, 1), DType.FLOAT32, 0)
    b = contiguous((2, 3, 5, 6), DType.FLOAT32, 1)
    call = check(a, b, MathMode.FP32)
    assert (call.batch_count, len(call.offsets)) == (3, 2)


def test_int8_is_read_with_the_inner_dimension_contiguous() -> None:
    a, b = contiguous((32, 64), DType.INT8, 0), contiguous((64, 48), DType.INT8, 1)
    call = check(a, b, MathMode.FP32)
    assert call.pack_a is None
    assert call.pack_b is not None
    assert (call.op_first, call.op_second, call.staged) == ("T", "N", ())
    # Operands with this layout are read in place.
    call = check(a, Memory((64, 48), (1, 64), DType.INT8, 1), MathMode.FP32)
    assert untouched(call)


@pytest.mark.parametrize("dtype", [DType.INT8, DType.FLOAT8_E4M3FN])
def test_odd_extents_of_8_bit_types_are_padded(dtype: DType) -> None:
    call = check(contiguous((5, 33), dtype, 0), contiguous((33, 7), dtype, 1), MathMode.FP32)
    for x in (call.first, call.second):
        assert x.rows % 16 == x.leading_dimension % 16 == 0
    assert call.d.rows % 16 == 0
    assert ReasonKind.PADDED_COLUMNS in {reason.kind for reason in call.staged}


def test_float16_scales_rows_of_a_and_columns_of_b() -> None:
    a, b = contiguous((8, 16), DType.FLOAT32, 0), contiguous((16, 24), DType.FLOAT32, 1)
    call = check(a, b, MathMode.FP16)
    assert call.pack_a is not None
    assert call.pack_b is not None
    assert call.pack_a.scaled
    assert call.pack_b.scaled
    assert ReasonKind.SCALED_OPERANDS in {reason.kind for reason in call.staged}
    # float16 values among float32 ones are in range as they are.
    call = check(contiguous((8, 16), DType.FLOAT16, 0), b, MathMode.FP16)
    assert call.pack_a is None


def test_complex_numbers_become_one_real_product() -> None:
    a, b = contiguous((8, 16), DType.COMPLEX64, 0), contiguous((16, 24), DType.COMPLEX64, 1)
    call = check(a, b, MathMode.BF16)
    assert (call.first.rows, call.first.cols) == (32, 48)
    assert (call.d.rows, call.d.cols, call.d.dtype) == (48, 8, DType.FLOAT32)
    assert not call.staged


EPILOGUES = [
    ({}, "DEFAULT", True),
    ({"bias": DType.BFLOAT16}, "BIAS", True),
    ({"bias": DType.BFLOAT16, "activation": Activation.RELU}, "RELU_BIAS", True),
    ({"activation": Activation.GELU}, "GELU", True),
    ({"bias": DType.FLOAT32}, "DEFAULT", False),
    ({"bias": DType.BFLOAT16, "bias_stride": 2}, "DEFAULT", False),
    ({"c": DType.BFLOAT16}, "DEFAULT", True),
    ({"c": DType.FLOAT32}, "DEFAULT", False),
]


@pytest.mark.parametrize(("wanted", "epilogue", "fused"), EPILOGUES)
def test_epilogues_are_fused_where_cublaslt_has_them(wanted: dict[str, Any], epilogue: str, fused: bool) -> None:
    a = OperandSpec.contiguous(DType.BFLOAT16, (8, 16))
    b = OperandSpec.contiguous(DType.BFLOAT16, (16, 24))
    bias = wanted.get("bias") and OperandSpec(wanted["bias"], (24,), (wanted.get("bias_stride", 1),))
    c = wanted.get("c") and OperandSpec.contiguous(wanted["c"], (8, 24))
    problem = GemmProblem(a, b, bias=bias, c=c, has_beta=c is not None, activation=wanted.get("activation"))
    call = plan_gemm(problem, GPU, MathMode.FP32).call
    assert call is not None
    assert (call.epilogue, not call.staged) == (epilogue, fused)
    assert (call.c is not None) is (c is not None and fused)


def test_a_bias_along_the_rows_of_a_column_major_result_is_not_fused() -> None:
    a, b, bias = (OperandSpec.contiguous(DType.FLOAT32, shape) for shape in ((8, 16), (16, 24), (24,)))
    out = OperandSpec(DType.FLOAT32, (8, 24), (1, 8))
    call = plan_gemm(GemmProblem(a, b, out=out, bias=bias), GPU, MathMode.FP32).call
    assert call is not None
    assert call.staged
    assert call.epilogue == "DEFAULT"


def test_misaligned_8_bit_operands_are_packed() -> None:
    a, b = OperandSpec.contiguous(DType.INT8, (32, 64)), OperandSpec(DType.INT8, (64, 48), (1, 64))
    plan = plan_gemm(GemmProblem(a, b), GPU, MathMode.FP32)
    for aligned in (True, False):
        call = lower(plan, aligned=aligned)
        assert (call.pack_a is None, call.pack_b is None) == (aligned, aligned)


# -- float8 ---------------------------------------------------------------------------------------


def test_float8_is_widened_without_units_for_the_pair() -> None:
    e4m3 = OperandSpec.contiguous(DType.FLOAT8_E4M3FN, (16, 16))
    e5m2 = OperandSpec.contiguous(DType.FLOAT8_E5M2, (16, 16))
    bfloat16 = OperandSpec.contiguous(DType.BFLOAT16, (16, 16))
    for pair in ((e4m3, e4m3), (e4m3, e5m2), (e5m2, e4m3)):
        plan = plan_gemm(GemmProblem(*pair), GPU, MathMode.FP32)
        assert plan.out_dtype is DType.BFLOAT16
        assert plan.call is not None
        stored = [plan.call.second.dtype, plan.call.first.dtype]
        assert stored == [spec.dtype for spec in pair]
    for pair, device in (((e5m2, e5m2), GPU), ((e4m3, e4m3), VOLTA), ((e4m3, bfloat16), GPU)):
        plan = plan_gemm(GemmProblem(*pair), device, MathMode.FP32)
        assert plan.compute_dtype is plan.out_dtype is DType.BFLOAT16
        assert plan.call is not None
        assert plan.call.first.dtype is plan.call.second.dtype is DType.BFLOAT16


# -- batches and bounds ---------------------------------------------------------------------------


@given(
    st.lists(st.integers(1, 4), max_size=4).map(tuple),
    st.lists(st.lists(st.integers(0, 40), min_size=4, max_size=4), min_size=1, max_size=3),
    st.sampled_from([1, 2, 3, 7, batches.MOST_MATRICES]),
)
def test_split_batches_contains_every_matrix_once(shape: tuple[int, ...], rows: list[list[int]], most: int) -> None:
    stacks = [tuple(row[: len(shape)]) for row in rows]
    with mock.patch.object(batches, "MOST_MATRICES", most):
        batch_strides, runs = split_batches(shape, stacks)
    assert max(run.matrices for run in runs) <= most
    walked = sorted(
        tuple(o + i * s for o, s in zip(offset, batch_strides, strict=True))
        for run in runs for offset in run.offsets for i in range(run.matrices)
    )  # fmt: skip
    expected = sorted(
        tuple(sum(i * s for i, s in zip(index, strides, strict=True)) for strides in stacks)
        for index in np.ndindex(*shape)
    )
    assert walked == expected
    strides = contiguous_strides(shape, 10)
    _, ((_, offsets),) = split_batches(shape, [strides, strides])
    assert len(offsets) == 1, "contiguous batches are one call"


@pytest.mark.parametrize(
    ("count", "calls"), [(65535, [(65535, 1)]), (65536, [(32768, 2)]), (65537, [(32769, 1), (32768, 1)])]
)
def test_a_call_has_at_most_65535_matrices(count: int, calls: list[tuple[int, int]]) -> None:
    a, b = contiguous((count, 2, 4), DType.FLOAT32, 0).spec, contiguous((count, 4, 4), DType.FLOAT32, 1).spec
    call = plan_gemm(GemmProblem(a, b), GPU, MathMode.FP32).call
    assert call is not None
    assert [(part.batch_count, len(part.offsets)) for part in call.parts] == calls


def test_tensor_cores_of_each_generation() -> None:
    # By hand, from the model: (g + 1) 2^(24 - F) + 2 units per group of g products.
    assert roundings(16, "float16", (9, 0)) == 11  # 17/2 + 2, rounded up
    assert roundings(8, "float16", (8, 0)) == 11  # 9 + 2
    assert roundings(4, "float16", (7, 0)) == 12  # 10 + 2
    assert roundings(8, "tf32", (9, 0)) == 7  # 9/2 + 2, rounded up
    assert roundings(4, "tf32", (8, 6)) == 7  # 5 + 2
    # FP8 keeps 13 fraction bits before Blackwell, in the result as well.
    assert roundings(16, "float8_e4m3fn", (8, 9)) == (17 + 1) * 2**11
    assert roundings(32, "float8_e5m2", (9, 0)) == (33 + 1) * 2**11
    assert roundings(32, "float8_e4m3fn", (10, 0)) == 19  # 33/2 + 2, rounded up
    assert roundings(100, "float32", (9, 0)) == 100
    assert roundings(100, "tf32", (7, 0)) == 100  # no such units: FP32


def test_bounds_on_a_gpu() -> None:
    a = OperandSpec.contiguous(DType.FLOAT32, (64, 4096))
    b = OperandSpec.contiguous(DType.FLOAT32, (4096, 64))

    def bound(mode: MathMode, able: Capabilities = GPU) -> Any:
        return plan_gemm(GemmProblem(a, b), able, mode).bound

    assert bound(MathMode.FP32).relative == pytest.approx(4096 * 2**-24, rel=1e-3)
    # Truncation to TF32 is allowed for; rounding scaled float16 values has no condition on the range.
    assert bound(MathMode.TF32).relative > 2 * 2**-10
    assert bound(MathMode.FP16).unconditional
    assert "65504" not in bound(MathMode.FP16).condition
    assert bound(MathMode.BF16, VOLTA).relative > bound(MathMode.BF16).relative
