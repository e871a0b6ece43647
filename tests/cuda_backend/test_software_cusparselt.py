"""The software cuSPARSELt itself: the refusals of the real library, and what a compressed matrix holds."""

import inspect

import numpy as np
import pytest
from nvmath.bindings import cusparseLt as real

from software_cuda import DeviceModel, Software, tables
from software_cuda.cusparselt import CusparseLt, Status

COL, ROW = 1, 2
R_16F, R_16BF, R_8I, R_32F = tables.R_16F, tables.R_16BF, tables.R_8I, tables.R_32F
F32, I32 = int(real.ComputeType.COMPUTE_32F), int(real.ComputeType.COMPUTE_32I)


def describe(cuda, handle, structured, *stored):
    lt = cuda.cusparse_lt
    if structured:
        return int(lt.structured_descriptor_init(handle, *stored, 0))
    return int(lt.dense_descriptor_init(handle, *stored))


def refused(status, call, *arguments):
    with pytest.raises(real.cuSPARSELtError) as caught:
        call(*arguments)
    assert caught.value.status == status


@pytest.mark.parametrize(
    ("structured", "stored", "status"),
    [
        (False, (8, 128, 128, 16, R_16F, ROW), None),
        (False, (4, 128, 128, 16, R_16F, ROW), Status.NOT_SUPPORTED),
        (True, (8, 128, 128, 16, R_16F, ROW), Status.NOT_SUPPORTED),
        (True, (16, 128, 128, 16, R_16F, ROW), None),
        (True, (48, 128, 128, 16, R_8I, ROW), Status.NOT_SUPPORTED),
        (True, (96, 128, 128, 16, R_8I, ROW), None),
        (False, (128, 128, 136, 16, R_16F, ROW), None),
        (False, (128, 128, 132, 16, R_16F, ROW), Status.NOT_SUPPORTED),
        (False, (128, 128, 127, 16, R_16F, ROW), Status.INVALID_VALUE),
        (False, (128, 64, 64, 16, R_16F, COL), Status.INVALID_VALUE),
        (False, (128, 128, 128, 8, R_16F, ROW), Status.NOT_SUPPORTED),
        (False, (0, 64, 64, 16, R_16F, ROW), Status.INVALID_VALUE),
        (False, (64, 64, 64, 16, tables.R_64F, ROW), Status.INVALID_VALUE),
        (False, (64, 64, 64, 16, R_16F, 3), Status.INVALID_VALUE),
    ],
)
def test_descriptors(cuda, structured, stored, status):
    lt = cuda.cusparse_lt
    handle = lt.init()
    if status is None:
        lt.mat_descriptor_destroy(describe(cuda, handle, structured, *stored))
    else:
        refused(status, describe, cuda, handle, structured, *stored)
    lt.destroy(handle)
    assert not any(lt.live().values())


@pytest.mark.parametrize(
    ("kind", "result", "compute", "op_b", "order_b", "status"),
    [
        (R_16F, R_16F, F32, 0, ROW, None),
        (R_16F, R_32F, F32, 0, ROW, Status.NOT_SUPPORTED),
        (R_16BF, R_16BF, F32, 1, ROW, None),
        (R_16BF, R_16F, F32, 0, ROW, Status.NOT_SUPPORTED),
        (R_32F, R_32F, F32, 0, ROW, None),
        (R_8I, tables.R_32I, I32, 1, ROW, None),
        (R_8I, tables.R_32I, I32, 0, COL, None),
        (R_8I, tables.R_32I, I32, 0, ROW, Status.NOT_SUPPORTED),
        (R_8I, R_32F, I32, 1, ROW, Status.NOT_SUPPORTED),
        (R_8I, R_8I, F32, 1, ROW, Status.NOT_SUPPORTED),
    ],
)
def test_products(cuda, kind, result, compute, op_b, order_b, status):
    lt = cuda.cusparse_lt
    handle = lt.init()
    a, b, d = (
        describe(cuda, handle, structured, 64, 64, 64, 16, dtype, order)
        for structured, dtype, order in ((True, kind, ROW), (False, kind, order_b), (False, result, ROW))
    )
    wide = describe(cuda, handle, False, 64, 64, 96, 16, result, ROW)
    if status is None:
        made = [lt.matmul_descriptor_init(handle, 0, op_b, a, b, d, d, compute)]
        made.append(lt.matmul_alg_selection_init(handle, made[0], 0))
        made.append(lt.matmul_plan_init(handle, *made))
        lt.matmul_plan_destroy(made.pop())
        lt.matmul_alg_selection_destroy(made.pop())
        lt.matmul_descriptor_destroy(made.pop())
        refused(Status.NOT_SUPPORTED, lt.matmul_descriptor_init, handle, 0, op_b, a, b, wide, d, compute)
        refused(Status.INVALID_VALUE, lt.matmul_descriptor_init, handle, 0, op_b, b, b, d, d, compute)
        refused(Status.INVALID_VALUE, lt.matmul_descriptor_init, handle, 0, op_b, a, a, d, d, compute)
    else:
        refused(status, lt.matmul_descriptor_init, handle, 0, op_b, a, b, d, d, compute)
    for matrix in (a, b, d, wide):
        lt.mat_descriptor_destroy(matrix)
    lt.destroy(handle)
    assert not any(lt.live().values())


