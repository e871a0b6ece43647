"""The switches of the software CUDA: what each refuses, and what is accepted without it."""

from dataclasses import fields, replace

import numpy as np
import pytest

import software_cuda
from cuda_backend.test_software_scales import MODES
from software_cuda import DeviceModel, Software, Switches
from software_cuda.asking import BIAS, RELU, Asked, Data, prepared
from software_cuda.tables import R_4F_E2M1, R_8F_E4M3, R_8I, R_16BF, R_32I

INVALID_VALUE, EXECUTION_FAILED, NOT_SUPPORTED = 7, 13, 15
BATCH = Asked(m=1, n=1, k=1, batch=65_536)
MXFP8 = Asked(m=32, n=16, k=64, op_a=1, a=R_8F_E4M3, b=R_8F_E4M3)
NVFP4 = replace(MXFP8, a=R_4F_E2M1, b=R_4F_E2M1)
NVFP4_BIAS, MXFP8_BIAS = (replace(x, epilogue=BIAS, bias_type=R_16BF) for x in (NVFP4, MXFP8))
INT8 = Asked(op_a=1, compute=72, scale=R_32I, a=R_8I, b=R_8I, c=R_32I, d=R_32I)


def with_switch(name, on):
    return Software([DeviceModel(capability=(10, 0))] * 2, switches=Switches(**{name: on}))


def test_the_backend_is_tested_with_all_switches(software):
    assert all(getattr(software.software.switches, x.name) for x in fields(Switches))
    assert not any(vars(Software().switches).values())
    software_cuda.install(1).switches.large_batches = False
    software_cuda.uninstall()
    assert software.software.switches.large_batches


@pytest.mark.parametrize(
    ("switch", "refused", "accepted"),
    [
        ("large_batches", BATCH, replace(BATCH, batch=65_535)),
        ("block_extents", replace(MXFP8, n=8), MXFP8),
        ("block_extents", replace(MXFP8, m=40), MXFP8),
        ("block_extents", replace(MXFP8, k=80), MXFP8),
        ("fp4_bias", NVFP4_BIAS, replace(NVFP4_BIAS, epilogue=BIAS | RELU)),
        ("fp4_bias", NVFP4_BIAS, MXFP8_BIAS),
    ],
)
@pytest.mark.parametrize("on", [False, True])
def test_products_that_are_refused(switch, refused, accepted, on):
    cuda = with_switch(switch, on)

    def search(asked):
        with prepared(cuda, asked) as product:
            if asked.a in MODES:
                mode = MODES[asked.a]
                product.describe(A_SCALE_MODE=mode, B_SCALE_MODE=mode, A_SCALE_POINTER=256, B_SCALE_POINTER=512)
            if asked.epilogue & BIAS:
                product.describe(BIAS_POINTER=256)
            return len(product.search())

    assert search(accepted)
    if not on:
        assert search(refused)
        return
    with pytest.raises(cuda.cublas_lt.cuBLASLtError, match="NOT_SUPPORTED") as caught:
        search(refused)
    assert caught.value.status == NOT_SUPPORTED


@pytest.mark.parametrize("on", [False, True])
def test_fp8_without_scales(on):
    cuda = with_switch("float8_scales", on)
    with prepared(cuda, MXFP8) as product:
        product.describe(A_SCALE_POINTER=256)
        if on:
            with pytest.raises(cuda.cublas_lt.cuBLASLtError, match="without scales"):
                product.search()
        product.describe(B_SCALE_POINTER=256)
        assert product.search()


@pytest.mark.parametrize("on", [False, True])
def test_int8_with_a_workspace(on):
    cuda = with_switch("int8_workspace", on)
    with prepared(cuda, INT8) as product:
        if on:
            with pytest.raises(cuda.cublas_lt.cuBLASLtError, match="int8 with a workspace"):
                product.search(1)
        assert product.search(0)


@pytest.mark.parametrize("on", [False, True])
def test_the_first_algorithm_fails(on):
    cuda = with_switch("first_algorithm", on)
    data = Data(cuda, Asked())
    workspace = data.new(1 << 20)
    with prepared(cuda, data.asked) as product:
        first, second, *_ = product.search()
        if on:
            with pytest.raises(cuda.cublas_lt.cuBLASLtError, match="the first algorithm") as caught:
                product.run(first, tuple(data.addresses), workspace)
            assert caught.value.status == EXECUTION_FAILED
        product.run(second, tuple(data.addresses), workspace)
    cuda.drain()
    np.testing.assert_array_equal(data.matrix(3), data.expected())


@pytest.mark.parametrize("on", [False, True])
@pytest.mark.parametrize("stream", [0, 1, 2])
def test_handles_of_default_streams(stream, on):
    cuda = with_switch("default_streams", on)
    data = Data(cuda, Asked())
    with prepared(cuda, data.asked) as product:
        algorithm = product.search(0)[0]
        if on and stream:
            with pytest.raises(cuda.cublas_lt.cuBLASLtError, match=f"stream {stream}") as caught:
                product.run(algorithm, tuple(data.addresses), stream=stream)
            assert caught.value.status == INVALID_VALUE
        else:
            product.run(algorithm, tuple(data.addresses), stream=stream)


@pytest.mark.parametrize("on", [False, True])
def test_freeing_without_a_wait(on):
    """Work that still uses the memory fails; with a wait it is done before."""
    cuda = with_switch("free_without_wait", on)
    runtime = cuda.runtime
    address = runtime.cudaMalloc(1000)[1]
    runtime.cudaMemsetAsync(address, 1, 1000, 1)
    runtime.cudaFree(address)
    cuda.drain()
    assert ["illegal address" in x for x in cuda.faults] == [True] * on
