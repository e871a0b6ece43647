"""The software cuBLASLt: right products for everything that its tables name, and a refusal for everything else."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cuda.software import DeviceModel, Software, tables
from cuda.software.arithmetic import round_tf32
from cuda.software.tables import (
    C_32F,
    C_64F,
    NO_EPILOGUE,
    R_8F_E4M3,
    R_8F_E5M2,
    R_8I,
    R_16BF,
    R_16F,
    R_32F,
    R_32I,
    R_64F,
    ROWS,
)  # fmt: skip
from oracles import round_to

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


@dataclass(frozen=True)
class Asked:
    """A product in cuBLASLt's words; what is None follows from the rest."""

    m: int = 32
    n: int = 16
    k: int = 48
    op_a: int = 0
    op_b: int = 0
    compute: int = 68
    scale: int = R_32F
    a: int = R_32F
    b: int = R_32F
    c: int = R_32F
    d: int = R_32F
    batch: int = 1
    gap: tuple[int, int, int, int] = (0, 0, 0, 0)
    order: tuple[int, int, int, int] = (0, 0, 0, 0)
    strides: tuple[int | None, ...] = (None, None, None, None)
    epilogue: int = 1
    bias_type: int | None = None
    alpha: complex = 1.0
    beta: complex = 0.0
    in_place: bool = False
    alignment: int = 256
    offset: int = 0
    mask: int = 3
    count: int = 32

    @property
    def shapes(self) -> list[tuple[int, int]]:
        a = (self.k, self.m) if self.op_a else (self.m, self.k)
        b = (self.n, self.k) if self.op_b else (self.k, self.n)
        return [a, b, (self.m, self.n), (self.m, self.n)]

    def ld(self, i: int) -> int:
        return self.shapes[i][self.order[i]] + self.gap[i]

    def stride(self, i: int) -> int:
        given = self.strides[i]
        return self.ld(i) * self.shapes[i][1 - self.order[i]] if given is None else given


ENUMERATIONS = {
    "matmul_desc": "MatmulDescAttribute",
    "matrix_layout": "MatrixLayoutAttribute",
    "matmul_preference": "MatmulPreferenceAttribute",
}


class Prepared:
    """Descriptors of a product, and calls on them."""

    def __init__(self, cuda: Software, asked: Asked) -> None:
        self.cuda = cuda
        self.asked = asked
        self.lt = lt = cuda.cublas_lt
        self.handle = lt.create()
        self.operation = lt.matmul_desc_create(asked.compute, asked.scale)
        for name, number in (
            ("TRANSA", asked.op_a),
            ("TRANSB", asked.op_b),
            ("EPILOGUE", asked.epilogue),
        ):
            self.set("matmul_desc", self.operation, name, number)
        if asked.bias_type is not None:
            self.set("matmul_desc", self.operation, "BIAS_DATA_TYPE", asked.bias_type)
        self.layouts = []
        for i, data_type in enumerate((asked.a, asked.b, asked.c, asked.d)):
            layout = lt.matrix_layout_create(data_type, *asked.shapes[i], asked.ld(i))
            for name, number in (
                ("ORDER", asked.order[i]), ("BATCH_COUNT", asked.batch), ("STRIDED_BATCH_OFFSET", asked.stride(i)),
            ):  # fmt: skip
                self.set("matrix_layout", layout, name, number)
            self.layouts.append(layout)

    def set(self, kind: str, target: int, name: str, number: float) -> None:
        member = getattr(self.lt, ENUMERATIONS[kind])[name]
        dtype = getattr(self.lt, f"get_{kind}_attribute_dtype")(member)
        data = np.array([number], dtype)
        getattr(self.lt, f"{kind}_set_attribute")(
            target, int(member), data.ctypes.data, data.nbytes
        )

    def search(self, workspace: int = 1 << 20) -> list[tuple[bytes, int]]:
        """Return algorithms and their workspaces."""
        lt, asked = self.lt, self.asked
        wanted = lt.matmul_preference_create()
        self.set("matmul_preference", wanted, "MAX_WORKSPACE_BYTES", workspace)
        self.set("matmul_preference", wanted, "REDUCTION_SCHEME_MASK", asked.mask)
        for x in "ABCD":
            self.set("matmul_preference", wanted, f"MIN_ALIGNMENT_{x}_BYTES", asked.alignment)
        results, returned = lt.MatmulHeuristicResult(asked.count), np.zeros(1, np.int32)
        lt.matmul_algo_get_heuristic(
            self.handle, self.operation, *self.layouts, wanted, asked.count, results.ptr, returned.ctypes.data
        )  # fmt: skip
        lt.matmul_preference_destroy(wanted)
        found = np.ctypeslib.as_array(
            (np.ctypeslib.ctypes.c_uint8 * (96 * asked.count)).from_address(results.ptr)
        ).view(lt.matmul_heuristic_result_dtype)[: returned[0]]
        return [(x["algo"].tobytes(), int(x["workspace_size"])) for x in found]

    def run(self, algorithm: tuple[bytes, int], pointers: tuple[int, ...], workspace: int) -> None:
        dtype = tables.DTYPES[self.asked.scale]
        alpha, beta = (
            np.array([x if dtype.kind == "c" else np.real(x)], dtype)
            for x in (self.asked.alpha, self.asked.beta)
        )
        data = np.frombuffer(algorithm[0], np.uint8).copy()
        a, b, c, d = pointers
        la, lb, lc, ld = self.layouts
        self.lt.matmul(
            self.handle, self.operation, alpha.ctypes.data, a, la, b, lb, beta.ctypes.data, c, lc, d, ld,
            data.ctypes.data, workspace, algorithm[1], LEGACY,
        )  # fmt: skip
        alpha[:] = beta[:] = 77  # they were read when the call was made

    def close(self) -> None:
        for layout in self.layouts:
            self.lt.matrix_layout_destroy(layout)
        self.lt.matmul_desc_destroy(self.operation)
        self.lt.destroy(self.handle)


