"""``gradient_report`` and ``suggest_scale`` against the rounding of single numbers."""

import json
import math

import ml_dtypes
import numpy as np
import pytest

from lowprec import ArrayError, DTypeError
from lowprec.amp import gradient_report, suggest_scale
from lowprec.amp.gradients import FORMATS
from lowprec.formats import TF32
from support.rounding_oracle import round_scalar


def edges():
    """Every limit of the formats, and its neighbours among the float32."""
    found = []
    for f in FORMATS:
        ulp = 2.0 ** (f.emax - f.precision + 1)
        limits = [f.smallest_subnormal / 2, f.smallest_subnormal, f.smallest_normal, f.largest]
        limits += [f.smallest_normal * (1 - f.unit_roundoff), f.largest + ulp / 2]
        for x in np.float32([limit for limit in limits if limit < 3.4028235e38]):
            near = [x, np.nextafter(x, np.float32(0)), np.nextafter(x, np.float32(np.inf))]
            found += [float(n) for n in near if 0 < n < np.inf]
    return [s * x for x in found for s in (1, -1)]


def fates(values, to):
    rounded = [abs(round_scalar(x, to, ties_away=to is TF32)) for x in values]
    kinds = (
        sum(x == 0 for x in rounded),
        sum(0 < x < to.smallest_normal for x in rounded),
        sum(math.isinf(x) for x in rounded),
    )
    return tuple(n / len(values) for n in kinds)


def test_shares_are_those_of_rounding_each_number():
    rng = np.random.default_rng(2)
    spread = np.float32(rng.standard_normal(2000) * 2.0 ** rng.integers(-148, 126, 2000))
    values = [*edges(), *(float(x) for x in spread if x)]
    report = gradient_report([np.array(values, np.float32), np.zeros(3, np.float32)])
    assert (report.elements, report.zeros, report.nonfinite) == (len(values) + 3, 3, 0)
    assert len(report.shares) == 2 * len(FORMATS)
    for shares in report.shares:
        to = next(f for f in FORMATS if f.name == shares.format)
        expected = fates([x * shares.scale for x in values], to)
        assert (shares.lost, shares.subnormal, shares.overflow) == expected, shares


@pytest.mark.parametrize(
    ("largest", "expected"),
    [
        (1.0, 2.0**15),
        (65504.0, 0.5),  # it stays below
        (65503.0, 1.0),
        (65536.0, 0.5),
        (2.0**-149, 2.0**127),
        (3.4e38, 2.0**-112),
    ],
)
def test_the_scale_keeps_the_largest_below_65504(largest, expected):
    grads = {"w": np.float32([-largest, 1e-45, np.inf]), "b": None}
    assert suggest_scale(grads) == expected
    assert float(np.float32(largest)) * expected < 65504
    if expected < 2.0**127:
        assert float(np.float32(largest)) * expected * 2 >= 65504


def test_every_library_and_type(xp):
    for dtype in ("float16", "bfloat16", "float32", "float64"):
        values = np.array([0.25, -3.0], getattr(ml_dtypes, dtype, dtype))
        report = gradient_report({"w": xp.asarray(values)})
        assert (report.exponents, report.suggested_scale) == ({-2: 1, 1: 1}, 2.0**14)


def test_non_gradients_are_refused():
    with pytest.raises(DTypeError, match="float16, got int64"):
        suggest_scale(np.ones(2, np.int64))
    with pytest.raises(ArrayError, match="expected arrays in lists"):
        gradient_report(["x"])


def test_table_json_and_plot(tmp_path):
    report = gradient_report(np.float32([1e-9, 1e-3]))
    assert "float16             1  50.0000%" in str(report)
    assert report._repr_html_().count("<tr>") == 7
    report.to_json(tmp_path / "report.json")
    assert json.loads((tmp_path / "report.json").read_text()) == report.to_dict()
    assert report.to_dict()["exponents"] == {"-30": 1, "-10": 1}
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    report.plot(tmp_path / "report.svg")
    assert (tmp_path / "report.svg").read_text().count("<path") > 10


@pytest.mark.parametrize(
    ("values", "title"),
    [
        ([0.0, -0.0], "2 gradients: 2 zero, 0 Inf or NaN; suggested scale 1"),
        ([np.nan, 0.0], "2 gradients: 1 zero, 1 Inf or NaN; suggested scale 1"),
        ([], "0 gradients: 0 zero, 0 Inf or NaN; suggested scale 1"),
    ],
)
def test_a_report_without_magnitudes_names_no_range(values, title):
    report = gradient_report(np.array(values, np.float32))
    assert str(report).splitlines()[0] == title
    assert "nan" not in str(report) + report._repr_html_()
    assert report.to_dict()["largest"] is None
    assert [shares.lost for shares in report.shares] == [0.0] * 3
