#!/usr/bin/env bash
# From a clone of lowprec to the report of a model in NVFP4.
# usage: bash first_model.sh REPOSITORY, in an empty folder, with PyTorch installed
set -euo pipefail

git clone -q "$1" lowprec
(cd lowprec && pip install -q .)

# Any script: it does not know of lowprec.
cat >train.py <<'END'
import torch
from torch import nn

torch.manual_seed(0)
layers = nn.Linear(16, 128), nn.GELU(), nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 1)
model = nn.Sequential(*layers)
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
for step in range(1, 101):
    x = torch.randn(256, 16)
    loss = (model(x) - torch.sin(x[:, :4].sum(1, keepdim=True))).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    if step % 25 == 0:
        print(f"step {step} loss {loss.item():.4f}")
END

lowprec run --mode nvfp4 --against fp32 train.py
