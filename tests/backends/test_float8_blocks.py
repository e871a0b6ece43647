"""Products with float32 scales of blocks: a kernel adds the pieces of k, with the bits of those added one by one."""

import numpy as np
import pytest

import lowprec
from lowprec import Recipe

#: At most so many rows are added piece by piece, by the same order of sums.
ROWS = 16
MODES = [
    Recipe("fp8_blocks"), Recipe("fp8_blocks").of("grad_weight"), Recipe("fp8_blocks", scale_rule="rceil"),
    lowprec.Format(5, 2, block=128),
]  # fmt: skip


def by_rows(a, b, mode, **arguments):
    """The product of 16 rows at a time; `c` and `out` have all rows."""
    c = arguments.pop("c", None)
    found = []
    for i in range(0, len(a), ROWS):
        rows = slice(i, i + ROWS)
        of_rows = {} if c is None else {"c": c[rows]}
        found.append(lowprec.matmul(a[rows], b, math_mode=mode, **arguments, **of_rows))
    return np.concatenate(found)


@pytest.mark.parametrize(
    "shape",
    [(17, 17, 256), (64, 96, 384), (200, 300, 1000), (33, 515, 129), (50, 40, 2100)],
    ids=str,
)
@pytest.mark.parametrize("mode", MODES, ids=str)
def test_the_bits_are_those_of_pieces_one_by_one(mode, shape, rng):
    m, n, k = shape
    a = (rng.standard_normal((m, k)) * 2.0 ** rng.integers(-5, 5, (m, 1))).astype(np.float32)
    b, c = rng.standard_normal((k, n), np.float32), rng.standard_normal((m, n), np.float32)
    a[3, 5], b[7, 2] = np.nan, np.inf
    for arguments in (
        {}, {"alpha": 0.7, "beta": 0.3, "c": c, "bias": c[0], "activation": "gelu"}, {"out_dtype": "bfloat16"},
    ):  # fmt: skip
        expected = by_rows(a, b, mode, **arguments)
        found = lowprec.matmul(a, b, math_mode=mode, **arguments)
        np.testing.assert_array_equal(found.astype(np.float32), expected.astype(np.float32))
    x, y = np.asfortranarray(a), lowprec.prepare(b)
    out = np.empty((n, m), np.float32).T
    np.testing.assert_array_equal(
        lowprec.matmul(x, y, math_mode=mode, out=out), by_rows(a, b, mode)
    )


def test_batches(rng):
    a, b = (
        rng.standard_normal((3, 40, 300), np.float32),
        rng.standard_normal((3, 300, 50), np.float32),
    )
    for x, y in ((a, b), (a, b[0]), (a[0], b), (a.swapaxes(0, 1).copy().swapaxes(0, 1), b)):
        found = lowprec.matmul(x, y, math_mode="fp8_blocks")
        x, y = np.broadcast_to(x, (3, 40, 300)), np.broadcast_to(y, (3, 300, 50))
        for i in range(3):
            np.testing.assert_array_equal(found[i], by_rows(x[i], y[i], "fp8_blocks"))
