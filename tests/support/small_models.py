"""Small models of three kinds, trained a little on scikit-learn's digits, and a way to spoil one of their layers."""

import importlib.util
from pathlib import Path
from types import MappingProxyType

import numpy as np
import torch
from torch import nn
from torch.nn import functional


class Block(nn.Module):
    """Attention and an MLP, each behind a normalisation; the mask is that of GPT-2."""

    def __init__(self, width, causal):
        super().__init__()
        self.causal = causal
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.fc1, self.fc2 = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        q, k, v = (
            t.unflatten(-1, (2, -1)).transpose(1, 2) for t in self.qkv(self.ln_1(x)).chunk(3, -1)
        )
        scores = q @ k.mT / q.shape[-1] ** 0.5
        if self.causal:
            scores = scores + torch.full(scores.shape[-2:], -1e9).triu(1)
        x = x + self.proj((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))
        return x + self.fc2(functional.gelu(self.fc1(self.ln_2(x))))


class GPT2(nn.Module):
    """The digits' pixels as a text of 17 letters."""

    spoiled = "blocks.1.fc1"
    modes = MappingProxyType({"head": "bf16", "*": "nvfp4"})

    def __init__(self, width=32):
        super().__init__()
        self.embed, self.position = (
            nn.Embedding(17, width),
            nn.Parameter(torch.randn(31, width) / 10),
        )
        self.blocks = nn.Sequential(Block(width, True), Block(width, True))
        self.ln, self.head = nn.LayerNorm(width), nn.Linear(width, 17, bias=False)

    def forward(self, x):
        return self.head(self.ln(self.blocks(self.embed(x[:, :31]) + self.position)))

    def loss(self, x, _):
        return functional.cross_entropy(self(x).flatten(0, 1), x[:, 1:32].flatten())

    def spoil(self, column):
        norm = self.blocks[1].ln_2
        _spoil([norm.weight, norm.bias], self.blocks[1].fc1.weight, column)


class ViT(nn.Module):
    """The digits as sixteen patches, by a convolution."""

    spoiled = "blocks.1.fc1"
    modes = MappingProxyType({"head": "bf16", "*": "nvfp4"})

    def __init__(self, width=32):
        super().__init__()
        self.embed, self.position = (
            nn.Conv2d(1, width, 2, 2),
            nn.Parameter(torch.randn(16, width) / 10),
        )
        self.blocks = nn.Sequential(Block(width, False), Block(width, False))
        self.head = nn.Linear(width, 10)

    def forward(self, x):
        patches = self.embed(x.float().reshape(-1, 1, 8, 8) / 16).flatten(2).mT
        return self.head(self.blocks(patches + self.position).mean(1))

    def loss(self, x, y):
        return functional.cross_entropy(self(x), y)

    def spoil(self, column):
        norm = self.blocks[1].ln_2
        _spoil([norm.weight, norm.bias], self.blocks[1].fc1.weight, column)


class LSTM(nn.Module):
    """The digits as eight rows."""

    spoiled = "head"
    modes = "nvfp4"

    def __init__(self, width=32):
        super().__init__()
        self.cell, self.ln, self.head = (
            nn.LSTMCell(8, width),
            nn.LayerNorm(width),
            nn.Linear(width, 10),
        )

    def forward(self, x):
        state = None
        for row in x.float().reshape(-1, 8, 8).unbind(1):
            state = self.cell(row / 16, state)
        return self.head(self.ln(state[0]))

    def loss(self, x, y):
        return functional.cross_entropy(self(x), y)

    def spoil(self, column):
        _spoil([self.ln.weight, self.ln.bias], self.head.weight, column)


def _spoil(parameters, weight, column):
    """Divide a column of a layer's input by 100 and multiply that of the weight: the function stays the same."""
    with torch.no_grad():
        for p in parameters:
            p[column] /= 100
        weight[:, column] *= 100


def digits():
    """Return pixels and classes of digits that scikit-learn ships, without importing it."""
    (folder,) = importlib.util.find_spec("sklearn").submodule_search_locations
    rows = np.loadtxt(
        Path(folder) / "datasets/data/digits.csv.gz", delimiter=",", max_rows=256, dtype=np.int64
    )
    return torch.from_numpy(rows[:, :-1]), torch.from_numpy(rows[:, -1])


def trained(kind):
    """Return a model after some steps of training by the signs of gradients, and a batch."""
    x, y = digits()
    torch.manual_seed(0)
    model = kind()
    parameters = list(model.parameters())
    for step in range(30):
        batch = slice(step % 4 * 64, step % 4 * 64 + 64)
        gradients = torch.autograd.grad(model.loss(x[batch], y[batch]), parameters)
        with torch.no_grad():
            for p, gradient in zip(parameters, gradients, strict=True):
                p -= 3e-3 * gradient.sign()
    return model, x[:32], y[:32]
