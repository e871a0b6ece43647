"""The software cuBLASLt compared with the real library, in all functions that need no driver.

The library's wheels have some hundred megabytes, which is too much for every run of the tests. Where it is installed
(``pip install nvidia-cublas``), or is on the search path of the system, the comparison runs.
"""

from __future__ import annotations

import contextlib
import ctypes
import itertools
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import lowprec
import software_cuda
from cuda_backend.cuda_reset import reset
from cuda_backend.device_fixture import SoftwareGpu, draw
from lowprec.core import executors
from lowprec.modes import available_modes
from software_cuda import Software, tables
from software_cuda.algorithms import candidates
from software_cuda.asking import Asked, check, of_types, prepared
from software_cuda.attributes import VERSIONS, attributes
from software_cuda.cublaslt import CublasLt
from software_cuda.descriptors import DESCRIPTOR, KINDS, LAYOUT
from software_cuda.objects import STATUS_NAMES
from software_cuda.problem import problem
from software_cuda.real_cublaslt import Compared, Real, answer, path, software_status

ARGUMENTS: dict[str, tuple[int, ...]] = {
    "matmul_desc": (68, tables.R_32F),
    "matrix_layout": (tables.R_16BF, 4, 5, 6),
    "matmul_preference": (),
}
SIZES = (0, 1, 2, 4, 8, 16, 256)


@pytest.fixture(scope="module")
def real() -> Real:
    found = path()
    if found is None:
        pytest.skip("libcublasLt is not installed (nvidia-cublas, 400 MB and more)")
    library = Real(found)
    if library.version < VERSIONS[0]:
        pytest.skip(f"libcublasLt is not installed in a version that the software knows: {library.version}")
    return library


@pytest.fixture
def both(real: Real, monkeypatch: pytest.MonkeyPatch) -> Software:
    """The software CUDA, with its cuBLASLt compared with the real one."""
    monkeypatch.setattr(Compared, "real_library", real, raising=False)
    monkeypatch.setattr(software_cuda, "CublasLt", Compared)
    return Software()


def numbers(kind: str, version: int) -> list[int]:
    """Numbers of attributes, with unknown ones where the version was queried."""
    known = attributes(kind, version)
    return list(range(-1, 64)) if version in VERSIONS else sorted(known)


def test_attributes_change_at_the_queried_versions_alone() -> None:
    """Those of a queried version hold until the next one."""
    for kind in (*KINDS, "matmul_algo_config"):
        for version in VERSIONS:
            assert attributes(kind, version) == attributes(kind, version + 1)
        assert attributes(kind, VERSIONS[-1] + 10_000) == attributes(kind, VERSIONS[-1])


def test_names_of_statuses(real: Real) -> None:
    for status, name in STATUS_NAMES.items():
        assert real.status_name(status) == f"CUBLAS_STATUS_{name}"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("value", [None, 0x0807060504030201, 0xFFFFFFFFFFFFFFFF], ids=str)
def test_every_attribute(both: Software, real: Real, kind: str, value: int | None) -> None:
    """Known and unknown ones, set or new, with every size: the same status, the same bytes."""
    lt: Any = both.cublas_lt
    create, destroy, getter = (getattr(lt, f"{kind}_{x}") for x in ("create", "destroy", "get_attribute"))
    setter = getattr(CublasLt, f"{kind}_set_attribute")
    data = (ctypes.c_uint64 * 32)(*[value or 0] * 32)
    for number, nbytes in itertools.product(numbers(kind, real.version), SIZES):
        made = create(*ARGUMENTS[kind])
        twin = lt.twin(made)
        what = f"{kind} {number} with {nbytes} bytes"
        if value is not None:
            given = number, ctypes.addressof(data), nbytes
            assert software_status(setter, lt, made, *given) == real.set(kind, twin, *given), what
        found = answer(software_status, getter, made, number, nbytes=nbytes)
        assert found == answer(real.get, kind, twin, number, nbytes=nbytes), what
        destroy(made)
    assert both.faults == []


@pytest.mark.parametrize("kind", KINDS)
def test_null_pointers(both: Software, real: Real, kind: str) -> None:
    lt: Any = both.cublas_lt
    made = getattr(lt, f"{kind}_create")(*ARGUMENTS[kind])
    twin, (x, *_) = lt.twin(made), attributes(kind, real.version).values()
    value, written = (ctypes.c_uint64 * 2)(), ctypes.c_size_t()
    data, size = ctypes.addressof(value), ctypes.addressof(written)
    setter, getter = (getattr(CublasLt, f"{kind}_{y}_attribute") for y in ("set", "get"))
    assert real.set(kind, twin, x.number, 0, x.nbytes) == 7
    assert software_status(setter, lt, made, x.number, 0, x.nbytes) == 7
    for given in ((0, x.nbytes, size), (data, x.nbytes, 0), (data, 0, 0), (0, 0, 0), (0, 0, size)):
        status = real.get(kind, twin, x.number, *given)
        assert software_status(getter, lt, made, x.number, *given) == status, given
    getattr(lt, f"{kind}_destroy")(made)
    assert real.destroy(kind, 0) == 0
    getattr(CublasLt, f"{kind}_destroy")(lt, 0)
    assert both.faults == []


