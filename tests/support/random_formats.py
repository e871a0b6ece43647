"""Random `lowprec.Format` values of all fields, and numbers for their blocks."""

import numpy as np

import lowprec
from lowprec import Format
from support.format_twin import SCALES, magnitudes

BLOCKS = [
    ("tensor", "float32"), ("rows", "float32"), (32, "e8m0"), (16, "e4m3"), (64, "float32"), (16, "e5m3"), (32, "e4m3"),
]  # fmt: skip


def random_format(rng):
    """Return a format of at most 8 bits, of any special values, bias, block and scale."""
    while True:
        exponent, mantissa = int(rng.integers(1, 8)), int(rng.integers(0, 7))
        specials = [None, "none", "nan", "ieee", "fnuz", "p3109"][rng.integers(6)]
        bias = None if rng.random() < 0.5 else int(rng.integers(-8, 20))
        block, scale = BLOCKS[rng.integers(len(BLOCKS))]
        outer = "rows" if scale in SCALES and rng.random() < 0.4 else "tensor"
        peaks = ()
        try:
            if scale in SCALES and rng.random() < 0.4:
                numbers = magnitudes(Format(exponent, mantissa, specials, bias))
                drawn = rng.choice(
                    len(numbers), min(len(numbers) - 1, int(rng.integers(1, 4))), False
                )
                peaks = tuple(float(numbers[i]) for i in sorted(drawn, reverse=True))
            return Format(exponent, mantissa, specials, bias, block, scale, outer, peaks)
        except lowprec.ModeError:
            continue


def blocks(rng, fmt, count):
    """Return numbers of all magnitudes: some vectors along k with about so many blocks in all."""
    length = fmt.block if isinstance(fmt.block, int) else 32
    x = rng.standard_normal((max(count // 3, 1), 3 * length - 5)) * 2.0 ** rng.uniform(
        -24, 24, (max(count // 3, 1), 1)
    )
    x *= 2.0 ** rng.integers(-9, 1, x.shape)
    x[rng.random(len(x)) < 0.05, :length] = 0
    return x.astype(np.float32)
