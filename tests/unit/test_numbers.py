"""Numbers and names that no product can take: each is refused in the package's own words, however it is written."""

import math
import os
import sys
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest

import lowprec
from lowprec.backends.cpu import threads
from lowprec.errors import quoted
from lowprec.policy import environment

X = np.ones((3, 3), np.float32)
CALLS = pytest.mark.parametrize("call", [lowprec.matmul, lowprec.plan, lowprec.autotune])


class Unshowable:
    """Something of a caller's that has no text."""

    def __repr__(self):
        raise ValueError("no text")


HUGE = {
    "an integer": 10**400,
    "an integer too long to be written": 10**5000,
    "a fraction": Fraction(10**400, 3),
    "negative": -(10**400),
    "a long double": np.longdouble(2.0) ** 2000,
}


@CALLS
@pytest.mark.parametrize("kind", HUGE)
@pytest.mark.parametrize("name", ["alpha", "beta", "scale_a", "scale_b"])
def test_a_factor_beyond_float64(call, kind, name):
    if kind == "a long double" and np.finfo(np.longdouble).maxexp <= 2000:
        pytest.skip("long double is double here")
    given = {name: HUGE[kind], **({"c": X} if name == "beta" else {})}
    with pytest.raises(lowprec.SettingError, match=f"{name} is .*, which exceeds float64"):
        call(X, X, **given)


@pytest.mark.parametrize("name", ["alpha", "beta"])
def test_a_complex_factor_beyond_float64(name):
    x = X.astype(np.complex64)
    with pytest.raises(lowprec.SettingError, match=f"{name} is .*exceeds float64"):
        lowprec.matmul(x, x, c=x, **{name: np.clongdouble(1j) * np.longdouble(2.0) ** 2000})


@CALLS
@pytest.mark.parametrize(
    "value", ["1", [1.0], X, Decimal(2), Unshowable()], ids=lambda v: type(v).__name__
)
def test_a_factor_that_is_no_number(call, value):
    with pytest.raises(
        lowprec.DTypeError, match=f"alpha must be a number, got {type(value).__name__}"
    ):
        call(X, X, alpha=value)


@pytest.mark.parametrize(
    "value", [2, True, Fraction(1, 2), np.float32(0.5), np.longdouble(3), np.int8(-4)], ids=repr
)
def test_any_number_is_a_factor(value):
    np.testing.assert_array_equal(lowprec.matmul(X, X, alpha=value), 3 * float(value) * X)


@pytest.mark.parametrize("call", [lowprec.matmul, lowprec.plan])
@pytest.mark.parametrize(
    "rtol", [*HUGE.values(), Fraction(1, 10**400), math.nan, 0, -1.0, True, "1", Unshowable()], ids=quoted
)  # fmt: skip
def test_an_rtol_that_is_no_tolerance(call, rtol):
    with pytest.raises(lowprec.ModeError, match="rtol must be a positive finite number, got"):
        call(X, X, rtol=rtol)


@CALLS
@pytest.mark.parametrize("value", [10**5000, Unshowable(), "x" * 10_000, ["relu"]], ids=quoted)
def test_names_that_are_none(call, value):
    for name, error in (
        ("activation", lowprec.SettingError),
        ("math_mode", lowprec.ModeError),
        ("out_dtype", lowprec.DTypeError),
    ):
        with pytest.raises(error, match=r"is not|must be a name") as caught:
            call(X, X, **{name: value})
        assert len(str(caught.value)) < 400


@CALLS
@pytest.mark.parametrize(
    "operands", [(None, None), (X, None), (None, X), (5, X), (X, "x"), (X, X.tolist())]
)
def test_operands_that_are_no_arrays(call, operands):
    with pytest.raises(lowprec.ArrayError, match="expected an array"):
        call(*operands)


STRANGE = [
    np.dtypes.StringDType(),
    "O",
    "U3",
    "S3",
    "M8[s]",
    "m8[s]",
    "V4",
    "?",
    "i8",
    "u1",
    "g",
    "G",
    [("a", "f4")],
]


@CALLS
@pytest.mark.parametrize("dtype", STRANGE, ids=str)
def test_element_types_that_are_none(call, dtype):
    strange = np.zeros((3, 3), dtype)
    for arguments in ({"a": strange}, {"b": strange}, {"out": strange}, {"bias": strange[0]}):
        given = {"a": X, "b": X, **arguments}
        with pytest.raises(lowprec.DTypeError, match="supported"):
            call(given.pop("a"), given.pop("b"), **given)
    with pytest.raises(lowprec.DTypeError, match="is not supported"):
        lowprec.plan(lowprec.ShapeDtype((3, 3), "float32"), ((3, 3), strange.dtype))


