"""The switches of the software CUDA: what each refuses."""

from dataclasses import fields, replace

import numpy as np
import pytest

import software_cuda
from software_cuda import DeviceModel, Software, Switches
from software_cuda.asking import BIAS, Asked, Data, prepared
from software_cuda.tables import R_4F_E2M1, R_8F_E4M3, R_8I, R_16BF, R_32I, VEC16_UE4M3, VEC32_UE8M0

MXFP8 = Asked(m=32, n=16, k=64, op_a=1, a=R_8F_E4M3, b=R_8F_E4M3)
NVFP4_BIAS = replace(MXFP8, a=R_4F_E2M1, b=R_4F_E2M1, epilogue=BIAS, bias_type=R_16BF)
INT8 = Asked(op_a=1, compute=72, scale=R_32I, a=R_8I, b=R_8I, c=R_32I, d=R_32I)
SCALES = {"A_SCALE_POINTER": 256, "B_SCALE_POINTER": 512}
OF_MXFP8 = {**SCALES, "A_SCALE_MODE": VEC32_UE8M0, "B_SCALE_MODE": VEC32_UE8M0}
OF_NVFP4 = {**SCALES, "A_SCALE_MODE": VEC16_UE4M3, "B_SCALE_MODE": VEC16_UE4M3}


def with_switch(name):
    return Software([DeviceModel(capability=(10, 0))] * 2, switches=Switches(**{name: True}))


def test_the_backend_is_tested_with_all_switches(software):
    assert all(getattr(software.software.switches, x.name) for x in fields(Switches))
    assert not any(vars(Software().switches).values())
    software_cuda.install(1).switches.large_batches = False
    software_cuda.uninstall()
    assert software.software.switches.large_batches


@pytest.mark.parametrize(
    ("switch", "asked", "described", "words"),
    [
        ("large_batches", Asked(m=1, n=1, k=1, batch=65_536), {}, "65536 matrices"),
        ("block_extents", replace(MXFP8, n=8), OF_MXFP8, "blocks with extents 32, 8, 64"),
        ("block_extents", replace(MXFP8, m=40), OF_MXFP8, "blocks with extents 40, 16, 64"),
        ("block_extents", replace(MXFP8, k=80), OF_MXFP8, "blocks with extents 32, 16, 80"),
        ("fp4_bias", NVFP4_BIAS, {**OF_NVFP4, "BIAS_POINTER": 256}, "FP4 with a bias alone"),
        ("float8_scales", MXFP8, {"A_SCALE_POINTER": 256}, "FP8 operands without scales"),
        ("int8_workspace", INT8, {}, "int8 with a workspace"),
    ],
)
def test_products_that_are_refused(switch, asked, described, words):
    cuda = with_switch(switch)
    with prepared(cuda, asked) as product:
        product.describe(**described)
        with pytest.raises(cuda.cublas_lt.cuBLASLtError, match=rf"NOT_SUPPORTED \(15\): {words}"):
            product.search()


def test_the_first_algorithm_fails():
    cuda = with_switch("first_algorithm")
    data = Data(cuda, Asked())
    workspace = data.new(1 << 20)
    with prepared(cuda, data.asked) as product:
        first, second, *_ = product.search()
        with pytest.raises(cuda.cublas_lt.cuBLASLtError, match=r"EXECUTION_FAILED \(13\): the first algorithm"):
            product.run(first, tuple(data.addresses), workspace)
        product.run(second, tuple(data.addresses), workspace)
    cuda.drain()
    np.testing.assert_array_equal(data.matrix(3), data.expected())


@pytest.mark.parametrize("stream", [1, 2])
def test_handles_of_default_streams(stream):
    cuda = with_switch("default_streams")
    data = Data(cuda, Asked())
    with prepared(cuda, data.asked) as product:
        algorithm = product.search(0)[0]
        with pytest.raises(cuda.cublas_lt.cuBLASLtError, match=rf"INVALID_VALUE \(7\): stream {stream}"):
            product.run(algorithm, tuple(data.addresses), stream=stream)
        product.run(algorithm, tuple(data.addresses), stream=0)


def test_freeing_without_a_wait():
    """Work that still uses the memory fails."""
    cuda = with_switch("free_without_wait")
    runtime = cuda.runtime
    address = runtime.cudaMalloc(1000)[1]
    runtime.cudaMemsetAsync(address, 1, 1000, 1)
    runtime.cudaFree(address)
    cuda.drain()
    assert ["illegal address" in x for x in cuda.faults] == [True]
