"""``lowprec.conv`` of any library's arrays, against sums of shifted images in float64."""

from itertools import product

import numpy as np
import pytest

import lowprec
from frameworks.backends import Backend

#: Relative errors of rounding to nearest: of a sum in float32, and of an operand.
UNIT = 2.0**-24
OPERAND = {"fp32": 0.0, "bf16": 2.0**-8, "tf32": 2.0**-11, "fp64": 0.0}


def shifted(images, extents, given, tap):
    """Return the elements of images under one element of the kernel, for each result."""
    index = [slice(None), slice(None)]
    for t, stride, dilation, n in zip(
        tap, given["stride"], given["dilation"], extents, strict=True
    ):
        index.append(slice(t * dilation, t * dilation + stride * (n - 1) + 1, stride))
    return images[tuple(index)]


def convolved(x, weight, bias, given):
    """Return the convolution in float64."""
    x, weight = x.astype(np.float64), weight.astype(np.float64)
    groups = given["groups"]
    kernel = weight.shape[2:]
    if given["transposed"]:
        extents = x.shape[2:]
        filters = weight.shape[1]
        full = [
            (n - 1) * s + d * (k - 1) + 1 + m
            for n, s, d, k, m in zip(
                extents,
                given["stride"],
                given["dilation"],
                kernel,
                given["output_padding"],
                strict=True,
            )
        ]
        y = np.zeros((len(x), filters * groups, *full))
    else:
        x = np.pad(x, [(0, 0), (0, 0), *[(p, p) for p in given["padding"]]])
        extents = [
            (n - d * (k - 1) - 1) // s + 1
            for n, s, d, k in zip(
                x.shape[2:], given["stride"], given["dilation"], kernel, strict=True
            )
        ]
        filters = len(weight) // groups
        y = np.zeros((len(x), filters * groups, *extents))
    inputs = x.shape[1] // groups
    for g, tap in product(range(groups), product(*map(range, kernel))):
        of_x, of_y = slice(g * inputs, (g + 1) * inputs), slice(g * filters, (g + 1) * filters)
        if given["transposed"]:
            part = np.einsum("nc...,cf->nf...", x[:, of_x], weight[of_x][(..., *tap)])
            shifted(y[:, of_y], extents, given, tap)[...] += part
        else:
            part = shifted(x[:, of_x], extents, given, tap)
            y[:, of_y] += np.einsum("nc...,fc->nf...", part, weight[of_y][(..., *tap)])
    if given["transposed"]:
        ends = [slice(p, n - p) for p, n in zip(given["padding"], full, strict=True)]
        y = y[(slice(None), slice(None), *ends)]
    if bias is not None:
        y += bias.reshape(-1, *[1] * len(kernel))
    return y


def draw(seed):
    """Return the arrays and the arguments of a random convolution."""
    rng = np.random.default_rng(seed)
    axes = int(rng.integers(1, 4))
    groups, channels, filters = (int(n) for n in rng.integers(1, 4, 3))
    kernel = rng.integers(1, 4, axes).tolist()
    given = {
        "stride": rng.integers(1, 4, axes).tolist(),
        "padding": rng.integers(0, 2, axes).tolist(),
        "dilation": rng.integers(1, 3, axes).tolist(),
        "output_padding": [0] * axes,
        "groups": groups,
        "transposed": bool(rng.integers(2)),
    }
    inputs, outputs = groups * channels, groups * filters
    if given["transposed"]:
        inputs, outputs = outputs, inputs
        given["output_padding"] = [int(s > 1) for s in given["stride"]]
    arrays = [
        rng.standard_normal((int(rng.integers(1, 4)), inputs, *rng.integers(6, 10, axes))),
        rng.standard_normal((groups * filters, channels, *kernel)),
        rng.standard_normal(outputs) if rng.integers(2) else None,
    ]
    return [None if x is None else x.astype(np.float32) for x in arrays], given


def assert_within_bound(found, arrays, given, mode):
    """A sum of n products in float32 has an error of at most n units of the sum of magnitudes."""
    x, weight, _ = arrays
    magnitudes = [None if each is None else np.abs(each) for each in arrays]
    terms = x.shape[1] * weight[0, 0].size + weight[0, 0].size + 2
    relative = terms * UNIT + 2 * OPERAND[mode] + OPERAND[mode] ** 2
    want = convolved(*arrays, given)
    assert found.shape == want.shape
    assert (np.abs(found - want) <= relative * convolved(*magnitudes, given) + 1e-30).all(), given


def assert_random_ones_are_within_their_bounds(xp, seeds):
    for seed in seeds:
        arrays, given = draw(seed)
        mode = ("fp32", "bf16", "tf32", "fp64")[seed % 4]
        operands = [None if x is None else xp.asarray(x) for x in arrays]
        found = lowprec.conv(*operands, **given, math_mode=mode)
        assert isinstance(found, xp.result_type)
        assert_within_bound(xp.to_numpy(found), arrays, given, mode)