def test_misuse_is_noted(cuda):
    lt = cuda.cusparse_lt
    handle = lt.init()
    refused(Status.INVALID_VALUE, lt.mat_descriptor_destroy, 1234)
    made = describe(cuda, handle, False, 64, 64, 64, 16, R_16F, ROW)
    assert lt.live()["mat_descriptors"] == 1
    lt.mat_descriptor_destroy(made)
    refused(Status.INVALID_VALUE, lt.mat_descriptor_destroy, made)
    lt.destroy(handle)
    assert len(cuda.faults) == 2
    cuda.forgive()


def test_devices_without_sparse_units():
    refused(Status.ARCH_MISMATCH, Software([DeviceModel(capability=(7, 5))]).cusparse_lt.init)


@pytest.mark.parametrize("pattern", [True, False])
def test_a_dense_matrix_is_not_taken_for_a_compressed_one(cuda, pattern):
    lt, runtime = cuda.cusparse_lt, cuda.runtime
    handle = lt.init()
    a = describe(cuda, handle, True, 64, 64, 64, 16, R_16F, ROW)
    b, d = (describe(cuda, handle, False, 64, 64, 64, 16, R_16F, ROW) for _ in "bd")
    made = [lt.matmul_descriptor_init(handle, 0, 0, a, b, d, d, F32)]
    made.append(lt.matmul_alg_selection_init(handle, made[0], 0))
    made.append(lt.matmul_plan_init(handle, *made))
    values = np.tile(np.array([1, 0, 2, 0] if pattern else [1, 3, 2, 0], np.float16), (64, 16))
    nbytes, buffer_bytes = lt.sp_mma_compressed_size2(handle, a)
    sizes = (4, buffer_bytes, nbytes, lt.matmul_get_workspace(handle, made[2]))
    flag, buffer, compressed, workspace = (runtime.cudaMalloc(n)[1] for n in sizes)
    dense, right, out = (runtime.cudaMalloc(values.nbytes)[1] for _ in range(3))
    runtime.cudaMemcpyAsync(dense, values.ctypes.data, values.nbytes, 4, 1)
    runtime.cudaMemcpyAsync(right, values.ctypes.data, values.nbytes, 4, 1)
    lt.sp_mma_prune_check2(handle, a, 1, 0, dense, flag, 1)
    lt.sp_mma_compress2(handle, a, 1, 0, dense, compressed, buffer, 1)
    one, zero, streams = np.ones(1, np.float32), np.zeros(1, np.float32), np.ones(1, np.uint64)
    rest = (right, zero.ctypes.data, out, out, workspace, streams.ctypes.data, 1)
    lt.matmul(handle, made[2], one.ctypes.data, compressed, *rest)
    cuda.drain()
    assert runtime.memory.at(flag, 4, 0, "").view(np.int32)[0] == (not pattern)
    found = runtime.memory.at(out, values.nbytes, 0, "").view(np.float16).reshape(64, 64)
    assert np.array_equal(found, values @ values) is pattern
    lt.matmul(handle, made[2], one.ctypes.data, dense, *rest)
    cuda.drain()
    assert any("no compressed matrix" in fault for fault in cuda.faults)
    cuda.forgive()


def test_functions_have_the_parameters_of_the_bindings():
    """The docstrings of the bindings begin with the signature."""
    own = [name for name, x in vars(CusparseLt).items() if hasattr(x, "__wrapped__")]
    assert len(own) >= 18
    for name in own:
        signature = (getattr(real, name).__doc__ or "").partition(")")[0].partition("(")
        wanted = [x.split()[-1] for x in signature[2].split(", ") if x]
        found = list(inspect.signature(getattr(CusparseLt, name)).parameters)[1:]
        assert len(found) == len(wanted), (name, wanted, found)
