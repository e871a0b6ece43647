"""Products of Dask arrays: lazy, in chunks, each chunk's sum over k a chain of one order."""

import itertools
import warnings

import ml_dtypes
import numpy as np
import pytest

import lowprec

da = pytest.importorskip("dask.array", reason="dask is not installed")


def draw(seed, *shape, dtype=np.float32):
    return np.random.default_rng(seed).integers(-3, 4, shape).astype(dtype)


SHAPES = [
    ((6, 4), (4, 5), 2, (2, 5)),
    ((6, 4), (4, 5), (2, 3), (2, 2)),
    ((4,), (4, 5), 2, 3),
    ((6, 4), (4,), 2, 3),
    ((4,), (4,), 2, 3),
    ((3, 6, 4), (4, 5), (2, 3, 2), 2),
    ((3, 6, 4), (3, 4, 5), (2, 3, 2), (1, 2, 2)),
    ((3, 6, 4), (1, 4, 5), (2, 3, 2), 2),
    ((2, 1, 6, 4), (3, 4, 5), 2, 2),
    ((0, 4), (4, 5), 2, 2),
    ((3, 0), (0, 5), 2, 2),
    # chunks without elements, as of a selection
    ((1, 6, 4), (3, 4, 5), ((0, 1), 2, (0, 2, 0, 2)), 2),
]


@pytest.mark.parametrize(("a", "b", "chunks_a", "chunks_b"), SHAPES)
def test_shapes_and_chunks(a, b, chunks_a, chunks_b):
    x, y = draw(0, *a), draw(1, *b)
    found = lowprec.matmul(da.from_array(x, chunks=chunks_a), da.from_array(y, chunks=chunks_b))
    true = np.matmul(x, y)
    assert (found.shape, found.dtype) == (true.shape, true.dtype)
    np.testing.assert_array_equal(found.compute(scheduler="sync"), true)


def test_chunks_of_16_bits_are_summed_in_fp32():
    """512 chunks with a sum of 1 each: a running sum in bfloat16 would stop at 256."""
    x = da.ones((1, 512), chunks=(1, 1), dtype=ml_dtypes.bfloat16)
    assert float(lowprec.matmul(x, x.T).compute(scheduler="sync")[0, 0]) == 512


def test_the_order_of_the_sum_is_that_of_the_chunks():
    rng = np.random.default_rng(0)
    x, y = rng.standard_normal((2, 40, 40), dtype=np.float32)
    found = lowprec.matmul(da.from_array(x, chunks=10), da.from_array(y, chunks=10))
    chain = np.empty((40, 40), np.float32)
    for i, j, k in itertools.product(range(0, 40, 10), repeat=3):
        rows, columns, inner = (slice(at, at + 10) for at in (i, j, k))
        more = {"c": chain[rows, columns].copy(), "beta": 1.0} if k else {}
        chain[rows, columns] = lowprec.matmul(x[rows, inner], y[inner, columns], **more)
    for scheduler in ("sync", "threads"):
        np.testing.assert_array_equal(found.compute(scheduler=scheduler), chain)


def test_a_chunk_that_is_added_to_stays_as_it_is():
    """A task may be run again on what it was given."""
    from lowprec.dask import _add_product

    acc, x = np.ones((2, 2), np.float32), np.ones((2, 2), np.float32)
    _add_product(acc, x, x, "fp32", "float32")
    assert (acc == 1).all()


# -- the mode -------------------------------------------------------------------------------------

#: 1 in bfloat16.
ABOVE_ONE = np.full((4, 4), 1 + 2**-10, np.float32)


def test_the_callers_mode_travels_in_the_graph():
    x = da.from_array(ABOVE_ONE, chunks=2)
    with lowprec.math_mode("bf16"):
        lazy = lowprec.matmul(x, x)
    with lowprec.math_mode("bf16"), lowprec.fp32_guard():
        guarded = lowprec.matmul(x, x)
    assert (lazy.compute(scheduler="threads") == 4).all()
    with lowprec.math_mode("bf16"):
        assert (guarded.compute(scheduler="sync") > 4.005).all()
    assert (lowprec.matmul(x, x, rtol=1e-2).compute(scheduler="sync") - 4 < 0.04).all()
    assert lowprec.matmul(x, x, math_mode="bf16").name != lowprec.matmul(x, x).name


