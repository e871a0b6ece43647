"""The numbers of ``check``, against a computation of their own."""

import json
import math
from fractions import Fraction

import numpy as np
import pytest

import lowprec
from lowprec.checking import comparison
from lowprec.checking.accuracy import Reference, Verdict
from lowprec.cli.operands import DISTRIBUTIONS, operand
from lowprec.core import dispatch
from lowprec.formats import DType
from lowprec.modes import available_modes


def _exact_errors(a, b, c):
    """Both errors with exact rationals: no float64 product, no norm of NumPy's."""
    rows = [[Fraction(float(x)) for x in row] for row in a]
    columns = [[Fraction(float(x)) for x in column] for column in b.T]
    error = product = Fraction(0)
    for i, row in enumerate(rows):
        for j, column in enumerate(columns):
            exact = sum(x * y for x, y in zip(row, column, strict=True))
            error += (Fraction(float(c[i, j])) - exact) ** 2
            product += exact**2
    norms = sum(x * x for r in rows for x in r) * sum(x * x for r in columns for x in r)
    return math.sqrt(error / product), math.sqrt(error / norms)


@pytest.mark.parametrize("mode", [str(m) for m in available_modes()])
@pytest.mark.parametrize("distribution", ["normal", "positive"])
def test_errors_of_files_are_exact(command, tmp_path, rng, mode, distribution):
    a = operand(rng, (12, 20), DType.FLOAT32, distribution)
    b = operand(rng, (20, 9), DType.FLOAT32, distribution)
    np.save(tmp_path / "a.npy", a)
    np.save(tmp_path / "b.npy", b)
    words = (tmp_path / "a.npy", tmp_path / "b.npy", "--modes", mode, "--rounds", 1, "--json")
    (case,) = json.loads(command("check", *words).out)["cases"]
    row = case["rows"][-1]
    assert row["mode"] == mode
    relative, scaled = _exact_errors(a, b, lowprec.matmul(a, b, math_mode=mode))
    # The reference is off by 20 * 2^-53 of its terms, a billionth of the smallest of these errors (2^-25).
    assert row["error"] == pytest.approx(relative, rel=1e-6)
    assert row["scaled_error"] == pytest.approx(scaled, rel=1e-6)
    plan = lowprec.plan(a, b, math_mode=mode)
    # What underflow adds is below 2^-25 per element here; the bound cannot be less than its main term.
    least = plan.bound.relative * (1 - 2**-50)  # norms are multiplied and divided
    assert least <= row["bound"] <= plan.bound.relative + 2**-16
    assert row["verdict"] == "within"


@pytest.mark.parametrize(
    ("shape_a", "shape_b", "dtype"),
    [
        ((3, 1, 8, 32), (4, 32, 6), DType.FLOAT32),
        ((7, 9), (9, 5), DType.COMPLEX64),
        ((5,), (5,), DType.FLOAT32),
        ((3, 5), (5,), DType.FLOAT32),
        ((5,), (5, 4), DType.FLOAT32),
    ],
)
def test_batches_and_vectors_are_measured_as_a_whole(rng, shape_a, shape_b, dtype):
    a, b = operand(rng, shape_a, dtype), operand(rng, shape_b, dtype)
    a[:1] *= 1000
    plan = lowprec.plan(a, b, math_mode="bf16")
    c = lowprec.matmul(a, b, math_mode="bf16")
    found = Reference(a, b).compare(c, plan)
    x, y = (z.astype(np.complex128 if dtype is DType.COMPLEX64 else np.float64) for z in (a, b))
    exact = x @ y
    assert found.relative == pytest.approx(np.linalg.norm(c - exact) / np.linalg.norm(exact))
    rows, columns = np.atleast_2d(x), y[:, None] if y.ndim == 1 else y
    scale = np.linalg.norm(
        np.linalg.norm(rows, axis=(-2, -1)) * np.linalg.norm(columns, axis=(-2, -1))
    )
    assert found.normalised == pytest.approx(np.linalg.norm(c - exact) / scale)
    # FP32 would be within 32 * 2^-24.
    assert 2.0**-19 < found.normalised < found.bound
    assert found.bound == pytest.approx(plan.bound.relative)
    assert found.verdict is Verdict.WITHIN
    moved = Reference(a, b).compare(c + np.float32(scale / 4), plan)
    # Every element is off by a quarter of |A| |B|.
    assert moved.normalised == pytest.approx(math.sqrt(np.size(c)) / 4, rel=0.1)
    assert moved.verdict is Verdict.ABOVE


