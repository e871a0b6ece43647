"""Scales of blocks in the software cuBLASLt: the tiles of the documentation, and what is refused."""

from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest

from software_cuda import DeviceModel, Software
from software_cuda.asking import LEGACY, Asked, prepared
from software_cuda.tables import (
    BLOCKS,
    DTYPES,
    OUTER_VEC_32F,
    R_4F_E2M1,
    R_8F_E4M3,
    R_16BF,
    VEC16_UE4M3,
    VEC32_UE8M0,
    VEC128_32F,
    BLK128x128_32F,
)

INVALID_VALUE, NOT_SUPPORTED = 7, 15
MXFP8 = Asked(m=144, n=40, k=160, op_a=1, a=R_8F_E4M3, b=R_8F_E4M3)
NVFP4 = replace(MXFP8, a=R_4F_E2M1, b=R_4F_E2M1)
MODES = {R_8F_E4M3: VEC32_UE8M0, R_4F_E2M1: VEC16_UE4M3}


@contextmanager
def block_scaled(cuda, asked, a_scale, b_scale, **changes):
    mode = MODES.get(asked.a, VEC32_UE8M0)
    with prepared(cuda, asked) as product:
        scales = {"A_SCALE_MODE": mode, "B_SCALE_MODE": mode, "A_SCALE_POINTER": a_scale, "B_SCALE_POINTER": b_scale}
        product.describe(**{**scales, **changes})
        yield product


def put(cuda, values):
    address = int(cuda.runtime.cudaMalloc(values.nbytes)[1])
    cuda.runtime.memory.at(address, values.nbytes, None, "test")[:] = values.reshape(-1).view(np.uint8)
    return address


