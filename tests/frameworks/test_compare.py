"""A run in a mode against one in full precision: the layers' own errors and drifts, and the layer behind the change."""

import math
import re

import numpy as np
import pytest

import lowprec
from lowprec.errors import ModeError, SettingError

pytestmark = pytest.mark.usefixtures("torch")

#: Of sketches of 1,021 numbers: three standard deviations.
SKETCH = 0.07


@pytest.fixture(params=["GPT2", "ViT", "LSTM"])
def trained(torch, request):
    pytest.importorskip("sklearn", reason="scikit-learn has the digits")
    from support import small_models

    return small_models.trained(getattr(small_models, request.param))


def step(model, x, y):
    """Return a function of one forward and backward pass."""

    def run():
        model.zero_grad()
        out = model(x)
        model.loss(x, y).backward()
        return out

    return run


def test_the_spoiled_layer_is_named_first(torch, trained):
    model, x, y = trained
    before = lowprec.compare(step(model, x, y), model.modes)
    expected = model(x).detach()
    model.spoil(5)
    # the same function
    torch.testing.assert_close(model(x).detach(), expected, rtol=1e-3, atol=1e-4)
    found = lowprec.compare(step(model, x, y), model.modes, blame=True)
    assert found.layers[0].layer == model.spoiled
    assert found.verdict.startswith("nvfp4 computed ")
    assert f"of that comes from {model.spoiled}" in found.verdict
    assert found.change > before.change
    assert not found.parting
    assert not found.fault
    blame = {each.layer: each.blame for each in found.layers}
    assert 0.8 < sum(filter(None, blame.values())) < 1.25
    assert sum(each.share for each in found.layers) == pytest.approx(1)
    assert sum(found.shares.values()) == pytest.approx(1)
    without = lowprec.compare(step(model, x, y), model.modes)
    assert without.layers[0][:2] == (model.spoiled, "forward")
    assert f"of layer {model.spoiled} (forward)" in without.verdict


@pytest.mark.parametrize(
    ("mode", "against"), [("nvfp4", "fp32"), ("bf16", "fp64"), ("fp32", "fp64")]
)
def test_errors_equal_a_computation_by_hand(torch, mode, against):
    """Inputs and results are taken by hooks; the reference product is NumPy's in float64."""
    torch.manual_seed(1)
    net = torch.nn.Sequential(torch.nn.Linear(96, 160), torch.nn.GELU(), torch.nn.Linear(160, 80))
    x = torch.randn(128, 96)
    seen = []
    for layer in (net[0], net[2]):
        layer.register_forward_hook(
            lambda module, given, out: seen.append((module, given[0].detach(), out.detach()))
        )
    with torch.no_grad():
        found = lowprec.compare(lambda: net(x), mode, against)
    in_mode, in_reference = seen[:2], seen[2:4]
    for row in found.layers:
        number = {"0": 0, "2": 1}[row.layer]
        module, given, out = in_mode[number]
        exact = given.double() @ module.weight.detach().double().T + module.bias.detach().double()
        assert row.own_error == pytest.approx(relative(out, exact.float()), rel=SKETCH)
        drift = relative(out, in_reference[number][2])
        assert row.drift == pytest.approx(drift, rel=SKETCH)
        assert row.share == pytest.approx({"0": 96 / 176, "2": 80 / 176}[row.layer])
    assert found.change == pytest.approx(relative(in_mode[1][2], in_reference[1][2]))


def relative(x, y):
    return float((x.double() - y.double()).norm() / y.double().norm())


def test_gradients_have_errors_of_their_own(torch):
    layer = torch.nn.Linear(64, 64)
    x = torch.randn(64, 64, requires_grad=True)

    def run():
        return torch.autograd.grad(layer(x).square().sum(), [x, layer.weight])

    found = lowprec.compare(run, "bf16")
    rows = {each.phase: each for each in found.layers}
    assert set(rows) == {"forward", "grad_input", "grad_weight"}
    # Two operands in bfloat16: between the roundoff 2**-9 over the square root of 3, and its double.
    assert all(2.0**-10 < each.own_error < 2.0**-8 for each in rows.values())
    assert rows["grad_input"].drift > rows["grad_input"].own_error