@contextmanager
def prepared(cuda: Software, asked: Asked) -> Iterator[Prepared]:
    found = Prepared(cuda, asked)
    try:
        yield found
    finally:
        found.close()


class Data:
    """Matrices with values in poisoned memory, as an algorithm of NumPy's sees them."""

    def __init__(self, cuda: Software, asked: Asked, seed: int) -> None:
        self.cuda = cuda
        self.asked = asked
        self.addresses: list[int] = []
        generator = np.random.default_rng(seed)
        for i, data_type in enumerate((asked.a, asked.b, asked.c, asked.d)):
            dtype = tables.DTYPES[data_type]
            span = asked.ld(i) * asked.shapes[i][1 - asked.order[i]] + abs(asked.stride(i)) * (
                asked.batch - 1
            )
            self.addresses.append(self.new(span * dtype.itemsize + asked.offset) + asked.offset)
            if i < 3:
                shape = (asked.batch, *asked.shapes[i])
                drawn = generator.integers(-3, 4, shape) + (
                    generator.integers(-3, 4, shape) * 1j if dtype.kind == "c" else 0
                )
                if asked.stride(i) == 0:
                    drawn[:] = drawn[0]
                self.matrix(i)[...] = drawn.astype(dtype)
        if asked.in_place:
            self.addresses[3] = self.addresses[2]
        bias_type = asked.d if asked.bias_type is None else asked.bias_type
        bias = tables.DTYPES[bias_type]
        self.bias = self.new(asked.m * bias.itemsize)
        self.bias_values = generator.integers(-3, 4, asked.m).astype(bias)
        self.bytes(self.bias, self.bias_values.nbytes)[:] = self.bias_values.view(np.uint8)
        self.before = [self.whole(i).copy() for i in range(4)]

    def new(self, nbytes: int) -> int:
        return int(self.cuda.runtime.cudaMalloc(nbytes)[1])

    def bytes(self, address: int, nbytes: int) -> Array:
        return self.cuda.runtime.memory.at(address, nbytes, None, "test")

    def whole(self, i: int) -> Array:
        block = self.cuda.runtime.memory.find(self.addresses[i])
        assert block is not None
        return block.memory

    def matrix(self, i: int) -> Array:
        x = self.asked
        dtype = tables.DTYPES[(x.a, x.b, x.c, x.d)[i]]
        steps = [x.stride(i), *((x.ld(i), 1) if x.order[i] else (1, x.ld(i)))]
        data = self.whole(i)[x.offset :]
        return np.ndarray(
            (x.batch, *x.shapes[i]), dtype, data, 0, [s * dtype.itemsize for s in steps]
        )

    def expected(self) -> Array:
        x = self.asked
        wide = np.complex128 if tables.DTYPES[x.d].kind == "c" else np.float64
        a, b, c = (self.matrix(i).astype(wide) for i in range(3))
        value = x.alpha * (
            (a.swapaxes(1, 2) if x.op_a else a) @ (b.swapaxes(1, 2) if x.op_b else b)
        )
        value = value + x.beta * c
        if x.epilogue & BIAS:
            value = value + self.bias_values.astype(wide)[:, None]
        if x.epilogue & RELU:
            value = np.maximum(value, 0)
        if x.epilogue & GELU:
            value = 0.5 * value * (1 + np.tanh(np.sqrt(2 / np.pi) * (value + 0.044715 * value**3)))
        return (
            value.astype(tables.DTYPES[x.d])
            if wide is np.complex128
            else value.real.astype(tables.DTYPES[x.d])
        )

    def free(self) -> None:
        for address in {*self.addresses}:
            self.cuda.runtime.cudaFree(address - self.asked.offset)
        self.cuda.runtime.cudaFree(self.bias)


