"""einsum, tensordot, vecdot and linear over every array library, against NumPy's in exact arithmetic.

The numbers are small integers: each product and each sum is exact in every mode, so results are equal bit for bit.
"""

import functools
import sys

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import lowprec
from frameworks.backends import Backend
from frameworks.conftest import load_or_skip
from lowprec.arrays import library_of, namespaces
from lowprec.contractions import products, steps
from lowprec.core.arguments import parse_dtype
from lowprec.formats import promote

with_namespace = pytest.mark.parametrize("backend", [Backend.NUMPY, Backend.TORCH, Backend.JAX])


@pytest.fixture
def xp(backend):
    return load_or_skip(backend)


def draw(seed, *shape, dtype=np.float32):
    return np.random.default_rng(seed).integers(-3, 4, shape).astype(dtype)


# -- einsum ---------------------------------------------------------------------------------------

LENGTHS = dict(zip("abcdef", (2, 3, 4, 1, 5, 0), strict=True))


def operands_of(subscripts, dtype=np.float32):
    """Operands whose named axes have the lengths above, and whose "..." are two axes, the first broadcast."""
    found = []
    for i, text in enumerate(subscripts.partition("->")[0].split(",")):
        start, dots, end = text.partition("...")
        lengths = (
            [LENGTHS[c] for c in start] + ([1 + i, 2] if dots else []) + [LENGTHS[c] for c in end]
        )
        found.append(draw(i, *lengths, dtype=dtype))
    return found


SUBSCRIPTS = [
    "ab,bc->ac", "eab,ebc->eac", "ab,bc,ce->ae", "abce,bace->bc", "a,b->ab", "ab,ab->", "ab,ab->ab", "a,ab,b->",
    "aa,ab->b", "abc,ce,ea,ba->ba", "ab,c->ab", "...ab,bc->...ac", "ab,ab->a", "abb,bc->ac", "ab,bc->", "aa->a",
    "aa", "ab->ba", "abc->b", "aaa,a->a", "ba", "a,b,c->cab", "aab,bcc->ac", "a->", "ab,ce->", "a,a,a,a->a",
    "e...a,...ba->...be", "ad,db->ab", "da,db->ab", "af,fb->ab", "fa,fb->fab", "ab,ba", "abcde->", "...a,...a->...",
]  # fmt: skip


@pytest.mark.parametrize("subscripts", SUBSCRIPTS)
@with_namespace
@pytest.mark.sampled(2)
def test_einsum(xp, subscripts):
    operands = operands_of(subscripts)
    true = np.einsum(subscripts, *operands)
    found = lowprec.einsum(subscripts, *map(xp.asarray, operands))
    np.testing.assert_array_equal(xp.to_numpy(found), true)
    assert found.shape == true.shape


@pytest.mark.parametrize("optimize", [False, True, "greedy", [(1, 2), (0, 1)], [(0, 1, 2)]])
def test_einsum_takes_any_order_of_products(optimize):
    operands = operands_of("ab,bc,ce->ea")
    found = lowprec.einsum("ab,bc,ce->ea", *operands, optimize=optimize)
    np.testing.assert_array_equal(found, np.einsum("ab,bc,ce->ea", *operands))


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_einsum_of_anything(data):
    names = st.text("abcde", max_size=4)
    inputs = data.draw(st.lists(names, min_size=1, max_size=4))
    used = sorted(set("".join(inputs)))
    output = data.draw(st.lists(st.sampled_from(used), unique=True) if used else st.just([]))
    subscripts = f"{','.join(inputs)}->{''.join(output)}"
    operands = operands_of(subscripts, np.float64)
    np.testing.assert_array_equal(
        lowprec.einsum(subscripts, *operands), np.einsum(subscripts, *operands)
    )