def test_products_of_the_library_drift_too(torch):
    conv = torch.nn.Conv2d(16, 4, 3).double()  # on which no mode acts
    layer = torch.nn.Linear(64, 64)
    x = torch.randn(16, 16, 64)
    with torch.no_grad():
        found = lowprec.compare(lambda: conv(layer(x).reshape(4, 16, 16, 16).double()), "fp8")
    rows = {each.layer or each.phase: each for each in found.layers}
    assert found.shares[""] + found.shares["fp8"] == pytest.approx(1)
    of_library = next(each for name, each in rows.items() if name not in ("0", "Linear"))
    assert of_library.mode == ""
    assert of_library.own_error is None
    assert of_library.drift > 1e-3
    assert "(library)" in str(found)


def test_the_first_product_that_differs_is_named(torch):
    layer = torch.nn.Linear(8, 8)
    sizes = iter([3, 4])
    found = lowprec.compare(lambda: layer(layer(torch.ones(5, 8))[: next(sizes)]), "bf16")
    shapes = [f"Linear (forward, addmm, {rows}x8)" for rows in (3, 4)]
    assert found.parting == "The runs part at product 2 of {}: in the reference it is {}.".format(
        *shapes
    )
    assert found.change is None
    assert found.parting in str(found)
    counts = iter([1, 2])
    found = lowprec.compare(lambda: [layer(torch.ones(5, 8)) for _ in range(next(counts))], "bf16")
    assert found.parting == "The runs part after 1 products: one has more of them."


def test_the_first_nan_and_its_origin_are_named(torch):
    layer = torch.nn.Linear(8, 8)
    with torch.no_grad():
        layer.weight.fill_(1e30)

    def inner():
        return layer(torch.log(layer(torch.zeros(4, 8)) - 1))

    found = lowprec.compare(inner, "bf16")
    assert found.fault == (
        "The first NaN is in product 2 of Linear (forward, addmm, 4x8): its first operand has NaN."
    )
    assert "the result is not finite" in found.verdict
    found = lowprec.compare(lambda: layer(torch.full((4, 8), 1e30)), "bf16")
    assert found.fault == (
        "The first Inf is in product 1 of Linear (forward, addmm, 4x8): so is the product in fp32."
    )


def test_an_overflow_of_the_mode_is_named(torch):
    """The largest numbers of FP32 are infinite in bfloat16."""
    layer = torch.nn.Linear(8, 8, bias=False)
    torch.nn.init.constant_(layer.weight, 1e-30)
    found = lowprec.compare(lambda: layer(torch.full((4, 8), 3.4028e38)), "bf16")
    assert found.fault == (
        "The first Inf is in product 1 of Linear (forward, mm, 4x8): by bf16; the product is finite in fp32."
    )


def test_underflow_and_clipping_are_shown(torch):
    layer = torch.nn.Linear(64, 64, bias=False)
    with torch.no_grad():
        layer.weight.fill_(1)
        layer.weight[:, ::16] = 1000  # of each block of 16 the others are lost
    found = lowprec.compare(lambda: layer(torch.ones(4, 64)), "nvfp4")
    assert found.layers[0].underflow == 15 / 16
    assert "93.8%" in str(found)


def test_results_are_arrays_and_numbers_of_any_kind(torch):
    layer = torch.nn.Linear(8, 8)
    x = torch.full((4, 8), 1 + 2.0**-9)

    def run():
        y = layer(x).detach()
        return {"a": y.to(torch.bfloat16), "b": (y.numpy(), float(y.sum()))}

    found = lowprec.compare(run, {"Linear": "nvfp4", "*": "bf16"})
    assert 0 < found.change < 1
    assert found.mode == "{'Linear': 'nvfp4', '*': 'bf16'}"
    unchanged = lowprec.compare(lambda: [1.0, np.zeros(3)], "nvfp4")
    assert unchanged.change == 0
    assert (
        unchanged.verdict
        == "lowprec computed nothing of the multiplications; the result did not change"
    )


def test_random_numbers_are_the_same(torch):
    layer = torch.nn.Linear(8, 8)
    state = torch.get_rng_state()
    found = lowprec.compare(lambda: torch.nn.functional.dropout(layer(torch.ones(4, 8))), "fp32")
    assert found.change == 0
    assert torch.equal(torch.get_rng_state(), state)


