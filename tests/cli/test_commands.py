"""What the commands print and write when all is well."""

import csv
import json
import os
import sys

import numpy as np
import pytest

import lowprec
from lowprec import recipes
from lowprec.modes import available_modes


def _json(outcome):
    assert (outcome.code, outcome.err) == (0, "")

    def refuse(word):
        raise AssertionError(f"{word} is no JSON")

    return json.loads(outcome.out, parse_constant=refuse)


# -- plan -----------------------------------------------------------------------------------------


def test_plan_of_files_is_that_of_the_arrays(command, files):
    a, b = map(np.load, files)
    printed = command("plan", *files, "--mode", "bf16")
    assert printed.out == f"{lowprec.plan(a, b, math_mode='bf16')}\n"
    found = _json(command("plan", *files, "--mode", "bf16", "--json"))
    assert found == lowprec.plan(a, b, math_mode="bf16").to_dict()


def test_plan_sees_the_order_of_a_file(command, tmp_path, files):
    transposed = tmp_path / "T.npy"
    np.save(transposed, np.asfortranarray(np.load(files[0])))
    found = _json(command("plan", transposed, files[1], "--json"))
    assert (found["layout"]["a"]["order"], found["layout"]["b"]["order"]) == ("col", "row")


def test_plan_of_shapes(command):
    words = ("plan", "--shapes", "2x1024x512", "512X2048", "--dtype", "bfloat16", "--json")
    found = _json(command(*words))
    assert found["out_shape"] == [2, 1024, 2048]
    assert found["out_dtype"] == "bfloat16"
    assert found["mode_has_effect"] is False


def test_plan_for_a_gpu_that_is_not_here(command, files):
    for words in ([*files], ["--shapes", "24x8", "8x16"]):
        found = _json(command("plan", *words, "--mode", "bf16", "--device", "H200", "--json"))
        assert found["capabilities"]["name"] == "NVIDIA H200 SXM"
        assert found["kernel"] == "cublaslt"
        assert found["roofline"]["seconds"] > 0
    a, b = (np.load(name) for name in files)
    printed = command("plan", *files, "--device", "sm_80")
    assert printed.out == f"{lowprec.plan(a, b, device='sm_80')}\n"


def test_plan_within_rtol_lists_the_candidates(command):
    words = ("plan", "--shapes", "512x512", "512x512", "--rtol", "1e-2")
    found = _json(command(*words, "--json"))
    assert {c["mode"] for c in found["candidates"]} >= {"fp32", "tf32", "bf16"}
    taken = [c for c in found["candidates"] if c["accepted"]]
    assert [c["mode"] for c in taken] == [found["mode"]]
    assert taken[0]["bound"] <= 1e-2
    assert found["mode"] in command(*words).out


# -- info -----------------------------------------------------------------------------------------


def test_info_as_text_has_everything(command, monkeypatch):
    monkeypatch.setenv("LOWPREC_MATH_MODE", "tf32")
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "0")
    out = command("info", "--all").out
    found = _json(command("info", "--json"))
    assert set(found) == set(lowprec.info())
    assert "fp32 (LOWPREC_MATH_MODE; tf32 was requested)" in out
    assert "NVIDIA_TF32_OVERRIDE=0 turns tf32 into fp32." in out
    for entry in found["libraries"] + found["environment"]:
        assert entry["name"] in out
    for words in (
        found["devices"][0]["name"],
        found["cache"] or "none",
        found["gpu"]["reason"],
        *found["warnings"],
    ):
        assert words in " ".join(out.split())


def test_info_lists_the_variables_that_are_set(command, monkeypatch):
    for entry in lowprec.info()["environment"]:
        monkeypatch.delenv(entry["name"], raising=False)
    monkeypatch.setenv("LOWPREC_CACHE_DIR", "cache")
    out = command("info").out
    count = len(lowprec.info()["environment"]) - 1
    assert f"environment ({count} variables are not set: --all lists them)" in out
    shown = out.partition("\nenvironment")[2].partition("\n\n")[0].splitlines()[2:]
    assert [line.split() for line in shown] == [["LOWPREC_CACHE_DIR", "cache", "cache"]]
    assert "  cache  cache\n" in out


