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
        c = rng.standard_normal((24, 16))
        found = product.run(algorithm, alpha=2.0, beta=-1.0, c=c)
        np.testing.assert_allclose(found, 2 * (a @ b) - c, rtol=1e-12, atol=1e-12)
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
    added = [r for r in found if r["question"] == "beta"]
    assert {r["rule"] for r in added if r["rank"] == 0} == {"to nearest"}
    split = [r for r in found if r["question"] == "split" and r["split_k"] > 1]
    assert {r["exact"] for r in split if r["reduction"] == "COMPUTE_TYPE"} == {True}
    # The report distinguishes sums in 16 bits from sums in FP32.
    narrow = [r for r in split if r["reduction"] == "OUTPUT_TYPE" and r["out_dtype"] != "float32"]
    assert {r["exact"] for r in narrow} == {False}
    assert all(r["allowed"] == ["MASK"] for r in narrow)


def test_compute_types_and_handles(load):
    found = {r["what"]: r for r in load("gpu.numerics").probe(0)}
    assert {what: r["level"] for what, r in found.items()} == {
        "COMPUTE_32F": "float32",
        "COMPUTE_32F_PEDANTIC": "float32",
        "COMPUTE_32F_FAST_TF32": "11 bits (TF32 or float16)",
        "COMPUTE_32F_FAST_16F": "11 bits (TF32 or float16)",
        "COMPUTE_32F_FAST_16BF": "8 bits (bfloat16)",
        "handle, DEFAULT_MATH": "float32",
        "handle, PEDANTIC_MATH": "float32",
        "handle, TF32_TENSOR_OP_MATH": "11 bits (TF32 or float16)",
    }
    # A float32 beyond float16's range distinguishes the two with 11 bits.
    beyond = {what: r["beyond_float16"] for what, r in found.items() if "FAST" in what}
    assert beyond["COMPUTE_32F_FAST_TF32"] is True
    assert beyond["COMPUTE_32F_FAST_16F"] is False


def test_epilogues(load):
    acceptance = load("gpu.acceptance")
    for pair in acceptance.PAIRS:
        scaled = [(), (0.5, 4.0)] if "float8" in pair.a else [()]
        for scales in scaled:
            taken = {e: acceptance.try_epilogue(pair, e, scales, 0)["ok"] for e in acceptance.EPILOGUES}
            assert False not in taken.values(), (pair, scales)
            refused = pair.a == pair.b == "float8_e5m2"
            assert taken["DEFAULT"] is (None if refused else True), (pair, scales)
            if pair.a in ("bfloat16", "float16", "float8_e4m3fn"):
                assert set(taken.values()) == {True}, (pair, scales)


def test_stream_handles(load):
    streams = load("gpu.acceptance")
    for step in ("copy and event", "kernel", "cublasLtMatmul"):
        for handle in streams.HANDLES.values():
            assert streams.STEPS[step](handle, 0) is True, (step, handle)


def test_a_kernel_launched_as_a_function(rows):
    first, second = rows("launch")
    assert first["ok"] is True
    # The software has no other way.
    assert second["ok"] is None
    assert "cuKernelGetFunction" in second["error"]


def test_packing_rates(load, software):
    packing, clock = load("gpu.packing"), load("gpu.clock").HostClock()
    # What is queued takes time once it runs.
    queued = clock.time
    clock.time = lambda work, behind_s: queued(lambda: (work(), software.drain()), behind_s)
    found = list(packing.packed(clock, 32, 0))
    assert [row["name"] for row in found] == ["copy", *packing.PACKINGS]
    assert all(row["gigabytes_per_s"] > 0 for row in found), found


# -- through lowprec ------------------------------------------------------------------------------


def test_products(load, software):
    correctness = load("gpu.correctness")
    found = [correctness.check(software, case, 16, 0) for case in correctness.small_cases()]
    assert [r for r in found if r["ok"] is not True] == []
    assert {r["mode"] for r in found} == {None, *GPU_MODES}


def test_shapes(load, software):
    correctness = load("gpu.correctness")
    found = [correctness.check_shape(software, case, 0) for case in correctness.shape_cases()]
    assert [r for r in found if r["ok"] is not True] == []
    assert {tuple(r["scales"]) for r in found} == {(), (0.5, 4.0)}


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
