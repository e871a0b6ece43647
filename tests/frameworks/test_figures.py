"""Results as text, HTML, JSON and figures; points, bars and labels of the figures are the values of the results."""

import json

import numpy as np
import pytest

import lowprec
from lowprec import amp
from lowprec.core.arguments import ShapeDtype
from lowprec.errors import UnsupportedError

SQUARE = ShapeDtype((1024, 1024), "float32")


def labels(panel):
    return [text.get_text() for text in panel.get_yticklabels()]


def points(panel):
    """Return the named points of a panel, and not the unnamed lines."""
    named = (line for line in panel.lines if not line.get_label().startswith("_"))
    return {line.get_label(): np.asarray(line.get_xydata()).tolist() for line in named}


def test_candidates_are_bounds_by_the_speed_that_the_roofline_limits(drawn, tmp_path):
    plan = lowprec.plan(SQUARE, SQUARE, rtol=1e-2, device="h200")
    plan.plot(str(tmp_path / "plan.svg"))
    (panel,) = drawn[0].axes
    # m = n = k = 1024: 2 n^3 flop.
    speeds = {
        str(c.mode): [[2 * 1024**3 / c.seconds / 1e12, c.bound]]
        for c in plan.candidates
        if c.seconds
    }
    assert len(speeds) > 5
    found = points(panel)
    assert found.keys() == speeds.keys()
    for name, place in speeds.items():
        assert found[name] == [pytest.approx(place[0])]


def test_a_roofline_has_the_peak_rates(drawn, tmp_path):
    lowprec.plan(SQUARE, SQUARE, device="h200").plot(str(tmp_path / "plan.svg"))
    (panel,) = drawn[0].axes
    roofs = {text.get_text(): text.xy[1] for text in panel.texts}
    assert roofs == {
        "float64, float32": 67,
        "tf32": 494.5,
        "bfloat16, float16": 989.5,
        "float8_e4m3fn, int8": 1979,
    }
    lines = [
        np.asarray(line.get_xydata()) for line in panel.lines if line.get_label().startswith("_")
    ]
    assert [line[1].tolist() for line in lines] == [
        pytest.approx([r / 4.8, r]) for r in sorted(roofs.values())
    ]


def test_one_mode_on_a_gpu_is_one_point(drawn, tmp_path):
    plan = lowprec.plan(SQUARE, SQUARE, math_mode="tf32", device="a100")
    plan.plot(str(tmp_path / "plan.svg"))
    assert list(points(drawn[0].axes[0])) == [f"tf32, bound {plan.bound.relative:.0e}"]


def test_a_cpu_shows_bounds_by_speed(drawn, tmp_path):
    plan = lowprec.plan(SQUARE, SQUARE, rtol=1e-2)
    plan.plot(str(tmp_path / "plan.svg"))
    assert points(drawn[0].axes[0]) == {
        str(c.mode): [[1 / c.cost, c.bound]] for c in plan.candidates
    }
    with pytest.raises(UnsupportedError, match=r"the peak rates of .* are unknown: plan for a GPU"):
        lowprec.plan(SQUARE, SQUARE).plot(str(tmp_path / "plan.svg"))


def test_an_interception_has_a_bar_for_each_layer(torch, drawn, tmp_path):
    model = torch.nn.Sequential(
        torch.nn.Linear(4, 16).double(), torch.nn.Linear(16, 24), torch.nn.Linear(24, 8)
    )
    with torch.no_grad(), lowprec.torch.intercept("bf16", statistics=True) as seen:
        model[1:](model[0](torch.randn(16, 4).double()).float())
    report = seen.report()
    report.plot(tmp_path / "report.svg")
    shares, errors = drawn[0].axes
    assert labels(shares) == ["1", "2", "0"]
    numbers = np.array([16 * 16 * 24, 16 * 24 * 8, 16 * 4 * 16])
    taken, passed = ([bar.get_width() for bar in bars] for bars in shares.containers)
    assert taken == pytest.approx([*100 * numbers[:2] / numbers.sum(), 0])
    assert passed == pytest.approx([0, 0, 100 * numbers[2] / numbers.sum()])
    assert [bar.get_x() for bar in shares.containers[1]] == taken, (
        "the second part begins at the end of the first"
    )
    assert points(errors)["error"] == [[p.error, i] for i, p in enumerate(report.products)]
    low, high = errors.get_xlim()
    assert low < report.products[0].error < high


def test_many_layers_are_cut_and_say_so(torch, drawn, tmp_path):
    model = torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(30)))
    with torch.no_grad(), lowprec.torch.intercept("bf16") as seen:
        model(torch.ones(2, 4))
    seen.report().plot(tmp_path / "report.svg")
    assert len(labels(drawn[0].axes[0])) == 24
    assert drawn[0].get_suptitle() == "lowprec.torch.intercept('bf16') (first 24 of 30)"