# -- check ----------------------------------------------------------------------------------------

CHECK = ("check", "--sizes", "24x40x16", "--rounds", "1")


def test_check_as_json(command):
    done = command(*CHECK, "--all", "--json")
    assert done.code == 0
    found = json.loads(done.out)
    assert found["lowprec"] == lowprec.__version__
    assert [case["name"] for case in found["cases"]] == ["normal", "positive", "wide"]
    for case in found["cases"]:
        assert (case["a"]["shape"], case["b"]["shape"]) == ([24, 40], [40, 16])
        assert [row["mode"] for row in case["rows"]] == [
            str(m) for m in available_modes() if m != "fp64_emulated"
        ]
        for row in case["rows"]:
            assert row["samples"] == 1
        assert case["rows"][0]["speedup"] == 1
        assert (
            " on this device" in case["summary"] or "no other mode is faster at" in case["summary"]
        )


def test_check_as_text(command, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")  # room for every column, whatever the times are
    done = command(*CHECK, "--distribution", "normal", "--modes", "bf16")
    assert (done.code, done.err) == (0, "")
    title, heading, fp32, bf16, *_ = done.out.splitlines()
    assert title.startswith("normal: float32 24x40 @ float32 40x16")
    assert heading.split() == [
        "mode", "kernel", "time", "spread", "speed-up", "error", "scaled", "bound", "verdict",
    ]  # fmt: skip
    assert fp32.split()[0] == "fp32"
    assert bf16.split()[0] == "bf16"
    assert bf16.endswith("within")


def _names(text):
    return [line.split()[0] for line in text.splitlines() if line.endswith("within")]


def test_check_shows_the_useful_rows_and_a_sentence(command, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    short, whole = (command(*CHECK, *words).out for words in ((), ("--all",)))
    names, modes = _names(short), [str(m) for m in available_modes() if m != "fp64_emulated"]
    assert names[0] == "fp32"
    assert set(names) < set(modes)
    assert len(names) <= 12
    assert f"{len(names)} of {len(modes)} modes are shown" in short
    assert _names(whole) == modes * 3
    assert "modes are shown" not in whole
    named = modes[:14]
    assert _names(command(*CHECK, "--modes", ",".join(named)).out) == named


def test_check_reports_of_an_override(command, monkeypatch):
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "0")
    done = command(*CHECK, "--distribution", "normal", "--modes", "tf32")
    assert "tf32, ran fp32" in done.out
    assert done.err == "NVIDIA_TF32_OVERRIDE=0 turns tf32 into fp32.\n"


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "int8"])
def test_check_of_other_storage(command, dtype):
    done = command(*CHECK, "--distribution", "normal", "--dtype", dtype, "--json")
    assert done.code == 0
    assert "has no effect" in done.err
    (case,) = json.loads(done.out)["cases"]
    quantizing = () if dtype == "int8" else recipes.MODES
    assert [row["mode"] for row in case["rows"]] == ["float32 copies", dtype, *quantizing]
    assert all(row["verdict"] == "within" for row in case["rows"])
    if dtype == "int8":
        assert [row["error"] for row in case["rows"]] == [0, 0]


def test_check_of_files(command, tmp_path, files):
    wide = tmp_path / "wide.npy"
    np.save(wide, np.load(files[0]).astype(np.float64))
    found = _json(command("check", wide, files[1], "--dtype", "float32", "--rounds", "1", "--json"))
    (case,) = found["cases"]
    assert (case["name"], case["a"]["dtype"], found["seed"]) == ("files", "float32", None)
    assert str(wide) in case["description"]


def test_check_of_several_sizes(command):
    words = ("check", "--sizes", "16,8x4x2", "--rounds", "1", "--modes", "bf16", "--all", "--json")
    cases = _json(command(*words))["cases"]
    kinds = ("normal", "positive", "wide")
    assert [case["name"] for case in cases] == [f"{k} {s}" for s in ("16", "8x4x2") for k in kinds]
    assert [case["a"]["shape"] for case in cases] == [[16, 16]] * 3 + [[8, 4]] * 3