def test_int8_is_summed_in_int32():
    x = np.full((3, 4), 127, np.int8)
    for subscripts in ("ab,cb->ac", "ab,ab->ab"):
        found = lowprec.einsum(subscripts, x, x)
        assert found.dtype == np.int32
        np.testing.assert_array_equal(found, np.einsum(subscripts, x, x, dtype=np.int32))


def test_each_product_runs_in_the_mode():
    x = np.full((2, 2), 1 + 2**-10, np.float32)  # 1 in bfloat16
    assert (lowprec.einsum("ab,bc,cd->ad", x, x, x, math_mode="bf16") == 4).all()
    with lowprec.math_mode("bf16"):
        assert (lowprec.einsum("ab,bc,cd->ad", x, x, x) == 4).all()
        with lowprec.fp32_guard():
            assert (lowprec.einsum("ab,bc,cd->ad", x, x, x) > 4.01).all()


@pytest.mark.parametrize(
    ("subscripts", "shapes", "match"),
    [
        ("ab,bc->ac", [(2, 3), (4, 5)], "label 'b'"),
        ("ab,bc->ac", [(2, 3)], "subscripts 'ab,bc->ac' for shapes"),
        ("ab,bc->ax", [(2, 3), (3, 4)], "result's labels 'ax'"),
        ("ab,bc->aa", [(2, 3), (3, 4)], "result's labels 'aa'"),
        ("ab->a", [(2, 3, 4)], "'ab' does not match 3 axes"),
        ("a...b->a", [(2,)], "does not match 1 axes"),
        ("a.b->a", [(2, 3)], "labels are letters"),
        ("aa->a", [(1, 3)], "label 'a' has lengths that differ"),
    ],
)
def test_einsum_refuses_by_type(subscripts, shapes, match):
    with pytest.raises(lowprec.ShapeError, match=match):
        lowprec.einsum(subscripts, *(np.ones(shape) for shape in shapes))


def test_einsum_wants_subscripts_first():
    with pytest.raises(lowprec.ShapeError, match="subscripts and then the operands"):
        lowprec.einsum(np.ones((2, 2)), "ab->a")
    with pytest.raises(lowprec.ShapeError, match="subscripts and then the operands"):
        lowprec.einsum("ab->a")


@pytest.mark.parametrize(
    "optimize", [3, None, [3], ("greedy", 1000), [(0, 5)], [(0, "x")], [], [(0, 0)]]
)
def test_einsum_refuses_an_order_that_is_none(optimize):
    with pytest.raises(lowprec.ShapeError, match="einsum: "):
        lowprec.einsum("ij,jk->ik", np.ones((2, 3)), np.ones((3, 2)), optimize=optimize)


@pytest.mark.parametrize("optimize", ["auto", "greedy", "optimal", False])
def test_einsum_without_opt_einsum(monkeypatch, optimize):
    steps.einsum_steps.cache_clear()
    monkeypatch.setitem(sys.modules, "opt_einsum", None)
    for subscripts in SUBSCRIPTS:
        operands = operands_of(subscripts)
        result = lowprec.einsum(subscripts, *operands, optimize=optimize)
        np.testing.assert_array_equal(result, np.einsum(subscripts, *operands))
    with pytest.raises(lowprec.UnsupportedError, match="optimize='dp' needs opt_einsum"):
        lowprec.einsum("ab,bc->ac", np.ones((7, 11)), np.ones((11, 13)), optimize="dp")


# -- tensordot, vecdot, linear --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("a", "b", "axes"),
    [
        ((2, 3, 4), (3, 4, 5), 2),
        ((2, 3), (4, 5), 0),
        ((2, 3, 4), (4, 3, 5), ((1, 2), (1, 0))),
        ((2, 3, 4), (4, 3, 5), ((-2, -1), (-2, -3))),
        ((2, 3), (3,), (1, 0)),
        ((2, 0), (0, 3), 1),
        ((), (2,), 0),
        ((2, 3), (2, 3), 2),
    ],
)
@with_namespace
def test_tensordot(xp, a, b, axes):
    x, y = draw(0, *a), draw(1, *b)
    found = xp.to_numpy(lowprec.tensordot(xp.asarray(x), xp.asarray(y), axes))
    np.testing.assert_array_equal(found, np.tensordot(x, y, axes=axes))


