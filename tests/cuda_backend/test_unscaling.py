"""Gradients on a GPU divided by a loss scale, with one wait in each step."""

import ml_dtypes
import numpy as np
import pytest

from cuda_backend.device_libraries import Torch
from lowprec import amp

BF16 = np.dtype(ml_dtypes.bfloat16)
TYPES = (np.dtype(np.float32), np.dtype(np.float64), BF16)


def drawn(rng, n, dtype):
    return (1000 * rng.standard_normal(n)).astype(dtype)


def divided(x):
    """By 3: multiplied by the reciprocal in float32, in the wider of the types, and rounded once."""
    wide = np.float64 if x.dtype == np.float64 else np.float32
    return (x.astype(wide) * wide(np.float32(1 / 3))).astype(x.dtype)


@pytest.mark.feature("gradients of a scaled loss, `LossScaler`")
@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("bad", [None, "inf", "nan"])
def test_every_element_is_divided_and_checked(library, bad, in_place):
    # PyTorch takes no bfloat16 of NumPy's.
    types = TYPES[:2] if isinstance(library, Torch) else TYPES
    rng = np.random.default_rng(3)
    sizes = (1, 0, 1000, 70_001)
    host = [drawn(rng, n, dtype) for dtype in types for n in sizes]
    if bad is not None:
        host[-1][-1] = float(bad)
    with library.stream():
        grads = [library.late(x) for x in host]
        scaler = amp.LossScaler(3.0)
        found = scaler.unscale(grads, out=grads if in_place else None)
        assert scaler.found_inf is (bad is not None)
        for x, y, before in zip(host, found, grads, strict=True):
            # As float64, in which NaN equals NaN.
            np.testing.assert_array_equal(library.get(y).astype(float), divided(x).astype(float))
            if not in_place:
                np.testing.assert_array_equal(library.get(before).astype(float), x.astype(float))


def test_one_wait_for_a_step_and_no_kernel_of_lowprec(software, cupy):
    rng = np.random.default_rng(4)
    grads = {str(i): cupy.asarray(drawn(rng, 10 + i, TYPES[i % 3])) for i in range(30)}
    scaler = amp.LossScaler()
    for _ in range(3):
        before, waits = software.calls_made(), cupy.waits
        scaler.unscale(grads, out=grads)
        assert not any(
            "Launch" in x or "Synchronize" in x for x in software.software.calls[before:]
        )
        assert cupy.waits == waits
        assert scaler.step(lambda: "stepped") == "stepped"
        assert not scaler.found_inf
        scaler.update()
        assert cupy.waits == waits + 1


def test_another_device_than_the_current_one(cupy):
    with cupy.cuda.Device(1):
        x = cupy.asarray(np.float32([3, np.nan]))
    scaler = amp.LossScaler(3.0)
    (found,) = scaler.unscale([x])
    assert found.device.id == 1
    assert scaler.found_inf
    np.testing.assert_array_equal(cupy.asnumpy(found), np.float32([1, np.nan]))
