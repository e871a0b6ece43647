"""2:4 sparse operands on a GPU: exact products, what cuSPARSELt does not multiply, and errors of the library."""

from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import ml_dtypes
import numpy as np
import pytest

import lowprec
from cuda_backend.device_fixture import draw
from lowprec.errors import BackendError
from lowprec.planning import ReasonKind
from software_cuda.cusparselt import Status

BF16 = np.dtype(ml_dtypes.bfloat16)
K, N = 64, 96


def sparse(seed, *shape, dtype=BF16):
    """Return whole numbers of which elements 0 and 3, or 1 and 2, of each group along k are 0."""
    x = draw(seed, *shape, dtype=dtype)
    group = np.arange(shape[-2])[:, None] % 4
    x[..., np.isin(group, (0, 3)) ^ (np.arange(shape[-1]) % 2 == 0)] = 0
    return x


def true(a, b, dtype=None):
    """Return the product, rounded once: sums of small whole numbers are exact in float32."""
    return (a.astype(np.float64) @ b.astype(np.float64)).astype(dtype or a.dtype)


def prepared(gpu, b, **given):
    return lowprec.prepare(gpu.put(b), sparsity="2:4", **given)


def operands(gpu):
    a, b = draw(0, 16, K, dtype=BF16), sparse(1, K, N)
    return gpu.put(a), prepared(gpu, b), true(a, b)


def uses_sparse_units(x, y, **given):
    plan = lowprec.plan(x, y, **given)
    assert plan.sparsity is not None
    rows = dict(plan.algorithm)
    if "cuSPARSELt cannot be loaded" in rows.get("fallback", ""):
        pytest.skip("cuSPARSELt is not installed")
    used = rows.get("algorithm", "").startswith("cuSPARSELt")
    assert not used or plan.sparsity.kind is ReasonKind.SPARSE
    return used


@pytest.mark.feature("2:4 sparse operands of float16, bfloat16 and int8")
@pytest.mark.parametrize(
    ("dtype", "order"),
    [(BF16, "C"), (BF16, "F"), (np.float16, "C"), (np.float16, "F"), (np.int8, "F")],
    ids=str,
)
def test_products(gpu, dtype, order):
    b = np.asarray(sparse(0, K, N, dtype=dtype), order=order)
    y = prepared(gpu, b)
    held = [y.packed_bytes]
    for m in (32, 64):
        a = draw(m, m, K, dtype=dtype)
        x = gpu.put(a)
        for _ in range(2):
            found = gpu.get(lowprec.matmul(x, y))
            np.testing.assert_array_equal(found, true(a, b, found.dtype))
        assert uses_sparse_units(x, y)
        held.append(y.packed_bytes)
    assert held[0] == 0
    assert held[1] == held[2] >= b.nbytes // 2  # compressed once


@pytest.mark.feature("2:4 sparse operands, pruned, and with an epilogue")
def test_epilogues(gpu):
    a, b, c, bias = (
        draw(i, *shape, dtype=BF16) for i, shape in enumerate([(16, K), (K, N), (16, N), (N,)])
    )
    y = prepared(gpu, b, prune=True)
    product = true(a, lowprec.prepare(b, sparsity="2:4", prune=True)._view.ndarray(), np.float32)
    x, z, u, w = (gpu.put(v) for v in (a, c, bias, bias * 2))
    wide, added = c.astype(np.float32), bias.astype(np.float32)
    for given, want in (
        ({"alpha": 0.5}, 0.5 * product),
        ({"c": z, "beta": 2.0}, product + 2 * wide),
        ({"c": z}, product),
        ({"bias": u}, product + added),
        ({"bias": w, "alpha": 2.0, "c": z, "beta": -1.0}, 2 * (product + added) - wide),
        ({"c": z, "beta": 1.0, "out": z}, product + wide),
    ):
        assert uses_sparse_units(x, y, **given)
        np.testing.assert_array_equal(gpu.get(lowprec.matmul(x, y, **given)), want.astype(BF16))


