"""The software cuBLASLt itself: the real library's refusals, and misuse that it notices.

Its results are those of the backend's tests.
"""

import threading
from dataclasses import replace

import numpy as np
import pytest

from software_cuda import Software
from software_cuda.asking import BIAS, RELU, Asked, Data, prepared, refusal
from software_cuda.tables import R_8F_E4M3, R_8F_E5M2, R_8I, R_16F, R_32F, R_32I, R_64F

INVALID_VALUE, INTERNAL_ERROR, NOT_SUPPORTED = 7, 14, 15
FP8 = Asked(op_a=1, a=R_8F_E4M3, b=R_8F_E4M3)
INT8 = Asked(op_a=1, compute=72, scale=R_32I, a=R_8I, b=R_8I, c=R_32I, d=R_32I)
DOUBLE = Asked(compute=70, scale=R_64F, a=R_64F, b=R_64F, c=R_64F, d=R_64F)


# -- refusals -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "status", "words"),
    [
        (Asked(b=R_16F), NOT_SUPPORTED, "no such combination"),
        (Asked(a=R_8F_E5M2, b=R_8F_E5M2), NOT_SUPPORTED, "no such combination"),
        (Asked(gap=(-1, 0, 0, 0)), INVALID_VALUE, "A: leading dimension 31"),
        (Asked(order=(0, 1, 0, 0), gap=(0, -1, 0, 0)), INVALID_VALUE, "B: leading dimension 15"),
        (Asked(m=0), INVALID_VALUE, "nothing in"),
        (Asked(batch=2, strides=(None, None, None, 511)), INVALID_VALUE, "D overlaps itself"),
        (Asked(order=(0, 0, 0, 1), epilogue=BIAS), NOT_SUPPORTED, "row-major D"),
        (Asked(epilogue=BIAS, bias_type=R_16F), NOT_SUPPORTED, "bias of type"),
        (replace(FP8, epilogue=BIAS, bias_type=R_32F), NOT_SUPPORTED, "bias of type 0, not 14"),
        (replace(DOUBLE, epilogue=BIAS), NOT_SUPPORTED, "epilogue"),
        (replace(INT8, epilogue=RELU), NOT_SUPPORTED, "epilogue"),
        (replace(FP8, op_a=0), NOT_SUPPORTED, "FP8 and FP4 kernels are TN"),
        (replace(FP8, order=(0, 0, 1, 1)), NOT_SUPPORTED, "FP8 and FP4 kernels are column-major"),
        (replace(FP8, k=24), NOT_SUPPORTED, "multiples of 16 bytes"),
        (replace(FP8, k=24, gap=(8, 8, 0, 0)), NOT_SUPPORTED, "steps of 16 bytes"),
        (replace(FP8, alignment=8), NOT_SUPPORTED, "no algorithm for pointers"),
        (replace(INT8, op_a=0), NOT_SUPPORTED, "int8 kernels are TN"),
        (replace(INT8, k=18), NOT_SUPPORTED, "multiples of 4"),
        (replace(INT8, m=6), NOT_SUPPORTED, "multiples of 4"),
        (replace(INT8, gap=(0, 2, 0, 0)), NOT_SUPPORTED, "multiples of 4"),
        (replace(INT8, alignment=2), NOT_SUPPORTED, "no algorithm for pointers"),
        (Asked(alignment=2), NOT_SUPPORTED, "no algorithm for pointers"),
    ],
)  # fmt: skip
def test_products_that_are_refused(cuda, asked, status, words):
    found = refusal(cuda, asked)
    assert (found.status, words in str(found)) == (status, True), found


@pytest.mark.parametrize(
    ("kind", "attribute", "number", "words"),
    [
        ("matrix_layout", "COLS", 47, "extents do not fit"),
        ("matrix_layout", "ROWS", 31, "extents do not fit"),
        ("matrix_layout", "BATCH_COUNT", 2, "batch counts differ"),
        ("matmul_desc", "A_SCALE_POINTER", 256, "scales only for FP8 and FP4"),
        ("matmul_desc", "EPILOGUE", BIAS, "no pointer to it"),
    ],
)
def test_descriptors_that_are_refused(cuda, kind, attribute, number, words):
    with prepared(cuda, Asked()) as product:
        target = product.layouts[0] if kind == "matrix_layout" else product.operation
        product.set(kind, target, **{attribute: number})
        with pytest.raises(cuda.cublas_lt.cuBLASLtError, match=words) as caught:
            product.search()
    assert caught.value.status == INVALID_VALUE


