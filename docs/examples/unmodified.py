"""A small transformer in plain PyTorch, which contains nothing of lowprec.

usage: lowprec run --mode bf16 --intercept docs/examples/unmodified.py [--steps N]

Started like this, every product of it, forward and backward, goes through lowprec in that mode; `--profile` prints a
table of them. Started by `python` it is PyTorch's own.
"""

from __future__ import annotations

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn


class Classifier(nn.Module):
    """From pictures, shape (batch, 8, 8), to ten scores, by PyTorch's own encoder."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.embed = nn.Linear(8, width)
        layer = nn.TransformerEncoderLayer(
            width, nhead=4, dim_feedforward=64, dropout=0.0, batch_first=True
        )
        self.encoder = nn.TransformerEncoder(layer, num_layers=1)
        self.score = nn.Linear(8 * width, 10)

    def forward(self, pictures: torch.Tensor) -> torch.Tensor:
        """Return the scores."""
        return self.score(self.encoder(self.embed(pictures)).flatten(1))


def main() -> None:
    """Train and print how many unseen digits are recognised."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=300, help="batches of 64 pictures")
    options = parser.parse_args()

    torch.manual_seed(0)
    digits = load_digits()
    pictures = torch.tensor(digits.images, dtype=torch.float32) / 16
    labels = torch.tensor(digits.target)
    order = torch.randperm(len(labels))
    test, train = order[:360], order[360:]

    model = Classifier()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(options.steps):
        batch = train[torch.randint(len(train), (64,))]
        loss = nn.functional.cross_entropy(model(pictures[batch]), labels[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    model.eval()
    with torch.inference_mode():
        right = (model(pictures[test]).argmax(dim=1) == labels[test]).float().mean()
    print(f"{100 * right:.1f} % of {len(test)} unseen digits recognised")


if __name__ == "__main__":
    main()
