"""Calls of cuBLASLt that plans become; their results are those of `cuda_backend/test_products.py`."""

from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from lowprec.formats import ComputeType, DType
from lowprec.modes import MathMode
from lowprec.planning import ACTIVATIONS, GemmProblem, OperandSpec, ReasonKind, plan_gemm
from lowprec.planning.cublaslt import calls
from lowprec.planning.cublaslt.calls import split_batches
from lowprec.planning.lowering import call as lowering
from lowprec.planning.lowering.call import lower
from lowprec.planning.tensor_cores import roundings
from lowprec.util.strides import contiguous_strides
from support.machines import gpu

GPU, VOLTA = gpu((9, 0)), gpu((7, 0), 4 << 20)


def contiguous(shape, dtype):
    return OperandSpec.contiguous(dtype, shape)


def lowered(a, b, mode=MathMode.FP32, **more):
    """Return the call of a product on a GPU."""
    return plan_gemm(GemmProblem(a, b, **more), GPU, mode).call


def untouched(call):
    """Whether the arrays are read and written in place."""
    return call.pack_a is call.pack_b is None and not call.staged


def test_plain_arrays_are_one_call_as_they_are():
    for batch in ((), (4,), (2, 3)):
        a, b = (
            contiguous((*batch, 8, 16), DType.FLOAT32),
            contiguous((*batch, 16, 24), DType.FLOAT32),
        )
        call = lowered(a, b, MathMode.TF32)
        assert untouched(call)
        assert call.offsets == ((0, 0, 0, 0),)
        assert call.compute_type is ComputeType.COMPUTE_32F_FAST_TF32
        assert call.swapped


def test_transposed_operands_are_transposed_by_the_call():
    a = OperandSpec(DType.FLOAT32, (8, 16), (1, 8))
    b = OperandSpec(DType.FLOAT32, (16, 24), (1, 16))
    call = lowered(a, b, MathMode.FP32)
    assert (call.op_first, call.op_second) == ("T", "T")
    assert untouched(call)
    # A column-major result swaps nothing.
    call = lowered(a, b, MathMode.FP32, out=OperandSpec(DType.FLOAT32, (8, 24), (1, 8)))
    assert not call.swapped
    assert not call.staged


@pytest.mark.parametrize("k", [1, 64])
def test_one_column_is_a_column_of_the_call(k):
    """Row-major it would have a leading dimension of 1, and no pointer would count as aligned."""
    a, b = contiguous((32, k), DType.FLOAT16), contiguous((k, 1), DType.FLOAT16)
    call = lowered(a, b)
    assert not call.swapped
    assert (call.d.rows, call.d.cols, call.d.leading_dimension) == (32, 1, 32)
    assert (call.second.rows, call.second.leading_dimension) == (k, k)


def test_a_batch_without_one_step_is_walked_by_several_calls():
    a = OperandSpec(DType.FLOAT32, (2, 3, 4, 5), (5, 40, 10, 1))
    b = contiguous((2, 3, 5, 6), DType.FLOAT32)
    call = lowered(a, b, MathMode.FP32)
    assert (call.batch_count, len(call.offsets)) == (3, 2)


def test_int8_is_read_with_the_inner_dimension_contiguous():
    a, b = contiguous((32, 64), DType.INT8), contiguous((64, 48), DType.INT8)
    call = lowered(a, b, MathMode.FP32)
    assert call.pack_a is None
    assert call.pack_b is not None
    assert (call.op_first, call.op_second, call.staged) == ("T", "N", ())
    # Operands with this layout are read in place.
    call = lowered(a, OperandSpec(DType.INT8, (64, 48), (1, 64)), MathMode.FP32)
    assert untouched(call)


def test_float16_values_are_in_range_as_they_are():
    """Others are scaled, by rows of a and columns of b, and so is the product."""
    call = lowered(
        contiguous((8, 16), DType.FLOAT16), contiguous((16, 24), DType.FLOAT32), MathMode.FP16
    )
    assert call.pack_a is None
    assert call.pack_b.scaled
    assert ReasonKind.SCALED_OPERANDS in {reason.kind for reason in call.staged}


def test_complex_numbers_become_one_real_product():
    a, b = contiguous((8, 16), DType.COMPLEX64), contiguous((16, 24), DType.COMPLEX64)
    call = lowered(a, b, MathMode.BF16)
    assert call.d.dtype is DType.FLOAT32
    assert not call.staged


EPILOGUES = [
    ({}, "DEFAULT", True),
    ({"bias": DType.BFLOAT16}, "BIAS", True),
    ({"bias": DType.BFLOAT16, "activation": "relu"}, "RELU_BIAS", True),
    ({"activation": "gelu"}, "GELU", True),
    ({"bias": DType.FLOAT32}, "DEFAULT", False),
    ({"bias": DType.BFLOAT16, "bias_stride": 2}, "DEFAULT", False),
    # A bias is one of the rows of cuBLASLt's matrix, which are the columns of a column-major result.
    (
        {"bias": DType.BFLOAT16, "out": OperandSpec(DType.BFLOAT16, (8, 24), (1, 8))},
        "DEFAULT",
        False,
    ),
    ({"c": DType.BFLOAT16}, "DEFAULT", True),
    ({"c": DType.FLOAT32}, "DEFAULT", False),
]