def check(cuda: Software, asked: Asked, seed: int = 0, workspace_bytes: int = 1 << 20) -> int:
    """Run a product by every algorithm that is offered; the result must be right and nothing else touched."""
    data = Data(cuda, asked, seed)
    workspace = data.new(workspace_bytes) if workspace_bytes else 0
    with prepared(cuda, asked) as product:
        if asked.epilogue & BIAS:
            product.set("matmul_desc", product.operation, "BIAS_POINTER", data.bias)
        want = data.expected()
        algorithms = product.search(workspace_bytes)
        for algorithm in algorithms:
            if asked.in_place:
                data.whole(3)[:] = data.before[3]
            product.run(algorithm, tuple(data.addresses), workspace)
            assert cuda.runtime.cudaStreamSynchronize(LEGACY)[0] == 0, cuda.faults
            found = data.matrix(3).copy()
            tolerance = 1e-2 if asked.epilogue & GELU else 0
            np.testing.assert_allclose(
                found.astype(complex), want.astype(complex), tolerance, tolerance
            )
            # Everything but D's own elements is as it was.
            data.matrix(3)[...] = data.before[3][asked.offset :].view(want.dtype).reshape(-1)[:1]
            clean = data.before[3].copy()
            np.ndarray(want.shape, want.dtype, clean[asked.offset :], 0, data.matrix(3).strides)[
                ...
            ] = data.matrix(3)
            np.testing.assert_array_equal(data.whole(3), clean)
            if not asked.in_place:
                for i in range(3):
                    np.testing.assert_array_equal(data.whole(i), data.before[i])
    data.free()
    if workspace:
        cuda.runtime.cudaFree(workspace)
    return len(algorithms)


def refusal(cuda: Software, asked: Asked) -> Any:
    """Return the error of searching for an algorithm."""
    with prepared(cuda, asked) as product:
        if asked.epilogue & BIAS:
            product.set("matmul_desc", product.operation, "BIAS_POINTER", 256)
        with pytest.raises(cuda.cublas_lt.cuBLASLtError, match="CUBLAS_STATUS") as caught:
            product.search()
        return caught.value


