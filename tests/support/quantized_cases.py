"""Random products of modes that quantise, for the backends, and the bound that each element of a result is within."""

import ml_dtypes
import numpy as np


def close(found, exact, a, b, units=0.0):
    """Whether each element is within FP32's bound, k 2^-23 |a| |b|, and that of the units."""
    error = (a.shape[-1] + 8) * 2.0**-23 + units
    return bool(
        (np.abs(found.astype(float) - exact) <= error * (np.matmul(np.abs(a), np.abs(b)) + 3)).all()
    )


def _stored(rng, x):
    """Return an array with the same numbers or some of them, in another layout."""
    kind = rng.integers(5)
    if kind == 1 and x.ndim > 1:
        return np.ascontiguousarray(x.swapaxes(-1, -2)).swapaxes(-1, -2)
    if kind == 2:
        return np.repeat(x, 2, -1)[..., ::2]
    if kind == 3 and x.ndim > 2 and x.shape[0]:
        return np.broadcast_to(x[:1], x.shape)
    return x[..., ::-1] if kind == 4 else x


def products(rounded, count):
    """Yield a, b, keywords of a product, its exact result, and the numbers that ``rounded`` makes of a and b."""
    rng = np.random.default_rng(7)
    for _ in range(count):
        k, (m, n) = int(rng.choice([0, 1, 3, 32, 100, 128, 129, 300])), rng.integers(0, 20, 2)
        if rng.random() < 0.3:  # extents that FP8 units multiply with scales of blocks
            m, n = int(rng.choice([16, 32, 144])), int(rng.choice([1, 20, 150]))
        batch = tuple(int(x) for x in rng.choice([1, 2, 3], rng.integers(0, 3)))
        of_b = tuple(int(1 if rng.random() < 0.5 else x) for x in batch)
        dtype = np.dtype(
            getattr(ml_dtypes, x := str(rng.choice(["float32", "float16", "bfloat16"])), x)
        )
        a = _stored(
            rng, rng.standard_normal((*batch, m, k) if rng.random() < 0.9 else k).astype(dtype)
        )
        b = _stored(
            rng, rng.standard_normal((*of_b, k, n) if rng.random() < 0.9 else k).astype(dtype)
        )
        x, y = rounded(a, b)
        given = {"alpha": float(rng.choice([0.0, 2.0, -0.5])), "out_dtype": "float32"}
        exact = np.matmul(x, y) * given["alpha"]
        if rng.random() < 0.4:
            rows = exact.shape[:-2] + (1,) * (exact.ndim > 1) + exact.shape[-1:]
            given["c"] = rng.standard_normal(exact.shape if rng.random() < 0.6 else rows).astype(
                np.float32
            )
            given["beta"], exact = 0.5, exact + 0.5 * given["c"]
        if rng.random() < 0.4 and b.ndim > 1:
            given["bias"] = rng.standard_normal(n).astype(dtype)
            exact = exact + given["bias"].astype(float)
        if rng.random() < 0.4:
            given["activation"], exact = "relu", np.maximum(exact, 0)
        yield a, b, given, exact, x, y
