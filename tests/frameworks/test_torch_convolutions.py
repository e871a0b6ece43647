"""Convolutions inside ``lowprec.torch.intercept``: forward and both gradients, in the mode of their layer."""

from typing import NamedTuple

import numpy as np
import pytest

import lowprec
from lowprec.arrays.numpy_library import host_view
from lowprec.arrays.view import OffsetView
from lowprec.core import convolutions

lt = pytest.importorskip("lowprec.torch")
torch = pytest.importorskip("torch")

functional = torch.nn.functional
CONVOLUTIONS = [functional.conv1d, functional.conv2d, functional.conv3d]
TRANSPOSED = [functional.conv_transpose1d, functional.conv_transpose2d, functional.conv_transpose3d]
#: Relative error of rounding to nearest: of a sum in float32, and of an operand.
UNIT = 2.0**-24
OPERAND = {"fp32": 0.0, "bf16": 2.0**-8, "tf32": 2.0**-11}


class Case(NamedTuple):
    """A convolution with random arguments."""

    function: object
    tensors: list
    given: dict
    last: bool

    @classmethod
    def random(cls, seed):
        rng = np.random.default_rng(seed)
        axes = int(rng.integers(1, 4))
        transposed = bool(rng.integers(2))
        groups = int(rng.choice([1, 1, 2, 3]))
        channels = int(rng.integers(1, 7))
        filters = int(rng.integers(1, 7))
        kernel = [int(rng.integers(1, 4)) for _ in range(axes)]
        given = {
            "stride": [int(rng.integers(1, 4)) for _ in range(axes)],
            "padding": [int(rng.integers(0, 3)) for _ in range(axes)],
            "dilation": [int(rng.integers(1, 3)) for _ in range(axes)],
            "groups": groups,
        }
        if rng.integers(4) == 0:
            kernel = [1] * axes
            given.update(stride=1, padding=0)
        extents = [int(rng.integers(6, 11)) for _ in range(axes)]
        weight = [groups * filters, channels, *kernel]
        inputs = groups * channels
        outputs = groups * filters
        if transposed:
            inputs, outputs = outputs, inputs
            # below stride or dilation
            given["output_padding"] = [int(s > 1) for s in np.broadcast_to(given["stride"], axes)]
        tensors = [(int(rng.integers(1, 4)), inputs, *extents), weight]
        if rng.integers(2):
            tensors.append((outputs,))
        made = [torch.from_numpy(rng.standard_normal(s).astype(np.float32)) for s in tensors]
        last = bool(rng.integers(2))
        if last and axes > 1:
            formats = {2: torch.channels_last, 3: torch.channels_last_3d}
            made[0] = made[0].contiguous(memory_format=formats[axes])
        function = (TRANSPOSED if transposed else CONVOLUTIONS)[axes - 1]
        return cls(function, made, given, last)

    def results(self, seed, dtype=None, absolute=False, mode=None):
        """Return the result and the gradients of the tensors for a random gradient of the result."""
        tensors = [t.detach().clone(memory_format=torch.preserve_format) for t in self.tensors]
        if dtype is not None:
            tensors = [t.to(dtype) for t in tensors]
        if absolute:
            tensors = [t.abs() for t in tensors]
        tensors = [t.requires_grad_() for t in tensors]

        def run():
            y = self.function(*tensors, **self.given)
            generator = torch.Generator().manual_seed(seed)
            gradient = torch.randn(y.shape, generator=generator).to(y.dtype)
            if absolute:
                gradient = gradient.abs()
            return [y.detach(), *torch.autograd.grad(y, tensors, gradient)]

        if mode is None:
            return run(), None
        with lt.intercept(mode) as seen:
            found = run()
        return found, seen.report()

    def terms(self, y):
        """Return the numbers of terms of an element of the result, and of each gradient."""
        x, weight, *_ = self.tensors
        taps = weight[0, 0].numel()
        positions = max(x[0, 0].numel(), y[0, 0].numel()) * len(x)
        both = max(weight.shape[:2]) * taps
        return [both + taps + 1, both + taps + 1, 2 * positions, positions]


