#!/usr/bin/env bash
# From a clone of lowprec to the report of a model of one's own in NVFP4.
# usage: bash first_model.sh REPOSITORY, in an empty folder, with PyTorch installed
set -euo pipefail

git clone -q "$1" lowprec
(cd lowprec && pip install -q .)

# Any script: it does not know of lowprec.
cat >model.py <<'END'
import torch
from torch import nn

torch.manual_seed(0)
layers = nn.Linear(16, 256), nn.GELU(), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 1)
model = nn.Sequential(*layers)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
for _ in range(300):
    x = torch.randn(256, 16)
    loss = (model(x) - torch.sin(x[:, :4].sum(1, keepdim=True))).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print(f"loss {loss.item():.4f}")
END

python model.py
lowprec run --mode nvfp4 --intercept model.py