def test_emulated_tensor_cores_are_those_of_where_the_product_was_written():
    x = np.random.default_rng(0).random((8, 300), dtype=np.float32)
    a, b = da.from_array(x, chunks=-1), da.from_array(x.T, chunks=-1)
    with lowprec.emulate("hopper"):
        made, expected = (
            lowprec.matmul(a, b, math_mode="tf32"),
            lowprec.matmul(x, x.T, math_mode="tf32"),
        )
    without = lowprec.matmul(a, b, math_mode="tf32")
    assert made.name != without.name
    np.testing.assert_array_equal(made.compute(scheduler="threads"), expected)
    assert (without.compute(scheduler="threads") != expected).any()


@pytest.mark.sweep
def test_processes_get_the_mode_and_the_same_bits():
    distributed = pytest.importorskip("distributed", reason="distributed is not installed")
    x = np.random.default_rng(0).standard_normal((64, 64), dtype=np.float32)
    lazy = lowprec.matmul(
        da.from_array(x, chunks=16), da.from_array(x, chunks=16), math_mode="bf16"
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with (
            distributed.LocalCluster(
                n_workers=2, threads_per_worker=1, dashboard_address=None
            ) as cluster,
            distributed.Client(cluster),
        ):
            found = lazy.compute()
    np.testing.assert_array_equal(found, lazy.compute(scheduler="sync"))


# -- accuracy on demand ---------------------------------------------------------------------------


@pytest.mark.parametrize("bound", ["guaranteed", "probable"])
@pytest.mark.parametrize("dtype", [np.float32, np.complex64])
@pytest.mark.parametrize("chunk", [1, 8, 512])
@pytest.mark.sampled(3)
def test_the_sums_over_chunks_are_within_rtol(chunk, dtype, bound):
    """On positive numbers the roundings of a chain of 512 are more than 1e-7."""
    rng = np.random.default_rng(0)
    x, y = (rng.random(shape).astype(dtype) for shape in ((8, 512), (512, 8)))
    if dtype is np.complex64:
        x, y = x * np.complex64(1 + 1j), y * np.complex64(1 - 1j)
    a, b = da.from_array(x, chunks=(8, chunk)), da.from_array(y, chunks=(chunk, 8))
    exact = x.astype(np.complex128) @ y
    for rtol in (1e-7, 1e-6, 1e-5, 1e-2):
        found = lowprec.matmul(a, b, rtol=rtol, bound=bound)
        assert found.dtype == dtype
        error = np.linalg.norm(found.compute(scheduler="sync") - exact)
        assert error <= rtol * np.linalg.norm(x) * np.linalg.norm(y)


def test_fp64_rounds_a_chain_once():
    """2^24 + 1 + 1: a running sum in FP32 would stay at 2^24."""
    x = da.from_array(np.array([[2.0**24, 1, 1]], np.float32), chunks=1)
    y = da.ones((3, 1), chunks=1, dtype="float32")
    assert lowprec.matmul(x, y, math_mode="fp64").compute(scheduler="sync").item() == 2.0**24 + 2
    assert lowprec.matmul(x, y, math_mode="fp32").compute(scheduler="sync").item() == 2.0**24
    narrow = lowprec.matmul(x / 2.0**24, y, math_mode="fp64", out_dtype="bfloat16")
    assert narrow.dtype == narrow.compute(scheduler="sync").dtype == ml_dtypes.bfloat16


def test_a_chain_that_no_mode_keeps_within_rtol_is_refused():
    """Sums of 16-bit numbers are FP32's: 1024 roundings are 6e-5."""
    x = da.ones((1, 1024), chunks=(1, 1), dtype="float16")
    whole = {"out_dtype": "float32"}
    assert lowprec.matmul(x, x.T, rtol=1e-3, **whole).dtype == np.float32
    with pytest.raises(lowprec.ModeError, match="products of 1024 chunks along k are added up"):
        lowprec.matmul(x, x.T, rtol=6.2e-5, **whole)
    with pytest.raises(lowprec.ModeError, match="products of 1024 chunks along k are added up"):
        lowprec.matmul(np.ones((1, 1024), np.float16), x.T, rtol=6.2e-5, **whole)
    with lowprec.fp32_guard():
        assert lowprec.matmul(x.astype("float32"), x.T, rtol=1e-2).dtype == np.float32


def test_sums_of_integers_are_exact_in_any_number_of_chunks():
    x = da.ones((4, 64), chunks=(4, 4), dtype="int8")
    assert (lowprec.matmul(x, x.T, rtol=1e-7).compute(scheduler="sync") == 64).all()


def test_k_chunk_reaches_each_chunk():
    x, y = draw(0, 6, 40), draw(1, 40, 5)
    a, b = da.from_array(x, chunks=20), da.from_array(y, chunks=20)
    found = lowprec.matmul(a, b, k_chunk=7)
    np.testing.assert_array_equal(found.compute(scheduler="sync"), x @ y)
    assert {task[-1] for task in dict(found.dask).values() if isinstance(task, tuple)} >= {7}
    assert found.name != lowprec.matmul(a, b).name
    with pytest.raises(lowprec.SettingError, match="k_chunk must be an integer of at least 1, got"):
        lowprec.matmul(a, b, k_chunk=0)
    with pytest.raises(lowprec.ModeError, match="bound='probable' needs rtol="):
        lowprec.matmul(a, b, bound="probable")


# -- contractions ---------------------------------------------------------------------------------

#: Shapes of the operands, and the contraction, which is also NumPy's.
CONTRACTIONS = {
    "chain": (((6, 8), (8, 5), (5, 4)), lambda xp, *x: xp.einsum("ij,jk,kl->il", *x)),
    "batch": (((2, 3, 4, 4), (2, 3, 4, 4)), lambda xp, *x: xp.einsum("bhij,bhjk->bhik", *x)),
    "elements": (((2, 3, 4, 4), (2, 3, 4, 4)), lambda xp, *x: xp.einsum("bhij,bhij->bhij", *x)),
    "diagonals": (((2, 3, 4, 4), (2, 3, 4, 4)), lambda xp, *x: xp.einsum("bhii,bhij->bj", *x)),
    "sum": (((6, 8),), lambda xp, x: xp.einsum("ij->j", x)),
    "number": (((6, 8), (6, 8)), lambda xp, *x: xp.einsum("ij,ij->", *x)),
    "two axes": (((2, 3, 4), (5, 4, 2)), lambda xp, *x: xp.tensordot(*x, axes=((2, 0), (1, 2)))),
    "outer": (((6, 8), (3,)), lambda xp, *x: xp.tensordot(*x, axes=0)),
    "dots": (((6, 8), (6, 8)), lambda xp, *x: xp.vecdot(*x)),
}


@pytest.mark.parametrize("name", CONTRACTIONS)
@pytest.mark.parametrize("dtype", [np.float32, np.complex64, ml_dtypes.bfloat16])
def test_contractions(name, dtype):
    shapes, contract = CONTRACTIONS[name]
    plain = [draw(i, *shape, dtype=dtype) for i, shape in enumerate(shapes)]
    if dtype is np.complex64:
        plain = [x + 1j * x[::-1] for x in plain]
    want = contract(lowprec, *plain)
    lazy = [da.from_array(x, chunks=2) for x in plain]
    # Either operand may be of NumPy.
    for i in range(len(lazy) + (len(lazy) > 1)):
        given = [plain[j] if j == i - 1 else x for j, x in enumerate(lazy)]
        found = contract(lowprec, *given)
        assert isinstance(found, da.Array)
        assert (found.shape, found.dtype) == (want.shape, want.dtype)
        np.testing.assert_array_equal(found.compute(scheduler="sync"), want)


# -- what is refused ------------------------------------------------------------------------------


def test_the_way_out_is_named_where_there_is_none_here():
    x = da.ones((4, 4), chunks=2, dtype="float32")
    for refuse in (lowprec.prepare, lowprec.linalg.inv):
        with pytest.raises(lowprec.ArrayError, match=r"otherwise pass array.compute\(\)"):
            refuse(x)
    with pytest.raises(lowprec.DTypeError, match=r"^b: dtype 'int64'"):
        lowprec.matmul(x, x.astype("int64"))


def test_refused_arguments():
    x = da.ones((4, 4), chunks=2, dtype="float32")
    with pytest.raises(lowprec.ShapeError, match="compute_chunk_sizes"):
        lowprec.matmul(x[x[:, 0] > 0], x)
    with pytest.raises(lowprec.ArrayError, match=r"^a: expected an array .*, got list"):
        lowprec.matmul([1.0], x)
    masked = np.ma.masked_array(np.ones((4, 4), np.float32), mask=True)
    for given in (masked, da.from_array(masked, chunks=2)):
        with pytest.raises(lowprec.ArrayError, match="has no mask"):
            lowprec.matmul(x, given)
    with pytest.raises(lowprec.UnsupportedError, match="bias= cannot be used here: a Dask array"):
        lowprec.matmul(x, x, bias=np.ones(4, np.float32))
    with pytest.raises(lowprec.UnsupportedError, match="out= cannot be used here"):
        lowprec.matmul(x, x, out=np.ones((4, 4), np.float32))


@pytest.mark.parametrize(
    ("function", "name"),
    [
        (lambda x, y: lowprec.tensordot(y, x, axes=((0,), (0,))), "b"),
        (lowprec.vecdot, "a"),
        (lambda x, y: lowprec.linear(y, x), "weight"),
        (lambda x, y: lowprec.einsum("ij,kj->ik", y, x), r"operands\[1\]"),
    ],
)
def test_a_contraction_of_unknown_chunks_reports_the_way_out(function, name):
    x = da.ones((4, 4), chunks=2, dtype="float32")
    way_out = rf"^{name}: the shape is not known, \(nan, 4\); call compute_chunk_sizes\(\)"
    with pytest.raises(lowprec.ShapeError, match=way_out):
        function(x[x[:, 0] > 0], x)


@pytest.mark.parametrize(("a", "b"), [((4, 10), (10, 4)), ((10,), (10, 4)), ((4, 10), (10,))])
def test_a_numpy_operand_is_cut_along_k_as_its_partner_is(a, b):
    """Were it one chunk, each task would need the whole of k of the other."""
    x, y = draw(0, *a), draw(1, *b)
    for found in (
        lowprec.matmul(x, da.from_array(y, chunks=3)),
        lowprec.matmul(da.from_array(x, chunks=3), y),
    ):
        products = (len(v) for k, v in found.dask.layers.items() if k.startswith("lowprec-matmul"))
        assert sum(products) == 4 * found.npartitions
        np.testing.assert_array_equal(found.compute(scheduler="sync"), x @ y)


@pytest.mark.parametrize("seed", range(20))
def test_contractions_of_empty_axes_and_chunks(seed):
    rng = np.random.default_rng(seed)

    def lazy(x):
        chunks = []
        for n in x.shape:
            cuts = np.sort(rng.integers(0, n + 1, rng.integers(0, 4)))
            chunks.append(tuple(np.diff([0, *cuts, n]).tolist()))
        return da.from_array(x, chunks=tuple(chunks))

    i, j, k = (int(n) for n in rng.integers(0, 4, 3))
    x, y, z = draw(0, i, j, k), draw(1, k, j), draw(2, i, j, k)
    contractions = (
        lambda m, a, b, c: m.tensordot(a, b, axes=((2, 1), (0, 1))),
        lambda m, a, b, c: m.tensordot(a, b, axes=((2,), (0,))),
        lambda m, a, b, c: m.vecdot(a, c),
        lambda m, a, b, c: m.einsum("ijk,kl->il", a, b),
        lambda m, a, b, c: m.einsum("ijk,ijk->ij", a, c),
        lambda m, a, b, c: m.matmul(a, b),
    )
    for contract in contractions:
        true, found = contract(np, x, y, z), contract(lowprec, *map(lazy, (x, y, z)))
        assert (found.shape, found.dtype) == (true.shape, true.dtype)
        np.testing.assert_array_equal(found.compute(scheduler="sync"), true)


def test_tensors_are_refused_by_type(torch):
    x, tensor = da.ones((4, 4), chunks=2, dtype="float32"), torch.ones(4, 4)
    of_tensors = x.map_blocks(torch.from_numpy)
    for a, b in ((x, tensor), (tensor, x)):
        with pytest.raises(
            lowprec.ArrayError, match="is a Tensor, which Dask cannot split into chunks"
        ):
            lowprec.matmul(a, b)
    for refuse in (lowprec.matmul, lowprec.vecdot, lowprec.tensordot):
        for a, b in ((x, of_tensors), (of_tensors, x)):
            with pytest.raises(
                lowprec.ArrayError, match="chunks of the Dask array are PyTorch tensors"
            ):
                refuse(a, b)


@pytest.mark.parametrize(
    ("dtype", "mode", "passed"),
    [
        ("float64", "fp64_emulated", "fp64_emulated"),
        ("float32", "fp64_emulated", "fp32"),
        ("float32", "bf16", "bf16"),
        ("complex128", "bf16", "fp32"),
    ],
)
def test_workers_get_a_mode_that_acts(dtype, mode, passed):
    """So that they give no warning, and use no mode of their own environment."""
    a = da.ones((4, 6), chunks=(2, 3), dtype=dtype)
    with lowprec.math_mode(mode):
        made = lowprec.matmul(a, a.T)
    tasks = [
        task for task in dict(made.dask).values() if isinstance(task, tuple) and len(task) == 8
    ]
    assert {task[4] for task in tasks} == {passed}
    np.testing.assert_array_equal(made.compute(scheduler="sync"), np.full((4, 4), 6, dtype))
