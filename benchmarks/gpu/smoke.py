"""A first contact with a GPU: one row a step, each of which survives the failure of the others.

Without a GPU the steps that need no PyTorch run on the software CUDA.
"""

from __future__ import annotations

import contextlib
import time
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np

import lowprec
from gpu import arrays
from gpu.parts import Options, Part, short

#: Steps without which nothing else shows anything.
ESSENTIAL = ("mode fp32", "mode bf16")
ADVICE = (
    "Look at the traceback in the .log file, at `lowprec info` and at the versions of the part `device`; then run "
    "`LOWPREC_TEST_DEVICE=gpu python -m pytest tests/cuda_backend/test_products.py -x`."
)

#: Relative errors that a product of normal numbers stays below, by mode, and by element type.
MODES = {
    "fp32": 2e-6, "bf16": 5e-3, "fp32_pedantic": 2e-6, "tf32": 1e-3, "fp16": 1e-3, "fp64": 1e-7, "bf16x3": 5e-5,
    "bf16x6": 2e-6, "fp16x3": 5e-6, "tf32x3": 5e-6, "fp8": 6e-2, "fp8_rows": 6e-2, "fp8_blocks": 6e-2, "mxfp8": 6e-2,
    "mxfp4": 3e-1, "nvfp4": 3e-1, "int8": 4e-2,
}  # fmt: skip
TYPES = {
    np.float16: 1e-5, ml_dtypes.bfloat16: 1e-5, np.float64: 1e-13, np.complex64: 1e-5, np.int8: 0.0,
    ml_dtypes.float8_e4m3fn: 1e-3,
}  # fmt: skip
#: Sums in FP32, the rounding of operands to TF32, and to bfloat16.
_FP32, _BF16 = MODES["fp32"], MODES["bf16"]
_TF32_MATH = 3

#: Whether a step worked, and what it found.
Found = tuple[bool, str]