@pytest.mark.parametrize(
    ("axes", "match"),
    [
        (3, "axes=3"),
        (-1, "axes=-1"),
        (((0, 0), (0, 1)), "an axis twice"),
        (((2,), (0,)), "has no axes"),
        (((0,), (0, 1)), "summed in pairs"),
        (((0,), (1,)), "lengths"),
        ((1, 2, 3), "a number or a pair"),
        ("x", "a number or a pair"),
        ((("a",), (0,)), "axes are integers, got 'a'"),
        (((0,), (0.0,)), "axes are integers, got 0.0"),
        (((0,), None), "axes are integers, got None"),
    ],
)
def test_tensordot_refuses(axes, match):
    with pytest.raises(lowprec.ShapeError, match=match):
        lowprec.tensordot(np.ones((2, 3)), np.ones((2, 3)), axes=axes)


@pytest.mark.parametrize(
    ("a", "b", "axis"),
    [((5,), (5,), -1), ((2, 5), (5,), -1), ((4, 1, 5), (3, 5), -1), ((5, 2), (5, 2), -2), ((2, 0), (2, 0), -1)],
)  # fmt: skip
@with_namespace
def test_vecdot(xp, a, b, axis):
    x, y = draw(0, *a), draw(1, *b)
    found = xp.to_numpy(lowprec.vecdot(xp.asarray(x), xp.asarray(y), axis=axis))
    np.testing.assert_array_equal(found, np.vecdot(x, y, axis=axis))


@with_namespace
def test_vecdot_conjugates_the_first(xp):
    x = np.array([1 + 2j, 3], np.complex64)
    y = np.array([2j, 1], np.complex64)
    assert complex(lowprec.vecdot(xp.asarray(x), xp.asarray(y))) == np.vecdot(x, y)


def test_vecdot_refuses_an_illegal_axis():
    for axis in (1.0, "x", None, (0,)):
        with pytest.raises(lowprec.ShapeError, match="vecdot: axes are integers, got"):
            lowprec.vecdot(np.ones((2, 3)), np.ones((2, 3)), axis=axis)
    with pytest.raises(lowprec.ShapeError, match=r"no axis -1 in shapes \(\) and \(3,\)"):
        lowprec.vecdot(np.ones(()), np.ones(3))


@with_namespace
def test_vecdot_reports_which_shapes_do_not_fit(xp):
    a, b = xp.asarray(draw(0, 3, 4)), xp.asarray(draw(0, 5, 6))
    with pytest.raises(
        lowprec.ShapeError, match=r"axis -1 of shapes \(3, 4\) and \(5, 6\) has 4 and 6"
    ):
        lowprec.vecdot(a, b)
    with pytest.raises(lowprec.ShapeError, match=r"\(3, 4\) and \(2, 4\) do not broadcast"):
        lowprec.vecdot(a, xp.asarray(draw(0, 2, 4)))


@with_namespace
def test_linear_reports_which_shapes_do_not_fit(xp):
    x, weight = xp.asarray(draw(0, 3, 4)), xp.asarray(draw(0, 2, 4))
    with pytest.raises(
        lowprec.ShapeError, match=r"x has shape \(3, 4\), but the weight takes \(..., 6\)"
    ):
        lowprec.linear(x, xp.asarray(draw(0, 5, 6)))
    with pytest.raises(lowprec.ShapeError, match=r"shape \(n, k\), got \(1, 2, 4\)"):
        lowprec.linear(x, weight[None])
    with pytest.raises(
        lowprec.ShapeError, match=r"bias has shape \(3,\), but the weight gives \(2,\)"
    ):
        lowprec.linear(x, weight, xp.asarray(draw(0, 3)))