def assert_close(seed, mode):
    """Compare with float64: sums of n terms in float32 have an error of at most n units of the sum of magnitudes."""
    case = Case.random(seed)
    found, report = case.results(seed, mode=mode)
    exact, _ = case.results(seed, torch.float64)
    size, _ = case.results(seed, torch.float64, absolute=True)
    rounding = 2 * OPERAND[mode] + OPERAND[mode] ** 2
    for x, want, magnitude, terms in zip(found, exact, size, case.terms(exact[0]), strict=False):
        bound = (rounding + terms * UNIT) * magnitude + 1e-30
        assert x.shape == want.shape
        assert (x - want).abs().le(bound).all(), (seed, case)
    assert not [p for p in report.products if p.passed_by], report
    assert [p.count for p in report.taken if p.operator == "convolution"]


@pytest.mark.parametrize("first", range(0, 200, 20))
def test_random_convolutions_are_within_the_bound_of_their_sums(first):
    for seed in range(first, first + 20):
        assert_close(seed, ("fp32", "bf16", "tf32")[seed % 3])


@pytest.mark.sweep
@pytest.mark.parametrize("first", range(200, 2000, 100))
def test_many_random_convolutions_and_gradients(first):
    for seed in range(first, first + 100):
        assert_close(seed, ("fp32", "bf16", "tf32")[seed % 3])


@pytest.mark.parametrize("first", range(0, 40, 20))
def test_chunks_of_images_are_within_the_same_bound(first, monkeypatch):
    monkeypatch.setattr("lowprec.core.convolutions.CHUNK_BYTES", 2000)
    for seed in range(first, first + 20):
        assert_close(seed, "fp32")


@pytest.mark.parametrize(
    ("shape", "given"),
    [
        ((2, 20, 30, 40), {"padding": 1}),
        ((2, 20, 14, 14), {"padding": 1}),
        ((2, 20, 30, 40), {"padding": (1, 4)}),
        ((2, 24, 40, 70), {"padding": 2, "dilation": 2, "groups": 2}),
        ((3, 16, 600), {"padding": 1}),
        ((1, 16, 18, 40, 50), {}),
    ],
)
@pytest.mark.parametrize("mode", ["fp32", "bf16", "tf32"])
def test_elements_read_by_offsets_have_the_bits_of_copied_ones(shape, given, mode, monkeypatch):
    generator = torch.Generator().manual_seed(0)
    groups = given.get("groups", 1)
    axes = len(shape) - 2
    x = torch.randn(shape, generator=generator)
    weight = torch.randn(32, shape[1] // groups, *[3] * axes, generator=generator)
    bias = torch.randn(32, generator=generator)
    read = []
    by_offsets = convolutions.Products._multiply_by_offsets

    def watched(self, *arrays):
        read.append(self)
        by_offsets(self, *arrays)

    monkeypatch.setattr(convolutions.Products, "_multiply_by_offsets", watched)
    with lt.intercept(mode):
        found = CONVOLUTIONS[axes - 1](x, weight, bias, **given)
    assert read
    monkeypatch.setattr(convolutions, "_LEAST_POSITIONS", 1 << 40)
    with lt.intercept(mode):
        copied = CONVOLUTIONS[axes - 1](x, weight, bias, **given)
    assert len(read) == 1
    assert torch.equal(found, copied)


def test_a_view_with_offsets_has_the_elements_of_its_windows():
    x = np.arange(40.0, dtype=np.float32)
    view = OffsetView(host_view(x), (2, 3, 2), (20, 1), (4, 9))
    want = [[[i + j + k for k in (4, 9)] for j in range(3)] for i in (0, 20)]
    np.testing.assert_array_equal(view.ndarray(), want)


@pytest.mark.parametrize("seed", range(0, 60, 10))
def test_results_and_gradients_have_the_strides_of_pytorch(seed):
    for each in range(seed, seed + 10):
        case = Case.random(each)
        found, _ = case.results(each, mode="fp32")
        plain, _ = case.results(each)
        assert [x.stride() for x in found] == [x.stride() for x in plain], (each, case)


def network():
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Conv2d(3, 20, 5, padding=2, stride=2),
        torch.nn.ReLU(),
        torch.nn.Conv2d(20, 36, 3, padding=1),
        torch.nn.Conv2d(36, 64, 1),
        torch.nn.Conv2d(64, 64, 3, groups=4, padding=1),
        torch.nn.Conv2d(64, 64, 3, groups=64, padding=1),
        torch.nn.ConvTranspose2d(64, 17, 3, 2),
        torch.nn.Conv2d(17, 40, 1, stride=2),
    ).eval()


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("mode", ["fp32", "bf16", "int8", "mxfp8", "nvfp4", "fp8"])
def test_an_image_has_the_same_bits_alone_and_in_any_batch(mode, last):
    model = network()
    x = torch.randn(9, 3, 19, 21)
    if last:
        model = model.to(memory_format=torch.channels_last)
        x = x.contiguous(memory_format=torch.channels_last)
    with torch.no_grad(), lt.intercept(mode) as seen:
        alone = torch.cat([model(x[i : i + 1]) for i in range(9)])
        for count in (2, 7, 9):
            found = torch.cat([model(each) for each in x.split(count)])
            assert torch.equal(found, alone), count
    assert not [p for p in seen.report().products if p.passed_by]