@pytest.mark.parametrize(("version", "refuses"), [(120900, False), (130000, True)])
def test_one_matrix_by_two_descriptors(version, refuses):
    cuda = Software(version=version)
    data = Data(cuda, Asked(beta=1.0))
    a, b, c, _ = data.addresses
    with prepared(cuda, data.asked) as product:
        (found, *_) = product.search(0)
        if not refuses:
            product.run(found, (a, b, c, c))
            return
        with pytest.raises(cuda.cublas_lt.cuBLASLtError, match="C is D, by another") as caught:
            product.run(found, (a, b, c, c))
        assert caught.value.status == INVALID_VALUE


# -- algorithms, alignment, workspace -------------------------------------------------------------


def test_an_odd_leading_dimension_leaves_fewer_algorithms(cuda):
    counts = []
    for gap in (0, 4, 2, 1):
        with prepared(cuda, Asked(gap=(gap,) * 4, a=R_16F, b=R_16F)) as product:
            counts.append(len(product.search()))
    assert counts[0] > counts[1] > counts[2] > counts[3] > 0


def test_pointers_must_be_aligned_as_promised(cuda):
    data = Data(cuda, Asked())
    workspace, error = data.new(1 << 20), cuda.cublas_lt.cuBLASLtError
    with prepared(cuda, data.asked) as product:
        strict, *_, lax = product.search()
        for i in (0, 1, 3):
            pointers = list(data.addresses)
            pointers[i] += 8
            with pytest.raises(error, match="wants multiples of 16"):
                product.run(strict, tuple(pointers), workspace)
        product.run(strict, (*data.addresses[:2], 3, data.addresses[3]), workspace)  # C is not read
        with pytest.raises(error, match="wants multiples of 4"):
            product.run(lax, tuple(x + 2 for x in data.addresses), workspace)
        with pytest.raises(error, match="A is null"):
            product.run(lax, (0, *data.addresses[1:]), workspace)


def test_the_alignment_of_a_bias_counts_in_the_search(cuda):
    data = Data(cuda, Asked(epilogue=BIAS))
    with prepared(cuda, data.asked) as product:
        product.describe(BIAS_POINTER=data.bias)
        strict = product.search(0)
        product.describe(BIAS_POINTER=data.bias + 4)
        lax = product.search(0)
        assert 0 < len(lax) < len(strict)
        with pytest.raises(cuda.cublas_lt.cuBLASLtError, match=r"bias at .* wants multiples of 16"):
            product.run(strict[0], tuple(data.addresses))
        product.run(lax[0], tuple(data.addresses))
    cuda.drain()
    assert "over the end" in cuda.faults.pop()  # the bias begins one number too late


def test_workspaces(cuda):
    data = Data(cuda, Asked())
    workspace, error = data.new(1 << 20), cuda.cublas_lt.cuBLASLtError
    with prepared(cuda, data.asked) as product:
        algorithm = next(x for x in product.search() if x[1])
        assert all(size <= 1024 for _, size in product.search(1024))
        with pytest.raises(error, match="bytes of workspace, not"):
            product.run((algorithm[0], algorithm[1] - 1), tuple(data.addresses), workspace)
        for address in (workspace + 128, 0):
            with pytest.raises(error, match="not aligned to 256"):
                product.run(algorithm, tuple(data.addresses), address)
        product.run(algorithm, tuple(data.addresses), workspace + (1 << 20) - 512)
        assert cuda.runtime.cudaDeviceSynchronize()[0].name == "cudaErrorIllegalAddress"
        assert "workspace: " in cuda.faults.pop()
        cuda.forgive()


@pytest.mark.parametrize("shares", [False, True])
def test_two_streams_with_one_workspace(cuda, shares):
    cuda.runtime.scheduler.use("all")
    all_data = [Data(cuda, Asked(), seed) for seed in range(2)]
    workspaces = [data.new(1 << 16) for data in all_data]
    with prepared(cuda, Asked()) as product:
        algorithm = next(x for x in product.search() if x[1])
        for i, data in enumerate(all_data):
            on = int(cuda.runtime.cudaStreamCreateWithFlags(1)[1])
            product.run(algorithm, tuple(data.addresses), workspaces[0 if shares else i], on)
        cuda.drain()
    assert all(np.array_equal(x.matrix(3), x.expected()) for x in all_data) is not shares
    assert all("workspace of a running product" in x for x in cuda.faults)
    assert bool(cuda.faults) is shares
    cuda.faults.clear()