@with_namespace
def test_linear(xp):
    x, weight, bias = draw(0, 2, 3, 4), draw(1, 5, 4), draw(2, 5)
    found = lowprec.linear(*map(xp.asarray, (x, weight, bias)), activation="relu", math_mode="bf16")
    np.testing.assert_array_equal(xp.to_numpy(found), np.maximum(x @ weight.T + bias, 0))
    found = lowprec.linear(xp.asarray(x), xp.asarray(weight), bias=xp.asarray(bias))
    np.testing.assert_array_equal(xp.to_numpy(found), x @ weight.T + bias)


# -- libraries of the Array API -------------------------------------------------------------------


def strict():
    return pytest.importorskip("array_api_strict", reason="array-api-strict is not installed")


def test_results_are_arrays_of_a_library_of_the_array_api():
    xp = strict()
    x = xp.asarray(draw(0, 3, 4))
    for found in (lowprec.matmul(x, xp.permute_dims(x, (1, 0))), lowprec.einsum("ab,cb->ac", x, x)):
        assert type(found) is type(x)
        np.testing.assert_array_equal(np.from_dlpack(found), draw(0, 3, 4) @ draw(0, 3, 4).T)


def test_types_unknown_to_the_library_come_as_dlpack():
    x = strict().asarray(draw(0, 2, 2))
    found = lowprec.matmul(x, x, out_dtype="bfloat16")
    assert isinstance(found, lowprec.DLPackArray)
    want = (draw(0, 2, 2) @ draw(0, 2, 2)).astype(ml_dtypes.bfloat16)
    np.testing.assert_array_equal(library_of(found).view(found).ndarray(), want, strict=True)


def test_an_array_without_a_namespace_is_refused():
    xp = load_or_skip(Backend.DLPACK_ONLY)
    with pytest.raises(lowprec.ArrayError, match="no Array API namespace"):
        namespaces.namespace_of(xp.asarray(draw(0, 2, 2)))
    with pytest.raises(lowprec.ArrayError, match="expected an array"):
        lowprec.vecdot([1.0], np.ones(1))


# -- accuracy on demand ---------------------------------------------------------------------------

CONTRACTIONS = [
    lambda x, y, **how: lowprec.einsum("ab,bc->ac", x, y.T, **how),
    lambda x, y, **how: lowprec.tensordot(x, y, axes=(1, 1), **how),
    lambda x, y, **how: lowprec.vecdot(x[:, None], y, **how),
    lambda x, y, **how: lowprec.linear(x, y, **how),
]


@pytest.mark.parametrize("contract", CONTRACTIONS, ids=["einsum", "tensordot", "vecdot", "linear"])
def test_bound_and_k_chunk_reach_the_products(contract, monkeypatch):
    asked = []

    def spy(a, b, **keywords):
        asked.append(keywords)
        return matmul(a, b, **keywords)

    matmul = products.matmul
    monkeypatch.setattr(products, "matmul", spy)
    x, y = draw(0, 4, 2000), draw(1, 3, 2000)
    found = contract(x, y, rtol=2e-5, bound="probable", k_chunk=500)
    np.testing.assert_array_equal(found, x @ y.T)
    assert {(how["bound"], how["k_chunk"]) for how in asked} == {("probable", 500)}
    with pytest.raises(lowprec.ModeError, match="bound must be 'guaranteed' or 'probable', got"):
        contract(x, y, rtol=1e-3, bound="likely")
    with pytest.raises(lowprec.SettingError, match="k_chunk must be an integer of at least 1, got"):
        contract(x, y, k_chunk=0)


