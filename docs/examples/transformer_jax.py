"""A transformer block that learns handwritten digits in JAX, its products by lowprec, forward and backward.

usage: python docs/examples/transformer_jax.py [--steps N] [--mode MODE]

The digits are those of scikit-learn: 1797 pictures of 8 x 8. Each row of a picture is a token. The products are plain
calls of `lowprec.matmul`, inside `jax.jit` and `jax.grad`.
"""

from __future__ import annotations

import argparse
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from sklearn.datasets import load_digits

import lowprec

WIDTH, HEADS = 32, 4
SHAPES = {
    "embed": (8, WIDTH),
    "place": (8, WIDTH),
    "inward": (WIDTH, 3 * WIDTH),
    "outward": (WIDTH, WIDTH),
    "hidden": (WIDTH, 2 * WIDTH),
    "back": (2 * WIDTH, WIDTH),
    "score": (WIDTH, 10),
}

Parameters = dict[str, Any]


def parameters(rng: np.random.Generator) -> Parameters:
    """Return matrices of random numbers of a fitting size."""
    return {
        name: jnp.asarray(rng.standard_normal(shape), jnp.float32) / np.sqrt(shape[0])
        for name, shape in SHAPES.items()
    }


def normal(x: Any) -> Any:
    """Return vectors of mean 0 and variance 1."""
    return (x - x.mean(-1, keepdims=True)) / jnp.sqrt(x.var(-1, keepdims=True) + 1e-5)


def attention(p: Parameters, x: Any) -> Any:
    """Return what the tokens, shape (batch, token, width), hear of each other."""
    batch, tokens, width = x.shape
    q, k, v = (
        part.reshape(batch, tokens, HEADS, -1).swapaxes(1, 2)
        for part in jnp.split(lowprec.matmul(x, p["inward"]), 3, axis=-1)
    )
    weights = jax.nn.softmax(lowprec.matmul(q, k.mT, alpha=q.shape[-1] ** -0.5), axis=-1)
    heard = lowprec.matmul(weights, v).swapaxes(1, 2).reshape(batch, tokens, width)
    return lowprec.matmul(heard, p["outward"])


def scores(p: Parameters, pictures: Any) -> Any:
    """Return ten scores for each picture."""
    x = lowprec.matmul(pictures, p["embed"]) + p["place"]
    x = x + attention(p, normal(x))
    x = x + lowprec.matmul(jax.nn.gelu(lowprec.matmul(normal(x), p["hidden"])), p["back"])
    return lowprec.matmul(x.mean(1), p["score"])


def loss(p: Parameters, pictures: Any, labels: Any) -> Any:
    """Return the mean cross entropy."""
    found = jax.nn.log_softmax(scores(p, pictures))
    return -jnp.take_along_axis(found, labels[:, None], axis=1).mean()


@jax.jit
def step(p: Parameters, moments: Any, count: Any, pictures: Any, labels: Any) -> Any:
    """Return parameters and moments after one step of Adam, and the loss before it."""
    value, gradients = jax.value_and_grad(loss)(p, pictures, labels)
    first = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, moments[0], gradients)
    second = jax.tree.map(lambda m, g: 0.999 * m + 0.001 * g * g, moments[1], gradients)
    rate = 3e-3 * jnp.sqrt(1 - 0.999**count) / (1 - 0.9**count)
    p = jax.tree.map(lambda x, m, v: x - rate * m / (jnp.sqrt(v) + 1e-8), p, first, second)
    return p, (first, second), value


def main() -> None:
    """Train and print how many unseen digits are recognised."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=600, help="batches of 64 pictures")
    parser.add_argument("--mode", default="bf16", help="math mode")
    options = parser.parse_args()

    rng = np.random.default_rng(0)
    digits = load_digits()
    pictures, labels = (digits.images / 16).astype(np.float32), digits.target.astype(np.int32)
    order = rng.permutation(len(labels))
    test, train = order[:360], order[360:]

    p = parameters(rng)
    moments = tuple(jax.tree.map(jnp.zeros_like, p) for _ in range(2))
    with lowprec.math_mode(options.mode):
        for count in range(1, options.steps + 1):
            batch = rng.choice(train, 64)
            p, moments, value = step(p, moments, count, pictures[batch], labels[batch])
            if count % 100 == 1:
                print(f"step {count - 1}: loss {value:.3f}")
        right = np.mean(np.argmax(jax.jit(scores)(p, pictures[test]), axis=1) == labels[test])
    print(f"{options.mode}: {100 * right:.1f} % of {len(test)} unseen digits recognised")


if __name__ == "__main__":
    main()