class Contact:
    """The steps on a GPU, real or in software."""

    def __init__(self, gpu: Any, side: int, seed: int) -> None:
        self.gpu, self.side = gpu, side
        self.rng = np.random.default_rng(seed)
        self.a, self.b = self.rng.standard_normal((2, side, side), np.float32)
        self.x, self.y = gpu.put(self.a), gpu.put(self.b)
        self.true = self.a.astype(np.float64) @ self.b

    def error(self, result: Any, true: Any = None) -> float:
        true = self.true if true is None else true
        found = self.gpu.get(result)
        wide = found.astype(true.dtype)
        return float(np.linalg.norm(wide - true) / np.linalg.norm(true))

    def info(self) -> Found:
        found = lowprec.info()["gpu"]
        return bool(found["used"]), str(found)[:300]

    def mode(self, mode: str) -> Found:
        error = self.error(lowprec.matmul(self.x, self.y, math_mode=mode))
        # Fallbacks and failed algorithms are part of the plan once a product has run.
        found = dict(lowprec.plan(self.x, self.y, math_mode=mode).algorithm)
        words = [
            f"{name}: {str(found[name])[:100]}"
            for name in ("units", "fallback", "failed")
            if name in found
        ]
        return error < MODES[mode], "; ".join([f"error {error:.1e}", *words])

    def element_type(self, dtype: Any) -> Found:
        a, b = self.a.astype(dtype), self.b.astype(dtype)
        narrow = a.itemsize < 4 and dtype is not np.int8
        result = lowprec.matmul(
            self.gpu.put(a), self.gpu.put(b), out_dtype="float32" if narrow else None
        )
        wide = np.complex128 if a.dtype.kind == "c" else np.float64
        error = self.error(result, a.astype(wide) @ b.astype(wide))
        return error <= TYPES[dtype], f"error {error:.1e}"

    def epilogue(self) -> Found:
        bias, c = (
            self.rng.standard_normal(s).astype(np.float32) for s in (self.side, self.true.shape)
        )
        result = lowprec.matmul(
            self.x,
            self.y,
            bias=self.gpu.put(bias),
            c=self.gpu.put(c),
            beta=0.5,
            alpha=2.0,
            activation="relu",
        )
        error = self.error(result, np.maximum(2 * self.true + 0.5 * c + bias, 0))
        return error < _FP32, f"error {error:.1e}"

    def batch(self) -> Found:
        a, b = (self.rng.standard_normal(s).astype(np.float32) for s in ((5, 33, 70), (70, 19)))
        result = lowprec.matmul(self.gpu.put(a), self.gpu.put(b), math_mode="bf16")
        error = self.error(result, a.astype(np.float64) @ b)
        return error < _BF16, f"error {error:.1e}"

    def handle(self) -> Found:
        """Let the guard save a handle's math mode, set it to FP32, and restore it; multiply in each."""
        from cuda_backend.device_fixture import sgemm
        from lowprec.backends.cuda import bindings

        handle, out = lowprec.cublas_handle(), self.gpu.put(self.a)
        bindings.set_math_mode(handle, _TF32_MATH)
        modes, errors = [], []
        for scope in (contextlib.nullcontext, lowprec.fp32_guard, contextlib.nullcontext):
            with scope():
                modes.append(bindings.math_mode(handle))
                sgemm(handle, self.x, self.y, out)
                errors.append(self.error(out))
        bindings.set_math_mode(handle, 0)
        worked = modes == [_TF32_MATH, 0, _TF32_MATH] and errors[1] < _FP32
        words = ", ".join(f"{error:.1e}" for error in errors)
        return worked, f"sgemm before, in and after the guard: math modes {modes}, errors {words}"

    def autotune(self) -> Found:
        found = lowprec.autotune(self.x, self.y, math_mode="bf16", candidates=4)
        return len(
            found.timed
        ) > 0, f"{len(found.timed)} timed, {found.speedup:.2f} times the first choice"

    # -- with PyTorch on a GPU ----------------------------------------------------------------

    def guard(self) -> Found:
        from gpu.speed import torch_switches

        with torch_switches(self.gpu.torch, "tf32"):
            loose = self.error(self.x @ self.y)
            with lowprec.fp32_guard():
                tight = self.error(self.x @ self.y)
        return (
            tight < _FP32,
            f"torch.matmul: {loose:.1e} with TF32 allowed, {tight:.1e} in the guard",
        )

    def graph(self) -> Found:
        cuda = self.gpu.torch.cuda
        for _ in range(2):
            lowprec.matmul(self.x, self.y, math_mode="bf16")
        graph = cuda.CUDAGraph()
        with cuda.graph(graph):
            result = lowprec.matmul(self.x, self.y, math_mode="bf16")
        graph.replay()
        error = self.error(result)
        return error < _BF16, f"captured and replayed, error {error:.1e}"

    def gradients(self) -> Found:
        a, b = (x.clone().requires_grad_() for x in (self.x, self.y))
        lowprec.matmul(a, b, math_mode="bf16").sum().backward()
        error = self.error(a.grad, np.ones_like(self.true) @ self.b.T)
        return error < _BF16, f"error {error:.1e}"

    def intercept(self) -> Found:
        from lowprec.torch import intercept

        layer = self.gpu.torch.nn.Linear(self.side, self.side, device="cuda")
        with intercept("bf16") as seen:
            layer(self.x).sum().backward()
        report = seen.report()
        return len(report.taken) == 2, str(report).splitlines()[0]

    def solve(self) -> Found:
        a = self.x.double() + self.side * self.gpu.torch.eye(self.side, device="cuda")
        solution = lowprec.linalg.solve(a, self.y.double())
        error = self.error(a @ solution, self.b.astype(np.float64))
        return error < 1e-10, f"residual {error:.1e}"

    def library(self, name: str) -> Found:
        if name == "cupy":
            import cupy

            put, get = cupy.asarray, cupy.asnumpy
        else:
            import jax

            put, get = jax.numpy.asarray, np.asarray
        result = lowprec.matmul(put(self.a), put(self.b), math_mode="bf16")
        error = float(np.linalg.norm(get(result) - self.true) / np.linalg.norm(self.true))
        return error < _BF16, f"{type(result).__name__}, error {error:.1e}"

    def steps(self, *, is_real: bool) -> Iterator[tuple[str, Callable[[], Found]]]:
        for mode in MODES:
            yield f"mode {mode}", partial(self.mode, mode)
        yield "lowprec.info", self.info
        yield "cublas_handle under fp32_guard", self.handle
        for dtype in TYPES:
            yield f"type {np.dtype(dtype).name}", partial(self.element_type, dtype)
        yield "alpha, c, bias and relu", self.epilogue
        yield "a batch of odd extents", self.batch
        yield "autotune", self.autotune
        if is_real:
            yield "torch.matmul under fp32_guard", self.guard
            yield "torch.cuda.graph", self.graph
            yield "gradients", self.gradients
            yield "intercept", self.intercept
            yield "linalg.solve", self.solve
            yield "CuPy", partial(self.library, "cupy")
            yield "JAX", partial(self.library, "jax")


def run(
    part: Part, options: Options, steps: Iterator[tuple[str, Callable[[], Found]]], device: str
) -> None:
    """Run the steps in the remaining time; a step that fails is a row with its error."""
    for name, step in part.in_time(steps, options):
        begin = time.monotonic()
        try:
            ok, note = step()
        except ImportError as error:  # a library that is not installed shows nothing
            ok, note = None, short(error)
        except Exception as error:  # noqa: BLE001 - the others run all the same
            ok, note = False, short(error)
            traceback.print_exc()
        part.row(
            ok=ok, step=name, device=device, seconds=round(time.monotonic() - begin, 2), note=note
        )


def failure(result: dict[str, Any]) -> str:
    """Return why the report should not go on; an empty string if the essential steps worked."""
    if result["not_run"]:
        return ""
    rows = {row["step"]: row for row in result["rows"] if "step" in row}
    for step in ESSENTIAL:
        row = rows.get(step)
        if row is None:
            return f"{step} has not run: {result['error'] or 'no time was left'}"
        if not row["ok"]:
            return f"{step} failed: {row['note']}"
    return ""


def lines(result: dict[str, Any]) -> list[str]:
    """Return a line a step, for the terminal."""
    words = {True: "ok  ", False: "FAIL", None: "-   "}
    return [
        f"{words[r['ok']]} {r['seconds']:5.1f} s  {r['step']}: {r['note']}"
        for r in result["rows"]
        if "step" in r
    ]


def smoke(part: Part, options: Options) -> None:
    from cuda_backend.device_fixture import TorchGpu

    is_real = arrays.software is None
    # From 512 on cuBLAS was seen to run TF32 on tensor cores.
    contact = Contact(arrays.software or TorchGpu(), 512 if is_real else 64, options.seed)
    run(part, options, contact.steps(is_real=is_real), "gpu" if is_real else "software")
