"""Mistakes of a backend, made on purpose: the software CUDA must refuse each one or compute a wrong result."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import lowprec
from cuda_backend.device_fixture import SoftwareGpu
from lowprec import modes
from lowprec.backends.cuda import executor, invocation, staging
from lowprec.core import executors
from lowprec.formats import ComputeType, DType
from lowprec.modes import MathMode
from lowprec.planning import lowering, planner
from lowprec.planning.calls import CublasLtCall
from support import oracles

BF16 = np.dtype(ml_dtypes.bfloat16)


def draw(seed: int, *shape: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).integers(-3, 4, shape).astype(np.float32)


A, B, C = draw(0, 16, 16), draw(1, 16, 16), draw(2, 16, 16)

#: Operands and arguments of exact products. Each mistake shows in at least one, or in :func:`errors_are_large`.
PRODUCTS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "square": (A, B, {}),
    "inside a larger array": (draw(0, 20, 30)[2:18, 3:19], B, {}),
    "a transposed": (A.T, B, {}),
    "b transposed": (A, B.T, {}),
    "a batch": (draw(0, 3, 16, 16), draw(1, 3, 16, 16), {}),
    "a batch without one stride": (draw(0, 3, 2, 16, 16).swapaxes(0, 1), draw(1, 2, 3, 16, 16), {}),
    "an addend": (A, B, {"c": C, "beta": 2.0}),
    "a factor": (A, B, {"alpha": -0.5}),
    "bias and relu": (A, B, {"bias": C[0], "activation": "relu"}),
    "a column-major result": (A, B, {"bias": C[0], "activation": "relu", "out": np.zeros((16, 16), np.float32).T}),
    "odd addresses": (*(draw(seed, 16, 32).astype(BF16)[:, 1:17] for seed in (0, 1)), {}),
    "scaled by fp16": (A * 2.0**20, B * 2.0**-20, {"math_mode": "fp16"}),
}


def is_exact(gpu: SoftwareGpu, a: Any, b: Any, given: dict[str, Any]) -> bool:
    on_gpu = {name: gpu.put(x) if isinstance(x, np.ndarray) else x for name, x in given.items()}
    found = gpu.get(lowprec.matmul(gpu.put(a), gpu.put(b), **on_gpu))
    true = given.get("alpha", 1.0) * oracles.product(a, b) + given.get("beta", 0.0) * given.get("c", 0.0)
    true = true + given.get("bias", 0.0)
    return np.array_equal(oracles.widen(found), np.maximum(true, 0) if "activation" in given else true)


def errors_are_large(gpu: SoftwareGpu) -> bool:
    """Whether errors exceed the bound of float32 sums, with one rounding to the result's type."""
    rng = np.random.default_rng(5)
    large = False
    for dtype, k in ((np.dtype(np.float32), 64), (BF16, 2048)):
        a, b = (rng.standard_normal(s).astype(dtype) for s in ((16, k), (k, 16)))
        found, true = oracles.widen(gpu.get(lowprec.matmul(gpu.put(a), gpu.put(b)))), oracles.product(a, b)
        # Half a spacing for the rounding to bfloat16, and the bound of recursive summation.
        spacing = 2.0**-8 * np.abs(true) if dtype == BF16 else 0.0
        magnitudes = np.abs(oracles.widen(a)) @ np.abs(oracles.widen(b))
        large |= bool(np.any(np.abs(found - true) > spacing + k * 2.0**-24 * magnitudes))
    return large


def noticed(gpu: SoftwareGpu) -> list[str]:
    """Return the products that are wrong or refused, and the refusals that lowprec works around."""
    found = []
    checks: dict[str, Callable[[], bool]] = {
        name: lambda x=x: is_exact(gpu, *x)  # type: ignore[misc]
        for name, x in PRODUCTS.items()
    }
    for name, check in {**checks, "bounds": lambda: not errors_are_large(gpu)}.items():
        try:
            is_right = check()
        except lowprec.LowprecError:
            is_right = False
        if not is_right:
            found.append(name)
            gpu.forgive()
    return [*found, *(refusal for _, refusal in executor._refused.values())]


# -- mistakes -------------------------------------------------------------------------------------


def other(op: str) -> Any:
    return "N" if op == "T" else "T"


def longer(x: Any) -> Any:
    return replace(x, batch_stride=x.batch_stride + 1 if x.batch_stride else 0)


def swapped_leading_dimensions(call: CublasLtCall) -> CublasLtCall:
    first, second = call.first.leading_dimension, call.second.leading_dimension
    return replace(
        call, first=replace(call.first, leading_dimension=second), second=replace(call.second, leading_dimension=first)
    )