def test_random_convolutions_are_within_the_bound_of_their_sums(xp):
    assert_random_ones_are_within_their_bounds(xp, range(24))


@pytest.mark.sweep
@pytest.mark.parametrize("first", range(0, 2000, 100))
def test_many_random_convolutions(first):
    assert_random_ones_are_within_their_bounds(Backend.NUMPY.load(), range(first, first + 100))


@pytest.mark.parametrize("transposed", [False, True])
def test_an_image_alone_and_a_number_for_all_axes(xp, transposed):
    rng = np.random.default_rng(0)
    x = rng.standard_normal((3, 4, 7, 8), dtype=np.float32)
    weight = rng.standard_normal((4, 4, 3, 3), dtype=np.float32)
    given = {"stride": 2, "padding": 1, "transposed": transposed, "activation": "relu"}
    batch = xp.to_numpy(lowprec.conv(xp.asarray(x), xp.asarray(weight), **given))
    alone = xp.to_numpy(lowprec.conv(xp.asarray(x[1]), xp.asarray(weight), **given))
    assert np.array_equal(alone, batch[1])
    listed = {"stride": [2, 2], "padding": [1, 1], "dilation": [1, 1], "groups": 1}
    want = convolved(
        x, weight, None, {**listed, "transposed": transposed, "output_padding": [0, 0]}
    )
    assert np.abs(batch - np.maximum(want, 0)).max() < 1e-4


def test_blocks_are_along_channels_and_kernel():
    rng = np.random.default_rng(0)
    x = rng.standard_normal((2, 8, 6, 6), dtype=np.float32)
    weight = rng.standard_normal((5, 8, 3, 3), dtype=np.float32)
    windows = np.lib.stride_tricks.sliding_window_view(x, (3, 3), (2, 3))
    rows = windows.transpose(0, 2, 3, 1, 4, 5).reshape(-1, 72)
    for mode in ("mxfp8", "int8", "nvfp4_rows", "fp16x3"):
        want = lowprec.matmul(rows, weight.reshape(5, 72).T.copy(), math_mode=mode)
        found = lowprec.conv(x, weight, math_mode=mode).transpose(0, 2, 3, 1).reshape(-1, 5)
        assert np.array_equal(found, want), mode


def test_modes_of_scopes_and_tolerances():
    above = np.full((1, 2, 5), 1 + 2.0**-9, np.float32)
    ones = np.ones((1, 2, 3), np.float32)
    with lowprec.math_mode("bf16"):
        assert (lowprec.conv(above, ones) == 6).all()
    assert (lowprec.conv(above, ones) > 6).all()
    assert np.allclose(lowprec.conv(above, ones, rtol=1e-2), 6, rtol=1e-2)
    with pytest.raises(lowprec.ModeError, match="transposed convolution adds several"):
        lowprec.conv(above, np.ones((2, 1, 3), np.float32), transposed=True, rtol=1e-2)


def test_padding_by_name():
    x = np.arange(8, dtype=np.float32).reshape(1, 1, 8)
    ones = np.ones((1, 1, 3), np.float32)
    assert lowprec.conv(x, ones, padding="same", dilation=2).shape == x.shape
    assert lowprec.conv(x, ones, padding="valid").tolist() == [[[3, 6, 9, 12, 15, 18]]]


X = np.ones((1, 4, 5, 5), np.float32)
W = np.ones((6, 4, 3, 3), np.float32)


@pytest.mark.parametrize(
    ("arrays", "given", "error", "match"),
    [
        ((X, np.ones((6, 3, 3, 3), np.float32)), {}, lowprec.ShapeError, "the weight takes 3"),
        ((X, W), {"groups": 4}, lowprec.ShapeError, "in equal groups"),
        ((X[:, :, :2, :2], W), {}, lowprec.ShapeError, "no elements"),
        ((X[:0], W), {}, lowprec.ShapeError, "no elements"),
        ((X[0, 0], W), {}, lowprec.ShapeError, "1 to 3 axes"),
        ((X, np.ones((6, 4), np.float32)), {}, lowprec.ShapeError, "1 to 3 axes"),
        ((X, W, np.ones(5, np.float32)), {}, lowprec.ShapeError, r"gives \(6,\)"),
        ((X, W), {"stride": 0}, lowprec.SettingError, "stride is an integer of at least 1"),
        ((X, W), {"dilation": [1, 1, 1]}, lowprec.SettingError, "or 2 of them"),
        ((X, W), {"padding": -1}, lowprec.SettingError, "at least 0"),
        ((X, W), {"padding": "full"}, lowprec.SettingError, "'same', 'valid'"),
        ((X, W), {"padding": "same", "stride": 2}, lowprec.SettingError, "stride of 1"),
        ((X, W), {"output_padding": 1}, lowprec.SettingError, "transposed=True"),
        ((X, W), {"activation": "silu"}, lowprec.SettingError, "silu"),
        ((X, W), {"math_mode": "bf61"}, lowprec.ModeError, "bf61"),
        ((X, W.astype(np.float64)), {}, lowprec.DTypeError, "weight is float64"),
        ((X.astype(np.int8), W.astype(np.int8)), {}, lowprec.DTypeError, "x is int8"),
        (("x", W), {}, lowprec.ArrayError, "x: "),
        ((X, [1.0]), {}, lowprec.ArrayError, "weight: "),
    ],
)  # fmt: skip
def test_bad_arguments_have_typed_errors(arrays, given, error, match):
    with pytest.raises(error, match=match):
        lowprec.conv(*arrays, **given)


