"""Prepared operands on a GPU: packed once, on the device, with the bits of the array itself."""

import pickle

import numpy as np
import pytest

import lowprec
from lowprec.modes import available_modes, row
from lowprec.planning import ReasonKind

MODES = [str(mode) for mode in available_modes() if not row(mode).quantizes]


def numbers(dtype, *shape):
    rng = np.random.default_rng(shape[0])
    x = rng.standard_normal(shape)
    return (x + 1j * rng.standard_normal(shape) if dtype == np.complex64 else x).astype(dtype)


def forms(prepared):
    view = prepared._view
    return view.packed


@pytest.mark.feature("prepared operands")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("dtype", [np.float32, np.complex64])
@pytest.mark.sampled(2)
def test_the_bits_of_the_array(gpu, dtype, mode):
    b = numbers(dtype, 50, 24)
    b[3, 5], b[4, 6] = np.nan, np.inf
    for laid in (b, np.asfortranarray(b)):
        y = gpu.put(laid)
        prepared = lowprec.prepare(y, math_mode=mode)
        for m in (9, 33):
            x = gpu.put(numbers(dtype, m, 50))
            want = gpu.get(lowprec.matmul(x, y, math_mode=mode))
            for _ in range(2):
                got = gpu.get(lowprec.matmul(x, prepared, math_mode=mode))
                assert got.tobytes() == want.tobytes()
            plan = lowprec.plan(x, prepared, math_mode=mode)
            assert plan.prepared is not None
            packs = plan.call is not None and plan.call.pack_b is not None
            assert (plan.prepared.kind is ReasonKind.KEPT) == packs == bool(forms(prepared))


@pytest.mark.parametrize("mode", ["bf16", "fp16x3", "bf16x6"])
def test_b_is_packed_once(gpu, mode):
    y = gpu.put(numbers(np.float32, 48, 32))
    prepared = lowprec.prepare(y, math_mode=mode)
    x = gpu.put(numbers(np.float32, 16, 48))
    want = gpu.get(lowprec.matmul(x, prepared, math_mode=mode))
    (form,) = forms(prepared).values()
    _, nbytes = form
    assert prepared.packed_bytes == nbytes > 0
    other = gpu.put(numbers(np.float32, 40, 48))
    lowprec.matmul(other, prepared, math_mode=mode, alpha=0.5)
    assert list(forms(prepared).values()) == [form]
    prepared.release()
    assert prepared.packed_bytes == 0
    assert gpu.get(lowprec.matmul(x, prepared, math_mode=mode)).tobytes() == want.tobytes()


@pytest.mark.parametrize("mode", ["bf16", "fp16x3"])
def test_batches_and_epilogues(gpu, mode):
    for shape_a, shape_b in (
        ((3, 8, 40), (40, 24)),
        ((3, 8, 40), (3, 40, 24)),
        ((8, 40), (3, 40, 24)),
    ):
        x, y = gpu.put(numbers(np.float32, *shape_a)), gpu.put(numbers(np.float32, *shape_b))
        bias = gpu.put(numbers(np.float32, 24))
        prepared = lowprec.prepare(y, math_mode=mode)
        given = {"math_mode": mode, "bias": bias, "alpha": 2.0, "activation": "relu"}
        want = gpu.get(lowprec.matmul(x, y, **given))
        for _ in range(2):
            assert gpu.get(lowprec.matmul(x, prepared, **given)).tobytes() == want.tobytes()
        assert len(forms(prepared)) == 1


def test_the_copy_is_read_in_another_mode(gpu):
    b = numbers(np.float32, 40, 24)
    x, y, unchanged = gpu.put(numbers(np.float32, 8, 40)), gpu.put(b), gpu.put(b)
    prepared = lowprec.prepare(y, math_mode="bf16")
    zeros = gpu.put(np.zeros((40, 8), np.float32))
    lowprec.matmul(zeros, gpu.put(numbers(np.float32, 8, 24)), out=y)  # does not show
    assert not gpu.get(y).any()
    held = prepared.nbytes
    with lowprec.fp32_guard():
        got = gpu.get(lowprec.matmul(x, prepared, math_mode="bf16"))
        plan = lowprec.plan(x, prepared, math_mode="bf16")
    assert got.tobytes() == gpu.get(lowprec.matmul(x, unchanged)).tobytes()
    assert plan.prepared is not None
    assert plan.prepared.kind is ReasonKind.PREPARED_FOR_ANOTHER_MODE
    assert prepared.nbytes == held


def test_wrong_uses(gpu):
    prepared = lowprec.prepare(gpu.put(numbers(np.float32, 40, 24)), math_mode="bf16")
    assert prepared.device.startswith("cuda:")
    with pytest.raises(lowprec.DeviceError, match="a is on cpu and b on cuda:0"):
        lowprec.matmul(numbers(np.float32, 8, 40), prepared)
    with pytest.raises(lowprec.UnsupportedError, match="on cuda:0 cannot be pickled"):
        pickle.dumps(prepared)