def test_a_busy_machine_is_reported(command, monkeypatch):
    monkeypatch.setattr(os, "getloadavg", lambda: (99.0, 1.0, 1.0), raising=False)
    done = command(*CHECK)
    assert done.err.startswith("the machine is busy (load average 99.0 on ")
    ratios = [line.split()[-5] for line in done.out.splitlines() if line.endswith("within")]
    assert ratios
    assert all(ratio.startswith("~") for ratio in ratios)
    assert json.loads(command(*CHECK, "--json").out)["load_average"] == 99


# -- check --csv, check --plot -----------------------------------------------------------------------

EXPORTED = ("check", "--sizes", "16", "--rounds", "3", "--modes", "tf32,fp16")
SIZES = ("check", "--sizes", "8,16", "--rounds", "1", "--dtype", "int8")


@pytest.mark.parametrize("words", [EXPORTED, SIZES])
def test_csv_has_the_rows_of_json(command, tmp_path, words):
    done = command(*words, "--csv", tmp_path / "out.csv", "--json")
    found = json.loads(done.out)
    rows = [{"case": case["name"], **row} for case in found["cases"] for row in case["rows"]]
    with (tmp_path / "out.csv").open(newline="") as file:
        read = list(csv.DictReader(file))
    assert len(read) == len(rows)
    for line, row in zip(read, rows, strict=True):
        assert {key: line[key] for key in row} == {
            key: "" if value is None else str(value) for key, value in row.items()
        }


@pytest.mark.parametrize("words", [EXPORTED, SIZES])
@pytest.mark.parametrize(("suffix", "begins"), [("svg", b"<?xml"), ("PNG", b"\x89PNG")])
def test_plot(command, tmp_path, words, suffix, begins):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    path = tmp_path / f"out.{suffix}"
    assert command(*words, "--plot", path).code == 0
    assert path.read_bytes().startswith(begins)
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


def test_the_plot_of_check_has_every_error_and_bound(command, drawn, tmp_path):
    cases = json.loads(command(*EXPORTED, "--plot", tmp_path / "out.svg", "--json").out)["cases"]
    (figure,) = drawn
    assert [panel.get_title() for panel in figure.axes] == [case["name"] for case in cases]
    for panel, case in zip(figure.axes, cases, strict=True):
        bounds, *named = panel.lines
        expected = [[row["speedup"], row["bound"]] for row in case["rows"]]
        assert bounds.get_xydata().tolist() == expected
        points = {line.get_label(): line.get_xydata().tolist() for line in named}
        assert points == {
            row["mode"]: [[row["speedup"], row["scaled_error"]]] for row in case["rows"]
        }
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == [
        "guaranteed bound",
        "fp32",
        "tf32",
        "fp16",
    ]


def test_refused_before_anything_is_measured(refused):
    pytest.importorskip("matplotlib", reason="matplotlib is not installed")
    assert "chosen by the suffix of the path, got 'out.txt'" in refused(
        "check", "--plot", "out.txt"
    )


def test_no_two_modes_look_alike(command, drawn, tmp_path):
    words = ("--sizes", "16,8", "--rounds", "1", "--distribution", "normal")
    assert command("check", *words, "--plot", tmp_path / "out.svg").code == 0
    above, below = drawn[0].axes
    looks = {(line.get_color(), line.get_marker()) for line in above.lines}
    assert len(looks) == len(above.lines) == len(below.lines) == len(available_modes()) - 1, (
        "all but fp64_emulated"
    )


def test_matplotlib_is_needed_for_a_plot_alone(command, refused, monkeypatch, tmp_path):
    for name in ("matplotlib", "matplotlib.backend_bases"):
        monkeypatch.setitem(sys.modules, name, None)
    assert command(*EXPORTED, "--csv", tmp_path / "out.csv").code == 0
    assert "pip install matplotlib, or lowprec with its extra plot" in refused(
        "check", "--plot", tmp_path / "out.svg"
    )
