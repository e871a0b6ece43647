"""2:4 sparse prepared operands: the check, pruning, and products equal to those of the pruned array."""

import itertools
import math
import pickle

import ml_dtypes
import numpy as np
import pytest

import lowprec
from lowprec.formats import dtype_from_name
from lowprec.planning import ReasonKind
from support import oracles

DTYPES = ("float32", "bfloat16", "float16", "int8", "float8_e4m3fn")
NUMPY = {name: getattr(ml_dtypes, name) for name in ("bfloat16", "float8_e4m3fn")}


def numbers(rng, dtype, *shape):
    """Return few different magnitudes, so that groups have ties and zeros."""
    x = rng.integers(-3, 4, shape).astype(np.float32)
    return x.astype(NUMPY.get(dtype, dtype))


def kept(group):
    """Return which of up to 4 numbers stay: the two largest, NaN before all, the lower index of equal ones."""
    rank = {i: math.inf if math.isnan(x) else abs(x) for i, x in enumerate(group)}
    order = sorted(rank, key=lambda i: (not math.isnan(group[i]), -rank[i], i))
    return [i in order[:2] for i in range(len(group))]


def pruned(b):
    """Prune element by element; zeros keep their sign."""
    out = np.array(b, order="K")
    for index in np.ndindex(*b.shape[:-2], b.shape[-1]):
        *batch, column = index
        for start in range(0, b.shape[-2], 4):
            rows = range(start, min(start + 4, b.shape[-2]))
            for row, stays in zip(
                rows, kept([float(b[(*batch, r, column)]) for r in rows]), strict=True
            ):
                if not stays and out[(*batch, row, column)] != 0:
                    out[(*batch, row, column)] = 0
    return out


def elements(prepared):
    return prepared._view.ndarray()


def same(x, y):
    """Assert equality to the bit."""
    assert (x.dtype, x.shape) == (y.dtype, y.shape)
    assert x.tobytes() == y.tobytes()