def tiled(scales):
    """The documentation's pseudocode, scale by scale."""
    outer, inner = scales.shape
    width = -(-inner // 4) * 4
    memory = np.zeros(-(-outer // 128) * 128 * width, np.uint8)
    for row in range(outer):
        for column in range(inner):
            tile = (column // 4 * 4 + row // 128 * width) * 128
            memory[tile + row % 32 * 16 + row % 128 // 32 * 4 + column % 4] = scales[row, column]
    return memory


def operand(rng, rows, k, data_type):
    """Codes as they are in memory, scales, and the numbers that both stand for."""
    block, scale_dtype = BLOCKS[MODES[data_type]]
    codes = rng.integers(0, 16, (rows, k), np.uint8)
    memory = codes[:, ::2] | codes[:, 1::2] << 4
    if data_type == R_8F_E4M3:
        memory = codes = rng.permuted(np.resize(np.delete(np.arange(256, dtype=np.uint8), [0x7F, 0xFF]), (rows, k)))
    scales = rng.integers(120, 132, (rows, k // block), np.uint8)
    if data_type == R_4F_E2M1:
        scales = rng.integers(0x20, 0x48, (rows, k // block), np.uint8)
    values = codes.view(DTYPES[data_type]).astype(np.float64)
    return memory, scales, values * np.repeat(scales.view(scale_dtype).astype(np.float64), block, 1)


@pytest.fixture
def blackwell():
    cuda = Software([DeviceModel(capability=(10, 0))])
    yield cuda
    cuda.drain()
    assert cuda.faults == []


@pytest.mark.parametrize("asked", [MXFP8, NVFP4], ids=["mxfp8", "nvfp4"])
def test_products(blackwell, asked):
    rng = np.random.default_rng(4)
    (a, a_scales, left), (b, b_scales, right) = (operand(rng, rows, asked.k, asked.a) for rows in (asked.m, asked.n))
    found = np.zeros((asked.n, asked.m), np.float32)
    data = [put(blackwell, x) for x in (a, b, found, found)]
    scales = [put(blackwell, tiled(x)) for x in (a_scales, b_scales)]
    with block_scaled(blackwell, asked, *scales) as product:
        algorithm = next(x for x in product.search() if not x[1])
        product.run(algorithm, tuple(data))
        assert blackwell.runtime.cudaStreamSynchronize(LEGACY)[0] == 0, blackwell.faults
    memory = blackwell.runtime.memory.at(data[3], found.nbytes, None, "test")
    # Sums in float64, rounded once.
    np.testing.assert_allclose(memory.view(np.float32).reshape(found.shape), right @ left.T, 2.0**-24, 2.0**-149)


def test_scales_beyond_the_operand_are_zero(blackwell):
    data = [put(blackwell, np.zeros(1 << 16, np.uint8)) for _ in range(4)]
    scales = np.zeros(2 * 512, np.uint8)
    scales[-1] = 1
    with block_scaled(blackwell, MXFP8, data[3], put(blackwell, scales)) as product:
        algorithm = next(x for x in product.search() if not x[1])
        product.run(algorithm, tuple(data))
        blackwell.runtime.cudaStreamSynchronize(LEGACY)
    assert "scales beyond the operand" in blackwell.faults.pop()  # b has 40 rows, and its tile 128
    blackwell.forgive()


PAIRS = [
    (OUTER_VEC_32F, OUTER_VEC_32F), (VEC128_32F, VEC128_32F),
    (VEC128_32F, BLK128x128_32F), (BLK128x128_32F, VEC128_32F),
]  # fmt: skip


def float_scales(rng, mode, rows, k):
    """Return float32 scales as they are in memory, the documentation's shapes, and a factor for each element."""
    blocks = -(-k // 128)
    scales = rng.standard_normal((rows, 1 if mode == OUTER_VEC_32F else blocks)).astype(np.float32)
    factors = scales.astype(np.float64)
    if mode == OUTER_VEC_32F:
        return scales, np.broadcast_to(factors, (rows, k))
    if mode == VEC128_32F:
        return np.ascontiguousarray(scales.T), factors[:, np.arange(k) // 128]
    memory = np.full((-(-rows // 128), -(-blocks // 4) * 4), np.nan, np.float32)
    memory[:, :blocks] = scales[: len(memory)]
    return memory, factors[np.arange(rows)[:, None] // 128, np.arange(k) // 128]


@pytest.mark.parametrize("modes", PAIRS, ids=str)
def test_products_with_float32_scales(modes):
    cuda, rng = Software([DeviceModel(capability=(9, 0))]), np.random.default_rng(5)
    (a, _, left), (b, _, right) = (operand(rng, rows, MXFP8.k, MXFP8.a) for rows in (MXFP8.m, MXFP8.n))
    left, right = (x.view(DTYPES[R_8F_E4M3]).astype(np.float64) for x in (a, b))
    scales = [float_scales(rng, mode, rows, MXFP8.k) for mode, rows in zip(modes, (MXFP8.m, MXFP8.n), strict=True)]
    found = np.zeros((MXFP8.n, MXFP8.m), np.float32)
    data, pointers = [put(cuda, x) for x in (a, b, found, found)], [put(cuda, x) for x, _ in scales]
    changes = {"A_SCALE_MODE": modes[0], "B_SCALE_MODE": modes[1]}
    with block_scaled(cuda, MXFP8, *pointers, **changes) as product:
        algorithm = next(x for x in product.search() if not x[1])
        product.run(algorithm, tuple(data))
        assert cuda.runtime.cudaStreamSynchronize(LEGACY)[0] == 0, cuda.faults
    memory = cuda.runtime.memory.at(data[3], found.nbytes, None, "test")
    want = (right * scales[1][1]) @ (left * scales[0][1]).T
    np.testing.assert_allclose(memory.view(np.float32).reshape(found.shape), want, 2.0**-22, 1e-6 * abs(want).max())


VECTORS = {"A_SCALE_MODE": OUTER_VEC_32F, "B_SCALE_MODE": OUTER_VEC_32F}
LINES = {"A_SCALE_MODE": VEC128_32F, "B_SCALE_MODE": VEC128_32F}
REFUSED = [
    (MXFP8, {}, (9, 0), NOT_SUPPORTED, "no scales of blocks on"),
    (NVFP4, {}, (8, 0), NOT_SUPPORTED, "no FP8 on"),
    (MXFP8, {"A_SCALE_MODE": 0}, (10, 0), NOT_SUPPORTED, "scale modes"),
    (NVFP4, {"A_SCALE_MODE": 0, "B_SCALE_MODE": 0}, (10, 0), NOT_SUPPORTED, "scale modes"),
    (MXFP8, VECTORS, (8, 9), NOT_SUPPORTED, "no float32 scales"),
    (MXFP8, {"A_SCALE_MODE": OUTER_VEC_32F, "B_SCALE_MODE": VEC128_32F}, (9, 0), NOT_SUPPORTED, "scale modes"),
    (replace(MXFP8, n=42), LINES, (9, 0), NOT_SUPPORTED, "blocks with"),
    (MXFP8, {**LINES, "A_SCALE_POINTER": 264}, (9, 0), INVALID_VALUE, "scales of vectors or blocks at 0x108"),
    (MXFP8, {"A_SCALE_POINTER": 0}, (10, 0), INVALID_VALUE, "scales of blocks at 0x0"),
    (MXFP8, {"B_SCALE_POINTER": 264}, (10, 0), INVALID_VALUE, "scales of blocks at 0x108"),
    (replace(NVFP4, op_a=0), {}, (10, 0), NOT_SUPPORTED, "are TN"),
    (replace(MXFP8, op_a=0), {}, (12, 0), NOT_SUPPORTED, "are TN"),
    (replace(NVFP4, k=144), {}, (10, 0), NOT_SUPPORTED, "multiples of 16 bytes"),
    (replace(NVFP4, k=144, gap=(16, 16, 0, 0)), {}, (10, 0), NOT_SUPPORTED, "steps of 16 bytes"),
    (Asked(a=R_16BF, b=R_16BF), {}, (10, 0), INVALID_VALUE, "scales only for FP8 and FP4"),
]


@pytest.mark.parametrize(("asked", "changes", "capability", "status", "words"), REFUSED)
def test_products_that_are_refused(asked, changes, capability, status, words):
    cuda = Software([DeviceModel(capability=capability)])
    with block_scaled(cuda, asked, 256, 512, **changes) as product:
        with pytest.raises(cuda.cublas_lt.cuBLASLtError, match=words) as caught:
            product.search()
        assert caught.value.status == status
