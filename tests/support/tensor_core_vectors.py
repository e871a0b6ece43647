"""Dot products read off real tensor cores: a sample that is always there, and more of them where they are at hand."""

import os
from pathlib import Path
from typing import NamedTuple

import numpy as np

_SAMPLE = Path(__file__).parents[1] / "data" / "tensor_cores" / "sample.txt"
_NAME = "tensor_core_vectors.npz"

#: Reason of a skip, by the beginning of which `.ci/check_skips.py` knows it.
ABSENT = "the vectors of real tensor cores are not next to this checkout"

#: By the names in the data: the architecture of each GPU, and the format.
ARCHITECTURES = {
    "V100": "volta", "A100": "ampere", "H200": "hopper", "H100": "hopper", "L40S": "ada", "B200": "blackwell",
}  # fmt: skip
FORMATS = {
    "fp16": "float16",
    "bf16": "bfloat16",
    "tf32": "tf32",
    "E4M3": "float8_e4m3fn",
    "E5M2": "float8_e5m2",
}
SETS = [
    ("V100", "fp16"),
    *((gpu, fmt) for gpu in ("A100", "H200") for fmt in ("fp16", "bf16", "tf32")),
]
#: Those that are not in the sample.
NARROW_SETS = [(gpu, fmt) for gpu in ("H100", "L40S", "B200") for fmt in ("E4M3", "E5M2")]


class Vectors(NamedTuple):
    """One dot product a row: ``d = c + sum(a * b)``, float32; a and b of shape (rows, k), c and d of shape (rows,)."""

    a: np.ndarray
    b: np.ndarray
    c: np.ndarray
    d: np.ndarray


def sample(gpu, fmt):
    """Return the committed vectors of a GPU and a format."""
    wanted = f"{gpu} {fmt}"
    rows = [line.split(" | ") for line in _SAMPLE.read_text().splitlines()]
    found = [row[1:] for row in rows if row[0] == wanted]
    a, b, c, d = (
        np.array([[int(word, 16) for word in row[i].split()] for row in found], np.uint32).view(
            np.float32
        )
        for i in range(4)
    )
    return Vectors(a, b, c[:, 0], d[:, 0])


def full(gpu, fmt):
    """Return all vectors of a GPU and a format; None where they are not at hand."""
    beside_checkout = Path(__file__).resolve().parents[3] / "shared" / "hardware-vectors"
    path = Path(os.environ.get("LOWPREC_TEST_VECTORS") or beside_checkout) / _NAME
    if not path.is_file():
        return None
    with np.load(path) as data:
        found = Vectors(*(data[f"{gpu}_{fmt}_{x}"].view(np.float32) for x in "abcd"))
    # The results of H100 do not contain c.
    return found._replace(c=0 * found.c) if gpu == "H100" else found
