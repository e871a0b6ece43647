"""2:4 sparse operands on a GPU: exact products, what cuSPARSELt does not multiply, and errors of the library."""

from concurrent.futures import ThreadPoolExecutor

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


def uses_sparse_units(x, prepared, **given):
    plan = lowprec.plan(x, prepared, **given)
    assert plan.sparsity is not None
    rows = dict(plan.algorithm)
    if "cuSPARSELt cannot be loaded" in rows.get("fallback", ""):
        pytest.skip("cuSPARSELt is not installed")
    used = rows.get("algorithm", "").startswith("cuSPARSELt")
    assert not used or plan.sparsity.kind is ReasonKind.SPARSE
    return used


@pytest.mark.feature("2:4 sparse operands of float16, bfloat16 and int8")
@pytest.mark.parametrize("dtype", [BF16, np.float16, np.int8], ids=str)
@pytest.mark.parametrize("order", ["C", "F"])
def test_products(gpu, dtype, order):
    b = np.asarray(sparse(0, K, N, dtype=dtype), order=order)
    y = gpu.put(b)
    prepared = lowprec.prepare(y, sparsity="2:4")
    assert prepared.packed_bytes == 0
    for m in (32, 64):
        a = draw(m, m, K, dtype=dtype)
        x = gpu.put(a)
        for _ in range(2):
            found = gpu.get(lowprec.matmul(x, prepared))
            np.testing.assert_array_equal(found, true(a, b, found.dtype))
        assert uses_sparse_units(x, prepared)
        if m == 32:
            held = prepared.packed_bytes
    assert prepared.packed_bytes == held >= b.nbytes // 2  # compressed once
    np.testing.assert_array_equal(gpu.get(y), b)


@pytest.mark.feature("2:4 sparse operands, pruned, and with an epilogue")
def test_epilogues(gpu):
    shapes = ((16, K), (K, N), (16, N), (N,))
    a, b, c, bias = (draw(i, *shape, dtype=BF16) for i, shape in enumerate(shapes))
    prepared = lowprec.prepare(gpu.put(b), sparsity="2:4", prune=True)
    product = true(a, lowprec.prepare(b, sparsity="2:4", prune=True)._view.ndarray(), np.float32)
    x, z, u, w = gpu.put(a), gpu.put(c), gpu.put(bias), gpu.put(bias * 2)
    bias = bias.astype(np.float32)
    for given, want in (
        ({"alpha": 0.5}, 0.5 * product),
        ({"c": z, "beta": 2.0}, product + 2 * c.astype(np.float32)),
        ({"c": z}, product),
        ({"bias": u}, product + bias),
        ({"bias": w, "alpha": 2.0, "c": z, "beta": -1.0}, 2 * (product + bias) - c.astype(np.float32)),
    ):  # fmt: skip
        assert uses_sparse_units(x, prepared, **given)
        np.testing.assert_array_equal(gpu.get(lowprec.matmul(x, prepared, **given)), want.astype(BF16))
    out = gpu.put(c)
    assert lowprec.matmul(x, prepared, out=out, c=out, beta=1.0) is out
    np.testing.assert_array_equal(gpu.get(out), (product + c.astype(np.float32)).astype(BF16))


@pytest.mark.parametrize("mode", ["mxfp8", "int8"])
def test_a_quantised_operand_and_the_stored_one(gpu, mode, rng):
    """Of the same shape and layout, each compressed."""
    a, b = rng.standard_normal((32, K)).astype(BF16), np.asfortranarray(rng.standard_normal((K, N)).astype(BF16))
    b[np.arange(K) % 4 > 1] = 0
    prepared, x = lowprec.prepare(gpu.put(b), sparsity="2:4", math_mode=mode), gpu.put(a)
    for given in ({"math_mode": mode}, {"math_mode": "fp32"}):
        assert uses_sparse_units(x, prepared, **given)
        want = lowprec.matmul(a.astype(np.float32), b.astype(np.float32), **given)
        found = gpu.get(lowprec.matmul(x, prepared, **given)).astype(np.float32)
        np.testing.assert_allclose(found, want, rtol=2.0**-8, atol=1e-5)


