"""What cuBLASLt takes by extents: TF32 on tensor cores, int8 with few rows, c and d with two descriptors."""

from __future__ import annotations

from itertools import product

import numpy as np

from gpu import libraries
from gpu.parts import Options, Part
from gpu.raw import LtProduct, told

#: (m, n, k): on Hopper TF32 was seen from m = 16 and min(n, k) = 512 on; the last ones differ in n and k.
_ROWS, _SIDES = (1, 8, 16, 32, 64, 128, 256, 512), (64, 128, 256, 512, 1024)
TF32 = (
    *((m, side, side) for side, m in product(_SIDES, _ROWS)),
    *((m, n, k) for m in (16, 512) for n, k in ((256, 1024), (1024, 256), (16, 512), (512, 16))),
)
#: PyTorch pads int8 operands of up to 16 rows to 32.
INT8_ROWS = (1, 2, 4, 8, 12, 16, 17, 20, 24, 31, 32, 48, 64)
_INT8_SIDE = 256
#: Element type of operands, and of c and d.
IN_PLACE = (("float32", "float32"), ("bfloat16", "float32"), ("bfloat16", "bfloat16"))
_SIDE = 512


def run(part: Part, options: Options) -> None:
    """Ask all three questions."""
    step = 8 if options.quick else 1
    for extents in part.in_time(TF32[::-step], options):
        _tf32(part, *extents)
    for m in part.in_time(INT8_ROWS[::step], options):
        _int8(part, m, options.seed)
    for (dtype, out), two in part.in_time(product(IN_PLACE, (False, True)), options):
        _in_place(part, dtype, out, two, options.seed)


def _tf32(part: Part, m: int, n: int, k: int) -> None:
    """Ask which units the first choice runs on; nothing is multiplied."""
    words = {"question": "TF32 by extents", "m": m, "n": n, "k": k}
    with part.attempt(ok=None, **words):
        a, b = np.zeros((m, k), np.float32), np.zeros((k, n), np.float32)
        offered = LtProduct(a, b, compute="COMPUTE_32F_FAST_TF32").algorithms(1)
        part.row(**words, taken=bool(offered), **(told(offered[0]) if offered else {}))


def _int8(part: Part, m: int, seed: int) -> None:
    """Ask whether there is an algorithm, and whether what it computes is right."""
    words = {"question": "int8 by rows", "m": m, "n": _INT8_SIDE, "k": _INT8_SIDE}
    with part.attempt(ok=None, **words):
        rng = np.random.default_rng(seed)
        a, b = (rng.integers(-128, 128, (x, _INT8_SIDE), np.int8) for x in (m, _INT8_SIDE))
        asked = {"compute": "COMPUTE_32I", "out_dtype": "int32", "scale_dtype": "int32"}
        bare = LtProduct(a, b, **asked, inner_contiguous=True)
        offered = bare.algorithms(1)
        if not offered:
            part.row(**words, taken=False)
            return
        right = np.array_equal(bare.run(offered[0]), a.astype(np.int32) @ b.astype(np.int32))
        part.row(ok=bool(right), **words, taken=True, **told(offered[0]))


def _in_place(part: Part, dtype: str, out: str, two: bool, seed: int) -> None:
    """Ask whether d may lie where c does, described by one descriptor or by two."""
    words = {"question": "c in the place of d", "dtype": dtype, "out_dtype": out, "descriptors": 1 + two}
    # One descriptor is what lowprec passes, so that it must be taken.
    with part.attempt(ok=None if two else False, **words):
        rng = np.random.default_rng(seed)
        kind, wide = libraries.numpy_dtype(dtype), libraries.numpy_dtype(out)
        # Small whole numbers: every sum is exact.
        a, b, c = (rng.integers(-1, 2, (_SIDE, _SIDE)) for _ in range(3))
        bare = LtProduct(a.astype(kind), b.astype(kind), out_dtype=out, two_layouts=two)
        (algorithm,) = bare.algorithms(1)
        result = bare.run_in_place(algorithm, c.astype(wide)).astype(np.float64)
        part.row(ok=bool(np.array_equal(result, a @ b + c)), **words, **told(algorithm))
