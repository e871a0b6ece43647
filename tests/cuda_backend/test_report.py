"""The parts of `benchmarks/gpu_report.py` that call cuBLASLt themselves, on the software one.

The answers of the software are known, so those of the report are checked, too.
"""

import sys

import numpy as np
import pytest

from lowprec.backends.cuda import bindings
from lowprec.modes import available_modes, row
from software_cuda import Switches
from support import benchmark_modules

GPU_MODES = [str(mode) for mode in available_modes() if not row(mode).quantizes]


@pytest.fixture
def load(software):
    """Import a module of the report on a fresh software CUDA."""
    # The report calls cuBLASLt itself, to learn what it refuses.
    software.software.recorder.switches = Switches()
    with benchmark_modules.imports() as load:
        yield load
        raw = sys.modules.get("gpu.raw")
        if raw is not None and raw.handle.cache_info().currsize:
            bindings.destroy_handle(raw.handle())


@pytest.fixture
def rows(load, tmp_path):
    def run(name):
        parts = load("gpu.parts")
        part = parts.Part(tmp_path / "part.json")
        parts.runner(name)(part, parts.Options(quick=True, seed=0))
        return part.rows

    return run


def test_a_product(load, rng):
    raw = load("gpu.raw")
    a, b = rng.standard_normal((24, 40)), rng.standard_normal((40, 16))
    product = raw.LtProduct(a, b, compute="COMPUTE_64F", out_dtype="float64", scale_dtype="float64")
    for algorithm in product.algorithms(4):
        np.testing.assert_allclose(product.run(algorithm), a @ b, rtol=1e-12, atol=1e-12)
        assert raw.described(algorithm)["units"] in ("DMMA", "FMA")


def test_rounding(rows):
    rules = {(r["compute_type"], r["rule"]) for r in rows("rounding")}
    assert rules == {("COMPUTE_32F_FAST_TF32", "to nearest, ties away from zero"), ("COMPUTE_32F", "not rounded")}


def test_accumulation(rows):
    found = rows("accumulation")
    assert not [r for r in found if r["ok"] is False]
    models = [r for r in found if r["question"] == "tensor core"]
    assert {(r["dtype"], r["terms"], r["tensor_cores"]) for r in models} == {
        (dtype, terms, True) for dtype in ("bfloat16", "float16", "float32") for terms in (16, 48)
    }
    # The software adds exactly and rounds to nearest, which no tensor core does.
    assert all(r["rule"] == ["none of these"] for r in models)
    split = [r for r in found if r["question"] == "split" and r["split_k"] > 1]
    assert {r["exact"] for r in split if r["reduction"] == "COMPUTE_TYPE"} == {True}
    # The report distinguishes sums in 16 bits from sums in FP32.
    narrow = [r for r in split if r["reduction"] == "OUTPUT_TYPE" and r["out_dtype"] != "float32"]
    assert {r["exact"] for r in narrow} == {False}
    assert all(r["allowed"] == ["MASK"] for r in narrow)


def test_compute_types_and_handles(load):
    found = {r["what"]: r for r in load("gpu.numerics").probe(0)}
    tf32, fp16, bf16 = 2.8e-4, 2.8e-4, 2.3e-3  # 2^-p / sqrt(6) for each operand, rounded to p bits
    for what, error in {
        "COMPUTE_32F": 1e-6,
        "COMPUTE_32F_PEDANTIC": 1e-6,
        "COMPUTE_32F_FAST_TF32": tf32,
        "COMPUTE_32F_FAST_16F": fp16,
        "COMPUTE_32F_FAST_16BF": bf16,
        "handle, DEFAULT_MATH": 1e-6,
        "handle, PEDANTIC_MATH": 1e-6,
        "handle, TF32_TENSOR_OP_MATH": tf32,
    }.items():
        assert error / 2 < found[what]["relative_error"] < 2 * error or found[what]["relative_error"] < error == 1e-6


# -- through lowprec ------------------------------------------------------------------------------


def test_accuracy(load, software):
    correctness = load("gpu.correctness")
    found = [correctness.check(software, case, 32, 0) for case in correctness.cases((64,))]
    assert [r for r in found if r["ok"] is not True] == []
    kinds = {(r["dtypes"][0], r["mode"], r["distribution"]) for r in found}
    assert {("float8_e4m3fn", None, "normal"), ("float32", "fp16", "scaled")} <= kinds
    assert {mode for _, mode, _ in kinds} == {None, *GPU_MODES}
    # The flags that the claims are about.
    by_mode = {r["mode"]: r["tensor_cores"] for r in found if r["dtypes"] == ["float32"] * 2}
    assert (by_mode["fp32"], by_mode["tf32"], by_mode["bf16"]) == (False, True, True)