def unfolded(x, kernel, **given):
    """Return the elements under the kernel, (positions, channels x kernel)."""
    return functional.unfold(x, kernel, **given).movedim(1, -1).flatten(0, 1).contiguous()


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("mode", ["mxfp8", "int8", "mxfp4", "fp8_rows", "bf16x3", "fp16"])
def test_blocks_are_along_channels_and_kernel_of_a_position(mode, last):
    torch.manual_seed(0)
    x = torch.randn(2, 24, 9, 10)
    layer = torch.nn.Conv2d(24, 17, 3, stride=2, padding=1)
    if last:
        x = x.contiguous(memory_format=torch.channels_last)
    with lt.intercept(mode), torch.no_grad():
        y = layer(x)
    a = unfolded(x, 3, stride=2, padding=1).numpy()
    weight = layer.weight.detach().flatten(1).T.contiguous().numpy()
    want = lowprec.matmul(a, weight, bias=layer.bias.detach().numpy(), math_mode=mode)
    found = y.movedim(1, -1).reshape(-1, 17).numpy()
    if last and not mode.startswith(("mx", "int", "fp8")):
        assert np.abs(found - want).max() < 1e-2  # another order of the sum
    else:
        assert np.array_equal(found, want)


def test_each_gradient_is_rounded_along_its_own_inner_axis():
    torch.manual_seed(0)
    x = torch.randn(1, 8, 6, 6, requires_grad=True)
    layer = torch.nn.Conv2d(8, 33, 3, bias=False)
    recipe = lowprec.Recipe("mxfp8", grad_weight="bf16")
    gradient = torch.randn(1, 33, 4, 4)
    with lt.intercept(recipe):
        layer(x).backward(gradient)
    rows = gradient.flatten(2)[0].T.contiguous().numpy()
    weight = layer.weight.detach().flatten(1).numpy()
    columns = torch.from_numpy(lowprec.matmul(rows, weight, math_mode="mxfp8").T.copy())
    want = functional.fold(columns[None], (6, 6), 3)
    assert torch.allclose(x.grad, want, rtol=1e-5, atol=1e-5)
    a = unfolded(x.detach(), 3).numpy().T.copy()
    want = lowprec.matmul(a, rows, math_mode="bf16").T.reshape(33, 8, 3, 3)
    assert np.allclose(layer.weight.grad.numpy(), want, rtol=1e-5, atol=1e-5)