def tf32_for_fp32(call: CublasLtCall) -> CublasLtCall:
    wrong = {ComputeType.COMPUTE_32F: ComputeType.COMPUTE_32F_FAST_TF32}
    return replace(call, compute_type=wrong.get(call.compute_type, call.compute_type))


#: Mistakes in the arguments of cuBLASLt.
IN_THE_CALL: dict[str, Callable[[CublasLtCall], CublasLtCall]] = {
    "lda and ldb exchanged": swapped_leading_dimensions,
    "transpose of the first": lambda c: replace(c, op_first=other(c.op_first)),
    "transpose of the second": lambda c: replace(c, op_second=other(c.op_second)),
    "operands not exchanged": lambda c: replace(c, swapped=not c.swapped),
    "batch stride of the first": lambda c: replace(c, first=longer(c.first)),
    "batch stride of the second": lambda c: replace(c, second=longer(c.second)),
    "batch stride of d": lambda c: replace(c, d=longer(c.d)),
    "batch cut short": lambda c: replace(c, offsets=c.offsets[:1]),
    "TF32 for full FP32": tf32_for_fp32,
    "compute type of another type": lambda c: replace(c, compute_type=ComputeType.COMPUTE_64F),
    "scale type": lambda c: replace(c, scale_dtype=DType.FLOAT64),
    "missing beta": lambda c: replace(c, c=None),
    "epilogue dropped": lambda c: replace(c, epilogue="DEFAULT"),
    "activation dropped": lambda c: replace(c, epilogue=c.epilogue.replace("RELU_BIAS", "BIAS")),
}
_number, _preference, _epilogue = invocation.number, invocation.bindings.preference, staging.epilogue
_EVERY_SCHEME = ["INPLACE", "COMPUTE_TYPE", "OUTPUT_TYPE"]

#: Mistakes in other functions: module, name, replacement.
IN_A_FUNCTION: dict[str, tuple[Any, str, Callable[..., Any]]] = {
    "bias on the wrong axis": (lowering, "_reasons_of_epilogue", lambda terms: []),
    "missing alpha": (invocation, "number", lambda value, dtype: _number(1.0 if value == -0.5 else value, dtype)),
    "sums in the result's type": (
        invocation.bindings, "preference", lambda space, aligned, _: _preference(space, aligned, _EVERY_SCHEME)
    ),
    "alignment promised": (executor, "alignment_of", lambda *addresses: 256),
    "exponents kept": (staging, "epilogue", lambda *x: replace(_epilogue(*x), scaled=False)),
}  # fmt: skip


@pytest.fixture(autouse=True)
def plans_of_this_test() -> Iterator[None]:
    """No plan is shared with another test."""
    executors.clear_caches()
    yield
    executors.clear_caches()


def test_right_products_are_right(software: SoftwareGpu) -> None:
    assert noticed(software) == []


@pytest.mark.parametrize("name", [*IN_THE_CALL, *IN_A_FUNCTION])
def test_a_mistake_is_noticed(software: SoftwareGpu, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    if name in IN_A_FUNCTION:
        monkeypatch.setattr(*IN_A_FUNCTION[name])
    else:
        lower = lowering.lower

        def mistaken(*args: Any, **kwargs: Any) -> Any:
            return IN_THE_CALL[name](lower(*args, **kwargs))

        monkeypatch.setattr(planner, "_lower", lambda: mistaken)
        monkeypatch.setattr(executor, "lower", mistaken)  # it lowers again where cuBLASLt refuses
    assert noticed(software)


def test_the_plan_and_the_descriptor_follow_the_mode_row(
    software: SoftwareGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[int] = []
    make = invocation.bindings.create

    def recorded(kind: str, arguments: Any, attributes: Any) -> Any:
        if kind == "matmul_desc":
            made.append(arguments[0])
        return make(kind, arguments, attributes)

    monkeypatch.setattr(invocation.bindings, "create", recorded)
    a, b = software.put(A), software.put(B)
    for compute_type in (ComputeType.COMPUTE_32F_FAST_TF32, ComputeType.COMPUTE_32F_PEDANTIC):
        row = replace(modes.row(MathMode.TF32), compute_type=compute_type)
        monkeypatch.setitem(modes._ROWS, MathMode.TF32, row)
        executors.clear_caches()
        made.clear()
        lowprec.matmul(a, b, math_mode="tf32")
        assert lowprec.plan(a, b, math_mode="tf32").compute_type.startswith(compute_type.name)
        assert set(made) == {compute_type.value}