def test_a_report_has_a_figure_and_plain_values(torch, tmp_path):
    layer = torch.nn.Linear(8, 8)
    found = lowprec.compare(lambda: layer(torch.ones(4, 8)), "bf16")
    assert found.to_dict()["layers"][0]["layer"] == "Linear"
    pytest.importorskip("matplotlib", reason="matplotlib draws the figures")
    found.plot(tmp_path / "run.svg")
    assert "Linear (forward)" in (tmp_path / "run.svg").read_text()


def test_a_page_is_complete(torch, tmp_path):
    """Its tables are those of the text, and it loads nothing."""
    layer = torch.nn.Linear(8, 8)
    found = lowprec.compare(lambda: layer(torch.ones(4, 8)), "bf16")
    found.save(tmp_path / "run.html")
    text = (tmp_path / "run.html").read_text(encoding="utf-8")
    assert f"<h1>{found.verdict}</h1>" in text
    assert text.count("<table>") == 1
    assert ">Linear (forward)</span>" in text
    # The longest bar is the larger one of two equal errors.
    assert text.count("width:100.00%") == 2
    assert "default-src 'none'" in text
    assert not re.findall(r"https?:|src=|@import|url\(", text)


def test_refusals(torch):
    with pytest.raises(ModeError, match="'bf17' is not a math mode"):
        lowprec.compare(lambda: 1 / 0, "bf17")
    with pytest.raises(ModeError, match="against 'bf17' is not a math mode"):
        lowprec.compare(lambda: 1 / 0, "bf16", "bf17")
    with pytest.raises(SettingError, match="the function returned None; return arrays or numbers"):
        lowprec.compare(lambda: None, "bf16")


def sketched(*arrays):
    """Return the records of products with these results."""
    from lowprec.backends.cpu.observing import Site

    site = Site()
    for x in map(np.ascontiguousarray, arrays):
        site.add(x.ctypes.data, None, x.size, x.dtype == np.float64, 1, -1)
    return site.take()


def test_a_sketch_has_the_norm_of_a_difference():
    """Of random numbers, of one column whose rows are as long as the sketch, and of equal differences."""
    from lowprec.core.recording import distance

    rng = np.random.default_rng(0)
    for shape in [(512, 768), (300, 1021), (1600, 1024)]:
        x = rng.standard_normal(shape, dtype=np.float32)
        column = np.zeros_like(x)
        column[:, 3] = rng.standard_normal(shape[0])
        for change in (
            1e-4 * rng.standard_normal(shape),
            np.full(shape, 0.01),
            *([column] if shape[1] != 1021 else []),
        ):
            y = (x + change).astype(np.float32)
            true = math.sqrt(np.sum(np.square(y.astype(float) - x)))
            found = [sketched(each)[0].sketch for each in (x, y)]
            assert distance(*found) == pytest.approx(true, rel=SKETCH)
    few = rng.standard_normal(1000)
    assert np.array_equal(sketched(few)[0].sketch[:1000] ** 2, few**2)


def test_a_record_has_1_2_4_8_products():
    """Its sketch is that of all their results, one after the other."""
    from lowprec.core.recording import distance

    rng = np.random.default_rng(0)
    x = rng.standard_normal((100, 40, 40), dtype=np.float32)
    change = rng.standard_normal(x.shape) * np.geomspace(1e-4, 1, 100)[:, None, None]
    y = (x + change).astype(np.float32)
    records = sketched(*x)
    assert [r.calls for r in records] == [1, 2, 4, 8, 16, 32, 37]
    assert [r.begin for r in records] == [0, 1, 3, 7, 15, 31, 63]
    for of_x, of_y in zip(records, sketched(*y), strict=True):
        part = slice(of_x.begin, of_x.end)
        true = np.linalg.norm((y[part].astype(float) - x[part]).ravel())
        assert distance(of_x.sketch, of_y.sketch) == pytest.approx(true, rel=SKETCH)
        assert of_x.square == pytest.approx(np.sum(x[part].astype(float) ** 2))