def test_second_derivatives_are_made_of_convolutions():
    torch.manual_seed(0)
    tensors = [torch.randn(2, 4, 7, 7), torch.randn(6, 2, 3, 3)]

    def second(dtype):
        x, weight = (t.to(dtype).requires_grad_() for t in tensors)
        y = functional.conv2d(x, weight, stride=2, padding=1, groups=2)
        first = torch.autograd.grad(y.pow(3).sum(), (x, weight), create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in first), (x, weight))

    with lt.intercept("fp32") as seen:
        found = second(torch.float32)
    for x, want in zip(found, second(torch.float64), strict=True):
        # three convolutions one after the other, of at most 128 terms each
        assert (x - want).norm() < 3 * 128 * UNIT * want.norm()
    assert not [p for p in seen.report().products if p.passed_by]


def test_a_network_is_taken_by_layer_with_its_statistics():
    model = network()
    x = torch.randn(2, 3, 19, 21)
    with lt.intercept(
        {"0": "fp32", "ConvTranspose2d": "tf32", "*": "mxfp8"}, statistics=True
    ) as seen:
        model(x).sum().backward()
    report = seen.report()
    assert not [p for p in report.products if p.passed_by]
    modes = {p.layer: p.mode for p in report.taken}
    assert modes == {"0": "fp32", **dict.fromkeys("23457", "mxfp8"), "6": "tf32"}
    assert {p.gradient for p in report.taken if p.layer == "4"} == {"", "grad_input", "grad_weight"}
    for p in report.taken:
        assert 0 < p.error < (0.1 if p.mode == "mxfp8" else 1e-3)


def test_a_comparison_has_the_own_error_of_each_convolution():
    model = network()
    x = torch.randn(2, 3, 19, 21)
    rows = lowprec.compare(lambda: model(x), "mxfp8", against="fp32").layers
    assert [row.layer for row in rows if row.own_error > 0.01]


def test_a_rule_names_the_operator():
    with lt.intercept("convolution=bf16") as seen:
        functional.conv1d(torch.ones(1, 2, 5), torch.ones(3, 2, 2)) @ torch.ones(4, 2)
    found = {p.operator: p.mode for p in seen.report().products}
    assert found.pop("convolution") == "bf16"
    assert set(found.values()) == {""}


@pytest.mark.parametrize(
    ("shapes", "given"),
    [
        (((1, 3, 5, 5), (4, 2, 3, 3)), {}),
        (((1, 4, 5, 5), (4, 2, 3, 3)), {"groups": 3}),
        (((1, 2, 2, 2), (4, 2, 3, 3)), {}),
        (((1, 2, 5, 5), (4, 2, 3, 3)), {"stride": 0}),
        (((1, 2, 5, 5), (4, 2, 3, 3)), {"padding": -1}),
        (((1, 2, 5, 5), (4, 2, 3, 3)), {"dilation": 0}),
        (((1, 2, 5, 5), (4, 2, 3, 3), (3,)), {}),
    ],
)
def test_bad_arguments_have_the_error_of_pytorch(shapes, given):
    tensors = [torch.ones(s) for s in shapes]
    with pytest.raises(RuntimeError) as plain:
        functional.conv2d(*tensors, **given)
    with lt.intercept("fp32"), pytest.raises(RuntimeError) as taken:
        functional.conv2d(*tensors, **given)
    assert str(taken.value) == str(plain.value)


def test_types_on_which_no_mode_acts_are_left_to_pytorch():
    x = torch.ones(1, 2, 5, dtype=torch.float64, requires_grad=True)
    weight = torch.ones(3, 2, 2, dtype=torch.float64, requires_grad=True)
    with lt.intercept("bf16") as seen:
        y = functional.conv1d(x, weight)
        y.sum().backward()
    assert torch.equal(y, functional.conv1d(x, weight))
    report = seen.report()
    assert not report.taken
    assert sum(p.count for p in report.products) == 3
    assert len({str(p.passed_by) for p in report.products}) == 1


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_16_bit_tensors_are_rounded_once(dtype):
    case = Case.random(4)
    dtype = getattr(torch, dtype)
    case = case._replace(tensors=[t.to(dtype) for t in case.tensors])
    found, report = case.results(4, mode="convolution=mxfp8")
    exact, _ = case.results(4, torch.float64)
    assert report.taken
    for x, want in zip(found, exact, strict=True):
        assert x.dtype == dtype
        assert (x - want).norm() < 0.1 * want.norm()