def test_int8_epilogue(gpu):
    a, b, bias = (
        draw(0, 32, K, dtype=np.int8),
        sparse(1, K, N, dtype=np.int8),
        draw(2, N, dtype=np.int32),
    )
    x, y, u = gpu.put(a), prepared(gpu, np.asfortranarray(b)), gpu.put(bias)
    assert uses_sparse_units(x, y, bias=u, activation="relu")
    found = gpu.get(lowprec.matmul(x, y, bias=u, activation="relu"))
    np.testing.assert_array_equal(found, np.maximum(true(a, b, np.int32) + bias, 0))


#: Shape of ``a``, its leading dimension, shape and type of ``b``, arguments, and words of the plan.
DENSE = {
    "rows": (
        (5, K),
        K,
        (K, N),
        BF16,
        {},
        "needs a in multiples of 8, here (5, 64) with leading dimension 64",
    ),
    "strides": (
        (16, K),
        68,
        (K, N),
        BF16,
        {},
        "needs a in multiples of 8, here (16, 64) with leading dimension 68",
    ),
    "columns": (
        (16, K),
        K,
        (K, 24),
        BF16,
        {},
        "needs b in multiples of 16, here (64, 24) with leading dimension 24",
    ),
    "inner dimension": (
        (16, 40),
        40,
        (40, N),
        BF16,
        {},
        "needs b in multiples of 16, here (40, 96)",
    ),
    "rows of int8": (
        (32, K),
        K,
        (K, N),
        np.int8,
        {},
        "it is stored: store float16, bfloat16, or int8 in column-major",
    ),
    "rounded": (
        (16, K),
        K,
        (K, N),
        np.float32,
        {"math_mode": "bf16", "out_dtype": "bfloat16"},
        "as it is stored",
    ),
    "float32": (
        (16, K),
        K,
        (K, N),
        np.float32,
        {"math_mode": "tf32"},
        "for float32 by float32 into float32",
    ),
    "result": (
        (16, K),
        K,
        (K, N),
        BF16,
        {"out_dtype": "float32"},
        "for bfloat16 by bfloat16 into float32",
    ),
    "activation": ((16, K), K, (K, N), BF16, {"activation": "relu"}, "a bias alone"),
    "split": (
        (16, K),
        K,
        (K, N),
        np.float32,
        {"math_mode": "bf16x3"},
        "one row-major product without a batch",
    ),
    "batch": ((3, 16, K), K, (3, K, N), BF16, {}, "one row-major product without a batch"),
}


@pytest.mark.parametrize("case", DENSE)
def test_dense_products(gpu, case):
    shape_a, leading, shape_b, dtype, given, words = DENSE[case]
    a = draw(0, *shape_a[:-1], leading, dtype=dtype)[..., : shape_a[-1]]
    b = sparse(1, *shape_b, dtype=dtype)
    x, y = gpu.put(a), prepared(gpu, b, math_mode=given.get("math_mode"))
    plan = lowprec.plan(x, y, **given)
    assert plan.sparsity is not None
    assert plan.sparsity.kind is ReasonKind.DENSE_PRODUCT
    assert words in " ".join(str(plan).split())
    found = gpu.get(lowprec.matmul(x, y, **given))
    want = true(a, b, found.dtype)
    np.testing.assert_array_equal(found, np.maximum(want, 0) if "activation" in given else want)


def test_a_column_major_result_is_dense(gpu):
    x, y, want = operands(gpu)
    out = gpu.put(np.zeros((N, 16), BF16))
    assert "one row-major product" in str(lowprec.plan(x, y, out=gpu.transpose(out)).sparsity)
    lowprec.matmul(x, y, out=gpu.transpose(out))
    np.testing.assert_array_equal(gpu.get(out), want.T)