def test_int8_epilogue_and_float32_operands(gpu):
    a, b, bias = draw(0, 32, K, dtype=np.int8), sparse(1, K, N, dtype=np.int8), draw(2, N, dtype=np.int32)
    prepared, x, u = lowprec.prepare(gpu.put(b), sparsity="2:4"), gpu.put(a), gpu.put(bias)
    assert uses_sparse_units(x, prepared, bias=u, activation="relu")
    found = gpu.get(lowprec.matmul(x, prepared, bias=u, activation="relu"))
    np.testing.assert_array_equal(found, np.maximum(true(a, b, np.int32) + bias, 0))
    # The packing rounds both operands to bfloat16.
    given = {"math_mode": "bf16", "out_dtype": "bfloat16"}
    a, b = a.astype(np.float32), b.astype(np.float32)
    x = gpu.put(a)
    for mode, used in (("bf16", True), ("fp16", False)):
        prepared = lowprec.prepare(gpu.put(b), sparsity="2:4", math_mode=mode)
        got = gpu.get(lowprec.matmul(x, prepared, **given))
        np.testing.assert_array_equal(got, true(a, b, BF16))
        compressed = [key for key in prepared._view.packed if key[0] == "2:4"]
        assert bool(compressed) is used  # only b prepared for the mode is kept packed


DENSE = {
    "rows": ((5, K), (K, N), BF16, {}, "needs a in multiples of 8, here (5, 64) with leading dimension 64"),
    "columns": ((16, K), (K, 24), BF16, {}, "needs b in multiples of 16, here (64, 24) with leading dimension 24"),
    "inner dimension": ((16, 40), (40, N), BF16, {}, "needs b in multiples of 16, here (40, 96)"),
    "int8": ((32, K), (K, 48), np.int8, {}, "needs b in multiples of 32, here (64, 48)"),
    "float32": ((16, K), (K, N), np.float32, {"math_mode": "tf32"}, "float32 data in the pattern 1:2 alone"),
    "float32 result": ((16, K), (K, N), BF16, {"out_dtype": "float32"}, "for bfloat16 by bfloat16 into float32"),
    "activation": ((16, K), (K, N), BF16, {"activation": "relu"}, "a bias alone"),
    "split": ((16, K), (K, N), np.float32, {"math_mode": "bf16x3"}, "one row-major product without a batch"),
    "batch": ((3, 16, K), (3, K, N), BF16, {}, "one row-major product without a batch"),
}


@pytest.mark.parametrize("case", DENSE)
def test_dense_products(gpu, case):
    shape_a, shape_b, dtype, given, words = DENSE[case]
    a, b = draw(0, *shape_a, dtype=dtype), sparse(1, *shape_b, dtype=dtype)
    prepared, x = lowprec.prepare(gpu.put(b), sparsity="2:4", math_mode=given.get("math_mode")), gpu.put(a)
    plan = lowprec.plan(x, prepared, **given)
    assert plan.sparsity is not None
    assert plan.sparsity.kind is ReasonKind.DENSE_PRODUCT
    assert words in " ".join(str(plan).split())
    found = gpu.get(lowprec.matmul(x, prepared, **given))
    want = true(a, b, found.dtype)
    np.testing.assert_array_equal(found, np.maximum(want, 0) if "activation" in given else want)


def test_layouts_that_are_dense(gpu):
    a, b = draw(0, 16, K, dtype=BF16), sparse(1, K, N)
    prepared = lowprec.prepare(gpu.put(b), sparsity="2:4")
    wide = np.zeros((16, K + 4), BF16)
    wide[:, :K] = a
    x = gpu.put(wide[:, :K])  # rows 136 bytes apart
    assert "needs a in multiples of 8, here (16, 64) with leading dimension 68" in str(
        lowprec.plan(x, prepared).sparsity
    )
    np.testing.assert_array_equal(gpu.get(lowprec.matmul(x, prepared)), true(a, b))
    x, out = gpu.put(a), gpu.put(np.zeros((N, 16), BF16))
    columns = gpu.transpose(out)
    assert "one row-major product" in str(lowprec.plan(x, prepared, out=columns).sparsity)
    lowprec.matmul(x, prepared, out=columns)
    np.testing.assert_array_equal(gpu.get(out), true(a, b).T)


