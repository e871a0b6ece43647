"""The parts of `benchmarks/gpu_report.py` that call cuBLASLt themselves, on the software one.

The answers of the software are known, so those of the report are checked, too.
"""

import importlib
import math
import sys
from types import SimpleNamespace

import numpy as np
import pytest

import lowprec
from lowprec.backends.cuda import compiling, libraries
from lowprec.modes import available_modes, row
from support import benchmark_modules
from support.kernel_variants import Variant, every_variant

GPU_MODES = [str(mode) for mode in available_modes() if not row(mode).quantizes]


@pytest.fixture
def load(software):
    """Import a module of the report on a fresh software CUDA."""
    with benchmark_modules.imports() as load:
        yield load
        raw = sys.modules.get("gpu.raw")
        if raw is not None and raw.handle.cache_info().currsize:
            libraries.libraries().cublas_lt.destroy(raw.handle())


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
    refused, *offered = product.algorithms(4)
    with pytest.raises(Exception, match="the first algorithm"):
        product.run(refused)
    assert product.first()[0] in offered
    for algorithm in offered:
        np.testing.assert_allclose(product.run(algorithm), a @ b, rtol=1e-12, atol=1e-12)
        assert raw.described(algorithm)["units"] in ("DMMA", "FMA")


def test_rounding(rows):
    rules = {(r["compute_type"], r["rule"]) for r in rows("rounding")}
    assert rules == {
        ("COMPUTE_32F_FAST_TF32", "to nearest, ties away from zero"),
        ("COMPUTE_32F", "not rounded"),
    }


def test_sums_in_16_bits_are_distinguished(load, software, tmp_path):
    software.software.switches.first_algorithm = False  # it has such sums
    parts, numerics = load("gpu.parts"), load("gpu.numerics")
    part = parts.Part(tmp_path / "part.json")
    for schemes in (numerics.FULL_REDUCTIONS, ("MASK",)):
        numerics._split(part, parts.Options(quick=True, seed=0), "float16", "float16", schemes)
    narrow = [r for r in part.rows if r["reduction"] == "OUTPUT_TYPE" and r["split_k"] > 1]
    assert {(r["exact"], *r["allowed"]) for r in narrow} == {(False, "MASK")}


def test_accumulation(rows):
    found = rows("accumulation")
    assert not [r for r in found if r["ok"] is False]
    refused = [r["error"] for r in found if "error" in r]
    assert refused
    assert all("the first algorithm" in text for text in refused)
    found = [r for r in found if "error" not in r]
    models = [r for r in found if r["question"] == "tensor core"]
    assert {(r["dtype"], r["terms"], r["tensor_cores"]) for r in models} == {
        (dtype, terms, True) for dtype in ("bfloat16", "float16", "float32") for terms in (16, 48)
    }
    # The software adds exactly and rounds to nearest, which no tensor core does.
    assert all(r["rule"] == ["none of these"] for r in models)
    split = [r for r in found if r["question"] == "split" and r["split_k"] > 1]
    assert {r["exact"] for r in split if r["reduction"] == "COMPUTE_TYPE"} == {True}


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
        assert (
            error / 2 < found[what]["relative_error"] < 2 * error
            or found[what]["relative_error"] < error == 1e-6
        )


class Loaded:
    """Code that no driver has looked at."""

    def __init__(self, code):
        self.code = code

    def get_kernel(self, name):
        return self


# -- a first contact ------------------------------------------------------------------------------


def test_steps_survive_each_other_and_essential_ones_end_the_report(
    load, rows, software, monkeypatch
):
    smoke, arrays = load("gpu.smoke"), load("gpu.arrays")
    monkeypatch.setattr(arrays, "software", software)
    found = rows("smoke")
    assert [r["step"] for r in found if not r["ok"]] == []
    assert {r["device"] for r in found} == {"software"}
    assert [r["step"] for r in found[:2]] == list(smoke.ESSENTIAL)
    assert smoke.failure({"not_run": "", "rows": found}) == ""
    real = lowprec.matmul
    for mode, broken in {"fp32": False, "int8": True}.items():

        def matmul(*given, math_mode=None, mode=mode, **more):
            if math_mode == mode:
                raise OSError("the device is gone")
            return real(*given, math_mode=math_mode, **more)

        monkeypatch.setattr(lowprec, "matmul", matmul)
        worse = rows("smoke")
        assert len(worse) == len(found)
        assert [r["step"] for r in worse if not r["ok"]] == [f"mode {mode}"]
        failure = smoke.failure({"not_run": "", "rows": worse})
        assert failure == ("" if broken else "mode fp32 failed: OSError: the device is gone")
    crashed = {"not_run": "", "rows": found[:1], "error": "exit status -11"}
    assert smoke.failure(crashed) == "mode bf16 has not run: exit status -11"


# -- kernels --------------------------------------------------------------------------------------


def test_compiled_kernels_are_those_that_parts_and_tests_look_for(load, tmp_path, monkeypatch):
    """Processes fill the cache of the variable; the backend finds each kernel there and loads it."""
    filler, part = load("gpu.compiling"), load("gpu.parts").Part(tmp_path / "part.json")
    real = importlib.import_module("cuda.core")
    monkeypatch.setenv("LOWPREC_CACHE_DIR", str(tmp_path))
    chosen = [*every_variant()[::200], Variant("broken", "no C++", {}, 0)]
    filler.fill_in_processes(part, "sm_90", chosen, 2, math.inf)
    errors = [r["error"] for r in part.rows if "error" in r]
    if all("nvrtc" in text.lower() for text in errors[1:]) and len(errors) == len(chosen):
        pytest.skip("NVRTC is not installed")
    assert len(errors) == 1
    assert errors[0].startswith("broken: BackendError: kernel broken was not compiled for sm_90")
    assert part.rows[-1]["compiled"] == len(chosen) - 1
    monkeypatch.setattr(compiling, "_compiled", lambda *_: pytest.fail("it is compiled again"))
    before = libraries.use(SimpleNamespace(core=real))
    try:
        monkeypatch.setattr(real, "ObjectCode", SimpleNamespace(from_cubin=Loaded))
        assert compiling._load("sm_90", chosen[0].name, chosen[0].source).code[:4] == b"\x7fELF"
    finally:
        libraries.use(before)


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
