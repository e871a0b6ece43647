"""Processors with fewer instruction sets than this one: LOWPREC_MAX_CPU_ISA hides them from lowprec, for tests."""

from __future__ import annotations

import ast
import json
import platform
from pathlib import Path

import pytest

from lowprec.backends.cpu import cpuinfo, openblas
from lowprec.backends.cpu.packed import micro_kernels
from lowprec.backends.cpu.packed.micro_kernels import MICRO_KERNELS, unsupported_reason
from lowprec.errors import EnvironmentVariableError
from lowprec.policy import environment
from support.programs import run_python

ISA = "LOWPREC_MAX_CPU_ISA"

#: The micro-kernels that may run below each limit.
ALLOWED = {
    "baseline": set(),
    "avx2": set(),
    "avx2_vnni": {"avx_vnni"},
    "avx512": {"avx_vnni", "avx512_fp32"},
    "avx512_vnni": {"avx_vnni", "avx512_fp32", "avx512_vnni"},
    "avx512_bf16": {"avx_vnni", "avx512_fp32", "avx512_vnni", "avx512_bf16"},
    "amx": {kernel.name for kernel in MICRO_KERNELS},
}

# The errors are those of lowprec's own bounds, from float64 products of the operands as they are stored.
_PRODUCTS = """
import json, sys
import numpy as np, ml_dtypes
import lowprec
from lowprec.backends.cpu import openblas
from lowprec.backends.cpu.device import features

rng = np.random.default_rng(0)
excess = {}
for m, n, k in ((37, 65, 130), (300, 257, 129), (300, 1, 400)):
    a, b = (rng.standard_normal(s, dtype=np.float32) for s in ((m, k), (k, n)))
    # With a vector, few of them: each is a kernel to compile.
    for dtype in (np.float32, ml_dtypes.bfloat16, np.float16)[: 3 if n > 1 else 1]:
        x, y = a.astype(dtype), np.asfortranarray(b.astype(dtype))
        exact = x.astype(np.float64) @ y.astype(np.float64)
        for mode in ("fp32", "tf32", "bf16", "fp16")[: 4 if n > 1 else 2]:
            plan = lowprec.plan(x, y, math_mode=mode, out_dtype=np.float32)
            got = lowprec.matmul(x, y, math_mode=mode, out_dtype=np.float32)
            scale = np.linalg.norm(x.astype(np.float64)) * np.linalg.norm(y.astype(np.float64))
            error = np.linalg.norm(got - exact) / scale
            excess[f"{m}x{n}x{k} {x.dtype} {mode}"] = float(error / plan.bound.relative)
    a, b = (rng.integers(-128, 128, s, dtype=np.int8) for s in ((m, k), (k, n)))
    got, exact = lowprec.matmul(a, b), a.astype(np.int64) @ b.astype(np.int64)
    excess[f"{m}x{n}x{k} int8"] = 0.0 if np.array_equal(got, exact) else 2.0
blas = openblas.openblas()
zmm = None
if "numba" in sys.modules:
    from lowprec.backends.cpu.packed import compilation
    kept = compilation.compiled_here
    zmm = any("zmm" in library.get_llvm_str() or "%zmm" in library.get_asm_str() for library in kept)
print({"excess": excess, "features": sorted(features()),
       "core_type": blas and blas.core_type, "zmm": zmm})
"""


@pytest.mark.parametrize(
    "isa", [isa if isa in ("baseline", "avx2") else pytest.param(isa, marks=pytest.mark.sweep) for isa in ALLOWED]
)
@pytest.mark.sampled(2)
def test_products_below_a_limit(isa: str, tmp_path: Path) -> None:
    # A cache of its own, so that the code was compiled here.
    found = ast.literal_eval(run_python(_PRODUCTS, LOWPREC_MAX_CPU_ISA=isa, LOWPREC_CACHE_DIR=str(tmp_path)))
    assert {name: x for name, x in found["excess"].items() if x > 1} == {}
    units = set(found["features"]) - {"openblas", "numba"}
    assert units <= ALLOWED[isa]
    here = {kernel.name for kernel in MICRO_KERNELS if not unsupported_reason(kernel)}
    # With AMX, the products left to OpenBLAS are no feature.
    left = {x.name for x in MICRO_KERNELS if x.unmeasured_with} if {"amx_bf16"} <= units else set()
    assert units == (here & ALLOWED[isa]) - left
    if found["core_type"] is not None and "avx512f" in cpuinfo.system_flags():
        best = {"baseline": "Nehalem", "avx2": "Haswell", "avx2_vnni": "Haswell"}
        assert found["core_type"] == best.get(isa, "SkylakeX")
    if isa in ("baseline", "avx2", "avx2_vnni") and found["zmm"] is not None:
        assert found["zmm"] is False


