"""Uses that type checkers accept; each ``assert_type`` is a result's type."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
from numpy.typing import NDArray
from typing_extensions import assert_type

import lowprec
from lowprec.checking import Comparison
from lowprec.planning.plan_report import PlanReport

a = np.ones((2, 2), np.float32)
t = torch.ones(2, 2)
weight = torch.nn.Parameter(t)
j = jnp.ones((2, 2))


class Producer:
    """An array that is known by DLPack alone."""

    def __dlpack__(self, *, stream: int | None = None) -> object: ...
    def __dlpack_device__(self) -> tuple[int, int]:
        return 1, 0


# The result is an array of the first operand's library.
assert_type(lowprec.matmul(a, a), NDArray[Any])
assert_type(lowprec.matmul(a, t, math_mode="bf16"), NDArray[Any])
assert_type(lowprec.matmul(t, t, bias=t, activation="relu"), torch.Tensor)
assert_type(lowprec.matmul(weight, a), torch.Tensor)
assert_type(lowprec.matmul(j, a, out_dtype="float32"), jax.Array)
assert_type(lowprec.matmul(Producer(), a), lowprec.DLPackArray)
assert_type(lowprec.linear(a, lowprec.prepare(a, math_mode="tf32"), a), NDArray[Any])
assert_type(lowprec.linear(t, weight, bias=t), torch.Tensor)
assert_type(lowprec.conv(t, weight, stride=2, padding="same", activation="relu"), torch.Tensor)
assert_type(lowprec.conv(a, a, a, math_mode="bf16", transposed=True), NDArray[Any])
assert_type(lowprec.vecdot(j, j, axis=0), jax.Array)
assert_type(lowprec.tensordot(t, t, axes=1), torch.Tensor)
assert_type(lowprec.einsum("ij,jk,kl->il", a, a, a, optimize="greedy"), NDArray[Any])
assert_type(lowprec.einsum("ij,jk", weight, t, rtol=1e-3), torch.Tensor)
assert_type(lowprec.linalg.cholesky(weight), torch.Tensor)
assert_type(lowprec.linalg.pinv(j, rtol=1e-3), jax.Array)
assert_type(lowprec.linalg.matrix_power(a, 3), NDArray[Any])
assert_type(lowprec.torch.matmul(t, t, backward_mode="fp32"), torch.Tensor)
assert_type(lowprec.jax.matmul(j, j), jax.Array)
lazy_matmul = lowprec.dask.matmul
assert_type(lowprec.quantize(t, "mxfp4", axis=0).T, lowprec.QuantizedArray)
assert_type(lowprec.plan(a, a, rtol=1e-3, bound="probable"), PlanReport)
assert_type(lowprec.check(a, a, modes=["bf16", lowprec.MathMode.TF32]), Comparison)

# Modes are names, aliases, the names of JAX's presets, and members.
lowprec.matmul(a, a, math_mode="high")
lowprec.matmul(a, a, math_mode="TF32_TF32_F32")
lowprec.matmul(a, a, math_mode=lowprec.MathMode.BF16X3)
lowprec.set_math_mode(None)


@lowprec.fp32_guard()
def decorated(x: int) -> str:
    return str(x)


with lowprec.math_mode("bf16"), lowprec.emulate("hopper"):
    assert_type(decorated(1), str)
