"""``lowprec.check``: the table of modes as an object."""

import dataclasses
import os
from xml.etree import ElementTree

import numpy as np
import pytest

import lowprec
from lowprec.checking import Verdict
from lowprec.modes import available_modes
from lowprec.report import Report
from lowprec.util.tables import Table, plain_text


@pytest.fixture
def a(rng):
    return rng.standard_normal((24, 24), dtype=np.float32)


@pytest.fixture(autouse=True)
def _idle(monkeypatch):
    monkeypatch.setattr(os, "getloadavg", lambda: (0.0, 0.0, 0.0), raising=False)


def _cells(text):
    """Return the rows of a table, in which everything that was opened is closed."""
    elements = [*ElementTree.fromstring(f"<div>{text}</div>").iter()]
    assert {x.tag for x in elements} <= {
        "table",
        "caption",
        "thead",
        "tbody",
        "tr",
        "th",
        "td",
        "div",
    }
    # Colours are the notebook's, so that a dark one is readable.
    assert not any("color" in value for x in elements for value in x.attrib.values())
    return [[cell.text or "" for cell in x] for x in elements if x.tag == "tr"]


def test_every_mode_has_a_row(a):
    found = lowprec.check(a, a, rounds=1)
    assert [row.name for row in found.rows] == [
        str(m) for m in available_modes() if m != "fp64_emulated"
    ]
    for row in found.rows:
        plan = lowprec.plan(a, a, math_mode=row.name)
        assert row.plan == plan
        error = np.linalg.norm(
            lowprec.matmul(a, a, math_mode=row.name) - a.astype(np.float64) @ a.astype(np.float64)
        )
        scale = np.linalg.norm(a.astype(np.float64)) ** 2
        assert row.errors.normalised == pytest.approx(error / scale)
        assert plan.bound.relative <= row.errors.bound
        assert row.errors.verdict is Verdict.WITHIN
        assert len(row.timing.samples) == 1
    assert found.rows[0].speedup == 1
    assert found.within


def _rows(*of):
    """Return a comparison with these names, speed-ups and errors."""
    x = np.eye(4, dtype=np.float32)
    found = lowprec.check(x, x, modes=["bf16"], rounds=1)
    first, other = (dataclasses.replace(row, is_noisy=False) for row in found.rows)
    rows = [
        dataclasses.replace(
            other if number else first, name=name, speedup=speedup,
            errors=dataclasses.replace(other.errors, relative=error),
        )
        for number, (name, speedup, error) in enumerate(of)
    ]  # fmt: skip
    return dataclasses.replace(found, rows=tuple(rows))


@pytest.mark.parametrize(
    ("rows", "sentence"),
    [
        (
            [
                ("bf16", 1.94, 2.4e-3),
                ("int8", 3.42, 8e-3),
                ("fp64", 0.2, 1e-8),
                ("tf32", 1.04, 3e-4),
            ],
            (
                "bf16: 1.9 times the speed of fp32, error 2e-3; int8: 3.4 times, 8e-3; "
                "no other mode is faster on this device"
            ),
        ),
        # fp8 is faster than fp32, and less accurate and no faster than bf16.
        (
            [("fp8", 1.5, 4e-2), ("bf16", 1.5, 0.0)],
            "bf16: 1.5 times the speed of fp32, error 0; no other mode is faster at an equal or smaller error",
        ),
        ([("bf16", 1.04, 2e-3), ("fp64", 0.3, 1e-8)], "no mode is faster than fp32 on this device"),
    ],
)
def test_the_summary_names_the_modes_worth_using(rows, sentence):
    found = _rows(("fp32", 1.0, 4e-7), *rows)
    assert found.summary == found.to_dict()["summary"] == str(found).splitlines()[-1] == sentence
    assert sentence in found._repr_html_()


def test_the_summary_omits_what_is_wrong_or_fp32_itself():
    found = _rows(("fp32", 1.0, 4e-7), ("bf16", 2.0, 2e-3), ("fp32_pedantic", 1.5, 4e-7))
    first, bf16, pedantic = found.rows
    same = dataclasses.replace(pedantic, plan=first.plan)
    noisy = dataclasses.replace(bf16, is_noisy=True)
    assert dataclasses.replace(found, rows=(first, noisy, same)).summary.startswith(
        "bf16: about 2.0 times"
    )
    for verdict in (Verdict.ABOVE, Verdict.OVERFLOW):
        wrong = dataclasses.replace(bf16, errors=dataclasses.replace(bf16.errors, verdict=verdict))
        assert (
            dataclasses.replace(found, rows=(first, wrong, same)).summary
            == "no mode is faster than fp32 on this device"
        )


def test_a_long_table_shows_the_fastest_of_equal_errors():
    of = [
        ("fp32", 1.0, 4e-7),
        ("slow", 0.5, 4.2e-7),
        ("fast", 1.5, 3.9e-7),
        ("bf16", 1.2, 2.4e-3),
        ("other", 1.3, 2.1e-3),
    ]
    others = [(f"x{number}", 0.9 - number / 100, 2.0**-number) for number in range(7, 27)]
    found = _rows(*of[:4])
    assert found.selection == found.rows
    found = _rows(*of, *others)
    # The others are in the order of their speeds; x9 has the error of bf16, 2e-3, to one digit.
    assert [r.name for r in found.selection] == [
        "fp32",
        "fast",
        "other",
        "x7",
        "x8",
        *(f"x{n}" for n in range(10, 17)),
    ]
    assert [row[0].split(",")[0] for row in found.table.rows] == [r.label for r in found.selection]
    assert f"12 of {len(found.rows)} modes are shown; rows has all" in str(found)
    last = dataclasses.replace(
        found.rows[-1], errors=dataclasses.replace(found.rows[-1].errors, verdict=Verdict.ABOVE)
    )
    assert dataclasses.replace(found, rows=(*found.rows[:-1], last)).selection[-1] is last


