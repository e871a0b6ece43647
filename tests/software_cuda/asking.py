"""Products asked of the software cuBLASLt in its own words, for its own tests."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from software_cuda import Software, tables
from software_cuda.tables import R_8I, R_32F  # fmt: skip

LEGACY = 1
INVALID_VALUE, NOT_SUPPORTED = 7, 15
BIAS, RELU, GELU = 4, 2, 32
Array = np.ndarray[Any, Any]


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
        for name, number in (("TRANSA", asked.op_a), ("TRANSB", asked.op_b), ("EPILOGUE", asked.epilogue)):
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
        getattr(self.lt, f"{kind}_set_attribute")(target, int(member), data.ctypes.data, data.nbytes)

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
            np.array([x if dtype.kind == "c" else np.real(x)], dtype) for x in (self.asked.alpha, self.asked.beta)
        )
        data = np.frombuffer(algorithm[0], np.uint8).copy()
        a, b, c, d = pointers
        la, lb, lc, ld = self.layouts
        if self.asked.in_place:
            ld = lc
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
            span = asked.ld(i) * asked.shapes[i][1 - asked.order[i]] + abs(asked.stride(i)) * (asked.batch - 1)
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
        return np.ndarray((x.batch, *x.shapes[i]), dtype, data, 0, [s * dtype.itemsize for s in steps])

    def expected(self) -> Array:
        x = self.asked
        wide = np.complex128 if tables.DTYPES[x.d].kind == "c" else np.float64
        a, b, c = (self.matrix(i).astype(wide) for i in range(3))
        value = x.alpha * ((a.swapaxes(1, 2) if x.op_a else a) @ (b.swapaxes(1, 2) if x.op_b else b))
        value = value + x.beta * c
        if x.epilogue & BIAS:
            value = value + self.bias_values.astype(wide)[:, None]
        if x.epilogue & RELU:
            value = np.maximum(value, 0)
        if x.epilogue & GELU:
            value = 0.5 * value * (1 + np.tanh(np.sqrt(2 / np.pi) * (value + 0.044715 * value**3)))
        return value.astype(tables.DTYPES[x.d]) if wide is np.complex128 else value.real.astype(tables.DTYPES[x.d])

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
            np.testing.assert_allclose(found.astype(complex), want.astype(complex), tolerance, tolerance)
            # Everything but D's own elements is as it was.
            data.matrix(3)[...] = data.before[3][asked.offset :].view(want.dtype).reshape(-1)[:1]
            clean = data.before[3].copy()
            np.ndarray(want.shape, want.dtype, clean[asked.offset :], 0, data.matrix(3).strides)[...] = data.matrix(3)
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
