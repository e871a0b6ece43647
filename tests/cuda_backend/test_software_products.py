"""The software cuBLASLt computes what its tables name, bit by bit, and touches nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from software_cuda import DeviceModel, Software, tables
from software_cuda.arithmetic import round_tf32
from software_cuda.asking import Asked, Data, check, of_types, prepared
from software_cuda.tables import C_32F, NO_EPILOGUE, R_8I, R_16BF, R_16F, R_32I, ROWS  # fmt: skip
from support.oracles import round_to

LEGACY = 1
INVALID_VALUE, NOT_SUPPORTED = 7, 15
BIAS, RELU, GELU = 4, 2, 32
Array = np.ndarray[Any, Any]


@pytest.fixture
def cuda() -> Iterator[Software]:
    made = Software([DeviceModel()] * 2, "lazy", 130100)
    yield made
    made.drain()
    assert made.faults == []


@pytest.fixture(scope="module")
def shared() -> Iterator[Software]:
    """For tests that run many products and do nothing wrong."""
    made = Software([DeviceModel()], "lazy", 130100)
    yield made
    made.drain()
    assert made.faults == []


COMBINATIONS = [(row, compute) for row in ROWS for compute in sorted(row.compute)]


# -- what is computed -----------------------------------------------------------------------------


@pytest.mark.parametrize(("row", "compute"), COMBINATIONS)
def test_every_combination_of_types(shared: Software, row: tables.Row, compute: int) -> None:
    assert check(shared, of_types(row, compute, k=16)) >= 2


DIMENSION = st.integers(1, 20)


@settings(max_examples=150)
@given(
    data=st.data(),
    m=DIMENSION,
    n=DIMENSION,
    k=DIMENSION,
    batch=st.integers(1, 3),
    ops=st.tuples(st.integers(0, 1), st.integers(0, 1)),
    gap=st.tuples(*[st.integers(0, 5)] * 4),
    order=st.tuples(*[st.integers(0, 1)] * 4),
    row=st.sampled_from([x for x in ROWS if x.a not in tables.FLOAT8 and x.a != R_8I and x.scale != R_16F]),
)
def test_layouts(
    shared: Software, data: Any, m: int, n: int, k: int, batch: int, ops: Any, gap: Any, order: Any, row: tables.Row
) -> None:
    asked = of_types(
        row,
        min(row.compute),
        m=m,
        n=n,
        k=k,
        batch=batch,
        gap=gap,
        order=order,
        op_b=ops[1],
        alpha=data.draw(st.sampled_from([1.0, 2.0, -0.5, 0.0])),
        beta=data.draw(st.sampled_from([0.0, 1.0, -2.0])),
    )
    asked = replace(asked, op_a=ops[0])
    if data.draw(st.booleans()):
        asked = replace(asked, strides=(0, None, None, None))
    if data.draw(st.booleans()):
        asked = replace(asked, gap=(*gap[:3], gap[2]), order=(*order[:3], order[2]), in_place=True)
    check(shared, asked, seed=data.draw(st.integers(0, 99)))


@pytest.mark.parametrize("epilogue", [1, RELU, BIAS, RELU | BIAS, GELU, GELU | BIAS])
@pytest.mark.parametrize("row", [x for x in ROWS if x.bias != NO_EPILOGUE and x.scale != R_16F])
def test_epilogues(shared: Software, row: tables.Row, epilogue: int) -> None:
    asked = of_types(row, min(row.compute), epilogue=epilogue, batch=2, alpha=0.5, k=16)
    check(shared, replace(asked, bias_type=row.bias if epilogue & BIAS else None))


def test_complex_factors_and_conjugates(shared: Software) -> None:
    asked = Asked(scale=C_32F, a=C_32F, b=C_32F, c=C_32F, d=C_32F, alpha=1 - 2j, beta=3j)
    check(shared, asked)


def test_integers_wrap(shared: Software) -> None:
    asked = Asked(op_a=1, compute=72, scale=R_32I, a=R_8I, b=R_8I, c=R_32I, d=R_32I, beta=1.0)
    data = Data(shared, asked, 0)
    data.matrix(2)[...] = 2**31 - 1
    want = data.matrix(0).astype(np.int64).swapaxes(1, 2) @ data.matrix(1).astype(np.int64) + 2**31 - 1
    with prepared(shared, asked) as product:
        product.run(product.search(0)[0], tuple(data.addresses), 0)
        shared.drain()
    np.testing.assert_array_equal(data.matrix(3), want.astype(np.int32))
    data.free()


# -- precision ------------------------------------------------------------------------------------


def product_of(cuda: Software, asked: Asked, x: Array, y: Array, index: int = 0) -> Array:
    """Return the product of given matrices by one of the algorithms."""
    data = Data(cuda, asked, 0)
    data.matrix(0)[0], data.matrix(1)[0] = x, y
    workspace = data.new(1 << 20)
    with prepared(cuda, asked) as made:
        made.run(made.search()[index], tuple(data.addresses), workspace)
        cuda.drain()
    found = data.matrix(3)[0].copy()
    data.free()
    cuda.runtime.cudaFree(workspace)
    return found


@pytest.mark.parametrize(("compute", "mode"), [(68, "fp32"), (69, "fp32"), (77, "tf32"), (74, "fp16"), (75, "bf16")])
def test_compute_types_round_the_operands(shared: Software, rng: Any, compute: int, mode: str) -> None:
    x, y = (rng.standard_normal((32, 1)).astype(np.float32), rng.standard_normal((1, 16)).astype(np.float32))
    found = product_of(shared, Asked(k=1, compute=compute), x, y)
    want = round_to(x, mode).astype(np.float64) @ round_to(y, mode).astype(np.float64)
    np.testing.assert_array_equal(found, want.astype(np.float32))


def test_tf32_rounds_as_the_oracle(rng: Any) -> None:
    bits = np.concatenate(
        [rng.integers(0, 1 << 32, 20000), [0x7F800000, 0x7F800001, 0xFFC00000, 0x7F7FFFFF, 0x3F801000, 0x3F803000]]
    )
    x = bits.astype(np.uint32).view(np.float32)
    np.testing.assert_array_equal(round_tf32(x), round_to(x, "tf32"))


@pytest.mark.parametrize(("mask", "coarse"), [(7, True), (3, True), (2, False), (0, False)])
def test_sums_of_parts_in_the_type_of_the_result(shared: Software, rng: Any, mask: int, coarse: bool) -> None:
    x = rng.standard_normal((32, 512)).astype(ml_dtypes.bfloat16)
    y = rng.standard_normal((512, 16)).astype(ml_dtypes.bfloat16)
    asked = Asked(k=512, a=R_16BF, b=R_16BF, c=R_16BF, d=R_16BF, mask=mask)
    once = (x.astype(np.float64) @ y.astype(np.float64)).astype(np.float32).astype(ml_dtypes.bfloat16)
    with prepared(shared, asked) as product:
        count = len(product.search())
    differ = [(product_of(shared, asked, x, y, i) != once).mean() > 0.05 for i in range(count)]
    assert any(differ) is coarse


def test_parts_that_are_summed_in_the_type_of_the_result(shared: Software, rng: Any) -> None:
    x = rng.standard_normal((32, 512)).astype(ml_dtypes.bfloat16)
    y = rng.standard_normal((512, 16)).astype(ml_dtypes.bfloat16)
    asked = Asked(k=512, a=R_16BF, b=R_16BF, c=R_16BF, d=R_16BF, mask=4)
    total = np.zeros((32, 16), np.float32)
    for i in range(0, 512, 128):
        part = x[:, i : i + 128].astype(np.float64) @ y[i : i + 128].astype(np.float64)
        total += part.astype(np.float32).astype(ml_dtypes.bfloat16).astype(np.float32)
    found = product_of(shared, asked, x, y)
    np.testing.assert_array_equal(found, total.astype(ml_dtypes.bfloat16))


@pytest.mark.parametrize(("text", "units"), [("0", "FMA float32"), ("1", "HMMA tf32"), (None, "HMMA tf32")])
def test_the_override_of_tf32_is_read_at_the_first_handle(
    cuda: Software, monkeypatch: pytest.MonkeyPatch, text: str | None, units: str
) -> None:
    if text is not None:
        monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", text)
    with prepared(cuda, Asked(compute=77)) as product:
        monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "0")
        second = cuda.cublas_lt.create()
        flags = np.zeros(1, np.uint64)
        data = np.frombuffer(product.search()[0][0], np.uint8).copy()
        name = cuda.cublas_lt.MatmulAlgoCapAttribute.NUMERICAL_IMPL_FLAGS
        cuda.cublas_lt.matmul_algo_cap_get_attribute(data.ctypes.data, name, flags.ctypes.data, 8, 0)
        cuda.cublas_lt.destroy(second)
    number = int(flags[0])
    names = ({tables.FMA: "FMA", tables.HMMA: "HMMA"}, {tables.INPUT_32F: "float32", tables.INPUT_TF32: "tf32"})
    assert " ".join(next(v for k, v in x.items() if number & k) for x in names) == units