LAYOUTS = {
    "rows": lambda b: b,
    "columns": np.asfortranarray,
    "every second": lambda b: np.repeat(np.repeat(b, 2, 0), 2, 1)[::2, ::2],
    "backwards": lambda b: b[::-1, ::-1],
    "a stack": lambda b: np.stack([b, b[::-1], -b]),
    "one for a batch": lambda b: np.broadcast_to(b, (3, *b.shape)),
    "one row repeated": lambda b: np.broadcast_to(b[:1], b.shape),
    "no columns": lambda b: b[:, :0],
    "no rows": lambda b: b[:0],
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("k", [1, 3, 4, 22, 64])
def test_pruning(rng, dtype, layout, k):
    b = LAYOUTS[layout](numbers(rng, dtype, k, 12))
    before = b.copy()
    prepared = lowprec.prepare(b, sparsity="2:4", prune=True)
    want = pruned(b)
    np.testing.assert_array_equal(elements(prepared), want)
    same(b, before)
    assert (prepared.sparsity, prepared.shape) == ("2:4", b.shape)
    # A pruned array satisfies the pattern, and pruning changes nothing in it.
    again = lowprec.prepare(elements(prepared), sparsity="2:4", prune=True)
    same(elements(again), elements(lowprec.prepare(want, sparsity="2:4")))


@pytest.mark.parametrize("dtype", [*DTYPES, "float8_e5m2"])
def test_magnitudes(dtype):
    """All groups of special numbers: NaN of both signs, Inf, the smallest subnormal, zeros, and -128."""
    from lowprec.arrays import sparsity
    from lowprec.arrays.view import NUMPY_DTYPES

    found = dtype_from_name(dtype)
    if dtype == "int8":
        special = [-128, 127, -1, 0]
    else:
        assert found.format is not None
        largest = [math.inf] if found.format.has_infinity else [found.format.largest]
        special = [math.nan, -math.nan, *largest, -1.0, found.format.smallest_subnormal, -0.0, 0.0]
    groups = np.array(list(itertools.product(special, repeat=4))).T.astype(NUMPY_DTYPES[found])
    result = sparsity.pruned(groups, found)
    sparsity.check_pattern(result, found)
    np.testing.assert_array_equal(result.astype(np.float64), pruned(groups).astype(np.float64))
    # Zeros keep their sign: an array that has the pattern is not changed.
    same(sparsity.pruned(result, found), result)


def test_nan_payloads_are_equal():
    b = np.array([0x7FC00000, 0x7FFFFFFF, 0xFFC00001, 0x3F800000], np.uint32).view(np.float32)[
        :, None
    ]
    got = elements(lowprec.prepare(b, sparsity="2:4", prune=True))
    assert got.view(np.uint32)[:, 0].tolist() == [0x7FC00000, 0x7FFFFFFF, 0, 0]


@pytest.mark.parametrize("mode", ["fp32", "bf16", "fp16x3"])
@pytest.mark.parametrize("layout", [x for x in LAYOUTS if x not in ("no rows", "one row repeated")])
@pytest.mark.parametrize("dtype", DTYPES)
def test_products_are_those_of_the_pruned_array(rng, dtype, layout, mode):
    b = LAYOUTS[layout](oracles.random_matrix(rng, (70, 36), dtype))
    prepared = lowprec.prepare(b, sparsity="2:4", prune=True, math_mode=mode)
    # An array of the same strides, because the order of a sum may depend on these.
    dense = pruned(b)
    for m in (1, 5, 48):
        a = oracles.random_matrix(rng, (m, 70), dtype)
        want = lowprec.matmul(a, dense, math_mode=mode)
        for _ in range(2):
            same(lowprec.matmul(a, prepared, math_mode=mode), want)
        plan = lowprec.plan(a, prepared, math_mode=mode)
        assert plan.sparsity is not None
        assert plan.sparsity.kind is ReasonKind.ZEROS_MULTIPLIED
        assert "multiplies the zeros of b like other numbers" in " ".join(str(plan).split())
        assert lowprec.plan(a, lowprec.prepare(b, math_mode=mode), math_mode=mode).sparsity is None


def test_predictions():
    a, b = np.ones((16, 64), ml_dtypes.bfloat16), np.zeros((64, 32), ml_dtypes.bfloat16)
    prepared = lowprec.prepare(b, sparsity="2:4")
    for device, kind in (("h100", ReasonKind.SPARSE), ("v100", ReasonKind.DENSE_PRODUCT)):
        found = lowprec.plan(a, prepared, device=device).sparsity
        assert found is not None
        assert found.kind is kind
    quantised = lowprec.plan(a, prepared, device="h100", math_mode="int8").sparsity
    assert "b as it is stored" in str(quantised)
    text = " ".join(str(lowprec.plan(a, prepared, device="h100")).split())
    assert (
        "2:4: cuSPARSELt multiplies at most half of b, which takes 0.5625 of its bytes in addition"
        in text
    )


def test_violations():
    b = np.zeros((2, 10, 3), np.float32)
    b[0, [0, 3], 0] = 1
    b[1, [4, 6], 2] = 1
    lowprec.prepare(b, sparsity="2:4")
    b[1, 7, 2] = np.nan
    b[1, 8:, 1] = 1  # 2 of a shorter last group
    with pytest.raises(
        lowprec.SparsityError,
        match=r"b\[1, 4:8, 2\] has 3 nonzero .* first of 1 of 18 groups .*prune=True",
    ):
        lowprec.prepare(b, sparsity="2:4")
    b[0, [4, 5, 6], 0] = 1
    b[0, 7, 0] = -0.0
    with pytest.raises(
        lowprec.SparsityError, match=r"b\[0, 4:8, 0\] has 3 nonzero elements, the first of 2 of 18"
    ):
        lowprec.prepare(b, sparsity="2:4")
    wide = np.ones((7, 1), np.int8)
    wide[:2] = 0
    with pytest.raises(lowprec.SparsityError, match=r"b\[4:7, 0\] has 3 nonzero elements"):
        lowprec.prepare(wide, sparsity="2:4")


def test_wrong_arguments():
    b = np.zeros((8, 8), np.float32)
    with pytest.raises(
        lowprec.SparsityError, match="sparsity '2;4' is not supported; choose '2:4' or None"
    ):
        lowprec.prepare(b, sparsity="2;4")
    with pytest.raises(ValueError, match='prune=True needs sparsity=; pass sparsity="2:4"'):
        lowprec.prepare(b, prune=True)
    for dtype in (np.float64, np.complex64, np.complex128):
        with pytest.raises(
            lowprec.DTypeError,
            match=f"dtype {np.dtype(dtype)}, which no sparse unit .* float32, float16",
        ):
            lowprec.prepare(b.astype(dtype), sparsity="2:4")
    with pytest.raises(
        lowprec.UnsupportedError, match="b is a quantised array, which has no sparsity"
    ):
        lowprec.prepare(lowprec.quantize(b, "fp8"), sparsity="2:4")
    with pytest.raises(lowprec.ShapeError, match=r"shape \(8,\).*pass b\[:, None\]"):
        lowprec.prepare(b[0], sparsity="2:4")


def test_the_transpose_is_dense_and_its_transpose_sparse(rng):
    weight = numbers(rng, "float32", 24, 40)  # (n, k)
    sparse = lowprec.prepare(weight.T, sparsity="2:4", prune=True)
    assert (sparse.sparsity, sparse.T.sparsity, sparse.T.T.sparsity) == ("2:4", None, "2:4")
    assert "2:4 sparse" in repr(sparse)
    assert "2:4" not in repr(sparse.T)
    x = numbers(rng, "float32", 5, 40)
    same(lowprec.linear(x, sparse.T), lowprec.linear(x, elements(sparse).T))
    y = numbers(rng, "float32", 5, 24)
    assert lowprec.plan(y, sparse.T).sparsity is None
    same(lowprec.matmul(y, sparse.T), lowprec.matmul(y, elements(sparse).T))


def test_pickles(rng):
    sparse = lowprec.prepare(
        numbers(rng, "bfloat16", 16, 8), sparsity="2:4", prune=True, math_mode="bf16"
    )
    for operand in (sparse, sparse.T):
        again = pickle.loads(pickle.dumps(operand))
        assert (again.sparsity, again.T.sparsity, again.math_mode) == (
            operand.sparsity,
            operand.T.sparsity,
            "bf16",
        )
        np.testing.assert_array_equal(elements(again), elements(operand))


@pytest.mark.parametrize("library", ["torch", "jax"])
def test_arrays_of_other_libraries(rng, library):
    module = pytest.importorskip(
        "torch" if library == "torch" else "jax.numpy", reason=f"{library} is not installed"
    )
    b = numbers(rng, "float32", 24, 16)
    x = module.asarray(b)
    np.testing.assert_array_equal(
        elements(lowprec.prepare(x, sparsity="2:4", prune=True)), pruned(b)
    )
    np.testing.assert_array_equal(
        elements(lowprec.prepare(x.T, sparsity="2:4", prune=True)), pruned(b.T)
    )
    np.testing.assert_array_equal(np.asarray(x), b)
    half = x.astype(module.bfloat16) if library == "jax" else x.to(module.bfloat16)
    got = lowprec.matmul(half.T, lowprec.prepare(half, sparsity="2:4", prune=True))
    assert type(got) is type(x)
    want = b.T.astype(np.float64) @ pruned(b)  # small whole numbers, exact in bfloat16 up to 256
    np.testing.assert_array_equal(
        np.asarray(got.astype("float32") if library == "jax" else got.float()), want
    )
