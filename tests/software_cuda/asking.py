"""Products requested from the software cuBLASLt directly, for tests of its refusals."""

import ctypes
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import pytest

from software_cuda import tables
from software_cuda.tables import R_32F

LEGACY = 1
BIAS, RELU = 4, 2


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
    alignment: int = 256

    @property
    def types(self):
        return (self.a, self.b, self.c, self.d)

    @property
    def shapes(self):
        a = (self.k, self.m) if self.op_a else (self.m, self.k)
        b = (self.n, self.k) if self.op_b else (self.k, self.n)
        return [a, b, (self.m, self.n), (self.m, self.n)]

    def ld(self, i):
        return self.shapes[i][self.order[i]] + self.gap[i]

    def stride(self, i):
        given = self.strides[i]
        return self.ld(i) * self.shapes[i][1 - self.order[i]] if given is None else given


class Prepared:
    """Descriptors of a product, and calls on them."""

    def __init__(self, cuda, asked):
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
            values = {
                "ORDER": asked.order[i],
                "BATCH_COUNT": asked.batch,
                "STRIDED_BATCH_OFFSET": asked.stride(i),
            }
            self.set("matrix_layout", layout, **values)
            self.layouts.append(layout)

    def describe(self, **values):
        """Set attributes of the operation."""
        self.set("matmul_desc", self.operation, **values)

    def set(self, kind, target, **values):
        attributes = getattr(
            self.lt, "".join(word.capitalize() for word in kind.split("_")) + "Attribute"
        )
        for name, number in values.items():
            member = attributes[name]
            data = np.array([number], getattr(self.lt, f"get_{kind}_attribute_dtype")(member))
            getattr(self.lt, f"{kind}_set_attribute")(
                target, int(member), data.ctypes.data, data.nbytes
            )

    def search(self, workspace=1 << 20):
        """Return algorithms and their workspaces."""
        lt, asked = self.lt, self.asked
        wanted = lt.matmul_preference_create()
        alignments = {f"MIN_ALIGNMENT_{x}_BYTES": asked.alignment for x in "ABCD"}
        values = {"MAX_WORKSPACE_BYTES": workspace, "REDUCTION_SCHEME_MASK": 3, **alignments}
        self.set("matmul_preference", wanted, **values)
        results, returned = np.zeros(32, lt.matmul_heuristic_result_dtype), ctypes.c_int()
        pointers = results.ctypes.data, ctypes.addressof(returned)
        lt.matmul_algo_get_heuristic(
            self.handle, self.operation, *self.layouts, wanted, 32, *pointers
        )
        lt.matmul_preference_destroy(wanted)
        return [(x["algo"].tobytes(), int(x["workspace_size"])) for x in results[: returned.value]]

    def run(self, algorithm, pointers, workspace=0, stream=LEGACY):
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
            data.ctypes.data, workspace, algorithm[1], stream,
        )  # fmt: skip
        alpha[:] = beta[:] = 77  # they were read when the call was made


@contextmanager
def prepared(cuda, asked):
    found = Prepared(cuda, asked)
    try:
        yield found
    finally:
        for layout in found.layouts:
            found.lt.matrix_layout_destroy(layout)
        found.lt.matmul_desc_destroy(found.operation)
        found.lt.destroy(found.handle)


class Data:
    """Matrices with random values in poisoned memory; `expected` is for a product of plain float32 matrices."""

    def __init__(self, cuda, asked, seed=0):
        self.cuda = cuda
        self.asked = asked
        generator = np.random.default_rng(seed)
        self.addresses = [self.new(asked.batch * asked.stride(i) * 4) for i in range(4)]
        for i in range(3):
            self.matrix(i)[...] = generator.integers(-3, 4, asked.shapes[i])
        self.bias = self.new(asked.m * 4)

    def new(self, nbytes):
        return int(self.cuda.runtime.cudaMalloc(nbytes)[1])

    def matrix(self, i):
        block = self.cuda.runtime.memory.find(self.addresses[i])
        assert block is not None
        return np.ndarray(self.asked.shapes[i], np.float32, block.memory, order="F")

    def expected(self):
        return self.matrix(0) @ self.matrix(1)


def refusal(cuda, asked):
    """Return the error of searching for an algorithm."""
    with prepared(cuda, asked) as product:
        if asked.epilogue & BIAS:
            product.describe(BIAS_POINTER=256)
        with pytest.raises(cuda.cublas_lt.cuBLASLtError, match="CUBLAS_STATUS") as caught:
            product.search()
        return caught.value