@pytest.mark.sweep
@pytest.mark.parametrize("isa", ["baseline", "avx2_vnni", "avx512"])
def test_the_numerics_tests_below_a_limit(isa: str) -> None:
    here = Path(__file__).parent
    names = ("test_matmul_numerics.py", "test_micro_kernels.py", "test_rounding.py", "test_float8.py")
    run = "import sys, pytest; sys.exit(pytest.main(['-q', '-x', '-p', 'no:cacheprovider', *sys.argv[1:]]))"
    run_python(run, *(str(here / name) for name in names), timeout=1200, LOWPREC_MAX_CPU_ISA=isa)


def test_an_unknown_limit_is_refused_before_any_work_and_reported_by_info() -> None:
    program = """
import json, numpy as np, lowprec
shown = lowprec.info()
try:
    lowprec.matmul(np.ones((4, 4), np.float32), np.ones((4, 4), np.float32))
except lowprec.EnvironmentVariableError as error:
    raised = str(error)
print(json.dumps({"raised": raised, "warnings": shown["warnings"], "devices": shown["devices"]}))
"""
    found = json.loads(run_python(program, LOWPREC_MAX_CPU_ISA="avx1024"))
    legal = ", ".join(ALLOWED)
    assert f"{ISA} must be one of {legal}, got 'avx1024'" in found["raised"]
    assert found["raised"] in found["warnings"]
    assert found["devices"][0]["instruction_sets"] == []


@pytest.mark.skipif("avx2" not in cpuinfo.system_flags(), reason="this machine is no x86-64, or too old for AVX2")
def test_info_reports_the_hidden_instruction_sets() -> None:
    program = "import json, lowprec; print(json.dumps(lowprec.info()))"
    found = json.loads(run_python(program, LOWPREC_MAX_CPU_ISA="baseline"))
    sets = {x["name"]: x for x in found["devices"][0]["instruction_sets"]}
    assert sets["avx2"]["present"] is True
    assert sets["avx2"]["used"] is False
    assert sets["avx2"]["by"] == f"hidden by {ISA}"
    (row,) = (x for x in found["environment"] if x["name"] == ISA)
    assert (row["value"], row["effect"]) == ("baseline", "nothing above baseline is used")


def test_a_plan_names_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = micro_kernels.AVX512_BF16
    monkeypatch.setattr(micro_kernels.sys, "platform", "linux")
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(micro_kernels, "system_flags", lambda: kernel.cpu_flags)
    monkeypatch.setattr(micro_kernels, "cpu_flags", lambda: kernel.cpu_flags - {"avx512_bf16"})
    assert unsupported_reason.__wrapped__(kernel) == f"{ISA} hides the {kernel.unit} of this CPU"


def test_a_limit_hides_every_flag_of_a_micro_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(ISA, "baseline")
    environment.refresh()
    try:
        hidden = environment.hidden_cpu_flags()
    finally:
        environment.refresh()
    needed = set().union(*(kernel.cpu_flags for kernel in MICRO_KERNELS))
    assert needed <= hidden
    for _, flags in openblas._CORE_TYPES:
        assert flags <= hidden


def test_a_limit_is_read_again_after_a_bad_one(monkeypatch: pytest.MonkeyPatch) -> None:
    environment.refresh()
    monkeypatch.setenv(ISA, "sse")
    with pytest.raises(EnvironmentVariableError, match=r"LOWPREC_MAX_CPU_ISA must be one of .*, got 'sse'"):
        cpuinfo.hidden_flags.__wrapped__()
    monkeypatch.setenv(ISA, "amx")
    assert cpuinfo.hidden_flags.__wrapped__() == frozenset()
    environment.refresh()


@pytest.mark.parametrize("machine", ["aarch64", "arm64"])
def test_another_architecture_has_no_units_of_x86(machine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: machine)
    for kernel in MICRO_KERNELS:
        assert "on Linux on x86-64 only" in unsupported_reason.__wrapped__(kernel)
