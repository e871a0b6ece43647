"""What the CPU's kernels cost: measured, kept on disk, and weighed by plans."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import lowprec
from lowprec import disk, executors
from lowprec.backends.cpu import costs, cpuinfo, device, measuring
from lowprec.backends.cpu.costs import Cost
from lowprec.backends.cpu.kernel_rows import GEMV, KERNELS
from lowprec.errors import LowprecWarning
from lowprec.formats import DType
from lowprec.modes import MathMode
from lowprec.planning import Capabilities, GemmProblem, OperandSpec, plan_gemm
from lowprec.planning.costs import expected_cost
from lowprec.planning.reasons import Why
from lowprec.planning.selection import select_mode

UNITS = frozenset({"openblas", "numba", "avx512_bf16", "avx512_vnni"})
FIGURES = {"openblas": Cost(1.0, 80.0), "avx512_bf16": Cost(0.5, 40.0)}


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder for the cache of a machine that was not measured yet."""
    monkeypatch.setenv("LOWPREC_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(costs, "_measured", {})
    disk._warned.clear()
    device.forget()
    yield tmp_path
    device.forget()
    executors.forget()


def _another_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(costs, "_measured", {})
    device.forget()


def _machine(**figures: Cost) -> Capabilities:
    rows, measured = costs.applied(KERNELS, figures)
    return Capabilities("cpu", "a CPU", rows, UNITS, measured=measured)


def _problem(n: int, dtype: DType = DType.FLOAT32) -> GemmProblem:
    square = OperandSpec.contiguous(dtype, (n, n))
    return GemmProblem(square, square)


# -- kept on disk ---------------------------------------------------------------------------------


def test_without_a_file_the_costs_are_built_in(cache: Path) -> None:
    assert costs.stored() == {}
    able = device.capabilities(lowprec.arrays.CPU)
    assert able.measured == frozenset()
    assert able.kernels == KERNELS


def test_costs_last_for_later_processes(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    costs.remember(FIGURES)
    _another_process(monkeypatch)
    assert costs.stored() == FIGURES
    able = device.capabilities(lowprec.arrays.CPU)
    assert able.measured == set(FIGURES)
    row = next(row for row in able.kernels if row.name == "avx512_bf16")
    assert (row.cost_per_flop, row.cost_per_element) == (0.5, 40.0)


@pytest.mark.parametrize("what", ["cpu_identity", "num_threads", "__version__"])
def test_other_machines_threads_and_versions_are_others(
    cache: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    costs.remember(FIGURES)
    owner = costs.threads if what == "num_threads" else costs
    monkeypatch.setattr(owner, what, "99" if what == "__version__" else lambda: 99)
    _another_process(monkeypatch)
    assert costs.stored() == {}
    costs.remember({"openblas": Cost(1.0, 1.0)})
    monkeypatch.undo()
    monkeypatch.setenv("LOWPREC_CACHE_DIR", str(cache))
    _another_process(monkeypatch)
    assert costs.stored() == FIGURES


ZEN_4 = {"model name": "AMD EPYC", "cpu family": "25", "model": "17"}


@pytest.mark.parametrize(
    "other",
    [
        {**ZEN_4, "cpu family": "26"},
        {**ZEN_4, "model": "1"},
        {"CPU implementer": "0x41", "CPU part": "0xd40"},
        {},
    ],
)
def test_processors_of_one_name_are_told_apart(
    monkeypatch: pytest.MonkeyPatch, other: dict[str, str]
) -> None:
    monkeypatch.setattr(cpuinfo, "_cpuinfo", lambda: ZEN_4)
    key = costs.machine_key()
    assert key.startswith("AMD EPYC, cpu family 25, model 17; ")
    monkeypatch.setattr(cpuinfo, "_cpuinfo", lambda: other)
    assert costs.machine_key() != key


def test_what_this_process_measured_holds_for_so_many_threads(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    costs.remember(FIGURES)
    assert costs.stored() == FIGURES
    monkeypatch.setattr(costs.threads, "num_threads", lambda: 99)
    assert costs.stored() == {}


def test_lowprec_autotune_0_ignores_them(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    costs.remember(FIGURES)
    monkeypatch.setenv("LOWPREC_AUTOTUNE", "0")
    assert costs.stored() == {}


@pytest.mark.parametrize("text", ["{", "[]", "\x00"])
def test_a_damaged_file_is_set_aside(
    cache: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    (cache / costs.FILE).write_text(text)
    with pytest.warns(LowprecWarning, match=r"it is kept as cpu_costs.*json.damaged"):
        assert costs.stored() == {}
    assert (cache / f"{costs.FILE}.damaged").read_text() == text
    costs.remember(FIGURES)
    _another_process(monkeypatch)
    assert costs.stored() == FIGURES


@pytest.mark.parametrize(
    "entry",
    [
        7,
        {"openblas": 1.0},
        {"openblas": {"per_flop": 1.0}},
        {"openblas": {"per_flop": 0.0, "per_element": 1.0}},
        {"openblas": {"per_flop": -1.0, "per_element": 1.0}},
        {"openblas": {"per_flop": float("nan"), "per_element": 1.0}},
        {"openblas": {"per_flop": 1.0, "per_element": float("inf")}},
        {"openblas": {"per_flop": "1", "per_element": 1.0}},
        {"openblas": {"per_flop": True, "per_element": 1.0}},
    ],
)
def test_what_is_no_cost_counts_as_nothing(cache: Path, entry: Any) -> None:
    machines = {costs.machine_key(): entry}
    (cache / costs.FILE).write_text(json.dumps({"format": 1, "machines": machines}))
    assert costs.stored() == {}


@pytest.mark.parametrize("value", [{}, {"format": 2}, {"format": 1, "machines": 3}])
def test_a_file_of_another_form_counts_as_nothing(cache: Path, value: dict[str, Any]) -> None:
    figures = {name: cost._asdict() for name, cost in FIGURES.items()}
    value = {"machines": {costs.machine_key(): figures}, **value}
    (cache / costs.FILE).write_text(json.dumps(value))
    assert costs.stored() == {}
    costs.remember(FIGURES)
    assert costs.stored() == FIGURES


def test_where_nothing_can_be_written_they_last_for_the_process(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (cache / "file").write_text("in the way")
    monkeypatch.setenv("LOWPREC_CACHE_DIR", str(cache / "file"))
    with pytest.warns(LowprecWarning, match="lowprec cannot write to its cache"):
        costs.remember(FIGURES)
    assert costs.stored() == FIGURES


def test_products_do_not_warn_where_no_folder_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LOWPREC_CACHE_DIR", raising=False)
    monkeypatch.setitem(disk.importlib.sys.modules, "platformdirs", None)  # type: ignore[attr-defined]
    monkeypatch.setattr(costs, "_measured", {})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert costs.stored() == {}


# -- weighed by plans -----------------------------------------------------------------------------


def test_a_kernel_that_was_measured_to_be_slower_is_passed_over() -> None:
    slow = _machine(openblas=Cost(1.0, 50.0), avx512_bf16=Cost(1.5, 40.0))
    plan = plan_gemm(_problem(512), slow, MathMode.BF16)
    assert plan.kernel == "openblas"
    (reason,) = (reason for reason in plan.passed_over if reason.why is Why.MEASURED_SLOWER)
    # (1.5 + 40 / 512) / (1 + 50 / 512)
    assert str(reason) == "avx512_bf16 was measured to take 1.44 times as long here"
    fast = _machine(openblas=Cost(1.0, 50.0), avx512_bf16=Cost(0.5, 40.0))
    assert plan_gemm(_problem(512), fast, MathMode.BF16).kernel == "avx512_bf16"


@pytest.mark.parametrize(("m", "n"), [(9, 4096), (4096, 9)])
def test_an_element_of_either_operand_is_weighed_by_the_flops_that_it_takes_part_in(
    m: int, n: int
) -> None:
    machine = _machine(openblas=Cost(1.0, 0.0), avx512_bf16=Cost(0.5, 10.0))
    a, b = (OperandSpec.contiguous(DType.FLOAT32, shape) for shape in ((m, 512), (512, n)))
    plan = plan_gemm(GemmProblem(a, b), machine, MathMode.BF16)
    (reason,) = (reason for reason in plan.passed_over if reason.why is Why.MEASURED_SLOWER)
    # 0.5 + 10 / (2 * 9) + 10 / (2 * 4096)
    assert str(reason) == "avx512_bf16 was measured to take 1.06 times as long here"


def test_small_products_are_weighed_by_the_elements() -> None:
    machine = _machine(openblas=Cost(1.0, 0.0), avx512_bf16=Cost(0.5, 100.0))
    kernels = [plan_gemm(_problem(n), machine, MathMode.BF16).kernel for n in (128, 256)]
    # 0.5 + 100 / n is 1 at n = 200; below it, what has not been measured is next.
    assert kernels == ["direct", "avx512_bf16"]


def test_built_in_costs_pass_nothing_over() -> None:
    machine = Capabilities("cpu", "a CPU", _machine(avx512_bf16=Cost(9.0, 0.0)).kernels, UNITS)
    assert plan_gemm(_problem(512), machine, MathMode.BF16).kernel == "avx512_bf16"


def test_rtol_weighs_what_was_measured() -> None:
    # On these figures rounding to bfloat16 does not pay, so FP32 is as good and exacter.
    dear = _machine(openblas=Cost(1.0, 50.0), avx512_bf16=Cost(1.2, 40.0))
    cheap = _machine(openblas=Cost(1.0, 50.0), avx512_bf16=Cost(0.5, 40.0))
    modes = [select_mode(_problem(512), x, 0.1).mode for x in (dear, cheap)]
    assert modes == [MathMode.FP32, MathMode.BF16]


@pytest.mark.parametrize("per_flop", [0.011, 0.09, 0.4, 1.0, 3.0])
@pytest.mark.parametrize("per_element", [0.0, 40.0, 500.0])
@pytest.mark.parametrize("n", [4, 64, 1024])
def test_fp32_emulated_is_never_slower_than_fp32_by_the_costs(
    per_flop: float, per_element: float, n: int
) -> None:
    figures = Cost(per_flop, per_element)
    rows, measured = costs.applied(KERNELS, {"avx512_bf16": figures, "amx_bf16": figures})
    machine = Capabilities("cpu", "a CPU", rows, UNITS | {"amx_bf16"}, measured=measured)
    emulated, fp32 = (
        plan_gemm(_problem(n), machine, mode) for mode in (MathMode.FP32_EMULATED, MathMode.FP32)
    )
    assert expected_cost(emulated) <= expected_cost(fp32)


def test_a_plan_tells_where_the_costs_are_from(cache: Path) -> None:
    x = np.ones((300, 300), np.float32)
    text = " ".join(str(lowprec.plan(x, x, rtol=0.1)).split())
    assert "costs built in, from machines like this one; lowprec autotune measures this" in text
    costs.remember(FIGURES)
    device.forget()
    executors.forget()
    text = " ".join(str(lowprec.plan(x, x, rtol=0.1)).split())
    assert "costs measured on this machine" in text
    told = lowprec.info()["devices"][0]["costs"]
    assert told["measured"] == sorted(FIGURES)


# -- measured -------------------------------------------------------------------------------------


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Matrices so small that a measurement takes no time to speak of."""
    for name, value in {"_ROUNDS": 1, "_SMALL_REPEATS": 1, "SMALL": 160, "LARGE": 320}.items():
        monkeypatch.setattr(measuring, name, value)
    monkeypatch.setattr(measuring, "_SMALL_SIZES", (160,) * 3)
    monkeypatch.setattr(measuring, "_LARGE_SIZES", (320,) * 3)
    # Below, gemv in FP32 does not run.
    monkeypatch.setattr(measuring, "MATRIX_VECTOR", 640)


@pytest.mark.usefixtures("small")
def test_a_measurement_has_every_kernel_of_the_machine_and_is_kept(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[str] = []
    assert device.capabilities(lowprec.arrays.CPU).measured == frozenset()
    found = measuring.measure(told.append)
    assert len(told) == measuring.steps()
    able = device.capabilities(lowprec.arrays.CPU)
    special = {
        row.name
        for row in KERNELS
        if row.formats and row.requires in able.features and not row.maximum_elements
    }
    general = "openblas" if "openblas" in able.features else "numpy"
    assert set(found) == special | {general} == able.measured
    assert found[general].per_flop == 1.0
    _another_process(monkeypatch)
    assert costs.stored() == found


@pytest.mark.usefixtures("small")
def test_nothing_is_kept_of_a_measurement_that_ends_early(cache: Path) -> None:
    def stop(_: str) -> None:
        raise KeyboardInterrupt("enough")

    with pytest.raises(KeyboardInterrupt, match="enough"):
        measuring.measure(stop)
    assert costs.stored() == {}
    assert not (cache / costs.FILE).exists()


@pytest.mark.parametrize(
    ("name", "mode"), [("avx512_bf16", MathMode.BF16), ("avx512_bf16_parts", MathMode.BF16X6)]
)
def test_two_sizes_give_the_two_figures_that_plans_go_by(name: str, mode: MathMode) -> None:
    row = next(row for row in KERNELS if row.name == name)
    machine = _machine(**{name: Cost(0.4, 50.0)})
    best = {}
    for n, fp32 in ((measuring.SMALL, 2.0), (measuring.LARGE, 3.0)):
        plan = plan_gemm(_problem(n), machine, mode)
        assert plan.kernel == name
        best["openblas", True, (n,) * 3] = fp32
        best[name, False, (n,) * 3] = fp32 * expected_cost(plan)
    found = measuring._cost(row, best)
    np.testing.assert_allclose(found, (0.4, 50.0), rtol=1e-12)


@pytest.mark.parametrize(("seconds", "per_flop"), [(2.0, 1.0), (6.0, 1.5)])
def test_a_matrix_and_a_vector_cost_what_fp32_reads_at_least(
    seconds: float, per_flop: float
) -> None:
    (sizes,) = measuring._sizes(GEMV)
    best = {("openblas", True, sizes): 4.0, (GEMV.name, False, sizes): seconds}
    assert measuring._cost(GEMV, best) == (per_flop, 0.0)


@pytest.mark.usefixtures("small")
def test_the_command_measures_the_cpu_where_it_gets_no_shapes(
    cache: Path, capsys: pytest.CaptureFixture[str], main: Callable[..., int]
) -> None:
    assert main(["autotune", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert set(found["costs"]) == set(costs.stored())
    assert found["device"].startswith("cpu: ")
    assert main(["autotune"]) == 0
    assert "speed-up" in capsys.readouterr().out


@pytest.fixture
def main() -> Callable[..., int]:
    from lowprec import cli

    return cli.main