def test_a_misaligned_operand_is_multiplied_densely(gpu):
    x, y, want = operands(gpu)
    odd = np.empty(16 * K + 8, BF16)
    start = next(i for i in range(8) if odd[i:].ctypes.data % 16 == 2)
    a = odd[start : start + 16 * K].reshape(16, K)
    a[...] = draw(0, 16, K, dtype=BF16)
    assert uses_sparse_units(x, y)
    x = gpu.put(a)
    words = "cuSPARSELt needs pointers that are multiples of 16 bytes: a dense product"
    assert ("fallback", words) in lowprec.plan(x, y).algorithm
    np.testing.assert_array_equal(gpu.get(lowprec.matmul(x, y)), want)


def test_linear(gpu):
    weight, x = np.ascontiguousarray(sparse(0, K, N).T), draw(1, 16, K, dtype=BF16)
    y = lowprec.prepare(gpu.transpose(gpu.put(weight)), sparsity="2:4")
    np.testing.assert_array_equal(gpu.get(lowprec.linear(gpu.put(x), y.T)), true(x, weight.T))
    assert any(key[0] == "2:4" for key in y._view.packed) is uses_sparse_units(gpu.put(x), y)


def test_sparse_and_dense_operands_of_one_layout(software):
    """They share an executor, and its fast path for dense ones."""
    x, y, want = operands(software)
    dense = software.put(draw(2, K, N, dtype=BF16))
    for number, b in enumerate((dense, dense, y, dense, y, y)):
        found = software.get(lowprec.matmul(x, b))
        np.testing.assert_array_equal(
            found, want if b is y else true(software.get(x), software.get(dense))
        )
        assert software.software.count("cusparse_lt.matmul") == (0, 0, 1, 1, 2, 3)[number]


