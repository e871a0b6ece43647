"""Programs in C++ that tests compile."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def openblas(name):
    """Return the path of the OpenBLAS of NumPy or SciPy."""
    found = importlib.util.find_spec(name)
    folder = Path(found.origin).parent.parent / f"{name}.libs" if found else Path()
    paths = sorted(folder.glob("libscipy_openblas*")) if found else []
    if not paths:
        pytest.skip(f"{name} is not here, or not built with OpenBLAS")
    return paths[0]


def compiled(folder, source, *options, name="program"):
    spec = importlib.util.spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
    builder = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(builder)
    compiler = builder.system_compiler()
    if sys.platform != "linux" or compiler is None:
        pytest.skip("no C++ compiler, or a system whose BLAS calls are not taken")
    path = folder / name
    subprocess.run(
        [*compiler, "-std=c++17", "-O1", str(source), *options, "-o", str(path)], check=True
    )
    return path