def test_notebooks_show_the_same(a):
    found = lowprec.check(a, a, modes=["tf32"], rounds=1)
    heading, *rows = _cells(found._repr_html_())
    assert heading == found.table.headings
    assert rows == [list(row) for row in found.table.rows]
    plan = lowprec.plan(a, a, math_mode="tf32")
    cells = dict(_cells(plan._repr_html_()))
    assert cells["mode"] == "tf32, from math_mode= argument"
    # A row that is printed in lines is one in a notebook.
    assert "  ".join(cells["provided"].split()) in "  ".join(str(plan).split())


def test_markup_is_escaped():
    class Result(Report):
        remarks = ("<img>",)

        def tables(self):
            return [Table("<i>", ["<b>"], [["</td><script>&"]])]

    text = Result()._repr_html_()
    assert _cells(text) == [["<b>"], ["</td><script>&"]]


def test_overflow_and_its_remark(a):
    wide = a * np.float32(1e38)
    found = lowprec.check(wide, wide, modes=["fp16"], rounds=1)
    row = found.rows[1]
    assert row.errors.verdict is Verdict.OVERFLOW
    assert found.within
    assert row.to_dict()["error"] is None
    for text in row.plan.fallbacks:
        assert f"fp16: {text}" in str(found)


def test_arrays_of_other_libraries(torch, a):
    x = torch.from_numpy(a).to(torch.bfloat16)
    assert lowprec.check(x, x.T, rounds=1).b.shape == (24, 24)
    with pytest.raises(lowprec.ArrayError, match="requires grad"):
        lowprec.check(torch.ones(2, 2, requires_grad=True), x)


@pytest.mark.parametrize(
    ("how", "error", "words"),
    [
        ({"rounds": 0}, lowprec.SettingError, "rounds must be an integer of at least 1, got 0"),
        ({"rounds": 1.5}, lowprec.SettingError, "rounds must be an integer of at least 1, got 1.5"),
        ({"budget": "2"}, lowprec.SettingError, "budget must be a number of seconds, got '2'"),
        ({"modes": 3}, lowprec.ModeError, "modes must be a sequence of math modes, got 3"),
        ({"budget": -1}, lowprec.SettingError, "budget must be a number of seconds"),
        ({"budget": float("nan")}, lowprec.SettingError, "budget"),
        ({"modes": "ft32"}, lowprec.ModeError, "'ft32' is not a math mode"),
    ],
)
def test_bad_arguments(a, how, error, words):
    with pytest.raises(error, match=words):
        lowprec.check(a, a, **how)


def test_incomparable_results(a):
    with pytest.raises(lowprec.DTypeError, match="products of float64 have no wider reference"):
        lowprec.check(a.astype(np.float64), a)
    with pytest.raises(lowprec.DTypeError, match="rounded to complex64"):
        lowprec.check(a, a.astype(np.complex128))
    with pytest.raises(lowprec.ArrayError, match="expected an array"):
        lowprec.check([[1.0]], a)
    with pytest.raises(lowprec.ShapeError, match=r"\(24, 24\)"):
        lowprec.check(a, a[:3])


def test_cells_are_broken_between_words():
    table = Table("T", ("", ""), [("name", "one two three"), ("b", "")])
    assert plain_text(table, 16) == "T\n  name  one two\n        three\n  b"


def test_reprs_are_the_product_and_the_result():
    a = np.ones((4, 8), np.float32)
    plan, found = lowprec.plan(a, a.T, rtol=1e-3), lowprec.check(a, a.T, modes=["bf16"], rounds=1)
    assert repr(plan).startswith("<PlanReport float32 (4, 8) @ float32 (8, 4)")
    assert f"mode {plan.mode}, kernel {plan.kernel} on cpu" in repr(plan)
    assert repr(found).startswith("<Comparison check: ")
    assert "2 of 2 rows within their bounds" in repr(found)


def test_a_plan_shows_which_bound_rtol_limits():
    x = lowprec.ShapeDtype((512, 512), "float32")

    def row(**keywords):
        text = " ".join(str(lowprec.plan(x, x, **keywords)).split())
        return text.partition(" rtol ")[2].partition(" a becomes")[0]

    # FP32's guaranteed bound, (1 + u)^512 - 1 = 3.1e-5, is above 1e-5; its probable one is below.
    guaranteed, probable = (
        lowprec.plan(x, x, rtol=1e-5, bound=bound).mode for bound in ("guaranteed", "probable")
    )
    assert guaranteed != probable
    said = row(rtol=1e-5)
    assert said.startswith(
        f"limits the guaranteed bound to 1e-05; bound='probable' would choose {probable}"
    )
    said = row(rtol=1e-5, bound="probable")
    assert said.startswith(
        f"limits the probable bound to 1e-05; bound='guaranteed' would choose {guaranteed}"
    )
    assert row(math_mode="bf16") == ""
    assert (
        lowprec.plan(x, x, rtol=1e-5)
        .to_dict()["tolerance"]
        .startswith("limits the guaranteed bound")
    )


def test_a_narrow_table_omits_columns_then_is_shown_by_row():
    table = Table("T", ["name", ">size"], [["one", "23"]], optional=["size"])
    assert plain_text(table, 12) == "T\n  name  size\n  one     23"
    assert plain_text(table, 11) == "T\n  name\n  one"
    assert plain_text(dataclasses.replace(table, optional=[]), 11) == "T\none\n  size  23"
