"""The software cuBLASLt and cuBLAS refuse what the real ones refuse, and notice misuse."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from software_cuda import DeviceModel, Software
from software_cuda.asking import Asked, Data, check, prepared, refusal
from software_cuda.tables import (
    C_32F,
    C_64F,
    R_8F_E4M3,
    R_8F_E5M2,
    R_8I,
    R_16BF,
    R_16F,
    R_32F,
    R_32I,
    R_64F,
    ROWS,
)  # fmt: skip
from support.oracles import round_to

LEGACY = 1
INVALID_VALUE, NOT_SUPPORTED = 7, 15
BIAS, RELU, GELU = 4, 2, 32
Array = np.ndarray[Any, Any]


@pytest.fixture
def cuda() -> Iterator[Software]:
    made = Software([DeviceModel()] * 2, "lazy", 130100)
    yield made
    made.drain()
    assert made.faults == []


@pytest.fixture(scope="module")
def shared() -> Iterator[Software]:
    """For tests that run many products and do nothing wrong."""
    made = Software([DeviceModel()], "lazy", 130100)
    yield made
    made.drain()
    assert made.faults == []


COMBINATIONS = [(row, compute) for row in ROWS for compute in sorted(row.compute)]


# -- what is refused ------------------------------------------------------------------------------


@pytest.mark.parametrize(("version", "refuses"), [(120900, False), (130000, True)])
def test_one_matrix_by_two_descriptors(version: int, refuses: bool) -> None:
    cuda = Software([DeviceModel()], "lazy", version)
    asked = Asked(beta=1.0)
    data = Data(cuda, asked, 0)
    a, b, c, _ = data.addresses
    with prepared(cuda, asked) as product:
        (found, *_) = product.search(0)
        if not refuses:
            product.run(found, (a, b, c, c), 0)
            return
        with pytest.raises(cuda.cublas_lt.cuBLASLtError, match="C is D, by another") as caught:
            product.run(found, (a, b, c, c), 0)
        assert caught.value.status == INVALID_VALUE


TYPES = (R_32F, R_64F, R_16F, R_16BF, R_8I, R_32I, C_32F, C_64F, R_8F_E4M3, R_8F_E5M2)


@pytest.mark.sweep
def test_every_other_combination_of_types_is_refused(cuda: Software) -> None:
    allowed = {(c, r.scale, r.a, r.b, r.c, r.d) for r, c in COMBINATIONS}
    tried = 0
    for compute, scale, a, d in itertools.product(
        (64, 68, 70, 72, 77), (R_32F, R_64F, R_32I, C_32F, C_64F), TYPES, TYPES
    ):
        if (compute, scale, a, a, d, d) not in allowed:
            found = refusal(cuda, Asked(op_a=1, compute=compute, scale=scale, a=a, b=a, c=d, d=d))
            assert (found.status, "no such combination" in str(found)) == (NOT_SUPPORTED, True)
            tried += 1
    assert tried > 400
    for changes in ({"b": R_16F}, {"c": R_16F}, {"a": R_16F, "b": R_16BF}, {"a": R_8F_E5M2, "b": R_8F_E5M2}):
        assert refusal(cuda, replace(Asked(op_a=1), **changes)).status == NOT_SUPPORTED


FP8 = Asked(op_a=1, a=R_8F_E4M3, b=R_8F_E4M3)
INT8 = Asked(op_a=1, compute=72, scale=R_32I, a=R_8I, b=R_8I, c=R_32I, d=R_32I)


@pytest.mark.parametrize(
    ("asked", "status", "words"),
    [
        (Asked(gap=(-1, 0, 0, 0)), INVALID_VALUE, "A: leading dimension 31"),
        (Asked(gap=(0, 0, 0, -1)), INVALID_VALUE, "D: leading dimension"),
        (Asked(order=(0, 1, 0, 0), gap=(0, -1, 0, 0)), INVALID_VALUE, "B: leading dimension 15"),
        (Asked(m=0), INVALID_VALUE, "nothing in"),
        (Asked(batch=2, strides=(None, None, None, 0)), INVALID_VALUE, "D overlaps itself"),
        (Asked(batch=2, strides=(None, None, None, 511)), INVALID_VALUE, "D overlaps itself"),
        (Asked(order=(0, 0, 0, 1), epilogue=BIAS), NOT_SUPPORTED, "row-major D"),
        (Asked(order=(0, 0, 0, 1), epilogue=RELU), NOT_SUPPORTED, "row-major D"),
        (Asked(epilogue=BIAS, bias_type=R_16F), NOT_SUPPORTED, "bias of type"),
        (replace(FP8, epilogue=BIAS, bias_type=R_32F), NOT_SUPPORTED, "bias of type 0, not 14"),
        (Asked(compute=70, scale=R_64F, a=R_64F, b=R_64F, c=R_64F, d=R_64F, epilogue=BIAS), NOT_SUPPORTED, "epilogue"),
        (Asked(scale=C_32F, a=C_32F, b=C_32F, c=C_32F, d=C_32F, epilogue=RELU), NOT_SUPPORTED, "epilogue"),
        (replace(INT8, epilogue=RELU), NOT_SUPPORTED, "epilogue"),
        (replace(FP8, op_a=0), NOT_SUPPORTED, "FP8 kernels are TN"),
        (replace(FP8, op_b=1), NOT_SUPPORTED, "FP8 kernels are TN"),
        (replace(FP8, k=24), NOT_SUPPORTED, "steps of 16 bytes|multiples of 16 bytes"),
        (replace(FP8, m=6), NOT_SUPPORTED, "steps of 16 bytes|multiples of 16 bytes"),
        (replace(FP8, gap=(8, 0, 0, 0)), NOT_SUPPORTED, "multiples of 16 bytes"),
        (replace(FP8, alignment=8), NOT_SUPPORTED, "no algorithm for pointers"),
        (replace(INT8, op_a=0), NOT_SUPPORTED, "int8 kernels are TN"),
        (replace(INT8, k=18), NOT_SUPPORTED, "multiples of 4"),
        (replace(INT8, m=6), NOT_SUPPORTED, "multiples of 4"),
        (replace(INT8, gap=(0, 2, 0, 0)), NOT_SUPPORTED, "multiples of 4"),
        (replace(INT8, alignment=2), NOT_SUPPORTED, "no algorithm for pointers"),
        (Asked(alignment=2), NOT_SUPPORTED, "no algorithm for pointers"),
    ],
)  # fmt: skip
def test_refusals(cuda: Software, asked: Asked, status: int, words: str) -> None:
    found = refusal(cuda, asked)
    assert found.status == status
    with pytest.raises(type(found), match=words):
        raise found


def test_extents_must_fit(cuda: Software) -> None:
    with prepared(cuda, Asked()) as product:
        for name, number in (("COLS", 47), ("ROWS", 31)):
            before = 48 if name == "COLS" else 32
            product.set("matrix_layout", product.layouts[0], name, number)
            with pytest.raises(cuda.cublas_lt.cuBLASLtError, match="extents do not fit"):
                product.search()
            product.set("matrix_layout", product.layouts[0], name, before)
        product.set("matrix_layout", product.layouts[0], "BATCH_COUNT", 2)
        with pytest.raises(cuda.cublas_lt.cuBLASLtError, match="batch counts differ"):
            product.search()


@pytest.mark.parametrize(("capability", "fits"), [((8, 0), False), ((8, 9), True), ((9, 0), True), ((10, 0), True)])
def test_float8_needs_its_devices(capability: tuple[int, int], fits: bool) -> None:
    cuda = Software([DeviceModel(capability=capability)], "lazy", 130100)
    if fits:
        check(cuda, replace(FP8, k=16))
    else:
        assert "no FP8 on compute capability (8, 0)" in str(refusal(cuda, FP8))
    other = replace(FP8, op_a=0, k=16)
    if capability == (10, 0):
        check(cuda, other)
    assert cuda.faults == []


def test_matrices_of_a_batch_may_are_side_by_side(shared: Software) -> None:
    check(shared, Asked(m=8, batch=3, gap=(0, 0, 16, 16), strides=(None, None, 8, 8)))


def test_scales_of_float8(shared: Software) -> None:
    asked = replace(FP8, k=16)
    data = Data(shared, asked, 0)
    scales = [data.new(4) for _ in range(2)]
    with prepared(shared, asked) as product:
        for name, address in zip(("A_SCALE_POINTER", "B_SCALE_POINTER"), scales, strict=True):
            product.set("matmul_desc", product.operation, name, address)
        product.run(product.search(0)[0], tuple(data.addresses), 0)
        # They are read when the product runs.
        for address, number in zip(scales, (2.0, 0.25), strict=True):
            data.bytes(address, 4).view(np.float32)[0] = number
        shared.drain()
    np.testing.assert_array_equal(data.matrix(3), 0.5 * data.expected())
    with prepared(shared, Asked()) as product:
        product.set("matmul_desc", product.operation, "A_SCALE_POINTER", scales[0])
        with pytest.raises(shared.cublas_lt.cuBLASLtError, match="scales only for FP8") as caught:
            product.search()
    assert caught.value.status == INVALID_VALUE


# -- algorithms, alignment, workspace -------------------------------------------------------------


def test_defaults_of_a_preference_are_no_workspace_and_256_bytes(cuda: Software) -> None:
    lt = cuda.cublas_lt
    with prepared(cuda, Asked(count=8)) as product:
        wanted = lt.matmul_preference_create()
        results, returned = lt.MatmulHeuristicResult(8), np.zeros(1, np.int32)
        arguments = (product.handle, product.operation, *product.layouts, wanted)
        lt.matmul_algo_get_heuristic(*arguments, 8, results.ptr, returned.ctypes.data)
        assert [int(x) for x in np.atleast_1d(results.workspace_size)[: returned[0]]] == [0] * returned[0]
        assert returned[0] >= 3
        with pytest.raises(lt.cuBLASLtError, match="0 algorithms"):
            lt.matmul_algo_get_heuristic(*arguments, 0, results.ptr, returned.ctypes.data)
        lt.matmul_preference_destroy(wanted)


def test_an_odd_leading_dimension_leaves_fewer_algorithms(shared: Software) -> None:
    counts = [check(shared, Asked(gap=(gap,) * 4, a=R_16F, b=R_16F)) for gap in (0, 4, 2, 1)]
    assert counts == sorted(counts, reverse=True)
    assert counts[0] > counts[1] > counts[2] > counts[3] > 0
    assert check(shared, Asked(offset=4, alignment=4)) < counts[0]


def test_pointers_must_be_aligned_as_promised(cuda: Software) -> None:
    asked = Asked()
    data = Data(cuda, asked, 0)
    workspace = data.new(1 << 20)
    with prepared(cuda, asked) as product:
        strict, *_, lax = product.search()
        for i in (0, 1, 3):
            pointers = list(data.addresses)
            pointers[i] += 8
            with pytest.raises(cuda.cublas_lt.cuBLASLtError, match="wants multiples of 16"):
                product.run(strict, tuple(pointers), workspace)
        product.run(strict, (*data.addresses[:2], 3, data.addresses[3]), workspace)  # C is not read
        pointers = tuple(x + 2 for x in data.addresses)
        with pytest.raises(cuda.cublas_lt.cuBLASLtError, match="wants multiples of 4"):
            product.run(lax, pointers, workspace)
        with pytest.raises(cuda.cublas_lt.cuBLASLtError, match="A is null"):
            product.run(lax, (0, *data.addresses[1:]), workspace)


def test_a_bias_is_aligned_as_it_was_when_the_algorithm_was_sought(cuda: Software) -> None:
    asked = Asked(epilogue=BIAS)
    data = Data(cuda, asked, 0)
    with prepared(cuda, asked) as product:
        product.set("matmul_desc", product.operation, "BIAS_POINTER", data.bias)
        strict = product.search(0)
        product.set("matmul_desc", product.operation, "BIAS_POINTER", data.bias + 4)
        lax = product.search(0)
        assert 0 < len(lax) < len(strict)
        product.run(lax[0], tuple(data.addresses), 0)
        with pytest.raises(cuda.cublas_lt.cuBLASLtError, match=r"bias at .* wants multiples of 16"):
            product.run(strict[0], tuple(data.addresses), 0)
        product.set("matmul_desc", product.operation, "BIAS_POINTER", 0)
        with pytest.raises(cuda.cublas_lt.cuBLASLtError, match="no pointer to it"):
            product.search(0)
    data.free()
    assert cuda.runtime.sticky  # the bias was one number too far
    cuda.faults.clear()


def test_workspaces(cuda: Software) -> None:
    asked = Asked()
    data = Data(cuda, asked, 0)
    workspace = data.new(1 << 20)
    with prepared(cuda, asked) as product:
        algorithm = next(x for x in product.search() if x[1])
        assert all(size <= 1024 for _, size in product.search(1024))
        with pytest.raises(cuda.cublas_lt.cuBLASLtError, match="bytes of workspace, not"):
            product.run((algorithm[0], algorithm[1] - 1), tuple(data.addresses), workspace)
        for address in (workspace + 128, 0):
            with pytest.raises(cuda.cublas_lt.cuBLASLtError, match="not aligned to 256"):
                product.run(algorithm, tuple(data.addresses), address)
        product.run(algorithm, tuple(data.addresses), workspace + (1 << 20) - 512)
        assert cuda.runtime.cudaDeviceSynchronize()[0].name == "cudaErrorIllegalAddress"
        assert "workspace: " in cuda.faults.pop()
        cuda.forgive()


@pytest.mark.parametrize("shares", [False, True])
def test_two_streams_with_one_workspace(cuda: Software, shares: bool) -> None:
    asked = Asked()
    workspaces = [cuda.runtime.cudaMalloc(1 << 16)[1] for _ in range(2)]
    cuda.runtime.scheduler.use("all")
    with prepared(cuda, asked) as product:
        algorithm = next(x for x in product.search() if x[1])
        all_data = [Data(cuda, asked, seed) for seed in range(2)]
        for data, workspace in zip(all_data, workspaces, strict=True):
            on = int(cuda.runtime.cudaStreamCreateWithFlags(1)[1])
            one, zero = np.ones(1, np.float32), np.zeros(1, np.float32)
            algo = np.frombuffer(algorithm[0], np.uint8).copy()
            a, b, c, d = data.addresses
            la, lb, lc, ld = product.layouts
            cuda.cublas_lt.matmul(
                product.handle, product.operation, one.ctypes.data, a, la, b, lb, zero.ctypes.data, c, lc, d, ld,
                algo.ctypes.data, workspaces[0] if shares else workspace, algorithm[1], on,
            )  # fmt: skip
        cuda.drain()
    right = [np.array_equal(x.matrix(3), x.expected()) for x in all_data]
    assert all(right) is not shares
    assert ["workspace of a running product" in x for x in cuda.faults] == [True] * len(cuda.faults)
    assert bool(cuda.faults) is shares
    cuda.faults.clear()


def test_an_algorithm_is_for_its_types_and_its_device(cuda: Software) -> None:
    with prepared(cuda, Asked()) as product, prepared(cuda, Asked(compute=77)) as other:
        algorithm, workspace = product.search()[0]
        data = np.frombuffer(algorithm, np.uint8).copy()
        result = cuda.cublas_lt.MatmulHeuristicResult(1)
        check_it = cuda.cublas_lt.matmul_algo_check
        check_it(product.handle, product.operation, *product.layouts, data.ctypes.data, result.ptr)
        assert int(np.atleast_1d(result.workspace_size)[0]) == workspace
        with pytest.raises(cuda.cublas_lt.cuBLASLtError, match="for other types"):
            check_it(other.handle, other.operation, *other.layouts, data.ctypes.data, result.ptr)
        data[:] = 0
        with pytest.raises(cuda.cublas_lt.cuBLASLtError, match="no algorithm of this library"):
            check_it(product.handle, product.operation, *product.layouts, data.ctypes.data, result.ptr)


def test_the_first_algorithm_is_not_the_fastest(cuda: Software) -> None:
    asked = Asked()
    data = Data(cuda, asked, 0)
    workspace = data.new(1 << 20)
    marks = [cuda.runtime.cudaEventCreateWithFlags(0)[1] for _ in range(2)]

    def times() -> list[float]:
        found = []
        with prepared(cuda, asked) as product:
            for algorithm in product.search():
                cuda.runtime.cudaEventRecord(marks[0], LEGACY)
                product.run(algorithm, tuple(data.addresses), workspace)
                cuda.runtime.cudaEventRecord(marks[1], LEGACY)
                cuda.runtime.cudaEventSynchronize(marks[1])
                found.append(cuda.runtime.cudaEventElapsedTime(*marks)[1])
        return found

    before = times()
    assert min(before) < 0.9 * before[0]
    cuda.cublas_lt.times[0, "32x32"] = 0.1
    after = times()
    assert min(after) == after[-1] < 0.2 * before[0]


# -- handles and descriptors ----------------------------------------------------------------------


def test_objects_that_are_none(cuda: Software) -> None:
    lt = cuda.cublas_lt
    with prepared(cuda, Asked()) as product:
        gone = lt.matrix_layout_create(0, 4, 4, 4)
        lt.matrix_layout_destroy(gone)
        attempts = [
            lambda: lt.matrix_layout_destroy(gone),
            lambda: lt.destroy(gone),
            lambda: lt.matmul_desc_destroy(product.handle),
            lambda: lt.matmul_algo_get_heuristic(product.handle, gone, *product.layouts, gone, 1, 0, 0),
        ]  # fmt: skip
        for attempt in attempts:
            with pytest.raises(lt.cuBLASLtError, match=r"CUBLAS_STATUS_INVALID_VALUE .* not a"):
                attempt()
        assert len(cuda.faults) == len(attempts)
        cuda.faults.clear()
        number = np.zeros(1, np.int64)
        attribute = lt.MatmulDescAttribute.TRANSA
        with pytest.raises(lt.cuBLASLtError, match="has 4 bytes, not 8"):
            lt.matmul_desc_set_attribute(product.operation, attribute, number.ctypes.data, 8)
        with pytest.raises(lt.cuBLASLtError, match="a null pointer"):
            lt.matmul_desc_set_attribute(product.operation, attribute, 0, 4)
        number[0], pointer = 77, number.ctypes.data
        for unknown in (-1, 9, 63):
            with pytest.raises(lt.cuBLASLtError, match=f"no attribute {unknown}$") as caught:
                lt.matmul_desc_set_attribute(product.operation, unknown, pointer, 4)
            assert caught.value.status == INVALID_VALUE
            with pytest.raises(lt.cuBLASLtError, match=f"no attribute {unknown}$"):
                lt.matmul_desc_get_attribute(product.operation, unknown, pointer, 4, 0)
        for nbytes in (1, 8):  # a buffer that is too large is refused as well
            with pytest.raises(lt.cuBLASLtError, match=f"has 4 bytes, not {nbytes}"):
                lt.matmul_desc_get_attribute(product.operation, attribute, pointer, nbytes, 0)
        lt.matmul_desc_get_attribute(product.operation, attribute, 0, 0, pointer)
        assert number[0] == 4
        assert cuda.live()["handles"] == cuda.live()["descriptors"] == 1
        assert cuda.live()["layouts"] == 4
    assert not any(cuda.live().values())


def test_the_configuration_of_64_zeros_is_zero(cuda: Software) -> None:
    """As with the real library, which looks at the bytes when it is to multiply, or is asked for capabilities."""
    lt, zeros = cuda.cublas_lt, np.zeros(64, np.uint8)
    for member in lt.MatmulAlgoConfigAttribute:
        number = np.full(1, 7, lt.get_matmul_algo_config_attribute_dtype(member))
        lt.matmul_algo_config_get_attribute(zeros.ctypes.data, member, number.ctypes.data, number.nbytes, 0)
        assert number[0] == 0
    with pytest.raises(lt.cuBLASLtError, match="no algorithm of this library") as caught:
        lt.matmul_algo_cap_get_attribute(
            zeros.ctypes.data, lt.MatmulAlgoCapAttribute.NUMERICAL_IMPL_FLAGS, number.ctypes.data, 8, 0
        )  # fmt: skip
    assert caught.value.status == INVALID_VALUE


def test_a_handle_belongs_to_a_device(cuda: Software) -> None:
    with prepared(cuda, Asked()) as product:
        cuda.runtime.cudaSetDevice(1)
        with pytest.raises(cuda.cublas_lt.cuBLASLtError, match="another device's"):
            product.search()
        cuda.runtime.cudaSetDevice(0)
    assert "a handle of device 0 is used on 1" in cuda.faults.pop()


def test_two_threads_with_one_handle(cuda: Software, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = Asked()
    data = [Data(cuda, asked, seed) for seed in range(2)]
    meeting = threading.Barrier(2, timeout=20)
    with prepared(cuda, asked) as product:
        algorithm = product.search(0)[0]
        monkeypatch.setattr(cuda.cublas_lt, "let_others_run", meeting.wait)
        threads = [
            threading.Thread(target=product.run, args=(algorithm, tuple(x.addresses), 0)) for x in data
        ]  # fmt: skip
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        monkeypatch.undo()
    assert "two threads use one handle at the same time" in cuda.faults
    cuda.faults.clear()


def test_d_must_not_overlap_what_is_read(cuda: Software) -> None:
    asked = Asked(m=16, n=16, k=16)
    data = Data(cuda, asked, 0)
    with prepared(cuda, asked) as product:
        a, b, c, _ = data.addresses
        product.run(product.search(0)[0], (a, b, c, a), 0)
    assert cuda.faults.pop() == "D overlaps A"


def test_a_handle_during_a_capture(cuda: Software) -> None:
    on = int(cuda.runtime.cudaStreamCreateWithFlags(1)[1])
    cuda.runtime.begin_capture(on)
    with pytest.raises(cuda.cublas_lt.cuBLASLtError, match="ALLOC_FAILED"):
        cuda.cublas_lt.create()
    assert "during a capture" in cuda.faults.pop()


def test_a_search_during_a_capture() -> None:
    cuda = Software([DeviceModel()], "lazy", 130300)
    on = int(cuda.runtime.cudaStreamCreateWithFlags(1)[1])
    with prepared(cuda, Asked(m=16, n=16, k=16)) as product:
        product.search(0)
        cuda.runtime.begin_capture(on, "Relaxed")
        with pytest.raises(cuda.cublas_lt.cuBLASLtError, match="INTERNAL_ERROR") as caught:
            product.search(0)
    assert int(caught.value.status) == 14


@pytest.mark.parametrize("mode", ["Global", "Relaxed"])
def test_a_pool_is_not_made_during_a_capture(cuda: Software, mode: str) -> None:
    on = int(cuda.runtime.cudaStreamCreateWithFlags(1)[1])
    cuda.runtime.begin_capture(on, mode)
    wanted = cuda.runtime.cudaMemPoolProps()
    wanted.allocType = cuda.runtime.cudaMemAllocationType.cudaMemAllocationTypePinned
    wanted.location.type = cuda.runtime.cudaMemLocationType.cudaMemLocationTypeDevice
    status, _ = cuda.runtime.cudaMemPoolCreate(wanted)
    assert status.name == "cudaErrorStreamCaptureUnsupported"
    cuda.faults.clear()


def test_a_call_that_is_made_to_fail(cuda: Software) -> None:
    with (
        cuda.fail("cublas_lt.create", status=1),
        pytest.raises(cuda.cublas_lt.cuBLASLtError, match="NOT_INITIALIZED") as caught,
    ):
        cuda.cublas_lt.create()
    assert caught.value.status == 1
    assert cuda.live()["handles"] == 0
    operation = cuda.cublas_lt.matmul_desc_create(68, 0)
    with cuda.fail("matmul_desc_destroy"), pytest.raises(cuda.cublas_lt.cuBLASLtError, match="INTERNAL_ERROR"):
        cuda.cublas_lt.matmul_desc_destroy(operation)
    assert cuda.live()["descriptors"] == 0


# -- cuBLAS ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("mode", "rounded"), [(0, "fp32"), (2, "fp32"), (3, "tf32"), (19, "tf32"), (16, "fp32")])
def test_math_modes_of_cublas(cuda: Software, rng: Any, mode: int, rounded: str) -> None:
    blas = cuda.cublas
    handle = blas.create()
    blas.set_math_mode(handle, mode)
    assert blas.get_math_mode(handle) == mode
    for wrong in (5, 7, 32, 64):
        with pytest.raises(blas.cuBLASError, match="there is no math mode"):
            blas.set_math_mode(handle, wrong)
    x, y = (rng.standard_normal((8, 1)).astype(np.float32), rng.standard_normal((1, 4)).astype(np.float32))
    addresses = [cuda.runtime.cudaMalloc(n)[1] for n in (32, 16, 128)]
    for address, values in zip(addresses, (x, y), strict=False):
        cuda.runtime.cudaMemcpyAsync(address, values.ctypes.data, values.nbytes, 4, LEGACY)
    one, zero = np.ones(1, np.float32), np.zeros(1, np.float32)
    a, b, c = addresses
    blas.set_stream(handle, LEGACY)
    blas.sgemm(handle, 0, 0, 8, 4, 1, one.ctypes.data, a, 8, b, 1, zero.ctypes.data, c, 8)
    cuda.drain()
    found = cuda.runtime.memory.at(c, 128, 0, "").view(np.float32).reshape(8, 4, order="F")
    want = round_to(x, rounded).astype(np.float64) @ round_to(y, rounded).astype(np.float64)
    np.testing.assert_array_equal(found, want.astype(np.float32))
    blas.destroy(handle)
    assert cuda.live()["cublas_handles"] == 0


def test_a_new_stream_takes_the_workspace_away(cuda: Software) -> None:
    handle = cuda.cublas.create()
    cuda.cublas.set_workspace(handle, 512, 1024)
    assert cuda.cublas.objects.get(handle, "cuBLAS handle").workspace == (512, 1024)
    cuda.cublas.set_stream(handle, LEGACY)
    assert cuda.cublas.objects.get(handle, "cuBLAS handle").workspace is None
    with pytest.raises(cuda.cublas.cuBLASError, match="not aligned"):
        cuda.cublas.set_workspace(handle, 16, 1024)
    cuda.cublas.destroy(handle)
