"""Uses that type checkers refuse: each line after "refused"."""

from __future__ import annotations

import numpy as np
import torch

import lowprec

a = np.ones((2, 2), np.float32)
t = torch.ones(2, 2)
text = str(a)

# refused
lowprec.matmul(a, a, math_mode="bf61")
lowprec.matmul(t, t, math_mode="bf61")
lowprec.matmul(a, a, math_mode=text)
lowprec.matmul(a, a, math_mode=16)
lowprec.matmul(a, a, rtol="1e-3")
lowprec.matmul(a, a, rtol=1e-3, bound="likely")
lowprec.matmul(a, a, activation="silu")
lowprec.matmul(a, a, math_mod="bf16")
lowprec.matmul(a, b=a)
lowprec.matmul(a)
lowprec.matmul([[1.0]], a)
lowprec.matmul(1.0, a)
lowprec.matmul(lowprec.prepare(a), a)
lowprec.einsum(a, "ij,jk->ik", a)
lowprec.einsum("ij,jk->ik", a, a, math_mode="bf61")
lowprec.tensordot(a, a, axes="ij")
lowprec.vecdot(a, a, bound="likely")
lowprec.linear(a, a, a, a)
lowprec.conv(a, a, math_mode="bf61")
lowprec.conv(a, a, strides=2)
lowprec.conv(a, a, stride=1.5)
lowprec.prepare(a, math_mode="bf61")
lowprec.quantize(a, "mxfp7")
lowprec.quantize(a)
lowprec.plan(a, a, math_mode="bf61")
lowprec.check(a, a, modes=["bf61"])
lowprec.linalg.solve(a)
lowprec.math_mode("bf61")
lowprec.set_math_mode("bf61")
lowprec.emulate("pascal")
lowprec.fp32_guard(frameworks=1)
lowprec.torch.matmul(t, t, math_mode="bf61")
lowprec.torch.Linear(2, 2, backward_mode="bf61")
lowprec.matmull(a, a)
lowprec.torch.Liner(2, 2)
x: torch.Tensor = lowprec.matmul(a, a)
y: np.ndarray = lowprec.matmul(t, t)
z: int = lowprec.linalg.inv(a)
