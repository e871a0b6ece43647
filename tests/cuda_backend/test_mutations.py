"""Mistakes that such a backend can make, each made on purpose: the checks below must notice every one.

=====================================  ==============================================================
mistake                                noticed by
=====================================  ==============================================================
lda and ldb exchanged                  a view inside a larger array
a transpose dropped or added           square operands that are no symmetric matrices
the operands not exchanged             square operands that are no symmetric matrices
a wrong batch stride                   a batch
a batch cut short                      a batch without one stride
a wrong compute type                   full FP32's error bound; cuBLASLt's table of types
a wrong scale type                     cuBLASLt's table of types
bias on the wrong axis                 a column-major result with a bias
missing beta                           an addend
missing alpha                          a factor
an epilogue dropped                    relu
sums in the result's 16-bit type       the bound of a bfloat16 product
alignment promised that is not there   operands at odd addresses
a scale's exponent not taken back      float32 operands in ``fp16``
=====================================  ==============================================================
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import lowprec
from cuda_backend.device_fixture import Gpu
from lowprec import modes
from lowprec.backends.cuda import executor, invocation, staging
from lowprec.core import executors
from lowprec.formats import ComputeType, DType
from lowprec.modes import MathMode
from lowprec.planning import lowering, planner
from lowprec.planning.calls import CublasLtCall
from support import oracles

BF16 = np.dtype(ml_dtypes.bfloat16)
F32 = np.dtype(np.float32)


# -- the checks -----------------------------------------------------------------------------------


def draw(seed: int, *shape: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).integers(-3, 4, shape).astype(F32)


def exact(gpu: Gpu, a: Any, b: Any, true: Any = None, **keywords: Any) -> None:
    found = gpu.get(lowprec.matmul(gpu.put(a), gpu.put(b), **keywords))
    true = oracles.product(a, b) if true is None else true
    np.testing.assert_array_equal(oracles.widen(found), true)


def check_square(gpu: Gpu) -> None:
    exact(gpu, draw(0, 16, 16), draw(1, 16, 16))


def check_views(gpu: Gpu) -> None:
    exact(gpu, draw(0, 20, 30)[2:18, 3:19], draw(1, 16, 16), true=None)


def check_transposes(gpu: Gpu) -> None:
    exact(gpu, draw(0, 16, 16).T, draw(1, 16, 16))
    exact(gpu, draw(0, 16, 16), draw(1, 16, 16).T)


def check_batches(gpu: Gpu) -> None:
    exact(gpu, draw(0, 3, 16, 16), draw(1, 3, 16, 16))
    exact(gpu, draw(0, 3, 2, 16, 16).swapaxes(0, 1), draw(1, 2, 3, 16, 16))


def check_addends(gpu: Gpu) -> None:
    a, b, c = draw(0, 16, 16), draw(1, 16, 16), draw(2, 16, 16)
    exact(gpu, a, b, oracles.product(a, b) + 2.0 * c, c=gpu.put(c), beta=2.0)
    exact(gpu, a, b, -0.5 * oracles.product(a, b), alpha=-0.5)


def check_bias(gpu: Gpu) -> None:
    a, b, bias = draw(0, 16, 16), draw(1, 16, 16), draw(2, 16)
    true = np.maximum(oracles.product(a, b) + bias, 0)
    exact(gpu, a, b, true, bias=gpu.put(bias), activation="relu")
    out = gpu.transpose(gpu.put(np.zeros((16, 16), F32)))
    exact(gpu, a, b, true, bias=gpu.put(bias), activation="relu", out=out)


def check_bounds(gpu: Gpu) -> None:
    generator = np.random.default_rng(5)
    for dtype, k in ((F32, 64), (BF16, 2048)):
        a, b = (generator.standard_normal(s).astype(dtype) for s in ((16, k), (k, 16)))
        x, y = gpu.put(a), gpu.put(b)
        bound = lowprec.plan(x, y).bound
        found = oracles.widen(gpu.get(lowprec.matmul(x, y)))
        norms = [float(np.linalg.norm(oracles.widen(v))) for v in (a, b)]
        true = oracles.product(a, b)
        # An element is rounded to bfloat16 once: then its error is half a spacing and what float32 sums add.
        spacing = 2.0**-8 * np.abs(true) if dtype == BF16 else 0.0
        magnitudes = np.abs(oracles.widen(a)) @ np.abs(oracles.widen(b))
        assert np.all(np.abs(found - true) <= spacing + k * 2.0**-24 * magnitudes)
        assert np.linalg.norm(found - true) <= bound.frobenius(*norms, 16, 16)


def check_odd_addresses(gpu: Gpu) -> None:
    # Rows at regular steps of 64 bytes, from an address that is a multiple of 2 alone.
    wide = [draw(seed, 16, 32).astype(BF16)[:, 1:17] for seed in (0, 1)]
    exact(gpu, *wide)


def check_scaling(gpu: Gpu) -> None:
    exact(gpu, draw(0, 16, 16) * 2.0**20, draw(1, 16, 16) * 2.0**-20, math_mode="fp16")


CHECKS = [value for name, value in sorted(globals().items()) if name.startswith("check_")]


# -- the mistakes ---------------------------------------------------------------------------------


def swapped_leading_dimensions(call: CublasLtCall) -> CublasLtCall:
    first, second = call.first, call.second
    return replace(
        call,
        first=replace(first, leading_dimension=second.leading_dimension),
        second=replace(second, leading_dimension=first.leading_dimension),
    )


def other(op: str) -> Any:
    return "N" if op == "T" else "T"


def longer(x: Any) -> Any:
    return replace(x, batch_stride=x.batch_stride + 1 if x.batch_stride else 0)


#: Mistakes in what cuBLASLt is asked for.
IN_THE_CALL: dict[str, Callable[[CublasLtCall], CublasLtCall]] = {
    "lda and ldb exchanged": swapped_leading_dimensions,
    "transpose of the first": lambda c: replace(c, op_first=other(c.op_first)),
    "transpose of the second": lambda c: replace(c, op_second=other(c.op_second)),
    "operands not exchanged": lambda c: replace(c, swapped=not c.swapped),
    "batch stride of the first": lambda c: replace(c, first=longer(c.first)),
    "batch stride of the second": lambda c: replace(c, second=longer(c.second)),
    "batch stride of d": lambda c: replace(c, d=longer(c.d)),
    "batch cut short": lambda c: replace(c, offsets=c.offsets[:1]),
    "TF32 for full FP32": lambda c: replace(
        c,
        compute_type=ComputeType.COMPUTE_32F_FAST_TF32 if c.compute_type is ComputeType.COMPUTE_32F else c.compute_type,
    ),
    "compute type of another type": lambda c: replace(c, compute_type=ComputeType.COMPUTE_64F),
    "scale type": lambda c: replace(c, scale_dtype=DType.FLOAT64),
    "missing beta": lambda c: replace(c, c=None),
    "epilogue dropped": lambda c: replace(c, epilogue="DEFAULT"),
    "activation dropped": lambda c: replace(c, epilogue=c.epilogue.replace("RELU_BIAS", "BIAS")),
}


def mistake_in_the_call(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    lower = lowering.lower

    def mistaken(*args: Any, **kwargs: Any) -> Any:
        return IN_THE_CALL[name](lower(*args, **kwargs))

    monkeypatch.setattr(planner, "_lower", lambda: mistaken)
    monkeypatch.setattr(executor, "lower", mistaken)  # it lowers again where cuBLASLt refuses


def bias_on_the_wrong_axis(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lowering, "_reasons_of_epilogue", lambda terms: [])


def missing_alpha(monkeypatch: pytest.MonkeyPatch) -> None:
    number = invocation.number
    monkeypatch.setattr(invocation, "number", lambda value, dtype: number(1.0 if value == -0.5 else value, dtype))


def sums_in_any_type(monkeypatch: pytest.MonkeyPatch) -> None:
    make = invocation.bindings.preference
    every = ["INPLACE", "COMPUTE_TYPE", "OUTPUT_TYPE"]
    monkeypatch.setattr(invocation.bindings, "preference", lambda space, aligned, _: make(space, aligned, every))


def promised_alignment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(executor, "alignment_of", lambda *addresses: 256)


def exponents_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    make = staging.epilogue
    monkeypatch.setattr(staging, "epilogue", lambda *x: replace(make(*x), scaled=False))


#: Mistakes elsewhere.
ELSEWHERE: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "bias on the wrong axis": bias_on_the_wrong_axis,
    "missing alpha": missing_alpha,
    "sums in the result's type": sums_in_any_type,
    "alignment promised": promised_alignment,
    "exponents kept": exponents_kept,
}


@pytest.fixture(autouse=True)
def plans_of_this_test() -> Any:
    """No plan of another test is used, and none of this one's is left over."""
    executors.clear_caches()
    yield
    executors.clear_caches()


