"""Two processes that share tensors: DTensor, tensor parallel layers, FSDP and DDP."""

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("torch_ranks.py")


@pytest.mark.sweep
def test_products_of_two_ranks(torch, tmp_path):
    if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
        pytest.skip("this PyTorch was built without gloo")
    meeting = str(tmp_path / "meeting")
    ranks = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", str(PROGRAM), str(rank), meeting],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        seen = [rank.communicate(timeout=180) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    for rank, (out, err) in zip(ranks, seen, strict=True):
        assert rank.returncode == 0, err
        assert len(out.split()) == 6, out