@pytest.mark.parametrize(("wanted", "epilogue", "fused"), EPILOGUES)
def test_epilogues_are_fused_where_cublaslt_has_them(wanted, epilogue, fused):
    a = contiguous((8, 16), DType.BFLOAT16)
    b = OperandSpec.contiguous(DType.BFLOAT16, (16, 24))
    bias = wanted.get("bias") and OperandSpec(
        wanted["bias"], (24,), (wanted.get("bias_stride", 1),)
    )
    c = wanted.get("c") and OperandSpec.contiguous(wanted["c"], (8, 24))
    call = lowered(
        a,
        b,
        bias=bias,
        c=c,
        has_beta=c is not None,
        activation=wanted.get("activation"),
        out=wanted.get("out"),
    )
    assert (call.epilogue, not call.staged) == (epilogue, fused)
    assert (call.c is not None) is (c is not None and fused)


def test_an_activation_that_cublaslt_lacks_is_applied_to_a_staged_product(monkeypatch):
    rows = {**ACTIVATIONS, "gelu": ACTIVATIONS["gelu"]._replace(fused="")}
    monkeypatch.setattr(lowering, "ACTIVATIONS", rows)
    a, b = (contiguous(shape, DType.FLOAT32) for shape in ((8, 16), (16, 24)))
    relu, gelu = (
        lower(plan_gemm(GemmProblem(a, b, activation=x), GPU, MathMode.FP32)) for x in rows
    )
    assert (relu.epilogue, relu.staged) == ("RELU", ())
    assert (gelu.epilogue, [str(x) for x in gelu.staged]) == (
        "DEFAULT",
        ["gelu is not fused for float32"],
    )


def test_misaligned_8_bit_operands_are_packed():
    a, b = OperandSpec.contiguous(DType.INT8, (32, 64)), OperandSpec(DType.INT8, (64, 48), (1, 64))
    plan = plan_gemm(GemmProblem(a, b), GPU, MathMode.FP32)
    for aligned in (True, False):
        call = lower(plan, aligned=aligned)
        assert (call.pack_a is None, call.pack_b is None) == (aligned, aligned)


def test_float8_is_widened_without_units_for_the_pair():
    e4m3 = OperandSpec.contiguous(DType.FLOAT8_E4M3FN, (16, 16))
    e5m2 = OperandSpec.contiguous(DType.FLOAT8_E5M2, (16, 16))
    bfloat16 = OperandSpec.contiguous(DType.BFLOAT16, (16, 16))
    for pair in ((e4m3, e4m3), (e4m3, e5m2), (e5m2, e4m3)):
        plan = plan_gemm(GemmProblem(*pair), GPU, MathMode.FP32)
        assert plan.out_dtype is DType.BFLOAT16
        stored = [plan.call.second.dtype, plan.call.first.dtype]
        assert stored == [spec.dtype for spec in pair]
    for pair, device in (((e5m2, e5m2), GPU), ((e4m3, e4m3), VOLTA), ((e4m3, bfloat16), GPU)):
        plan = plan_gemm(GemmProblem(*pair), device, MathMode.FP32)
        assert plan.compute_dtype is plan.out_dtype is DType.BFLOAT16
        assert plan.call.first.dtype is plan.call.second.dtype is DType.BFLOAT16


@given(
    st.lists(st.integers(1, 4), max_size=4).map(tuple),
    st.lists(st.lists(st.integers(0, 40), min_size=4, max_size=4), min_size=1, max_size=3),
    st.sampled_from([1, 2, 3, 7, calls.MOST_MATRICES]),
)
def test_split_batches_contains_every_matrix_once(shape, rows, most):
    stacks = [tuple(row[: len(shape)]) for row in rows]
    with mock.patch.object(calls, "MOST_MATRICES", most):
        batch_strides, runs = split_batches(shape, stacks)
    assert max(matrices for matrices, _ in runs) <= most
    walked = sorted(
        tuple(o + i * s for o, s in zip(offset, batch_strides, strict=True))
        for matrices, offsets in runs for offset in offsets for i in range(matrices)
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
    ("count", "calls"),
    [(65535, [(65535, 1)]), (65536, [(32768, 2)]), (65537, [(32769, 1), (32768, 1)])],
)
def test_a_call_has_at_most_65535_matrices(count, calls):
    a, b = contiguous((count, 2, 4), DType.FLOAT32), contiguous((count, 4, 4), DType.FLOAT32)
    call = lowered(a, b)
    assert [(part.batch_count, len(part.offsets)) for part in call.runs] == calls


def test_tensor_cores_of_each_generation():
    # By hand, from the model: (g + 1) 2^(24 - F) + 2 units per group of g products.
    assert roundings(8, "float16", (8, 0)) == 11  # 9 + 2
    assert roundings(4, "float16", (7, 0)) == 12  # 10 + 2
    assert roundings(4, "tf32", (8, 6)) == 7  # 5 + 2
    # FP8 keeps 13 fraction bits before Blackwell, in the result as well.
    assert roundings(16, "float8_e4m3fn", (8, 9)) == (17 + 1) * 2**11
    assert roundings(32, "float8_e5m2", (9, 0)) == (33 + 1) * 2**11
    # 33/2 + 2, rounded up: the accumulator is one of the terms
    assert roundings(32, "float8_e4m3fn", (10, 0)) == 19
    assert roundings(100, "float32", (9, 0)) == 100
    assert roundings(100, "tf32", (7, 0)) == 100  # no such units: FP32