@pytest.mark.parametrize(
    "shape",
    [5, None, 2.5, "ab", (3, -1), (3, 2.5), (3, None), (3, 10**400), (3, -(10**5000)), (2**63,)],
    ids=quoted,
)
def test_shapes_that_are_none(shape):
    with pytest.raises(lowprec.ShapeError, match="shape must hold non-negative integers"):
        lowprec.ShapeDtype(shape, "float32")
    with pytest.raises(lowprec.ShapeError, match="shape must hold non-negative integers"):
        lowprec.plan((shape, "float32"), X)


def test_a_plan_of_the_largest_shapes_can_be_read():
    n = 2**29
    for dtype in ("float32", "complex128", "float16"):
        described = lowprec.ShapeDtype((n, n), dtype)
        made = lowprec.plan(described, described)
        assert made.flops >= 2 * n**3
        assert str(n) in str(made).replace(",", "")
    too_large = lowprec.ShapeDtype((2**31, 2**31), "float32")
    with pytest.raises(lowprec.ShapeError, match="exceeds the address space"):
        lowprec.plan(too_large, too_large)


@pytest.mark.parametrize(
    ("text", "limit"),
    [
        ("3", 3), ("007", 7), ("0", None), ("000", None), ("-2", None), ("2.0", None), ("0x2", None), ("two", None),
        ("²", None), ("٣", None), ("9" * 100_000, 999_999_999), ("0" * 100_000 + "5", 5), (" 4 ", 4), ("", None),
    ],
    ids=quoted,
)  # fmt: skip
def test_a_number_of_threads(text, limit, monkeypatch):
    monkeypatch.setenv("MKL_NUM_THREADS", text)
    monkeypatch.setattr(threads, "_limits", threads._Limits())  # reads it now, not after a second
    assert environment.thread_limit(of_blas=False) == (limit or sys.maxsize)
    assert 1 <= threads.num_threads() <= (limit or os.cpu_count() or 1)
    np.testing.assert_array_equal(lowprec.matmul(X, X, math_mode="bf16"), 3 * X)
    shown = {v["name"]: v["value"] for v in lowprec.info()["environment"]}
    assert shown["MKL_NUM_THREADS"] == (text.strip() or None)


@pytest.mark.parametrize("dtype", ["float32", "float16", "complex64"])
@pytest.mark.parametrize("name", ["alpha", "beta"])
def test_a_factor_beyond_float32(name, dtype):
    x = X.astype(dtype)
    given = {"c": x} if name == "beta" else {}
    lowprec.matmul(x, x, **given, **{name: 2.0})  # with the same plan but for the factor
    for factor in (1e39, -1e300):
        with pytest.raises(lowprec.SettingError, match=f"{name} is .*, which float32 cannot"):
            lowprec.matmul(x, x, **given, **{name: factor})
    # What the caller writes as infinity is meant.
    assert not np.isfinite(lowprec.matmul(x, x, **given, **{name: math.inf})).any()
    assert lowprec.matmul(X.astype(np.float64), X, alpha=1e300)[0, 0] == 3e300


@pytest.mark.parametrize("mode", ["fp32", "bf16", "fp16x3"])
@pytest.mark.parametrize("shapes", [((3, 4), (4, 5)), ((4,), (4, 5)), ((2, 3, 4), (4,))])
def test_a_product_times_zero_is_not_read(mode, shapes):
    """As BLAS specifies: with alpha = 0, NaN in the operands has no effect."""
    a, b = (np.full(shape, np.nan, np.float32) for shape in shapes)
    shape = np.matmul(a, b).shape
    np.testing.assert_array_equal(lowprec.matmul(a, b, alpha=0, math_mode=mode), np.zeros(shape))
    c = np.ones(shape, np.float32)
    found = lowprec.matmul(a, b, alpha=0, beta=2, c=c, math_mode=mode)
    np.testing.assert_array_equal(found, 2 * c)
    with pytest.raises(lowprec.ShapeError, match="mismatch in its core dimension"):
        lowprec.matmul(a, b[1:], alpha=0)
