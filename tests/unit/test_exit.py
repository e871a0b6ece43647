"""Products at the exit of Python, when nothing can be imported any more."""

import pytest

from support.programs import run_python

CODE = """
import numpy as np
import lowprec

matmul, linear, einsum, plan = lowprec.matmul, lowprec.linear, lowprec.einsum, lowprec.plan
a, i8 = np.ones((300, 300), np.float32), np.ones((70, 70), np.int8)
prepared = lowprec.prepare(a, math_mode="bf16")
batch = np.ones((3, 20, 20), np.float32)

def products(m):
    small = a[:m, :64]
    yield matmul(small, small.T), 64
    yield matmul(small, small.T, math_mode="bf16"), 64
    yield matmul(small, small.T, math_mode="tf32", bias=a[0, :m], activation="relu"), 65
    yield matmul(a[:m], a[0], math_mode="bf16"), 300
    yield matmul(a[: 250 + m], a, math_mode="bf16"), 300
    yield matmul(a[: 250 + m], a, math_mode="fp16", alpha=2.0), 600
    yield matmul(a[: 250 + m], prepared, math_mode="bf16"), 300
    yield matmul(batch[:, : m - 20], batch, math_mode="bf16"), 20
    yield matmul(i8[:m], i8), 70
    yield matmul(small, small.T, rtol=1e-2), 64
    yield linear(small, small, a[0, :m]), 65
    yield einsum("ij,kj->ik", small, small), 64
    with lowprec.emulate("ampere"):
        yield matmul(small, small.T, math_mode="tf32"), 64
    assert "64" in str(plan(small, small.T, math_mode="bf16"))

class Late:
    def __init__(self, products):
        self.products = products
    def __del__(self):
        print([(c == value).all() for c, value in self.products(MADE)].count(True))

for c, value in products(30):
    assert (c == value).all()
late = Late(products)
late.itself = late  # collected when Python ends
"""


@pytest.mark.sweep
def test_warm_products_at_the_exit_of_python():
    """Of a shape that was multiplied before, and of another that takes the same kernels."""
    for m in (30, 31):
        assert run_python(CODE.replace("MADE", str(m)), warn="ignore") == "13", m