LAYOUTS = {
    "rows": lambda b: b,
    "columns": np.asfortranarray,
    "every second": lambda b: np.repeat(b, 2, 1)[:, ::2],
    "a stack": lambda b: np.stack([b, b + 1]),
    "empty": lambda b: b[:, :0],
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_prepare_reads_arrays_on_the_device(gpu, layout):
    b = LAYOUTS[layout](draw(0, 22, 12, dtype=BF16))
    y = gpu.put(b)
    host = lowprec.prepare(b, sparsity="2:4", prune=True)._view.ndarray()
    pruned = lowprec.prepare(y, sparsity="2:4", prune=True)
    a = np.broadcast_to(np.eye(22, dtype=BF16), (*b.shape[:-2], 22, 22)).copy()
    np.testing.assert_array_equal(gpu.get(lowprec.matmul(gpu.put(a), pruned)), host)
    np.testing.assert_array_equal(gpu.get(y), b)
    if b.size:
        with pytest.raises(lowprec.SparsityError, match="b is not 2:4 sparse"):
            prepared(gpu, np.ones_like(b))
    assert prepared(gpu, host).sparsity == "2:4"


# -- errors of the library, threads and graphs ----------------------------------------------------

CREATES = (
    "structured_descriptor_init",
    "dense_descriptor_init",
    "matmul_descriptor_init",
    "matmul_plan_init",
    "init",
)


@pytest.mark.parametrize("name", ["missing", *CREATES, "pattern", "old device"])
def test_a_refused_product_is_dense(install, monkeypatch, name):
    gpu = install((7, 5) if name == "old device" else (9, 0))
    x, y, want = operands(gpu)
    if name == "missing":
        missing = RuntimeError("The cusparseLt library was not found")
        monkeypatch.setattr(gpu.software.cusparse_lt, "init", mock.Mock(side_effect=missing))
    # the check on the device is a second one, in case that the layouts of the two differ
    if name == "pattern":
        b = draw(1, K, N, dtype=BF16)
        y, want = lowprec.prepare(gpu.put(b)), true(draw(0, 16, K, dtype=BF16), b)
        y._view.sparse_axis = -2
    with gpu.failing_call(f"cusparse_lt.{name}", status=Status.NOT_SUPPORTED):
        np.testing.assert_array_equal(gpu.get(lowprec.matmul(x, y)), want)
    np.testing.assert_array_equal(gpu.get(lowprec.matmul(x, y)), want)
    assert gpu.software.count("cusparse_lt.matmul") == 0  # it is not tried again
    if name == "missing":
        fallback = dict(lowprec.plan(x, y).algorithm)["fallback"]
        assert "cuSPARSELt cannot be loaded" in fallback
        assert "install lowprec with its extra sparse13" in fallback
    if name == "old device":
        assert "compute capability 8.0, here 7.5" in str(lowprec.plan(x, y).sparsity)
        assert not [call for call in gpu.software.calls if call.startswith("cusparse_lt")]


@pytest.mark.parametrize("name", [*CREATES, "sp_mma_compress2", "matmul"])
def test_a_failure_is_an_error(software, name):
    x, y, want = operands(software)
    words = r"cuSPARSELt cannot .*INTERNAL_ERROR"
    failing = software.failing_call(f"cusparse_lt.{name}", status=Status.INTERNAL_ERROR)
    with failing, pytest.raises(BackendError, match=words):
        lowprec.matmul(x, y)
    np.testing.assert_array_equal(software.get(lowprec.matmul(x, y)), want)
    assert software.software.count("cusparse_lt.matmul") >= 1


def test_memory_for_a_handle_is_released_first(software):
    x, y, want = operands(software)
    with software.failing_call("cusparse_lt.init", status=Status.ALLOC_FAILED):
        np.testing.assert_array_equal(software.get(lowprec.matmul(x, y)), want)
    assert software.software.count("cusparse_lt.init") == 2


@pytest.mark.parametrize("ptds", [False, True])
def test_threads(software, cupy, ptds):
    """Plans are of one handle, and with them the address of a bias."""
    a, b = draw(0, 16, K, dtype=np.float16), sparse(1, K, N, dtype=np.float16)
    y = lowprec.prepare(cupy.asarray(b), sparsity="2:4")

    def work(number):
        with cupy.cuda.Stream(ptds=ptds):
            x, bias = cupy.asarray(a), cupy.asarray(np.full(N, number, np.float16))
            found = [lowprec.matmul(x, y, bias=bias) for _ in range(10)]
            return all(
                np.array_equal(cupy.asnumpy(z), true(a, b) + np.float16(number)) for z in found
            )

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(8)))
    assert software.software.count("cusparse_lt.matmul") == 80


def test_graphs(software, cupy):
    runtime = software.software.runtime
    a, b = draw(0, 32, K, dtype=np.float16), sparse(1, K, N, dtype=np.float16)
    with cupy.cuda.Stream() as stream:
        x, out = cupy.asarray(a), cupy.empty((32, N), np.float16)
        y = lowprec.prepare(cupy.asarray(b), sparsity="2:4")
        runtime.begin_capture(stream.ptr)
        with pytest.raises(BackendError, match="run it once before capturing"):
            lowprec.matmul(x, y, out=out)
        assert runtime.end_capture(stream.ptr).labels == []
        lowprec.matmul(x, y, out=out)
        runtime.begin_capture(stream.ptr)
        lowprec.matmul(x, y, out=out)
        graph = runtime.end_capture(stream.ptr)
        del y  # the graph reads it
        changed = a[::-1].copy()
        runtime.cudaMemcpyAsync(x.data.ptr, changed.ctypes.data, a.nbytes, 4, stream.ptr)
        graph.replay()
        found = cupy.asnumpy(out)
    np.testing.assert_array_equal(found, true(changed, b, found.dtype))
    assert "sparse matmul" in graph.labels


def test_profile_names_the_library(software):
    x, y, _ = operands(software)
    with lowprec.profile() as found:
        lowprec.matmul(x, y)
    assert "cuSPARSELt 0.8.1" in str(found.to_dict())