# -- handles and descriptors ----------------------------------------------------------------------


def test_invalid_objects_and_attributes_are_refused(cuda):
    lt = cuda.cublas_lt
    with prepared(cuda, Asked()) as product:
        gone = lt.matrix_layout_create(0, 4, 4, 4)
        lt.matrix_layout_destroy(gone)
        attempts = [
            lambda: lt.matrix_layout_destroy(gone),
            lambda: lt.destroy(gone),
            lambda: lt.matmul_desc_destroy(product.handle),
            lambda: lt.matmul_algo_get_heuristic(product.handle, gone, *product.layouts, gone, 1, 0, 0),
        ]
        for attempt in attempts:
            with pytest.raises(lt.cuBLASLtError, match=r"CUBLAS_STATUS_INVALID_VALUE .* not a"):
                attempt()
        assert len(cuda.faults) == len(attempts)
        cuda.faults.clear()
        number, attribute = np.full(1, 77, np.int64), lt.MatmulDescAttribute.TRANSA
        pointer = number.ctypes.data
        for function, arguments, words in (
            (lt.matmul_desc_set_attribute, (attribute, pointer, 8), "has 4 bytes, not 8"),
            (lt.matmul_desc_set_attribute, (attribute, 0, 4), "a null pointer"),
            (lt.matmul_desc_set_attribute, (63, pointer, 4), "no attribute 63$"),
            (lt.matmul_desc_get_attribute, (attribute, pointer, 8, 0), "has 4 bytes, not 8"),
        ):
            with pytest.raises(lt.cuBLASLtError, match=words) as caught:
                function(product.operation, *arguments)
            assert caught.value.status == INVALID_VALUE
        lt.matmul_desc_get_attribute(product.operation, attribute, 0, 0, pointer)
        assert number[0] == 4
        live = cuda.live()
        assert [live[x] for x in ("handles", "descriptors", "layouts")] == [1, 1, 4]
    assert not any(cuda.live().values())


def test_a_handle_belongs_to_a_device(cuda):
    with prepared(cuda, Asked()) as product:
        cuda.runtime.cudaSetDevice(1)
        with pytest.raises(cuda.cublas_lt.cuBLASLtError, match="another device's"):
            product.search()
        cuda.runtime.cudaSetDevice(0)
    assert "a handle of device 0 is used on 1" in cuda.faults.pop()


def test_two_threads_with_one_handle(cuda, monkeypatch):
    data = [Data(cuda, Asked(), seed) for seed in range(2)]
    meeting = threading.Barrier(2, timeout=20)
    with prepared(cuda, Asked()) as product:
        algorithm = product.search(0)[0]
        monkeypatch.setattr(cuda.cublas_lt, "let_others_run", meeting.wait)
        threads = [threading.Thread(target=product.run, args=(algorithm, tuple(x.addresses))) for x in data]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        monkeypatch.undo()
    assert "two threads use one handle at the same time" in cuda.faults
    cuda.faults.clear()


def test_an_overlap_of_d_with_an_operand_is_noticed(cuda):
    data = Data(cuda, Asked(m=16, n=16, k=16))
    with prepared(cuda, data.asked) as product:
        a, b, c, _ = data.addresses
        product.run(product.search(0)[0], (a, b, c, a))
    assert cuda.faults.pop() == "D overlaps A"


@pytest.mark.parametrize(("mode", "version"), [("Global", 130100), ("Relaxed", 130300)])
def test_handles_and_searches_during_a_capture(mode, version):
    cuda = Software(version=version)
    lt, on = cuda.cublas_lt, int(cuda.runtime.cudaStreamCreateWithFlags(1)[1])
    with prepared(cuda, Asked()) as product:
        cuda.runtime.begin_capture(on, mode)
        if mode == "Global":
            with pytest.raises(lt.cuBLASLtError, match="ALLOC_FAILED"):
                lt.create()
            assert "during a capture" in cuda.faults.pop()
        else:
            with pytest.raises(lt.cuBLASLtError, match="INTERNAL_ERROR"):
                product.search(0)
        cuda.runtime.drain()