@pytest.mark.parametrize(
    ("kind", "arguments"),
    [
        ("matmul_desc", (999, 0)), ("matmul_desc", (68, 999)), ("matmul_desc", (-1, -1)),
        ("matrix_layout", (0, 0, 0, 0)), ("matrix_layout", (999, 1, 1, 1)), ("matrix_layout", (0, 4, 5, 2)),
        ("matrix_layout", (0, 4, 5, -6)),
    ],
)  # fmt: skip
def test_descriptors_are_not_validated(both: Software, kind: str, arguments: tuple[int, ...]) -> None:
    """The libraries validate at the product."""
    lt = both.cublas_lt
    getattr(lt, f"{kind}_destroy")(getattr(lt, f"{kind}_create")(*arguments))
    assert lt.compared > 1
    assert both.faults == []


# -- the test matrix ------------------------------------------------------------------------------


def test_descriptors_of_every_combination_of_types(both: Software) -> None:
    both.cublas_lt.workspaces_race = False
    for row in tables.ROWS:
        for compute in sorted(row.compute):
            check(both, of_types(row, compute, m=16, n=16, k=16))
    for op_a, op_b, batch in itertools.product((0, 1), (0, 1), (1, 3)):
        check(both, Asked(op_a=op_a, op_b=op_b, batch=batch, gap=(4, 8, 12, 12)))
    for epilogue in (2, 4, 6, 32, 36):
        check(both, Asked(epilogue=epilogue))
    assert both.cublas_lt.compared > 1000
    assert both.faults == []


def test_configurations_of_algorithms(both: Software, real: Real) -> None:
    """The configuration has the library's offsets in the 64 bytes, and 64 zeros are read as zeros."""
    lt = both.cublas_lt
    with prepared(both, Asked()) as product:
        a, b, c, d = (lt.get(x, LAYOUT) for x in product.layouts)
        asked = problem(lt.get(product.operation, DESCRIPTOR), (a, b, c, d))
    offered = [x.pack() for x in candidates(asked, "a device", tf32_forbidden=False)]
    assert len(offered) > 5
    assert len({x[:20] for x in offered}) > 5
    for data in (*offered, bytes(64)):
        algorithm = (ctypes.c_uint8 * 64).from_buffer_copy(data)
        pointer = ctypes.addressof(algorithm)
        getter = lt.matmul_algo_config_get_attribute
        for number, nbytes in itertools.product(numbers("matmul_algo_config", real.version), SIZES):
            found = answer(software_status, getter, pointer, number, nbytes=nbytes)
            wanted = answer(real.get, "matmul_algo_config", pointer, number, nbytes=nbytes)
            assert found == wanted, f"{data.hex()}: {number} with {nbytes} bytes"
    zeros = (ctypes.c_uint8 * 64)()
    pointer = ctypes.addressof(zeros)
    for number in range(24):
        getter = lt.matmul_algo_cap_get_attribute
        found = answer(software_status, getter, pointer, number, nbytes=4)
        assert found == answer(real.get, "matmul_algo_cap", pointer, number, nbytes=4)


TYPES = ("float32", "float64", "float16", "bfloat16", "complex64", "int8")


def test_descriptors_of_products_of_lowprec(real: Real, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every mode and type, transposed, in batches, with epilogues: the library takes all descriptors of lowprec."""
    monkeypatch.setattr(Compared, "real_library", real, raising=False)
    monkeypatch.setattr(software_cuda, "CublasLt", Compared)
    found = software_cuda.install()
    executors.clear_caches()
    try:
        _multiply_everything(SoftwareGpu(found))
        lt: Any = found.cublas_lt
        found.drain()
    finally:
        executors.clear_caches()
        reset()
        software_cuda.uninstall()
    assert found.faults == []
    assert lt.compared > 1000


def _multiply_everything(gpu: SoftwareGpu) -> None:
    for name in TYPES:
        dtype = np.dtype(getattr(ml_dtypes, name, name))
        x, y = draw(0, 16, 32, dtype=dtype), draw(1, 32, 16, dtype=dtype)
        a, b, stacks = gpu.put(x), gpu.put(y), [gpu.put(np.stack([z] * 3)) for z in (x, y)]
        for mode in available_modes() if name in ("float32", "complex64") else ["fp32"]:
            with contextlib.suppress(lowprec.UnsupportedError):
                lowprec.matmul(a, b, math_mode=mode)
                lowprec.matmul(gpu.transpose(b), gpu.transpose(a), math_mode=mode)
                lowprec.matmul(*stacks, math_mode=mode)
        if name != "int8":
            lowprec.matmul(a, b, c=gpu.put((x @ y).astype(dtype)), beta=0.5)
            lowprec.matmul(a, b, out=gpu.put(np.zeros((16, 16), dtype)))
        if name in ("float32", "float16", "bfloat16"):
            for activation in (None, "relu", "gelu"):
                lowprec.matmul(a, b, bias=gpu.put(y[0]), activation=activation)