def test_products_of_jax_are_shares_of_their_number(drawn, tmp_path):
    jnp = pytest.importorskip("jax.numpy", reason="jax is not installed")
    with lowprec.jax.intercept("tf32") as seen:
        jnp.ones((5, 3), "float32") @ jnp.ones((3, 7), "float32")
    report = seen.report()
    report.plot(tmp_path / "report.svg")
    (panel,) = drawn[0].axes
    assert panel.get_xlabel() == "% of the products"
    taken, _ = ([bar.get_width() for bar in bars] for bars in panel.containers)
    # Scopes of one mode share their counts in a process.
    counts = [sum(p.count for p in products) for products in (report.taken, report.products)]
    assert taken[labels(panel).index("matmul")] == pytest.approx(100 * counts[0] / counts[1])
    assert counts[0] > 0


def test_searched_modes_show_each_layer_alone(torch, drawn, tmp_path):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Linear(16, 4))
    x = torch.randn(8, 16)
    found = lowprec.torch.search_modes(lambda: model(x).detach(), rtol=1e-2)
    found.plot(tmp_path / "modes.svg")
    (panel,) = drawn[0].axes
    assert labels(panel) == [f"{name}: {found[name]}" for name in found.sensitivity]
    together = points(panel).pop("all layers in their modes")
    assert {x for x, _ in together} == {found.change}
    for mode in ("bf16", "tf32"):
        alone = [changes[mode] for changes in found.sensitivity.values()]
        assert points(panel)[f"{mode} alone"] == [[x, i] for i, x in enumerate(alone)]


@pytest.mark.parametrize("library", ["numpy", "torch", "jax"])
def test_an_interception_prints_its_report(library):
    pytest.importorskip(library, reason=f"{library} is not installed")
    intercept = __import__(f"lowprec.{library}").__dict__[library].intercept
    with intercept("bf16") as seen:
        pass
    assert str(seen) == str(seen.report()) != repr(seen) == f"lowprec.{library}.intercept('bf16')"


def _intercepted():
    torch = pytest.importorskip("torch", reason="torch is not installed")
    with lowprec.torch.intercept("bf16") as seen:
        torch.ones(4, 8) @ torch.ones(8, 2)
    return seen.report()


def _searched():
    torch = pytest.importorskip("torch", reason="torch is not installed")
    linear = torch.nn.Linear(16, 4)
    return lowprec.torch.search_modes(lambda: linear(torch.ones(2, 16)).detach(), rtol=1e-1)


def _profiled():
    with lowprec.profile("step") as found:
        lowprec.matmul(ONES, ONES)
    return found


def _cast():
    xp = amp.autocast(np, "O1")
    xp.matmul(ONES, ONES)
    return xp.report()


ONES = np.ones((8, 8), np.float32)

RESULTS = {
    "plan": lambda: lowprec.plan(SQUARE, SQUARE, rtol=1e-2),
    "info": lowprec.info,
    "check": lambda: lowprec.check(ONES, ONES, modes=["bf16"], rounds=1),
    "audit": lambda: lowprec.audit(["numpy"], sizes=[16]),
    "autotune": lambda: lowprec.autotune(ONES, ONES),
    "profile": _profiled,
    "solve": lambda: lowprec.linalg.solve(np.eye(4), np.ones(4), full_output=True)[1],
    "gradients": lambda: amp.gradient_report([ONES]),
    "autocast": _cast,
    "intercept": _intercepted,
    "search_modes": _searched,
}


@pytest.mark.parametrize("name", RESULTS)
def test_every_result_is_text_html_json_and_a_figure(name, drawn, tmp_path):
    result = RESULTS[name]()
    tables = list(result.tables())
    assert str(result) == result.text()
    assert str(result).startswith(tables[0].title[:40])
    assert result._repr_html_().count("<table>") == len(tables)
    result.to_json(tmp_path / "result.json")
    read = json.loads((tmp_path / "result.json").read_text())
    assert read.keys() == result.to_dict().keys()
    assert len(read) > 1
    if name == "info":
        with pytest.raises(UnsupportedError, match="Info has no figure"):
            result.plot(tmp_path / "result.svg")
    else:
        result.plot(tmp_path / "result.svg")
        assert drawn[0].axes


def test_a_notebook_shows_the_report_of_a_block():
    with lowprec.intercept("bf16", ["numpy"]) as seen:
        assert SQUARE
    assert seen._repr_html_() == seen.report()._repr_html_()
