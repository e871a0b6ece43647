"""Capabilities of CPUs and GPUs, and fixtures that restrict those of this machine."""

from contextlib import contextmanager
from dataclasses import replace

import pytest

from lowprec.arrays import CPU
from lowprec.backends.cpu import backend as cpu
from lowprec.backends.cpu.kernel_rows import KERNELS as CPU_KERNELS
from lowprec.backends.cpu.kernel_rows import kernels_of
from lowprec.backends.cuda.models import KERNELS as CUDA_KERNELS
from lowprec.core import executors
from lowprec.modes import ModeSource, ResolvedMode
from lowprec.planning import Capabilities, PlanReport


def report_on(plan, **filled):
    """Return the report on a plan whose mode is the default."""
    resolved = ResolvedMode(plan.mode, ModeSource.DEFAULT)
    return PlanReport.of(
        plan, **{"resolved": resolved, "candidates": (), "tolerance": None, **filled}
    )


ROWS = {row.name: row for row in (*CPU_KERNELS, *CUDA_KERNELS)}

BARE = Capabilities("cpu", "a plain CPU", kernels_of("x86_64"))
AVX2 = replace(BARE, name="a CPU with AVX2", features=frozenset({"fp32_avx2", "int8_avx2"}))
AVX512 = replace(
    BARE,
    name="a CPU with AVX-512",
    features=AVX2.features | {"fp32_avx512", "bf16_avx512", "int8_avx512"},
)
AMX = replace(BARE, name="a CPU with AMX", features=AVX512.features | {"bf16_amx", "int8_amx"})


def gpu(capability=(9, 0), workspace_bytes=32 << 20, *features):
    """Return what a GPU of a compute capability can do."""
    able = frozenset(x for x in features if x)
    return Capabilities(
        "cuda:0",
        "a GPU",
        CUDA_KERNELS,
        able,
        compute_capability=capability,
        workspace_bytes=workspace_bytes,
    )


#: Machines of a test that is parametrised by machine.
MACHINES = ("this machine", "NumPy alone")


@contextmanager
def on(machine):
    with without(cpu.capabilities(CPU).features if machine == "NumPy alone" else ()):
        yield


def fixture(*machines):
    """Return a fixture that runs a test on each of these machines."""

    @pytest.fixture(params=machines)
    def machine(request):
        with on(request.param):
            yield request.param

    return machine


@contextmanager
def without(features):
    """Plan on this machine without these features."""
    able = cpu.capabilities(CPU)
    lesser = replace(able, features=able.features - frozenset(features))
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr(cpu, "capabilities", lambda device: lesser)
        # Executors are cached without the capabilities, which do not change while a process lives.
        executors.clear_caches()
        try:
            yield
        finally:
            executors.clear_caches()


def only(unit):
    """Plan on a machine that has this unit and no other."""
    return without(cpu.capabilities(CPU).features - {unit})
