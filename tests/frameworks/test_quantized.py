"""Quantised arrays of every library."""

import importlib
import pickle

import numpy as np
import pytest

import lowprec
from frameworks.backends import Backend
from frameworks.conftest import load_or_skip
from lowprec.arrays.namespaces import cast
from lowprec.arrays.view import Device
from lowprec.formats import BLOCK_FORMATS

FORMATS = (*BLOCK_FORMATS, "mxfp6", "nvfp4_rows", "e4m3ieee:block=64", "fp8_fnuz")


def draw(*shape):
    """Return numbers of many exponents, with a block of zeros, a NaN and an infinity."""
    rng = np.random.default_rng(0)
    x = (rng.standard_normal(shape) * 2.0 ** rng.integers(-12, 12, shape)).astype(np.float32)
    x[0, 0, 3], x[1, 2, 40], x[2] = np.nan, -np.inf, 0
    return x


def same(found, want):
    """Assert equal codes, scales and numbers."""
    np.testing.assert_array_equal(np.asarray(found.codes), want.codes)
    assert (found.scales is None) == (want.scales is None)
    if want.scales is not None:
        np.testing.assert_array_equal(np.asarray(found.scales), want.scales)
    np.testing.assert_array_equal(np.asarray(found.scale), want.scale)
    assert (found.shape, found.axis, found.format) == (want.shape, want.axis, want.format)
    np.testing.assert_array_equal(np.asarray(found.dequantize()), want.dequantize())


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("backend", [Backend.TORCH, Backend.JAX])
def test_codes_are_arrays_of_the_library(backend, name):
    library, x = load_or_skip(backend), draw(3, 5, 70)
    for axis in range(3):
        want, array = lowprec.quantize(x, name, axis), library.asarray(x)
        found = lowprec.quantize(array, name, axis)
        parts = [
            part for part in (found.codes, found.scales, found.dequantize()) if part is not None
        ]
        assert {type(part) for part in parts} == {type(array)}
        same(found, want)
        same(pickle.loads(pickle.dumps(found)), want)
        same(found.T, want.T)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(
    ("backend", "module"), [(Backend.TORCH, "torch"), (Backend.JAX, "jax.numpy")]
)
def test_the_functions_of_a_library_give_the_bits_of_numpy(monkeypatch, backend, module, name):
    """Arrays on a device are converted with the functions of their library; here the host counts as a device."""
    library, x = load_or_skip(backend), draw(3, 5, 70)
    wanted = [lowprec.quantize(x, name, axis) for axis in (0, 2)]
    arrays = [library.asarray(x), library.asarray(x[:0])]
    with monkeypatch.context() as patch:
        patch.setattr(Device, "is_host", property(lambda self: False))
        found = [lowprec.quantize(arrays[0], name, axis) for axis in (0, 2)]
        numbers = [y.dequantize() for y in found]
        assert lowprec.quantize(arrays[1], name).dequantize().shape == (0, 5, 70)
    for y, number, want in zip(found, numbers, wanted, strict=True):
        assert y.codes.dtype == importlib.import_module(module).uint8
        same(y, want)
        np.testing.assert_array_equal(np.asarray(number), want.dequantize())


@pytest.mark.parametrize("name", FORMATS)
def test_an_array_known_only_by_dlpack_has_numpy_codes(name):
    x = draw(3, 5, 70)
    found = lowprec.quantize(load_or_skip(Backend.DLPACK_ONLY).asarray(x), name)
    assert type(found.codes) is type(found.dequantize()) is np.ndarray
    same(found, lowprec.quantize(x, name))


@pytest.mark.parametrize("name", FORMATS)
def test_torch(torch, name):
    x = draw(3, 5, 70)
    tensor = torch.as_tensor(x)
    dtypes = [torch.bfloat16, torch.float16, torch.float64]
    if name == "int4":
        dtypes.remove(torch.float64)  # the largest number of a block is a tie in float32 alone
    for dtype in dtypes:
        same(
            lowprec.quantize(tensor.to(dtype), name),
            lowprec.quantize(tensor.to(dtype).float().numpy(), name),
        )
    parameter = torch.nn.Parameter(tensor)
    with pytest.raises(lowprec.ArrayError, match=r"requires grad.*pass tensor\.detach\(\)"):
        lowprec.quantize(parameter, name)
    with torch.no_grad():
        same(lowprec.quantize(parameter, name), lowprec.quantize(x, name))
    negated = torch._neg_view(tensor)
    same(lowprec.quantize(negated, name), lowprec.quantize(-x, name))
    strided = tensor.permute(2, 0, 1)[::3]
    same(lowprec.quantize(strided, name, 1), lowprec.quantize(strided.numpy(), name, 1))
    with pytest.raises(lowprec.ArrayError, match=r"inside a torch\.func transform"):
        torch.func.vmap(lambda row: lowprec.quantize(row, name).dequantize())(tensor)
    with pytest.raises(lowprec.DTypeError, match="float32, float64, float16, bfloat16, not int32"):
        lowprec.quantize(torch.ones(4, dtype=torch.int32), name)
    found = lowprec.quantize(tensor, name)
    for part in (found.codes, found.scales):
        if part is not None:
            np.testing.assert_array_equal(np.from_dlpack(part), part.numpy())