def test_a_misaligned_operand_is_multiplied_densely(gpu):
    b = sparse(1, K, N)
    prepared = lowprec.prepare(gpu.put(b), sparsity="2:4")
    odd = np.empty(16 * K + 8, BF16)
    start = next(i for i in range(8) if odd[i:].ctypes.data % 16 == 2)
    a = odd[start : start + 16 * K].reshape(16, K)
    a[...] = draw(0, 16, K, dtype=BF16)
    x = gpu.put(a)
    assert uses_sparse_units(gpu.put(a.copy()), prepared)
    assert ("fallback", "cuSPARSELt needs pointers that are multiples of 16 bytes: a dense product") in lowprec.plan(
        x, prepared
    ).algorithm
    np.testing.assert_array_equal(gpu.get(lowprec.matmul(x, prepared)), true(a, b))


def test_linear(gpu):
    weight, x = np.ascontiguousarray(sparse(0, K, N).T), draw(1, 16, K, dtype=BF16)
    prepared = lowprec.prepare(gpu.transpose(gpu.put(weight)), sparsity="2:4")
    found = gpu.get(lowprec.linear(gpu.put(x), prepared.T))
    np.testing.assert_array_equal(found, true(x, weight.T))
    assert any(key[0] == "2:4" for key in prepared._view.packed) is uses_sparse_units(gpu.put(x), prepared)


def test_sparse_and_dense_operands_of_one_layout(software):
    """They share an executor, and its fast path for dense ones."""
    x, prepared, want = operands(software)
    dense = software.put(draw(2, K, N, dtype=BF16))
    for number, y in enumerate((dense, dense, prepared, dense, prepared, prepared)):
        found = software.get(lowprec.matmul(x, y))
        np.testing.assert_array_equal(found, want if y is prepared else true(software.get(x), software.get(dense)))
        assert software.software.count("cusparse_lt.matmul") == (0, 0, 1, 1, 2, 3)[number]


@pytest.mark.parametrize("layout", ["rows", "columns", "every second", "a stack", "empty"])
def test_prepare_reads_arrays_on_the_device(gpu, layout):
    b = {
        "rows": lambda b: b,
        "columns": np.asfortranarray,
        "every second": lambda b: np.repeat(b, 2, 1)[:, ::2],
        "a stack": lambda b: np.stack([b, b + 1]),
        "empty": lambda b: b[:, :0],
    }[layout](draw(0, 22, 12, dtype=BF16))
    y = gpu.put(b)
    host = lowprec.prepare(b, sparsity="2:4", prune=True)._view.ndarray()
    prepared = lowprec.prepare(y, sparsity="2:4", prune=True)
    a = np.broadcast_to(np.eye(22, dtype=BF16), (*b.shape[:-2], 22, 22)).copy()
    np.testing.assert_array_equal(gpu.get(lowprec.matmul(gpu.put(a), prepared)), host)
    np.testing.assert_array_equal(gpu.get(y), b)
    if b.size:
        with pytest.raises(lowprec.SparsityError, match="b is not 2:4 sparse"):
            lowprec.prepare(gpu.put(np.ones_like(b)), sparsity="2:4")
    assert lowprec.prepare(gpu.put(host), sparsity="2:4").sparsity == "2:4"


# -- errors of the library ------------------------------------------------------------------------


def operands(gpu):
    a, b = draw(0, 16, K, dtype=BF16), sparse(1, K, N)
    return gpu.put(a), lowprec.prepare(gpu.put(b), sparsity="2:4"), true(a, b)


def test_a_missing_library(software):
    software.software.cusparse_lt.is_missing = True
    x, prepared, want = operands(software)
    for _ in range(2):
        np.testing.assert_array_equal(software.get(lowprec.matmul(x, prepared)), want)
    fallback = dict(lowprec.plan(x, prepared).algorithm)["fallback"]
    assert "cuSPARSELt cannot be loaded" in fallback
    assert "install lowprec with its extra sparse13" in fallback
    assert software.software.count("cusparse_lt.matmul") == 0


def test_an_old_device(install):
    gpu = install((7, 5))
    x, prepared, want = operands(gpu)
    np.testing.assert_array_equal(gpu.get(lowprec.matmul(x, prepared)), want)
    assert "compute capability 8.0, here 7.5" in str(lowprec.plan(x, prepared).sparsity)
    assert not [name for name in gpu.software.calls if name.startswith("cusparse_lt")]


CREATES = ("structured_descriptor_init", "dense_descriptor_init", "matmul_descriptor_init", "matmul_plan_init")