def of_types(row: tables.Row, compute: int, **changes: Any) -> Asked:
    """Return a product of these types, in the form that its kernels want."""
    tn = row.a in tables.FLOAT8 or row.a == R_8I
    types = {"scale": row.scale, "a": row.a, "b": row.b, "c": row.c, "d": row.d}
    return Asked(compute=compute, op_a=int(tn), **types, **changes)


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
    row=st.sampled_from(
        [x for x in ROWS if x.a not in tables.FLOAT8 and x.a != R_8I and x.scale != R_16F]
    ),
)
def test_layouts(
    shared: Software,
    data: Any,
    m: int,
    n: int,
    k: int,
    batch: int,
    ops: Any,
    gap: Any,
    order: Any,
    row: tables.Row,
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
    want = (
        data.matrix(0).astype(np.int64).swapaxes(1, 2) @ data.matrix(1).astype(np.int64) + 2**31 - 1
    )
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


@pytest.mark.parametrize(
    ("compute", "mode"), [(68, "fp32"), (69, "fp32"), (77, "tf32"), (74, "fp16"), (75, "bf16")]
)
def test_what_compute_types_do_to_the_operands(
    shared: Software, rng: Any, compute: int, mode: str
) -> None:
    x, y = (
        rng.standard_normal((32, 1)).astype(np.float32),
        rng.standard_normal((1, 16)).astype(np.float32),
    )
    found = product_of(shared, Asked(k=1, compute=compute), x, y)
    want = round_to(x, mode).astype(np.float64) @ round_to(y, mode).astype(np.float64)
    np.testing.assert_array_equal(found, want.astype(np.float32))


def test_tf32_rounds_as_the_oracle(rng: Any) -> None:
    bits = np.concatenate(
        [
            rng.integers(0, 1 << 32, 20000),
            [0x7F800000, 0x7F800001, 0xFFC00000, 0x7F7FFFFF, 0x3F801000, 0x3F803000],
        ]
    )
    x = bits.astype(np.uint32).view(np.float32)
    np.testing.assert_array_equal(round_tf32(x), round_to(x, "tf32"))


@pytest.mark.parametrize(("mask", "coarse"), [(7, True), (3, True), (2, False), (0, False)])
def test_sums_of_parts_in_the_type_of_the_result(
    shared: Software, rng: Any, mask: int, coarse: bool
) -> None:
    x = rng.standard_normal((32, 512)).astype(ml_dtypes.bfloat16)
    y = rng.standard_normal((512, 16)).astype(ml_dtypes.bfloat16)
    asked = Asked(k=512, a=R_16BF, b=R_16BF, c=R_16BF, d=R_16BF, mask=mask)
    once = (
        (x.astype(np.float64) @ y.astype(np.float64)).astype(np.float32).astype(ml_dtypes.bfloat16)
    )
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


@pytest.mark.parametrize(
    ("text", "units"), [("0", "FMA float32"), ("1", "HMMA tf32"), (None, "HMMA tf32")]
)
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
        cuda.cublas_lt.matmul_algo_cap_get_attribute(
            data.ctypes.data, name, flags.ctypes.data, 8, 0
        )
        cuda.cublas_lt.destroy(second)
    number = int(flags[0])
    names = (
        {tables.FMA: "FMA", tables.HMMA: "HMMA"},
        {tables.INPUT_32F: "float32", tables.INPUT_TF32: "tf32"},
    )
    assert " ".join(next(v for k, v in x.items() if number & k) for x in names) == units


# -- what is refused ------------------------------------------------------------------------------

TYPES = (R_32F, R_64F, R_16F, R_16BF, R_8I, R_32I, C_32F, C_64F, R_8F_E4M3, R_8F_E5M2)


def test_every_other_combination_of_types_is_refused(cuda: Software) -> None:
    allowed = {(c, r.scale, r.a, r.b, r.c, r.d) for r, c in COMBINATIONS}
    tried = 0
    for compute, scale, a, d in itertools.product(
        (64, 68, 70, 72, 77), (R_32F, R_64F, R_32I, C_32F, C_64F), TYPES, TYPES
    ):
        if (compute, scale, a, a, d, d) not in allowed:
            found = refusal(cuda, Asked(op_a=1, compute=compute, scale=scale, a=a, b=a, c=d, d=d))
            assert (found.status, "no such combination" in str(found)) == (NOT_SUPPORTED, True)
            tried += 1
    assert tried > 400
    for changes in (
        {"b": R_16F},
        {"c": R_16F},
        {"a": R_16F, "b": R_16BF},
        {"a": R_8F_E5M2, "b": R_8F_E5M2},
    ):
        assert refusal(cuda, replace(Asked(op_a=1), **changes)).status == NOT_SUPPORTED


FP8 = Asked(op_a=1, a=R_8F_E4M3, b=R_8F_E4M3)
INT8 = Asked(op_a=1, compute=72, scale=R_32I, a=R_8I, b=R_8I, c=R_32I, d=R_32I)


@pytest.mark.parametrize(
    ("asked", "status", "words"),
    [
        (Asked(gap=(-1, 0, 0, 0)), INVALID_VALUE, "A: leading dimension 31"),
        (Asked(gap=(0, 0, 0, -1)), INVALID_VALUE, "D: leading dimension"),
        (Asked(order=(0, 1, 0, 0), gap=(0, -1, 0, 0)), INVALID_VALUE, "B: leading dimension 15"),
        (Asked(m=0), INVALID_VALUE, "nothing in"),
        (Asked(batch=2, strides=(None, None, None, 0)), INVALID_VALUE, "D overlaps itself"),
        (Asked(batch=2, strides=(None, None, None, 511)), INVALID_VALUE, "D overlaps itself"),
        (Asked(order=(0, 0, 0, 1), epilogue=BIAS), NOT_SUPPORTED, "row-major D"),
        (Asked(order=(0, 0, 0, 1), epilogue=RELU), NOT_SUPPORTED, "row-major D"),
        (Asked(epilogue=BIAS, bias_type=R_16F), NOT_SUPPORTED, "bias of type"),
        (replace(FP8, epilogue=BIAS, bias_type=R_32F), NOT_SUPPORTED, "bias of type 0, not 14"),
        (Asked(compute=70, scale=R_64F, a=R_64F, b=R_64F, c=R_64F, d=R_64F, epilogue=BIAS), NOT_SUPPORTED, "epilogue"),
        (Asked(scale=C_32F, a=C_32F, b=C_32F, c=C_32F, d=C_32F, epilogue=RELU), NOT_SUPPORTED, "epilogue"),
        (replace(INT8, epilogue=RELU), NOT_SUPPORTED, "epilogue"),
        (replace(FP8, op_a=0), NOT_SUPPORTED, "FP8 kernels are TN"),
        (replace(FP8, op_b=1), NOT_SUPPORTED, "FP8 kernels are TN"),
        (replace(FP8, k=24), NOT_SUPPORTED, "steps of 16 bytes|multiples of 16 bytes"),
        (replace(FP8, m=6), NOT_SUPPORTED, "steps of 16 bytes|multiples of 16 bytes"),
        (replace(FP8, gap=(8, 0, 0, 0)), NOT_SUPPORTED, "multiples of 16 bytes"),
        (replace(FP8, alignment=8), NOT_SUPPORTED, "no algorithm for pointers"),
        (replace(INT8, op_a=0), NOT_SUPPORTED, "int8 kernels are TN"),
        (replace(INT8, k=18), NOT_SUPPORTED, "multiples of 4"),
        (replace(INT8, m=6), NOT_SUPPORTED, "multiples of 4"),
        (replace(INT8, gap=(0, 2, 0, 0)), NOT_SUPPORTED, "multiples of 4"),
        (replace(INT8, alignment=2), NOT_SUPPORTED, "no algorithm for pointers"),
        (Asked(alignment=2), NOT_SUPPORTED, "no algorithm for pointers"),
    ],
)  # fmt: skip
def test_refusals(cuda: Software, asked: Asked, status: int, words: str) -> None:
    found = refusal(cuda, asked)
    assert found.status == status
    with pytest.raises(type(found), match=words):
        raise found


def test_extents_must_fit(cuda: Software) -> None:
    with prepared(cuda, Asked()) as product:
        for name, number in (("COLS", 47), ("ROWS", 31)):
            before = 48 if name == "COLS" else 32
            product.set("matrix_layout", product.layouts[0], name, number)
            with pytest.raises(cuda.cublas_lt.cuBLASLtError, match="extents do not fit"):
                product.search()
            product.set("matrix_layout", product.layouts[0], name, before)
        product.set("matrix_layout", product.layouts[0], "BATCH_COUNT", 2)
        with pytest.raises(cuda.cublas_lt.cuBLASLtError, match="batch counts differ"):
            product.search()


@pytest.mark.parametrize(
    ("capability", "fits"), [((8, 0), False), ((8, 9), True), ((9, 0), True), ((10, 0), True)]
)
def test_float8_needs_its_devices(capability: tuple[int, int], fits: bool) -> None:
    cuda = Software([DeviceModel(capability=capability)], "lazy", 130100)
    if fits:
        check(cuda, replace(FP8, k=16))
    else:
        assert "no FP8 on compute capability (8, 0)" in str(refusal(cuda, FP8))
    other = replace(FP8, op_a=0, k=16)
    if capability == (10, 0):
        check(cuda, other)
    assert cuda.faults == []


def test_matrices_of_a_batch_may_lie_side_by_side(shared: Software) -> None:
    check(shared, Asked(m=8, batch=3, gap=(0, 0, 16, 16), strides=(None, None, 8, 8)))


def test_scales_of_float8(shared: Software) -> None:
    asked = replace(FP8, k=16)
    data = Data(shared, asked, 0)
    scales = [data.new(4) for _ in range(2)]
    with prepared(shared, asked) as product:
        for name, address in zip(("A_SCALE_POINTER", "B_SCALE_POINTER"), scales, strict=True):
            product.set("matmul_desc", product.operation, name, address)
        product.run(product.search(0)[0], tuple(data.addresses), 0)
        # They are read when the product runs.
        for address, number in zip(scales, (2.0, 0.25), strict=True):
            data.bytes(address, 4).view(np.float32)[0] = number
        shared.drain()
    np.testing.assert_array_equal(data.matrix(3), 0.5 * data.expected())
    with prepared(shared, Asked()) as product:
        product.set("matmul_desc", product.operation, "A_SCALE_POINTER", scales[0])
        with pytest.raises(shared.cublas_lt.cuBLASLtError, match="scales only for FP8") as caught:
            product.search()
    assert caught.value.status == INVALID_VALUE


# -- algorithms, alignment, workspace -------------------------------------------------------------


def test_defaults_of_a_preference_are_no_workspace_and_256_bytes(cuda: Software) -> None:
    lt = cuda.cublas_lt
    with prepared(cuda, Asked(count=8)) as product:
        wanted = lt.matmul_preference_create()
        results, returned = lt.MatmulHeuristicResult(8), np.zeros(1, np.int32)
        arguments = (product.handle, product.operation, *product.layouts, wanted)
        lt.matmul_algo_get_heuristic(*arguments, 8, results.ptr, returned.ctypes.data)
        assert [int(x) for x in np.atleast_1d(results.workspace_size)[: returned[0]]] == [
            0
        ] * returned[0]
        assert returned[0] >= 3
        with pytest.raises(lt.cuBLASLtError, match="0 algorithms"):
            lt.matmul_algo_get_heuristic(*arguments, 0, results.ptr, returned.ctypes.data)
        lt.matmul_preference_destroy(wanted)


def test_an_odd_leading_dimension_leaves_fewer_algorithms(shared: Software) -> None:
    counts = [check(shared, Asked(gap=(gap,) * 4, a=R_16F, b=R_16F)) for gap in (0, 4, 2, 1)]
    assert counts == sorted(counts, reverse=True)
    assert counts[0] > counts[1] > counts[2] > counts[3] > 0
    assert check(shared, Asked(offset=4, alignment=4)) < counts[0]


def test_pointers_must_be_aligned_as_promised(cuda: Software) -> None:
    asked = Asked()
    data = Data(cuda, asked, 0)
    workspace = data.new(1 << 20)
    with prepared(cuda, asked) as product:
        strict, *_, lax = product.search()
        for i in (0, 1, 3):
            pointers = list(data.addresses)
            pointers[i] += 8
            with pytest.raises(cuda.cublas_lt.cuBLASLtError, match="wants multiples of 16"):
                product.run(strict, tuple(pointers), workspace)
        product.run(strict, (*data.addresses[:2], 3, data.addresses[3]), workspace)  # C is not read
        pointers = tuple(x + 2 for x in data.addresses)
        with pytest.raises(cuda.cublas_lt.cuBLASLtError, match="wants multiples of 4"):
            product.run(lax, pointers, workspace)
        with pytest.raises(cuda.cublas_lt.cuBLASLtError, match="A is null"):
            product.run(lax, (0, *data.addresses[1:]), workspace)


def test_a_bias_is_aligned_as_it_was_when_the_algorithm_was_sought(cuda: Software) -> None:
    asked = Asked(epilogue=BIAS)
    data = Data(cuda, asked, 0)
    with prepared(cuda, asked) as product:
        product.set("matmul_desc", product.operation, "BIAS_POINTER", data.bias)
        strict = product.search(0)
        product.set("matmul_desc", product.operation, "BIAS_POINTER", data.bias + 4)
        lax = product.search(0)
        assert 0 < len(lax) < len(strict)
        product.run(lax[0], tuple(data.addresses), 0)
        with pytest.raises(cuda.cublas_lt.cuBLASLtError, match=r"bias at .* wants multiples of 16"):
            product.run(strict[0], tuple(data.addresses), 0)
        product.set("matmul_desc", product.operation, "BIAS_POINTER", 0)
        with pytest.raises(cuda.cublas_lt.cuBLASLtError, match="no pointer to it"):
            product.search(0)
    data.free()
    assert cuda.runtime.sticky  # the bias was one number too far
    cuda.faults.clear()


def test_workspaces(cuda: Software) -> None:
    asked = Asked()
    data = Data(cuda, asked, 0)
    workspace = data.new(1 << 20)
    with prepared(cuda, asked) as product:
        algorithm = next(x for x in product.search() if x[1])
        assert all(size <= 1024 for _, size in product.search(1024))
        with pytest.raises(cuda.cublas_lt.cuBLASLtError, match="bytes of workspace, not"):
            product.run((algorithm[0], algorithm[1] - 1), tuple(data.addresses), workspace)
        for address in (workspace + 128, 0):
            with pytest.raises(cuda.cublas_lt.cuBLASLtError, match="not aligned to 256"):
                product.run(algorithm, tuple(data.addresses), address)
        product.run(algorithm, tuple(data.addresses), workspace + (1 << 20) - 512)
        assert cuda.runtime.cudaDeviceSynchronize()[0].name == "cudaErrorIllegalAddress"
        assert "workspace: " in cuda.faults.pop()
        cuda.forgive()


@pytest.mark.parametrize("shares", [False, True])
def test_two_streams_with_one_workspace(cuda: Software, shares: bool) -> None:
    asked = Asked()
    workspaces = [cuda.runtime.cudaMalloc(1 << 16)[1] for _ in range(2)]
    cuda.runtime.scheduler.use("all")
    with prepared(cuda, asked) as product:
        algorithm = next(x for x in product.search() if x[1])
        all_data = [Data(cuda, asked, seed) for seed in range(2)]
        for data, workspace in zip(all_data, workspaces, strict=True):
            on = int(cuda.runtime.cudaStreamCreateWithFlags(1)[1])
            one, zero = np.ones(1, np.float32), np.zeros(1, np.float32)
            algo = np.frombuffer(algorithm[0], np.uint8).copy()
            a, b, c, d = data.addresses
            la, lb, lc, ld = product.layouts
            cuda.cublas_lt.matmul(
                product.handle, product.operation, one.ctypes.data, a, la, b, lb, zero.ctypes.data, c, lc, d, ld,
                algo.ctypes.data, workspaces[0] if shares else workspace, algorithm[1], on,
            )  # fmt: skip
        cuda.drain()
    right = [np.array_equal(x.matrix(3), x.expected()) for x in all_data]
    assert all(right) is not shares
    assert ["workspace of a running product" in x for x in cuda.faults] == [True] * len(cuda.faults)
    assert bool(cuda.faults) is shares
    cuda.faults.clear()


def test_an_algorithm_is_for_its_types_and_its_device(cuda: Software) -> None:
    with prepared(cuda, Asked()) as product, prepared(cuda, Asked(compute=77)) as other:
        algorithm, workspace = product.search()[0]
        data = np.frombuffer(algorithm, np.uint8).copy()
        result = cuda.cublas_lt.MatmulHeuristicResult(1)
        check_it = cuda.cublas_lt.matmul_algo_check
        check_it(product.handle, product.operation, *product.layouts, data.ctypes.data, result.ptr)
        assert int(np.atleast_1d(result.workspace_size)[0]) == workspace
        with pytest.raises(cuda.cublas_lt.cuBLASLtError, match="for other types"):
            check_it(other.handle, other.operation, *other.layouts, data.ctypes.data, result.ptr)
        data[:] = 0
        with pytest.raises(cuda.cublas_lt.cuBLASLtError, match="no algorithm of this library"):
            check_it(
                product.handle, product.operation, *product.layouts, data.ctypes.data, result.ptr
            )


def test_the_first_algorithm_is_not_the_fastest(cuda: Software) -> None:
    asked = Asked()
    data = Data(cuda, asked, 0)
    workspace = data.new(1 << 20)
    marks = [cuda.runtime.cudaEventCreateWithFlags(0)[1] for _ in range(2)]

    def times() -> list[float]:
        found = []
        with prepared(cuda, asked) as product:
            for algorithm in product.search():
                cuda.runtime.cudaEventRecord(marks[0], LEGACY)
                product.run(algorithm, tuple(data.addresses), workspace)
                cuda.runtime.cudaEventRecord(marks[1], LEGACY)
                cuda.runtime.cudaEventSynchronize(marks[1])
                found.append(cuda.runtime.cudaEventElapsedTime(*marks)[1])
        return found

    before = times()
    assert min(before) < 0.9 * before[0]
    cuda.cublas_lt.times[0, "32x32"] = 0.1
    after = times()
    assert min(after) == after[-1] < 0.2 * before[0]


# -- handles and descriptors ----------------------------------------------------------------------


def test_objects_that_are_none(cuda: Software) -> None:
    lt = cuda.cublas_lt
    with prepared(cuda, Asked()) as product:
        gone = lt.matrix_layout_create(0, 4, 4, 4)
        lt.matrix_layout_destroy(gone)
        attempts = [
            lambda: lt.matrix_layout_destroy(gone),
            lambda: lt.destroy(gone),
            lambda: lt.matmul_desc_destroy(product.handle),
            lambda: lt.matmul_algo_get_heuristic(product.handle, gone, *product.layouts, gone, 1, 0, 0),
        ]  # fmt: skip
        for attempt in attempts:
            with pytest.raises(lt.cuBLASLtError, match=r"CUBLAS_STATUS_INVALID_VALUE .* not a"):
                attempt()
        assert len(cuda.faults) == len(attempts)
        cuda.faults.clear()
        number = np.zeros(1, np.int64)
        attribute = lt.MatmulDescAttribute.TRANSA
        with pytest.raises(lt.cuBLASLtError, match="has 4 bytes, not 8"):
            lt.matmul_desc_set_attribute(product.operation, attribute, number.ctypes.data, 8)
        with pytest.raises(lt.cuBLASLtError, match="a null pointer"):
            lt.matmul_desc_set_attribute(product.operation, attribute, 0, 4)
        assert cuda.live()["handles"] == cuda.live()["descriptors"] == 1
        assert cuda.live()["layouts"] == 4
    assert not any(cuda.live().values())


def test_a_handle_belongs_to_a_device(cuda: Software) -> None:
    with prepared(cuda, Asked()) as product:
        cuda.runtime.cudaSetDevice(1)
        with pytest.raises(cuda.cublas_lt.cuBLASLtError, match="another device's"):
            product.search()
        cuda.runtime.cudaSetDevice(0)
    assert "a handle of device 0 is used on 1" in cuda.faults.pop()


def test_two_threads_with_one_handle(cuda: Software, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = Asked()
    data = [Data(cuda, asked, seed) for seed in range(2)]
    meeting = threading.Barrier(2, timeout=20)
    with prepared(cuda, asked) as product:
        algorithm = product.search(0)[0]
        monkeypatch.setattr(cuda.cublas_lt, "let_others_run", meeting.wait)
        threads = [
            threading.Thread(target=product.run, args=(algorithm, tuple(x.addresses), 0)) for x in data
        ]  # fmt: skip
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        monkeypatch.undo()
    assert "two threads use one handle at the same time" in cuda.faults
    cuda.faults.clear()


def test_d_must_not_lie_on_what_is_read(cuda: Software) -> None:
    asked = Asked(m=16, n=16, k=16)
    data = Data(cuda, asked, 0)
    with prepared(cuda, asked) as product:
        a, b, c, _ = data.addresses
        product.run(product.search(0)[0], (a, b, c, a), 0)
    assert cuda.faults.pop() == "D overlaps A"


def test_a_handle_during_a_capture(cuda: Software) -> None:
    on = int(cuda.runtime.cudaStreamCreateWithFlags(1)[1])
    cuda.runtime.begin_capture(on)
    with pytest.raises(cuda.cublas_lt.cuBLASLtError, match="ALLOC_FAILED"):
        cuda.cublas_lt.create()
    assert "during a capture" in cuda.faults.pop()


def test_a_call_that_is_made_to_fail(cuda: Software) -> None:
    with (
        cuda.fail("cublas_lt.create", status=1),
        pytest.raises(cuda.cublas_lt.cuBLASLtError, match="NOT_INITIALIZED") as caught,
    ):
        cuda.cublas_lt.create()
    assert caught.value.status == 1
    assert cuda.live()["handles"] == 0
    operation = cuda.cublas_lt.matmul_desc_create(68, 0)
    with (
        cuda.fail("matmul_desc_destroy"),
        pytest.raises(cuda.cublas_lt.cuBLASLtError, match="INTERNAL_ERROR"),
    ):
        cuda.cublas_lt.matmul_desc_destroy(operation)
    assert cuda.live()["descriptors"] == 0


# -- cuBLAS ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "rounded"), [(0, "fp32"), (2, "fp32"), (3, "tf32"), (19, "tf32"), (16, "fp32")]
)
def test_math_modes_of_cublas(cuda: Software, rng: Any, mode: int, rounded: str) -> None:
    blas = cuda.cublas
    handle = blas.create()
    blas.set_math_mode(handle, mode)
    assert blas.get_math_mode(handle) == mode
    for wrong in (5, 7, 32, 64):
        with pytest.raises(blas.cuBLASError, match="there is no math mode"):
            blas.set_math_mode(handle, wrong)
    x, y = (
        rng.standard_normal((8, 1)).astype(np.float32),
        rng.standard_normal((1, 4)).astype(np.float32),
    )
    addresses = [cuda.runtime.cudaMalloc(n)[1] for n in (32, 16, 128)]
    for address, values in zip(addresses, (x, y), strict=False):
        cuda.runtime.cudaMemcpyAsync(address, values.ctypes.data, values.nbytes, 4, LEGACY)
    one, zero = np.ones(1, np.float32), np.zeros(1, np.float32)
    a, b, c = addresses
    blas.set_stream(handle, LEGACY)
    blas.sgemm(handle, 0, 0, 8, 4, 1, one.ctypes.data, a, 8, b, 1, zero.ctypes.data, c, 8)
    cuda.drain()
    found = cuda.runtime.memory.at(c, 128, 0, "").view(np.float32).reshape(8, 4, order="F")
    want = round_to(x, rounded).astype(np.float64) @ round_to(y, rounded).astype(np.float64)
    np.testing.assert_array_equal(found, want.astype(np.float32))
    blas.destroy(handle)
    assert cuda.live()["cublas_handles"] == 0


def test_a_new_stream_takes_the_workspace_away(cuda: Software) -> None:
    handle = cuda.cublas.create()
    cuda.cublas.set_workspace(handle, 512, 1024)
    assert cuda.cublas.objects.get(handle, "cuBLAS handle").workspace == (512, 1024)
    cuda.cublas.set_stream(handle, LEGACY)
    assert cuda.cublas.objects.get(handle, "cuBLAS handle").workspace is None
    with pytest.raises(cuda.cublas.cuBLASError, match="not aligned"):
        cuda.cublas.set_workspace(handle, 16, 1024)
    cuda.cublas.destroy(handle)
