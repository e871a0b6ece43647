"""A transformer block that learns handwritten digits, its products by lowprec, forward and backward.

usage: python docs/examples/transformer_torch.py [--steps N] [--mode MODE] [--backward-mode MODE]

The digits are those of scikit-learn: 1797 pictures of 8 x 8. Each row of a picture is a token.
"""

from __future__ import annotations

import argparse

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn

import lowprec
import lowprec.torch


class Block(nn.Module):
    """Attention and a small network, each with what came in added."""

    def __init__(self, width: int, heads: int, **modes: str | None) -> None:
        super().__init__()
        self.heads = heads
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        linear = lowprec.torch.Linear
        self.inward = linear(width, 3 * width, **modes)
        self.outward = linear(width, width, **modes)
        self.hidden = linear(width, 2 * width, **modes)
        self.back = linear(2 * width, width, **modes)

    def attention(self, x: Tensor) -> Tensor:
        """Return what the tokens, shape (batch, token, width), hear of each other."""
        batch, tokens, width = x.shape
        q, k, v = (
            part.view(batch, tokens, self.heads, -1).transpose(1, 2)
            for part in self.inward(x).chunk(3, dim=-1)
        )
        weights = lowprec.matmul(q, k.mT, alpha=q.shape[-1] ** -0.5).softmax(dim=-1)
        heard = lowprec.matmul(weights, v)
        return self.outward(heard.transpose(1, 2).reshape(batch, tokens, width))

    def forward(self, x: Tensor) -> Tensor:
        """Return the tokens after the block."""
        x = x + self.attention(self.norms[0](x))
        return x + self.back(nn.functional.gelu(self.hidden(self.norms[1](x))))


class Classifier(nn.Module):
    """From pictures, shape (batch, 8, 8), to ten scores."""

    def __init__(self, width: int = 32, **modes: str | None) -> None:
        super().__init__()
        self.embed = lowprec.torch.Linear(8, width, **modes)
        self.place = nn.Parameter(torch.zeros(8, width))
        self.block = Block(width, 4, **modes)
        self.score = lowprec.torch.Linear(width, 10, **modes)

    def forward(self, pictures: Tensor) -> Tensor:
        """Return the scores."""
        return self.score(self.block(self.embed(pictures) + self.place).mean(dim=1))


def main() -> None:
    """Train and print how many unseen digits are recognised."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=600, help="batches of 64 pictures")
    parser.add_argument("--mode", default="bf16", help="math mode of the forward pass")
    parser.add_argument("--backward-mode", help="of the backward pass; that of the forward pass")
    options = parser.parse_args()

    torch.manual_seed(0)
    digits = load_digits()
    pictures = torch.tensor(digits.images, dtype=torch.float32) / 16
    labels = torch.tensor(digits.target)
    order = torch.randperm(len(labels))
    test, train = order[:360], order[360:]

    model = Classifier(backward_mode=options.backward_mode)
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    with lowprec.math_mode(options.mode):
        for step in range(options.steps):
            batch = train[torch.randint(len(train), (64,))]
            loss = nn.functional.cross_entropy(model(pictures[batch]), labels[batch])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if step % 100 == 0:
                print(f"step {step}: loss {loss.item():.3f}")
        with torch.no_grad():
            right = (model(pictures[test]).argmax(dim=1) == labels[test]).float().mean()
    print(f"{options.mode}: {100 * right:.1f} % of {len(test)} unseen digits recognised")


if __name__ == "__main__":
    main()
