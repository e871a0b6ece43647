"""Processors with fewer instruction sets than this one: LOWPREC_MAX_CPU_ISA hides them from lowprec, for tests."""

import json

import pytest

from lowprec.backends.cpu import cpuinfo, library
from support.programs import run_python

ISA = "LOWPREC_MAX_CPU_ISA"

_AVX2 = {"fp32_avx2", "int8_avx2"}
_AVX512 = _AVX2 | {"int8_avxvnni", "fp32_avx512"}
#: The units that may multiply below each limit.
ALLOWED = {
    "baseline": set(),
    "avx2": _AVX2,
    "avx2_vnni": _AVX2 | {"int8_avxvnni"},
    "avx512": _AVX512,
    "avx512_vnni": _AVX512 | {"int8_avx512"},
    "avx512_bf16": _AVX512 | {"int8_avx512", "bf16_avx512"},
    "amx": set(library.UNITS),
}

needs_x86_64 = pytest.mark.skipif(cpuinfo.machine() != "x86_64", reason="this machine is no x86-64")

# The errors are those of lowprec's own bounds, from float64 products of the operands as they are stored.
_PRODUCTS = """
import json
import numpy as np, ml_dtypes
import lowprec
from lowprec.arrays import CPU
from lowprec.backends.cpu.backend import capabilities

rng = np.random.default_rng(0)
excess, used = {}, set()
for m, n, k in ((37, 65, 130), (300, 257, 129), (300, 1, 400)):
    a, b = (rng.standard_normal(s, dtype=np.float32) for s in ((m, k), (k, n)))
    for dtype in (np.float32, ml_dtypes.bfloat16, np.float16):
        x, y = a.astype(dtype), np.asfortranarray(b.astype(dtype))
        exact = x.astype(np.float64) @ y.astype(np.float64)
        for mode in ("fp32", "tf32", "bf16", "fp16"):
            plan = lowprec.plan(x, y, math_mode=mode, out_dtype=np.float32)
            got = lowprec.matmul(x, y, math_mode=mode, out_dtype=np.float32)
            scale = np.linalg.norm(x.astype(np.float64)) * np.linalg.norm(y.astype(np.float64))
            excess[f"{m}x{n}x{k} {x.dtype} {mode}"] = float(np.linalg.norm(got - exact) / scale / plan.bound.relative)
            used.add(plan.kernel_row.requires)
    a, b = (rng.integers(-128, 128, s, dtype=np.int8) for s in ((m, k), (k, n)))
    got, exact = lowprec.matmul(a, b), a.astype(np.int64) @ b.astype(np.int64)
    excess[f"{m}x{n}x{k} int8"] = 0.0 if np.array_equal(got, exact) else 2.0
    used.add(lowprec.plan(a, b).kernel_row.requires)
print(json.dumps({"excess": excess, "units": sorted(capabilities(CPU).features), "used": sorted(used - {None})}))
"""


@needs_x86_64
@pytest.mark.parametrize(
    "isa",
    [
        isa if isa in ("baseline", "avx2", "avx512") else pytest.param(isa, marks=pytest.mark.sweep)
        for isa in ALLOWED
    ],
)
def test_products_below_a_limit(isa):
    found = json.loads(run_python(_PRODUCTS, LOWPREC_MAX_CPU_ISA=isa))
    assert {name: x for name, x in found["excess"].items() if x > 1} == {}
    assert set(found["units"]) == ALLOWED[isa] & library.units()
    assert set(found["used"]) <= set(found["units"])
    assert bool(found["used"]) is bool(found["units"])


# Roundings, loss scaling and emulated products find the units themselves, in the order of `lp_unit`.
_FUNCTIONS = """
import ctypes, json
import numpy as np
import lowprec
from lowprec.backends.cpu import library

x = np.ones((4, 64), np.float32)
lowprec.quantize(x, "mxfp8")
found = library.functions()
at, scale, rows = x.ctypes.data, ctypes.c_float(), np.array([[x.ctypes.data, x.ctypes.data, x.size, 0]])
q = library.Quantizer(1, 4, 64, 64, 1, 64, 1, block_vectors=1, block_k=32, scaling=2)
core = (ctypes.c_int32 * 6)(16, 24, -126, -126, 23, 0)
statuses = (
    found.quantize(ctypes.addressof(q), at, np.empty(256, np.int16).ctypes.data, None, ctypes.addressof(scale), 1),
    found.unscale(rows.ctypes.data, 1, 1.0, 1),
    found.emulate(at, at, np.zeros((4, 4), np.float32).ctypes.data, 4, 4, 4, None, None, ctypes.addressof(core), 1),
)
print(json.dumps({"statuses": statuses, "units": [x for i, x in enumerate(library.UNITS) if found.units() >> i & 1]}))
"""


@needs_x86_64
@pytest.mark.skipif(library.library() is None, reason="lowprec has no kernels")
@pytest.mark.parametrize("isa", ["baseline", "avx2"])
def test_other_functions_below_a_limit(isa):
    found = json.loads(run_python(_FUNCTIONS, LOWPREC_MAX_CPU_ISA=isa))
    assert set(found["units"]) == ALLOWED[isa] & library.units()
    none = [library.UNSUPPORTED, -1, library.UNSUPPORTED]
    assert found["statuses"] == (none if isa == "baseline" else [library.OK, 0, library.OK])


def test_an_unknown_limit_is_refused_before_any_work_and_reported_by_info():
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
    assert f"{ISA} must be one of {', '.join(ALLOWED)}, got 'avx1024'" in found["raised"]
    assert found["raised"] in found["warnings"]
    assert found["devices"][0]["instruction_sets"] == []


@pytest.mark.skipif(
    "avx2" not in cpuinfo.system_flags(), reason="this machine is no x86-64, or too old for AVX2"
)
def test_info_reports_the_hidden_instruction_sets():
    program = "import json, lowprec; print(json.dumps(lowprec.info()))"
    found = json.loads(run_python(program, LOWPREC_MAX_CPU_ISA="baseline"))
    sets = {x["name"]: x for x in found["devices"][0]["instruction_sets"]}
    assert sets["avx2"]["present"] is True
    assert sets["avx2"]["used"] is False
    assert sets["avx2"]["by"] == f"hidden by {ISA}"
    (row,) = (x for x in found["environment"] if x["name"] == ISA)
    assert (row["value"], row["effect"]) == ("baseline", "nothing above baseline is used")
