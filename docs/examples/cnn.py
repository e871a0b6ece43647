"""A convolutional network for handwritten digits, trained in FP32 and evaluated in narrow formats.

usage: python docs/examples/cnn.py [--steps N]

The network is plain PyTorch. The last column has the products that lowprec left to PyTorch, which stay in FP32. It
needs scikit-learn, which contains the digits.
"""

from __future__ import annotations

import argparse

import torch
from sklearn.datasets import load_digits
from torch import nn

import lowprec

MODES = ("bf16", "fp8", "mxfp8", "int8", "mxfp4", "nvfp4")


def network() -> nn.Module:
    """Return a network of two convolutions and two linear layers, for pictures of 8 x 8."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(512, 128),
        nn.ReLU(),
        nn.Linear(128, 10),
    )


def trained(pictures: torch.Tensor, digits: torch.Tensor, steps: int) -> nn.Module:
    """Return the network after this many steps of 64 pictures."""
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    for _ in range(steps):
        batch = torch.randint(len(pictures), (64,))
        loss = nn.functional.cross_entropy(model(pictures[batch]), digits[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.eval()


def main() -> None:
    """Print the accuracy and the change of the scores in each mode."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=300, help="batches of 64 pictures")
    options = parser.parse_args()
    torch.manual_seed(0)
    data = load_digits()
    pictures = torch.tensor(data.images, dtype=torch.float32)[:, None] / 16
    digits = torch.tensor(data.target)
    order = torch.randperm(len(digits))
    test, train = order[:360], order[360:]
    model = trained(pictures[train], digits[train], options.steps)
    with torch.inference_mode():
        exact = model(pictures[test])
        print(f"{'mode':6} {'right':>7} {'scores change by':>17}  left to PyTorch")
        print(f"{'fp32':6} {accuracy(exact, digits[test]):>7} {'-':>17}  everything")
        for mode in MODES:
            with lowprec.torch.intercept(mode) as seen:
                scores = model(pictures[test])
            change = torch.linalg.norm(scores - exact) / torch.linalg.norm(exact)
            left = ", ".join(
                sorted({f"{p.operator} of {p.layer or 'no layer'}" for p in seen.report().passed})
            )
            right = accuracy(scores, digits[test])
            print(f"{mode:6} {right:>7} {100 * change:>15.1f} %  {left or 'nothing'}")


def accuracy(scores: torch.Tensor, digits: torch.Tensor) -> str:
    """Return the share of digits that have the highest score."""
    return f"{100 * (scores.argmax(1) == digits).float().mean():.1f} %"


if __name__ == "__main__":
    main()
