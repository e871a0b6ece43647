"""The software cuBLASLt compared with the real library, in all functions that need no driver.

The library's wheels have some hundred megabytes, which is too much for every run of the tests. Where it is installed
(``pip install nvidia-cublas``), or is on the search path of the system, the comparison runs.
"""

import ctypes
import itertools

import pytest

from software_cuda import tables
from software_cuda.asking import Asked, prepared
from software_cuda.attributes import VERSIONS, attributes
from software_cuda.cublaslt import CublasLt
from software_cuda.descriptors import KINDS
from software_cuda.objects import STATUS_NAMES
from software_cuda.real_cublaslt import Real, answer, path, software_status

ARGUMENTS = {
    "matmul_desc": (68, tables.R_32F),
    "matrix_layout": (tables.R_16BF, 4, 5, 6),
    "matmul_preference": (),
    "emulation_desc": (),
}
SIZES = (0, 1, 2, 4, 8, 16, 256)


@pytest.fixture(scope="module")
def real():
    found = path()
    if found is None:
        pytest.skip("libcublasLt is not installed (nvidia-cublas, 400 MB and more)")
    library = Real(found)
    if library.version < VERSIONS[0]:
        pytest.skip(
            f"libcublasLt is not installed in a version that the software knows: {library.version}"
        )
    return library


def numbers(kind, version):
    """Numbers of attributes, with unknown ones where the version was queried."""
    known = attributes(kind, version)
    return list(range(-1, 64)) if version in VERSIONS else sorted(known)


def test_attributes_change_at_the_queried_versions_alone():
    """Those of a queried version hold until the next one."""
    for kind in (*KINDS, "matmul_algo_config"):
        for version in VERSIONS:
            assert attributes(kind, version) == attributes(kind, version + 1)
        assert attributes(kind, VERSIONS[-1] + 10_000) == attributes(kind, VERSIONS[-1])


def test_names_of_statuses(real):
    for status, name in STATUS_NAMES.items():
        assert real.status_name(status) == f"CUBLAS_STATUS_{name}"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("value", [None, 0x0807060504030201, 0xFFFFFFFFFFFFFFFF], ids=str)
def test_every_attribute(cuda, real, kind, value):
    """Known and unknown ones, set or new, with every size: the same status, the same bytes."""
    if not attributes(kind, real.version):
        pytest.skip(f"libcublasLt is not installed in a version with {kind}: {real.version}")
    lt = CublasLt(cuda.recorder, cuda.runtime, real.version)
    create, destroy, setter, getter = (
        getattr(lt, f"{kind}_{x}") for x in ("create", "destroy", "set_attribute", "get_attribute")
    )
    data = (ctypes.c_uint64 * 32)(*[value or 0] * 32)
    every = {x.number: x.nbytes for x in attributes(kind, real.version).values()}
    for number, nbytes in itertools.product(numbers(kind, real.version), SIZES):
        made, (status, twin) = create(*ARGUMENTS[kind]), real.create(kind, *ARGUMENTS[kind])
        assert status == 0
        what = f"{kind} {number} with {nbytes} bytes"
        if value is not None:
            given = number, ctypes.addressof(data), nbytes
            assert software_status(setter, made, *given) == real.set(kind, twin, *given), what
        for x, size in ((number, nbytes), *every.items()):
            found = answer(software_status, getter, made, x, nbytes=size)
            assert found == answer(real.get, kind, twin, x, nbytes=size), f"{x} after {what}"
        destroy(made)
        assert real.destroy(kind, twin) == 0


def test_configurations_of_algorithms(cuda, real):
    """The configuration has the library's offsets in the 64 bytes, and 64 zeros are read as zeros."""
    lt = cuda.cublas_lt
    lt.version = real.version
    with prepared(cuda, Asked()) as product:
        offered = [x for x, _ in product.search()]
    assert len({x[:20] for x in offered}) > 5
    for data in (*offered, bytes(64)):
        algorithm = (ctypes.c_uint8 * 64).from_buffer_copy(data)
        pointer = ctypes.addressof(algorithm)
        getter = lt.matmul_algo_config_get_attribute
        for number, nbytes in itertools.product(numbers("matmul_algo_config", real.version), SIZES):
            found = answer(software_status, getter, pointer, number, nbytes=nbytes)
            wanted = answer(real.get, "matmul_algo_config", pointer, number, nbytes=nbytes)
            assert found == wanted, f"{data.hex()}: {number} with {nbytes} bytes"
