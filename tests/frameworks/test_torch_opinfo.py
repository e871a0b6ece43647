"""PyTorch's own samples of its operators do the same inside the block, but for what the mode rounds."""

import subprocess
import sys
from pathlib import Path

import pytest

#: Importing PyTorch's tests changes settings of the process.
PROGRAM = Path(__file__).with_name("torch_opinfo.py")


@pytest.mark.sweep
@pytest.mark.usefixtures("torch")
@pytest.mark.parametrize(
    ("dtypes", "least"),
    [
        ("float32 complex64", 10_000),
        ("float16 bfloat16", 5_000),
        ("float64 complex128 int64 int32 uint8 bool", 15_000),
    ],
)
def test_operators_do_what_pytorchs_do(dtypes, least):
    command = [sys.executable, "-W", "ignore", str(PROGRAM), *dtypes.split()]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=1200)
    assert done.returncode == 0, done.stderr[-2000:]
    *differences, compared = done.stdout.splitlines()
    assert not differences, "\n".join(differences)
    assert int(compared) > least
