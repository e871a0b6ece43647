"""Machines to pretend to be."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest

from lowprec.arrays import CPU
from lowprec.backends.cpu import backend as cpu
from lowprec.backends.cpu import casting, epilogue, panels, rounding, scaling, splitting
from lowprec.backends.cpu.kernel_rows import KERNELS as CPU_KERNELS
from lowprec.backends.cpu.packed import jobs, micro_kernels, prepared_panels
from lowprec.backends.cuda.models import KERNELS as CUDA_KERNELS
from lowprec.core import executors
from lowprec.planning import Capabilities, KernelRow

ROWS: dict[str, KernelRow] = {row.name: row for row in (*CPU_KERNELS, *CUDA_KERNELS)}

BARE = Capabilities("cpu", "a plain CPU", CPU_KERNELS)
OPENBLAS = Capabilities("cpu", "a CPU with OpenBLAS", CPU_KERNELS, frozenset({"openblas"}))
AMX = Capabilities("cpu", "a CPU with AMX", CPU_KERNELS, frozenset({"openblas", "amx_bf16", "amx_int8"}))
AVX512 = Capabilities(
    "cpu", "a CPU with AVX-512", CPU_KERNELS, frozenset({"openblas", "avx512_bf16", "avx512_vnni", "avx512_fp32"})
)


def gpu(capability: tuple[int, int] = (9, 0), workspace_bytes: int = 32 << 20, *features: str | None) -> Capabilities:
    """Return what a GPU of a compute capability can do."""
    able = frozenset(x for x in features if x)
    return Capabilities(
        "cuda:0", "a GPU", CUDA_KERNELS, able, compute_capability=capability, workspace_bytes=workspace_bytes
    )


#: Those on which a test that is parametrised by machine runs.
MACHINES = ("this machine", "NumPy alone")


@contextmanager
def on(machine: str) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as monkeypatch:
        if machine == "NumPy alone":
            _pretend(monkeypatch, Capabilities("cpu", "a machine with NumPy alone", CPU_KERNELS))
        try:
            yield
        finally:
            executors.clear_caches()


def fixture(*machines: str) -> Any:
    """Return a fixture that runs a test on each of these machines."""

    @pytest.fixture(params=machines)
    def machine(request: pytest.FixtureRequest) -> Iterator[str]:
        with on(request.param):
            yield request.param

    return machine


@contextmanager
def with_rows(*rows: KernelRow) -> Iterator[None]:
    """Run on a CPU that has these kernels and no others."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        _pretend(monkeypatch, Capabilities("cpu", "a CPU of these rows", rows))
        try:
            yield
        finally:
            executors.clear_caches()


def _pretend(monkeypatch: pytest.MonkeyPatch, able: Capabilities) -> None:
    monkeypatch.setattr(cpu, "capabilities", lambda device: able)
    # Executors are kept without the capabilities, which do not change while a process lives.
    executors.clear_caches()


#: Micro-kernels that share the smallest products among threads.
EAGER_AVX512_BF16, EAGER_AVX512_VNNI, EAGER_AVX512_FP32, EAGER_AVX_VNNI = (
    replace(kernel, shared_from=0)
    for kernel in (
        micro_kernels.AVX512_BF16,
        micro_kernels.AVX512_VNNI,
        micro_kernels.AVX512_FP32,
        micro_kernels.AVX_VNNI,
    )
)


@contextmanager
def without(features: Iterable[str], *, eager: bool = False, at_any_size: str = "") -> Iterator[None]:
    """Run on this machine, of which planning does not know that it has these features.

    Where it is ``eager``, it cuts products as if they were large: in pieces for threads, and in blocks. One of its
    kernels may run products of any size.
    """
    with pytest.MonkeyPatch.context() as monkeypatch:
        able = cpu.capabilities(CPU)
        lifted = ROWS[at_any_size]._replace(minimum_elements=0, minimum_mn=0, is_shallow=False) if at_any_size else None
        rows = tuple(lifted if lifted and row.name == at_any_size else row for row in able.kernels)
        able = replace(able, features=able.features - frozenset(features), kernels=rows)
        if eager:
            _cut_all(monkeypatch)
            able = replace(able, kernels=tuple(map(_eager, able.kernels)))
        _pretend(monkeypatch, able)
        try:
            yield
        finally:
            executors.clear_caches()


def _eager(row: KernelRow) -> KernelRow:
    name = f"EAGER_{row.name.removesuffix('_parts').removesuffix('_rounded').upper()}"
    return row._replace(micro_kernel=f"{__name__}:{name}") if name in globals() else row


def _cut_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lower the sizes from which work is cut. (Not those of a BLAS, whose sums may depend on them.)"""
    for module, name, value in (
        (casting, "_PAYS_TO_SHARE", 0), (casting, "_PIECE", 1 << 9), (casting, "_PAYS_TO_CALL", 0),
        (rounding, "_BLOCK", 1 << 8), (scaling, "_BLOCK", 1 << 9),
        (splitting, "_BLOCK", 1 << 9), (splitting, "SLICE", 1 << 8), (epilogue, "_PIECE", 1 << 8),
        (panels, "_VECTOR_WORK", 1 << 11), (panels, "_LONG_COLUMNS", 1 << 10), (prepared_panels, "_SHARED_FROM", 0),
        (jobs, "STREAM_BYTES", 1 << 11),
    ):  # fmt: skip
        monkeypatch.setattr(module, name, value)