def test_output_padding_is_below_the_stride():
    with pytest.raises(lowprec.ShapeError, match="below the stride"):
        lowprec.conv(X, np.ones((4, 2, 3, 3), np.float32), transposed=True, output_padding=1)


@pytest.mark.parametrize("seed", range(6))
def test_pytorch_records_gradients(torch, seed):
    arrays, given = draw(seed)
    wide = [None if x is None else torch.from_numpy(x).double().requires_grad_() for x in arrays]
    tensors = [x if x is None else torch.from_numpy(x).requires_grad_() for x in arrays]
    axes = arrays[0].ndim - 2
    name = f"conv{'_transpose' if given['transposed'] else ''}{axes}d"
    plain = {k: v for k, v in given.items() if k not in ("transposed", "output_padding")}
    if given["transposed"]:
        plain["output_padding"] = given["output_padding"]
    exact = getattr(torch.nn.functional, name)(*wide, **plain)
    found = lowprec.conv(*tensors, **given, math_mode="bf16", backward_mode="fp32")
    weights = torch.randn(exact.shape, dtype=torch.float64)
    (exact * weights).sum().backward()
    (found * weights.float()).sum().backward()
    for x, want in zip(tensors, wide, strict=True):
        if x is not None:
            # sums of fewer than 2,048 products in float32
            assert (x.grad - want.grad).norm() < 2048 * UNIT * want.grad.norm()


@pytest.mark.parametrize("seed", range(8))
def test_jax_traces_and_differentiates(jax, seed):
    (x, weight, bias), given = draw(seed)
    given.pop("output_padding")
    jnp = jax.numpy
    bias = None if bias is None else jnp.asarray(bias)

    def convolve(x, weight):
        return lowprec.conv(x, weight, bias, **given, math_mode="fp32")

    y = jax.jit(convolve)(jnp.asarray(x), jnp.asarray(weight))
    arrays = [x, weight, None if bias is None else np.asarray(bias)]
    assert_within_bound(
        np.asarray(y), arrays, {**given, "output_padding": [0] * (x.ndim - 2)}, "fp32"
    )
    rng = np.random.default_rng(seed)
    along = [rng.standard_normal(a.shape, dtype=np.float32) for a in (x, weight)]
    # a convolution is linear in both operands
    _, change = jax.jvp(
        convolve, (jnp.asarray(x), jnp.asarray(weight)), tuple(map(jnp.asarray, along))
    )
    listed = {**given, "output_padding": [0] * (x.ndim - 2)}
    want = convolved(along[0], weight, None, listed) + convolved(x, along[1], None, listed)
    assert np.linalg.norm(change - want) < 2048 * UNIT * np.linalg.norm(want)
    gradient = jax.grad(lambda x: convolve(x, jnp.asarray(weight)).sum())(jnp.asarray(x))
    assert (
        abs(float((gradient * along[0]).sum()) - convolved(along[0], weight, None, listed).sum())
        < 1e-2
    )


def test_second_derivatives_of_tensors_are_refused(torch):
    x = torch.ones(1, 1, 5, requires_grad=True)
    weight = torch.ones(1, 1, 3, requires_grad=True)
    y = lowprec.conv(x, weight)
    (first,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    with pytest.raises(lowprec.UnsupportedError, match="no second derivative; call PyTorch's"):
        first.sum().backward()


def test_tensors_under_a_transform_are_refused(torch):
    x, weight = torch.ones(2, 1, 4), torch.ones(1, 1, 2)
    with pytest.raises(lowprec.UnsupportedError, match="no memory for conv"):
        torch.func.vmap(lambda each: lowprec.conv(each, weight))(x)
    with pytest.raises(lowprec.ArrayError, match="pass a tensor"):
        lowprec.conv(x, weight.numpy())