@pytest.mark.parametrize("name", [*CREATES, "init"])
def test_a_refused_product_is_dense(software, name):
    x, prepared, want = operands(software)
    with software.failing_call(f"cusparse_lt.{name}", status=Status.NOT_SUPPORTED):
        np.testing.assert_array_equal(software.get(lowprec.matmul(x, prepared)), want)
    np.testing.assert_array_equal(software.get(lowprec.matmul(x, prepared)), want)
    assert software.software.count("cusparse_lt.matmul") == 0  # it is not tried again


@pytest.mark.parametrize("name", [*CREATES, "init", "sp_mma_compress2", "matmul"])
def test_a_failure_is_an_error(software, name):
    x, prepared, want = operands(software)
    with (
        software.failing_call(f"cusparse_lt.{name}", status=Status.INTERNAL_ERROR),
        pytest.raises(BackendError, match=r"cuSPARSELt cannot .*INTERNAL_ERROR"),
    ):
        lowprec.matmul(x, prepared)
    np.testing.assert_array_equal(software.get(lowprec.matmul(x, prepared)), want)
    assert software.software.count("cusparse_lt.matmul") >= 1


def test_memory_for_a_handle_is_released_first(software):
    x, prepared, want = operands(software)
    with software.failing_call("cusparse_lt.init", status=Status.ALLOC_FAILED):
        np.testing.assert_array_equal(software.get(lowprec.matmul(x, prepared)), want)
    assert software.software.count("cusparse_lt.init") == 2


def test_a_pattern_that_the_library_does_not_find(software):
    """The check on the device is a second one, in case that the layouts of the two differ."""
    a, b = draw(0, 16, K, dtype=BF16), draw(1, K, N, dtype=BF16)
    prepared = lowprec.prepare(software.put(b))
    prepared._view.sparse_axis = -2
    x = software.put(a)
    np.testing.assert_array_equal(software.get(lowprec.matmul(x, prepared)), true(a, b))
    assert software.software.count("cusparse_lt.matmul") == 0


# -- threads and graphs ---------------------------------------------------------------------------


def test_threads(software, cupy):
    """Plans are of one handle, and with them the address of a bias."""
    a, b = draw(0, 16, K, dtype=np.float16), sparse(1, K, N, dtype=np.float16)
    prepared = lowprec.prepare(cupy.asarray(b), sparsity="2:4")

    def work(number):
        with cupy.cuda.Stream():
            x, bias = cupy.asarray(a), cupy.asarray(np.full(N, number, np.float16))
            found = [lowprec.matmul(x, prepared, bias=bias) for _ in range(10)]
            return all(np.array_equal(cupy.asnumpy(y), true(a, b) + np.float16(number)) for y in found)

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(8)))
    assert software.software.count("cusparse_lt.matmul") == 80


@pytest.mark.parametrize("dtype", [np.float16, np.int8], ids=str)
def test_graphs(software, cupy, dtype):
    runtime = software.software.runtime
    a, b = draw(0, 32, K, dtype=dtype), sparse(1, K, N, dtype=dtype)
    with cupy.cuda.Stream() as stream:
        x, out = cupy.asarray(a), cupy.empty((32, N), np.int32 if dtype == np.int8 else dtype)
        prepared = lowprec.prepare(cupy.asarray(b), sparsity="2:4")
        runtime.begin_capture(stream.ptr)
        with pytest.raises(BackendError, match="run it once before capturing"):
            lowprec.matmul(x, prepared, out=out)
        assert runtime.end_capture(stream.ptr).labels == []
        lowprec.matmul(x, prepared, out=out)
        runtime.begin_capture(stream.ptr)
        lowprec.matmul(x, prepared, out=out)
        graph = runtime.end_capture(stream.ptr)
        del prepared  # the graph reads it
        changed = a[::-1].copy()
        runtime.cudaMemcpyAsync(x.data.ptr, changed.ctypes.data, a.nbytes, 4, stream.ptr)
        graph.replay()
        found = cupy.asnumpy(out)
    np.testing.assert_array_equal(found, true(changed, b, found.dtype))
    assert "sparse matmul" in graph.labels


def test_profile_names_the_library(software):
    x, prepared, _ = operands(software)
    with lowprec.profile() as found:
        lowprec.matmul(x, prepared)
    assert "cuSPARSELt 0.8.1" in str(found.to_dict())