@pytest.mark.parametrize("name", FORMATS)
def test_jax(jax, name):
    x = draw(3, 5, 70)
    array = jax.numpy.asarray(x)
    same(
        lowprec.quantize(array.astype("bfloat16"), name),
        lowprec.quantize(x.astype(jax.numpy.bfloat16), name),
    )
    for transform in (jax.jit, jax.vmap, jax.jacfwd):
        with pytest.raises(lowprec.ArrayError, match="tracer"):
            transform(lambda y: lowprec.quantize(y, name).dequantize())(array)
    committed = jax.device_put(array, jax.devices("cpu")[0])
    for y in (array, committed):
        found = lowprec.quantize(y, name)
        assert found.codes.committed == found.dequantize().committed == y.committed
    tiny = np.full(64, 2.0**-149, np.float32)  # which JAX's own functions take as zero
    same(lowprec.quantize(jax.numpy.asarray(tiny), name), lowprec.quantize(tiny, name))


def test_dask():
    da = pytest.importorskip("dask.array", reason="dask is not installed")
    with pytest.raises(lowprec.ArrayError, match=r"a Dask array is lazy.*pass array\.compute\(\)"):
        lowprec.quantize(da.ones((4, 32), dtype="float32"), "mxfp4")


@pytest.mark.parametrize("backend", [Backend.NUMPY, Backend.TORCH, Backend.JAX])
def test_scales_of_other_types_and_scalar_arrays(backend, rng):
    """float16 and bfloat16 scales are exact in float32; the scale of an array may be an array of shape ()."""
    xp = load_or_skip(backend)
    x = lowprec.quantize(xp.asarray(rng.standard_normal((4, 64)).astype(np.float32)), "fp8_rows")
    for name in ("float16", "bfloat16"):
        narrow = cast(x.scales, name)
        found = lowprec.QuantizedArray(x.codes, narrow, "fp8_rows", x.shape, x.axis)
        wide = lowprec.QuantizedArray(x.codes, cast(narrow, "float32"), "fp8_rows", x.shape, x.axis)
        same(found, wide)
    x = lowprec.quantize(xp.asarray(rng.standard_normal((4, 64)).astype(np.float32)), "nvfp4")
    for scale in (np.float32(x.scale), xp.asarray(np.array(x.scale, np.float32))):
        same(lowprec.QuantizedArray(x.codes, x.scales, "nvfp4", x.shape, x.axis, scale), x)
    scales = np.float32([1, 2, 0.5, 4])
    found = lowprec.QuantizedArray(
        x.codes, x.scales, "nvfp4", x.shape, x.axis, xp.asarray(scales * np.float32(x.scale))
    )
    numbers = np.asarray(x.dequantize()) * scales[:, None]  # powers of two
    np.testing.assert_array_equal(np.asarray(found.dequantize()), numbers)
    np.testing.assert_allclose(
        np.asarray(lowprec.matmul(x.dequantize(), found.T)),
        np.asarray(x.dequantize()) @ numbers.T,
        rtol=0,
        atol=64 * 2.0**-24 * 64 * 16 * 4,
    )
    with pytest.raises(lowprec.ShapeError, match=r"scale of shape \(2,\) has not the leading axes"):
        lowprec.QuantizedArray(
            x.codes, x.scales, "nvfp4", x.shape, x.axis, xp.asarray(np.ones(2, np.float32))
        )


def test_jax_divides_as_numpy(monkeypatch):
    """Quotients are ties or next to one: their last bit decides the code."""
    library = load_or_skip(Backend.JAX)
    rng = np.random.default_rng(5)
    scale = rng.uniform(0.5, 1, (1000, 1)).astype(np.float32)
    x = (rng.integers(0, 15, (1000, 64)).astype(np.float32) + np.float32(0.5)) * scale
    x[:, 0] = 15 * scale[:, 0]
    want = lowprec.quantize(x, "int4", 1, symmetric=False)
    array = library.asarray(x)
    monkeypatch.setattr(Device, "is_host", property(lambda self: False))
    found = lowprec.quantize(array, "int4", 1, symmetric=False)
    np.testing.assert_array_equal(np.asarray(found.codes), want.codes)