# -- mixed element types --------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize(
    "subscripts", ["ij,k->k", "ij,jk->k", "ij,jk,kl->il", "ij,ij->ij", "ij->j"]
)
def test_mixed_types_are_promoted_first(subscripts, seed):
    """Within the roundings of the common type, of each step's result to it, relative to the sum of magnitudes."""
    rng = np.random.default_rng(seed)
    kinds = [ml_dtypes.bfloat16, np.float16, np.float32, np.float64, np.complex64]
    chosen = [kinds[i] for i in rng.integers(0, len(kinds), subscripts.count(",") + 1)]
    operands = [
        rng.random((20,) * len(text)).astype(kind)
        for text, kind in zip(subscripts.partition("->")[0].split(","), chosen, strict=True)
    ]
    common = functools.reduce(promote, [parse_dtype(kind) for kind in chosen]).label
    found = lowprec.einsum(subscripts, *operands, math_mode="fp32")
    wide = [x.astype(np.complex128 if x.dtype.kind == "c" else np.float64) for x in operands]
    true = np.einsum(subscripts, *wide)
    assert found.dtype.name == common
    # At most three roundings to the type, and sums of up to 400 terms, in FP32 or wider (complex: twice).
    unit = {"bfloat16": 2.0**-8, "float16": 2.0**-11}.get(common, 0)
    summed = 2.0**-53 if common in ("float64", "complex128") else 2.0**-24
    error = 3 * unit + 2 * 400 * summed
    assert (np.abs(found.astype(true.dtype) - true) <= 2 * error * np.abs(true)).all()


def test_intermediates_neither_overflow_nor_take_a_mode():
    half = np.full((300, 300), 300, np.float16)
    assert (lowprec.einsum("ij,k->k", half, np.ones(2)) == 2.7e7).all()
    small = np.full(2, 2.0**-10, np.float16)
    # The sum, 2.7e7, is beyond float16, the result is not.
    assert (lowprec.einsum("ij,k->k", half, small) == np.float16(2.7e7 * 2.0**-10)).all()
    x = np.full((2, 2), 1 + 2.0**-10, np.float16)  # 1 in bfloat16
    with lowprec.math_mode("bf16"):
        np.testing.assert_array_equal(
            lowprec.einsum("ij,k->k", x, x[0]), (4 * x[0].astype(float) ** 2).astype(np.float16)
        )
    wide = np.full((2, 2), 1 + 2.0**-20, np.float32)
    found = lowprec.einsum("ij,jk->k", wide, np.ones((2, 2)), math_mode="bf16")
    assert (found == 4 * (1 + 2.0**-20)).all()


@pytest.mark.parametrize(
    "subscripts", ["ab,bc->ac", "ab,bc,ce->ae", "ab->a", "ab,ab->ab", "ab->ba"]
)
@with_namespace
def test_einsum_out_dtype(xp, subscripts):
    plain = operands_of(subscripts, np.float16)
    found = lowprec.einsum(subscripts, *map(xp.asarray, plain), out_dtype="float32")
    found = xp.to_numpy(found)
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, np.einsum(subscripts, *(x.astype("f4") for x in plain)))
    with pytest.raises(lowprec.DTypeError, match="out_dtype float64 is not supported"):
        lowprec.einsum(subscripts, *map(xp.asarray, plain), out_dtype="float64")


def test_int8_is_not_multiplied_twice():
    x = np.ones((2, 2), np.int8)
    for subscripts, count in (("ij,jk,kl->il", 3), ("ij,jk->k", 2)):
        with pytest.raises(lowprec.DTypeError, match="of int8 operands need more than one product"):
            lowprec.einsum(subscripts, *[x] * count)


def test_einsum_names_the_operand_of_an_unsupported_type():
    with pytest.raises(lowprec.DTypeError, match=r"operands\[1\]: dtype 'int64'"):
        lowprec.einsum("ij,jk->ik", np.ones((2, 2)), np.ones((2, 2), np.int64))
    assert lowprec.einsum("ij->ji", np.ones((2, 3), np.int64)).shape == (3, 2)
