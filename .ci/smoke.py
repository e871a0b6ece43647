"""Use an installed wheel: a product in each of three modes, within its bound, the command line, and the description."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib import metadata

import numpy as np

import lowprec
from lowprec.backends.cpu import library

if reason := library.unavailable_reason():
    sys.exit(reason)
rng = np.random.default_rng(0)
a, b = rng.standard_normal((2, 256, 256), dtype=np.float32)
exact = a.astype(np.float64) @ b
for mode in ("fp32", "tf32", "bf16"):
    plan = lowprec.plan(a, b, math_mode=mode)
    error = (
        np.linalg.norm(lowprec.matmul(a, b, math_mode=mode) - exact)
        / np.linalg.norm(a)
        / np.linalg.norm(b)
    )
    if not error <= plan.bound.relative:
        sys.exit(f"{mode}: error {error:.1e} is above the bound {plan.bound.relative:.1e}")
    print(
        f"Python {sys.version.split()[0]}, lowprec {lowprec.__version__}, {mode} by {plan.kernel}: {error:.1e}"
    )
description = (
    metadata.metadata("lowprec")["Description"] or metadata.metadata("lowprec").get_payload()
)
if broken := re.findall(r"\]\((?!https?:)[^)]*\)", description):
    sys.exit(f"links of the description that lead nowhere on a package index: {broken}")
if "# lowprec" not in description:
    sys.exit("the description is not the README")
subprocess.run([sys.executable, "-m", "lowprec", "info"], check=True, stdout=subprocess.DEVNULL)
