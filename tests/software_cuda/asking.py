"""Products requested from the software cuBLASLt directly, for its own tests."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from software_cuda import Software, tables
from software_cuda.tables import R_8I, R_32F

LEGACY = 1
BIAS, RELU, GELU = 4, 2, 32
Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Asked:
    """A product in the terms of cuBLASLt; a value that is None follows from the others."""

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
    def types(self) -> tuple[int, ...]:
        return (self.a, self.b, self.c, self.d)

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


def of_types(row: tables.Row, compute: int, **changes: Any) -> Asked:
    """Return a product of these types, in the form that its kernels need."""
    tn = row.a in tables.FLOAT8 or row.a == R_8I
    types = {"scale": row.scale, "a": row.a, "b": row.b, "c": row.c, "d": row.d}
    return Asked(compute=compute, op_a=int(tn), **types, **changes)


ENUMERATIONS = {
    "matmul_desc": "MatmulDescAttribute",
    "matrix_layout": "MatrixLayoutAttribute",
    "matmul_preference": "MatmulPreferenceAttribute",
    "emulation_desc": "EmulationDescAttribute",
}


class Prepared:
    """Descriptors of a product, and calls on them."""

    def __init__(self, cuda: Software, asked: Asked) -> None:
        self.asked = asked
        self.lt = lt = cuda.cublas_lt
        self.handle = lt.create()
        self.operation = lt.matmul_desc_create(asked.compute, asked.scale)
        self.describe(TRANSA=asked.op_a, TRANSB=asked.op_b, EPILOGUE=asked.epilogue)
        if asked.bias_type is not None:
            self.describe(BIAS_DATA_TYPE=asked.bias_type)
        self.layouts = []
        for i, data_type in enumerate(asked.types):
            layout = lt.matrix_layout_create(data_type, *asked.shapes[i], asked.ld(i))
            values = {"ORDER": asked.order[i], "BATCH_COUNT": asked.batch, "STRIDED_BATCH_OFFSET": asked.stride(i)}
            self.set("matrix_layout", layout, **values)
            self.layouts.append(layout)

    def describe(self, **values: int) -> None:
        """Set attributes of the operation."""
        self.set("matmul_desc", self.operation, **values)

    def set(self, kind: str, target: int, **values: int) -> None:
        for name, number in values.items():
            member = getattr(self.lt, ENUMERATIONS[kind])[name]
            data = np.array([number], getattr(self.lt, f"get_{kind}_attribute_dtype")(member))
            getattr(self.lt, f"{kind}_set_attribute")(target, int(member), data.ctypes.data, data.nbytes)

    def search(self, workspace: int = 1 << 20) -> list[tuple[bytes, int]]:
        """Return algorithms and their workspaces."""
        lt, asked = self.lt, self.asked
        wanted = lt.matmul_preference_create()
        alignments = {f"MIN_ALIGNMENT_{x}_BYTES": asked.alignment for x in "ABCD"}
        values = {"MAX_WORKSPACE_BYTES": workspace, "REDUCTION_SCHEME_MASK": asked.mask, **alignments}
        self.set("matmul_preference", wanted, **values)
        results, returned = np.zeros(asked.count, lt.matmul_heuristic_result_dtype), ctypes.c_int()
        pointers = results.ctypes.data, ctypes.addressof(returned)
        lt.matmul_algo_get_heuristic(self.handle, self.operation, *self.layouts, wanted, asked.count, *pointers)
        lt.matmul_preference_destroy(wanted)
        return [(x["algo"].tobytes(), int(x["workspace_size"])) for x in results[: returned.value]]

    def run(
        self, algorithm: tuple[bytes, int], pointers: tuple[int, ...], workspace: int = 0, stream: int = LEGACY
    ) -> None:
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
            data.ctypes.data, workspace, algorithm[1], stream,
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
    """Matrices with random values in poisoned memory."""

    def __init__(self, cuda: Software, asked: Asked, seed: int = 0) -> None:
        self.cuda = cuda
        self.asked = asked
        self.addresses: list[int] = []
        generator = np.random.default_rng(seed)
        for i, data_type in enumerate(asked.types):
            dtype = tables.DTYPES[data_type]
            span = asked.ld(i) * asked.shapes[i][1 - asked.order[i]] + abs(asked.stride(i)) * (asked.batch - 1)
            self.addresses.append(self.new(span * dtype.itemsize + asked.offset) + asked.offset)
            if i < 3:
                shape = (asked.batch, *asked.shapes[i])
                drawn = generator.integers(-3, 4, shape).astype(dtype)
                if dtype.kind == "c":
                    drawn += 1j * generator.integers(-3, 4, shape)
                if asked.stride(i) == 0:
                    drawn[:] = drawn[0]
                self.matrix(i)[...] = drawn
        if asked.in_place:
            self.addresses[3] = self.addresses[2]
        bias = tables.DTYPES[asked.d if asked.bias_type is None else asked.bias_type]
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

    def matrix(self, i: int, memory: Array | None = None) -> Array:
        """Return a matrix on its memory, or on a copy of that."""
        x = self.asked
        dtype = tables.DTYPES[x.types[i]]
        steps = [x.stride(i), *((x.ld(i), 1) if x.order[i] else (1, x.ld(i)))]
        data = (self.whole(i) if memory is None else memory)[x.offset :]
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
        return (value if wide is np.complex128 else value.real).astype(tables.DTYPES[x.d])

    def free(self) -> None:
        for address in {*self.addresses}:
            self.cuda.runtime.cudaFree(address - self.asked.offset)
        self.cuda.runtime.cudaFree(self.bias)


def check(cuda: Software, asked: Asked, seed: int = 0, workspace_bytes: int = 1 << 20) -> int:
    """Run a product by every offered algorithm: the result must be right, and other bytes unchanged."""
    data = Data(cuda, asked, seed)
    workspace = data.new(workspace_bytes)
    with prepared(cuda, asked) as product:
        if asked.epilogue & BIAS:
            product.describe(BIAS_POINTER=data.bias)
        want = data.expected()
        algorithms = product.search(workspace_bytes)
        for algorithm in algorithms:
            data.whole(3)[:] = data.before[3]
            product.run(algorithm, tuple(data.addresses), workspace)
            assert cuda.runtime.cudaStreamSynchronize(LEGACY)[0] == 0, cuda.faults
            found = data.matrix(3).copy()
            tolerance = 1e-2 if asked.epilogue & GELU else 0
            np.testing.assert_allclose(found.astype(complex), want.astype(complex), tolerance, tolerance)
            # Only the elements of D differ from before.
            clean = data.before[3].copy()
            data.matrix(3, clean)[...] = found
            np.testing.assert_array_equal(data.whole(3), clean)
            if not asked.in_place:
                for i in range(3):
                    np.testing.assert_array_equal(data.whole(i), data.before[i])
    data.free()
    cuda.runtime.cudaFree(workspace)
    return len(algorithms)


def refusal(cuda: Software, asked: Asked) -> Any:
    """Return the error of searching for an algorithm."""
    with prepared(cuda, asked) as product:
        if asked.epilogue & BIAS:
            product.describe(BIAS_POINTER=256)
        with pytest.raises(cuda.cublas_lt.cuBLASLtError, match="CUBLAS_STATUS") as caught:
            product.search()
        return caught.value