def noticed(gpu: Gpu) -> list[str]:
    """Return the checks that fail, by a wrong result or a refusal, and the refusals that another way got around."""
    found = []
    for check in CHECKS:
        try:
            check(gpu)
        except (AssertionError, lowprec.LowprecError):
            found.append(check.__name__)
            gpu.forgive()
    return [*found, *(refusal for _, refusal in executor._refused.values())]


def test_without_a_mistake_nothing_is_noticed(software: Gpu) -> None:
    assert noticed(software) == []


@pytest.mark.parametrize("name", IN_THE_CALL)
def test_a_mistake_in_the_call(software: Gpu, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    mistake_in_the_call(monkeypatch, name)
    assert noticed(software)


@pytest.mark.parametrize("name", ELSEWHERE)
def test_a_mistake_of_another_kind(software: Gpu, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    ELSEWHERE[name](monkeypatch)
    assert noticed(software)


# -- one source of facts --------------------------------------------------------------------------


def test_the_plan_and_the_descriptor_follow_the_mode_row(software: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    make = invocation.bindings.create

    def recorded(kind: str, arguments: Any, attributes: Any) -> Any:
        if kind == "matmul_desc":
            made.append(arguments[0])
        return make(kind, arguments, attributes)

    monkeypatch.setattr(invocation.bindings, "create", recorded)
    a, b = software.put(draw(0, 16, 16)), software.put(draw(1, 16, 16))
    for compute_type in (ComputeType.COMPUTE_32F_FAST_TF32, ComputeType.COMPUTE_32F_PEDANTIC):
        row = replace(modes.row(MathMode.TF32), compute_type=compute_type)
        monkeypatch.setitem(modes._ROWS, MathMode.TF32, row)
        executors.clear_caches()
        made.clear()
        lowprec.matmul(a, b, math_mode="tf32")
        assert lowprec.plan(a, b, math_mode="tf32").compute_type.startswith(compute_type.name)
        assert set(made) == {compute_type.value}
