"""Units of a processor, and the precision of PyTorch's products on them.

`.ci/check_skips.py` knows the reasons below, and accepts them only where the processor indeed lacks the units.
"""

import functools

import pytest

from lowprec.arrays import CPU
from lowprec.backends.cpu import backend, cpuinfo
from lowprec.backends.cpu.kernel_rows import kernels_of
from support.programs import run_python

NO_AMX = "this machine has no AMX units (or lowprec no kernels)"
NO_AVX512 = "this machine has no AVX-512 (or lowprec no kernels)"
#: Reasons of skips by the unit.
_NO_UNITS = {
    "fp32_avx2": "this machine has no AVX2 units (or lowprec no kernels)",
    "fp32_avx512": NO_AVX512,
    "bf16_avx512": "this machine has no AVX512-BF16 units (or lowprec no kernels)",
    "bf16_amx": NO_AMX,
    "int8_avx2": "this machine has no AVX2 units (or lowprec no kernels)",
    "int8_avxvnni": "this machine has no AVX-VNNI units (or lowprec no kernels)",
    "int8_avx512": "this machine has no AVX512-VNNI units (or lowprec no kernels)",
    "int8_amx": NO_AMX,
    "fp32_neon": "lowprec has no kernels",
    "bf16_neon": "this machine has no bfloat16 units (or lowprec no kernels)",
    "int8_neon": "this machine has no int8 units (or lowprec no kernels)",
}

#: Of processors of this architecture.
UNITS = tuple(dict.fromkeys(row.requires for row in kernels_of(cpuinfo.machine()) if row.requires))


def has(unit):
    """Whether products can run on a unit: it is here, and `LOWPREC_MAX_CPU_ISA` does not hide it."""
    return unit in backend.capabilities(CPU).features


def needs(unit):
    """Skip where a unit cannot run."""
    return pytest.mark.skipif(not has(unit), reason=_NO_UNITS[unit])


def units(*some):
    """Run a test with each of these units (by default, all of this architecture) that can run."""
    names = [name for name in some or UNITS if name in UNITS]
    return pytest.mark.parametrize("unit", [pytest.param(x, marks=needs(x), id=x) for x in names])


_ASKED = """
import sys, torch
n = int(sys.argv[1])
a, b = torch.randn(2, n, n, generator=torch.Generator().manual_seed(0))
exact = a.double() @ b.double()
torch.set_float32_matmul_precision("medium")
print(float(((a @ b).double() - exact).norm() / exact.norm()))
"""


@functools.cache
def medium_lowers(n):
    """Whether PyTorch at "medium" lowers the precision of a float32 product of n x n matrices.

    Queried once, in a process of its own: the instruction sets do not show it. oneDNN multiplies float32
    in bfloat16 where there are AMX units, and not where there are only AVX512-BF16's.
    """
    # bfloat16 rounds each operand by up to 2^-9, which gives about 2e-3; FP32's own 2^-24 gives 3e-7.
    return float(run_python(_ASKED, str(n), warn="ignore")) > 1e-4