def test_zeros_have_no_error():
    a = np.zeros((3, 4), np.float32)
    found = Reference(a, a.T).compare(np.zeros((3, 3), np.float32), lowprec.plan(a, a.T))
    assert (found.relative, found.normalised, found.verdict) == (0, 0, Verdict.WITHIN)


def test_an_error_above_the_bound_is_found(command, monkeypatch):
    right = dispatch.matmul

    def wrong(a, b, **how):
        c = right(a, b, **how)
        if how["math_mode"] == "tf32":
            # One element of 256, off by the norm of A's row times that of B's column.
            c[3, 5] += np.linalg.norm(a[3]) * np.linalg.norm(b[:, 5])
        return c

    monkeypatch.setattr(comparison.dispatch, "matmul", wrong)
    words = ("check", "--sizes", "16", "--rounds", "1", "--distribution", "normal")
    done = command(*words, "--all")  # without it, the times decide which modes are shown
    assert done.code == 1
    table = done.out.partition("\n\n")[0].splitlines()[2:]
    verdicts = {line.split()[0]: line for line in table}
    assert verdicts["tf32"].endswith("ABOVE")
    assert verdicts["bf16"].endswith("within")
    rows = json.loads(command(*words, "--json").out)["cases"][0]["rows"]
    assert {r["mode"]: r["verdict"] for r in rows}["tf32"] == "above"


def test_numbers_beyond_the_range(rng):
    a = rng.standard_normal((4, 4), dtype=np.float32)
    wrong = a @ a
    wrong[0, 0] = np.inf
    assert Reference(a, a).compare(wrong, lowprec.plan(a, a)).verdict is Verdict.ABOVE, (
        "nothing explains it"
    )
    big = np.full((4, 4), 1e30, np.float32)
    result = lowprec.matmul(big, big)
    assert np.isinf(result).all()
    assert Reference(big, big).compare(result, lowprec.plan(big, big)).verdict is Verdict.OVERFLOW
    for value in (np.nan, np.inf):
        a[1, 2] = value
        assert (
            Reference(a, a).compare(lowprec.matmul(a, a), lowprec.plan(a, a)).verdict
            is Verdict.NO_NUMBERS
        )


def test_distributions_fit_their_descriptions():
    drawn = {
        n: operand(np.random.default_rng(1), (200, 200), DType.FLOAT32, n) for n in DISTRIBUTIONS
    }
    normal, positive, wide = drawn["normal"], drawn["positive"], drawn["wide"]
    # 40,000 samples: the mean and the variance are within 5 standard errors (0.005 and 0.007).
    assert abs(normal.mean()) < 0.025
    assert abs(normal.var() - 1) < 0.036
    assert (positive.min(), positive.max()) >= (0, 0.99)
    assert positive.max() < 1
    assert abs(positive.mean() - 0.5) < 0.0075
    exponents = np.frexp(wide[wide != 0])[1]
    assert exponents.min() < -20
    assert exponents.max() > 20
    assert len(np.unique(operand(np.random.default_rng(1), (200, 200), DType.INT8))) == 256


def test_operands_follow_the_seed(command):
    def errors(seed, distribution):
        words = ("check", "--sizes", 16, "--rounds", 1, "--seed", seed, "--json")
        cases = json.loads(command(*words, "--distribution", distribution).out)["cases"]
        return {c["name"]: [r["error"] for r in c["rows"]] for c in cases}

    assert errors(1, "positive") == errors(1, "positive")
    assert errors(1, "positive")["positive"] == errors(1, "all")["positive"]
    assert errors(1, "positive") != errors(2, "positive")
